"""Peers report their observations to each other. Nobody is probed on another's behalf."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest

from swarm.config import NetworkSection
from swarm.errors import Unreachable
from swarm.network.node import peer_probe
from swarm.network.node.node import Handlers, Node
from swarm.network.node.peer_probe import (
    PROTOCOL,
    Prober,
    dial_back,
    dial_fault,
    look_at,
    measure_mbit,
    measure_uplink,
    rate_mbit,
)
from swarm.network.wire.ledger import LIMITS, Cost, Ledger, Limit, Rate
from swarm.version import __version__
from tests.hostile.victim import wait_until
from tests.network.conftest import Peers

WAIT_S = 60.0
SOME = {"is_down": True, "limit_s": 5.0, "num_bytes": 2**19}


def probed(peers: Peers, ledger: Ledger | None = None) -> Node:
    """A node that answers questions."""
    prober = Prober(ledger)
    started: list[Node] = []

    async def on_request(source: str, payload: bytes) -> bytes:
        return await prober.answer(started[0], source, payload)

    node = peers.node(Handlers(on_request=on_request, streams={PROTOCOL: prober.serve}))
    started.append(node)
    return node


@pytest.fixture(scope="module")
def pair(lasting_peers: Peers) -> tuple[Node, Node]:
    return probed(lasting_peers), lasting_peers.node()


def test_a_peer_says_its_version_its_clock_and_where_one_comes_from(pair) -> None:
    peer, me = pair
    look = me.run(look_at(me, peer.peer_id), WAIT_S)
    assert look.about.version == __version__
    assert abs(look.clock_offset_s) < 1.0, "the same clock, on a busy machine"
    assert 0 < look.rtt_ms < 1000
    assert look.about.seen_at.startswith("/ip4/127.0.0.1/tcp/")


def test_a_clock_that_is_ahead_is_seen(pair, monkeypatch) -> None:
    peer, me = pair
    monkeypatch.setattr(peer_probe.About, "model_validate_json", staged(time.time() + 100.0))
    look = me.run(look_at(me, peer.peer_id), WAIT_S)
    assert look.clock_offset_s == pytest.approx(100.0, abs=5.0)


def staged(clock: float):
    return lambda _: peer_probe.About(version="0", clock=clock, seen_at="")


def test_a_peer_that_listens_can_be_dialled_back(pair) -> None:
    peer, me = pair
    assert me.run(dial_back(me, peer.peer_id, me.port), WAIT_S) is None
    assert me.run(dial_fault(me), WAIT_S) is None


def test_why_it_cannot_be_dialled_is_said(pair, closed_port) -> None:
    peer, me = pair
    fault = me.run(dial_back(me, peer.peer_id, closed_port), WAIT_S)
    assert fault == f"127.0.0.1 port {closed_port}: Connection refused"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Thread(target=lambda: silent.accept()[0].close(), daemon=True).start()
        port = silent.getsockname()[1]
        fault = me.run(dial_back(me, peer.peer_id, port), WAIT_S)
    assert fault == f"127.0.0.1 port {port}: it closed the connection at once"


def test_one_neighbour_that_can_dial_is_enough_and_silence_is_no_fault(pair, monkeypatch) -> None:
    _, me = pair
    said: list[str | Exception | None] = []

    async def staged(*_: object) -> str | None:
        if isinstance(outcome := said.pop(0), Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(peer_probe, "dial_back", staged)
    monkeypatch.setattr(Node, "neighbours", frozenset({"a", "b"}))
    for said[:], fault in (
        (["closed", "closed"], "closed"),
        (["closed", None], None),
        ([Unreachable("x"), "closed"], "closed"),
        ([Unreachable("x"), Unreachable("x")], None),
    ):
        assert me.run(dial_fault(me), WAIT_S) == fault


@pytest.mark.parametrize("is_down", [True, False])
def test_a_rate_is_measured_both_ways(pair, is_down: bool) -> None:
    peer, me = pair
    rate_mbit = me.run(measure_mbit(me, peer.peer_id, is_down=is_down, limit_s=5.0), WAIT_S)
    assert 10 < rate_mbit < 100_000


def test_what_others_measure_takes_the_line_and_is_no_quiet_moment(pair) -> None:
    peer, me = pair
    before = peer.traffic.bytes_sent, me.traffic.bytes_sent
    me.run(measure_mbit(me, peer.peer_id, **SOME), WAIT_S)
    assert peer.traffic.bytes_sent - before[0] == SOME["num_bytes"]
    me.run(measure_mbit(me, peer.peer_id, **SOME | {"is_down": False}), WAIT_S)
    assert me.traffic.bytes_sent == before[1]


def test_an_uplink_within_one_machine_has_a_rate_and_was_not_full(pair) -> None:
    peer, me = pair
    rate_mbit, full_mbit = me.run(measure_uplink(me, peer.peer_id, limit_s=5.0), WAIT_S)
    assert 10 < rate_mbit < 100_000
    assert full_mbit is None


@pytest.mark.parametrize(("beside", "counts"), [(0.01, True), (0.05, False)])
def test_an_uplink_on_which_something_else_was_sent_is_not_known(
    pair, monkeypatch, beside: float, counts: bool
) -> None:
    peer, me = pair

    monkeypatch.setattr(peer_probe, "full_rate_mbit", lambda _: 20.0)
    receive = peer_probe.receive_into

    async def sending_beside(*arguments: Any) -> None:
        me.traffic.blob_bytes_sent += int(beside * 2**20)
        await receive(*arguments)

    monkeypatch.setattr(peer_probe, "receive_into", sending_beside)
    _, found = me.run(measure_uplink(me, peer.peer_id, limit_s=5.0, num_bytes=2**20), WAIT_S)
    assert found == (20.0 if counts else None)


def test_the_slow_start_of_a_connection_does_not_count() -> None:
    samples = [(10.0, 0), (10.5, 1_000), (11.0, 2_000), (11.5, 502_000), (12.0, 1_002_000)]
    assert rate_mbit(samples) == pytest.approx(8.0)
    assert rate_mbit([(0.0, 0), (2.0, 1_000_000)]) == pytest.approx(4.0)


def test_who_measures_too_much_is_refused(peers: Peers) -> None:
    limits = {cost: Limit(Rate(80), Rate(30), Rate(6)) for cost in Cost}
    limits[Cost.MEASURED] = Limit(Rate(2**24), Rate(2**23), Rate(2**20))
    peer, me = probed(peers, Ledger(limits)), peers.node()

    def measure() -> None:
        me.run(measure_mbit(me, peer.peer_id, **SOME), WAIT_S)

    measure()
    measure()
    with pytest.raises(Unreachable):
        measure()
    assert peer.traffic.refused == {"measured_of_stranger": 1}


def test_strangers_that_stand_still_on_their_streams_do_not_block_members(peers: Peers) -> None:
    ledger = Ledger()
    peer, member, stranger = probed(peers, ledger), peers.node(), peers.node()
    ledger.admit([member.peer_id])
    per_stranger = int(LIMITS[Cost.STREAMS].stranger.most)

    async def stand_still(num_bytes: int) -> list[socket.socket]:
        loop, opened = asyncio.get_running_loop(), []
        for _ in range(per_stranger):
            connection = await stranger.open_stream(peer.peer_id, PROTOCOL, 5.0)
            await loop.sock_sendall(connection, peer_probe._ASK.pack(False, num_bytes))
            opened.append(connection)
        return opened

    def end(opened: list[socket.socket]) -> None:
        for connection in opened:
            stranger.loop.call_soon_threadsafe(connection.close)
        wait_until(lambda: left(stranger, Cost.STREAMS) == per_stranger)

    def left(of: Node, cost: Cost) -> float:
        return ledger.left(of.peer_id, cost, 0.0)

    opened = stranger.run(stand_still(0), WAIT_S)
    wait_until(lambda: left(stranger, Cost.STREAMS) == 0)
    assert member.run(measure_mbit(member, peer.peer_id, **SOME), WAIT_S) > 0
    end(opened)
    opened = stranger.run(stand_still(2**20), WAIT_S)
    wait_until(lambda: peer.traffic.refused["measuring_of_stranger"] == 2)
    assert member.run(measure_mbit(member, peer.peer_id, **SOME), WAIT_S) > 0
    end(opened)
    assert left(stranger, Cost.MEASURING) == LIMITS[Cost.MEASURING].stranger.most


def test_who_wants_to_be_dialled_too_often_is_refused(peers: Peers) -> None:
    limits = {cost: Limit(Rate(80), Rate(30), Rate(6)) for cost in Cost}
    limits[Cost.DIALS] = Limit(Rate(16), Rate(8), Rate(2))
    peer, me = probed(peers, Ledger(limits)), peers.node()
    with pytest.raises(Unreachable, match="asks for 1 dials"):
        for _ in range(3):
            me.run(dial_back(me, peer.peer_id, 9), WAIT_S)


def test_a_peer_that_answers_nothing_is_unreachable(peers: Peers) -> None:
    silent, me = peers.node(), peers.node(network=NetworkSection(client_mode=True))
    with pytest.raises(Unreachable):
        me.run(look_at(me, silent.peer_id), WAIT_S)
