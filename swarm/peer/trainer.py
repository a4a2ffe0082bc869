"""The main loop of a peer, visible on one screen: train, offer, agree, adopt, report."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial

import torch

from swarm.config import RunConfig
from swarm.data.held_out import HeldOut
from swarm.data.loader import Loader
from swarm.errors import StateError
from swarm.experts import expert_of_unit
from swarm.network.patience import patiently
from swarm.network.round_driver import Applied, RoundDriver
from swarm.peer.expert_moments import ExpertMoments
from swarm.peer.leaving import Stop
from swarm.peer.live_model import BlobGone, LiveModel
from swarm.peer.observing import RoundReport
from swarm.peer.offering import Offering
from swarm.peer.reading import Reading
from swarm.peer.resuming import load_into, offer_of
from swarm.peer.state_directory import RunDirectory
from swarm.peer.status import PeerStatus
from swarm.protocol.adoption import Action, experts_due, still_late
from swarm.protocol.deadlines import finishes_in_time
from swarm.protocol.manifest import Digest, Manifest, Unit
from swarm.protocol.merging import merge_due
from swarm.protocol.messages import Offer, OfferedUnit
from swarm.protocol.records import PeerState
from swarm.train.checkpoint import (
    PrivateState,
    Saving,
    read_rng,
    restore_rng,
    save_private,
)
from swarm.train.engine import StepStats
from swarm.train.local_steps import LocalStats, train_local_steps

logger = logging.getLogger(__name__)

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
        rounds: RoundDriver,
        directory: RunDirectory,
        *,
        held_out: HeldOut,
        status: PeerStatus,
        moments: ExpertMoments,
        stop: Stop,
    ) -> None:
        self.model, self.loader, self.rounds, self.directory = model, loader, rounds, directory
        self.run: RunConfig = model.run
        self.held_out = held_out
        self.status, self.moments, self.stop = status, moments, stop
        self.reading = Reading(self.run, model.me)
        self.offering = Offering(model, rounds, status)
        self.late: frozenset[int] = frozenset()
        """Own experts with progress that the rounds so far have left out."""
        self._late_offer: Offer | None = None

    def train(self) -> Manifest:
        """Runs the local steps and rounds; returns the last manifest.

        Raises:
            StopAsked: a person stopped it.
            TrainingDiverged, SwarmError: this peer cannot go on; its state directory is good.
        """
        tip, offer = self._resume()
        # A peer that starts again in the middle of a round is done when the others are.
        self.reading.began_s = time.monotonic() - self.directory.record_age_s()
        stats = None  # of local steps on the tip that are not offered yet
        while tip.round < self.run.run.rounds:
            if self.stop() and offer is None and stats is None:
                raise StopAsked
            if self.model.me not in tip.members:
                tip, _ = self._adopt(self._wait(tip, PeerState.JOINING), tip, None, None)
                continue
            if offer is None:
                self._offer_late(tip)
                stats = self._local_steps(tip, stats)
                if not stats.completed:
                    path = self._wait(tip, PeerState.CATCHING_UP)
                    tip, kept = self._adopt(path, tip, None, stats)
                    stats = stats if kept else None
                    continue
                offer = self._save_offer(tip, stats)
            self.rounds.offer(offer)
            path = self._wait(tip, PeerState.AVERAGING)
            tip, kept = self._adopt(path, tip, offer, stats)
            # A reform leaves everything where it was: the same work is offered to it.
            offer = self._save_offer(tip, offer) if kept else None
            stats = stats if kept else None
        return tip

    # ------------------------------------------------ the parts, in order

    def _local_steps(self, tip: Manifest, before: LocalStats | None) -> LocalStats:
        """The steps of a round, or those that `before` has left."""
        done, done_s = (before.steps, before.seconds) if before else (0, 0.0)
        self.status.begin(PeerState.TRAINING)
        self.moments.install()

        def on_step(step: int, stats: StepStats) -> None:
            self.status.on_step(step, stats)
            self.moments.on_step(skipped=stats.skipped)

        def left(steps: int, seconds: float) -> int:
            step_s = (done_s + seconds) / (done + steps) if done + steps else 0.0
            work = self.reading.work_left(tip, done + steps, step_s)
            self._check_time_left(work.steps, step_s)
            if work.seconds is not None:
                self.rounds.expect(tip.digest, work.seconds)
            if not work.steps:
                logger.debug("round=%d offers: %s", tip.round + 1, work.reason)
            return work.steps

        stats = train_local_steps(
            self.model.engine,
            self.loader,
            self.run,
            self.reading.task(tip, done),
            left=left,
            stop=lambda: self.rounds.tip.digest != tip.digest,
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

    def _offer_late(self, tip: Manifest) -> None:
        """What rounds have left out of this peer's experts goes in at once; it trains on [O2].

        Nothing else has to be durable: after a crash the experts start from what was agreed.
        """
        if not self.late or self._late_offer or not experts_due(tip, self.run.round.experts_every):
            return
        values = self._store_values(tip, 0, self.late)
        units = {unit: value for unit, value in values.items() if value.digest != value.base}
        if units:
            logger.info("round=%d offered late: %s", tip.round + 1, ", ".join(units))
            self._late_offer = Offer(tip.digest, 0, 0, units)
            self.rounds.offer(self._late_offer)

    def _store_values(
        self, tip: Manifest, tokens: int, late: Collection[int] | None = None
    ) -> dict[Unit, OfferedUnit]:
        units = {}
        for unit, value, base in self.model.offered_values(tip, late):
            store = partial(self.offering.store, tip, unit, value, tokens)
            digest, num_bytes = patiently(store, "offered value", self._pause)
            units[unit] = OfferedUnit(digest, num_bytes, base)
        self.model.keep_offered(v.digest for u, v in units.items() if expert_of_unit(u) is not None)
        return units

    def _save_offer(self, tip: Manifest, work: LocalStats | Offer | PrivateState) -> Offer:
        """Stores the offered values and makes the private state durable, then offers [P6].

        Both at once, as the state names what was offered only at its end.
        """
        engine, rng = self.model.engine.state_dict(), read_rng(torch.device("cpu"))
        path = self.directory.private_path
        with self.status.phases.within("offering"), Saving(path, engine, rng) as begun:
            units = self._store_values(tip, work.tokens)
            private = PrivateState(
                engine=engine,
                run_id=self.rounds.machine.rules.run,
                base_tip=tip.digest,
                round=tip.round + 1,
                steps=work.steps,
                tokens=work.tokens,
                seconds=work.seconds,
                data_position=self.reading.position_after(work.tokens),
                offered={unit: offered.digest for unit, offered in units.items()},
                expert_bases=dict(self.model.bases),
                rng=rng,
            )
            self.status.observer.on_saving()
            save = partial(save_private, path, private, begun)
            patiently(save, "private state", self._pause)
        return Offer(tip.digest, work.steps, work.tokens, units, work.seconds)

    def _wait(self, tip: Manifest, state: PeerState) -> list[Applied]:
        """Waits until the tip has moved to one that can be trained on, and says what for."""
        self.status.begin(state)
        said_s, is_merging = time.monotonic(), False
        while True:
            path = self.rounds.wait_for_tip(tip.digest, WAIT_SLICE_S)
            if path and not merge_due(path[-1].manifest, self.run.merging):
                return path
            if path and not is_merging:
                is_merging = True
                self.status.phases.begin(PeerState.MERGING.value)
            if self.stop():
                self._wait_to_leave(state)
            if time.monotonic() - said_s > SAY_WHY_EVERY_S:
                said_s = time.monotonic()
                logger.info("waiting state=%s reason=%r", state.value, self.rounds.last_reason)

    def _adopt(
        self, path: list[Applied], tip: Manifest, offer: Offer | None, stats: LocalStats | None
    ) -> tuple[Manifest, bool]:
        """Swaps in the agreed model, manifest by manifest, and reports each.

        Returns:
            The new tip, and whether all local work is still good on it.
        """
        wait_s = self.status.since_begin_s()
        previous, counted, kept = tip, False, True
        offers = [made for made in (self._late_offer, offer) if made]
        trained = self.model.bases if offer or (stats and stats.steps) else ()
        late = self.late.union(trained)
        while path:
            applied = path.pop(0)
            manifest = applied.manifest
            try:
                self.moments.before_adopt(previous, manifest)
                with self.status.phases.within("adopting"):
                    adoption = self.model.adopt(manifest, previous=previous.digest, offers=offers)
            except BlobGone as error:
                logger.info("height=%d skipped: %s", manifest.height, error)
                path = path or self._newer_than(manifest, error)
                continue
            self.moments.adopted(adoption, previous, manifest)
            kept &= adoption.shared is Action.KEEP
            follows = manifest.parent == tip.digest
            mine = follows and offer is not None and manifest.counts(self.model.me)
            late = still_late(late, adoption, is_counted=mine)
            counted |= mine
            if not path and not counted and not kept:
                self._count_lost(offer, stats, applied.reason)
            report = RoundReport(manifest, stats if follows else None, mine, wait_s, applied.reason)
            self.status.applied(report)
            previous = manifest
        self.late, self._late_offer = late, None
        if not kept:
            self.reading.next_round(applied.at_s, offer.tokens if offer else 0)
        self.model.drop_offered()
        self._validate(previous)
        return previous, kept

    def _newer_than(self, manifest: Manifest, error: BlobGone) -> list[Applied]:
        """What was applied since; the newest tip's own blobs are never collected."""
        newer = self.rounds.wait_for_tip(manifest.digest, WAIT_SLICE_S)
        if not newer:
            raise StateError("the newest manifest's blobs are not all here") from error
        return newer

    def _count_lost(self, offer: Offer | None, stats: LocalStats | None, why: str) -> None:
        tokens = stats.tokens if stats else offer.tokens if offer else 0
        if tokens:
            self.status.lose_tokens(tokens, why)

    def _validate(self, manifest: Manifest) -> None:
        """The round's rank 0 measures the agreed state for everybody."""
        if manifest.order[0] != self.model.me:
            return
        try:
            with self.status.phases.within("validating"):
                val_loss = self.model.evaluate(manifest, self.held_out)
        except BlobGone as error:
            logger.info("round=%d was not validated: %s", manifest.round, error)
            return
        self.status.validated(manifest, val_loss, self.held_out)

    def _pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if self.stop():
                raise StopAsked
            time.sleep(min(left_s, WAIT_SLICE_S))

    # ------------------------------------------------ leaving

    def _check_time_left(self, steps_left: int, step_s: float) -> None:
        """A peer that was asked to leave drops local steps that it cannot finish in time."""
        if not self.stop():
            return
        finishes, reason = finishes_in_time(steps_left, step_s, self.stop.remaining_s)
        if not finishes:
            logger.info("%s", reason)
            raise StopAsked

    def _wait_to_leave(self, state: PeerState) -> None:
        """With an offer out, the round that counts it is also the one that lets this peer go."""
        can_wait = state is PeerState.AVERAGING and self.rounds.left is None
        if not can_wait or self.stop.remaining_s < self.stop.leave_timeout_s / 4:
            raise StopAsked
        if len(self.rounds.tip.members) > 1:  # one alone would go without its round
            self.rounds.leave()

    # ------------------------------------------------ going on where we were

    def _resume(self) -> tuple[Manifest, Offer | None]:
        """Brings engine and tip together after a start; returns an offer that is still good.

        The rounds go on meanwhile, so the tip may move away: then the newer one is taken.
        """
        while True:
            tip = self.rounds.tip
            try:
                return self._resume_at(tip)
            except BlobGone as error:
                self._newer_than(tip, error)

    def _resume_at(self, tip: Manifest) -> tuple[Manifest, Offer | None]:
        self.model.engine.count_from(tip.step)
        private = self._load_private(tip)
        if private is None:
            return self._adopt_start([tip], "", None)[0], None
        if private.base_tip == tip.digest:
            self.model.adopt_frozen(tip)
            self.status.manifest = tip
            return tip, self._offer_again(tip, private)
        parent = self.rounds.machine.record.parent
        path = [tip]
        if parent and parent.digest == tip.parent and parent.parent == private.base_tip:
            path = [parent, tip]
        offer = offer_of(private, self.rounds.layout)
        tip, kept = self._adopt_start(path, private.base_tip, offer)
        # Killed between the record of a reform and the private state: the work is still good.
        return tip, self._offer_again(tip, private) if kept else None

    def _offer_again(self, tip: Manifest, private: PrivateState) -> Offer:
        logger.info("round=%d: the saved local steps are offered again", private.round)
        self.reading.position = self.reading.position_after(-private.tokens)
        return self._save_offer(tip, private)

    def _adopt_start(
        self, path: list[Manifest], previous: Digest, offer: Offer | None
    ) -> tuple[Manifest, bool]:
        """Returns the tip, and whether all local work is still good on it."""
        offers, kept = [offer] if offer else [], True
        for manifest in path:
            try:
                adoption = self.model.adopt(manifest, previous=previous, offers=offers)
                self.moments.adopted(adoption, self._before(manifest), manifest)
            except BlobGone as error:
                if manifest is path[-1]:
                    raise
                logger.info("height=%d skipped: %s", manifest.height, error)
                continue
            kept &= adoption.shared is Action.KEEP
            previous = manifest.digest
        tip = path[-1]
        self.status.manifest = tip
        if merge_due(tip, self.run.merging):
            return self._adopt(self._wait(tip, PeerState.MERGING), tip, None, None)[0], False
        self._validate(tip)
        return tip, kept

    def _before(self, manifest: Manifest) -> Manifest:
        """Its parent if that is known: who owned experts before, and so has their moments."""
        parent = self.rounds.machine.record.parent
        return parent if parent and parent.digest == manifest.parent else manifest

    def _load_private(self, tip: Manifest) -> PrivateState | None:
        run_id = self.rounds.machine.rules.run
        private = load_into(self.model.engine, self.directory.private_path, run_id, tip)
        if private is None:
            return None
        restore_rng(private.rng, torch.device("cpu"))
        self.model.bases = dict(private.expert_bases)
        self.reading.position = private.data_position
        return private
