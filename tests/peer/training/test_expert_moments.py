"""What the trainer does about moments: bits on time or late, masters, and whom it informs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swarm.codecs import Content
from swarm.config import RunConfig
from swarm.data.loader import Loader
from swarm.experts import expert_shapes, expert_unit
from swarm.network.blobs.blob_store import BlobStore, store_content
from swarm.network.rounds.moments_exchange import Arrival, MomentsExchange
from swarm.peer.machine.state_directory import RunDirectory
from swarm.peer.status.observing import UNOBSERVED
from swarm.peer.status.status import PeerStatus, PhaseMeter
from swarm.peer.text.agreed_model import Agreed
from swarm.peer.training import expert_moments
from swarm.peer.training.expert_moments import ExpertMoments
from swarm.peer.training.leaving import Stop
from swarm.peer.training.live_model import LiveModel
from swarm.peer.training.offering import Rounds
from swarm.peer.training.trainer import Trainer
from swarm.protocol.exchange.handover import Moments, moments_layout
from swarm.protocol.rounds import Rules
from swarm.protocol.training import Applied, SavedWork, at_once
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Kind, Manifest
from swarm.train.engine.engine import Engine
from swarm.train.engine.engine_options import EngineKind
from swarm.train.engine.resident import ResidentEngine
from tests.blobs import blob_of
from tests.peer.adopting import adopt_into, founded_in
from tests.train.crews import Crews, shared_crews
from tests.train.runs import batch, held_out, same, tiny_run

RUN = tiny_run(wire={"experts": "bf16"})
LAYOUT = layout_of(RUN)
PEERS = ("me", "other", "third")


class Exchange:
    """Records its calls. Blobs are stored by digest."""

    def __init__(self, store: BlobStore) -> None:
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self.store = store
        self.blobs: dict[str, Content] = {}
        self.out: list[tuple[Moments, tuple[str, ...]]] = []
        self.confirms = True
        self.given: set[int] = set()
        self.searches: list[tuple[int, Manifest, Manifest]] = []

    def give(self, expert: int, number: int, content: Content, peers: tuple[str, ...]) -> Moments:
        blob = content.whole()
        moments = Moments(expert, number, digest_of(blob), len(blob))
        self.blobs[moments.digest] = Content.of(blob)
        self.out.append((moments, peers))
        if self.confirms:
            self.given.add(expert)
        return moments

    def is_waited_for(self, moments: Moments) -> bool:
        return moments.expert not in self.given

    def take_up(self, experts: list[int], previous: Manifest, manifest: Manifest) -> None:
        self.searches += [(expert, previous, manifest) for expert in experts]

    def keep_only(self, experts: Collection[int]) -> None:
        self.searches = [search for search in self.searches if search[0] in experts]

    def deliver(self, moments: Moments, blob: Content) -> None:
        store_content(self.store, blob)
        self.arrivals.put(Arrival(moments.expert, moments, "handed over"))

    def taken(self, _: Arrival) -> None:
        pass


class Status:
    """Records the lines for people."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, Moments | None, str]] = []
        self.manifest: Manifest | None = None
        self.phases = PhaseMeter()
        self.observer = UNOBSERVED

    def took_moments(self, *told: Any) -> None:
        self.taken.append(told)

    def gave_moments(self, *_: Any) -> None:
        pass

    def validated(self, *_: Any) -> None:
        pass


class Side:
    """A peer's model with its moments. All sides share one store and manifest."""

    make_engine: Callable[[RunConfig], Engine] = staticmethod(ResidentEngine)

    def __init__(self, me: str, store: BlobStore, founded: Manifest) -> None:
        self.exchange, self.status = Exchange(store), Status()
        self.model = LiveModel(me, RUN, Side.make_engine(RUN), Agreed(store, LAYOUT))
        self.moments = ExpertMoments(
            self.model,
            cast(MomentsExchange, self.exchange),
            cast(PeerStatus, self.status),
        )
        self.at = founded
        adopt_into(self.model, founded, previous="")

    def move_to(self, manifest: Manifest) -> None:
        self.moments.before_adopt(self.at, manifest)
        adoption = adopt_into(self.model, manifest, previous=self.at.digest)
        self.moments.adopted(adoption, self.at, manifest)
        self.at = manifest

    def train(self, steps: int, *, lr: float = 1e-2, done: int = 0) -> None:
        for step in range(done, done + steps):
            self.model.engine.step(batch(RUN, step), lr=lr)
            self.moments.on_step(skipped=False)


class Process:
    """A peer's trainer on its state directory. The rounds' stand-in knows only the tip."""

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
            held_out=held_out(RUN),
            status=cast(PeerStatus, self.side.status),
            moments=self.side.moments,
            stop=cast(Stop, lambda: False),
        )
        self.tip = tip

    def save(self) -> None:
        training = self.trainer.training
        training.tip, training.work = self.tip, SavedWork("", "", 0, 1, 1, 0.0, 0, {}, {})
        training.bases = dict(self.side.model.bases)
        at_once(training.save())

    def resume(self) -> Exchange:
        """Returns the exchange, which has recorded its calls."""
        self.trainer.training.resume()
        return self.side.exchange


def assert_near(moments: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """A few roundings of fp32, in another order, of sums that may cancel."""
    for name, tensor in moments.items():
        atol = 1e-6 * expected[name].abs().max().item()
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=atol)


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    with shared_crews() as crews:
        yield crews


@pytest.fixture(
    params=[
        "resident",
        pytest.param("parallel", marks=pytest.mark.exhaustive),
        pytest.param("expert parallel", marks=pytest.mark.exhaustive),
        pytest.param("streaming from one copy", marks=pytest.mark.exhaustive),
    ],
    autouse=True,
)
def engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test uses engines of one kind."""
    made: list[Engine] = []

    def parallel(run: RunConfig) -> Engine:
        options: dict[str, Any] = {
            "expert parallel": {"ep": 2},
            "streaming from one copy": {"kind": EngineKind.STREAMING},
        }.get(request.param, {})
        made.append(request.getfixturevalue("crews").engine(run, **options))
        return made[-1]

    if request.param != "resident":
        monkeypatch.setattr(Side, "make_engine", parallel)
    yield
    for engine in made:
        engine.close()


@pytest.fixture
def store() -> BlobStore:
    return BlobStore(None)


@pytest.fixture
def founded(store: BlobStore) -> Manifest:
    return founded_in(store, RUN, PEERS)


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
    digest = store.put(blob_of(LAYOUT.by_unit[unit], side.model.engine.read(names)))
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
    """The last moments that a side offered to others."""
    moments, _ = side.exchange.out[-1]
    return moments, side.exchange.blobs[moments.digest]


def test_a_handed_over_expert_goes_on_with_the_same_bits_of_moments_and_master(
    me: Side, other: Side, store: BlobStore, founded: Manifest
) -> None:
    expert = mine(me)
    names = list(expert_shapes(RUN.model, expert))
    me.train(3)
    moments = me.model.engine.read_moments(expert_shapes(RUN.model, expert))
    masters = me.model.engine.read(names)
    manifest = after_round(me, store, owner="other")
    me.move_to(manifest)
    other.move_to(manifest)
    assert me.exchange.out == [(handed(me)[0], ("other",))]
    assert other.exchange.searches == [(expert, founded, manifest)]
    assert not same(other.model.engine.read(names), masters)  # the wire has rounded them
    other.exchange.deliver(*handed(me))
    other.moments.install()
    assert same(other.model.engine.read_moments(expert_shapes(RUN.model, expert)), moments)
    assert same(other.model.engine.read(names), masters)
    assert other.status.taken == [(expert, handed(me)[0], "handed over, with masters")]


def test_moments_that_come_late_end_where_they_would_have_been(
    me: Side, other: Side, store: BlobStore
) -> None:
    """At a learning rate of zero the gradients equal those of a peer that had them in time."""
    expert = mine(me)
    me.train(3)
    manifest = after_round(me, store, owner="other")
    me.move_to(manifest)
    in_time = Side("other", store, other.at)
    for side in (other, in_time):
        side.move_to(manifest)
    in_time.exchange.deliver(*handed(me))
    in_time.moments.install()
    for side in (other, in_time):
        names = list(expert_shapes(RUN.model, expert))
        side.model.engine.write(me.model.engine.read(names))
        side.train(4, lr=0.0)
    other.exchange.deliver(*handed(me))
    other.moments.install()
    expected = in_time.model.engine.read_moments(expert_shapes(RUN.model, expert))
    assert_near(other.model.engine.read_moments(expert_shapes(RUN.model, expert)), expected)
    assert "4 steps late" in other.status.taken[0][2]


def test_moments_are_added_once_nothing_reads_the_engine_any_more(
    me: Side, store: BlobStore, founded: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a private state that is written during steps, with one of them skipped."""
    names, may_read = list(expert_shapes(RUN.model, mine(me))), threading.Event()
    me.train(3)
    manifest = after_round(me, store, owner="other")
    me.move_to(manifest)
    process = Process(store, tmp_path, founded, manifest, founded)
    other, making = process.side, process.trainer.making
    other.move_to(manifest)
    before, wait = other.model.engine.read_moments(names), making.wait

    def read() -> dict[str, torch.Tensor]:
        assert may_read.wait(30.0)
        return other.model.engine.read_moments(names)

    def waiting() -> None:
        may_read.set()
        wait()

    monkeypatch.setattr(making, "wait", waiting)
    making.begin(read)
    other.exchange.deliver(*handed(me))
    other.moments.on_step(skipped=True)
    assert same(making.result(), before)
    assert not same(other.model.engine.read_moments(names), before)


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
    other.moments.install()
    assert same(other.model.engine.read(names), before)
    assert other.status.taken[0][2] == "handed over"


def test_without_moments_an_expert_goes_on_with_zeros_and_says_so(
    me: Side, other: Side, store: BlobStore
) -> None:
    expert = mine(me)
    me.train(1)
    other.move_to(after_round(me, store, owner="other"))
    other.exchange.arrivals.put(Arrival(expert, None, "zero moments: nobody"))
    other.moments.install()
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
    other.moments.install()
    assert other.status.taken == []


def test_a_co_owner_that_stays_shares_and_keeps_its_moments(me: Side, store: BlobStore) -> None:
    expert = mine(me)
    me.at = replace(me.at, owners={**me.at.owners, expert: ("me", "other")})
    me.train(2)
    moments = me.model.engine.read_moments(expert_shapes(RUN.model, expert))
    me.move_to(replace(after_round(me, store, owner="me"), owners={expert: ("me", "third")}))
    told, blob = handed(me)
    assert me.exchange.out == [(told, ("third",))]
    assert same(me.model.engine.read_moments(expert_shapes(RUN.model, expert)), moments)
    size = moments_layout(LAYOUT, expert, with_master=True).num_bytes
    assert blob.num_bytes == told.num_bytes == size


def test_a_leaver_hands_over_everything_once_the_others_are_without_it(me: Side) -> None:
    me.train(1)
    mine = dict.fromkeys(me.model.engine.owned, ("other",))
    without = replace(me.at, height=1, parent=me.at.digest, owners={**me.at.owners, **mine})
    me.moments.hand_over()
    assert me.moments.all_handed_over()  # nobody may have moments yet
    assert me.moments.summary() == "no moments were handed over"
    me.moments.leave(me.at, without)
    assert not me.moments.all_handed_over()
    me.moments.hand_over()
    assert {moments.expert: peers for moments, peers in me.exchange.out} == mine
    assert me.moments.all_handed_over()
    assert me.moments.summary() == f"moments of {len(mine)} of {len(mine)} experts handed over"


def test_a_leaver_has_no_more_to_hand_over_than_what_it_put_out_at_the_manifest_without_it(
    me: Side, store: BlobStore
) -> None:
    me.train(1)
    without = replace(
        after_round(me, store, owner="other"),
        owners={e: ("other",) if p == ("me",) else p for e, p in me.at.owners.items()},
    )
    owned = me.model.engine.owned
    me.move_to(without)
    assert [moments.expert for moments, _ in me.exchange.out] == list(owned)
    me.moments.leave(without, without)
    me.moments.hand_over()
    assert len(me.exchange.out) == len(owned)


def test_a_leaver_copies_only_what_is_on_its_way(me: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_moments, "TOGETHER", 1)
    everything = dict.fromkeys(me.at.owners, ("me",))
    me.move_to(replace(me.at, height=1, parent=me.at.digest, owners=everything))
    me.train(1)
    me.exchange.confirms = False
    without = replace(
        me.at, height=2, parent=me.at.digest, owners=dict.fromkeys(everything, ("other",))
    )
    me.moments.leave(me.at, without)
    count = len(me.model.engine.owned)
    assert count > 1
    for _ in range(3):
        me.moments.hand_over()
    assert len(me.exchange.blobs) == 1
    assert not me.moments.all_handed_over()
    said = me.moments.summary()
    assert said.startswith(f"moments of 0 of {count} experts handed over; no time for")
    me.exchange.given = {me.exchange.out[0][0].expert}
    me.moments.hand_over()
    assert len(me.exchange.blobs) == 2


def test_a_peer_killed_before_it_saved_asks_the_owner_before(
    me: Side, store: BlobStore, founded: Manifest, tmp_path: Path
) -> None:
    after = after_round(me, store, owner="other")
    Process(store, tmp_path, founded, founded, founded).save()
    searches = Process(store, tmp_path, founded, after, founded).resume().searches
    assert searches == [(mine(me), founded, after)]


def test_a_peer_killed_after_it_saved_goes_on_with_the_moments_that_it_had(
    me: Side, store: BlobStore, founded: Manifest, tmp_path: Path
) -> None:
    after = after_round(me, store, owner="other")
    first = Process(store, tmp_path, founded, after, founded)
    first.side.move_to(after)
    first.side.train(2, lr=0.0)
    moments = first.side.model.engine.read_moments(expert_shapes(RUN.model, mine(me)))
    first.save()
    second = Process(store, tmp_path, founded, after, founded)
    assert second.resume().searches == []
    again = second.side.model.engine.read_moments(expert_shapes(RUN.model, mine(me)))
    assert same(again, moments) and any(tensor.any() for tensor in again.values())
