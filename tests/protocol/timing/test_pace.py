"""The inputs of adapted timers: sizes, and the rate of active transfers."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from swarm.protocol.timing.deadlines import Timers, production_timers
from swarm.protocol.timing.pace import (
    DAY_S,
    KEPT,
    KEPT_LEAST,
    ROBUST,
    STALL_S,
    Arrivals,
    Pace,
    Recent,
)

UNITS = {"shared.0": 100, "shared.1": 50, "expert.0": 1000, "expert.1": 1000}
MIB = 2**20


def test_bytes_to_reduce_are_the_shared_ones_and_to_propose_all() -> None:
    measured = Pace(UNITS).measured(UNITS, 0.0)
    assert (measured.reduce_bytes, measured.proposal_bytes) == (150, 2150)


def test_units_that_are_not_due_take_no_time_in_a_round() -> None:
    measured = Pace(UNITS).measured({"shared.1": 50, "expert.0": 1000}, 0.0)
    assert (measured.reduce_bytes, measured.proposal_bytes) == (50, 1050)
    assert measured.model_bytes == 2150


def test_of_units_that_move_by_deltas_these_count_and_the_values_that_are_made_of_them() -> None:
    """Otherwise the 7B's slices would have tenfold time-outs: an hour at 20 Mbit/s."""
    measured = Pace(UNITS).measured({"shared.0": 7, "shared.1": 50, "expert.0": 40}, 0.0)
    assert (measured.reduce_bytes, measured.proposal_bytes) == (57, 97)
    assert (measured.reduced_bytes, measured.proposed_bytes) == (100, 1100)
    assert measured.model_bytes == 2150


def rate_after(*rates: float, every_s: float = 60.0) -> float:
    """The counted bytes per second after fetches of 8 MiB at these rates, at regular times."""
    pace = Pace(UNITS)
    for number, rate in enumerate(rates):
        pace.fetched(8 * MIB, 8 * MIB / rate, number * every_s)
    return pace.rate_bytes_per_s(len(rates) * every_s)


def test_small_fetches_say_nothing_about_a_rate() -> None:
    pace = Pace(UNITS)
    pace.fetched(MIB - 1, 60.0, 0.0)
    pace.fetched(MIB, 0.0, 0.0)
    assert pace.rate_bytes_per_s(0.0) == 0.0


def test_one_slow_fetch_changes_nothing_and_a_line_that_got_slower_counts_after_four() -> None:
    """One outage once raised a 7B's T_reform from 1.1 to 83 h for the next 16 fetches."""
    fast, slow = 12.5e6, 0.17e6
    for before in (2, 3, 15):
        assert rate_after(*[fast] * before, slow) == pytest.approx(fast)
    assert rate_after(*[fast] * KEPT, *[slow] * 5) == pytest.approx(slow)
    assert rate_after(*[slow] * KEPT, *[fast] * 12) == pytest.approx(fast)


def test_fetches_of_yesterday_count_only_where_there_are_too_few_of_today() -> None:
    assert rate_after(1e6, 1e6, 1e6, 1e6, every_s=DAY_S) == pytest.approx(1e6)
    pace = Pace(UNITS)
    for number in range(KEPT):
        pace.fetched(8 * MIB, 8.0, float(number))
    for number in range(KEPT_LEAST):
        pace.fetched(8 * MIB, 1.0, DAY_S + 100.0 + number)
    assert pace.rate_bytes_per_s(DAY_S + 200.0) == 8 * MIB


def test_of_a_gap_between_arrivals_a_few_seconds_are_transfer_time() -> None:
    arrivals = Arrivals()
    arrivals.begin(100.0)
    for at_s in (101.0, 102.0, 1302.0, 1303.0):  # the line was cut for 20 minutes
        arrivals.arrived(MIB, at_s)
    assert (arrivals.num_bytes, arrivals.flowing_s) == (4 * MIB, 3.0 + STALL_S)
    arrivals.begin(5000.0)
    arrivals.arrived(MIB, 5001.0)
    assert arrivals.flowing_s == 4.0 + STALL_S, "nothing was asked for in between"


def test_an_outage_leaves_the_time_outs_of_a_large_run_as_they_are() -> None:
    """By the sizes of the 7B: 16.4 GB, 3.6 of them shared, at 100 Mbit/s."""
    sizes = {"shared.0": 3_560_000_000, "expert.0": 12_880_000_000}

    def timers_after(outage_s: float) -> Timers:
        pace, now_s = Pace(sizes), 0.0
        for number in range(20):
            arrivals = Arrivals()
            arrivals.begin(now_s)
            for portion in range(160):
                now_s += 0.1 + (outage_s if (number, portion) == (9, 50) else 0.0)
                arrivals.arrived(1_250_000, now_s)
            pace.fetched(arrivals.num_bytes, arrivals.flowing_s, now_s)
        measured = pace.measured(sizes, now_s)
        return production_timers(measured, roster_after_s=6.0, reform_after_s=None).timers

    quiet, cut = timers_after(0.0), timers_after(1200.0)
    assert cut.reform_s == pytest.approx(quiet.reform_s, rel=0.01)
    assert cut.attempt_s == pytest.approx(quiet.attempt_s, rel=0.01)
    bytes_s = sum(sizes.values()) / 12.5e6 + sizes["shared.0"] / 12.5e6
    assert quiet.attempt_s <= quiet.reform_s < 30.0 + 4 * bytes_s, "in the order of a round"


def test_a_cap_below_what_was_seen_or_assumed_is_the_rate() -> None:
    """A capped convener gives others the time that its own link needs."""
    assert Pace(UNITS, cap_bytes_per_s=1e6).rate_bytes_per_s(0.0) == 1e6
    assert Pace(UNITS, cap_bytes_per_s=1e9).measured(UNITS, 0.0).rate_bytes_per_s == 0.0
    pace = Pace(UNITS, cap_bytes_per_s=1e6)
    pace.fetched(8 * MIB, 1.0, 0.0)
    assert pace.measured(UNITS, 0.0).rate_bytes_per_s == 1e6
    pace.fetched(MIB, 2.0, 1.0)
    assert pace.measured(UNITS, 1.0).rate_bytes_per_s == MIB / 2


def test_a_peer_that_sends_slowly_expects_no_more_of_others_until_it_knows() -> None:
    """Peers with lines of 5 Mbit/s lost their first round to time-outs for 20 Mbit/s (measured)."""
    pace = Pace(UNITS, cap_of_others_bytes_per_s=6e5)
    assert pace.measured(UNITS, 0.0).rate_bytes_per_s == 6e5
    pace.fetched(8 * MIB, 1.0, 0.0)
    assert pace.measured(UNITS, 0.0).rate_bytes_per_s == 8 * MIB


def test_before_the_first_fetch_no_rate_is_known() -> None:
    assert Pace(UNITS).rate_bytes_per_s(0.0) == 0.0


def recent_of(*values: float, kept: int = 16, least: int = 0) -> Recent:
    """Measurements that were made a second apart, from 0 on."""
    recent = Recent(kept, least)
    for at_s, value in enumerate(values):
        recent.add(value, float(at_s))
    return recent


@pytest.mark.parametrize("kept", [1, 3, 16])
def test_only_the_newest_are_kept(kept: int) -> None:
    recent = recent_of(*range(100), kept=kept)
    assert recent.of_late(100.0) == list(range(100 - kept, 100))
    assert recent.of_late(100.0, since_s=99.0) == [99]


def test_those_of_yesterday_do_not_count_unless_so_many_always_do() -> None:
    assert recent_of(1, 2, 3).of_late(DAY_S + 1.0) == [2, 3]
    assert recent_of(1, 2, 3).low(2 * DAY_S) is None
    assert recent_of(1, 2, 3, 4, least=2).of_late(2 * DAY_S) == [3, 4]
    assert recent_of(1, 2, 3, 4, least=2).of_late(3.0) == [1, 2, 3, 4]


@given(st.lists(st.floats(1.0, 2.0), min_size=ROBUST - 1, max_size=40), st.floats(0.0, 1e9))
def test_one_outlier_decides_nothing_once_there_are_a_few(values: list[float], odd: float) -> None:
    recent = recent_of(*values, odd)
    at_s = float(len(values))
    low, high = recent.low(at_s), recent.high(at_s)
    assert low is not None and high is not None
    assert min(values) <= low <= high <= max(values)


def test_what_has_changed_counts_once_a_quarter_of_the_kept_shows_it() -> None:
    assert recent_of(*[10.0] * 16, *[1.0] * 5).low(21.0) == 1.0
    assert recent_of(*[10.0] * 16, *[1.0] * 4).low(20.0) == 10.0
    assert recent_of(*[1.0] * 16, *[10.0] * 5).high(21.0) == 10.0
