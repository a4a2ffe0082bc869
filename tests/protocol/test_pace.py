"""What the timers are adapted from: recent durations and the slowest recent rate."""

from __future__ import annotations

from swarm.protocol.pace import KEPT, Pace

UNITS = {"shared.0": 100, "shared.1": 50, "expert.0": 1000, "expert.1": 1000}
MIB = 2**20


def test_bytes_to_reduce_are_the_shared_ones_and_to_propose_all() -> None:
    measured = Pace(UNITS).measured()
    assert (measured.reduce_bytes, measured.proposal_bytes) == (150, 2150)


def test_nothing_is_measured_before_the_first_tip() -> None:
    pace = Pace(UNITS)
    pace.offered(3.0)
    measured = pace.measured()
    assert (measured.ready_s, measured.round_s, measured.rate_bytes_per_s) == ((), (), 0.0)


def test_rounds_last_from_tip_to_tip_and_offers_count_from_the_tip() -> None:
    pace = Pace(UNITS)
    pace.applied(10.0)
    pace.offered(12.0)
    pace.offered(15.0)
    pace.applied(16.0)
    pace.offered(17.5)
    measured = pace.measured()
    assert measured.ready_s == (2.0, 5.0, 1.5)
    assert measured.round_s == (6.0,)


def test_the_slowest_recent_transfer_counts_and_small_ones_do_not() -> None:
    pace = Pace(UNITS)
    pace.fetched(8 * MIB, 1.0)
    pace.fetched(2 * MIB, 1.0)
    pace.fetched(MIB - 1, 60.0)  # says more about the delay than about the rate
    pace.fetched(MIB, 0.0)
    assert pace.measured().rate_bytes_per_s == 2 * MIB


def test_only_recent_measurements_count() -> None:
    pace = Pace(UNITS)
    pace.fetched(MIB, 100.0)
    pace.applied(0.0)
    for second in range(1, 2 * KEPT + 1):
        pace.fetched(MIB, 1.0)
        pace.offered(float(second))
        pace.applied(float(second))
    measured = pace.measured()
    assert measured.rate_bytes_per_s == MIB
    assert len(measured.ready_s) == len(measured.round_s) == KEPT
