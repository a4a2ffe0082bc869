"""How long each step may take. Timers decide when something is retried, never what is decided."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import floor, inf

MIN_ROSTER_S = 6.0
"""T_roster is never shorter, so that a busy laptop does not lose its tokens."""
MIN_REFORM_S = 600.0
SAFETY = 3.0
"""Transfers may take this many times as long as the measured rate predicts."""
PATIENCE_WITHOUT_REFORM_S = 300.0
ASSUMED_RATE_BYTES_PER_S = 2.5e6
"""20 Mbit/s, the slowest link for which runs are meant; assumed until bytes were received."""
MADE_BYTES_PER_S = 1e8
"""Lowest rate at which a value is made from its delta, hashed and written: that of a hard disk."""
FIRST_STEP_S = 1800.0
"""Limit of a peer's first step. Until that step ends, the peer cannot say when it will be ready."""
HICCUP = 5
"""A peer without which there is no quorum may be silent for this many times as long as others."""


@dataclass(frozen=True)
class Timers:
    """Every duration of the protocol, in seconds."""

    tick_s: float = 0.5
    """The shell sends a `Tick` at least this often."""
    poll_s: float = 1.5
    """How often a convener repeats its message. Peers answer each other at most as often."""
    heartbeat_s: float = 5.0
    """T_hb: after this silence of a convener the next voter replaces it; later voters wait
    longer."""
    silence_s: float = 6.0
    """A roster does not wait for a missing peer that was silent for this long."""
    roster_s: float = 6.0
    """T_roster: once a campaign is this old, its roster may close without slow peers."""
    straggler_factor: float = 1.5
    """Local steps may take this multiple of the time that their peer first announced."""
    roster_late_s: float = 14.0
    """T_late: limit of the silence, and of the delay, of a peer without which there is no
    quorum."""
    wordless_s: float = 14.0
    """T_word: how long the roster waits for a peer that does not say when it will be ready."""
    reduce_s: float = 5.0
    """T_red: limit of the averaging; after it the convener leaves out late reducers."""
    vote_s: float = 6.0
    """T_vote: limit of the vote; by then a proposal's blobs must have reached its convener."""
    attempt_s: float = 41.0
    """T_att: limit of attempt 0, from the time when the roster no longer waits for any peer.
    Attempt 1 may take twice as long, and later attempts three times as long."""
    hello_s: float = 3.0
    """T_hello: period of gossip and join requests."""
    discover_s: float = 6.0
    """T_disc: how long a booting peer only listens."""
    reform_s: float = 60.0
    """T_reform: when no quorum was heard for this long, the survivors continue alone; inf:
    never."""
    fetch_s: float = 0.0
    """A fetch without a new blob for this long is dropped, but not before T_reform / 2
    (stuck fetches)."""
    leave_s: float = 30.0
    """A peer that was asked to leave does so after this time at the latest."""

    def attempt_limit_s(self, attempt: int) -> float:
        """How long a campaign of this attempt may last."""
        return self.attempt_s * (1 + min(attempt, 2))

    def proposal_limit_s(self, attempt: int) -> float:
        """The time without progress after which a proposal is given up."""
        return (self.attempt_s - self.roster_late_s) * (1 + min(attempt, 2))

    @property
    def grace_s(self) -> float:
        """The roster waits for a peer that finishes its local steps within this time."""
        return self.silence_s / 2

    def lost_after_s(self, phase_s: float) -> float:
        """The silence of a peer after which a phase no longer waits for it.

        Live peers answer every poll, however many bytes the phase moves.

        Args:
            phase_s: how long the phase may last: T_red or T_vote.
        """
        return max(self.silence_s, min(phase_s / 2, HICCUP * self.silence_s))

    @cached_property
    def pause_s(self) -> float:
        """T_reform / 2: a longer gap between ticks means that the process stood still [B2]."""
        half = self.reform_s / 2
        return half if half < inf else max(PATIENCE_WITHOUT_REFORM_S, SAFETY * self.vote_s)

    @cached_property
    def patience_s(self) -> float:
        """A fetch is dropped after this long without a new blob (stuck fetches)."""
        return max(self.pause_s, self.fetch_s)


@dataclass(frozen=True)
class AdaptedTimers:
    """Timers, and why they differ from the base values."""

    timers: Timers
    reasons: tuple[str, ...]
    """A sentence with its numbers for each adapted timer."""


@dataclass(frozen=True)
class Measured:
    """This peer's measurements of the run so far; empty or zero: not measured yet."""

    reduce_bytes: int
    """Bytes a reducer has to receive in a round."""
    proposal_bytes: int
    """Bytes a peer has to receive before it can accept a manifest."""
    model_bytes: int
    """Bytes of all units."""
    rate_bytes_per_s: float
    """Rate at which this peer receives from others."""
    reduced_bytes: int = 0
    """Bytes of the values that a reducer makes from deltas."""
    proposed_bytes: int = 0
    """Bytes of the values that a peer makes from deltas before it can accept a manifest."""


def production_timers(
    measured: Measured,
    *,
    roster_after_s: float,
    reform_after_s: float | None,
    base: Timers | None = None,
) -> AdaptedTimers:
    """Adapts the timers to a run's sizes and rates; no timer becomes shorter than its base value.

    T_red and T_vote are three times the time that the link needs for their bytes at the measured
    rate, and the disk for making values from deltas. T_att allows for a slow link, or for one phase
    that fails. T_reform is at least T_att and at least 10 minutes, unless the run fixes it. The
    limit of a fetch allows for the whole model. No timer depends on the length of rounds, since the
    two would lengthen each other, and a restarted peer knows no rounds.

    Args:
        measured: sizes and rate.
        roster_after_s: T_roster, and the silence after which the roster no longer waits for a peer.
        reform_after_s: the run's T_reform, or None to derive it.
        base: smallest values; by default those of `Timers`.

    Returns:
        The timers, with a reason for each adapted one.
    """
    base = base or Timers()
    reasons: list[str] = []
    silence_s = max(MIN_ROSTER_S, roster_after_s)
    # Silence of T_red / 2 excludes a reducer, so T_red is at least 2 `silence_s`.
    least_reduce_s = max(base.reduce_s, 2 * silence_s)
    least_vote_s = max(base.vote_s, 2 * silence_s)
    reduce_s = _transfer_s(
        "reducing", measured.reduce_bytes, measured, least_reduce_s, reasons,
        made_bytes=measured.reduced_bytes,
    )  # fmt: skip
    vote_s = _transfer_s(
        "voting", measured.proposal_bytes, measured, least_vote_s, reasons,
        made_bytes=measured.proposed_bytes,
    )  # fmt: skip
    late_s = max(base.roster_late_s, HICCUP * silence_s)
    phases_s = max(3 * least_reduce_s + 2 * least_vote_s, 2 * reduce_s + vote_s)
    attempt_s = max(base.attempt_s, late_s + phases_s)
    reasons.append(
        f"an attempt may take {attempt_s:.1f} s: {late_s:.1f} for the roster and {phases_s:.1f} "
        "for reducing and voting"
    )
    return AdaptedTimers(
        replace(
            base,
            silence_s=silence_s,
            roster_s=max(base.roster_s, silence_s),
            roster_late_s=late_s,
            wordless_s=max(base.wordless_s, FIRST_STEP_S),
            reduce_s=reduce_s,
            vote_s=vote_s,
            attempt_s=attempt_s,
            fetch_s=_fetch_s(measured, reasons),
            reform_s=_reform_s(attempt_s, reform_after_s, reasons),
        ),
        tuple(reasons),
    )


def _transfer_s(
    what: str,
    num_bytes: int,
    measured: Measured,
    floor_s: float,
    reasons: list[str],
    *,
    made_bytes: int = 0,
) -> float:
    known, rate = "", measured.rate_bytes_per_s
    if rate <= 0:
        known, rate = "an assumed ", ASSUMED_RATE_BYTES_PER_S
    seconds = max(floor_s, SAFETY * (num_bytes / rate + made_bytes / MADE_BYTES_PER_S))
    made = f", and {made_bytes / 1e6:.1f} MB of values made of it" if made_bytes else ""
    reasons.append(
        f"{what} may take {seconds:.1f} s: {SAFETY:g} x {num_bytes / 1e6:.1f} MB at "
        f"{known}{rate / 1e6:.1f} MB/s{made}, at least {floor_s:.1f}"
    )
    return seconds


def _reform_s(attempt_s: float, fixed_s: float | None, reasons: list[str]) -> float:
    if fixed_s is not None:
        reasons.append(f"a lost majority is given up after {fixed_s:.1f} s: set by the run")
        return fixed_s
    seconds = max(MIN_REFORM_S, attempt_s)
    reasons.append(
        f"a lost majority is given up after {seconds:.1f} s: as long as an attempt may take, "
        f"at least {MIN_REFORM_S:.0f}"
    )
    return seconds


def _fetch_s(measured: Measured, reasons: list[str]) -> float:
    """Half of the time that the whole model may take: parallel blobs may all arrive at the end."""
    return _transfer_s("the whole model", measured.model_bytes, measured, 0.0, reasons) / 2


@dataclass(frozen=True)
class LocalWork:
    """The work that a peer expects to do before it offers."""

    steps: int
    """0: it offers now."""
    seconds: float | None
    """Time until it offers; None: not known yet."""
    reason: str


def local_work_left(
    dealt: int, done: int, step_s: float, remaining_s: float | None = None
) -> LocalWork:
    """How many more local steps a peer takes in a round.

    If the local steps have an agreed end, the first step is always begun. A further step is begun
    only if it should end in time, judged by the steps so far. A peer that has read its whole deal
    offers at once.

    Args:
        dealt: steps of its deal, or of a round in the exact mode.
        done: how many of these steps are done.
        step_s: mean seconds of a step so far; 0 before the first.
        remaining_s: seconds until the agreed end of the local steps; None: there is none, all steps
            are taken.
    """
    left = max(0, dealt - done)
    if remaining_s is None:
        return LocalWork(left, left * step_s if step_s else None, f"{left} of {dealt} steps left")
    remaining_s = max(0.0, remaining_s)
    if not done or not left:
        seconds = remaining_s if left else 0.0
        return LocalWork(left, seconds, f"{left} of {dealt} steps dealt are left")
    fit = floor(remaining_s / step_s) if step_s else left
    reason = f"{done} steps done; {fit} of {step_s:.2f} s fit {remaining_s:.1f} s, {left} are dealt"
    return LocalWork(min(left, fit), min(remaining_s, left * step_s) if fit else 0.0, reason)


def finishes_in_time(steps_left: int, step_s: float, remaining_s: float) -> tuple[bool, str]:
    """Whether a peer that was asked to leave finishes its local steps first.

    Half of the remaining time is for the steps, the rest for the round and for handing experts
    over.

    Args:
        steps_left: steps of this round that are left.
        step_s: seconds of a step so far; 0 before the first.
        remaining_s: time until the peer leaves.

    Returns:
        The decision and its reason.
    """
    needed_s, allowed_s = steps_left * step_s, remaining_s / 2
    numbers = f"{steps_left} steps of {step_s:.2f} s in {allowed_s:.1f} s"
    if needed_s <= allowed_s:
        return True, f"leaving: finishes the round first, {numbers}"
    return False, f"leaving: the local steps of this round are dropped, no time for {numbers}"
