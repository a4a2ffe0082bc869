"""TCP proxies as links: who dials is known, cuts hold bytes back, rates hold."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from swarm.emulation.controls import INDEX_VARIABLE
from swarm.emulation.links import MOST_QUEUED_S, Link
from swarm.emulation.proxies import (
    CHUNK_BYTES,
    CUT_POLL_S,
    HOST,
    MOST_CHUNKS,
    Chunks,
    ProxyLinks,
)

RATE_MBIT = 40.0
FAST_MBIT = 80.0
SENT_BYTES = 1_000_000
WAIT_S = 20.0
CLIENT = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.sendall(bytes(int(sys.argv[2]))); s.shutdown(socket.SHUT_WR); s.recv(1)
"""

Clients = list[subprocess.Popen[bytes]]


@pytest.fixture
def links() -> Iterator[ProxyLinks]:
    made = ProxyLinks(Link(RATE_MBIT, RATE_MBIT, 10))
    yield made
    made.close()


def port_in(arguments: list[str], flag: str) -> int:
    return int(arguments[arguments.index(flag) + 1].rpartition("/")[2])


@pytest.fixture
def clients() -> Iterator[Clients]:
    started: Clients = []
    try:
        yield started
        for process in started:
            process.wait(20.0)
    finally:
        for process in started:
            process.kill()
            process.wait()


def send(
    links: ProxyLinks, ends: tuple[int, int], num_bytes: int, clients: Clients
) -> threading.Event:
    """Lets a process of one peer send to another; the event is set when all is there."""
    source, target = ends
    _, listen = links.place(target)
    server = socket.create_server(("127.0.0.1", port_in(listen, "--host-maddrs")))
    done = threading.Event()

    def receive() -> None:
        with server, server.accept()[0] as connection:
            left = num_bytes
            while left and (chunk := connection.recv(65536)):
                left -= len(chunk)
            if not left:
                done.set()

    threading.Thread(target=receive, daemon=True).start()
    port = port_in(listen, "--announce-maddrs")
    command = [sys.executable, "-c", CLIENT, str(port), str(num_bytes)]
    clients.append(subprocess.Popen(command, env={**os.environ, INDEX_VARIABLE: str(source)}))
    return done


def test_a_stream_gets_the_rate_of_the_link(links: ProxyLinks, clients: Clients) -> None:
    began_s = time.monotonic()
    assert send(links, (0, 1), SENT_BYTES, clients).wait(20.0)
    # 0.2 s on the line; a process must start as well, and the machine may be busy.
    assert time.monotonic() - began_s >= SENT_BYTES * 8 / (RATE_MBIT * 1e6) * 0.95


def test_a_cut_holds_back_what_its_peer_sends_and_nothing_else(
    links: ProxyLinks, clients: Clients
) -> None:
    links.cut([(0, 1)])
    held, free = send(links, (0, 1), 100, clients), send(links, (0, 2), 100, clients)
    assert free.wait(20.0)
    assert not held.wait(1.0)
    links.mend([(0, 1)])
    assert held.wait(20.0)


def test_what_a_cut_held_back_takes_the_line_down_once_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, clients: Clients
) -> None:
    links, climbed = ProxyLinks(Link(FAST_MBIT, FAST_MBIT, 0)), threading.Semaphore(0)
    up = links._shape.access_of(0).up
    leaves_at = up.leaves_at

    def counted(now_s: float, num_bytes: int) -> float | None:
        if (left_s := leaves_at(now_s, num_bytes)) is not None:
            climbed.release()
        return left_s

    monkeypatch.setattr(up, "leaves_at", counted)
    try:
        _, listen = links.place(1)
        links.cut([(0, 1)])
        with socket.create_server((HOST, port_in(listen, "--host-maddrs"))) as server:
            port, size = port_in(listen, "--announce-maddrs"), (MOST_CHUNKS + 64) * CHUNK_BYTES
            command = [sys.executable, "-c", CLIENT, str(port), str(size)]
            environment = {**os.environ, INDEX_VARIABLE: "0"}
            clients.append(subprocess.Popen(command, env=environment))
            with accepted(server) as reader:
                for _ in range(MOST_CHUNKS):
                    assert climbed.acquire(timeout=WAIT_S)
                began_s = time.monotonic()
                links.heal()
                got = 0
                while got < size:
                    got += len(reader.recv(size))
                    line_s = time.monotonic() - began_s + CUT_POLL_S
                    assert got <= line_s * FAST_MBIT * 1e6 / 8
    finally:
        links.close()


def test_what_a_reader_held_back_takes_the_line_down_when_it_reads_again() -> None:
    links = ProxyLinks(Link(FAST_MBIT, FAST_MBIT, 0))
    chunk_s = CHUNK_BYTES * 8 / (FAST_MBIT * 1e6)
    climbing, flying = Chunks(), Chunks()
    began_s = time.monotonic()
    for index in range(MOST_CHUNKS):  # they left the line up one after another, long ago
        climbing.put_nowait((began_s - 60 + index * chunk_s, bytes(CHUNK_BYTES)))
    climbing.put_nowait((began_s, b""))
    try:
        asyncio.run_coroutine_threadsafe(
            links._send_down(0, 1, climbing, flying), links._loop
        ).result(WAIT_S)
    finally:
        links.close()
    arrivals = [flying.get_nowait()[0] for _ in range(MOST_CHUNKS)]
    for number, at_s in enumerate(arrivals, 1):
        assert at_s >= began_s - CUT_POLL_S + number * chunk_s - 1e-6


def test_what_queues_in_a_peers_line_up_is_in_no_others_way(clients: Clients) -> None:
    links = ProxyLinks(Link(up_mbit=8, down_mbit=80, rtt_ms=10))
    try:
        _, listen = links.place(1)
        port = port_in(listen, "--announce-maddrs")
        with (
            socket.create_server((HOST, port_in(listen, "--host-maddrs"))) as server,
            # This process is no peer, and has lines of its own.
            socket.create_connection((HOST, port), WAIT_S) as mine,
            accepted(server) as near,
        ):
            command = [sys.executable, "-c", CLIENT, str(port), str(SENT_BYTES)]
            environment = {**os.environ, INDEX_VARIABLE: "0"}
            clients.append(subprocess.Popen(command, env=environment))
            with accepted(server) as full:
                left = SENT_BYTES - len(full.recv(1))
                delay_s = min(ping_s(mine, near) for _ in range(3))
                while left:  # it sent all the time: for 1 s, and had the pings waited, 0.75
                    left -= len(full.recv(left))
        assert delay_s < 0.6 * MOST_QUEUED_S
    finally:
        links.close()


def accepted(server: socket.socket) -> socket.socket:
    """The next connection to a server."""
    server.settimeout(WAIT_S)
    connection, _ = server.accept()
    connection.settimeout(WAIT_S)
    return connection


def ping_s(sender: socket.socket, receiver: socket.socket) -> float:
    """How long a byte is on its way."""
    began_s = time.monotonic()
    sender.sendall(b"-")
    receiver.recv(1)
    return time.monotonic() - began_s
