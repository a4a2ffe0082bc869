"""Keys that hold streams and connections, and request little, keep nobody out.

The attackers are keys without a daemon, which dial the victim's port for blobs from addresses in
two or more networks of loopback. The victim is a real node.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import pytest

from swarm.emulation.local_swarm import LocalSwarm
from swarm.errors import BadMessage, NoRoute
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.bulk import HEAD_BYTES, PROTOCOL, Ask, Head, Status
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.wire import transport
from swarm.network.wire.identity import Identity
from swarm.network.wire.ledger import LIMITS, Cost
from swarm.network.wire.streams import receive_into
from swarm.network.wire.tcp_listener import introduce
from swarm.protocol.values.manifest import PeerId
from tests.hostile.false_records import Stranger
from tests.hostile.victim import WAIT_S, Victim, wait_until
from tests.network.conftest import Peers
from tests.scenarios.swarms import ROUND_S, has_rounds, peer_id, rounds, write_run

MOST_SLOWER = 2.0
"""Limit of the time with strangers over that without: joining, an export, a monitor's look."""
TIMES = 3
NETWORKS = ("127.0.1", "127.0.2")
KEYS_EACH = 8
FETCHES = 10
STREAMS_EACH = int(LIMITS[Cost.STREAMS].stranger.most)
MISSING = Ask("00" * 32, 0, 1, False).encode()
BLOB = bytes(range(256)) * 1000


@dataclass(frozen=True)
class Door:
    """A port for blobs, and its owner."""

    peer_id: PeerId
    port: int

    @classmethod
    def of(cls, victim: Victim) -> Door:
        direct = victim.node._ways.direct
        assert direct is not None
        return cls(victim.node.peer_id, direct.door.port)


async def dialled(door: Door, host: str) -> socket.socket:
    """A connection to a port for blobs, from a host of the attacker."""
    connection = socket.socket()
    connection.setblocking(False)
    connection.bind((host, 0))
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", door.port))
    return connection


async def asked_once(door: Door, key: Stranger, host: str) -> socket.socket | None:
    """An idle stream of a key that has asked once. None if it is not served."""
    identity = Identity(Path(), key.peer_id, key.subkey, key.key)
    connection = await dialled(door, host)
    try:
        await introduce(connection, identity, door.peer_id, PROTOCOL)
        if await is_answered(connection):
            return connection
    except (OSError, BadMessage):
        pass
    connection.close()
    return None


async def is_answered(connection: socket.socket) -> bool:
    head = bytearray(HEAD_BYTES)
    await asyncio.get_running_loop().sock_sendall(connection, MISSING)
    await receive_into(connection, memoryview(head))
    return Head.decode(bytes(head)).status == Status.MISSING


@asynccontextmanager
async def streams_of_16_keys(*doors: Door) -> AsyncIterator[None]:
    """The strangers' whole share of streams, renewed when one ends, with occasional requests."""
    keys = [(Stranger(), f"{net}.{k + 1}") for net in NETWORKS for k in range(KEYS_EACH)]
    held = asyncio.Semaphore(0)

    async def hold(door: Door, key: Stranger, host: str) -> None:
        while True:
            stream = await asked_once(door, key, host)
            if stream:
                held.release()
                try:
                    while await is_answered(stream):
                        await asyncio.sleep(1.0)
                except OSError:
                    pass
                finally:
                    stream.close()
            await asyncio.sleep(0.2)

    holding = [
        asyncio.create_task(hold(door, key, host))
        for door in doors
        for key, host in keys
        for _ in range(STREAMS_EACH)
    ]
    try:
        for _ in holding:
            await held.acquire()
        yield
    finally:
        for task in holding:
            task.cancel()
        await asyncio.gather(*holding, return_exceptions=True)


def test_a_newcomer_is_served_while_16_keys_hold_all_idle_streams(
    peers: Peers, victim: Victim
) -> None:
    """Joining, an export and a monitor are such fetches. A peer has no other scarce resource."""
    digest, joiner = victim.store.put(BLOB), peers.node()
    want = Want(digest, len(BLOB), (victim.node.peer_id,))

    async def seconds() -> float:
        began_s = time.monotonic()
        for _ in range(FETCHES):
            downloads = Downloads(joiner, BlobStore())
            await downloads.fetch([want], on_failure=lambda *why: failures.append(why[2]))
            assert downloads.store.get(digest) == BLOB
        return time.monotonic() - began_s

    async def fetch_without_and_beside() -> tuple[float, float]:
        without_s = await seconds()
        async with streams_of_16_keys(Door.of(victim)):
            return without_s, await seconds()

    failures: list[str] = []
    without_s, beside_s = joiner.run(fetch_without_and_beside(), WAIT_S)
    sys.stdout.write(json.dumps({"attack": "held-slots", "fetching": beside_s / without_s}) + "\n")
    assert not failures
    refused = victim.node.traffic.refused
    assert not [reason for reason in refused if reason.startswith("streams")], refused


def test_connections_that_say_nothing_keep_no_member_from_direct_streams(
    peers: Peers, victim: Victim, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, member = victim.store.put(BLOB), peers.node()
    want = Want(digest, len(BLOB), (victim.node.peer_id,))
    assert member.run(Downloads(member, BlobStore()).fetch_one(want, timeout_s=WAIT_S), WAIT_S)
    direct = member._ways.direct
    assert direct is not None
    member.loop.call_soon_threadsafe(direct.kept.close)
    victim.ledger.admit([member.peer_id])
    monkeypatch.setattr("swarm.network.wire.tcp_listener.ADMIT_S", 2 * WAIT_S)

    async def none(*_: object) -> socket.socket:
        raise NoRoute("only direct streams in this test")

    monkeypatch.setattr(transport, "open_stream", none)
    strangers = int(LIMITS[Cost.ADMITTING].shared.most / 4)

    async def fetch_beside() -> bytes | None:
        hosts = [f"127.0.{k % 4 + 1}.1" for k in range(strangers)]
        silent = [await dialled(Door.of(victim), host) for host in hosts]
        try:
            loop = asyncio.get_running_loop()
            for connection in silent:  # a nonce shows that it is being admitted
                await loop.sock_recv(connection, 16)
            left = victim.ledger.left("/ip4/127.0.9.1/tcp/0", Cost.ADMITTING, 0.0)
            assert left == 0, "no other stranger would be heard"
            return await Downloads(member, BlobStore()).fetch_one(want, timeout_s=10.0)
        finally:
            for connection in silent:
                connection.close()

    assert member.run(fetch_beside(), WAIT_S) == BLOB
    wait_until(lambda: not victim.inbound._tasks)


# ---------------------------------------------------------------- a live swarm


@contextmanager
def held_by_16_keys(doors: list[Door]) -> Iterator[None]:
    """Holds the strangers' whole share of these peers while the context is open."""
    held, over = threading.Event(), threading.Event()

    async def hold() -> None:
        async with streams_of_16_keys(*doors):
            held.set()
            while not over.is_set():
                await asyncio.sleep(0.1)

    with ThreadPoolExecutor(1) as threads:
        holding = threads.submit(asyncio.run, hold())
        try:
            assert held.wait(WAIT_S), "the attack did not even arrive"
            yield
        finally:
            over.set()
        holding.result(WAIT_S)


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.mark.scenario
@pytest.mark.exhaustive
def test_16_keys_make_joining_export_and_monitor_at_most_twice_as_slow(tmp_path: Path) -> None:
    ports = free_ports(3)
    run_file = write_run(tmp_path, ["run.rounds=100000", "merging.alpha=0.0"])

    def direct(index: int) -> list[str]:
        return ["--direct-port", str(ports[index])] if index < len(ports) else []

    with LocalSwarm(tmp_path / "swarm", run_file, 3, own_options=direct) as swarm:
        swarm.start()
        swarm.wait_until(has_rounds(2), what="rounds", timeout_s=3 * ROUND_S)
        members = list(swarm.peers)
        doors = [Door(peer_id(peer), port) for peer, port in zip(members, ports, strict=True)]
        join = ["--initial-peers", members[0].join_address()]

        def joining() -> None:
            joiner = swarm.add(join)
            what = f"joining of peer {joiner.index}"
            swarm.wait_until(lambda _: bool(rounds(joiner)), what=what, timeout_s=2 * ROUND_S)
            joiner.kill()

        def run(*command: str) -> None:
            line = [sys.executable, "-m", *command, *join]
            subprocess.run(line, check=True, capture_output=True, timeout=2 * ROUND_S)

        numbers = count()
        acts: dict[str, Callable[[], None]] = {
            "joining": joining,
            "export": lambda: run("peers.export", "--out", f"{tmp_path}/export-{next(numbers)}"),
            "monitor": lambda: run("peers.monitor", "--once"),
        }
        without = seconds_of(acts)
        with held_by_16_keys(doors):
            beside = seconds_of(acts)
    ratios = {name: round(beside[name] / without[name], 2) for name in acts}
    sys.stdout.write(
        json.dumps({"attack": "held-slots", "n": TIMES, "seconds": without, **ratios}) + "\n"
    )
    assert max(ratios.values()) <= MOST_SLOWER, ratios


def seconds_of(acts: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Seconds of each, the median of some tries."""
    taken: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(TIMES):
        for name, act in acts.items():
            began_s = time.monotonic()
            act()
            taken[name].append(time.monotonic() - began_s)
    return {name: round(median(each), 2) for name, each in taken.items()}
