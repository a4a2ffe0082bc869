"""A simulated peer does one thing after the other."""

import pytest

from swarm.emulation.simulator.peers.simulated_peer import Turns


def test_what_is_asked_for_meanwhile_is_done_afterwards() -> None:
    turns, done = Turns(), list[str]()

    def first() -> None:
        turns(lambda: done.append("second"))
        done.append("first")

    turns(first)
    turns(lambda: done.append("third"))
    assert done == ["first", "second", "third"]


def test_something_that_fails_holds_up_nothing() -> None:
    turns, done = Turns(), list[str]()

    def fails() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        turns(fails)
    turns(lambda: done.append("next"))
    assert done == ["next"]
