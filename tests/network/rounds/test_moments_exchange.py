"""Moments of experts between real nodes: offered, requested, fetched, checked, confirmed."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarm.codecs import Content
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import PROTOCOL
from swarm.network.fetch.fetcher import Downloads
from swarm.network.node.node import Handlers, Node
from swarm.network.rounds import moments_exchange
from swarm.network.rounds.moments_exchange import Arrival, MomentsExchange
from swarm.protocol.exchange import handover
from swarm.protocol.exchange.handover import moments_layout
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Kind, Manifest
from tests.network.conftest import Peers
from tests.protocol.round_pump import found, make_rules
from tests.train.runs import NUM_EXPERTS, tiny_run
from tests.waiting import wait_until

LAYOUT = layout_of(tiny_run())
RULES = make_rules(experts=NUM_EXPERTS)
SIZE = moments_layout(LAYOUT, 0, with_master=False).num_bytes
SOON_S = 60.0


def moments_blob(fill: float, expert: int = 0) -> bytes:
    """Second moments must not be negative, so all elements have one positive value."""
    num_elements = moments_layout(LAYOUT, expert, with_master=False).num_elements
    return np.full(num_elements, fill, dtype="<f4").tobytes()


class Side:
    """The part of a peer for moments. Its node outlives it."""

    def __init__(self, node: Node, server: BlobServer, folder: Path) -> None:
        self.node, self.server, self.store = node, server, BlobStore(folder)
        self.alive = True
        self.exchange = MomentsExchange(
            node,
            self.store,
            Downloads(node, self.store),
            LAYOUT,
            run="run-1",
        )
        server.attach(self.store)
        node.traffic.__init__()

    def arrival(self) -> Arrival:
        return self.exchange.arrivals.get(timeout=SOON_S)

    def die(self) -> None:
        """Answers nobody and serves nothing any more."""
        if self.alive:
            self.alive = False
            self.server.detach(self.store)
            self.node.run(self.exchange.stop(), 10)


class Host:
    """A node that one side after another uses."""

    def __init__(self, peers: Peers) -> None:
        self.side: Side | None = None
        self.server = BlobServer(is_moments=lambda d: self.side.exchange.holds(d))
        streams = {PROTOCOL: self.server.serve}
        self.node = peers.node(Handlers(on_request=self.on_request, streams=streams))

    async def on_request(self, source: str, payload: bytes) -> bytes:
        answer = await self.side.exchange.answer(source, payload) if self.side.alive else None
        return answer or b""


class Swarm:
    """Three peers that own the experts."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        for number, host in enumerate(hosts):
            host.side = Side(host.node, host.server, folder / f"{number}")
        self.sides = [host.side for host in hosts]
        self.tip = found(RULES, [side.node.peer_id for side in self.sides])

    def roles(self, expert: int) -> tuple[Side, Side, Side]:
        """The owner of an expert, its next one, and the third peer."""
        (owner,) = self.tip.owners[expert]
        giver = next(side for side in self.sides if side.node.peer_id == owner)
        taker, third = (side for side in self.sides if side is not giver)
        return giver, taker, third

    def given_to(self, side: Side, *experts: int) -> Manifest:
        """The next manifest, which gives experts to another peer."""
        owners = self.tip.owners | dict.fromkeys(experts, (side.node.peer_id,))
        return replace(self.tip, kind=Kind.QUORUM, round=1, height=1, owners=owners)


def is_empty_after_collection(store: BlobStore) -> bool:
    """Whether nothing is pinned."""
    store.collect(set())
    return len(store) == 0


@pytest.fixture(scope="module")
def hosts(lasting_peers: Peers) -> list[Host]:
    return [Host(lasting_peers) for _ in range(3)]


@pytest.fixture
def swarm(hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    monkeypatch.setattr(moments_exchange, "RETRY_S", 0.2)
    made = Swarm(hosts, tmp_path)
    yield made
    for side in made.sides:
        side.die()


def test_a_new_owner_and_nobody_else_gets_the_bits_of_the_one_before(swarm: Swarm) -> None:
    giver, taker, third = swarm.roles(1)
    after = swarm.given_to(taker, 1)
    taker.exchange.take_up([1], swarm.tip, after)  # before the giver offers anything
    third.exchange.take_up([1], swarm.tip, after)
    with pytest.raises(queue.Empty):
        taker.exchange.arrivals.get(timeout=0.5)
    blob = moments_blob(0.25, 1)
    kept = giver.exchange.give(1, 1, Content.of(blob), [taker.node.peer_id])
    arrival = taker.arrival()
    assert arrival.moments == kept and bytes(taker.store.get(kept.digest)) == blob
    assert arrival.reason == f"moments of round 1 handed over by {giver.node.peer_id}"
    assert wait_until(lambda: giver.exchange.given == {1})
    assert not giver.exchange.is_waited_for(kept) and third.exchange.arrivals.empty()
    assert giver.node.traffic.moments_bytes_sent == SIZE
    assert giver.node.traffic.blob_bytes_sent == 0
    assert taker.node.traffic.moments_bytes_received == SIZE


def test_blobs_are_kept_on_either_side_as_long_as_they_are_needed(swarm: Swarm) -> None:
    giver, taker, _ = swarm.roles(1)
    kept = giver.exchange.give(1, 1, Content.of(moments_blob(0.25, 1)), [taker.node.peer_id])
    giver.store.collect(set())
    assert giver.store.has(kept.digest)
    taker.exchange.take_up([1], swarm.tip, swarm.given_to(taker, 1))
    arrival = taker.arrival()
    taker.store.collect(set())
    assert taker.store.has(kept.digest)
    taker.exchange.taken(arrival)
    assert wait_until(lambda: not giver.exchange.holds(kept.digest))
    for side in (giver, taker):
        assert wait_until(lambda store=side.store: is_empty_after_collection(store))


def test_of_several_experts_each_arrives(swarm: Swarm) -> None:
    giver, taker, _ = swarm.roles(1)
    before, experts = swarm.given_to(giver, 1, 2, 3), [1, 2, 3]
    for expert in experts:
        content = Content.of(moments_blob(expert, expert))
        giver.exchange.give(expert, 1, content, [taker.node.peer_id])
    taker.exchange.take_up(experts, before, swarm.given_to(taker, *experts))
    assert {taker.arrival().expert for _ in experts} == set(experts)
    assert wait_until(lambda: giver.exchange.given == set(experts))


def test_an_expert_whose_owner_is_gone_goes_on_with_zeros(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "PATIENCE_S", 0.5)
    giver, taker, _ = swarm.roles(0)
    giver.die()
    taker.exchange.take_up([0], swarm.tip, swarm.given_to(taker, 0))
    reason = f"zero moments: nothing came from {giver.node.peer_id}"
    assert taker.arrival() == Arrival(0, None, reason)


def test_a_new_owner_that_left_is_given_up(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "PATIENCE_S", 0.5)
    giver, taker, _ = swarm.roles(0)
    taker.die()
    kept = giver.exchange.give(0, 1, Content.of(moments_blob(0.5)), [taker.node.peer_id])
    assert giver.exchange.is_waited_for(kept)
    assert wait_until(lambda: is_empty_after_collection(giver.store))
    assert giver.exchange.given == frozenset()


def test_an_expert_that_went_again_is_looked_for_no_longer(swarm: Swarm) -> None:
    giver, taker, _ = swarm.roles(1)
    taker.exchange.take_up([1], swarm.tip, swarm.given_to(taker, 1))
    taker.exchange.keep_only([])
    giver.exchange.give(1, 1, Content.of(moments_blob(0.25, 1)), [taker.node.peer_id])
    with pytest.raises(queue.Empty):
        taker.exchange.arrivals.get(timeout=1.0)


@pytest.mark.parametrize(
    "blob",
    [
        moments_blob(float("nan")),
        moments_blob(-1.0),  # a second moment is a mean of squares
        moments_blob(1.0)[:-4],
    ],
    ids=["non_finite", "negative", "size"],
)
def test_a_blob_that_no_honest_peer_sends_is_refused(swarm: Swarm, blob: bytes) -> None:
    giver, taker, _ = swarm.roles(1)
    kept = giver.exchange.give(1, 1, Content.of(blob), [taker.node.peer_id])
    taker.exchange.take_up([1], swarm.tip, swarm.given_to(taker, 1))
    assert taker.arrival().moments is None
    assert taker.node.traffic.refused.total() == 1
    assert wait_until(lambda: not giver.exchange.is_waited_for(kept))


def test_a_blob_that_is_here_as_something_else_is_checked_too(swarm: Swarm) -> None:
    giver, taker, _ = swarm.roles(1)
    blob = moments_blob(-1.0)
    giver.exchange.give(1, 1, Content.of(blob), [taker.node.peer_id])
    taker.store.put(blob)
    taker.exchange.take_up([1], swarm.tip, swarm.given_to(taker, 1))
    assert taker.arrival().moments is None


def test_a_question_of_another_run_is_none_of_ours(swarm: Swarm) -> None:
    side = swarm.sides[0]
    answer = asyncio.run_coroutine_threadsafe(
        side.exchange.answer("x", b"tip run-1"), side.node.loop
    ).result(5)
    assert answer is None
