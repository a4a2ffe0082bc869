"""A peer's use of its private state after a crash."""

import logging
import time
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.config import RunConfig
from swarm.data.loader import Loader
from swarm.network.blobs.blob_store import BlobStore, store_content
from swarm.network.runs.run_founding import founding_manifest
from swarm.peer.machine.state_directory import RunDirectory
from swarm.peer.status.observing import UNOBSERVED
from swarm.peer.status.status import PeerStatus, PhaseMeter
from swarm.peer.text.agreed_model import Agreed, initial_contents
from swarm.peer.training.expert_moments import ExpertMoments
from swarm.peer.training.leaving import Stop, StopAsked
from swarm.peer.training.live_model import LiveModel
from swarm.peer.training.offering import Offering, Rounds
from swarm.peer.training.trainer import Trainer
from swarm.protocol.messages.messages import Offer
from swarm.protocol.rounds import Rules
from swarm.protocol.training import Applied, SavedWork, Work, at_once
from swarm.protocol.training.local_progress import Tally
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Founding, Kind, Manifest
from swarm.protocol.values.updates import StepBound
from swarm.train.engine.local_steps import LocalStats
from swarm.train.engine.resident import ResidentEngine
from swarm.train.saving import hashed_file
from swarm.train.saving.checkpoint import load_newest, load_private
from swarm.train.saving.hashed_file import HashedFile
from tests.peer.adopting import adopt_into
from tests.train.runs import all_names, batch, held_out, same, tiny_run

RUN = tiny_run()
SLICED = tiny_run(
    wire={"shared_coding": "b2", "experts_coding": "b2"},
    round={"experts_every": 2, "shared_every": 1, "stagger": True},
)
STEPS, TOKENS = 3, 192
ME = "me"


@pytest.fixture
def store() -> BlobStore:
    return BlobStore(None)


@pytest.fixture
def founded(store: BlobStore) -> Manifest:
    return founded_by(store, RUN)


def founded_by(store: BlobStore, run: RunConfig) -> Manifest:
    layout = layout_of(run)
    initial = {
        unit: (store_content(store, value), value.num_bytes)
        for unit, value in initial_contents(run, layout)
    }
    founding = Founding(ME, "n", "c" * 64, 1, "d" * 64, 4)
    return founding_manifest(founding, run, layout, initial, {ME: 1.0, "other": 1.0})


class Life:
    """A peer's trainer from a start to a crash."""

    def __init__(self, store: BlobStore, folder: Path, tip: Manifest, **record: Any) -> None:
        run_id, parent = record.get("run", "run"), record.get("parent")
        run = record.get("config", RUN)
        layout = layout_of(run)
        self.model = LiveModel(ME, run, ResidentEngine(run), Agreed(store, layout))
        rounds = SimpleNamespace(
            newest=Applied(tip, 0.0, "", parent),
            rules=replace(Rules.of(run_id, run, layout), step_bound=None),
            store_value=lambda value: (store_content(store, value), value.num_bytes),
        )
        status = SimpleNamespace(
            validated=lambda *_: None, phases=PhaseMeter(), observer=UNOBSERVED
        )
        self.directory = RunDirectory(folder)
        self.trainer = Trainer(
            self.model,
            cast(Loader, None),
            cast(Rounds, rounds),
            self.directory,
            held_out=held_out(run),
            status=cast(PeerStatus, status),
            moments=cast(ExpertMoments, SimpleNamespace(adopted=lambda *_: None)),
            stop=cast(Stop, lambda: False),
        )
        self.training = self.trainer.training

    def finish(self, tip: Manifest, work: SavedWork) -> Offer:
        """The local steps of a round are done."""
        self.training.tip, self.training.work = tip, work
        self.training.bases = dict(self.model.bases)
        return at_once(self.training.save())

    def resume(self) -> tuple[Manifest, Work | None]:
        """Returns the tip, and the work that is still valid on it."""
        self.training.resume()
        return self.training.tip, self.training.work


@pytest.fixture
def crashed(store: BlobStore, founded: Manifest, tmp_path: Path) -> tuple[Life, Any]:
    """A peer that has offered its local steps on manifest 0 and was killed."""
    life = Life(store, tmp_path, founded)
    adopt_into(life.model, founded, previous="")
    for step in range(STEPS):
        life.model.engine.step(batch(RUN, step), lr=1e-2)
    return life, life.finish(founded, SavedWork("", "", 0, STEPS, TOKENS, 1.0, 0, {}, {}))


def test_a_state_that_was_written_beside_steps_is_not_written_again(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when an engine steps down to one that cannot be read during its steps."""
    coded = {"shared_coding": "b2", "experts_coding": "b1"}
    run = tiny_run(round={"overlap": "round"}, wire=coded)
    founded = founded_by(store, run)
    life = Life(store, tmp_path, founded, config=run)
    adopt_into(life.model, founded, previous="")
    work = SavedWork("", "", 0, STEPS, TOKENS, 1.0, 0, {}, {})
    life.training.tip, life.training.work = founded, work
    life.training.bases = dict(life.model.bases)
    for reads_beside in (True, False):
        life.model.engine.step(batch(run, 0), lr=1e-2)
        monkeypatch.setattr(ResidentEngine, "before_update", lambda *_, found=reads_beside: found)
        at_once(at_once(life.trainer.beside(life.training.save(), saves_state=True))())
        saved = load_newest(life.directory.private_path)
        assert saved
        assert saved.state.engine.updates == life.model.engine.state_dict().updates


def test_experts_that_leave_after_a_private_state_was_written_leave_no_memory_taken(
    uncollected: None, crashed: tuple[Life, Any]
) -> None:
    """Adopting a lost peer's experts also held the old masters and moments in memory."""
    engine = cast(Any, crashed[0].model.engine)
    stacks = {n: p for n, p in engine._model.trained_parameters().items() if ".owned." in n}
    moments = [each for name in stacks for each in engine._optimizer._moments[name].parts.values()]
    before = [weakref.ref(each) for each in [*stacks.values(), *moments]]
    del stacks, moments
    engine.own(range(RUN.model.num_experts))
    assert len(before) == 3 * 3 * RUN.model.num_hidden_layers
    assert not [each for each in before if each() is not None]


def test_a_unit_that_begins_anew_while_the_state_is_written_leaves_it_readable(
    store: BlobStore, founded: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs meanwhile, with tensors that are hashed but not written."""
    life = Life(store, tmp_path, founded)
    adopt_into(life.model, founded, previous="")
    life.model.engine.step(batch(RUN, 0), lr=10.0)  # further than any honest step
    rules = replace(life.trainer.rounds.rules, step_bound=StepBound.of(RUN))
    monkeypatch.setattr(life.trainer.rounds, "rules", rules)
    files, refused, write, store_all = [], [], HashedFile._write_chunks, Offering.offered_all
    monkeypatch.setattr(life.trainer.status, "refused", lambda unit, _: refused.append(unit), False)
    monkeypatch.setattr(hashed_file, "CHUNKS_AHEAD", 10**6)

    def hashed_before(*arguments: Any) -> Any:
        while not (files and files[0]._hashed.done()):
            time.sleep(0.001)
        return store_all(*arguments)

    def write_late(file: HashedFile, to: Any) -> None:
        files.append(file)
        while not (file._given_up or len(refused) == len(life.training.due())):
            time.sleep(0.001)
        write(file, to)

    monkeypatch.setattr(HashedFile, "_write_chunks", write_late)
    monkeypatch.setattr(Offering, "offered_all", hashed_before)
    offer = life.finish(founded, SavedWork("", "", 0, 1, TOKENS, 1.0, 0, {}, {}))
    assert refused and {u: v.digest for u, v in offer.units.items()} == {
        unit: founded.entries[unit].digest for unit in offer.units
    }
    saved = load_private(life.directory.private_path)
    assert saved.offered == {unit: value.digest for unit, value in offer.units.items()}
    assert same(dict(saved.engine.tensors), dict(life.model.engine.state_dict().tensors))


def test_what_a_kill_left_of_a_private_state_is_removed_at_the_start(
    store: BlobStore, founded: Manifest, crashed: tuple[Life, Any], tmp_path: Path
) -> None:
    torn = crashed[0].directory.private_path.with_name("private.new")
    torn.write_bytes(b"torn")
    Life(store, tmp_path, founded).resume()
    assert not torn.exists()


def reform_of(parent: Manifest) -> Manifest:
    return replace(parent, kind=Kind.REFORM, parent=parent.digest, generation="fresh")


@pytest.mark.parametrize("reforms", [0, 1, 2])
def test_what_was_finished_is_offered_again_whatever_reforms_came(
    store: BlobStore,
    founded: Manifest,
    crashed: tuple[Life, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reforms: int,
) -> None:
    """Killed after the record has the reform, and before the private state belongs to it."""
    before, offer = crashed
    tips = [founded]
    for _ in range(reforms):
        tips.append(reform_of(tips[-1]))
    parent = tips[-2] if reforms else None
    again = Life(store, tmp_path, tips[-1], parent=parent)
    monkeypatch.setattr(ResidentEngine, "step", None)  # no step may be trained
    tip, work = again.resume()
    assert tip.digest == tips[-1].digest
    assert work is not None and again.training.is_done
    offered = at_once(again.training.save())
    assert offered.tip == tip.digest
    assert (offered.steps, offered.tokens) == (STEPS, TOKENS)
    assert offered.units == offer.units
    names = all_names(RUN)
    assert same(again.model.engine.read(names), before.model.engine.read(names))
    saved = load_private(again.directory.private_path)
    assert saved.base_tip == tip.digest
    assert saved.offered == {unit: value.digest for unit, value in offer.units.items()}


@pytest.fixture
def second(store: BlobStore) -> Manifest:
    """The tip after the first round of a cycle of two."""
    founded = founded_by(store, SLICED)
    return replace(founded, height=1, round=1, step=9, kind=Kind.QUORUM, parent=founded.digest)


@pytest.fixture
def crashed_between(store: BlobStore, second: Manifest, tmp_path: Path) -> Offer:
    """A peer's offer in the second round of a cycle, in which it was killed."""
    life = Life(store, tmp_path, second, config=SLICED)
    adopt_into(life.model, second, previous="")
    life.model.engine.step(batch(RUN, 0), lr=1e-2)
    offer = life.finish(second, SavedWork("", "", 0, STEPS, TOKENS, 1.0, 0, {}, {}))
    life.trainer.release()  # its memory dies with it
    return offer


def test_between_two_private_states_an_offer_is_kept_by_itself(
    store: BlobStore, second: Manifest, crashed_between: Offer, tmp_path: Path
) -> None:
    again = Life(store, tmp_path, second, config=SLICED)
    assert not again.directory.private_path.exists(), "that is 12 bytes of each parameter"
    assert again.resume() == (second, None)
    assert again.training.again == crashed_between
    assert {value.digest for value in crashed_between.units.values()} <= set(again.model._offered)


@pytest.mark.parametrize("damage", ["", "flipped", "gone"])
def test_an_offer_that_cannot_be_read_or_served_is_not_made_again(
    store: BlobStore,
    second: Manifest,
    crashed_between: Offer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    again = Life(store, tmp_path, second, config=SLICED)
    path = again.directory.offer_path
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[-5] ^= 1
        path.write_bytes(content)
    elif damage == "gone":
        kept = [entry.digest for entry in second.entries.values()]
        store.collect(kept)
    assert again.resume() == (second, None)
    assert (again.training.again is None) == bool(damage)
    assert ("is damaged" in caplog.text) == (damage == "flipped")


def test_a_peer_that_stops_at_rest_saves_what_only_its_offers_had(
    store: BlobStore, second: Manifest, crashed_between: Offer, tmp_path: Path
) -> None:
    life = Life(store, tmp_path, second, config=SLICED)
    life.resume()
    life.training.again, life.training.is_unsaved = None, True
    life.trainer.stop = cast(Stop, lambda: True)
    with pytest.raises(StopAsked):
        life.trainer.may_stop()
    saved = load_private(life.directory.private_path)
    assert (saved.base_tip, saved.is_offered) == (second.digest, False)
    life.training.is_unsaved = False
    life.directory.private_path.unlink()
    with pytest.raises(StopAsked):
        life.trainer.may_stop()
    assert not life.directory.private_path.exists(), "nothing is new"


def test_a_peer_between_two_private_states_keeps_the_steps_since_its_offer_when_it_stops(
    store: BlobStore, tmp_path: Path
) -> None:
    """With overlapping rounds, if it is still a member when it returns."""
    slices = {**SLICED.round.model_dump(), "overlap": "round"}
    run = SLICED.model_copy(update={"round": type(SLICED.round)(**slices)})
    founded = founded_by(store, run)
    tip = replace(founded, height=1, round=1, step=9, kind=Kind.QUORUM, parent=founded.digest)
    life = Life(store, tmp_path, tip, config=run)
    life.resume()
    life.model.engine.step(batch(run, 0), lr=1e-2)
    life.training.work = LocalStats(1, 64, 1.0, 0, None, None, completed=False)
    life.training.is_unsaved = True
    life.trainer.stop = cast(Stop, lambda: True)
    with pytest.raises(StopAsked) as asked:
        life.trainer.may_stop()
    assert asked.value.has_saved
    again = Life(store, tmp_path, tip, config=run)
    assert again.resume() == (tip, None)
    assert again.training.ahead.behind == Tally(1, 64, 1.0), "goes with the next offer"
    names = all_names(run)
    assert same(again.model.engine.read(names), life.model.engine.read(names))


def test_a_round_that_went_on_takes_the_finished_steps_away(
    store: BlobStore, founded: Manifest, crashed: tuple[Life, Any], tmp_path: Path
) -> None:
    decided = replace(founded, height=1, round=1, step=9, kind=Kind.QUORUM, parent=founded.digest)
    assert Life(store, tmp_path, decided, parent=founded).resume() == (decided, None)


@pytest.mark.parametrize(
    ("tip", "run"),
    [({}, "another"), ({"round": 1}, "run")],
    ids=["another run", "another round"],
)
def test_a_state_of_another_run_or_step_is_not_trained_on(
    store: BlobStore,
    founded: Manifest,
    crashed: tuple[Life, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    tip: dict[str, int],
    run: str,
) -> None:
    reform = replace(reform_of(founded), **tip)  # type: ignore[arg-type]
    again = Life(store, tmp_path, reform, parent=founded, run=run)
    with caplog.at_level(logging.ERROR):
        assert again.resume() == (reform, None)
    assert "the private state" in caplog.text
    fresh = LiveModel(ME, RUN, ResidentEngine(RUN), Agreed(store, layout_of(RUN)))
    adopt_into(fresh, founded, previous="")
    names = all_names(RUN)
    assert same(again.model.engine.read(names), fresh.engine.read(names))
