"""A machine that cannot have an emulated network is detected without a traceback."""

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from swarm.emulation import networks
from swarm.emulation.controls import INDEX_VARIABLE
from swarm.emulation.links import MOST_QUEUED_S, Link
from swarm.emulation.networks import (
    CHUNK_BYTES,
    CUT_POLL_S,
    HOST,
    MOST_CHUNKS,
    Chunks,
    ProxyLinks,
    open_links,
    why_not_here,
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
    with closing(ProxyLinks(Link(RATE_MBIT, RATE_MBIT, 10))) as made:
        yield made


@pytest.fixture
def fast() -> Iterator[ProxyLinks]:
    with closing(ProxyLinks(Link(FAST_MBIT, FAST_MBIT, 0))) as made:
        yield made


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


def dial(clients: Clients, peer: int, port: int, num_bytes: int) -> None:
    """Starts a process of a peer that sends bytes to a port."""
    command = [sys.executable, "-c", CLIENT, str(port), str(num_bytes)]
    clients.append(subprocess.Popen(command, env={**os.environ, INDEX_VARIABLE: str(peer)}))


def send(
    links: ProxyLinks, ends: tuple[int, int], num_bytes: int, clients: Clients
) -> threading.Event:
    """Lets a process of one peer send to another. The event is set when all bytes are there."""
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
    dial(clients, source, port_in(listen, "--announce-maddrs"), num_bytes)
    return done


def test_a_stream_gets_the_rate_of_the_link(links: ProxyLinks, clients: Clients) -> None:
    began_s = time.monotonic()
    assert send(links, (0, 1), SENT_BYTES, clients).wait(20.0)
    # 0.2 s on the line. A process must start as well, and the machine may be busy.
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
    fast: ProxyLinks, monkeypatch: pytest.MonkeyPatch, clients: Clients
) -> None:
    climbed, up = threading.Semaphore(0), fast._shape.access_of(0).up
    leaves_at = up.leaves_at

    def counted(now_s: float, num_bytes: int) -> float | None:
        if (left_s := leaves_at(now_s, num_bytes)) is not None:
            climbed.release()
        return left_s

    monkeypatch.setattr(up, "leaves_at", counted)
    _, listen = fast.place(1)
    fast.cut([(0, 1)])
    with socket.create_server((HOST, port_in(listen, "--host-maddrs"))) as server:
        port, size = port_in(listen, "--announce-maddrs"), (MOST_CHUNKS + 64) * CHUNK_BYTES
        dial(clients, 0, port, size)
        with accepted(server) as reader:
            for _ in range(MOST_CHUNKS):
                assert climbed.acquire(timeout=WAIT_S)
            began_s = time.monotonic()
            fast.heal()
            got = 0
            while got < size:
                got += len(reader.recv(size))
                line_s = time.monotonic() - began_s + CUT_POLL_S
                assert got <= line_s * FAST_MBIT * 1e6 / 8


def test_what_a_reader_held_back_takes_the_line_down_when_it_reads_again(fast: ProxyLinks) -> None:
    chunk_s = CHUNK_BYTES * 8 / (FAST_MBIT * 1e6)
    climbing, flying = Chunks(), Chunks()
    began_s = time.monotonic()
    for index in range(MOST_CHUNKS):  # they left the uplink one after another, long ago
        climbing.put_nowait((began_s - 60 + index * chunk_s, bytes(CHUNK_BYTES)))
    climbing.put_nowait((began_s, b""))
    sending = fast._send_down(0, 1, climbing, flying)
    asyncio.run_coroutine_threadsafe(sending, fast._loop).result(WAIT_S)
    arrivals = [flying.get_nowait()[0] for _ in range(MOST_CHUNKS)]
    for number, at_s in enumerate(arrivals, 1):
        assert at_s >= began_s - CUT_POLL_S + number * chunk_s - 1e-6


def test_what_queues_in_a_peers_line_up_is_in_no_others_way(clients: Clients) -> None:
    with closing(ProxyLinks(Link(up_mbit=8, down_mbit=80, rtt_ms=10))) as links:
        _, listen = links.place(1)
        port = port_in(listen, "--announce-maddrs")
        with (
            socket.create_server((HOST, port_in(listen, "--host-maddrs"))) as server,
            # This process is no peer, and has its own lines.
            socket.create_connection((HOST, port), WAIT_S) as mine,
            accepted(server) as near,
        ):
            dial(clients, 0, port, SENT_BYTES)
            with accepted(server) as full:
                left = SENT_BYTES - len(full.recv(1))
                delay_s = min(ping_s(mine, near) for _ in range(3))
                while left:  # it sent all the time: for 1 s, or 0.75 s if the pings had waited
                    left -= len(full.recv(left))
    assert delay_s < 0.6 * MOST_QUEUED_S


def accepted(server: socket.socket) -> socket.socket:
    """The next connection to a server."""
    server.settimeout(WAIT_S)
    connection, _ = server.accept()
    connection.settimeout(WAIT_S)
    return connection


def ping_s(sender: socket.socket, receiver: socket.socket) -> float:
    """Transit time of a byte."""
    began_s = time.monotonic()
    sender.sendall(b"-")
    receiver.recv(1)
    return time.monotonic() - began_s


IP = """#!/bin/sh
echo "$*" >>{log}
case "$*" in {bad}) echo "{bad}: Operation not permitted" >&2; exit 1 ;; esac
"""


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    why_not_here.cache_clear()
    yield
    why_not_here.cache_clear()


class Machine:
    """This user is root, TUN is a file, and `ip` does nothing or fails at one command."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.log = folder / "commands"
        self.requests: list[int] = []
        tun = folder / "tun"
        tun.touch()
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(networks, "TUN", tun)
        monkeypatch.setattr(fcntl, "ioctl", self.ioctl)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        self.fails_at("nothing")

    def ioctl(self, _: int, request: int, __: Any) -> bytes:
        self.requests.append(request)
        return b""

    def fails_at(self, command: str) -> None:
        program = self.folder / "ip"
        program.write_text(IP.format(log=self.log, bad=command.replace(" ", "\\ ")))
        program.chmod(0o755)

    @property
    def commands(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


NOBODYS = f"swarm-{os.getpid()}-{networks.MAX_PEERS}"


def test_a_machine_is_tried_once_and_left_as_it_was(machine: Machine) -> None:
    assert why_not_here() is None
    commands = machine.commands
    assert commands[0] == f"netns add {NOBODYS}"
    assert commands[-2:] == [f"netns exec {NOBODYS} true", f"netns del {NOBODYS}"]
    assert machine.requests == [networks.TUNSETIFF]
    assert why_not_here() is None
    assert machine.commands == commands


def test_a_user_who_is_not_root_is_told_so(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not_here() == "network namespaces need root"


def test_without_the_program_ip_peers_get_proxies_and_it_is_said_why(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    said: list[str] = []
    links = open_links(["lan"], said.append)
    links.close()
    assert isinstance(links, ProxyLinks)
    (line,) = said
    assert "the program ip (iproute2)" in line


def test_without_the_device_that_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks, "TUN", machine.folder / "nowhere")
    assert "nowhere" in str(why_not_here())


def test_root_without_the_capability_is_told_what_was_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    assert "cannot be made here ([Errno 1] Operation not permitted)" in str(why_not_here())
    assert f"netns add {NOBODYS}" not in machine.commands


@pytest.mark.parametrize("command", ["netns add", "link set", "netns exec"])
def test_a_command_that_fails_is_named_and_nothing_stays(machine: Machine, command: str) -> None:
    at = f"{command} {NOBODYS} true" if command == "netns exec" else f"{command} {NOBODYS}"
    if command == "link set":
        at = f"link set sw{os.getpid() % 10**7}p{networks.MAX_PEERS} netns {NOBODYS}"
    machine.fails_at(at)
    assert f"cannot be made here (ip {at}: " in str(why_not_here())
    assert machine.commands[-1] == f"netns del {NOBODYS}"


def test_a_command_that_does_not_end_is_a_reason_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 10.0)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "timed out after 10.0 seconds" in str(why_not_here())


@pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))
def test_a_real_machine_that_can_is_left_as_it_was() -> None:
    assert why_not_here() is None
    assert not Path("/run/netns", NOBODYS).exists()
    assert f"p{networks.MAX_PEERS}:" not in Path("/proc/net/dev").read_text()
