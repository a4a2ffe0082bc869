"""How fast this machine sends: only what others wait for counts, and only over some seconds."""

import pytest

from swarm.network.sent_rate import KEPT, WINDOW_S, SentRate


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def send(rate: SentRate, clock: Clock, seconds: float, mbit: float) -> None:
    """An answer to each of two peers, a part every quarter of a second."""
    with rate.sending("A"), rate.sending("B"):
        for _ in range(int(seconds * 4)):
            clock.now += 0.25
            rate.count(int(mbit * 1e6 / 8 / 4))


def test_the_fastest_window_of_late_is_the_rate_and_pauses_are_not_in_it() -> None:
    clock = Clock()
    rate = SentRate(clock)
    assert rate.mbit is None
    send(rate, clock, WINDOW_S - 1, 50.0)
    assert rate.mbit is None, "what buffers took in would count as sent"
    clock.now += 600.0
    send(rate, clock, 2 * WINDOW_S, 20.0)
    clock.now += 600.0
    send(rate, clock, 2 * WINDOW_S, 8.0)
    assert rate.mbit == pytest.approx(20.0, rel=0.01)
    send(rate, clock, (KEPT + 1) * WINDOW_S, 8.0)
    assert rate.mbit == pytest.approx(8.0, rel=0.01), "the line has become slower"


def test_answers_at_the_same_time_share_the_line() -> None:
    clock = Clock()
    rate = SentRate(clock)
    with rate.sending("C"):
        send(rate, clock, WINDOW_S / 2, 30.0)
        send(rate, clock, WINDOW_S / 2, 10.0)
    assert rate.mbit == pytest.approx(20.0, rel=0.01)


def test_what_one_receiver_takes_shows_only_what_the_line_carries_at_least() -> None:
    clock = Clock()
    rate = SentRate(clock)

    def send_to_one(mbit: float, seconds: float) -> None:
        with rate.sending("thin"):
            for _ in range(int(seconds * 4)):
                clock.now += 0.25
                rate.count(int(mbit * 1e6 / 8 / 4))

    send_to_one(1.0, WINDOW_S)
    assert rate.mbit == pytest.approx(1.0, rel=0.01)
    send(rate, clock, WINDOW_S, 20.0)
    send_to_one(1.0, 2 * KEPT * WINDOW_S)
    assert rate.mbit == pytest.approx(20.0, rel=0.01), "its line is the receiver's, not this one"
    send(rate, clock, KEPT * WINDOW_S, 8.0)
    assert rate.mbit == pytest.approx(8.0, rel=0.01)


def test_a_window_in_which_another_came_has_two_receivers() -> None:
    clock = Clock()
    rate = SentRate(clock)
    send(rate, clock, WINDOW_S, 20.0)
    with rate.sending("A"):
        for _ in range(KEPT):
            with rate.sending("B"):
                clock.now += 1.0
                rate.count(0)
            clock.now += WINDOW_S - 1.0
            rate.count(int(5e6 / 8 * WINDOW_S))
    assert rate.mbit == pytest.approx(5.0, rel=0.01)
