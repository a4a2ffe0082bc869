"""The decisions, transfers and routing of a round, as log lines and figures."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from swarm.monitor.health import Fault, causes_of
from swarm.monitor.snapshot import Sighting, snapshot_of
from swarm.network.blobs.disk_retry import awaited
from swarm.network.wire.link_health import LinkHealth
from swarm.network.wire.traffic import Traffic
from swarm.peer.status.observing import RoundReport
from swarm.protocol.messages.events import Reason, Topic
from swarm.protocol.records import records
from swarm.protocol.records.life_events import BytesMoved
from swarm.protocol.records.printable import PEER_ID, ranges
from swarm.protocol.values.manifest import Kind, Manifest, PeerId

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moved(BytesMoved):
    """Bytes moved since the start, or between two moments."""

    @classmethod
    def of(cls, counted: Traffic) -> Moved:
        """The bytes that a node has counted so far."""
        return cls(
            counted.blob_bytes_sent,
            counted.blob_bytes_received,
            counted.control_bytes_sent,
            counted.control_bytes_received,
            counted.moments_bytes_sent,
            counted.moments_bytes_received,
        )

    def __sub__(self, before: Moved) -> Moved:
        return Moved(
            *(now - then for now, then in zip(astuple(self), astuple(before), strict=True))
        )


MAX_LINES = 8
SAID_ROUNDS = 3
"""A fault that returns within this many rounds counts as the same fault."""
_OF_EXPERT = re.compile(r"expert (\d+): (.*)", re.DOTALL)


def with_short_names(text: str) -> str:
    """The text with the last six characters in place of each peer id."""
    return PEER_ID.sub(lambda found: f"…{found[0][-6:]}", text)


def told(reasons: Sequence[str], *, max_lines: int = MAX_LINES) -> list[str]:
    """Sentences of a manifest as lines of a log.

    Experts with the same reason share a line; lines beyond `max_lines` are only counted.

    Args:
        reasons: reasons of the manifest, such as "expert 3: adopted by PEER, load 1/2".
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
    """An applied manifest in one line for people.

    Args:
        manifest: the applied manifest.
        rounds: rounds of the whole run.
        loss: mean of this peer's local steps, nats per token; None if it took none.
        held_out: newest held-out loss that this peer measured, nats per token.
        seconds: time since the previous manifest.
        sent_bytes: bytes of blobs that this peer has sent in that time.
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
        # A contributor may have left in the manifest that counts its work.
        f"{len(manifest.contributors)} of {len({*manifest.members, *manifest.contributors})} peers",
        f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s",
        f"{sent_bytes / 1e6:.1f} MB",
    ]
    return "  ".join(words)


def because(reason: str) -> str:
    """` reason='...'` for a log line; empty without a reason."""
    return f" reason={with_short_names(reason)!r}" if reason else ""


class OwnCauses:
    """Logs this peer's faults in the monitor's words, each once when it begins."""

    def __init__(self, run: str) -> None:
        """Has logged nothing of this run yet."""
        self._run = run
        self._others: dict[PeerId, records.PeerRecord] = {}
        self._said: dict[Fault, int] = {}
        """The last round in which each fault was present."""
        self._looked = 0
        """The round of the previous check; a peer that is short of CPU time skips many."""

    def note(
        self,
        present: Mapping[PeerId, records.PeerRecord],
        own: records.PeerRecord,
        tip: Manifest | None,
    ) -> None:
        """Finds this peer's faults, as a monitor would with these records.

        Args:
            present: records of some peers of the run. Records of members are remembered.
            own: this peer's record.
            tip: the newest manifest here; without one nothing is logged.
        """
        if tip is None:
            return
        # Records may be minutes old, so that they still report a restarted peer as unreached.
        new = {peer: replace(record, link=None) for peer, record in present.items()}
        read = {**self._others, **new}
        self._others = {peer: read[peer] for peer in tip.members if peer in read}
        peers = {**self._others, own.peer_id: own}
        seen = snapshot_of(Sighting(self._run, "", peers, {}, {}, tip))
        for cause in causes_of(seen) if seen else ():
            # `swarm.network.blobs.disk_retry` already logs that a machine waits for a person.
            if cause.peer != own.peer_id or cause.fault is Fault.TROUBLE:
                continue
            last = self._said.get(cause.fault)
            if last is None or (last < self._looked and tip.round - last > SAID_ROUNDS):
                logger.warning("%s", cause.text)
            self._said[cause.fault] = tip.round
        self._looked = tip.round


def _named(experts: Sequence[int]) -> str:
    return f"expert{'s' if len(experts) > 1 else ''} {ranges(sorted(experts))}"


_EACH = re.compile(r"peer (\S+?) (.*?)(?=, peer \S+ |$)", re.DOTALL)
_CLOSED = re.compile(r"roster closed with \d+ of \d+ offers: ")
_EXCLUDED = re.compile(r"peer \S+ left out(?: after |: )")
_REFUSED = re.compile(r"READY from (\S+) (refused: .*)", re.DOTALL)


class RoundAccount:
    """The report on the current round, completed by the manifest that ends the round."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.reasons_of: Callable[[], Sequence[Reason]] = tuple
        """Reasons that the round machine gave, oldest first."""
        self._told: Reason | None = None
        self._trouble = ""

    def trouble(self) -> str:
        """The machine's current trouble; it is remembered as the cause of this round's delay."""
        now = records.shortened(awaited(), records.MAX_BRIEF)
        self._trouble = now or self._trouble
        return now

    def close(
        self, report: RoundReport, seconds: float, phases: Mapping[str, float], moved: Moved
    ) -> records.RoundFigures:
        """The figures of a training round.

        Args:
            report: report of the manifest of the round.
            seconds: time since the previous manifest.
            phases: seconds of each phase of the round.
            moved: bytes sent and received in the round.
        """
        reasons = self.reasons_of()
        new = next((k for k, reason in enumerate(reasons) if reason is self._told), -1) + 1
        figures = records.RoundFigures(
            report.manifest.round,
            report.counted,
            round(seconds, 3),
            {name: round(took_s, 3) for name, took_s in phases.items()},
            moved.blobs_sent,
            moved.blobs_received,
            why_not_counted(report, self.me, self._trouble),
            left_out_by(reasons[new:], report.manifest),
        )
        self._told, self._trouble = (reasons[-1] if reasons else None), ""
        return figures


def link_figures(
    lines: LinkHealth, fetched_bytes_per_s: float, traffic: Traffic
) -> records.LinkFigures:
    """Known figures of the link; `fetched_bytes_per_s` is 0 if no fetch was long enough.

    A cap counts as the rate unless a lower rate was measured.
    """
    down = _least(fetched_bytes_per_s * 8e-6 or lines.down_mbit, traffic.down.mbit)
    return records.LinkFigures(lines.rtt_ms(), down, up_mbit(lines, traffic), lines.unreached())


def up_mbit(lines: LinkHealth, traffic: Traffic) -> float | None:
    """The upload rate of this peer in Mbit/s, at most its cap. None if neither is known.

    The rate is the larger of two measured lower bounds: one by tests, one by the bytes that others
    have received since.
    """
    figures = (lines.tested_mbit, traffic.sent.mbit_since(lines.settled_s))
    measured = max((mbit for mbit in figures if mbit), default=None)
    return _least(measured, traffic.up.mbit)


def _least(*rates: float | None) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)


def why_not_counted(report: RoundReport, me: PeerId, trouble: str = "") -> str:
    """The reason, at this peer, why a round did not count its work; "" if it did.

    Args:
        report: report of the round's manifest.
        me: this peer.
        trouble: trouble of the machine during the round, such as a full disk.
    """
    manifest, stats = report.manifest, report.stats
    if report.counted or manifest.kind is not Kind.QUORUM:
        return ""
    if me not in manifest.members:
        why = "not in the roster: it is no member"
    elif stats is None or not stats.tokens:
        why = f"{records.NOTHING_DONE}: it did no local steps on the manifest before"
    elif not stats.completed:
        took = f"{stats.steps} local steps took {stats.seconds:.1f} s"
        why = f"{records.TOO_LATE}: still training when the round was decided, {took}"
    else:
        took = f"its {stats.steps} local steps took {stats.seconds:.1f} s"
        why = f"its offer was not taken, {report.wait_s:.1f} s before the decision; {took}"
    return records.shortened(f"{trouble}; {why}" if trouble else why, records.MAX_BRIEF)


def left_out_by(reasons: Iterable[Reason], manifest: Manifest) -> dict[PeerId, str]:
    """The convener's reasons why members are not in a round's mean; {} at any other peer.

    Args:
        reasons: given by the round machine since the previous manifest, oldest first.
        manifest: manifest of the round.
    """
    out = manifest.members.keys() - set(manifest.contributors)
    found: dict[PeerId, str] = {}
    for reason in reasons:
        found |= {peer: why for peer, why in _said(reason) if peer in out}
    kept = sorted(found)[: records.MAX_LEFT_OUT]
    return {
        peer: records.shortened(with_short_names(found[peer]), records.MAX_BRIEF) for peer in kept
    }


def _said(reason: Reason) -> list[tuple[PeerId, str]]:
    if reason.topic is Topic.REFUSED:
        refused = _REFUSED.match(reason.text)
        return [(refused[1], f"its offer was {refused[2]}")] if refused else []
    if _EXCLUDED.match(reason.text) or _CLOSED.match(reason.text):
        return _EACH.findall(_CLOSED.sub("", reason.text))
    return []
