"""Streams that are kept open for the next user."""

from __future__ import annotations

import asyncio
import errno
import math
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from swarm.config import NetworkSection
from swarm.errors import BadMessage, NetworkDown, NoRoute, Refused
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import PROTOCOL
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.node.node import Handlers, Node
from swarm.network.wire import tcp_dialer, tcp_listener, transport
from swarm.network.wire.identity import load_or_create_identity
from swarm.network.wire.ledger import Ledger
from swarm.network.wire.relayed_messages import EnvelopeKind, open_sealed, seal
from swarm.network.wire.streams import receive_into
from swarm.network.wire.tcp_dialer import MOST, MOST_OF_A_PEER, StreamPool, TcpDialer, _Way, connect
from swarm.network.wire.tcp_listener import NONCE_BYTES, admit, introduce
from swarm.network.wire.traffic import Traffic
from swarm.network.wire.upload_rate import LineBytes
from swarm.protocol.values.digests import digest_of
from tests.network.conftest import LOOPBACK, Peers
from tests.waiting import wait_until

WAIT_S = 30.0
CLIENT = NetworkSection(client_mode=True)
NOT_DIRECT = LOOPBACK.model_copy(update={"direct": False})


def some_bytes(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def fetched(node: Node, source: Node, content: bytes) -> bytes | None:
    """The same bytes from another peer. None if they did not come."""
    store = BlobStore()
    want = Want(digest_of(content), len(content), (source.peer_id,))
    node.run(Downloads(node, store).fetch([want]), WAIT_S)
    got = store.get(want.digest)
    return None if got is None else bytes(got)


def ways_of(folder: Path, control: Any) -> TcpDialer:
    """The real class, for a peer that is reached only by this control path."""
    me = load_or_create_identity(folder / "me.key")
    return TcpDialer(
        me, control, lambda: None, tcp_listener.TcpListener(me, Traffic(), Ledger(), {})
    )


@pytest.fixture
def libp2p_has_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    none = AsyncMock(side_effect=NoRoute("not in this test"))
    monkeypatch.setattr(transport, "open_stream", none)


def serving(peers: Peers, *contents: bytes, network: NetworkSection = LOOPBACK) -> Node:
    server, store = BlobServer(), BlobStore()
    for content in contents:
        store.put(content)
    server.attach(store)
    return peers.node(Handlers(streams={PROTOCOL: server.serve}), network=network)


@pytest.mark.usefixtures("libp2p_has_no_streams")
def test_blobs_come_over_a_connection_of_their_own(peers: Peers) -> None:
    content = some_bytes(9 * 2**20)
    server = serving(peers, content)
    assert fetched(peers.node(), server, content) == content


@pytest.mark.usefixtures("libp2p_has_no_streams")
def test_the_next_fetch_takes_a_connection_that_is_there(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, real = [], tcp_dialer.connect

    async def counted(line: LineBytes, host: str, port: int) -> socket.socket:
        opened.append(port)
        return await real(line, host, port)

    monkeypatch.setattr(tcp_dialer, "connect", counted)
    content, other = some_bytes(1000), some_bytes(1000, seed=1)
    server, client = serving(peers, content, other), peers.node()
    assert fetched(client, server, content) == content
    assert fetched(client, server, other) == other
    assert len(opened) == 1


@pytest.mark.usefixtures("libp2p_has_no_streams")
def test_after_a_peer_was_started_again_what_was_kept_is_not_missed(peers: Peers) -> None:
    content = some_bytes(1000)
    server, client = serving(peers, content), peers.node()
    assert fetched(client, server, content) == content
    ways = server._ways.direct
    assert ways is not None

    async def start_again() -> None:
        await ways.door.tasks.stop()  # its side of every connection ends
        ways.door.tasks.spawn(ways.door._accept(ways.door._listening[0]))

    server.run(start_again(), WAIT_S)
    assert fetched(client, server, content) == content


@pytest.mark.usefixtures("libp2p_has_no_streams")
def test_a_line_that_may_be_cut_is_used_again_once_the_peer_has_answered(peers: Peers) -> None:
    content = some_bytes(1000)
    server, client = serving(peers, content), peers.node()
    assert fetched(client, server, content) == content
    ways, peer = client._ways.direct, server.peer_id
    assert ways is not None

    async def doubted() -> None:
        client.unanswered(peer)
        assert not ways.is_known(peer) and not len(ways.kept)
        with pytest.raises(NoRoute):
            await client.open_stream(peer, PROTOCOL, 5.0)
        async with asyncio.timeout(WAIT_S):
            while not ways.is_known(peer):
                await asyncio.sleep(0.01)
        (await client.open_stream(peer, PROTOCOL, 5.0)).close()

    client.run(doubted(), WAIT_S)


@pytest.mark.usefixtures("libp2p_has_no_streams")
def test_a_door_that_could_not_take_a_connection_stays_open(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails_twice(
        self: asyncio.SelectorEventLoop, listening: socket.socket
    ) -> tuple[socket.socket, Any]:
        failures.append(OSError(errno.EMFILE, "no descriptors are left"))
        if len(failures) <= 2:
            raise failures[-1]
        return await accepts(self, listening)

    failures: list[OSError] = []
    accepts = asyncio.SelectorEventLoop.sock_accept
    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", fails_twice)
    content = some_bytes(2**20)
    server = serving(peers, content)
    assert fetched(peers.node(), server, content) == content
    assert len(failures) > 2


@pytest.mark.usefixtures("libp2p_has_no_streams")
def test_a_member_that_cannot_be_dialled_calls(peers: Peers) -> None:
    content = some_bytes(5 * 2**20)
    entrance = serving(peers, b"")
    hidden = serving(peers, content, network=CLIENT)
    hidden.ledger.admit([entrance.peer_id])
    assert fetched(entrance, hidden, content) == content


@pytest.mark.usefixtures("libp2p_has_no_streams")
def test_a_peer_calls_no_stranger(peers: Peers) -> None:
    entrance, hidden = serving(peers, b""), serving(peers, b"secret", network=CLIENT)
    with pytest.raises(NoRoute):
        entrance.run(entrance.open_stream(hidden.peer_id, PROTOCOL, 5.0), WAIT_S)
    assert not hidden.traffic.refused, "it asked politely"


def test_a_call_for_what_is_no_protocol_is_refused(peers: Peers) -> None:
    entrance, hidden = serving(peers, b""), serving(peers, b"x", network=CLIENT)
    hidden.ledger.admit([entrance.peer_id])
    call, p2p = entrance._control.call, entrance._living_p2p()
    for ask in (b"", bytes(18), b"\x01" * 18 + b"\xff\xfe", b"\x01" * 18 + b"swarm.none/1"):
        with pytest.raises(Refused):
            entrance.run(call(p2p, hidden.peer_id, "swarm.call", ask, 5.0), WAIT_S)
    assert hidden.traffic.refused["direct_call"] == 4


@pytest.mark.parametrize("is_direct", [(True, False), (False, True), (False, False)])
def test_without_it_on_either_side_blobs_come_over_libp2p(
    peers: Peers, is_direct: tuple[bool, bool]
) -> None:
    content = some_bytes(2**20)
    asking, answering = (LOOPBACK if one else NOT_DIRECT for one in is_direct)
    server = serving(peers, content, network=answering)
    assert fetched(peers.node(network=asking), server, content) == content
    assert (server._ways.direct is None) == (answering is NOT_DIRECT)


@pytest.mark.usefixtures("libp2p_has_no_streams")
def test_a_way_that_is_found_late_is_taken_the_next_time(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def late(self: TcpDialer, source: str, ask: bytes) -> bytes:
        nonlocal asked
        asked += 1
        await found.wait()
        return await in_time(self, source, ask)

    asked, in_time, found = 0, TcpDialer._on_port, asyncio.Event()
    monkeypatch.setattr(TcpDialer, "_on_port", late)
    server, node = serving(peers, b"some"), peers.node()
    for _ in range(2):
        with pytest.raises(NoRoute):
            node.run(node.open_stream(server.peer_id, PROTOCOL, 0.3), WAIT_S)
    server.loop.call_soon_threadsafe(found.set)
    node.run(node.open_stream(server.peer_id, PROTOCOL, 5.0), WAIT_S).close()
    assert asked == 1


def test_a_peer_without_a_way_is_asked_less_and_less_often() -> None:
    way, now_s, pauses = _Way(), 0.0, []
    for _ in range(8):
        way.failed(now_s)
        pauses.append(way.not_before_s - now_s)
        now_s = way.not_before_s
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0]


async def test_any_number_of_failures_in_a_row_has_a_pause(tmp_path: Path) -> None:
    """Weeks of failed attempts, for a pair of peers that can both not be dialed."""
    num_failures = 5_000

    class Nowhere:
        async def call(self, p2p: Any, peer_id: str, *_: Any) -> bytes:
            raise NoRoute(peer_id)

    ways, way = ways_of(tmp_path, Nowhere()), None
    for _ in range(num_failures):
        with pytest.raises(NoRoute):
            await ways.open_stream("hidden", PROTOCOL, 5.0)
        way = ways._ways["hidden"]
        assert way.not_before_s <= time.monotonic() + tcp_dialer.LONGEST_PAUSE_S
        way.not_before_s = 0.0  # as if the pause had passed
    assert way is not None and way.failures == num_failures


async def test_a_search_that_fails_by_a_fault_here_has_a_pause(tmp_path: Path) -> None:
    class Faulty:
        async def call(self, p2p: Any, peer_id: str, *_: Any) -> bytes:
            raise OverflowError("a bug")

    ways = ways_of(tmp_path, Faulty())
    for why in ("no direct way found", "a short while ago"):
        with pytest.raises(NoRoute, match=why):
            await ways.open_stream("other", PROTOCOL, 5.0)


async def test_a_search_that_is_cancelled_does_not_cancel_those_that_wait(tmp_path: Path) -> None:
    class Slow:
        async def call(self, p2p: Any, peer_id: str, *_: Any) -> bytes:
            await asyncio.Event().wait()
            return b""

    ways = ways_of(tmp_path, Slow())
    waiting = asyncio.create_task(ways.open_stream("other", PROTOCOL, 5.0))
    await asyncio.sleep(0.01)
    await ways.door.tasks.stop()
    with pytest.raises(NoRoute):
        await waiting


async def test_ways_to_keys_that_nobody_has_are_forgotten_but_not_one_that_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Nowhere:
        async def call(self, p2p: Any, peer_id: str, *_: Any) -> bytes:
            if peer_id == "slow":
                await answered.wait()
            raise NoRoute(peer_id)

    monkeypatch.setattr(tcp_dialer, "MAX_WAYS", 100)
    answered = asyncio.Event()
    ways = ways_of(tmp_path, Nowhere())
    slow = asyncio.create_task(ways.open_stream("slow", PROTOCOL, 5.0))
    await asyncio.sleep(0)
    for number in range(500):
        with pytest.raises(NoRoute):
            await ways.open_stream(f"key-{number}", PROTOCOL, 5.0)
    assert len(ways._ways) <= 101 and "slow" in ways._ways
    answered.set()
    with pytest.raises(NoRoute):
        await slow


def test_a_port_that_somebody_has_is_named(peers: Peers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        network = LOOPBACK.model_copy(update={"direct_port": port})
        with pytest.raises(NetworkDown, match=f"port {port}.*") as caught:
            serving(peers, b"", network=network)
    assert "--direct-port" in str(caught.value.hint)


def two_free_ports() -> int:
    """The first of two consecutive free ports outside of the system's ephemeral range."""
    while True:
        port, host = random.randrange(10_000, 32_000), "127.0.0.1"
        with (
            suppress(OSError),
            socket.create_server((host, port)),
            socket.create_server((host, port + 1)),
        ):
            return port


def test_two_ports_that_follow_each_other_can_be_opened_beforehand(peers: Peers) -> None:
    port = two_free_ports()
    network = NetworkSection(host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",))
    assert serving(peers, b"", network=network)._ways.direct.door.port == port + 1


def test_where_the_second_port_is_taken_a_free_one_does(peers: Peers) -> None:
    port = two_free_ports()
    network = NetworkSection(host_maddrs=(f"/ip4/127.0.0.1/tcp/{port}",))
    with socket.create_server(("127.0.0.1", port + 1)):
        assert serving(peers, b"", network=network)._ways.direct.door.port not in (0, port + 1)


def test_the_first_port_that_is_named_says_where_blobs_are_taken() -> None:
    of = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/31330", "/ip4/0.0.0.0/tcp/4000")
    assert tcp_listener.port_beside(NetworkSection(host_maddrs=of)) == 31_331
    assert tcp_listener.port_beside(NetworkSection(host_maddrs=of[:1])) == 0
    assert tcp_listener.port_beside(NetworkSection(host_maddrs=("/ip4/0.0.0.0/tcp/65535",))) == 0


# ------------------------------------------------ admission


def at_the_door(node: Node, talk: Callable[[socket.socket], Awaitable[Any]]) -> Any:
    """The result of a connection to a peer's listener from outside."""

    async def run() -> Any:
        connection = await connect(node.traffic.line, "127.0.0.1", node._ways.direct.door.port)
        try:
            async with asyncio.timeout(WAIT_S):
                return await talk(connection)
        finally:
            connection.close()

    return asyncio.run(run())


def test_a_letter_opens_one_connection_once(peers: Peers, tmp_path: Path) -> None:
    server, me = serving(peers, b"x"), load_or_create_identity(tmp_path / "me.key")
    letters = []

    async def enter(connection: socket.socket) -> None:
        nonce = bytearray(NONCE_BYTES)
        await receive_into(connection, memoryview(nonce))
        payload = f"{PROTOCOL} {nonce.hex()}".encode()
        letters.append(seal(me, EnvelopeKind.DIRECT, server.peer_id, payload))
        await say(connection, letters[0])

    async def say(connection: socket.socket, letter: bytes) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, len(letter).to_bytes(2, "big") + letter)
        answer = bytearray(int.from_bytes(await loop.sock_recv(connection, 2), "big"))
        await receive_into(connection, memoryview(answer))
        assert open_sealed(bytes(answer), digest_of(letter)).source == server.peer_id

    async def enter_again(connection: socket.socket) -> None:
        await receive_into(connection, memoryview(bytearray(NONCE_BYTES)))
        await say(connection, letters[0])

    at_the_door(server, enter)
    with pytest.raises((OSError, BadMessage)):
        at_the_door(server, enter_again)
    assert server.traffic.refused["direct_letter"] == 1


def test_a_peer_is_not_taken_for_another_one_at_its_address(peers: Peers, tmp_path: Path) -> None:
    server, me = serving(peers, b"x"), load_or_create_identity(tmp_path / "me.key")
    other = load_or_create_identity(tmp_path / "other.key").peer_id
    with pytest.raises((OSError, BadMessage)):
        at_the_door(server, lambda connection: introduce(connection, me, other, PROTOCOL))


async def test_an_impostor_that_answers_is_found_out(tmp_path: Path) -> None:
    me, impostor = (load_or_create_identity(tmp_path / f"{n}.key") for n in "ab")
    expected = load_or_create_identity(tmp_path / "c.key").peer_id
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(False)

    async def answer() -> None:
        nonce = bytes(NONCE_BYTES)
        await asyncio.get_running_loop().sock_sendall(there, nonce)
        size = bytearray(2)
        await receive_into(there, memoryview(size))
        letter = bytearray(int.from_bytes(size, "big"))
        await receive_into(there, memoryview(letter))
        sealed = seal(impostor, EnvelopeKind.ANSWER, digest_of(bytes(letter)), b"")
        await asyncio.get_running_loop().sock_sendall(
            there, len(sealed).to_bytes(2, "big") + sealed
        )

    with here, there, pytest.raises(BadMessage, match="another peer"):
        await asyncio.gather(introduce(here, me, expected, PROTOCOL), answer())


@pytest.mark.parametrize("size", [0, 1, 513, 65_535])
async def test_a_letter_of_any_size_is_refused_or_none(tmp_path: Path, size: int) -> None:
    me = load_or_create_identity(tmp_path / "me.key")
    here, there = socket.socketpair()
    here.setblocking(False)
    there.sendall(size.to_bytes(2, "big") + bytes(min(size, 4096)))
    there.shutdown(socket.SHUT_WR)
    with here, there, pytest.raises((BadMessage, ConnectionError)):
        await admit(here, me)


def test_who_says_nothing_is_shut_out_and_others_still_get_theirs(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_listener, "ADMIT_S", 2.0)
    content = some_bytes(2**20)
    server = serving(peers, content)
    mute = [
        socket.create_connection(("127.0.0.1", server._ways.direct.door.port)) for _ in range(200)
    ]
    try:
        assert fetched(peers.node(), server, content) == content
        for one in mute:
            one.settimeout(WAIT_S)
            while one.recv(64):
                pass
    finally:
        for one in mute:
            one.close()
    assert server.traffic.refused["admitting_of_stranger"] > 0
    door = server._ways.direct.door
    assert wait_until(lambda: len(door.tasks) <= 3), "connections that ended are still served"


# ------------------------------------------------ transfers


def test_wrong_bytes_may_be_the_lines_doing_and_are_asked_for_again(peers: Peers) -> None:
    content = some_bytes(300_000)
    server, store, streams = BlobServer(), BlobStore(), []
    store.put(content)
    server.attach(store)

    async def garbling(
        traffic: Traffic, source: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        streams.append(writer.get_extra_info("socket").family)
        if streams[-1] == socket.AF_INET:
            await reader.readexactly(49)
            writer.write(b"\x01" + (300_000).to_bytes(8, "big") + bytes(4) + bytes(300_000))
            await writer.drain()
            await reader.read()
        else:
            await server.serve(traffic, source, reader, writer)

    garbled = peers.node(Handlers(streams={PROTOCOL: garbling}))
    asking = peers.node()
    assert fetched(asking, garbled, content) == content
    assert streams == [socket.AF_INET, socket.AF_UNIX]
    assert not asking.traffic.refused, "the peer did nothing wrong"
    assert asking._ways.direct._ways[garbled.peer_id].not_before_s == math.inf


def test_who_names_a_blob_with_a_false_size_turns_off_no_way_for_good(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_dialer, "FIRST_PAUSE_S", 0.05)
    server, store, streams = BlobServer(), BlobStore(), []
    contents = [some_bytes(1000, seed) for seed in range(2)]
    digests = [store.put(content) for content in contents]
    server.attach(store)

    async def noted(
        traffic: Traffic, source: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        streams.append(writer.get_extra_info("socket").family)
        await server.serve(traffic, source, reader, writer)

    honest, asking = peers.node(Handlers(streams={PROTOCOL: noted})), peers.node()
    failed = asyncio.Event()

    async def with_a_false_size() -> None:
        want = Want(digests[0], 1001, (honest.peer_id,))
        fetch = Downloads(asking, BlobStore()).fetch([want], on_failure=lambda *_: failed.set())
        call = asyncio.create_task(fetch)
        await failed.wait()
        call.cancel()
        await asyncio.wait([call])
        await asyncio.sleep(0.1)  # the pause

    asking.run(with_a_false_size(), WAIT_S)
    assert fetched(asking, honest, contents[1]) == contents[1]
    assert streams[0] == streams[-1] == socket.AF_INET


BLOBS = "/blobs/1"


class Ends:
    """Pairs of sockets: the pooled side, and the other side."""

    def __init__(self) -> None:
        self.all: list[socket.socket] = []

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """This side and the other."""
        mine, others = socket.socketpair()
        self.all += (mine, others)
        return mine, others


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for each in made.all:
        each.close()


def is_closed(connection: socket.socket) -> bool:
    return connection.fileno() == -1


async def test_a_stream_is_for_its_peer_and_its_protocol(ends: Ends) -> None:
    kept, (mine, _) = StreamPool(), ends.pair()
    kept.keep("A", BLOBS, mine)
    assert kept.take("B", BLOBS) is None and kept.take("A", "/measure/1") is None
    assert kept.take("A", BLOBS) is mine
    assert kept.take("A", BLOBS) is None


async def test_one_that_the_other_side_has_ended_is_not_given_out(ends: Ends) -> None:
    kept, (good, _), (ended, others) = StreamPool(), ends.pair(), ends.pair()
    kept.keep("A", BLOBS, good)
    kept.keep("A", BLOBS, ended)
    others.close()
    assert kept.take("A", BLOBS) is good
    assert is_closed(ended) and not len(kept)


async def test_one_on_which_something_came_unasked_is_not_given_out(ends: Ends) -> None:
    kept, (mine, others) = StreamPool(), ends.pair()
    kept.keep("A", BLOBS, mine)
    others.send(b"late")
    assert kept.take("A", BLOBS) is None and is_closed(mine)


async def test_one_that_is_not_wanted_is_ended_before_the_other_side_does(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_dialer, "KEPT_S", 0.05)
    kept, (mine, _), (taken, _) = StreamPool(), ends.pair(), ends.pair()
    kept.keep("A", BLOBS, mine)
    kept.keep("B", BLOBS, taken)
    assert kept.take("B", BLOBS) is taken
    await asyncio.sleep(0.2)
    assert is_closed(mine) and not is_closed(taken) and not len(kept)


async def test_few_are_kept_of_a_peer_and_in_all_the_newest(ends: Ends) -> None:
    kept = StreamPool()
    of_a = [ends.pair()[0] for _ in range(MOST_OF_A_PEER + 1)]
    for each in of_a:
        kept.keep("A", BLOBS, each)
    assert [is_closed(each) for each in of_a] == [True, *[False] * MOST_OF_A_PEER]
    for number in range(MOST):
        kept.keep(f"peer {number}", BLOBS, ends.pair()[0])
    assert len(kept) == MOST and all(is_closed(each) for each in of_a)


async def test_those_of_a_peer_that_is_silent_are_ended_and_others_stay(ends: Ends) -> None:
    kept, (silent, _), (other, _) = StreamPool(), ends.pair(), ends.pair()
    kept.keep("A", BLOBS, silent)
    kept.keep("B", BLOBS, other)
    kept.drop("A")
    assert is_closed(silent) and not is_closed(other)
    kept.close()
    assert is_closed(other)
