"""Quantiles of the newest measurements: what one outlier, or an old one, can do to them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from swarm.protocol.estimates import DAY_S, ROBUST, Recent


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
