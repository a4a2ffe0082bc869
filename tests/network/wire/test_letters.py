"""Each letter counts once, in any order within the window, and only while it is fresh."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import BadMessage
from swarm.network.wire import relayed_messages
from swarm.network.wire.relayed_messages import (
    FRESH_MS,
    FRESH_S,
    WINDOW,
    RelayedMessages,
    Stamp,
    Window,
    split,
)

NOW_S = 1.8e9
NOW_MS = int(NOW_S * 1e3)
START = int(NOW_S * 1e6)
BASES = st.sampled_from([0, START, START + 5_000_000, 2**64 - 400])
NUMBERS = st.builds(lambda base, step: base + step, BASES, st.integers(0, 399))


def fate(known: RelayedMessages, stamp: Stamp, now_s: float = NOW_S, source: str = "a") -> str:
    """The reason of a refusal; "" if the letter counts."""
    try:
        known.take(source, stamp, now_s)
    except BadMessage as error:
        return error.reason
    return ""


@given(numbers=st.lists(NUMBERS, max_size=300))
def test_a_number_is_new_if_it_was_not_seen_and_is_within_the_window(numbers: list[int]) -> None:
    window, seen, newest = Window(), set[int](), 0
    for number in numbers:
        is_new = number not in seen and number > newest - WINDOW
        assert window.takes(Stamp(NOW_MS, number), NOW_MS) == is_new
        assert window.seen < 1 << WINDOW, "it does not grow"
        if is_new:
            seen.add(number)
            newest = max(newest, number)


@given(order=st.permutations(range(WINDOW)))
def test_letters_may_overtake_each_other_within_the_window(order: list[int]) -> None:
    window = Window()
    assert all(window.takes(Stamp(NOW_MS, START + step), NOW_MS) for step in order)
    assert not any(window.takes(Stamp(NOW_MS, START + step), NOW_MS) for step in order)


@given(
    shown=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 2 * FRESH_MS)), min_size=1, max_size=40
    ),
    sent=st.lists(
        st.tuples(st.integers(-FRESH_MS, 4 * FRESH_MS), NUMBERS), min_size=10, max_size=10
    ),
)
def test_no_letter_counts_twice_whenever_it_is_shown(
    shown: list[tuple[int, int]], sent: list[tuple[int, int]]
) -> None:
    """Also if all earlier letters of its sender were forgotten in between."""
    known, now_ms, counted = RelayedMessages(), NOW_MS, []
    for index, later_ms in shown:
        now_ms += later_ms
        stamp = Stamp(NOW_MS + sent[index][0], sent[index][1])
        if not fate(known, stamp, now_ms / 1e3):
            counted.append(stamp)
    assert len(counted) == len(set(counted))


def test_a_letter_is_fresh_for_half_a_minute_by_clocks_on_both_sides() -> None:
    known, age_ms = RelayedMessages(), int(FRESH_S * 1e3)
    assert fate(known, Stamp(NOW_MS - age_ms - 1, START)) == "envelope_age"
    assert fate(known, Stamp(NOW_MS + age_ms + 1, START)) == "envelope_age"
    assert not fate(known, Stamp(NOW_MS - age_ms, START))
    assert not fate(known, Stamp(NOW_MS + age_ms, START + 1))


def test_letters_of_an_older_start_are_refused_until_none_of_the_later_one_is_fresh() -> None:
    known, later = RelayedMessages(), START + 5_000_000
    assert not fate(known, Stamp(NOW_MS, START))
    assert not fate(known, Stamp(NOW_MS, later))
    assert fate(known, Stamp(NOW_MS, START + 1)) == "envelope_seen"
    now_s = NOW_S + FRESH_S + 1
    set_back = Stamp(int(now_s * 1e3) - 3_000, START + 2)
    assert not fate(known, set_back, now_s), "its clock was set back between two starts"
    assert fate(known, set_back, now_s) == "envelope_seen"


def test_what_is_remembered_of_peers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed_messages, "MAX_PEERS", 3)
    known = RelayedMessages()
    for peer in "abcd":
        assert not fate(known, Stamp(NOW_MS, START), source=peer)
        known.stamped(peer, b"", NOW_S)
    assert fate(known, Stamp(NOW_MS, START), source="d") == "envelope_seen"
    assert len(known._windows) == len(known._numbers) == 3
    assert fate(known, Stamp(NOW_MS, START), NOW_S + FRESH_S + 1, "a") == "envelope_age"


def test_a_stamp_is_like_no_other_to_the_same_destination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relayed_messages, "MAX_PEERS", 1)
    sender, stamps = RelayedMessages(), []
    for second, peer in enumerate("aaabaa"):  # a forgotten counter restarts higher
        stamped = sender.stamped(peer, b"content", NOW_S + second / 1e3)
        assert len(stamped) == len(b"content") + 16
        stamp, content = split(stamped)
        assert content == b"content" and stamp.sealed_ms == pytest.approx(NOW_MS + second, abs=1)
        stamps += [stamp.number] * (peer == "a")
    stamps.append(split(RelayedMessages().stamped("a", b"", NOW_S + 1))[0].number)
    assert stamps == sorted(set(stamps)), "a later start too has higher ones"
    assert stamps[:3] == [stamps[0], stamps[0] + 1, stamps[0] + 2]
    with pytest.raises(BadMessage, match="no stamp"):
        split(bytes(15))
