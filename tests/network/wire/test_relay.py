"""Two peers that only dial out talk and fetch through a third, which cannot change their data.

A daemon without a listen address cannot be dialed, on loopback as behind a NAT.
"""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.config import NetworkSection
from swarm.errors import BadMessage, NetworkDown, NoRoute, Unreachable
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import PROTOCOL
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.node.node import Handlers, Node
from swarm.network.wire import relay as relays
from swarm.network.wire.control import Control, peer_of
from swarm.network.wire.identity import Identity, load_or_create_identity
from swarm.network.wire.ledger import Cost, Ledger
from swarm.network.wire.relay import Relay
from swarm.network.wire.relayed_messages import (
    FRESH_S,
    EnvelopeKind,
    RelayedMessages,
    open_sealed,
    seal,
)
from swarm.network.wire.steady_clock import dht_clock
from swarm.network.wire.streams import open_stream, stream_handler
from swarm.network.wire.traffic import Traffic
from tests.network.conftest import LOOPBACK, Peers

WAIT_S = 60.0
CLIENT = NetworkSection(client_mode=True)


class Inbox:
    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []

    async def on_message(self, source: str, payload: bytes) -> None:
        if payload == b"nonsense":
            raise BadMessage("message_schema", "no such message")
        self.messages.append((source, payload))

    async def on_request(self, source: str, payload: bytes) -> bytes:
        return source.encode() + payload[::-1]


class Hidden:
    """A peer in client mode that serves one store."""

    def __init__(self, peers: Peers) -> None:
        self.inbox, self.store = Inbox(), BlobStore()
        server = BlobServer()
        server.attach(self.store)
        self.node: Node = peers.node(
            Handlers(self.inbox.on_message, self.inbox.on_request, {PROTOCOL: server.serve}),
            network=CLIENT,
        )


@pytest.fixture(scope="module")
def hidden(lasting_peers: Peers) -> tuple[Node, Hidden, Hidden]:
    relay = lasting_peers.serving()
    return relay, Hidden(lasting_peers), Hidden(lasting_peers)


def test_messages_and_answers_pass_between_two_that_cannot_be_dialled(hidden) -> None:
    relay, left, right = hidden
    a, b = left.node, right.node
    a.run(a.post(b.peer_id, b"hello"), WAIT_S)
    assert right.inbox.messages == [(a.peer_id, b"hello")], "the sender is the one who signed"
    assert b.run(b.request(a.peer_id, b"abc", 5.0), WAIT_S) == b.peer_id.encode() + b"cba"
    assert a.is_far(b.peer_id) and not a.is_far(relay.peer_id)
    assert relay.traffic.relayed_bytes > 0


def test_a_blob_of_several_pieces_comes_through_whole(hidden) -> None:
    relay, left, right = hidden
    before = relay.traffic.relayed_bytes
    content = random.Random(1).randbytes(9_000_000)
    digest = left.store.put(content)
    downloads = Downloads(right.node, right.store)
    want = Want(digest, len(content), (left.node.peer_id,))
    got = right.node.run(downloads.fetch_one(want, timeout_s=WAIT_S), WAIT_S)
    assert bytes(got) == content
    assert relay.traffic.relayed_bytes - before >= len(content)
    assert relay.traffic.blob_bytes_sent == 0, "passed on, not served"


def test_a_peer_that_listens_in_vain_is_reached_all_the_same(hidden, lasting_peers) -> None:
    """It announces a dead address, as behind a router without forwarding."""
    network = LOOPBACK.model_copy(update={"announce_maddrs": ("/ip4/127.0.0.1/tcp/9",)})
    inbox, (_, left, _) = Inbox(), hidden
    node = lasting_peers.node(Handlers(on_message=inbox.on_message), network=network)
    left.node.run(left.node.post(node.peer_id, b"hello"), WAIT_S)
    assert inbox.messages == [(left.node.peer_id, b"hello")]
    assert left.node.is_far(node.peer_id)


def test_what_the_destination_refuses_is_refused_and_counted(hidden) -> None:
    _, left, right = hidden
    with pytest.raises(Unreachable, match="no such message"):
        left.node.run(left.node._ways.relay.send(
            hidden[0].peer_id, right.node.peer_id, b"nonsense",
            kind=EnvelopeKind.MESSAGE, timeout_s=5,
        ), WAIT_S)  # fmt: skip
    assert right.node.traffic.refused["message_schema"] == 1


def test_a_peer_that_nobody_reaches_is_an_error_within_seconds(hidden, tmp_path) -> None:
    _, left, _ = hidden
    stranger = load_or_create_identity(tmp_path / "stranger.key").peer_id
    with pytest.raises(NoRoute):
        left.node.run(left.node.post(stranger, b"x"), WAIT_S)


def test_nobody_passes_on_who_does_not_want_to(peers: Peers) -> None:
    unwilling = peers.node(network=LOOPBACK.model_copy(update={"relay": False}))
    left, right = Hidden(peers), Hidden(peers)
    with pytest.raises(NoRoute):
        left.node.run(left.node.post(right.node.peer_id, b"x"), WAIT_S)
    assert unwilling.traffic.relayed_bytes == 0 and right.inbox.messages == []


def test_an_envelope_is_opened_by_its_destination_only_and_only_unchanged(tmp_path) -> None:
    sender = load_or_create_identity(tmp_path / "a.key")
    sealed = seal(sender, EnvelopeKind.MESSAGE, "QmB", b"payload")
    opened = open_sealed(sealed, "QmB")
    assert (opened.source, opened.payload) == (sender.peer_id, b"payload")
    with pytest.raises(BadMessage, match="for another peer"):
        open_sealed(sealed, "QmC")
    rng = random.Random(0)
    for _ in range(200):
        broken = bytearray(sealed)
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        with pytest.raises(BadMessage):
            open_sealed(bytes(broken[: rng.randrange(len(broken)) or None]), "QmB")
        with pytest.raises(BadMessage):
            open_sealed(bytes(broken), "QmB")


def stamped_letter(
    sender: Identity, content: str, to: str, kind: EnvelopeKind = EnvelopeKind.STREAM
) -> bytes:
    return seal(sender, kind, to, RelayedMessages().stamped(to, content.encode(), dht_clock()()))


class Passing:
    """A relay between two peers without a network, which records all messages that it passes on."""

    def __init__(self, tmp_path, monkeypatch) -> None:
        self.inbox, self.letters, self.answers = Inbox(), list[bytes](), list[bytes]()
        self.clock_s = dht_clock()()
        monkeypatch.setattr(relays, "dht_clock", lambda: lambda: self.clock_s)
        self.sender, self.receiver = (
            Relay(
                load_or_create_identity(tmp_path / f"{name}.key"),
                Control(Traffic(), Ledger(), self.inbox.on_message, self.inbox.on_request),
                {},
                True,
                lambda: cast(Any, None),
            )
            for name in "ab"
        )
        monkeypatch.setattr(self.sender.control, "call", self._call)

    async def _call(self, _p2p: Any, _relay: str, _name: str, ask: bytes, _timeout_s: float):
        self.letters.append(relays._addressed(ask)[1])
        self.answers.append(await self.receiver._on_delivered("QmR", self.letters[-1]))
        return self.answers[-1]

    async def send(self, payload: bytes, kind: EnvelopeKind = EnvelopeKind.MESSAGE) -> bytes:
        to = self.receiver.identity.peer_id
        return await self.sender.send("QmR", to, payload, kind=kind, timeout_s=1.0)

    async def refusal(self, letter: bytes) -> str:
        """The refusal of a letter that the relay repeats. "" if there is none."""
        try:
            await self.receiver._on_delivered("QmR", letter)
        except BadMessage as error:
            return error.reason
        return ""


async def test_a_relay_shows_a_message_or_question_once_and_costs_its_sender_nothing(
    tmp_path, monkeypatch
) -> None:
    passing = Passing(tmp_path, monkeypatch)
    source, ledger = passing.sender.identity.peer_id, passing.receiver.ledger
    await passing.send(b"hello")
    await passing.send(b"abc", EnvelopeKind.REQUEST)
    left = ledger.left(source, Cost.MESSAGES, 0)
    for _ in range(100):
        for letter in passing.letters[:2]:
            assert await passing.refusal(letter) == "envelope_seen"
    assert ledger.left(source, Cost.MESSAGES, 0) == left
    await passing.send(b"another")
    assert passing.inbox.messages == [(source, b"hello"), (source, b"another")]


async def test_a_letter_that_was_held_back_too_long_is_refused(tmp_path, monkeypatch) -> None:
    passing = Passing(tmp_path, monkeypatch)
    source, to = passing.sender.identity, passing.receiver.identity.peer_id
    now_s = passing.clock_s
    for after_s, reason in (FRESH_S + 1, "envelope_age"), (FRESH_S - 1, ""):
        passing.clock_s = now_s
        letter = passing.sender._sealed(EnvelopeKind.MESSAGE, to, b"late")
        passing.clock_s = now_s + after_s
        assert await passing.refusal(letter) == reason
    passing.clock_s = now_s + 3600
    assert await passing.refusal(letter) == "envelope_age"
    bare = seal(source, EnvelopeKind.MESSAGE, to, b"no stamp")
    assert await passing.refusal(bare) == "envelope_schema"
    assert passing.inbox.messages == [(source.peer_id, b"late")]


async def test_messages_that_overtake_each_other_are_both_delivered(tmp_path, monkeypatch) -> None:
    passing = Passing(tmp_path, monkeypatch)
    source, to = passing.sender.identity.peer_id, passing.receiver.identity.peer_id
    first, second = (
        passing.sender._sealed(EnvelopeKind.MESSAGE, to, word) for word in (b"first", b"second")
    )
    assert not await passing.refusal(second)
    assert not await passing.refusal(first)
    assert await passing.refusal(first) == await passing.refusal(second) == "envelope_seen"
    assert passing.inbox.messages == [(source, b"second"), (source, b"first")]


async def test_an_answer_is_to_one_question_only_though_another_has_the_same_words(
    tmp_path, monkeypatch
) -> None:
    passing = Passing(tmp_path, monkeypatch)
    answer = await passing.send(b"abc", EnvelopeKind.REQUEST)
    assert answer == passing.sender.identity.peer_id.encode() + b"cba"

    async def old_answer(*_: object) -> bytes:
        return passing.answers[0]

    monkeypatch.setattr(passing.sender.control, "call", old_answer)
    with pytest.raises(NoRoute, match="for another peer"):
        await passing.send(b"abc", EnvelopeKind.REQUEST)


async def test_a_stream_that_comes_while_the_relay_starts_is_closed_without_ado(tmp_path) -> None:
    closed = []

    def starting() -> Any:
        raise NetworkDown("the network has not started")

    sender = load_or_create_identity(tmp_path / "a.key")
    letter = stamped_letter(sender, f"{PROTOCOL} QmR", "QmB")
    reader, writer = asyncio.StreamReader(), SimpleNamespace(close=lambda: closed.append(True))
    reader.feed_data(b"\x03QmB" + len(letter).to_bytes(2, "big") + letter)
    traffic = Traffic()
    control = Control(traffic, Ledger(), None, None)
    relay = Relay(sender, control, {PROTOCOL: BlobServer().serve}, True, starting)
    handle = stream_handler(relay._on_stream, traffic, control.ledger)
    info = SimpleNamespace(peer_id=peer_of(sender.peer_id), addr="/ip4/127.0.0.1/tcp/1")
    await handle(info, reader, cast(Any, writer))
    assert not traffic.refused
    assert closed


def opened(tmp_path, *letters: bytes, destination: str = "QmB") -> list[Any]:
    """The reactions of a relay or a destination to letters of streams: openings or refusals."""
    identity = load_or_create_identity(tmp_path / "relay.key")
    control = Control(Traffic(), Ledger(), None, None)
    relay = Relay(identity, control, {PROTOCOL: BlobServer().serve}, True, cast(Any, None))

    async def read() -> list[Any]:
        results = []
        for letter in letters:
            reader = asyncio.StreamReader()
            reader.feed_data(len(letter).to_bytes(2, "big") + letter)
            reader.feed_eof()
            try:
                results.append(await relay._read_letter(reader, destination))
            except BadMessage as error:
                results.append(error.reason)
        return results

    return asyncio.run(read())


def test_a_stream_is_opened_by_a_letter_of_its_origin(tmp_path) -> None:
    sender = load_or_create_identity(tmp_path / "a.key")

    def letter(opening: str, kind: EnvelopeKind = EnvelopeKind.STREAM, to: str = "QmB") -> bytes:
        return stamped_letter(sender, opening, to, kind)

    right = letter(f"{PROTOCOL} QmR")
    (first,) = opened(tmp_path, right)
    assert (first.origin, first.protocol, first.relay) == (sender.peer_id, PROTOCOL, "QmR")
    assert opened(
        tmp_path,
        letter(f"{PROTOCOL} QmR", to="QmC"),
        letter(f"{PROTOCOL} QmR", EnvelopeKind.MESSAGE),
        letter("swarm.other/1 QmR"),
        letter(PROTOCOL),
        right[:-1] + b"x",
        bytes(5000),
    ) == [
        "envelope_destination",
        "relay_letter",
        "relay_protocol",
        "relay_letter",
        "envelope_signature",
        "relay_letter",
    ]


async def test_a_stream_is_served_once_for_each_letter(tmp_path) -> None:
    sender = load_or_create_identity(tmp_path / "a.key")
    me = load_or_create_identity(tmp_path / "b.key")
    traffic, served = Traffic(), []

    async def serve(_traffic: Any, source: str, *_: Any) -> None:
        served.append(source)

    relay = Relay(
        me, Control(traffic, Ledger(), None, None), {PROTOCOL: serve}, True, cast(Any, None)
    )
    letters = RelayedMessages()

    def letter(now_s: float) -> bytes:
        stamped = letters.stamped(me.peer_id, f"{PROTOCOL} QmR".encode(), now_s)
        return seal(sender, EnvelopeKind.STREAM, me.peer_id, stamped)

    async def show(letter: bytes) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(len(letter).to_bytes(2, "big") + letter)
        await relay._on_delivered_stream(traffic, "QmR", reader, cast(Any, None))

    now_s = dht_clock()()
    right = letter(now_s)
    for each in right, right, letter(now_s), letter(now_s - FRESH_S - 1):
        await show(each)
    assert served == [sender.peer_id] * 2, "otherwise a relay would spend another's account"
    assert traffic.refused == {"envelope_seen": 1, "envelope_age": 1}


def test_a_letter_counts_only_on_a_stream_of_the_relay_that_it_names(hidden) -> None:
    relay, left, right = hidden
    right.node.traffic.refused.clear()

    async def through(named: str, asked: str) -> bytes:
        """Opens a stream to the other hidden peer with a letter for another relay."""
        path = left.node._living_p2p().daemon_listen_maddr["unix"]
        connection = await open_stream(path, peer_of(asked), relays.PROTOCOL, 5.0)
        try:
            await left.node._ways.relay._ask_for(connection, named, right.node.peer_id, PROTOCOL)
            return await asyncio.get_running_loop().sock_recv(connection, 1)
        finally:
            connection.close()

    assert left.node.run(through(right.node.peer_id, relay.peer_id), WAIT_S) == b""
    assert right.node.traffic.refused == {"relay_letter": 1}
