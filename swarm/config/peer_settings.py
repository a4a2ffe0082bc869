"""The settings of one machine."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from swarm.config.section import PRINTABLE, NonNegative, Positive, PositiveReal, Section


class PeerSection(Section):
    """This peer's place in the run."""

    name: Annotated[str, Field(max_length=64, pattern=PRINTABLE)] = ""
    """For people only; by default the host's name and the end of the peer id."""
    capacity: PositiveReal = 1.0
    """Relative share of experts that this peer wants to own."""
    wait_for_peers: Positive = 1
    """A founder starts the first round when this number of peers is present."""
    open_gathering: bool = False
    """A founder counts the peers that come first, strangers included. Each of them votes from the
    start."""
    linger_s: Annotated[float, Field(ge=0)] = 60.0
    """How long a finished peer keeps serving after the last fetch; a day at most."""
    leave_timeout_s: PositiveReal = 120.0
    """A peer that is asked to leave has this time to finish its round and hand its experts over.
    Local steps that need more than half of this time are dropped."""


def _checked_address(text: str, first_port: int, example: str) -> str:
    """The text if it is `/ip4/A.B.C.D/tcp/PORT`, or such an address with ip6 or a name.

    Raises:
        ValueError: the text is no such address.
    """
    problem = _address_problem(text.split("/"), first_port)
    if problem:
        raise ValueError(f"{problem}; an address looks like {example}")
    return text


def _address_problem(parts: list[str], first_port: int) -> str | None:
    if len(parts) != 5 or parts[0] or parts[1] not in HOST_KINDS or parts[3] != "tcp":
        return "it is not a TCP address"
    _, kind, host, _, port = parts
    if not (port.isascii() and port.isdigit() and first_port <= int(port[:6]) < 2**16):
        return f"its port is not a number from {first_port} to {2**16 - 1}"
    try:
        if kind in ("ip4", "ip6"):
            (IPv4Address if kind == "ip4" else IPv6Address)(host)
    except ValueError:
        return f"its host is not an {kind} address"
    return None if host else "it names no host"


HOST_KINDS = ("ip4", "ip6", "dns4", "dns6", "dns")
Listening = Annotated[
    str, AfterValidator(lambda text: _checked_address(text, 0, "/ip4/0.0.0.0/tcp/31330"))
]
"""Where to listen; port 0 takes a free one."""
Announced = Annotated[
    str, AfterValidator(lambda text: _checked_address(text, 1, "/ip4/203.0.113.7/tcp/31330"))
]


Cap = Annotated[float, Field(ge=1, le=1_000_000)]
"""In Mbit/s. Others could not tell a peer that sends below 1 Mbit/s from a dead peer."""


class NetworkSection(Section):
    """How this peer is reached."""

    initial_peers: tuple[str, ...] = ()
    """Addresses of peers to begin with, each with `/p2p/ID` at its end."""
    host_maddrs: tuple[Listening, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Where this peer listens; port 0 takes a free one and keeps it for later starts."""
    announce_maddrs: tuple[Announced, ...] = ()
    """Addresses that others shall dial, if they differ from those where this peer listens."""
    identity_path: str | None = None
    """File of this peer's key; by default in the state directory."""
    client_mode: bool = False
    """Only dials out: for machines that others cannot dial."""
    relay: bool = True
    """Whether this peer passes messages and blobs on between peers that cannot dial each other. A
    peer in client mode never does."""
    direct: bool = True
    """Whether blobs use separate, unencrypted TCP connections where one of two peers can dial the
    other. Otherwise blobs use libp2p's connections, where messages wait behind them."""
    direct_port: Annotated[int, Field(ge=0, lt=65_536)] = 0
    """Port for blobs' own connections. 0 takes the port after that of `host_maddrs`, or a free port
    where `host_maddrs` names none."""
    max_upload_mbit: Cap | None = None
    """Blobs, moments and relayed traffic leave this machine no faster, in Mbit/s. Messages count,
    but never wait, since they are small. Without a limit, a peer uses nine tenths of a thin uplink
    once two measurements of the uplink agree."""
    max_download_mbit: Cap | None = None
    """Blobs, moments and relayed traffic are read no faster, in Mbit/s."""
    data_quota_gb: PositiveReal | None = None
    """Bytes that this peer may move in a calendar month (UTC), in GB (10^9 bytes): both directions
    together, in all runs of its state directory. The peer leaves while enough bytes are left for
    leaving."""


class ComputeSection(Section):
    """Device, engine and types with which this machine computes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one."""
    threads: NonNegative = 0
    """CPU threads for the model; 0 measures at the start which number suits the machine."""
    engine: Literal["auto", "resident", "streaming"] = "auto"
    """resident: everything is on the device. streaming: masters and moments are in host memory, and
    weights come to the device when needed. With `parallel` all GPUs of a machine stream from one
    copy. auto takes the fastest setting of either engine that fits."""
    parallel: Literal["off", "all"] | Annotated[int, Field(gt=0, le=64)] = "off"
    """Processes that compute for this peer, each a share of every step's micro-batches on its own
    GPU: this number of GPUs, or all. With `device = "cpu"` this number of processes runs on the
    CPU. off: the peer's own process computes."""
    expert_parallel: NonNegative = 0
    """Number of these processes that share the experts; tokens travel to their experts. The number
    divides that of the processes. 1: not shared. 0: the fastest by prediction that fits. With
    `pipeline` the processes of each stage share its experts, 0 means 1, and the product of both
    settings divides the number of processes."""
    shard: Literal["auto", "none", "state"] = "auto"
    """Masters and moments of a tensor that several processes hold. state: each keeps a share. none:
    each keeps the whole. auto: a share where the whole does not fit."""
    pipeline: Annotated[int, Field(ge=0, le=64)] = 0
    """Stages of a pipeline, each a process with some of the layers, through which micro-batches
    flow: for GPUs without NVLink. The number divides that of the processes. 1: no pipeline. 0: the
    fastest by prediction that fits."""
    tensor_parallel: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of these processes, on one machine, that share a micro-batch: attention by heads,
    experts by number, all else by tokens. This suits wide layers, long sequences or steps of few
    micro-batches on a fast bus. The number divides the key/value heads and the tokens of a
    sequence. 1: not shared. 0: the fastest by prediction that fits. With `pipeline` each stage is
    cut, and 0 means 1."""
    pipeline_schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """1f1b: a stage begins with backward as soon as it can, so it keeps few micro-batches. gpipe:
    all forward, then all backward; also used with fewer micro-batches than stages. interleaved:
    1f1b with `pipeline_chunks` runs of layers in each process. The processes wait less, send more
    and keep more. With too few layers for the runs, it is 1f1b."""
    pipeline_chunks: Annotated[int, Field(ge=2, le=16)] = 2
    """Runs of layers in each process of an interleaved pipeline."""
    bus: Literal["auto", "nvlink", "pcie"] = "auto"
    """Bus between the GPUs of a machine, for predictions of speed. auto measures a copy between two
    GPUs, and takes pcie on a CPU."""
    between_gbit: PositiveReal = 10.0
    """Rate between this machine and the others that compute for the peer, each way, Gbit/s. Like
    `bus`, it is only used for predictions."""
    remote_workers: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of workers on other machines, where `swarm-worker` runs."""
    workers_from: str = ""
    """HOST:PORT of this machine in a private network, where other machines' workers dial in. Unless
    the host is a public address, machines that dial from a public address are refused."""
    workers_key: str = ""
    """File with the key that workers on other machines must hold. A missing file is made. Empty:
    `workers.key` in the state directory."""
    workers_wait_s: Annotated[float, Field(gt=0, le=86400)] = 600.0
    """How long the peer waits for workers, at the start and after a loss. Then it continues with
    the present workers, if they can share the experts."""
    precision: Literal["run", "fp32", "bf16", "fp16"] = "run"
    """Type of matrix products here. fp16 suits a GPU without bf16 (before Ampere). Such a GPU's
    attention in bf16 would keep a weight for each two tokens of a sequence."""
    frozen: Literal["run", "fp32", "bf16", "int8"] = "run"
    """How this machine stores experts that it does not own."""
    moments: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    """Type of AdamW's moments; auto takes fp32 unless only a smaller type fits."""
    recompute: Literal["auto", "none", "layer", "routing"] = "auto"
    """What the resident engine computes again for backward: nothing, layers, or layers with their
    routing kept."""
    activation_checkpoints: Literal["auto", "device", "host", "host_bf16"] = "auto"
    """Where the streaming engine keeps the inputs of layers until backward."""
    map_frozen: bool = True
    """Whether frozen experts may lie in memory-mapped files where nothing else fits."""
    device_memory_gb: Annotated[float, Field(ge=0)] = 0.0
    """Memory of the GPU that may be used; 0 is all that is free."""
    host_memory_gb: Annotated[float, Field(ge=0)] = 0.0
    """Memory of the machine that may be used; 0 is all of it."""


class CorpusSection(Section):
    """This machine's text."""

    folder: Annotated[str, Field(min_length=1)] | None = None
    """Folder of .txt, .md, .py, .html, .json, .jsonl and .parquet files. Default: the folder that
    the run's text came from before, or else the Python standard library."""
    follow_links: bool = False
    """Whether links to folders, and to files outside of `folder`, are followed."""
    list_skipped: bool = False
    """Whether every file, line and row that is not read is named in the log."""


class PeerConfig(Section):
    """Everything that concerns this machine only."""

    peer: PeerSection = PeerSection()
    network: NetworkSection = NetworkSection()
    compute: ComputeSection = ComputeSection()
    corpus: CorpusSection = CorpusSection()
