"""What a peer tells of its last round, of its line and of its routing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from swarm.network.lines import Lines
from swarm.network.patience import awaited
from swarm.network.traffic import Traffic
from swarm.peer.moved import Moved
from swarm.peer.observing import RoundReport
from swarm.peer.telling import with_short_names
from swarm.protocol.events import Reason, Topic
from swarm.protocol.figures import (
    MAX_BRIEF,
    MAX_LEFT_OUT,
    NOTHING_DONE,
    TOO_LATE,
    LinkFigures,
    RoundFigures,
)
from swarm.protocol.manifest import Kind, Manifest, PeerId
from swarm.protocol.records import shortened

_EACH = re.compile(r"peer (\S+?) (.*?)(?=, peer \S+ |$)", re.DOTALL)
_CLOSED = re.compile(r"roster closed with \d+ of \d+ offers: ")
_EXCLUDED = re.compile(r"peer \S+ left out(?: after |: )")
_REFUSED = re.compile(r"READY from (\S+) (refused: .*)", re.DOTALL)


class RoundAccount:
    """What happened in the round that is under way; closed by the manifest that ends it."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.reasons_of: Callable[[], Sequence[Reason]] = tuple
        """What the round machine said, oldest first."""
        self._told: Reason | None = None
        self._trouble = ""

    def trouble(self) -> str:
        """What the machine waits for now; remembered as what delayed this round."""
        now = shortened(awaited(), MAX_BRIEF)
        self._trouble = now or self._trouble
        return now

    def close(
        self, report: RoundReport, seconds: float, phases: Mapping[str, float], moved: Moved
    ) -> RoundFigures:
        """The figures of a training round.

        Args:
            report: of its manifest.
            seconds: since the manifest before.
            phases: seconds of each.
            moved: bytes in it.
        """
        reasons = self.reasons_of()
        new = next((k for k, reason in enumerate(reasons) if reason is self._told), -1) + 1
        figures = RoundFigures(
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


def link_figures(lines: Lines, fetched_bytes_per_s: float, traffic: Traffic) -> LinkFigures:
    """What is known of the line; `fetched_bytes_per_s` is 0 where no fetch was long enough.

    A cap that was set is the rate where nothing lower was measured.
    """
    down = _least(fetched_bytes_per_s * 8e-6 or lines.down_mbit, traffic.down.mbit)
    return LinkFigures(lines.rtt_ms(), down, up_mbit(lines, traffic), lines.unreached())


def up_mbit(lines: Lines, traffic: Traffic) -> float | None:
    """What the line carries away from this peer in Mbit/s, or the cap; None: not known.

    Both figures are bounds from below: of tests, and of what others took since.
    """
    figures = (lines.tested_mbit, traffic.sent.mbit_since(lines.settled_s))
    measured = max((mbit for mbit in figures if mbit), default=None)
    return _least(measured, traffic.up.mbit)


def _least(*rates: float | None) -> float | None:
    return min((rate for rate in rates if rate is not None), default=None)


def why_not_counted(report: RoundReport, me: PeerId, trouble: str = "") -> str:
    """What this peer itself did while a round went on without its work; "" if it was counted.

    Args:
        report: of the round's manifest.
        me: this peer.
        trouble: what the machine waited for meanwhile, such as a full disk.
    """
    manifest, stats = report.manifest, report.stats
    if report.counted or manifest.kind is not Kind.QUORUM:
        return ""
    if me not in manifest.members:
        why = "not in the roster: it is no member"
    elif stats is None or not stats.tokens:
        why = f"{NOTHING_DONE}: it did no local steps on the manifest before"
    elif not stats.completed:
        took = f"{stats.steps} local steps took {stats.seconds:.1f} s"
        why = f"{TOO_LATE}: still training when the round was decided, {took}"
    else:
        took = f"its {stats.steps} local steps took {stats.seconds:.1f} s"
        why = f"its offer was not taken, {report.wait_s:.1f} s before the decision; {took}"
    return shortened(f"{trouble}; {why}" if trouble else why, MAX_BRIEF)


def left_out_by(reasons: Iterable[Reason], manifest: Manifest) -> dict[PeerId, str]:
    """Why members are not in a round's mean, in the words of the convener; {} at any other peer.

    Args:
        reasons: what the machine said since the manifest before, oldest first.
        manifest: of the round.
    """
    out = manifest.members.keys() - set(manifest.contributors)
    found: dict[PeerId, str] = {}
    for reason in reasons:
        found |= {peer: why for peer, why in _said(reason) if peer in out}
    kept = sorted(found)[:MAX_LEFT_OUT]
    return {peer: shortened(with_short_names(found[peer]), MAX_BRIEF) for peer in kept}


def _said(reason: Reason) -> list[tuple[PeerId, str]]:
    if reason.topic is Topic.REFUSED:
        refused = _REFUSED.match(reason.text)
        return [(refused[1], f"its offer was {refused[2]}")] if refused else []
    if _EXCLUDED.match(reason.text) or _CLOSED.match(reason.text):
        return _EACH.findall(_CLOSED.sub("", reason.text))
    return []
