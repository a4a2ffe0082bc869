"""Moments of experts between real nodes: asked for, fetched, checked, confirmed."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarm.codecs import Content
from swarm.experts import expert_unit
from swarm.network import moments as module
from swarm.network.blobs import BlobStore
from swarm.network.bulk import PROTOCOL
from swarm.network.fetch import Downloads
from swarm.network.moments import Arrival, MomentsExchange
from swarm.network.node import Handlers, Node
from swarm.network.serve import BlobServer
from swarm.network.shelf import Shelf
from swarm.protocol.layout import layout_of
from swarm.protocol.manifest import Kind, Manifest
from swarm.protocol.moments import Moments, Search, backup_holders, moments_layout
from tests.network.conftest import Peers
from tests.protocol.round_pump import found, make_rules
from tests.train.runs import NUM_EXPERTS, tiny_run

LAYOUT = layout_of(tiny_run())
RULES = make_rules(experts=NUM_EXPERTS)
SIZE = moments_layout(LAYOUT, 0, with_master=False).num_bytes
SOON_S = 20.0


def moments_blob(fill: float, expert: int = 0) -> bytes:
    """Second moments must not be negative, so everything is of one positive value."""
    num_elements = moments_layout(LAYOUT, expert, with_master=False).num_elements
    return np.full(num_elements, fill, dtype="<f4").tobytes()


class Side:
    """One peer as far as moments go; its node outlives it."""

    def __init__(self, node: Node, server: BlobServer, folder: Path) -> None:
        self.node, self.server, self.store = node, server, BlobStore(folder)
        self.tip: Manifest | None = None
        self.alive = True
        self.exchange = MomentsExchange(
            node,
            Shelf(self.store, folder / "moments"),
            Downloads(node, self.store),
            LAYOUT,
            run="run-1",
            tip=lambda: self.tip,
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
    """A node that lends itself to one side after another."""

    def __init__(self, peers: Peers) -> None:
        self.side: Side | None = None
        self.server = BlobServer(is_moments=lambda d: self.side.exchange.shelf.holds(d))
        streams = {PROTOCOL: self.server.serve}
        self.node = peers.node(Handlers(on_request=self.on_request, streams=streams))

    async def on_request(self, source: str, payload: bytes) -> bytes:
        answer = await self.side.exchange.answer(source, payload) if self.side.alive else None
        return answer or b""


class Swarm:
    """Three peers whose tips a test sets."""

    def __init__(self, hosts: list[Host], folder: Path) -> None:
        for number, host in enumerate(hosts):
            host.side = Side(host.node, host.server, folder / f"{number}")
        self.sides = [host.side for host in hosts]
        self.tip = found(RULES, [side.node.peer_id for side in self.sides])
        self.move_to(self.tip)

    def move_to(self, tip: Manifest) -> None:
        for side in self.sides:
            side.tip = tip

    def owner_of(self, expert: int) -> Side:
        return self.of(self.tip.owners[expert][0])

    def of(self, peer: str) -> Side:
        return next(side for side in self.sides if side.node.peer_id == peer)

    def given_to(self, side: Side, expert: int, number: int = 1) -> Manifest:
        """A later manifest, that all contributed to, in which another peer owns an expert."""
        owners = {**self.tip.owners, expert: (side.node.peer_id,)}
        return replace(self.tip, kind=Kind.QUORUM, round=number, height=number, owners=owners)


@pytest.fixture(scope="module")
def hosts(lasting_peers: Peers) -> list[Host]:
    return [Host(lasting_peers) for _ in range(3)]


@pytest.fixture
def swarm(hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swarm]:
    monkeypatch.setattr(module, "RETRY_S", 0.2)
    made = Swarm(hosts, tmp_path)
    yield made
    for side in made.sides:
        side.die()


def test_a_backup_reaches_the_peer_that_would_adopt_and_only_it(swarm: Swarm) -> None:
    owner, blob = swarm.owner_of(0), moments_blob(0.5)
    holder = swarm.of(backup_holders(swarm.tip)[0])
    kept = owner.exchange.keep(0, 1, Content.of(blob))
    others = [side.node.peer_id for side in swarm.sides if side is not owner]
    done = owner.exchange.announce({kept: (holder.node.peer_id,)}, SOON_S).result(SOON_S)
    assert done == (kept,) == holder.exchange.shelf.all()
    assert bytes(holder.store.get(kept.digest)) == blob
    (other,) = (swarm.of(p) for p in others if p != holder.node.peer_id)
    owner.exchange.announce({kept: (other.node.peer_id,)}, 0.5).result(SOON_S)
    assert other.exchange.shelf.all() == ()
    assert owner.node.traffic.moments_bytes_sent == SIZE
    assert owner.node.traffic.blob_bytes_sent == 0
    assert holder.node.traffic.moments_bytes_received == SIZE


def test_a_backup_survives_the_restart_and_the_collections_of_its_holder(
    swarm: Swarm, tmp_path: Path
) -> None:
    owner = swarm.owner_of(0)
    holder = swarm.of(backup_holders(swarm.tip)[0])
    kept = owner.exchange.keep(0, 1, Content.of(moments_blob(0.5)))
    owner.exchange.announce({kept: (holder.node.peer_id,)}, SOON_S).result(SOON_S)
    holder.store.collect(set())
    folder = tmp_path / f"{swarm.sides.index(holder)}"
    store = BlobStore(folder)
    again = Shelf(store, folder / "moments")
    store.collect(set())
    assert again.all() == (kept,) and store.has(kept.digest)


def test_a_newer_backup_takes_the_place_of_the_last(swarm: Swarm) -> None:
    owner = swarm.owner_of(0)
    holder = swarm.of(backup_holders(swarm.tip)[0])
    for number in (1, 2):
        kept = owner.exchange.keep(0, number, Content.of(moments_blob(number)))
        owner.exchange.announce({kept: (holder.node.peer_id,)}, SOON_S).result(SOON_S)
    assert holder.exchange.shelf.all() == (kept,)
    holder.store.collect(set())
    assert len(holder.store) == 1


def test_a_peer_that_is_gone_is_given_up(swarm: Swarm) -> None:
    owner = swarm.owner_of(0)
    holder = swarm.of(backup_holders(swarm.tip)[0])
    holder.die()
    kept = owner.exchange.keep(0, 1, Content.of(moments_blob(0.5)))
    told = owner.exchange.announce({kept: (holder.node.peer_id,)}, 10 * SOON_S)
    assert told.result(SOON_S) == ()


def test_a_new_owner_gets_the_bits_of_the_one_before(swarm: Swarm) -> None:
    giver = swarm.owner_of(1)
    taker = next(side for side in swarm.sides if side is not giver)
    after = swarm.given_to(taker, 1)
    swarm.move_to(after)
    giver.exchange.keep(1, 0, Content.of(moments_blob(0.125, 1)))  # for a backup, a round before
    taker.exchange.take_up(
        Search((1,), swarm.tip, after)
    )  # before the giver has put the newest out
    with pytest.raises(queue.Empty):
        taker.exchange.arrivals.get(timeout=0.5)
    kept = giver.exchange.keep(1, 1, Content.of(moments_blob(0.25, 1)))
    told = giver.exchange.announce({kept: (taker.node.peer_id,)}, SOON_S)
    arrival = taker.arrival()
    assert arrival.moments == kept and bytes(taker.store.get(kept.digest)) == moments_blob(0.25, 1)
    assert arrival.reason == f"moments of round 1 handed over by {giver.node.peer_id}"
    assert told.result(SOON_S) == (kept,)


def test_without_an_answer_of_the_owner_the_own_backup_is_taken(swarm: Swarm) -> None:
    owner = swarm.owner_of(0)
    holder = swarm.of(backup_holders(swarm.tip)[0])
    kept = owner.exchange.keep(0, 1, Content.of(moments_blob(0.5)))
    owner.exchange.announce({kept: (holder.node.peer_id,)}, SOON_S).result(SOON_S)
    owner.die()
    after = swarm.given_to(holder, 0, number=5)
    unit = expert_unit(0)
    renewed = replace(swarm.tip.entries[unit], version=3)
    before = replace(swarm.tip, entries={**swarm.tip.entries, unit: renewed})
    holder.exchange.take_up(Search((0,), before, after))
    arrival = holder.arrival()
    assert arrival.moments == kept and bytes(holder.store.get(kept.digest)) == moments_blob(0.5)
    where = "from the backup here, 2 rounds older than the weights"
    assert arrival.reason == f"moments of round 1 {where}"


def test_an_owner_whose_private_state_is_gone_gets_its_moments_back(swarm: Swarm) -> None:
    owner = swarm.owner_of(0)
    holder = swarm.of(backup_holders(swarm.tip)[0])
    kept = owner.exchange.keep(0, 1, Content.of(moments_blob(0.5)))
    owner.exchange.announce({kept: (holder.node.peer_id,)}, SOON_S).result(SOON_S)
    owner.exchange.shelf.drop(kept)
    owner.store.collect(set())
    owner.exchange.take_up(Search((0,), swarm.tip, swarm.tip))
    reason = f"moments of round 1 from the backup at {holder.node.peer_id}"
    assert owner.arrival().reason == reason


def test_a_backup_elsewhere_is_fetched_from_there(swarm: Swarm) -> None:
    owner = swarm.owner_of(0)
    holder = swarm.of(backup_holders(swarm.tip)[0])
    (third,) = (side for side in swarm.sides if side not in (owner, holder))
    kept = owner.exchange.keep(0, 1, Content.of(moments_blob(0.5)))
    owner.exchange.announce({kept: (holder.node.peer_id,)}, SOON_S).result(SOON_S)
    owner.die()
    third.exchange.take_up(Search((0,), swarm.tip, swarm.given_to(third, 0, number=5)))
    reason = f"moments of round 1 from the backup at {holder.node.peer_id}"
    assert third.arrival().reason == reason


def test_a_backup_damaged_on_disk_is_not_used(swarm: Swarm) -> None:
    owner = swarm.owner_of(0)
    holder = swarm.of(backup_holders(swarm.tip)[0])
    kept = owner.exchange.keep(0, 1, Content.of(moments_blob(0.5)))
    owner.exchange.announce({kept: (holder.node.peer_id,)}, SOON_S).result(SOON_S)
    owner.die()
    place = holder.store._places[kept.digest]
    place.pack.write(place.offset, 0, memoryview(b"\x00\x00\x80\x7f"))
    holder.exchange.take_up(Search((0,), swarm.tip, swarm.given_to(holder, 0, number=5)))
    arrival = holder.arrival()
    assert arrival.moments is None
    assert arrival.reason == "zero moments: could not be fetched"


def test_moments_that_were_fetched_outlive_a_restart_and_whoever_gave_them(
    swarm: Swarm, tmp_path: Path
) -> None:
    giver = swarm.owner_of(1)
    taker = next(side for side in swarm.sides if side is not giver)
    after = swarm.given_to(taker, 1)
    swarm.move_to(after)
    kept = giver.exchange.keep(1, 1, Content.of(moments_blob(0.25, 1)))
    search = Search((1,), swarm.tip, after)
    taker.exchange.take_up(search)
    assert taker.arrival().moments == kept
    giver.die()
    taker.die()
    again = Side(taker.node, taker.server, tmp_path / f"{swarm.sides.index(taker)}")
    swarm.sides.append(again)
    again.store.collect(set())
    again.exchange.take_up(replace(search, steps=5))
    arrival = again.arrival()
    assert arrival.moments == kept and bytes(taker.store.get(kept.digest)) == moments_blob(0.25, 1)


def test_a_search_that_goes_on_takes_no_copy_of_the_own_moments(swarm: Swarm) -> None:
    giver = swarm.owner_of(1)
    taker = next(side for side in swarm.sides if side is not giver)
    search = Search((1,), swarm.tip, swarm.given_to(taker, 1), steps=5)
    taker.exchange.keep(1, 2, Content.of(moments_blob(0.5, 1)))  # after a round with it
    kept = giver.exchange.keep(1, 1, Content.of(moments_blob(0.25, 1)))
    taker.exchange.take_up(search)
    assert taker.arrival().moments == kept


def test_moments_that_come_late_do_not_take_the_place_of_newer_ones(swarm: Swarm) -> None:
    giver = swarm.owner_of(1)
    taker = next(side for side in swarm.sides if side is not giver)
    newer = taker.exchange.keep(1, 2, Content.of(moments_blob(0.5, 1)))
    giver.exchange.keep(1, 1, Content.of(moments_blob(0.25, 1)))
    taker.exchange.take_up(Search((1,), swarm.tip, swarm.given_to(taker, 1), steps=5))
    assert taker.arrival().moments.round == 1
    assert taker.exchange.shelf.get(1) == newer


def test_with_nobody_to_ask_an_expert_goes_on_with_zeros(swarm: Swarm) -> None:
    owner = swarm.owner_of(0)
    taker = next(side for side in swarm.sides if side is not owner)
    owner.die()
    taker.exchange.take_up(Search((0,), swarm.tip, swarm.given_to(taker, 0, number=5)))
    assert taker.arrival() == Arrival(0, None, "zero moments: none of 2 peers has any")


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
    giver = swarm.owner_of(1)
    taker = next(side for side in swarm.sides if side is not giver)
    after = swarm.given_to(taker, 1)
    swarm.move_to(after)
    giver.exchange.shelf.put(Moments(1, 1, giver.store.put(blob), len(blob)))
    taker.exchange.take_up(Search((1,), swarm.tip, after))
    assert taker.arrival().moments is None
    assert taker.node.traffic.refused.total() == 1


def test_a_blob_that_is_here_as_something_else_is_checked_too(swarm: Swarm) -> None:
    giver = swarm.owner_of(1)
    taker = next(side for side in swarm.sides if side is not giver)
    after, blob = swarm.given_to(taker, 1), moments_blob(-1.0)
    swarm.move_to(after)
    giver.exchange.shelf.put(Moments(1, 1, giver.store.put(blob), len(blob)))
    taker.store.put(blob)
    taker.exchange.take_up(Search((1,), swarm.tip, after))
    assert taker.arrival().moments is None


def test_copies_go_when_newer_values_have_made_them_useless(swarm: Swarm) -> None:
    side = swarm.sides[0]
    side.exchange.keep(0, 1, Content.of(moments_blob(0.5)))
    entries = {
        unit: replace(entry, version=version)
        for version in (3, 4)
        for unit, entry in swarm.tip.entries.items()
    }
    side.exchange.expire(swarm.tip, every=1)
    assert side.exchange.shelf.get(0)
    side.exchange.expire(replace(swarm.tip, entries=entries), every=1)
    assert side.exchange.shelf.get(0) is None
    side.store.collect(set())
    assert len(side.store) == 0


def test_a_list_that_cannot_be_read_is_as_none(tmp_path: Path) -> None:
    (tmp_path / "moments").write_bytes(b"{}")
    assert Shelf(BlobStore(None), tmp_path / "moments").all() == ()


def test_a_question_of_another_run_is_none_of_ours(swarm: Swarm) -> None:
    side = swarm.sides[0]
    answer = asyncio.run_coroutine_threadsafe(
        side.exchange.answer("x", b"tip run-1"), side.node.loop
    ).result(5)
    assert answer is None
