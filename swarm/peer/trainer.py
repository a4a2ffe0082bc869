"""Carries out what the main loop asks for, with engine, disk and rounds.

The loop itself, and each decision about local work, is `swarm.protocol.training.loop`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.data.loader import Loader
from swarm.errors import CorruptState, StateError
from swarm.experts import expert_of_unit
from swarm.network.patience import patiently
from swarm.peer.leaving import Stop
from swarm.peer.live_model import BlobGone, LiveModel
from swarm.peer.moments import MomentsKeeper
from swarm.peer.offering import Offering
from swarm.peer.rounds import Rounds
from swarm.peer.state_directory import RunDirectory
from swarm.peer.status import PeerStatus, RoundReport
from swarm.protocol.deadlines import finishes_in_time
from swarm.protocol.manifest import Digest, Manifest, Unit
from swarm.protocol.messages import OfferedUnit
from swarm.protocol.records import PeerState
from swarm.protocol.training import Applied, Training
from swarm.protocol.training.effects import (
    Adopt,
    AdoptFrozen,
    Effect,
    Load,
    Lose,
    MayStop,
    Newest,
    Release,
    Report,
    Resumed,
    Save,
    SavedWork,
    Store,
    Submit,
    Train,
    Validate,
    Wait,
)
from swarm.train.checkpoint import (
    PrivateState,
    Saving,
    load_newest,
    read_rng,
    restore_rng,
    save_private,
)
from swarm.train.engine import StepStats
from swarm.train.local_steps import LocalStats, Task, train_local_steps

logger = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_SLICE_S = 0.5
"""How soon a waiting trainer notices that it was asked to stop."""
SAY_WHY_EVERY_S = 15.0
"""A peer that waits says what for, so often."""


class StopAsked(Exception):
    """The person asked this peer to stop, and its round is over or cannot be finished."""


class Trainer:
    """Trains one peer in one run until the run is finished or a person stops it."""

    def __init__(
        self,
        model: LiveModel,
        loader: Loader,
        rounds: Rounds,
        directory: RunDirectory,
        *,
        validation_BT1: Tensor,
        status: PeerStatus,
        moments: MomentsKeeper,
        stop: Stop,
    ) -> None:
        self.model, self.loader, self.rounds, self.directory = model, loader, rounds, directory
        self.run: RunConfig = model.run
        self.validation_BT1 = validation_BT1
        self.status, self.moments, self.stop = status, moments, stop
        self.training = Training(model.me, rounds.rules, self.run.run.rounds)
        self.offering = Offering(model, rounds, status)
        self._waited_s = 0.0

    def train(self) -> Manifest:
        """Runs the local steps and rounds; returns the last manifest.

        Raises:
            StopAsked: a person stopped it.
            TrainingDiverged, SwarmError: this peer cannot go on; its state directory is good.
        """
        return self.carry_out(self.training.run())

    def carry_out(self, routine: Coroutine[Effect[Any], Any, T]) -> T:
        """Does what a routine of the main loop asks for, one effect after the other.

        Raises:
            StopAsked, SwarmError: as `train`; the routine is over.
        """
        result: Any = None
        while True:
            try:
                effect = routine.send(result)
            except StopIteration as end:
                value: T = end.value
                return value
            result = self._actions[type(effect)](self, effect)

    # ------------------------------------------------ the start

    def _newest(self, _: Newest) -> Applied:
        # A peer that starts again in the middle of a round is done when the others are.
        return replace(self.rounds.newest, at_s=time.monotonic() - self.directory.record_age_s())

    def _load(self, effect: Load) -> SavedWork | None:
        """Masters are in the swarm: a peer without its state would lose no more than moments."""
        engine = self.model.engine
        engine.count_from(effect.tip.step)
        try:
            loaded = load_newest(self.directory.private_path)
            if loaded is None:
                return None
            work = _work_in(loaded.state)
            if problem := effect.problem(work):
                raise CorruptState(problem)
            engine.load_state_dict(loaded.state.engine)
        except CorruptState as error:
            logger.error("%s; goes on from the manifest, with moments of zero", error)
            return None
        logger.info("resume %s", loaded.reason)
        self.model.bases = dict(work.bases)
        restore_rng(loaded.state.rng, torch.device("cpu"))
        self.moments.resume(loaded.state.searches, effect.tip)
        return work

    def _adopt_frozen(self, effect: AdoptFrozen) -> bool:
        return self._is_reached(effect.tip, partial(self.model.adopt_frozen, effect.tip))

    def _resumed(self, effect: Resumed) -> None:
        self.status.manifest = effect.tip
        if effect.has_work:
            logger.info("round=%d: the saved local steps are offered again", effect.tip.round + 1)

    # ------------------------------------------------ local steps

    def _train(self, effect: Train) -> LocalStats:
        tip, before = effect.tip, effect.before
        assert before is None or isinstance(before, LocalStats)
        done, done_s = (before.steps, before.seconds) if before else (0, 0.0)
        self.status.begin(PeerState.TRAINING)
        self.moments.install()

        def on_step(step: int, stats: StepStats) -> None:
            self.status.on_step(step, stats)
            self.moments.on_step(skipped=stats.skipped)

        def left(steps: int, seconds: float) -> int:
            step_s = (done_s + seconds) / (done + steps) if done + steps else 0.0
            work = effect.left(done + steps, step_s, time.monotonic() - effect.began_s)
            self._check_time_left(work.steps, step_s)
            if work.seconds is not None:
                self.rounds.expect(tip.digest, work.seconds)
            if not work.steps:
                logger.debug("round=%d offers: %s", tip.round + 1, work.reason)
            return work.steps

        batch_tokens = self.rounds.rules.batch_tokens_at(tip.tokens)
        stats = train_local_steps(
            self.model.engine,
            self.loader,
            self.run,
            Task(self.model.me, tip.step, effect.dealt, batch_tokens, done),
            left=left,
            stop=lambda: self.rounds.newest.manifest.digest != tip.digest,
            on_step=on_step,
        )
        self.status.end_steps(stats)
        if before is None:
            return stats
        return replace(
            stats,
            steps=before.steps + stats.steps,
            tokens=before.tokens + stats.tokens,
            seconds=before.seconds + stats.seconds,
            skipped=before.skipped + stats.skipped,
        )

    def _check_time_left(self, steps_left: int, step_s: float) -> None:
        """A peer that was asked to leave drops local steps that it cannot finish in time."""
        if not self.stop():
            return
        finishes, reason = finishes_in_time(steps_left, step_s, self.stop.remaining_s)
        if not finishes:
            logger.info("%s", reason)
            raise StopAsked

    # ------------------------------------------------ offers

    def _store(self, effect: Store) -> dict[Unit, OfferedUnit]:
        return self._store_values(effect.tip, effect.bases, effect.tokens)

    def _store_values(
        self, tip: Manifest, bases: Mapping[Unit, Digest], tokens: int
    ) -> dict[Unit, OfferedUnit]:
        units = {}
        for unit, base in bases.items():
            store = partial(self.offering.store, tip, unit, self.model.value_of(unit), tokens)
            digest, num_bytes = patiently(store, "offered value", self._pause)
            units[unit] = OfferedUnit(digest, num_bytes, base)
        self.model.keep_offered(v.digest for u, v in units.items() if expert_of_unit(u) is not None)
        return units

    def _save(self, effect: Save) -> dict[Unit, OfferedUnit]:
        """Values and state at once, as the state names what was offered only at its end."""
        engine, rng = self.model.engine.state_dict(), read_rng(torch.device("cpu"))
        path, work = self.directory.private_path, effect.work
        with self.status.phases.within("offering"), Saving(path, engine, rng) as begun:
            units = self._store_values(effect.tip, effect.bases, work.tokens)
            private = PrivateState(
                engine=engine,
                run_id=work.run,
                base_tip=work.base_tip,
                round=work.round,
                steps=work.steps,
                tokens=work.tokens,
                seconds=work.seconds,
                data_position=work.position,
                offered={unit: offered.digest for unit, offered in units.items()},
                expert_bases=work.bases,
                rng=rng,
                searches=self.moments.searches,
            )
            save = partial(save_private, path, private, begun)
            patiently(save, "private state", self._pause)
        return units

    def _submit(self, effect: Submit) -> None:
        offer, tip = effect.offer, effect.tip
        if offer.is_late:
            logger.info("round=%d offered late: %s", tip.round + 1, ", ".join(offer.units))
        self.rounds.offer(offer)
        if not offer.is_late:
            self.moments.offered(tip)

    # ------------------------------------------------ waiting and leaving

    def _wait(self, effect: Wait) -> list[Applied]:
        """Waits, and says what for."""
        self.status.begin(effect.state)
        said_s = time.monotonic()
        while not (newer := self.rounds.wait_for_tip(effect.tip.digest, WAIT_SLICE_S)):
            if self.stop():
                self._wait_to_leave(effect.state)
            if time.monotonic() - said_s > SAY_WHY_EVERY_S:
                said_s, why = time.monotonic(), self.rounds.last_reason
                logger.info("waiting state=%s reason=%r", effect.state.value, why)
        self._waited_s = self.status.since_begin_s()
        return newer

    def _wait_to_leave(self, state: PeerState) -> None:
        """With an offer out, the round that counts it is also the one that lets this peer go."""
        can_wait = state is PeerState.AVERAGING and self.rounds.left is None
        if not can_wait or self.stop.remaining_s < self.stop.leave_timeout_s / 4:
            raise StopAsked
        if len(self.rounds.newest.manifest.members) > 1:  # one alone would go without its round
            self.rounds.leave()

    def _may_stop(self, _: MayStop) -> None:
        if self.stop():
            raise StopAsked

    def _pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if self.stop():
                raise StopAsked
            time.sleep(min(left_s, WAIT_SLICE_S))

    # ------------------------------------------------ a newer tip

    def _adopt(self, effect: Adopt) -> bool:
        manifest, before = effect.manifest, effect.before

        def adopt() -> None:
            if not effect.at_start:
                self.moments.before_adopt(before, manifest)
            with self.status.phases.within("adopting"):
                self.model.adopt(manifest, effect.decision)

        if not self._is_reached(manifest, adopt):
            return False
        self.moments.adopted(effect.decision, before, manifest)
        return True

    def _is_reached(self, manifest: Manifest, adopt: Callable[[], None]) -> bool:
        try:
            adopt()
        except BlobGone as error:
            # The newest tip's own blobs are never collected.
            if not self.rounds.wait_for_tip(manifest.digest, WAIT_SLICE_S):
                raise StateError("the newest manifest's blobs are not all here") from error
            logger.info("height=%d skipped: %s", manifest.height, error)
            return False
        return True

    def _lose(self, effect: Lose) -> None:
        self.status.lose_tokens(effect.tokens, effect.reason)

    def _report(self, effect: Report) -> None:
        stats = effect.work if isinstance(effect.work, LocalStats) else None
        applied = effect.applied
        report = RoundReport(
            applied.manifest, stats, effect.counted, self._waited_s, applied.reason
        )
        self.status.applied(report)

    def _release(self, _: Release) -> None:
        self.model.drop_offered()

    def _validate(self, effect: Validate) -> None:
        manifest = effect.manifest
        try:
            with self.status.phases.within("validating"):
                val_loss = self.model.evaluate(manifest, self.validation_BT1)
        except BlobGone as error:
            logger.info("round=%d was not validated: %s", manifest.round, error)
            return
        self.status.validated(manifest, val_loss, self.validation_BT1[:, 1:].numel())

    _actions: Mapping[type[Any], Callable[[Trainer, Any], Any]] = {
        Newest: _newest,
        Load: _load,
        AdoptFrozen: _adopt_frozen,
        Resumed: _resumed,
        MayStop: _may_stop,
        Train: _train,
        Store: _store,
        Save: _save,
        Submit: _submit,
        Wait: _wait,
        Adopt: _adopt,
        Lose: _lose,
        Report: _report,
        Release: _release,
        Validate: _validate,
    }


def _work_in(state: PrivateState) -> SavedWork:
    return SavedWork(
        run=state.run_id,
        base_tip=state.base_tip,
        round=state.round,
        steps=state.steps,
        tokens=state.tokens,
        seconds=state.seconds,
        position=state.data_position,
        bases=state.expert_bases,
        offered=state.offered,
    )
