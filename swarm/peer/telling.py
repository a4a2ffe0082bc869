"""How decisions of a round are told in a log: few lines, and short names of peers."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from swarm.monitor.causes import Fault, causes_of
from swarm.monitor.snapshot import Sighting, snapshot_of
from swarm.protocol.manifest import Kind, Manifest, PeerId
from swarm.protocol.printable import PEER_ID, ranges
from swarm.protocol.records import PeerRecord

logger = logging.getLogger(__name__)

MAX_LINES = 8
SAID_ROUNDS = 3
"""A fault that comes back within so many rounds is the same one."""
_OF_EXPERT = re.compile(r"expert (\d+): (.*)", re.DOTALL)


def with_short_names(text: str) -> str:
    """The text with the last six characters in place of each peer id."""
    return PEER_ID.sub(lambda found: f"…{found[0][-6:]}", text)


def told(reasons: Sequence[str], *, max_lines: int = MAX_LINES) -> list[str]:
    """Sentences of a manifest as lines of a log.

    Experts of which the same is said share a line; lines beyond the last one are counted.

    Args:
        reasons: of the manifest, such as "expert 3: adopted by PEER, load 1/2".
        max_lines: at least 1.
    """
    said: dict[str, list[int]] = {}
    for reason in map(with_short_names, reasons):
        of_expert = _OF_EXPERT.fullmatch(reason)
        experts = said.setdefault(of_expert[2] if of_expert else reason, [])
        if of_expert:
            experts.append(int(of_expert[1]))
    lines = [f"{_named(experts)}: {what}" if experts else what for what, experts in said.items()]
    if len(lines) <= max_lines:
        return lines
    return [*lines[: max_lines - 1], f"and {len(lines) - max_lines + 1} more such decisions"]


def round_line(
    manifest: Manifest,
    rounds: int,
    *,
    loss: float | None,
    held_out: float | None,
    seconds: float,
    sent_bytes: int,
) -> str:
    """What a person wants to read of an applied manifest, in one line.

    Args:
        manifest: that was applied.
        rounds: of the whole run.
        loss: mean of this peer's local steps, nats per token; None if it took none.
        held_out: newest held-out loss that this peer measured, nats per token.
        seconds: since the manifest before.
        sent_bytes: blobs that this peer has sent in that time.
    """
    if manifest.kind is Kind.MERGE:
        return f"merge after round {manifest.round}: similar experts were merged"
    if manifest.kind is Kind.REFORM:
        return f"a new generation begins after round {manifest.round}: {manifest.generation[:12]}"
    losses = (("loss", loss), ("held-out", held_out))
    shown = [f"{name} {value:.4g}" for name, value in losses if value is not None]
    words = [
        f"round {manifest.round}/{rounds}",
        *shown,
        # Whose work is in it may have left with it.
        f"{len(manifest.contributors)} of {len({*manifest.members, *manifest.contributors})} peers",
        f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s",
        f"{sent_bytes / 1e6:.1f} MB",
    ]
    return "  ".join(words)


def because(reason: str) -> str:
    """` reason='...'` for a line of a log; nothing where no reason is known."""
    return f" reason={with_short_names(reason)!r}" if reason else ""


class OwnCauses:
    """Logs what is wrong with this peer in the monitor's words, once as it begins."""

    def __init__(self, run: str) -> None:
        """Has said nothing yet of this run."""
        self._run = run
        self._others: dict[PeerId, PeerRecord] = {}
        self._said: dict[Fault, int] = {}
        """The round in which each was last there."""
        self._looked = 0
        """The round of the look before; a starved peer passes over many."""

    def note(
        self, present: Mapping[PeerId, PeerRecord], own: PeerRecord, tip: Manifest | None
    ) -> None:
        """Looks as a monitor would that has read these records.

        Args:
            present: records of some peers of the run; those of members are remembered.
            own: this peer's.
            tip: the newest manifest here; without one nothing is said.
        """
        if tip is None:
            return
        # Read minutes ago, they may still miss a peer that was started again since.
        new = {peer: replace(record, link=None) for peer, record in present.items()}
        read = {**self._others, **new}
        self._others = {peer: read[peer] for peer in tip.members if peer in read}
        peers = {**self._others, own.peer_id: own}
        seen = snapshot_of(Sighting(self._run, "", peers, {}, {}, tip))
        for cause in causes_of(seen) if seen else ():
            # A machine that waits for a person has said so (`swarm.network.patience`).
            if cause.peer != own.peer_id or cause.fault is Fault.TROUBLE:
                continue
            last = self._said.get(cause.fault)
            if last is None or (last < self._looked and tip.round - last > SAID_ROUNDS):
                logger.warning("%s", cause.text)
            self._said[cause.fault] = tip.round
        self._looked = tip.round


def _named(experts: Sequence[int]) -> str:
    return f"expert{'s' if len(experts) > 1 else ''} {ranges(sorted(experts))}"
