"""What the timers are adapted from: sizes and the slowest recent rate."""

from __future__ import annotations

from swarm.protocol.pace import KEPT, Pace

UNITS = {"shared.0": 100, "shared.1": 50, "expert.0": 1000, "expert.1": 1000}
MIB = 2**20


def test_bytes_to_reduce_are_the_shared_ones_and_to_propose_all() -> None:
    measured = Pace(UNITS).measured(UNITS)
    assert (measured.reduce_bytes, measured.proposal_bytes) == (150, 2150)


def test_units_that_are_not_due_take_no_time_in_a_round() -> None:
    measured = Pace(UNITS).measured({"shared.1": 50, "expert.0": 1000})
    assert (measured.reduce_bytes, measured.proposal_bytes) == (50, 1050)
    assert measured.model_bytes == 2150


def test_of_units_that_move_by_deltas_these_count_and_the_values_that_are_made_of_them() -> None:
    """The 7B's slices would have ten times as long a time-out each, on 20 Mbit/s an hour."""
    measured = Pace(UNITS).measured({"shared.0": 7, "shared.1": 50, "expert.0": 40})
    assert (measured.reduce_bytes, measured.proposal_bytes) == (57, 97)
    assert (measured.reduced_bytes, measured.proposed_bytes) == (100, 1100)
    assert measured.model_bytes == 2150


def test_the_slowest_recent_transfer_counts_and_small_ones_do_not() -> None:
    pace = Pace(UNITS)
    pace.fetched(8 * MIB, 1.0)
    pace.fetched(2 * MIB, 1.0)
    pace.fetched(MIB - 1, 60.0)  # says more about the delay than about the rate
    pace.fetched(MIB, 0.0)
    assert pace.rate_bytes_per_s == 2 * MIB


def test_a_cap_below_what_was_seen_or_assumed_is_the_rate() -> None:
    """A capped convener gives others the time that its own link takes."""
    assert Pace(UNITS, cap_bytes_per_s=1e6).measured(UNITS).rate_bytes_per_s == 1e6
    assert Pace(UNITS, cap_bytes_per_s=1e9).measured(UNITS).rate_bytes_per_s == 0.0
    pace = Pace(UNITS, cap_bytes_per_s=1e6)
    pace.fetched(8 * MIB, 1.0)
    assert pace.measured(UNITS).rate_bytes_per_s == 1e6
    pace.fetched(MIB, 2.0)
    assert pace.measured(UNITS).rate_bytes_per_s == MIB / 2


def test_a_peer_that_sends_slowly_expects_no_more_of_others_until_it_knows() -> None:
    """All behind lines of 5 Mbit/s lost their first round to time-outs for 20 (measured)."""
    pace = Pace(UNITS, cap_of_others_bytes_per_s=6e5)
    assert pace.measured(UNITS).rate_bytes_per_s == 6e5
    pace.fetched(8 * MIB, 1.0)
    assert pace.measured(UNITS).rate_bytes_per_s == 8 * MIB


def test_only_recent_measurements_count() -> None:
    pace = Pace(UNITS)
    pace.fetched(MIB, 100.0)
    for _ in range(KEPT):
        pace.fetched(MIB, 1.0)
    assert pace.rate_bytes_per_s == MIB


def test_before_the_first_fetch_no_rate_is_known() -> None:
    assert Pace(UNITS).rate_bytes_per_s == 0.0
