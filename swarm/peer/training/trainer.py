"""The shell of a peer's main loop: carries out its decisions with engine, disk and rounds.

The loop itself is `swarm/protocol/training/loop.py`.
"""

# `TrainingShell` documents the methods of a shell.
# ruff: noqa: D102

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.data.held_out import HeldOut
from swarm.data.loader import Loader
from swarm.errors import CorruptState, StateError
from swarm.network.blobs.blob_store import BlobGone
from swarm.network.blobs.disk_retry import patiently
from swarm.peer.machine.state_directory import RunDirectory
from swarm.peer.status.observing import RoundReport
from swarm.peer.status.status import PeerStatus
from swarm.peer.training.expert_moments import ExpertMoments
from swarm.peer.training.leaving import Stop, StopAsked
from swarm.peer.training.live_model import LiveModel
from swarm.peer.training.offering import BackgroundWork, Offering, Rounds
from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.records.records import PeerState
from swarm.protocol.timing.deadlines import LocalWork
from swarm.protocol.training import (
    Applied,
    Assignment,
    SavedWork,
    Training,
    TrainingShell,
    WhyPaused,
    Work,
    at_once,
)
from swarm.protocol.training.adoption import Adoption
from swarm.protocol.values.manifest import Digest, Manifest, PeerId, Unit
from swarm.train.engine.engine import EngineState, StepStats
from swarm.train.engine.local_steps import LocalStats, Task, train_local_steps
from swarm.train.saving import checkpoint

logger = logging.getLogger(__name__)

WAIT_SLICE_S = 0.5
"""How soon a waiting trainer notices that it was asked to stop."""
SAY_WHY_EVERY_S = 15.0
"""How often a waiting peer logs the reason."""


class Trainer(TrainingShell):
    """Trains one peer in one run until the run is finished or a person stops the peer."""

    def __init__(
        self,
        model: LiveModel,
        loader: Loader,
        rounds: Rounds,
        directory: RunDirectory,
        *,
        held_out: HeldOut,
        status: PeerStatus,
        moments: ExpertMoments,
        stop: Stop,
        rooms: Callable[[], Mapping[PeerId, int]] = dict,
    ) -> None:
        self.model, self.loader, self.rounds, self.directory = model, loader, rounds, directory
        self.run: RunConfig = model.run
        self.held_out = held_out
        self.status, self.moments, self.stop = status, moments, stop
        self._rooms_there = rooms
        self.training = Training(self, model.me, rounds.rules, self.run.run.rounds)
        self.making: BackgroundWork[Offer] = BackgroundWork()
        self.offering = Offering(model, rounds, status, self.making.in_turn)
        self.moments.before_change = self._finish_making
        self._begun: tuple[EngineState, dict[str, Tensor]] | None = None
        """The private state that is being written while steps continue."""
        self._waited_s = 0.0

    def main_loop(self) -> Manifest:
        """Runs the local steps and rounds; returns the last manifest.

        Raises:
            StopAsked: a person stopped the peer.
            TrainingDiverged, SwarmError: this peer cannot continue; its state directory is intact.
        """
        try:
            return at_once(self.training.run())
        except StopAsked as asked:
            self._lose_unoffered(asked)
            raise
        finally:
            self.making.wait()

    # ------------------------------------------------ the start

    def newest(self) -> Applied:
        # A restarted peer ends its steps with the others.
        return replace(self.rounds.newest, at_s=time.monotonic() - self.directory.record_age_s())

    def load(self, tip: Manifest, problem: Callable[[SavedWork], str | None]) -> SavedWork | None:
        """The agreed blobs have the weights, so a lost private state only loses moments."""
        engine = self.model.engine
        engine.count_from(tip.step)
        try:
            loaded = checkpoint.resume_newest(self.directory.private_path)
            if loaded is None:
                return None
            work = SavedWork(**{f.name: getattr(loaded.state, f.name) for f in fields(SavedWork)})
            if why := problem(work):
                raise CorruptState(why)
            engine.load_state_dict(loaded.state.engine)
        except CorruptState as error:
            logger.error("%s; continues from the manifest, with moments of zero", error)
            return None
        logger.info("resume %s", loaded.reason)
        self.model.bases = dict(work.expert_bases)
        self.offering.resume(tip, work)
        self.model.local_parts = frozenset(work.part_bases)
        checkpoint.restore_rng(loaded.state.rng, torch.device("cpu"))
        return work

    def adopt_frozen(self, tip: Manifest) -> bool:
        return self._is_reached(tip, partial(self.model.adopt_frozen, tip))

    def resumed(self, tip: Manifest, *, has_work: bool) -> None:
        self.status.manifest = tip
        if has_work:
            logger.info("round=%d: the saved local steps are offered again", tip.round + 1)

    # ------------------------------------------------ local steps

    async def train(
        self,
        tip: Manifest,
        task: Assignment,
        before: Work | None,
        left: Callable[[int, float, float], LocalWork],
    ) -> LocalStats:
        assert before is None or isinstance(before, LocalStats)
        done, done_s = (before.steps, before.seconds) if before else (0, 0.0)
        self.status.begin(PeerState.TRAINING)
        self.status.progress.begin(tip.round + 1 + task.is_offered, self.run.run.rounds)
        self.moments.install()

        def on_step(step: int, stats: StepStats) -> None:
            self.status.on_step(step, stats)
            self.moments.on_step(skipped=stats.skipped)

        lacks_time = False

        def steps_left(steps: int, seconds: float) -> int:
            nonlocal lacks_time
            step_s = (done_s + seconds) / (done + steps) if done + steps else 0.0
            work = left(done + steps, step_s, time.monotonic() - task.began_s)
            lacks_time = not task.is_offered and self.stop.lacks_time(work.steps, step_s)
            self.status.progress.planned(done + steps, work.steps)
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
            Task(self.model.me, tip.step, task.dealt, batch_tokens, task.step),
            left=steps_left,
            stop=lambda: (
                self.rounds.newest.manifest.digest != tip.digest
                or lacks_time
                or (task.is_offered and self.stop())
            ),
            on_step=on_step,
        )
        self.status.end_steps(stats)
        self.offering.changed()
        return stats.after(before)

    # ------------------------------------------------ offers

    def store(
        self, tip: Manifest, bases: Mapping[Unit, Digest], tokens: int
    ) -> dict[Unit, OfferedUnit]:
        units = self.offering.offered_all(
            tip, bases, tokens, lambda work: patiently(work, "offered value", self._pause)
        )
        patiently(partial(self.offering.sync, units), "offered deltas", self._pause)
        return units

    async def save(
        self, tip: Manifest, bases: Mapping[Unit, Digest], work: SavedWork
    ) -> dict[Unit, OfferedUnit]:
        """Saves values and state in parallel, since only the end of the state file names values."""
        engine, rng = self._begun or self._state()
        self._begun = None  # the next offer reads the state again
        path = self.directory.private_path
        with self._offering(), checkpoint.Saving(path, engine, rng) as begun:
            with self.offering.refusing_after(begun.give_up):
                units = self.store(tip, bases, work.tokens)
            private = checkpoint.PrivateState(
                engine=engine, rng=rng, **asdict(work.with_values(units))
            )
            self.status.observer.on_saving()
            patiently(
                partial(checkpoint.save_private, path, private, begun), "private state", self._pause
            )
        return units

    def _save_at_rest(self, work: SavedWork) -> bool:
        engine, rng = self._state()
        private = checkpoint.PrivateState(engine=engine, rng=rng, **asdict(work))
        try:
            checkpoint.save_private(self.directory.private_path, private)
        except StateError as error:
            logger.error("training since the last private state is lost: %s", error)
            return False
        return True

    async def save_offer(
        self, tip: Manifest, bases: Mapping[Unit, Digest], work: SavedWork
    ) -> dict[Unit, OfferedUnit]:
        with self._offering():
            units = self.store(tip, bases, work.tokens)
            stored = work.with_values(units)
            self.status.observer.on_saving()
            sync = partial(self.model.agreed.store.sync, stored.blobs)
            patiently(sync, "offered values", self._pause)
            write = partial(self.directory.write_offer, stored)
            patiently(write, "offer", self._pause)
        return units

    async def beside(
        self, offered: Coroutine[Any, Any, Offer], *, saves_state: bool
    ) -> Callable[[], Awaitable[Offer]]:
        """Makes the offer while the next step computes gradients; the update waits for this."""
        engine, overlaps = self.model.engine, self.rounds.rules.overlaps
        if not (overlaps and engine.before_update(self._finish_making)):
            return await super().beside(offered, saves_state=saves_state)
        self._begun = self._state() if saves_state else None
        self.making.begin(partial(at_once, offered))

        async def made() -> Offer:
            self._finish_making()
            return self.making.result()

        return made

    def _state(self) -> tuple[EngineState, dict[str, Tensor]]:
        return self.model.engine.state_dict(), checkpoint.read_rng(torch.device("cpu"))

    def _offering(self) -> AbstractContextManager[None]:
        """The phase "offering" of the trainer's thread, unless that thread trains."""
        return nullcontext() if self.making.is_running else self.status.phases.within("offering")

    def _finish_making(self) -> None:
        if self.making.is_running:
            self.making.require_waiter()  # phases belong to the training thread
            with self.status.phases.within("offering"):
                self.making.wait()

    def load_offer(self) -> SavedWork | None:
        try:
            work = self.directory.read_offer()
        except CorruptState as error:
            logger.error("%s; the last offer is not repeated", error)
            return None
        if work is None:
            return None
        self.model.keep_offered(work.blobs)  # so no blob that `has` finds is deleted
        return work if all(map(self.model.agreed.store.has, work.blobs)) else None

    def submit(self, tip: Manifest, offer: Offer) -> None:
        if offer.is_late:
            logger.info("round=%d offered late: %s", tip.round + 1, ", ".join(offer.units))
        self.rounds.offer(offer)

    # ------------------------------------------------ waiting and leaving

    async def wait(self, tip: Manifest, state: PeerState) -> list[Applied]:
        """Waits for a newer tip, and logs the reason at intervals."""
        if self.training.made is not None:
            await self.training.made()
        self.status.begin(state)
        said_s = time.monotonic()
        while not (newer := self.rounds.wait_for_tip(tip.digest, WAIT_SLICE_S)):
            if self.stop():
                self._wait_to_leave(state)
            if time.monotonic() - said_s > SAY_WHY_EVERY_S:
                said_s = time.monotonic()
                self.status.waits(self.rounds.last_reason)
        self._waited_s = self.status.since_begin_s()
        return newer

    async def pause(self, tip: Manifest, why: WhyPaused) -> list[Applied]:
        if self.training.made is not None:
            await self.training.made()
        self.status.begin(PeerState.PAUSED)
        said_s = -inf
        while reason := why(self._rooms_there()):
            if newer := self.rounds.wait_for_tip(tip.digest, WAIT_SLICE_S):
                return newer
            if self.stop():
                self._wait_to_leave(PeerState.PAUSED)
            if time.monotonic() - said_s > SAY_WHY_EVERY_S:
                said_s = time.monotonic()
                self.status.waits(reason)
        return []

    def _wait_to_leave(self, state: PeerState) -> None:
        """Asks to leave with the round that counts a submitted offer."""
        can_wait = state is PeerState.AVERAGING and self.rounds.left is None
        if not can_wait or self.stop.remaining_s < self.stop.leave_timeout_s / 4:
            raise StopAsked
        if len(self.rounds.newest.manifest.members) > 1:  # a lone peer would skip its round
            self.rounds.leave()

    def may_stop(self) -> None:
        if self.stop():
            asked, work = StopAsked(), self.training.unsaved()
            asked.has_saved = work is not None and self._save_at_rest(work)
            raise asked

    def _lose_unoffered(self, asked: StopAsked) -> None:
        """Counts steps as lost that this process neither offered nor saved before its end."""
        training, work = self.training, self.training.work
        is_out = training.made is not None and not training.rules.overlaps
        if isinstance(work, LocalStats) and work.tokens and not (is_out or asked.has_saved):
            self.lose(work.tokens, "the peer was asked to leave before it could offer them")

    def _pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if self.stop():
                raise StopAsked
            time.sleep(min(left_s, WAIT_SLICE_S))

    # ------------------------------------------------ a newer tip

    def adopt(
        self, manifest: Manifest, decision: Adoption, before: Manifest, *, at_start: bool = False
    ) -> bool:
        def adopt() -> None:
            if not at_start:
                self.moments.before_adopt(before, manifest)
            with self.status.phases.within("adopting"):
                self.model.adopt(manifest, decision, before)
            if not decision.keeps_all:
                self.offering.changed()

        if not self._is_reached(manifest, adopt):
            return False
        self.moments.adopted(decision, before, manifest)
        return True

    def _is_reached(self, manifest: Manifest, adopt: Callable[[], None]) -> bool:
        try:
            adopt()
        except BlobGone as error:
            # Blobs of the newest tip are never deleted.
            if not self.rounds.wait_for_tip(manifest.digest, WAIT_SLICE_S):
                raise StateError("the newest manifest's blobs are not all here") from error
            logger.info("height=%d skipped: %s", manifest.height, error)
            return False
        return True

    def lose(self, tokens: int, reason: str) -> None:
        self.status.lose_tokens(tokens, reason)

    def report(self, applied: Applied, work: Work | None, *, counted: bool) -> None:
        stats = work if isinstance(work, LocalStats) else None
        manifest, wait_s = applied.manifest, self._waited_s
        self.status.applied(RoundReport(manifest, stats, counted, wait_s, applied.reason))

    def release(self) -> None:
        self.model.drop_offered()

    def validate(self, manifest: Manifest) -> None:
        try:
            with self.status.phases.within("validating"):
                val_loss = self.model.evaluate(
                    manifest,
                    self.held_out,
                    lambda work: patiently(work, "progress put aside", self._pause),
                )
        except BlobGone as error:
            logger.info("round=%d was not validated: %s", manifest.round, error)
            return
        self.status.validated(manifest, val_loss, self.held_out)
