"""The meaning of a link's figures for a run."""

from __future__ import annotations

import pytest

from swarm.protocol.timing.fitness import (
    SHORTEST_ROUND_S,
    Fitness,
    cap_for,
    lateness,
    link_verdict,
    training_s,
)


@pytest.mark.parametrize(
    ("down_mbit", "up_mbit", "fitness"),
    [
        (8.0, 8.0, Fitness.ENOUGH),  # 100 MB take 100 s
        (8.0, 7.9, Fitness.SLOW),
        (2.7, 1000.0, Fitness.SLOW),
        (1000.0, 2.6, Fitness.HOPELESS),  # over 300 s
        (0.0, None, Fitness.HOPELESS),
        (None, None, Fitness.UNKNOWN),
    ],
)
def test_the_slower_direction_decides(
    down_mbit: float | None, up_mbit: float | None, fitness: Fitness
) -> None:
    verdict = link_verdict(1e8, 100.0, down_mbit, up_mbit)
    assert verdict.fitness is fitness


def test_the_numbers_are_told() -> None:
    verdict = link_verdict(1e8, 100.0, 2.0, 4.0)
    assert verdict.needed_mbit == pytest.approx(8.0)
    assert verdict.text == (
        "2 Mbit/s down; a round moves 100 MB each way and trains for 100 s, so 8 Mbit/s are "
        "needed; here it takes 400 s"
    )


def test_without_a_known_round_nothing_is_said() -> None:
    assert link_verdict(1e8, None, 1.0, 1.0).fitness is Fitness.UNKNOWN
    assert training_s(1000, []) is None and training_s(1000, [0.0]) is None


def test_the_median_peer_says_how_long_local_steps_take() -> None:
    assert training_s(50_000, [0.0, 500.0, 1000.0, 50_000.0]) == pytest.approx(50.0)
    assert training_s(10, [1000.0]) == SHORTEST_ROUND_S


def test_who_is_always_late_is_told_what_would_fit() -> None:
    words = lateness(3, 250, 1000, tokens_per_s=25.0, round_s=10.0)
    assert words is not None
    assert "3 rounds in a row went on without this peer" in words
    assert "take it 40 s, and the others were done after 10 s" in words
    assert "by 25% of a round" in words and "4 times as fast" in words


def test_whose_steps_are_done_in_time_is_told_of_its_line() -> None:
    words = lateness(3, 1000, 1000, tokens_per_s=250.0, round_s=10.0, up_mbit=1.25)
    assert words is not None and "its local steps take only 4 s of 10: " in words
    assert "an uplink of 1.25 Mbit/s" in words
    words = lateness(3, 1000, 1000, tokens_per_s=250.0, round_s=10.0)
    assert words is not None and "an uplink not measured yet" in words


def test_it_is_told_ever_more_rarely() -> None:
    told = [n for n in range(1, 50) if lateness(n, 1, 4, tokens_per_s=1.0, round_s=1.0)]
    assert told == [3, 6, 12, 24, 48]


@pytest.mark.parametrize(
    ("up_mbit", "sent_mbit", "cap_mbit"),
    [
        (20.0, None, 17.6),
        (20.0, 18.0, 17.6),
        (3.0, 16.0, 12.0),
        (0.5, None, 1.0),
    ],
)
def test_a_cap_is_nine_tenths_of_a_line_and_most_of_what_it_was_seen_to_carry(
    up_mbit: float, sent_mbit: float | None, cap_mbit: float
) -> None:
    assert cap_for(up_mbit, sent_mbit) == pytest.approx(cap_mbit)
