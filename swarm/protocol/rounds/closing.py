"""When a convener stops waiting for offers [C3]. Pure.

No local step may be thrown away without a reason, but a peer is not waited for longer than that
pays: each second of waiting costs as many peers as have offered one second of theirs, and leaving
a late peer out costs what it has worked on its shared tensors in this round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.protocol.deadlines import Timers
from swarm.protocol.manifest import PeerId


@dataclass(frozen=True)
class Absent:
    """A member that has not offered its shared tensors yet."""

    peer: PeerId
    silent_s: float
    """Since its last READY, or since it was asked first; 0 for the convener itself."""
    remaining_s: float | None
    """Until it will have finished its local steps, as it expects; None: it did not say."""
    is_gone: bool = False
    """Whether its machine refused the last message to it."""


@dataclass(frozen=True)
class OpenRoster:
    """What a convener knows when it decides whether to wait on."""

    age_s: float
    """Of the campaign."""
    round_s: float
    """Since the tip was applied: how long a late peer may have worked."""
    quorum_s: float | None
    """Age of the campaign when a quorum had offered; None: none has."""
    num_offers: int
    """With shared tensors; those of peers that were left out do not count."""
    num_members: int
    quorum_answers: bool
    """Whether a quorum has answered, with an offer or without."""
    absent: Sequence[Absent]

    @property
    def names(self) -> str:
        """Of those that are waited for."""
        return ", ".join(absent.peer for absent in self.absent)


def why_close(roster: OpenRoster, timers: Timers) -> str | None:
    """Why no more offers are waited for, with the numbers; None while they are."""
    if not roster.num_offers:
        return None
    why = _why(roster, timers)
    return why and (f"roster closed with {roster.num_offers} of {roster.num_members} offers: {why}")


def _why(roster: OpenRoster, timers: Timers) -> str | None:
    if not roster.absent:
        return "nobody else is waited for"
    if roster.quorum_s is not None:
        why = _why_without_each(roster, timers) or _why_without_slow(roster, timers)
        if why:
            return why
    if roster.age_s >= timers.roster_late_s and roster.quorum_answers:
        return f"{roster.names} not ready after {roster.age_s:.1f} s (last limit)"
    return None


def _why_without_each(roster: OpenRoster, timers: Timers) -> str | None:
    """Each is silent, or so late that it does not pay to wait."""
    reasons = []
    for absent in roster.absent:
        reason = _why_silent(absent, timers) or _why_late(absent, roster, timers)
        if reason is None:
            return None
        reasons.append(f"peer {absent.peer} {reason}")
    return ", ".join(reasons)


def _why_silent(absent: Absent, timers: Timers) -> str | None:
    limit_s = timers.grace_s if absent.is_gone else timers.silence_s
    if absent.silent_s < limit_s:
        return None
    gone = "gone, " if absent.is_gone else ""
    return f"{gone}silent for {absent.silent_s:.1f} s (limit {limit_s:.1f})"


def _why_late(absent: Absent, roster: OpenRoster, timers: Timers) -> str | None:
    if absent.remaining_s is None or absent.remaining_s <= timers.grace_s:
        return None
    if absent.remaining_s * roster.num_offers <= roster.round_s:
        return None
    return (
        f"needs {absent.remaining_s:.1f} s more, which costs {roster.num_offers} peers more "
        f"than its {roster.round_s:.1f} s of work are worth"
    )


def _why_without_slow(roster: OpenRoster, timers: Timers) -> str | None:
    assert roster.quorum_s is not None
    limit_s = max(timers.roster_s, timers.straggler_factor * roster.quorum_s)
    if roster.age_s < limit_s:
        return None
    return (
        f"{roster.names} not ready after {roster.age_s:.1f} s (limit {limit_s:.1f}, "
        f"a quorum was after {roster.quorum_s:.1f})"
    )
