"""A peer that is asked to leave in the middle of its local steps."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.data.loader import Loader
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.node.node import Node
from swarm.network.wire.traffic import Traffic
from swarm.peer.status.status import PeerStatus
from swarm.peer.training import leaving
from swarm.peer.training.expert_moments import ExpertMoments
from swarm.peer.training.leaving import Stop, StopAsked
from swarm.peer.training.offering import Rounds
from swarm.protocol.messages.messages import Offer
from swarm.protocol.training import Applied
from swarm.train.engine import local_steps
from swarm.train.engine.resident import ResidentEngine
from tests.peer.training.test_resuming import ME, Life, founded_by
from tests.train.runs import batch, tiny_run

LEAVE_TIMEOUT_S = 120.0
ROUND = tiny_run(round={"local_steps": 4})
OVERLAPPED = tiny_run(
    round={"local_steps": 4, "overlap": "round"},
    wire={"shared_coding": "b2", "experts_coding": "b2"},
)


@pytest.fixture
def store() -> BlobStore:
    return BlobStore(None)


class Leaver(Life):
    """One of two members, asked to leave during a step, the second one by default."""

    def __init__(
        self,
        store: BlobStore,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        run: Any = ROUND,
        step_s: float,
        asked_in: int = 2,
    ) -> None:
        tip = founded_by(store, run)
        super().__init__(store, folder, tip, config=run)
        self.now_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now_s)
        monkeypatch.setattr(local_steps, "time", clock)
        monkeypatch.setattr(leaving, "time", clock)
        self.stop = Stop(LEAVE_TIMEOUT_S)
        self.offers: list[Offer] = []
        self.asked_to_leave = 0
        self.steps = 0
        do_step = ResidentEngine.step

        def step(*arguments: Any, **more: Any) -> Any:
            self.steps += 1
            if self.steps == asked_in:
                self.stop.ask()
            self.now_s += step_s
            return do_step(*arguments, **more)

        monkeypatch.setattr(ResidentEngine, "step", step)
        here = self.trainer
        here.stop, here.rounds = self.stop, cast(Rounds, self._rounds(tip))
        here.loader = cast(Loader, SimpleNamespace(batch=lambda *_: batch(run, 0), end_of_text=0))
        here.moments = cast(ExpertMoments, _no_moments())
        here.status = PeerStatus(_node(), run, name="me", capacity=1.0)
        here.offering.status = here.status

    def _rounds(self, tip: Any) -> SimpleNamespace:
        mine = self.trainer.rounds

        def wait_for_tip(*_: object) -> list[Applied]:
            self.now_s += 1.0 if self.stop() else 0.0
            return []

        def leave() -> None:
            self.asked_to_leave += 1

        return SimpleNamespace(
            **vars(mine), offer=self.offers.append, expect=lambda *_: None,
            wait_for_tip=wait_for_tip, leave=leave, left=None, last_reason="",
        )  # fmt: skip


def _no_moments() -> SimpleNamespace:
    def nothing(*_: object, **__: object) -> None: ...

    return SimpleNamespace(install=nothing, on_step=nothing, adopted=nothing, before_adopt=nothing)


def _node() -> Node:
    lines = SimpleNamespace(when_cut=None)
    return cast(Node, SimpleNamespace(peer_id=ME, addresses=(), traffic=Traffic(), lines=lines))


@pytest.mark.parametrize("run", [ROUND, OVERLAPPED], ids=["in turn", "overlapping"])
def test_steps_that_a_leaver_has_no_time_to_offer_are_counted_as_lost(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    """Two of four steps are left, and need 72 s. Half of the time-out less one step is 42 s."""
    leaver = Leaver(store, tmp_path, monkeypatch, run=run, step_s=36.0)
    with pytest.raises(StopAsked):
        leaver.trainer.main_loop()
    assert (leaver.steps, leaver.offers) == (2, [])
    assert leaver.trainer.status.tokens_lost == 2 * run.train.batch_tokens
    assert leaver.trainer.status.tokens == 2 * run.train.batch_tokens


def test_a_leaver_with_time_for_its_steps_offers_them_and_loses_nothing(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaver = Leaver(store, tmp_path, monkeypatch, step_s=10.0)
    with pytest.raises(StopAsked):
        leaver.trainer.main_loop()
    assert leaver.steps == 4 and leaver.asked_to_leave
    assert [offer.steps for offer in leaver.offers] == [4]
    assert leaver.trainer.status.tokens_lost == 0


def test_steps_beyond_an_offer_that_is_not_decided_in_time_are_lost_alone(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlapping rounds the offer is on disk, and is repeated. Later steps are lost."""
    leaver = Leaver(store, tmp_path, monkeypatch, run=OVERLAPPED, step_s=1.0, asked_in=6)
    with pytest.raises(StopAsked):
        leaver.trainer.main_loop()
    assert (leaver.steps, [offer.steps for offer in leaver.offers]) == (6, [4])
    assert leaver.trainer.status.tokens_lost == 2 * OVERLAPPED.train.batch_tokens
