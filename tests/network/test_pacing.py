"""How fast blobs are sent without a cap: as fast as the line, with hardly a queue before it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from swarm.network.pacing import DECIDE_S, LEAST_MBIT, LEAST_SHARE, TARGET_S, Pacing, Seen, paced

STEP_S = 0.05
SAMPLE_S = 0.25


def test_without_a_queue_nobody_is_held_back() -> None:
    assert paced(None, Seen(900.0, 0.001, is_full=True), 0.0) is None


def test_a_queue_sets_a_pace_just_below_what_went_through() -> None:
    assert paced(None, Seen(20.0, 0.11, is_full=True), 0.0) == pytest.approx(19.4)
    assert paced(None, Seen(20.0, 0.2, is_full=True), 0.0) == pytest.approx(17.6)
    assert paced(None, Seen(20.0, 2.0, is_full=True), 0.0) == pytest.approx(15.6)


def test_a_queue_is_not_this_machines_as_long_as_little_is_sent() -> None:
    assert paced(None, Seen(0.1, 0.25, is_full=False), 0.0) is None
    assert paced(20.0, Seen(2.0, 0.25, is_full=False), 20.0) == 20.0


def test_a_pace_that_is_used_grows_the_faster_the_emptier_the_queue() -> None:
    empty, half = (paced(20.0, Seen(20.0, q, is_full=False), 20.0) for q in (0.0, TARGET_S / 2))
    assert empty is not None and half is not None
    assert 20.0 < half < empty < 22.0


def test_a_pace_that_is_not_used_stays() -> None:
    assert paced(20.0, Seen(10.0, 0.0, is_full=False), 20.0) == 20.0


def test_a_pace_never_falls_far_below_what_the_line_was_seen_to_carry() -> None:
    pace: float | None = 20.0
    for _ in range(60):
        pace = paced(pace, Seen(pace or 0.0, 0.3, is_full=False), 20.0)
    assert pace == LEAST_SHARE * 20.0
    for _ in range(60):
        pace = paced(pace, Seen(pace or 0.0, 0.3, is_full=False), 0.0)
    assert pace == LEAST_MBIT


def test_round_trips_that_nobody_knows_change_nothing() -> None:
    assert paced(20.0, Seen(20.0, None, is_full=True), 20.0) == 20.0


# ---------------------------------------------------------------- over time


@dataclass
class Line:
    """A fluid queue of some length, and receivers whose round trips say what is in it, late."""

    carries_mbit: float
    holds_s: float = 0.25
    others_mbit: float = 0.0
    """What others of the house send over it."""
    offered_mbit: float = 1e4
    """What this machine would send."""
    round_trip_s: float = 0.1
    extra_s: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Of each receiver: what its own line queues."""
    now_s: float = 0.0
    pacing: Pacing = field(init=False)
    queues_s: list[float] = field(default_factory=list)
    sent_mbit: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pacing = Pacing(lambda mbit: None)

    def run(self, seconds: float) -> None:
        """Sends for so long."""
        queued, acked, queue_s = 0.0, 0.0, 0.0
        late = deque([0.0] * max(1, round(self.round_trip_s / STEP_S)))
        self.queues_s, self.sent_mbit = [], []
        smoothed_s = 0.0
        for step in range(round(seconds / STEP_S)):
            mine = min(self.offered_mbit, self.pacing.mbit or 1e4)
            share = mine / (mine + self.others_mbit)
            queued = max(0.0, queued + (mine + self.others_mbit - self.carries_mbit) * STEP_S)
            is_full = queued > self.carries_mbit * self.holds_s
            queued = min(queued, self.carries_mbit * self.holds_s)
            queue_s = queued / self.carries_mbit
            went = self.carries_mbit * share if queued else mine
            late.append(queue_s)
            smoothed_s += (late.popleft() - smoothed_s) / 4
            acked += went * STEP_S * 1e6 / 8
            self.now_s += STEP_S
            self.queues_s.append(queue_s)
            self.sent_mbit.append(went)
            if step % round(SAMPLE_S / STEP_S) == 0:
                seen_s = [smoothed_s + extra for extra in self.extra_s]
                self.pacing.note(self.now_s, int(acked), seen_s, is_full=is_full, carried_mbit=0.0)
                acked = 0.0

    @property
    def used(self) -> float:
        """Share of the line that was used in the second half."""
        half = self.sent_mbit[len(self.sent_mbit) // 2 :]
        return sum(half) / len(half) / (self.carries_mbit - self.others_mbit)

    @property
    def queue_s(self) -> float:
        """What nine tenths of the second half's queues were below."""
        half = sorted(self.queues_s[len(self.queues_s) // 2 :])
        return half[len(half) * 9 // 10]


@pytest.mark.parametrize("carries_mbit", [2.5, 20.0, 200.0])
@pytest.mark.parametrize("round_trip_s", [0.01, 0.1, 0.4])
@pytest.mark.parametrize("holds_s", [0.12, 0.25, 1.0])
def test_a_line_is_used_and_its_queue_stays_short(
    carries_mbit: float, round_trip_s: float, holds_s: float
) -> None:
    line = Line(carries_mbit, holds_s, round_trip_s=round_trip_s)
    line.run(120.0)
    assert line.used > 0.95
    assert line.queue_s < 2 * TARGET_S


def test_a_line_that_gets_slower_and_faster_again_is_followed() -> None:
    line = Line(20.0)
    line.run(60.0)
    line.carries_mbit = 8.0
    line.run(60.0)
    assert line.used > 0.95 and line.queue_s < 3 * TARGET_S
    line.carries_mbit = 20.0
    line.run(60.0)
    assert line.used > 0.95


def test_a_receiver_with_a_full_line_of_its_own_slows_nobody_down() -> None:
    line = Line(1000.0, offered_mbit=100.0, extra_s=(0.3, 0.3, 0.0))
    line.run(60.0)
    assert line.pacing.mbit is None


def test_of_a_single_receiver_nobody_knows_whose_queue_it_is() -> None:
    line = Line(20.0, extra_s=(0.0,))
    line.run(60.0)
    assert line.pacing.mbit is None


def test_a_pause_is_no_time_in_which_little_was_sent() -> None:
    line = Line(20.0)
    line.run(60.0)
    before = line.pacing.mbit
    line.pacing.pause()
    line.now_s += 3600.0
    line.run(DECIDE_S / 2)
    assert line.pacing.mbit == before
