from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import AsyncMock

import pytest

from swarm.config import NetworkSection
from swarm.errors import (
    BadMessage,
    ConfigError,
    NetworkDown,
    NobodyReachable,
    StateLocked,
    Unreachable,
)
from swarm.network.dht import dht as dht_module
from swarm.network.node import node as node_module
from swarm.network.node.node import Handlers, Node
from swarm.network.node.substrate import renewed
from swarm.network.wire import daemon
from swarm.network.wire.address_book import Remembered
from swarm.network.wire.control import MAX_CALL_BYTES, _Payload
from swarm.network.wire.daemon import connection_fault, is_identity_taken
from swarm.network.wire.identity import load_or_create_identity
from swarm.network.wire.upload_rate import LineBytes
from tests.network.conftest import records_of
from tests.waiting import wait_until

WAIT_S = 30.0


class Inbox:
    """Collects messages and answers questions."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, bytes]] = []

    async def on_message(self, source: str, payload: bytes) -> None:
        if payload == b"nonsense":
            raise BadMessage("message_schema", "no such message")
        if payload == b"wait":
            await asyncio.sleep(3600)
        self.messages.append((source, payload))

    async def on_request(self, source: str, payload: bytes) -> bytes:
        if payload == b"slow":
            await asyncio.sleep(0.5)
        return payload[::-1]

    @property
    def handlers(self) -> Handlers:
        return Handlers(on_message=self.on_message, on_request=self.on_request)


@pytest.fixture(scope="module")
def two(lasting_peers) -> tuple[Inbox, Node, Node]:
    inbox = Inbox()
    return inbox, lasting_peers.node(inbox.handlers), lasting_peers.node()


def test_a_message_arrives_with_the_sender_that_libp2p_proved(two):
    inbox, receiver, sender = two
    sender.run(sender.post(receiver.peer_id, b"hello"), WAIT_S)
    assert inbox.messages == [(sender.peer_id, b"hello")]
    answer = sender.run(sender.request(receiver.peer_id, b"abc", timeout_s=5), WAIT_S)
    assert answer == b"cba"
    assert receiver.traffic.control_messages_received == 2
    assert receiver.traffic.control_bytes_received == 8
    assert sender.traffic.control_bytes_sent == 8
    assert sender.traffic.control_bytes_received == 3


def test_refused_messages_are_counted_by_reason(two):
    inbox, receiver, sender = two
    inbox.messages.clear()
    with pytest.raises(Unreachable, match="no such message"):
        sender.run(sender.post(receiver.peer_id, b"nonsense"), WAIT_S)
    too_large = _Payload(bytes(MAX_CALL_BYTES + 1))
    peer = receiver._substrate.p2p.peer_id
    call = sender._substrate.p2p.call_protobuf_handler(peer, "swarm.message", too_large, _Payload)
    with pytest.raises(Exception, match="refused"):
        sender.run(call, WAIT_S)
    assert receiver.traffic.refused == {"message_schema": 1, "message_size": 1}
    assert inbox.messages == []


def test_a_peer_that_is_not_there_is_unreachable(two, tmp_path):
    _, _, node = two
    stranger = load_or_create_identity(tmp_path / "stranger.key").peer_id
    with pytest.raises(Unreachable):
        node.run(node.post(stranger, b"x", timeout_s=3), WAIT_S)
    with pytest.raises(Unreachable, match="no peer id"):
        node.run(node.post("0OIl", b"x"), WAIT_S)


def test_a_slow_handler_costs_the_sender_its_timeout_only(two):
    _, receiver, sender = two
    with pytest.raises(Unreachable, match=r"within 0\.3 s"):
        sender.run(sender.post(receiver.peer_id, b"wait", timeout_s=0.3), WAIT_S)


def test_an_answer_that_comes_with_its_time_out_leaves_the_sender_able_to_hear(two):
    _, receiver, sender = two

    async def hold_the_loop_until_both_are_due() -> None:
        call = asyncio.create_task(sender.request(receiver.peer_id, b"slow", timeout_s=0.6))
        await asyncio.sleep(0.05)
        time.sleep(0.9)  # as after a pause of the process
        with pytest.raises(Unreachable):
            await call

    sender.run(hold_the_loop_until_both_are_due(), WAIT_S)
    assert sender.run(sender.request(receiver.peer_id, b"again", WAIT_S), WAIT_S) == b"niaga"


def test_run_raises_its_own_timeout_and_the_coroutine_s(two):
    _, _, node = two
    with pytest.raises(TimeoutError, match=r"not done within 0\.1 s"):
        node.run(asyncio.sleep(5), 0.1)

    async def fails() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        node.run(fails(), WAIT_S)


def test_what_does_not_end_in_time_is_named_and_keeps_nothing_else_from_ending(two, caplog):
    _, _, node = two

    async def never() -> None:
        await asyncio.sleep(3600)

    node.end("the rounds", never(), 0.1)
    assert "the rounds did not end within 0.1 s" in caplog.text


def test_one_dead_address_among_living_ones_is_no_obstacle(peers, closed_port):
    first = peers.node()
    dead = f"/ip4/127.0.0.1/tcp/{closed_port}/p2p/{first.peer_id}"
    second = peers.node(known_peers=(dead, *first.addresses))
    assert second.num_neighbours == 1
    assert first.addresses[0] in [text for text, _ in second.known_addresses]


def test_only_dead_addresses_are_a_clear_error_before_the_deadline(peers, tmp_path, closed_port):
    peer_id = load_or_create_identity(tmp_path / "gone.key").peer_id
    dead = f"/ip4/127.0.0.1/tcp/{closed_port}/p2p/{peer_id}"
    begin = time.monotonic()
    with pytest.raises(NobodyReachable, match=f"{dead}: .*refused"):
        peers.node(known_peers=(dead,), deadline_s=10 * WAIT_S)
    assert time.monotonic() - begin < 2 * WAIT_S
    alone = peers.node(known_peers=(dead,), must_reach=False)
    assert alone.addresses
    assert alone.run(alone.heal(), WAIT_S) == 0


def test_a_name_that_cannot_be_resolved_is_no_unknown_error():
    """Error numbers of the resolver are negative, and the system has no text for them."""
    fault = connection_fault(socket.gaierror(-2, "Name or service not known"))
    assert fault == "the name cannot be resolved: Name or service not known"
    assert connection_fault(ConnectionRefusedError(111, "call failed")) == "Connection refused"


def test_an_open_port_that_is_no_peer_is_a_clear_error(peers, tmp_path):
    peer_id = load_or_create_identity(tmp_path / "other.key").peer_id
    other = peers.node()
    wrong = f"/ip4/127.0.0.1/tcp/{other.port}/p2p/{peer_id}"
    with pytest.raises((NobodyReachable, NetworkDown), match=peer_id):
        peers.node(known_peers=(wrong,))


@pytest.mark.parametrize("text", ["", "here", "/ip4/1.2.3.4", "/ip4/1.2.3.4/tcp/1/p2p/x/y"])
def test_a_malformed_address_names_the_form(peers, text):
    with pytest.raises(ConfigError, match=re.escape("/ip4/A.B.C.D/tcp/PORT/p2p/ID")):
        peers.node(known_peers=(text,))


def test_the_remembered_port_is_used_again(peers, tmp_path):
    first = peers.node()
    port = first.port
    first.stop(5.0)
    again = peers.node(identity_path=tmp_path / "identity0.key", port=port, known_peers=())
    assert again.port == port
    assert again.addresses == first.addresses


def test_a_taken_port_is_given_up_with_a_warning(peers, caplog):
    with socket.socket() as holder, caplog.at_level(logging.WARNING):
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        node = peers.node(port=taken)
    assert node.port != taken
    assert f"port {taken} on 127.0.0.1" in caplog.text


def test_all_interfaces_become_concrete_addresses(peers):
    node = peers.node(network=NetworkSection(host_maddrs=("/ip4/0.0.0.0/tcp/0",)))
    assert node.addresses
    for address in node.addresses:
        assert address.endswith(f"/p2p/{node.peer_id}")
        assert "/0.0.0.0/" not in address
    local = [address for address in node.addresses if address.startswith("/ip4/127.")]
    assert not local or local == list(node.addresses), "loopback only if there is nothing else"


def test_a_second_process_with_the_same_identity_is_refused(peers, tmp_path):
    first = peers.node()
    peers.node(identity_path=tmp_path / "twin.key")
    with pytest.raises(StateLocked):
        peers.node(identity_path=tmp_path / "twin.key", known_peers=first.addresses)


def test_a_peer_that_comes_while_its_identity_is_looked_for_is_found(peers, monkeypatch, tmp_path):
    was_asked = threading.Event()

    def pauses():
        yield 0.0
        was_asked.set()
        yield from [0.5] * 200  # ends once it is found

    monkeypatch.setattr(daemon, "_ASK_AFTER_S", pauses())
    twin = load_or_create_identity(tmp_path / "twin.key")
    first = peers.node()
    with ThreadPoolExecutor(1) as asking:
        taken = asking.submit(
            asyncio.run, is_identity_taken(twin.peer_id, first.addresses, LineBytes())
        )
        assert was_asked.wait(2 * WAIT_S) and not taken.done(), "nobody has it yet"
        monkeypatch.undo()
        peers.node(identity_path=twin.path)
        assert taken.result(4 * WAIT_S)


def test_a_client_node_reads_but_is_no_part_of_the_dht(peers):
    first = peers.node()
    first.run(first.store("key", b"value", 60), WAIT_S)
    client = peers.node(
        identity_path=None, network=NetworkSection(client_mode=True), known_peers=first.addresses
    )
    records = records_of(client, "key")
    assert {peer: record.value for peer, record in records.items()} == {first.peer_id: b"value"}
    assert client.addresses == ()
    assert client.port is None
    assert first.num_neighbours == 0


def test_a_dht_that_does_not_answer_is_an_error_that_callers_know(peers, monkeypatch):
    """Nodes near a key may answer pings but no requests. The search then takes too long."""
    node = peers.node()

    async def never(*_: object, **__: object) -> None:
        await asyncio.sleep(WAIT_S)

    monkeypatch.setattr(dht_module, "_CALL_S", 0.02)
    for name in ("get_many", "store"):
        monkeypatch.setattr(node._substrate.dht._node, name, never)
    with pytest.raises(NobodyReachable, match=r"did not answer within 0\.02 s"):
        node.run(node.get_many(["key"]), WAIT_S)
    with pytest.raises(NobodyReachable, match="did not answer"):
        node.run(node.store("key", b"value", 60), WAIT_S)


def test_an_address_that_the_machine_gets_later_is_handed_out(peers, monkeypatch, caplog):
    """Many routers assign a new one each day. Records must keep the present address of a peer."""
    monkeypatch.setattr(node_module, "HEAL_LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(node_module, "RENEW_ADDRESSES_S", 0.0)
    node = peers.node()
    before, port = node.addresses, node.port
    new = re.sub(r"/ip4/[0-9.]+/", "/ip4/10.9.8.7/", before[0])
    mapped = new.replace(f"/tcp/{port}/", "/tcp/9/")
    is_changed = threading.Event()

    async def visible(*_: object, says: bool) -> tuple[str, ...]:
        is_changed.set()
        return new, mapped

    with caplog.at_level(logging.WARNING):
        monkeypatch.setattr(node_module, "visible_addresses", visible)
        assert is_changed.wait(WAIT_S)
        node.run(node.renew_addresses(), WAIT_S)
    assert node.addresses == (new,) and node.port == port
    assert f"addresses changed: {new}" in caplog.text
    loopback = new.replace("10.9.8.7", "127.0.0.1")
    assert renewed((new,), (loopback,)) == renewed((new,), ()) == (new,), "its network is down"
    assert renewed((loopback,), (loopback,)) == (loopback,) and renewed((), (new,)) == ()
    assert renewed((loopback,), ()) == (loopback,), "libp2p knows none for a while"


def test_a_client_looks_for_no_addresses_and_a_machine_without_any_keeps_its_own(peers):
    """libp2p's daemon then has none, and hivemind raises an exception that ends the task."""
    first = peers.node()
    client = peers.node(
        identity_path=None, network=NetworkSection(client_mode=True), known_peers=first.addresses
    )
    client.run(client.renew_addresses(), WAIT_S)
    assert client.addresses == ()
    before, daemon = first.addresses, first._substrate.p2p._client
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(daemon), "identify", AsyncMock(return_value=(None, ())))
        first.run(first.renew_addresses(), WAIT_S)
    assert first.addresses == before


def test_a_dead_daemon_is_replaced_by_one_of_the_same_identity_and_port(peers, caplog):
    inbox = Inbox()
    first = peers.node()
    node = peers.node(inbox.handlers)
    first.run(first.store("key", b"value", 60), WAIT_S)
    before = (node.peer_id, node.addresses)
    os.kill(node._substrate.p2p._child.pid, signal.SIGKILL)
    assert wait_until(lambda: node.failure is not None)
    assert "status -9" in node.failure
    assert node.alive, "it is being started again"
    with pytest.raises(NetworkDown, match="status -9"):
        node.run(node.post(first.peer_id, b"x"), WAIT_S)
    assert set(records_of(node, "key")) == {first.peer_id}, "waits until it is back"
    assert (node.peer_id, node.addresses) == before
    assert node.failure is None
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        with contextlib.suppress(Unreachable):
            first.run(first.post(node.peer_id, b"again"), WAIT_S)
            break
    assert inbox.messages == [(first.peer_id, b"again")]
    assert "nothing can be sent" in caplog.text and "runs again" in caplog.text


def test_a_daemon_that_does_not_start_again_is_given_up_with_the_reason(peers, monkeypatch, caplog):
    node = peers.node()
    monkeypatch.setattr(node_module, "RESTART_AFTER_S", (0.01, 0.01))
    fails = AsyncMock(side_effect=NetworkDown("no more processes"))
    monkeypatch.setattr(node_module, "open_substrate", fails)
    os.kill(node._substrate.p2p._child.pid, signal.SIGKILL)
    assert wait_until(lambda: not node.alive)
    with pytest.raises(NetworkDown, match="status -9"):
        records_of(node, "key")
    assert caplog.text.count("no more processes") == 2


def test_healing_joins_what_knows_of_each_other_by_address_only(peers):
    first = peers.node()
    second = peers.node(known_peers=())
    assert second.num_neighbours == 0
    second.loop.call_soon_threadsafe(second.remember, first.addresses)
    assert second.run(second.heal(), WAIT_S) == 1
    assert (first.num_neighbours, second.num_neighbours) == (1, 1)


def test_dhts_that_formed_apart_become_one_by_themselves(peers):
    """One peer of the first learns one address of the second. No repair is triggered."""
    halves = [[peers.node(known_peers=())], [peers.node(known_peers=())]]
    for half in halves:
        half.append(peers.node(known_peers=half[0].addresses))
    for half in halves:
        half[0].run(half[0].store("key", b"value", 60), WAIT_S)
    (left, _), (right, far) = halves
    assert set(records_of(far, "key")) == {right.peer_id}
    left.loop.call_soon_threadsafe(left.remember, right.addresses)
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        for node in (left, right):  # as heartbeats do
            node.run(node.store("key", b"value", 60), WAIT_S)
        if set(records_of(far, "key")) == {left.peer_id, right.peer_id}:
            return
        time.sleep(0.2)
    pytest.fail("the halves did not find each other")


def test_remembered_addresses_lead_in_where_the_given_ones_are_dead(peers, closed_port):
    first = peers.node()
    dead = f"/ip4/127.0.0.1/tcp/{closed_port}/p2p/{first.peer_id}"
    remembered = [Remembered("nonsense"), Remembered(first.addresses[0], 1.0)]
    assert peers.node(known_peers=(dead,), remembered=remembered).num_neighbours == 1


def test_stopping_is_quick_clean_and_may_be_repeated(peers, living_daemons, caplog):
    node = peers.node()
    other = peers.node()
    threads = threading.active_count()
    before = len(living_daemons())
    waiting = asyncio.run_coroutine_threadsafe(asyncio.sleep(3600), other.loop)
    other.stop(5.0)
    other.stop(5.0)
    assert waiting.cancelled()
    assert len(living_daemons()) == before - 1
    node.stop(5.0)
    assert len(living_daemons()) == before - 2
    assert threading.active_count() <= threads - 2
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING], caplog.text


def test_the_daemon_has_a_session_of_its_own(peers):
    node = peers.node()
    assert os.getsid(node._substrate.p2p._child.pid) != os.getsid(0), "else Ctrl+C reaches it first"


def test_a_failed_start_leaves_nothing_behind(tmp_path, living_daemons):
    daemons, threads = living_daemons(), set(threading.enumerate())
    network = NetworkSection(host_maddrs=("/dns4/nowhere.invalid/tcp/4001",))
    with pytest.raises(NetworkDown, match=r"daemon, listening on /dns4/nowhere\.invalid"):
        Node.start(identity_path=tmp_path / "identity.key", network=network)
    assert living_daemons() == daemons
    for thread in set(threading.enumerate()) - threads:
        thread.join(5.0)  # an idle one may need a moment to end
        assert not thread.is_alive(), thread
