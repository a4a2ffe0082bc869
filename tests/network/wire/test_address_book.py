"""Peers and times of tries: decisions with a fake clock."""

from __future__ import annotations

import itertools

import pytest

from swarm.network.wire.address_book import MAX_ADDRESSES, AddressBook, Moment, Remembered, freshest
from swarm.network.wire.daemon import Address

DAY_S = 86_400.0
WALL = 1.7e9
IDS = [
    "12D3KooWEhqPMwUVi6Sr3ThFZAsoGfBTXdv6PxBByKg8ZdCrNgTf",
    "12D3KooWLjnkCzkUbQjq55TtGGsT9dY5cknSpy1Qik5a8qLoDKUn",
    "12D3KooWP1ZxhvKZd4QgU5dG4xq3mCj6SwFD3iEAppUqJqXXV9cx",
]


def text(number: int, peer: int = 1) -> str:
    return f"/ip4/10.0.{number // 250}.{number % 250 + 1}/tcp/4001/p2p/{IDS[peer]}"


def at(clock_s: float) -> Moment:
    return Moment(clock_s, WALL + clock_s)


def tries(book: AddressBook, seconds: int, *, neighbours: set[str], answers: bool) -> list[int]:
    """Seconds of tries, for a node that looks every second."""
    found = []
    for second in range(seconds):
        for chosen in book.next(neighbours, at(second), 16):
            found.append(second)
            book.tried(chosen.address, answers, WALL + second)
    return found


def test_a_peer_that_is_missing_is_tried_every_half_minute_and_one_that_is_there_less_often() -> (
    None
):
    book = AddressBook(IDS[0])
    book.recall([Remembered(text(1), WALL)])
    assert tries(book, 100, neighbours={IDS[2]}, answers=False) == [0, 30, 60, 90]
    book = AddressBook(IDS[0])
    book.add([text(1)])
    assert tries(book, 150, neighbours={IDS[1]}, answers=True) == [0, 60, 120]


def test_who_is_alone_tries_all_the_time() -> None:
    book = AddressBook(IDS[0])
    book.add([text(1)])
    assert tries(book, 9, neighbours=set(), answers=False) == [0, 2, 4, 6, 8]


def test_a_peer_that_was_off_for_a_week_is_tried_as_before() -> None:
    book = AddressBook(IDS[0])
    book.recall([Remembered(text(1), WALL - 7 * DAY_S)])
    assert tries(book, 100, neighbours={IDS[2]}, answers=False) == [0, 30, 60, 90]


def test_an_address_at_which_nobody_ever_answered_is_tried_less_and_less_but_for_ever() -> None:
    book = AddressBook(IDS[0])
    book.add([text(1)])
    found = tries(book, 3000, neighbours={IDS[2]}, answers=False)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert gaps == [60, 120, 240, 480, 600, 600, 600]


def test_an_address_that_a_person_gave_is_tried_on_and_never_forgotten() -> None:
    book = AddressBook(IDS[0])
    book.add([text(0)], are_given=True)
    assert tries(book, 100, neighbours={IDS[2]}, answers=False) == [0, 30, 60, 90]
    book.recall(Remembered(text(number, 2), WALL) for number in range(1, 2 * MAX_ADDRESSES))
    assert len(book.known()) == MAX_ADDRESSES
    assert text(0) in [known for known, _ in book.known()]


def test_missing_peers_come_before_those_that_are_there_and_nobody_is_passed_over() -> None:
    book = AddressBook(IDS[0])
    book.add([text(1, 1), text(2, 2)])
    chosen = book.next({IDS[1]}, at(0), 1)
    assert [one.address.text for one in chosen] == [text(2, 2)]
    assert "not in the routing table: tried every 30 s" in chosen[0].reason
    assert [one.address.text for one in book.next({IDS[1]}, at(1), 1)] == [text(1, 1)]
    many = AddressBook(IDS[0])
    many.add(text(number) for number in range(100))
    seen = {one.address for second in range(10) for one in many.next({IDS[2]}, at(second), 16)}
    assert len(seen) == 100


def test_own_and_malformed_addresses_are_left_out() -> None:
    book = AddressBook(IDS[0])
    book.add([text(1, 0), "here", text(1, 1)])
    assert [known for known, _ in book.known()] == [text(1, 1)]


def test_the_freshest_answer_of_several_lists_counts() -> None:
    old, new = [Remembered("a", 1.0), Remembered("b", 5.0)], [Remembered("a", 9.0)]
    assert freshest(old, new, limit=5) == (("a", 9.0), ("b", 5.0))
    assert freshest(old, new, limit=1) == (("a", 9.0),)


@pytest.mark.parametrize("answers", [True, False])
def test_an_answer_is_remembered_with_its_time(answers: bool) -> None:
    book = AddressBook(IDS[0])
    book.add([text(1)])
    book.tried(Address.parse(text(1)), answers, WALL)
    assert book.known() == ((text(1), WALL if answers else 0.0),)
