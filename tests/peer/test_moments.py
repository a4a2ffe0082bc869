"""What the trainer does about moments: bits that arrive, or late, masters, and who is told."""

from __future__ import annotations

import queue
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swarm.codecs import Content, encode_unit
from swarm.data.loader import Loader
from swarm.experts import expert_shapes, expert_unit
from swarm.network.blobs import BlobStore
from swarm.network.contents import store_content
from swarm.network.founding import founding_manifest
from swarm.network.moments import Arrival, MomentsExchange
from swarm.peer import moments as moments_module
from swarm.peer.leaving import Stop
from swarm.peer.live_model import Agreed, LiveModel, initial_contents
from swarm.peer.moments import MomentsKeeper
from swarm.peer.phases import PhaseMeter
from swarm.peer.rounds import Rounds
from swarm.peer.state_directory import RunDirectory
from swarm.peer.status import PeerStatus
from swarm.peer.trainer import Trainer
from swarm.protocol.digests import digest_of
from swarm.protocol.layout import layout_of
from swarm.protocol.manifest import Founding, Kind, Manifest
from swarm.protocol.moments import (
    Moments,
    Search,
    backup_holders,
    moments_layout,
    transfer_limit_s,
)
from swarm.protocol.rounds import Rules
from swarm.protocol.training import Applied, SavedWork, at_once
from swarm.train.resident import ResidentEngine
from tests.peer.adopting import adopt_into
from tests.train.runs import batch, same, tiny_run

RUN = tiny_run(wire={"experts": "bf16"}, ownership={"backup_every_rounds": 2})
LAYOUT = layout_of(RUN)
PEERS = ("me", "other", "third")


class Exchange:
    """Remembers what it was told; blobs by digest."""

    def __init__(self, store: BlobStore) -> None:
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.store = store
        self.blobs: dict[str, Content] = {}
        self.announced: list[dict[Moments, tuple[str, ...]]] = []
        self.confirms = True
        self.open: list[tuple[Future[Any], tuple[Moments, ...]]] = []
        self.taken_up: list[int] = []
        self.searches: list[Search] = []

    def keep(self, expert: int, number: int, content: Content) -> Moments:
        blob = content.whole()
        moments = Moments(expert, number, digest_of(blob), len(blob))
        self.blobs[moments.digest] = Content.of(blob)
        return moments

    def announce(self, wanted: dict[Moments, tuple[str, ...]], _: float) -> Future[Any]:
        self.announced.append(dict(wanted))
        future: Future[Any] = Future()
        self.open.append((future, tuple(wanted)))
        if self.confirms:
            self.confirm_all()
        return future

    def confirm_all(self) -> None:
        """All who were told have it by now."""
        for future, wanted in self.open:
            future.set_result(wanted)
        self.open = []

    def take_up(self, search: Search) -> None:
        self.taken_up += search.experts
        self.searches.append(search)

    def expire(self, _: Manifest, __: int) -> None:
        pass

    def deliver(self, moments: Moments, blob: Content) -> None:
        store_content(self.store, blob)
        self.arrivals.put(Arrival(moments.expert, moments, "handed over"))

    def taken(self, _: Arrival) -> None:
        pass


class Status:
    """What a person would read."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, Moments | None, str]] = []
        self.manifest: Manifest | None = None
        self.phases = PhaseMeter()

    def took_moments(self, *told: Any) -> None:
        self.taken.append(told)

    def gave_moments(self, *_: Any) -> None:
        pass

    def validated(self, *_: Any) -> None:
        pass


class Side:
    """A peer's model with its keeper; all sides share one store and manifest."""

    def __init__(self, me: str, store: BlobStore, founded: Manifest) -> None:
        self.exchange, self.status = Exchange(store), Status()
        self.model = LiveModel(me, RUN, ResidentEngine(RUN), Agreed(store, LAYOUT))
        self.keeper = MomentsKeeper(
            self.model,
            cast(MomentsExchange, self.exchange),
            cast(PeerStatus, self.status),
        )
        self.at = founded
        adopt_into(self.model, founded, previous="")

    def move_to(self, manifest: Manifest) -> None:
        self.keeper.before_adopt(self.at, manifest)
        adoption = adopt_into(self.model, manifest, previous=self.at.digest)
        self.keeper.adopted(adoption, self.at, manifest)
        self.at = manifest

    def train(self, steps: int, *, lr: float = 1e-2, done: int = 0) -> None:
        for step in range(done, done + steps):
            self.model.engine.step(batch(RUN, step), lr=lr)
            self.keeper.on_step(skipped=False)


class Process:
    """A peer's trainer on its state directory; what runs the rounds knows only the tip."""

    def __init__(
        self, store: BlobStore, folder: Path, founded: Manifest, tip: Manifest, parent: Manifest
    ) -> None:
        self.side = Side("other", store, founded)
        rounds = SimpleNamespace(
            newest=Applied(tip, 0.0, "", parent),
            rules=replace(Rules.of("run", RUN, LAYOUT), step_bound=None),
            store_value=lambda value: (store_content(store, value), value.num_bytes),
        )
        self.trainer = Trainer(
            self.side.model,
            cast(Loader, None),
            cast(Rounds, rounds),
            RunDirectory(folder),
            validation_BT1=batch(RUN, 0),
            status=cast(PeerStatus, self.side.status),
            moments=self.side.keeper,
            stop=cast(Stop, lambda: False),
        )
        self.tip = tip

    def save(self) -> None:
        training = self.trainer.training
        training.tip, training.work = self.tip, SavedWork("", "", 0, 1, 1, 0.0, 0, {}, {})
        training.bases = dict(self.side.model.bases)
        at_once(training.save())

    def resume(self) -> Exchange:
        """Returns what the keeper told the exchange of its life."""
        self.trainer.training.resume()
        return self.side.exchange


class Machine:
    """Where a peer runs, is killed and runs again; it has just taken an expert up."""

    def __init__(self, me: Side, store: BlobStore, founded: Manifest, folder: Path) -> None:
        self.expert, self._store, self._founded, self._folder = mine(me), store, founded, folder
        me.train(3)
        self.after = after_round(me, store, owner="other")
        me.move_to(self.after)
        self.handed = handed(me)
        self._masters = me.model.engine.read(list(expert_shapes(RUN.model, self.expert)))
        self.first = self.process(self.after)
        self.first.side.move_to(self.after)
        self.first.side.model.engine.write(self._masters)

    def process(self, tip: Manifest) -> Process:
        parent = self._founded if tip == self.after else self.after
        return Process(self._store, self._folder, self._founded, tip, parent)

    def moments(self, process: Process) -> dict[str, torch.Tensor]:
        return process.side.model.engine.read_moments(expert_shapes(RUN.model, self.expert))

    def never_killed(self, steps: int) -> dict[str, torch.Tensor]:
        """The moments if they had been there at once."""
        side = Side("other", self._store, self._founded)
        side.move_to(self.after)
        side.exchange.deliver(*self.handed)
        side.keeper.install()
        side.model.engine.write(self._masters)  # so that the gradients are alike
        side.train(steps, lr=0.0)
        return side.model.engine.read_moments(expert_shapes(RUN.model, self.expert))


@pytest.fixture
def machine(me: Side, store: BlobStore, founded: Manifest, tmp_path: Path) -> Machine:
    return Machine(me, store, founded, tmp_path)


def assert_near(moments: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """A few roundings of fp32, in another order, of sums that may cancel."""
    for name, tensor in moments.items():
        atol = 1e-6 * expected[name].abs().max().item()
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=atol)


@pytest.fixture
def store() -> BlobStore:
    return BlobStore(None)


@pytest.fixture
def founded(store: BlobStore) -> Manifest:
    initial = {}
    for unit, value in initial_contents(RUN, LAYOUT):
        initial[unit] = (store_content(store, value), value.num_bytes)
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


def handed(side: Side) -> tuple[Moments, Content]:
    """What a side put out for others last."""
    (moments,) = side.exchange.announced[-1]
    return moments, side.exchange.blobs[moments.digest]


def test_a_handed_over_expert_goes_on_with_the_same_bits_of_moments_and_master(
    me: Side, other: Side, store: BlobStore
) -> None:
    expert = mine(me)
    names = list(expert_shapes(RUN.model, expert))
    me.train(3)
    moments = me.model.engine.read_moments(expert_shapes(RUN.model, expert))
    masters = me.model.engine.read(names)
    manifest = after_round(me, store, owner="other")
    me.move_to(manifest)
    other.move_to(manifest)
    assert me.exchange.announced == [{handed(me)[0]: ("other",)}]
    assert other.exchange.taken_up == [expert]
    assert not same(other.model.engine.read(names), masters)  # the wire has rounded them
    other.exchange.deliver(*handed(me))
    other.keeper.install()
    assert same(other.model.engine.read_moments(expert_shapes(RUN.model, expert)), moments)
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
    expected = in_time.model.engine.read_moments(expert_shapes(RUN.model, expert))
    assert_near(other.model.engine.read_moments(expert_shapes(RUN.model, expert)), expected)
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
    other.exchange.arrivals.put(Arrival(expert, None, "zero moments: nobody"))
    other.keeper.install()
    assert not any(
        t.any() for t in other.model.engine.read_moments(expert_shapes(RUN.model, expert)).values()
    )
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
    moments = me.model.engine.read_moments(expert_shapes(RUN.model, expert))
    me.move_to(replace(after_round(me, store, owner="me"), owners={expert: ("me", "third")}))
    told, blob = handed(me)
    assert me.exchange.announced == [{told: ("third",)}]
    assert same(me.model.engine.read_moments(expert_shapes(RUN.model, expert)), moments)
    size = moments_layout(LAYOUT, expert, with_master=True).num_bytes
    assert blob.num_bytes == told.num_bytes == size


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
    me.keeper.leave(me.at, me.at)
    assert not me.keeper.all_handed_over()
    me.keeper.hand_over(1.0)
    holders = backup_holders(me.at)
    told = {m.expert: peers for each in me.exchange.announced for m, peers in each.items()}
    assert told == {expert: (holders[expert],) for expert in me.model.engine.owned}
    assert me.keeper.all_handed_over()
    count = len(me.model.engine.owned)
    assert me.keeper.summary() == f"moments of {count} of {count} experts handed over"
    announced = len(me.exchange.announced)
    me.keeper.leave(me.at, me.at)  # nothing is new
    me.keeper.hand_over(1.0)
    assert len(me.exchange.announced) == announced


def test_a_leaver_copies_only_what_is_on_its_way(me: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments_module, "TOGETHER", 1)
    everything = dict.fromkeys(me.at.owners, ("me",))
    me.move_to(replace(me.at, height=1, parent=me.at.digest, owners=everything))
    me.train(1)
    me.exchange.confirms = False
    me.keeper.leave(me.at, me.at)
    count = len(me.model.engine.owned)
    assert count > 1
    for _ in range(3):
        me.keeper.hand_over(1.0)
    assert len(me.exchange.blobs) == 1
    assert not me.keeper.all_handed_over()
    said = me.keeper.summary()
    assert said.startswith(f"moments of 0 of {count} experts handed over; no time for")
    me.exchange.confirm_all()
    me.keeper.hand_over(1.0)
    assert len(me.exchange.blobs) == 2


@pytest.mark.parametrize(("gigabytes", "minutes"), [(0.0, 5), (2.4, 48), (19.3, 386)])
def test_moments_have_as_long_as_a_slow_line_takes(gigabytes: float, minutes: float) -> None:
    assert transfer_limit_s(int(gigabytes * 1e9)) == pytest.approx(60 * minutes, rel=0.01)


def test_a_peer_killed_while_it_looks_goes_on_looking_and_ends_where_it_would_have(
    machine: Machine,
) -> None:
    machine.first.side.train(2, lr=0.0)
    machine.first.save()
    second = machine.process(machine.after)
    exchange = second.resume()
    assert [search.experts for search in exchange.searches] == [(machine.expert,)]
    assert exchange.searches[0].previous.digest == machine.after.parent
    second.side.train(1, lr=0.0, done=2)
    assert any(t.any() for t in machine.moments(second).values())
    exchange.deliver(*machine.handed)
    exchange.deliver(*machine.handed)  # and only once, whoever else delivers them
    second.side.keeper.install()
    assert_near(machine.moments(second), machine.never_killed(3))
    assert second.side.status.taken[0][2].startswith("handed over, 3 steps late")
    second.save()
    assert machine.process(machine.after).resume().searches == []


def test_moments_that_were_added_but_not_saved_are_looked_for_again(machine: Machine) -> None:
    machine.first.side.train(2, lr=0.0)
    machine.first.save()
    machine.first.side.exchange.deliver(*machine.handed)
    machine.first.side.keeper.install()
    second = machine.process(machine.after)
    exchange = second.resume()
    exchange.deliver(*machine.handed)
    second.side.keeper.install()
    assert_near(machine.moments(second), machine.never_killed(2))


def test_a_peer_killed_before_it_saved_asks_the_owner_before(
    machine: Machine, founded: Manifest
) -> None:
    machine.first = machine.process(founded)
    machine.first.save()
    (search,) = machine.process(machine.after).resume().searches
    assert search == Search((machine.expert,), founded, machine.after)


def test_a_search_outlives_the_rounds_that_were_missed_until_all_have_dropped_the_copies(
    machine: Machine,
) -> None:
    machine.first.save()
    unit = expert_unit(machine.expert)
    for version, goes_on in ((5, True), (6, False)):  # of round 1, with a copy every 2 rounds
        entry = replace(machine.after.entries[unit], version=version)
        later = replace(machine.after, height=7, round=7, parent="e" * 64)
        process = machine.process(replace(later, entries={**machine.after.entries, unit: entry}))
        assert (process.resume().taken_up == [machine.expert]) is goes_on
        told = [] if goes_on else [(machine.expert, None)]
        assert [said[:2] for said in process.side.status.taken] == told


def test_an_expert_that_went_while_its_peer_was_down_is_not_looked_for(
    machine: Machine,
) -> None:
    machine.first.save()
    owners = {**machine.after.owners, machine.expert: ("third",)}
    later = replace(machine.after, height=2, round=2, parent=machine.after.digest, owners=owners)
    process = machine.process(later)
    process.resume().deliver(*machine.handed)
    process.side.keeper.install()
    process.save()
    assert process.side.status.taken == []
    assert machine.process(later).resume().searches == []


def test_what_is_still_looked_for_is_not_copied_for_a_backup(machine: Machine) -> None:
    keeper, exchange = machine.first.side.keeper, machine.first.side.exchange
    machine.first.side.train(1)
    due = replace(machine.after, round=3)
    keeper.offered(due)
    copied = set(exchange.blobs)
    exchange.deliver(*machine.handed)
    keeper.install()
    keeper.offered(due)
    assert machine.expert in backup_holders(due)
    assert len(exchange.blobs) == len(copied) + 1 == len(machine.first.side.model.bases)
