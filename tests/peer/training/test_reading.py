"""What the trainer reads in a round, for how long, and how much it offers after a crash."""

from __future__ import annotations

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
from swarm.peer.status.status import PeerStatus, PhaseMeter, StepProgress
from swarm.peer.text.agreed_model import Agreed, initial_contents
from swarm.peer.training import trainer
from swarm.peer.training.expert_moments import ExpertMoments
from swarm.peer.training.leaving import Stop
from swarm.peer.training.live_model import LiveModel
from swarm.peer.training.offering import Rounds
from swarm.peer.training.trainer import Trainer
from swarm.protocol.messages.messages import Offer
from swarm.protocol.rounds import Rules
from swarm.protocol.training import Applied, at_once
from swarm.protocol.training.local_progress import Reading
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Founding, Kind, Manifest
from swarm.train.engine import local_steps
from swarm.train.engine.resident import ResidentEngine
from tests.train.runs import LENGTH, held_out, patterned_shards, tiny_run

ROWS = 4
EXACT = tiny_run()
TIMED = tiny_run(round={"seconds": 10.0}, optimizer={"schedule_steps": 100})
OWN = tiny_run(data={"mode": "own"})
DEALT = ((40, 60), (8, 30))
"""Ten steps and two more samples."""


class Peer:
    """A trainer whose rounds know only the tip, with a clock that moves after each step."""

    def __init__(self, run: RunConfig, folder: Path, tip: Manifest, store: BlobStore) -> None:
        self.expected: list[float] = []
        self.now_s, self.step_s = 100.0, 2.0
        rounds = SimpleNamespace(
            newest=Applied(tip, 0.0),
            rules=replace(Rules.of("run", run, layout_of(run)), step_bound=None),
            store_value=lambda value: (store_content(store, value), value.num_bytes),
            expect=lambda _, seconds: self.expected.append(seconds),
        )
        nothing = SimpleNamespace(install=lambda: None, on_step=lambda **_: None)
        nothing.before_adopt = nothing.adopted = lambda *_: None
        status = SimpleNamespace(
            phases=PhaseMeter(),
            progress=StepProgress(lambda _: None),
            observer=UNOBSERVED,
            begin=lambda _: None,
            end_steps=lambda _: None,
            on_step=self._pass,
            applied=lambda _: None,
            validated=lambda *_: None,
            since_begin_s=lambda: 0.0,
            lose_tokens=lambda *_: None,
        )
        self.trainer = Trainer(
            LiveModel("me", run, ResidentEngine(run), Agreed(store, layout_of(run))),
            Loader(patterned_shards(), run),
            cast(Rounds, rounds),
            RunDirectory(folder),
            held_out=held_out(run),
            status=cast(PeerStatus, status),
            moments=cast(ExpertMoments, nothing),
            stop=Stop(120.0),
        )
        self.training = self.trainer.training

    def _pass(self, *_: Any) -> None:
        self.now_s += self.step_s

    def resume(self) -> None:
        """Starts."""
        self.training.resume()

    def offer_again(self) -> Offer:
        """Offers the saved state."""
        return at_once(self.training.save())

    def round(self) -> Offer:
        """Trains on the tip and saves the offer."""
        at_once(self.training.train())
        assert self.training.is_done
        return self.offer_again()

    def first_sample(self) -> int:
        """The first sample of the round's local steps."""
        return self.training.reading.dealt(self.training.tip, 0)[0][0]


def founded(run: RunConfig, store: BlobStore) -> Manifest:
    layout = layout_of(run)
    initial = {
        unit: (store_content(store, value), value.num_bytes)
        for unit, value in initial_contents(run, layout)
    }
    founding = Founding("me", "n", "c" * 64, 1, "d" * 64, 4)
    tip = founding_manifest(founding, run, layout, initial, {"me": 1.0, "other": 1.0})
    dealt = {"me": DEALT, "other": ((0, 8),)}
    return replace(tip, cursor=60, holes=((30, 40),), dealt=dealt if tip.dealt else {})


@pytest.fixture
def store() -> BlobStore:
    return BlobStore(None)


def start(
    run: RunConfig,
    store: BlobStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tip: Manifest | None = None,
) -> Peer:
    """A newly started peer, on a manifest 0 or on another tip."""
    tip = tip or founded(run, store)
    peer = Peer(run, folder, tip, store)
    clock = SimpleNamespace(monotonic=lambda: peer.now_s)
    monkeypatch.setattr(trainer, "time", clock)
    monkeypatch.setattr(local_steps, "time", clock)
    peer.resume()
    return peer


def test_in_the_exact_mode_all_steps_are_taken_and_the_end_is_told_from_the_pace(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = start(EXACT, store, tmp_path, monkeypatch)
    peer.now_s += 1000.0
    offer = peer.round()
    assert (offer.steps, offer.tokens, offer.seconds) == (3, 3 * ROWS * LENGTH, 6.0)
    assert peer.expected == [4.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("late_s", "step_s", "steps", "expected"),
    [
        pytest.param(0.0, 2.0, 5, [10.0, 8.0, 6.0, 4.0, 2.0, 0.0], id="five fit"),
        pytest.param(1.0, 2.0, 4, [9.0, 7.0, 5.0, 3.0, 0.0], id="one is lost to a late start"),
        pytest.param(0.0, 99.0, 1, [10.0, 0.0], id="one does not fit and is taken"),
        pytest.param(50.0, 2.0, 1, [0.0, 0.0], id="too late"),
        pytest.param(
            0.0, 0.5, 10, [10.0, 4.5, 4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5, 0.0], id="all dealt"
        ),
    ],
)
def test_with_an_agreed_time_as_many_steps_are_taken_as_fit(
    store: BlobStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    late_s: float,
    step_s: float,
    steps: int,
    expected: list[float],
) -> None:
    peer = start(TIMED, store, tmp_path, monkeypatch)
    peer.now_s, peer.step_s = peer.now_s + late_s, step_s
    offer = peer.round()
    assert (offer.steps, offer.tokens) == (steps, steps * ROWS * LENGTH)
    assert offer.seconds == steps * step_s
    assert peer.expected == expected


def test_after_a_crash_a_peer_offers_what_it_has_really_done(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five steps fitted the time. `local_steps` is three."""
    peer = start(TIMED, store, tmp_path, monkeypatch)
    offer = peer.round()
    again = start(TIMED, store, tmp_path, monkeypatch, peer.training.tip).offer_again()
    assert again == offer
    assert (offer.steps, offer.tokens, offer.seconds) == (5, 5 * ROWS * LENGTH, 10.0)


def test_a_text_of_ones_own_is_read_on_from_where_it_was_left(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = start(OWN, store, tmp_path, monkeypatch)
    tip = peer.training.tip
    assert not tip.dealt
    first = peer.first_sample()
    offer = peer.round()
    restarted = start(OWN, store, tmp_path, monkeypatch, tip)
    assert first == restarted.first_sample() == 0
    assert restarted.offer_again() == offer
    follower = replace(tip, height=1, round=1, kind=Kind.QUORUM, parent=tip.digest)
    later = start(OWN, store, tmp_path, monkeypatch, follower)
    assert later.training.work is None
    assert later.first_sample() == offer.steps * ROWS == 12


def reading_of(run: RunConfig) -> Reading:
    return Reading(Rules.of("run", run, layout_of(run)), "me")


def test_the_place_in_ones_own_text_moves_on_with_each_offer() -> None:
    own = reading_of(OWN)
    own.next_round(5.0, 0)
    assert own.position == 0
    own.next_round(9.0, 3 * ROWS * LENGTH)
    own.next_round(12.0, 3 * ROWS * LENGTH)
    assert (own.position, own.began_s) == (24, 12.0)


def test_a_common_text_is_read_as_dealt_wherever_the_peer_was_before(store: BlobStore) -> None:
    tip, read = founded(EXACT, store), reading_of(EXACT)
    read.position = 77
    assert read.dealt(tip, 0) == DEALT
