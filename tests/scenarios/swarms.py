"""Small swarms of real processes for the scenarios, and readers of their folders."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from swarm.codecs import allocate, fill
from swarm.config import RunConfig, parse_config
from swarm.emulation.local_swarm import Event, LocalPeer, LocalSwarm, applied, digests_by_height
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.rounds.record_file import RecordFile
from swarm.protocol.messages.events import Record
from swarm.protocol.values.layout import layout_of

ROUND_S = 60.0
"""Generous time limit for a round or two of a swarm on a loaded machine."""

EXACT = """
[run]
name = "exact"
rounds = 3
seed = 7
[model]
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = 32
[data]
sequence_length = 32
validation_bytes = 512
[train]
batch_tokens = 128
micro_batch_sequences = 2
compute = "fp32"
frozen = "fp32"
[optimizer]
lr = 3e-3
warmup_steps = 4
[round]
local_steps = 6
reform_after_s = 45.0
[merging]
alpha = 0.1
top_k = 4
interval_steps = 12
decay_steps = 100
[wire]
shared = "fp32"
experts = "fp32"
part_bytes = 16384
"""
"""Exact mode on a toy model: 3 rounds with a merge after the second."""

NOBODY_LEFT_OUT = ["round.roster_after_s=300.0", "round.reform_after_s=600.0"]
"""For comparisons of bits: rounds must wait for all peers on a busy machine."""


def write_run(folder: Path, overrides: Sequence[str] = (), text: str = EXACT) -> Path:
    """A run file with some settings replaced."""
    run = parse_config(RunConfig, text, source="test", overrides=overrides)
    path = folder / "run.toml"
    path.write_text(_toml(run.model_dump(mode="json", exclude_none=True)))
    return path


def read_run(path: Path) -> RunConfig:
    """The configuration in a run file."""
    return parse_config(RunConfig, path.read_text(), source=str(path))


def run_folder(peer: LocalPeer) -> Path:
    """The folder of the run that a peer is in."""
    return peer.folder / "runs" / (peer.folder / "current_run").read_text().strip()


def peer_id(peer: LocalPeer) -> str:
    """The id of a peer that has started."""
    return next(str(e["peer_id"]) for e in peer.events() if e["event"] == "started")


def read_record(peer: LocalPeer) -> Record:
    """The record on a peer's disk."""
    record = RecordFile(run_folder(peer) / "record").read()
    assert record is not None
    return record


def agreed_state(peer: LocalPeer, run: RunConfig) -> dict[str, Tensor]:
    """Every tensor of a peer's tip, decoded from its blobs."""
    layout, store = layout_of(run), BlobStore(run_folder(peer))
    tensors = allocate(layout.units, layout.shapes)
    for unit in layout.units:
        blob = store.get(read_record(peer).tip.entries[unit.unit].digest)
        assert blob is not None
        fill(tensors, unit, blob)
    return tensors


def rounds(peer: LocalPeer) -> list[Event]:
    """The training rounds that a peer applied, oldest first."""
    return applied(peer.events(), "quorum")


def has_rounds(number: int) -> Callable[[LocalSwarm], bool]:
    """Whether every peer has applied a number of rounds."""
    return lambda swarm: all(
        rounds(peer) and rounds(peer)[-1]["round"] >= number for peer in swarm.peers
    )


def contributes(peer: LocalPeer, *others: LocalPeer) -> Callable[[LocalSwarm], bool]:
    """A check that some round after all those ended by now counts the peer's work."""
    seen = [event["round"] for each in (peer, *others) for event in rounds(each)]
    known = max(seen, default=0)
    return lambda _: any(event["round"] > known and event["counted"] for event in rounds(peer))


@contextmanager
def started_swarm(
    folder: Path,
    num_peers: int,
    settings: Sequence[str] = (),
    *,
    after_rounds: int = 0,
    within_s: float = 2 * ROUND_S,
    **options: Any,
) -> Iterator[LocalSwarm]:
    """A swarm that trains with some settings, and has done some rounds. Ends with the context."""
    with LocalSwarm(folder / "swarm", write_run(folder, settings), num_peers, **options) as swarm:
        swarm.start()
        if after_rounds:
            rounds_done = has_rounds(after_rounds)
            swarm.wait_until(rounds_done, what="its first rounds", timeout_s=within_s)
        yield swarm


def assert_one_chain(swarm: LocalSwarm) -> None:
    """Checks that no two peers have applied different manifests of one height."""
    by_height = digests_by_height([peer.events() for peer in swarm.peers])
    assert {len(digests) for digests in by_height.values()} == {1}


def kill_and_restart(swarm: LocalSwarm) -> None:
    """Kills all peers with -9. They then resume from their disks."""
    swarm.kill()
    for peer in swarm.peers:
        swarm.restart(peer, [])


def restart_all_once_one_died(swarm: LocalSwarm, crash: str = "") -> None:
    """Kills all peers when one has crashed. Then they crash at another point, or no more."""
    swarm.wait_until(
        lambda swarm: any(not peer.alive for peer in swarm.peers), what="a crash", timeout_s=200
    )
    swarm.options = ["--crash", crash] if crash else []
    swarm.program = "tests.scenarios.crashing_peer" if crash else "peers.peer"
    for peer in swarm.peers:
        peer.kill()
    for peer in swarm.peers:
        peer.program = swarm.program
        swarm.restart(peer, [])


def finish(swarm: LocalSwarm, timeout_s: float) -> None:
    """Waits until the run is finished everywhere, then ends the processes."""
    swarm.wait_until(LocalSwarm.finished, what="the run", timeout_s=timeout_s)
    swarm.stop()


def _toml(values: Mapping[str, object]) -> str:
    lines = []
    for section, fields in values.items():
        if isinstance(fields, dict):
            lines.append(f"[{section}]")
            lines += [f"{key} = {_value(value)}" for key, value in fields.items()]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, (list, tuple)) else str(value)
