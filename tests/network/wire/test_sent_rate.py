"""The sending rate of this machine's line: only bytes acknowledged while more wait count."""

import asyncio
import socket
import sys
from contextlib import ExitStack, closing

import pytest

from swarm.network.wire import upload_rate
from swarm.network.wire.upload_rate import (
    KEPT,
    SAMPLE_S,
    SHOWN_BY,
    WINDOW_S,
    TcpInfo,
    UploadRate,
    tcp_info,
)
from swarm.protocol.timing.pace import DAY_S

FRESH = TcpInfo(*[0] * len(TcpInfo._fields))


class Line:
    """Connections of a fake kernel, and a fake clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.rate = UploadRate(lambda: self.now)
        self._kernel: dict[socket.socket, TcpInfo] = {}
        monkeypatch.setattr(upload_rate, "tcp_info", self._kernel.__getitem__)

    def send(self, mbit: float, *receivers: str, seconds: float, unsent: int = 1) -> None:
        """Sends at a total rate, with or without unsent bytes all the time."""

        async def while_sending() -> None:
            with ExitStack() as stack:
                mine = [socket.socket() for _ in receivers]
                for each, receiver in zip(mine, receivers, strict=True):
                    stack.enter_context(closing(each))
                    self._kernel[each] = FRESH._replace(acked=1000, unsent=unsent)
                    stack.enter_context(self.rate.watching(receiver, each))
                self.rate.sample()
                for _ in range(round(seconds / SAMPLE_S)):
                    self.now += SAMPLE_S
                    for each in mine:
                        acked = int(mbit * 1e6 / 8 * SAMPLE_S / len(mine))
                        before = self._kernel[each]
                        self._kernel[each] = before._replace(acked=before.acked + acked)
                    self.rate.sample()
            self.rate.sample()

        asyncio.run(while_sending())


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(monkeypatch)


def test_the_fast_windows_of_late_are_the_rate_and_pauses_are_not_in_it(line: Line) -> None:
    assert line.rate.mbit is None
    line.send(50.0, "A", "B", seconds=WINDOW_S)
    assert line.rate.mbit is None, "too short"
    line.now += 600.0
    line.send(20.0, "A", "B", seconds=2 * WINDOW_S)
    line.now += 600.0
    line.send(8.0, "A", "B", seconds=2 * WINDOW_S)
    assert line.rate.mbit == pytest.approx(20.0, rel=0.01)
    line.send(8.0, "A", "B", seconds=(KEPT + 1) * WINDOW_S)
    assert line.rate.mbit == pytest.approx(8.0, rel=0.01), "the line has become slower"


def test_while_nothing_waits_in_the_kernel_something_else_is_the_bound(line: Line) -> None:
    line.send(3.0, "A", "B", seconds=60.0, unsent=0)
    assert line.rate.mbit is None, "a cap, a queue, or peers that ask for little"


def test_a_receiver_that_is_gone_says_nothing_of_the_line(line: Line) -> None:
    line.send(20.0, "A", "B", seconds=WINDOW_S + SAMPLE_S)
    line.send(0.0, "A", "B", seconds=60.0)
    assert line.rate.mbit == pytest.approx(20.0, rel=0.01)


def test_what_one_receiver_takes_shows_only_what_the_line_carries_at_least(line: Line) -> None:
    line.send(1.0, "thin", seconds=WINDOW_S + SAMPLE_S)
    assert line.rate.mbit == pytest.approx(1.0, rel=0.01)
    line.send(20.0, "A", "B", seconds=WINDOW_S + SAMPLE_S)
    line.send(1.0, "thin", "thin", seconds=2 * KEPT * WINDOW_S)
    assert line.rate.mbit == pytest.approx(20.0, rel=0.01), "its line is the limit, not this one"
    line.send(8.0, "A", "thin", seconds=(KEPT + 1) * WINDOW_S)
    assert line.rate.mbit == pytest.approx(8.0, rel=0.01)


def test_one_window_that_is_too_fast_is_not_the_rate_and_yesterdays_are_none(line: Line) -> None:
    line.send(20.0, "A", "B", seconds=3 * WINDOW_S + SAMPLE_S)
    line.send(900.0, "A", "B", seconds=WINDOW_S + SAMPLE_S)
    line.send(20.0, "A", "B", seconds=3 * WINDOW_S + SAMPLE_S)
    assert line.rate.mbit == pytest.approx(20.0, rel=0.01)
    assert line.rate.mbit_since(line.now + 1.0) is None
    line.now += DAY_S + 1.0
    assert line.rate.mbit is None


def test_where_nobody_else_takes_anything_one_receiver_shows_a_slower_line(line: Line) -> None:
    """In a swarm of two the figure could only rise."""
    line.send(80.0, "A", seconds=4 * WINDOW_S)
    line.send(6.0, "A", seconds=(KEPT + 1) * WINDOW_S)
    assert line.rate.mbit == pytest.approx(6.0, rel=0.01)


def test_what_one_of_several_takes_is_shown_and_does_not_count(line: Line) -> None:
    line.send(20.0, "A", "B", seconds=2 * WINDOW_S)
    since_s = line.now
    line.send(2.0, "thin", seconds=(SHOWN_BY + 2) * WINDOW_S)
    assert line.rate.mbit == pytest.approx(20.0, rel=0.01)
    assert line.rate.shown_since(since_s) == pytest.approx(2.0, rel=0.01)
    assert line.rate.shown_since(line.now - WINDOW_S) is None, "too few windows"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not say")
def test_what_the_kernel_says_of_a_connection_that_nobody_reads() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sending,
    ):
        receiving, _ = server.accept()
        with receiving:
            before = tcp_info(sending)
            assert before is not None and before.unsent == 0
            sending.setblocking(False)
            taken = 0
            while True:
                try:
                    taken += sending.send(bytes(2**16))
                except BlockingIOError:
                    break
            stuck = tcp_info(sending)
            assert stuck is not None and 0 < stuck.unsent <= taken
            assert 0 < stuck.acked - before.acked <= taken - stuck.unsent
    assert tcp_info(sending) is None, "it is closed"
