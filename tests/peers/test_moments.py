"""What the trainer does about moments: bits that arrive, or late, masters, and who is told."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from peers.live_model import Agreed, LiveModel, initial_blobs
from peers.moments import MomentsKeeper
from peers.status import PeerStatus
from swarm.codecs import encode_unit
from swarm.experts import expert_shapes, expert_unit
from swarm.network.blobs import BlobStore
from swarm.network.founding import founding_manifest
from swarm.network.moments import Arrival, MomentsExchange
from swarm.protocol.digests import digest_of
from swarm.protocol.layout import layout_of
from swarm.protocol.manifest import Founding, Kind, Manifest
from swarm.protocol.moments import Moments, backup_holders, moments_layout
from swarm.train.engine import ResidentEngine
from tests.train.runs import batch, same, tiny_run

RUN = tiny_run(wire={"experts": "bf16"}, ownership={"backup_every_rounds": 2})
LAYOUT = layout_of(RUN)
PEERS = ("me", "other", "third")


class Exchange:
    """Remembers what it was told; blobs by digest."""

    def __init__(self) -> None:
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.blobs: dict[str, memoryview] = {}
        self.announced: list[dict[Moments, tuple[str, ...]]] = []
        self.taken_up: list[int] = []

    def keep(self, expert: int, number: int, blob: memoryview) -> Moments:
        moments = Moments(expert, number, digest_of(blob), len(blob))
        self.blobs[moments.digest] = blob
        return moments

    def announce(self, wanted: dict[Moments, tuple[str, ...]], _: float) -> Future[Any]:
        self.announced.append(dict(wanted))
        future: Future[Any] = Future()
        future.set_result(tuple(wanted))
        return future

    def take_up(self, experts: list[int], _: Manifest, __: Manifest) -> None:
        self.taken_up += experts

    def expire(self, _: Manifest, __: int) -> None:
        pass

    def deliver(self, moments: Moments, blob: memoryview) -> None:
        self.arrivals.put(Arrival(moments.expert, moments, blob, "handed over"))


class Status:
    """What a person would read."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, Moments | None, str]] = []

    def took_moments(self, *told: Any) -> None:
        self.taken.append(told)

    def gave_moments(self, *_: Any) -> None:
        pass


class Side:
    """A peer's model with its keeper; all sides share one store and manifest."""

    def __init__(self, me: str, store: BlobStore, founded: Manifest) -> None:
        self.exchange, self.status = Exchange(), Status()
        self.model = LiveModel(me, RUN, ResidentEngine(RUN), Agreed(store, LAYOUT))
        self.keeper = MomentsKeeper(
            self.model,
            cast(MomentsExchange, self.exchange),
            cast(PeerStatus, self.status),
        )
        self.at = founded
        self.model.adopt(founded, previous="")

    def move_to(self, manifest: Manifest) -> None:
        self.keeper.before_adopt(self.at, manifest)
        adoption = self.model.adopt(manifest, previous=self.at.digest)
        self.keeper.adopted(adoption, self.at, manifest)
        self.at = manifest

    def train(self, steps: int, *, lr: float = 1e-2) -> None:
        for step in range(steps):
            self.model.engine.step(batch(RUN, step), lr=lr)
            self.keeper.on_step(skipped=False)


@pytest.fixture
def store() -> BlobStore:
    return BlobStore(None)


@pytest.fixture
def founded(store: BlobStore) -> Manifest:
    initial = {}
    for unit, value in initial_blobs(RUN, LAYOUT):
        initial[unit] = (store.put(value), len(value))
    founding = Founding("me", "n", "c" * 64, 1, "d" * 64, 4)
    return founding_manifest(founding, RUN, LAYOUT, initial, dict.fromkeys(PEERS, 1.0))


@pytest.fixture
def me(store: BlobStore, founded: Manifest) -> Side:
    return Side("me", store, founded)


@pytest.fixture
def other(store: BlobStore, founded: Manifest) -> Side:
    return Side("other", store, founded)


def mine(side: Side) -> int:
    return side.model.engine.owned[0]


def after_round(side: Side, store: BlobStore, *, owner: str) -> Manifest:
    """The next manifest: one expert has its owner's value and belongs to another peer."""
    expert, names = mine(side), list(expert_shapes(RUN.model, mine(side)))
    unit = expert_unit(expert)
    digest = store.put(encode_unit(LAYOUT.by_unit[unit], side.model.engine.read(names)))
    entries = {u: replace(entry, version=1) for u, entry in side.at.entries.items()}
    entries[unit] = replace(entries[unit], digest=digest)
    return replace(
        side.at,
        height=1,
        round=1,
        kind=Kind.QUORUM,
        parent=side.at.digest,
        contributors=("me",),
        entries=entries,
        owners={**side.at.owners, expert: (owner,)},
    )


def handed(side: Side) -> tuple[Moments, memoryview]:
    """What a side put out for others last."""
    (moments,) = side.exchange.announced[-1]
    return moments, side.exchange.blobs[moments.digest]


def test_a_handed_over_expert_goes_on_with_the_same_bits_of_moments_and_master(
    me: Side, other: Side, store: BlobStore
) -> None:
    expert = mine(me)
    names = list(expert_shapes(RUN.model, expert))
    me.train(3)
    moments = me.model.engine.read_moments(expert)
    masters = me.model.engine.read(names)
    manifest = after_round(me, store, owner="other")
    me.move_to(manifest)
    other.move_to(manifest)
    assert me.exchange.announced == [{handed(me)[0]: ("other",)}]
    assert other.exchange.taken_up == [expert]
    assert not same(other.model.engine.read(names), masters)  # the wire has rounded them
    other.exchange.deliver(*handed(me))
    other.keeper.install()
    assert same(other.model.engine.read_moments(expert), moments)
    assert same(other.model.engine.read(names), masters)
    assert other.status.taken == [(expert, handed(me)[0], "handed over, with masters")]


def test_moments_that_come_late_end_where_they_would_have_been(
    me: Side, other: Side, store: BlobStore
) -> None:
    """At a learning rate of zero the gradients are those of a peer that had them in time."""
    expert = mine(me)
    me.train(3)
    manifest = after_round(me, store, owner="other")
    me.move_to(manifest)
    in_time = Side("other", store, other.at)
    for side in (other, in_time):
        side.move_to(manifest)
    in_time.exchange.deliver(*handed(me))
    in_time.keeper.install()
    for side in (other, in_time):
        names = list(expert_shapes(RUN.model, expert))
        side.model.engine.write(me.model.engine.read(names))
        side.train(4, lr=0.0)
    other.exchange.deliver(*handed(me))
    other.keeper.install()
    expected = in_time.model.engine.read_moments(expert)
    for name, tensor in other.model.engine.read_moments(expert).items():
        # A few roundings of fp32, in another order, of sums that may cancel.
        atol = 1e-6 * expected[name].abs().max().item()
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=atol)
    assert "4 steps late" in other.status.taken[0][2]


def test_masters_of_another_value_are_not_taken(me: Side, other: Side, store: BlobStore) -> None:
    expert = mine(me)
    names = list(expert_shapes(RUN.model, expert))
    me.train(2)
    manifest = after_round(me, store, owner="other")
    me.train(1)  # steps that the manifest does not know
    me.move_to(manifest)
    other.move_to(manifest)
    before = other.model.engine.read(names)
    other.exchange.deliver(*handed(me))
    other.keeper.install()
    assert same(other.model.engine.read(names), before)
    assert other.status.taken[0][2] == "handed over"


def test_without_moments_an_expert_goes_on_with_zeros_and_says_so(
    me: Side, other: Side, store: BlobStore
) -> None:
    expert = mine(me)
    me.train(1)
    other.move_to(after_round(me, store, owner="other"))
    other.exchange.arrivals.put(Arrival(expert, None, None, "zero moments: nobody"))
    other.keeper.install()
    assert not any(t.any() for t in other.model.engine.read_moments(expert).values())
    assert other.status.taken == [(expert, None, "zero moments: nobody")]


def test_moments_of_an_expert_that_went_again_are_dropped(
    me: Side, other: Side, store: BlobStore
) -> None:
    me.train(1)
    manifest = after_round(me, store, owner="other")
    me.move_to(manifest)
    other.move_to(manifest)
    back = {**manifest.owners, handed(me)[0].expert: ("third",)}
    other.move_to(replace(manifest, height=2, round=2, parent=manifest.digest, owners=back))
    other.exchange.deliver(*handed(me))
    other.keeper.install()
    assert other.status.taken == []


def test_a_co_owner_that_stays_shares_its_moments_and_keeps_them(
    me: Side, store: BlobStore
) -> None:
    expert = mine(me)
    me.at = replace(me.at, owners={**me.at.owners, expert: ("me", "other")})
    me.train(2)
    moments = me.model.engine.read_moments(expert)
    me.move_to(replace(after_round(me, store, owner="me"), owners={expert: ("me", "third")}))
    told, blob = handed(me)
    assert me.exchange.announced == [{told: ("third",)}]
    assert same(me.model.engine.read_moments(expert), moments)
    size = moments_layout(LAYOUT, expert, with_master=True).num_bytes
    assert len(blob) == told.num_bytes == size


def test_backups_go_in_due_rounds_to_who_would_adopt_once_the_round_is_over(
    me: Side, store: BlobStore
) -> None:
    me.train(1)
    me.keeper.offered(me.at)
    assert me.exchange.blobs == {}  # round 1 of every 2
    manifest = replace(me.at, height=1, round=1, kind=Kind.QUORUM, parent=me.at.digest)
    me.move_to(manifest)
    me.keeper.offered(manifest)
    owned = me.model.engine.owned
    assert len(me.exchange.blobs) == len(owned) and me.exchange.announced == []
    me.move_to(replace(manifest, height=2, round=2, parent=manifest.digest))
    (told,) = me.exchange.announced
    holders = backup_holders(manifest)
    assert {m.expert: peers for m, peers in told.items()} == {e: (holders[e],) for e in owned}
    assert {moments.round for moments in told} == {2}


def test_a_leaver_whose_leave_is_not_decided_tells_who_would_adopt(me: Side) -> None:
    me.train(1)
    me.keeper.leave(me.at, me.at, 1.0)
    holders = backup_holders(me.at)
    (told,) = me.exchange.announced
    assert {m.expert: peers[0] for m, peers in told.items()} == {
        expert: holders[expert] for expert in me.model.engine.owned
    }
    assert me.keeper.all_handed_over()
    count = len(me.model.engine.owned)
    assert me.keeper.summary() == f"moments of {count} of {count} experts handed over"
