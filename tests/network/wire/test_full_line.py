"""Tells limits of a line from those of a receiver, a processor or TCP's control."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing

import pytest

from swarm.emulation.links import Link
from swarm.emulation.networks import NamespaceLinks, address_of, why_not_here
from swarm.network.wire.upload_rate import (
    ALIKE,
    LINE_SAMPLE_S,
    Sample,
    agreed_mbit,
    fill,
    full_rate_mbit,
    sampled,
)
from swarm.peer.start.link_monitor import UPLINK_S
from tests.processes import running


def samples(
    mbit: Sequence[float] = (1.0, 20.0, 20.0, 20.0),
    *,
    bound: float = 1.0,
    queued_s: Sequence[float] = (0.0, 0.1, 0.1, 0.1),
    each: int = 10,
) -> list[Sample]:
    """Samples of a transfer at rates of quarters.

    The line was the limit for a share of the time.
    """
    found, num_bytes = [Sample(5.0, 0, 0.0, 0.0)], 0.0
    for rate, queued in zip(mbit, queued_s, strict=True):
        for _ in range(each):
            num_bytes += rate * 1e6 / 8 * LINE_SAMPLE_S
            at_s = 5.0 + len(found) * LINE_SAMPLE_S
            found.append(Sample(at_s, int(num_bytes), (at_s - 5.0) * bound, queued))
    return found


def test_a_full_line_shows_its_rate_once_tcp_has_found_it() -> None:
    assert full_rate_mbit(samples()) == pytest.approx(20.0, rel=1e-3)
    assert full_rate_mbit(samples(each=2)) == pytest.approx(20.0, rel=1e-3)
    late_loss = samples((1.0, 30.0, 22.0, 18.0))
    assert full_rate_mbit(late_loss) == pytest.approx(20.0, rel=1e-3), "a burst has ended"


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(samples(bound=0.8), id="the receiver had no room for a fifth of the time"),
        pytest.param(samples(bound=0.0), id="a processor was too slow: nothing was under way"),
        pytest.param(samples((1.0, 4.0, 16.0, 64.0)), id="the rate still rose"),
        pytest.param(samples(queued_s=(0.0,) * 4), id="no packet waited anywhere"),
        pytest.param(samples(queued_s=(0.1, 0.1, 0.1, 0.01)), id="the queue ran dry"),
        pytest.param(samples(each=1), id="too few samples"),
        pytest.param([], id="the kernel says nothing"),
    ],
)
def test_what_was_bound_by_something_else_says_nothing_of_the_line(other: list[Sample]) -> None:
    assert full_rate_mbit(other) is None


@pytest.mark.parametrize(
    ("rates", "agreed"),
    [
        ([], None),
        ([20.0], None),
        ([20.0, 20.0 / ALIKE * 0.99], None),
        ([20.0, 19.0], 19.0),
        ([9.5, 20.0, 10.0, 19.0], 19.0),
        ([9.5, 20.0, 10.0], 9.5),
    ],
)
def test_two_receivers_have_to_agree_and_the_fastest_of_such_pairs_counts(
    rates: list[float], agreed: float | None
) -> None:
    """A busy receiver takes less than the line carries, and rarely as little as another one."""
    assert agreed_mbit({str(number): rate for number, rate in enumerate(rates)}) == agreed


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_a_connection_within_one_machine_is_never_a_full_line() -> None:
    done = asyncio.Event()

    async def sink(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(2**16):
            pass
        writer.close()
        done.set()

    async def send() -> list[Sample]:
        server = await asyncio.start_server(sink, "127.0.0.1", 0)
        async with server:
            with closing(socket.create_connection(server.sockets[0].getsockname())) as connection:
                connection.setblocking(False)
                fill(connection)
                algorithm = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                assert algorithm.rstrip(b"\0") == b"reno"
                loop = asyncio.get_running_loop()
                ends_s = loop.time() + 12 * LINE_SAMPLE_S
                with sampled(connection) as found:
                    while loop.time() < ends_s:
                        await loop.sock_sendall(connection, bytes(2**16))
            await done.wait()
            return found

    found = asyncio.run(send())
    assert len(found) > 2
    assert found[-1].num_bytes > found[0].num_bytes
    assert full_rate_mbit(found) is None


async def test_of_what_is_no_tcp_connection_there_are_no_samples() -> None:
    mine, other = socket.socketpair()
    with closing(mine), closing(other), sampled(mine) as found:
        fill(mine)
        await asyncio.sleep(2 * LINE_SAMPLE_S)
    assert found == []


TAKE = """
import socket, time
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, {buffer})
s.bind(("{host}", 5000)); s.listen(); print("up", flush=True)
c, _ = s.accept()
while c.recv(16_384): time.sleep({pause_s})
"""
MEASURE = """
import asyncio, socket
from contextlib import suppress
from swarm.network.wire.upload_rate import fill, full_rate_mbit, sampled

async def measure():
    connection = socket.create_connection(("{host}", 5000), 10.0)
    connection.setblocking(False)
    fill(connection)
    with sampled(connection) as samples, suppress(TimeoutError):
        async with asyncio.timeout({seconds}):
            while True:
                await asyncio.get_running_loop().sock_sendall(connection, bytes(2**16))
    return full_rate_mbit(samples)

print(asyncio.run(measure()))
"""


def measured_in_namespaces(*, pause_s: float, buffer: int) -> str:
    """The result of a peer with 8 Mbit/s and one with 80, which pauses after each 16 KiB."""
    links = NamespaceLinks([Link(8, 80, 50), Link(80, 80, 50)])
    try:
        (send, _), (take, _), host = links.place(0), links.place(1), address_of(1)
        receiver = TAKE.format(host=host, pause_s=pause_s, buffer=buffer)
        sender = MEASURE.format(host=host, seconds=UPLINK_S)
        command = [*take, sys.executable, "-c", receiver]
        with running(command, stdout=subprocess.PIPE) as taking:
            assert taking.stdout is not None and taking.stdout.readline() == b"up\n"
            found = subprocess.run(
                [*send, sys.executable, "-c", sender], capture_output=True, timeout=60, check=True
            )
        return found.stdout.decode().strip()
    finally:
        links.close()


@pytest.mark.alone
@pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))
def test_a_peer_behind_a_thin_uplink_finds_its_rate() -> None:
    found = measured_in_namespaces(pause_s=0.0, buffer=2**20)
    assert found != "None", "the line was not the sender's limit"
    assert float(found) == pytest.approx(8, rel=0.12)


@pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))
def test_a_receiver_that_takes_less_than_the_line_carries_shows_nothing_of_it() -> None:
    assert measured_in_namespaces(pause_s=0.05, buffer=2**15) == "None"
