"""The measurement of link use: its links and its figures, without a swarm."""

from datetime import UTC, datetime
from types import ModuleType

import pytest

from swarm.emulation.links import Link
from swarm.errors import ConfigError

APPLIED = "DEBUG round={n}/9 kind=quorum height={n} digest=abcdef members=4\n"
CLOSED = "DEBUG topic=round roster closed with 4 of 4 offers: nobody else\n"
LOG = f"""2026-11-25T12:00:01Z {CLOSED}\
2026-11-25T12:00:02Z INFO waiting state=averaging reason='roster closed with 4 of 4 offers'
2026-11-25T12:01:03Z DEBUG topic=round peer ab left out after 62.0 s (limit 60.0): no results
2026-11-25T12:01:03Z {CLOSED}\
2026-11-25T12:02:06Z DEBUG topic=round height 1 decided with 3 of 4 votes under attempt 0
2026-11-25T12:02:09Z {APPLIED.format(n=1)}"""
"""A round whose convener closed its roster twice."""
T0 = datetime(2026, 11, 25, 12, tzinfo=UTC).timestamp()


def test_a_round_has_its_first_roster_however_often_it_was_closed(script: ModuleType) -> None:
    other = f"2026-11-25T12:00:50Z {CLOSED}"  # of a convener that decided nothing
    again = (
        f"2026-11-25T12:02:10Z {APPLIED.format(n=1)}2026-11-25T12:02:20Z {CLOSED}"
        f"2026-11-25T12:02:50Z {APPLIED.format(n=2)}2026-11-25T12:03:00Z {CLOSED}"
    )
    assert script.rosters_closed_at([LOG, ""]) == {1: T0 + 1}
    assert script.rosters_closed_at([other + again, LOG]) == {1: T0 + 1, 2: T0 + 140, 3: T0 + 180}


def applied(height: int, at_s: float, sent: int = 0, received: int = 0) -> dict[str, float]:
    return {
        "height": height,
        "time": T0 + at_s,
        "blob_bytes_sent": sent,
        "blob_bytes_received": received,
    }


def test_the_data_phase_lasts_until_the_last_peer_has_what_it_received(script: ModuleType) -> None:
    # Three have voted after 125 s; the last one fetches for 50 s more.
    line = Link(up_mbit=20, down_mbit=20, rtt_ms=50)
    done = [[applied(1, 126, sent=200_000_000)]] * 3 + [[applied(1, 176, received=400_000_000)]]
    closed_at = script.rosters_closed_at([LOG])
    (phase,) = script.data_phases([line] * 4, done, closed_at)
    assert phase.seconds == 175
    assert phase.used == pytest.approx(160 / 175)


def test_the_first_round_has_no_rest_of_a_round_before(script: ModuleType) -> None:
    line = Link(up_mbit=20, down_mbit=20, rtt_ms=50)
    done = [[applied(1, 126, sent=200_000_000)], [applied(1, 176)]]
    (phase,) = script.data_phases([line] * 2, done, {1: T0 + 1})
    assert phase.used == pytest.approx(80 / 175)


def test_what_was_sent_to_late_peers_of_a_round_counts_with_its_seconds(
    script: ModuleType,
) -> None:
    line = Link(up_mbit=8, down_mbit=8, rtt_ms=50)
    # The first one sends for 20 s to the second after it has the manifest, then for 30 s.
    first = [applied(1, 100), applied(2, 160, sent=50_000_000)]
    second = [applied(1, 120), applied(2, 160, received=30_000_000)]
    phases = script.data_phases([line] * 2, [first, second], {1: T0, 2: T0 + 130})
    assert [phase.seconds for phase in phases] == [120, 30]
    assert phases[1].used == pytest.approx(1.0)


def test_a_round_that_somebody_does_not_report_or_without_a_roster_has_no_figure(
    script: ModuleType,
) -> None:
    done = [[applied(1, 10), applied(2, 20), applied(3, 30)], [applied(1, 10), applied(3, 30)]]
    line = Link(up_mbit=8, down_mbit=8, rtt_ms=50)
    phases = script.data_phases([line] * 2, done, {2: T0 + 15, 3: T0 + 25})
    assert [phase.seconds for phase in phases] == [5]


def test_bytes_of_a_round_go_with_all_of_its_seconds(script: ModuleType) -> None:
    event = {"round": 2, "training_s": 1.0, "wait_s": 30.0, "seconds": 50.0}
    assert script.whole_s(event) == 50.0
    assert script.whole_s(event | {"round": 1}) == 31.0  # its peer had to start before


def test_the_direction_that_needs_longer_counts(script: ModuleType) -> None:
    link = Link(up_mbit=20, down_mbit=100, rtt_ms=50)
    sent = {"blob_bytes_sent": 10_000_000, "blob_bytes_received": 10_000_000}
    assert script.needed_s(link, sent) == pytest.approx(4.0)
    received = sent | {"blob_bytes_received": 100_000_000}
    assert script.needed_s(link, received) == pytest.approx(8.0)


def test_links_are_named_or_described(script: ModuleType) -> None:
    first, second = script.links_of("home-20,home-100-20", 2.0)
    assert (first.up_mbit, second.down_mbit, second.rtt_ms) == (10, 50, 100)
    assert script.links_of("10/1mbit,60ms", 1.0) == [Link(1, 10, 60)]
    with pytest.raises(ConfigError):
        script.links_of("home-20,nix", 1.0)
