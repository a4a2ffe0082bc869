"""What concerns one machine only."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from swarm.config.section import NonNegative, Positive, PositiveReal, Section


class PeerSection(Section):
    """This peer's place in the run."""

    name: Annotated[str, Field(max_length=64)] = ""
    """For people only; by default the host's name and the end of the peer id."""
    capacity: PositiveReal = 1.0
    """Relative share of experts that this peer wants to own."""
    data_index: NonNegative | None = None
    """Which stream of the common corpus it trains on; by default from the peer id."""
    wait_for_peers: Positive = 1
    """A founder starts the first round when so many peers are present."""
    linger_s: Annotated[float, Field(ge=0)] = 60.0
    """How long a finished peer goes on serving blobs and records."""
    leave_timeout_s: PositiveReal = 120.0
    """A peer that is asked to leave may finish its round and hand its experts over for so long."""


class NetworkSection(Section):
    """How this peer is reached."""

    initial_peers: tuple[str, ...] = ()
    host_maddrs: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce_maddrs: tuple[str, ...] = ()
    identity_path: str | None = None
    client_mode: bool = False
    """Only dials out: for machines that others cannot dial."""
    relay: bool = True
    """Whether it passes messages and blobs on between peers that cannot dial each other; a peer in
    client mode never does."""


class ComputeSection(Section):
    """What this machine computes with."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: NonNegative = 0
    """CPU threads for the model; 0 leaves the choice to torch."""


class CorpusSection(Section):
    """This machine's text."""

    folder: str | None = None
    """Folder of .txt, .md, .py and .jsonl files; by default the Python standard library."""


class PeerConfig(Section):
    """Everything that concerns this machine only."""

    peer: PeerSection = PeerSection()
    network: NetworkSection = NetworkSection()
    compute: ComputeSection = ComputeSection()
    corpus: CorpusSection = CorpusSection()
