"""The main loop of a peer: train, offer, agree, adopt. Begin to read at `Training.run`.

Where rounds overlap, the peer takes its next steps while the round is under way, and waits only if
the round takes longer than these steps. It adopts a newer tip between two steps.

The loop decides, and its `TrainingShell` acts. Time passes only where the loop awaits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from swarm.experts import expert_of_unit
from swarm.protocol.membership.ownership import why_paused
from swarm.protocol.messages.messages import Offer
from swarm.protocol.records.records import PeerState
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.training import local_progress
from swarm.protocol.training.adoption import Action, Adoption, adopt, still_late
from swarm.protocol.training.shell import Applied, Assignment, SavedWork, TrainingShell, Work
from swarm.protocol.values.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.values.schedule import merge_due


class Training:
    """The training of one peer in a run, from a start of the process to the last round."""

    def __init__(
        self,
        shell: TrainingShell,
        me: PeerId,
        rules: Rules,
        rounds: int,
        *,
        is_due: Callable[[Manifest], bool] | None = None,
    ) -> None:
        """Loads nothing yet; `run` loads the state on the disk, and ends after `rounds`.

        `is_due`: whether a tip's only successor is a merge; by default the merge schedule decides.
        """
        self.shell, self.me, self.rules, self.rounds = shell, me, rules, rounds
        self.is_due = is_due or partial(merge_due, merging=rules.merging)
        self.reading = local_progress.Reading(rules, me)
        self.tip: Manifest
        """The manifest that the model has adopted."""
        self.work: Work | None = None
        """Valid local steps since the last offer (since the tip, if rounds do not overlap)."""
        self.ahead = local_progress.Ahead()
        """If rounds overlap: offered steps that are not in the tip."""
        self.offers: list[Offer] = []
        """Offers since the tip was adopted: first of late progress, then of the finished round."""
        self.made: Callable[[], Awaitable[Offer]] | None = None
        self.bases: dict[int, Digest] = {}
        """For each own expert, the agreed value from which its local progress started."""
        self.carried: frozenset[Unit] = frozenset()
        """Units whose steps are kept although a round left them out (carried steps)."""
        self.carried_tokens = 0
        """Tokens of the carried steps on shared tensors, which were not counted."""
        self.part_bases: dict[Unit, Digest] = {}
        """Base of each part of the shared tensors; empty if all parts are due in each round."""
        self.again: Offer | None = None
        """The offer in flight when this peer stopped; the model lacks its steps [P6]."""
        self.is_unsaved = False
        """Whether offers were made since the private state was last written."""
        self.late: frozenset[int] = frozenset()
        """Own experts whose progress rounds have left out so far (late offers)."""

    @property
    def is_done(self) -> bool:
        """Whether the local steps have ended, so that they are to be offered."""
        return self.work is not None and self.work.completed

    # ------------------------------------------------------------ the loop

    async def run(self) -> Manifest:
        """Takes part until the last round, and its merge, are over; returns the last manifest."""
        self.resume()
        while self.tip.round < self.rounds or self.is_due(self.tip):
            if self.work is None or self.rules.overlaps:
                self.shell.may_stop()
            newer = await self.take_part()
            await self.adopt(newer)
        return self.tip

    async def take_part(self) -> Sequence[Applied]:
        """Does the work on the tip until there are newer tips; returns the newer tips."""
        is_due = self.is_due(self.tip)
        trains_on = self.rules.overlaps and self.tip.round < self.rounds
        if is_due and not trains_on:  # no local steps and no offers (merge manifests)
            return await self.shell.wait(self.tip, PeerState.MERGING)
        if self.me not in self.tip.members:
            return await self.shell.wait(self.tip, PeerState.JOINING)
        if self.again is not None:
            self.shell.submit(self.tip, self.again)
            return await self.shell.wait(self.tip, PeerState.AVERAGING)
        if not self.may_train():
            return await self.shell.wait(self.tip, PeerState.AVERAGING)
        if not self.is_done:
            if newer := await self.pause():
                return newer
            self.offer_late()
            await self.train()
        in_flight = self.ahead.flight is not None
        if not self.is_done:  # there is a newer tip, or this peer has to stop
            state = PeerState.AVERAGING if in_flight else PeerState.CATCHING_UP
            return await self.shell.wait(self.tip, state)
        if is_due:
            return await self.shell.wait(self.tip, PeerState.MERGING)
        if not in_flight:
            await self.offer()
            if self.rules.overlaps:
                self.ahead.flight, self.work = self.work, None
                if (
                    self.tip.round + 1 < self.rounds
                ):  # continues to train, with this offer in flight
                    return await self.take_part()
        return await self.shell.wait(self.tip, PeerState.AVERAGING)

    def may_train(self) -> bool:
        """Whether there are samples to read while an offer is in flight (overlapped deals)."""
        if self.ahead.flight is None or self.work is not None:
            return True
        tokens = self.ahead.uncounted.tokens
        return self.reading.work_left(self.tip, tokens, 0, 0.0, 0.0).steps > 0

    async def pause(self) -> Sequence[Applied]:
        """Waits while too few experts have an owner; returns newer tips, if there are any.

        Policy: ownership pause.
        """
        tip, least = self.tip, self.rules.min_owned_share
        why = partial(why_paused, tip, least=least)
        owned = len(tip.owners) - len(tip.ownerless)
        return await self.shell.pause(tip, why) if owned < least * len(tip.owners) else ()

    # ------------------------------------------------------------ its parts

    def offer_late(self) -> None:
        """Offers at once this peer's experts that rounds have left out, and continues to train.

        Policy: late offers.

        No private state has to be saved: after a crash the experts start from the agreed values.
        Where rounds overlap, the next ordinary offer contains these experts instead.
        """
        late = frozenset() if self.rules.overlaps else self.late
        tip, bases = self.tip, self._bases_of_due(late) if late else {}
        if not bases:
            return
        values = self.shell.store(tip, bases, 0)
        units = {unit: value for unit, value in values.items() if value.digest != value.base}
        if units:
            self.offers = [Offer(tip.digest, 0, 0, units)]
            self.shell.submit(tip, self.offers[0])

    async def train(self) -> None:
        """Takes the local steps of a round, or the remaining ones."""
        tip, reading, uncounted = self.tip, self.reading, self.ahead.uncounted
        left, read = partial(reading.work_left, tip, uncounted.tokens), uncounted + self.work
        dealt = reading.dealt(tip, read.tokens)
        is_offered = self.ahead.flight is not None or self.is_due(tip)
        task = Assignment(dealt, reading.began_s, read.steps, is_offered)
        self.work = await self.shell.train(tip, task, self.work, left)

    async def offer(self) -> None:
        """Offers the finished work, with earlier work that rounds have left out.

        Policy: overlap accounting.
        """
        tip, saved = self.tip, self.save()

        async def offered() -> Offer:
            offer = await saved  # durable before it is sent [P6]
            self.shell.submit(tip, offer)
            return offer

        self.made = await self.shell.beside(offered(), saves_state=not self.is_unsaved)

    def save(self) -> Coroutine[Any, Any, Offer]:
        """Returns a routine that makes the work, as it is now, durable and gives its offer."""
        tip, work = self.tip, self.ahead.behind + self.work
        self.is_unsaved = not self.rules.saves_state(tip)
        save = self.shell.save_offer if self.is_unsaved else self.shell.save
        durable = save(tip, self._bases_of_due(), self._saved(work))

        async def saved() -> Offer:
            return Offer(tip.digest, work.steps, work.tokens, await durable, work.seconds)

        return saved()

    def unsaved(self) -> SavedWork | None:
        """The work that a peer saves before it stops; None: no work, or an undecided offer."""
        if self.ahead.flight or self.again or not self.is_unsaved:
            return None
        return replace(self._saved(self.ahead.behind + self.work), is_offered=False)

    def _saved(self, work: local_progress.Tally) -> SavedWork:
        tip = self.tip
        return SavedWork(
            run_id=self.rules.run,
            base_tip=tip.digest,
            round=tip.round + 1,
            steps=work.steps,
            tokens=work.tokens,
            seconds=work.seconds,
            data_position=self.reading.position_after(work.tokens),
            expert_bases=dict(self.bases),
            offered={},
            carried=self.carried,
            part_bases=dict(self.part_bases),
        )

    def due(self) -> Sequence[Unit]:
        """Units that this peer offers on the tip (due units)."""
        return self.rules.schedule.due_of(self.me, self.tip)

    def _bases_of_due(self, experts: Collection[int] | None = None) -> dict[Unit, Digest]:
        """Units to offer on the tip, of `experts` alone if given, with their bases [S3]."""
        bases = {}
        for unit in self.due():
            expert = expert_of_unit(unit)
            if experts is None or expert in experts:
                agreed = self.tip.entries[unit].digest
                bases[unit] = agreed if expert is None else self.bases[expert]
        return bases

    # ------------------------------------------------------------ a newer tip

    async def adopt(self, newer: Sequence[Applied]) -> None:
        """Adopts newer tips one by one, and decides what becomes of local work."""
        if self.made is not None:
            self.offers.append(await self.made())
        start, work, path = self.tip, self.work, list(newer)
        late = self.late.union(self.bases if work and work.steps else ())
        offered = self.ahead.flight or (work if self.is_done else None)
        is_counted, is_kept = False, True
        while path:
            applied = path.pop(0)
            manifest = applied.manifest
            adoption = self.decide(manifest, self.tip.digest)
            follows = manifest.parent == start.digest
            is_out = offered is not None or self.again is not None
            is_mine = follows and is_out and manifest.counts(self.me)
            is_counted |= is_mine  # also if a skipped manifest has it
            if not self.shell.adopt(manifest, adoption, self.tip):
                path = path or list(await self.shell.wait(manifest, PeerState.CATCHING_UP))
                continue
            is_kept &= adoption.shared is Action.KEEP
            late = still_late(late, adoption, is_counted=is_counted)
            is_lost = self._loses(manifest, adoption, self.tip)
            self._moved_to(manifest, adoption)
            if self.rules.overlaps:
                self._book_ahead(applied, is_counted=is_counted, is_lost=is_lost)
            else:
                self._book(work, adoption, applied, is_good=bool(path) or is_counted or is_kept)
            self.shell.report(applied, (offered or work) if follows else None, counted=is_mine)
        self._decided_again(newer[-1].reason, is_counted=is_counted, is_kept=is_kept)
        self.late, self.offers, self.made = late, [], None
        offered_tokens = work.tokens if work and self.is_done else 0
        if not is_kept and not self.rules.overlaps:  # after a reform the same work is offered to it
            self.work = None
        if self.work is None:
            self.reading.next_round(applied.at_s, offered_tokens)
        if self.again is None:
            self.shell.release()
        self.validate()

    def _decided_again(self, reason: str, *, is_counted: bool, is_kept: bool) -> None:
        """Settles an offer from before a stop: counted, to be offered to a reform, or lost."""
        again, self.again = self.again, None
        if again is None or is_counted:
            return
        if is_kept and set(again.units) == set(self.due()):
            self.again = replace(again, tip=self.tip.digest)
        else:
            self.shell.lose(again.tokens, reason)

    def _book(
        self, work: Work | None, adoption: Adoption, applied: Applied, *, is_good: bool
    ) -> None:
        """Counts shared steps as lost, unless a manifest has them or they stay undecided."""
        tokens = work.tokens if work and not is_good else 0
        goes_on = adoption.shared in (Action.KEEP, Action.CARRIED)
        if goes_on and any(expert_of_unit(unit) is None for unit in self.carried):
            self.carried_tokens += tokens
            return
        if adoption.shared is Action.RESTART and not is_good:
            tokens += self.carried_tokens
        self.carried_tokens = 0
        if tokens:
            self.shell.lose(tokens, applied.reason)

    def _book_ahead(self, applied: Applied, *, is_counted: bool, is_lost: bool) -> None:
        """Keeps the steps that the tip does not contain, unless they are lost.

        Policies: overlapped adoption, overlap accounting.
        """
        tokens = self.ahead.decided(is_counted=is_counted, is_lost=is_lost)
        if self.work and (is_lost or not self.work.steps):
            tokens += self.work.tokens
            self.work = None
        if tokens:
            self.shell.lose(tokens, applied.reason)

    def _loses(self, manifest: Manifest, adoption: Adoption, tip: Manifest | None) -> bool:
        """Whether steps beyond the tip are lost: values restart, or no manifest can count them.

        A former member is dealt no samples, and on another chain a member may be dealt others.
        """
        if self.me not in manifest.members or adoption.begins_anew(self.rules.shared_units):
            return True
        tokens = (self.ahead.uncounted + self.work).tokens
        return tip is not None and not self.reading.goes_on(tip, manifest, tokens)

    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        """What becomes of local progress since the manifest with digest `previous`.

        Policies: shared progress, expert progress, merge rebase.
        """
        return adopt(
            self.me,
            manifest,
            previous=previous,
            bases=self.bases,
            offers=self.offers,
            carried=self.carried,
            part_bases=self.part_bases,
            overlaps=self.rules.overlaps,
        )

    def _moved_to(self, manifest: Manifest, adoption: Adoption) -> None:
        self.tip, self.bases = manifest, adoption.bases
        self.carried = adoption.carried
        if self.rules.shared_every > 1:
            self.part_bases = {u: manifest.entries[u].digest for u in self.rules.shared_units}

    def validate(self) -> None:
        """Measures the agreed state after each cycle and merge, if this peer is first convener."""
        tip, cycle = self.tip, self.rules.schedule.cycle
        is_end = tip.round % cycle == 0 or tip.round >= self.rounds
        if is_end and tip.order[0] == self.me and not self.is_due(tip):
            self.shell.validate(tip)

    # ------------------------------------------------------------ resuming

    def resume(self) -> None:
        """Moves the model to the tip after a start, and finds work that is still valid.

        Rounds continue during the move. If there is a newer tip, the model moves to the newer tip.
        """
        while not self._resume_at(self.shell.newest()):
            pass

    def _resume_at(self, newest: Applied) -> bool:
        tip = newest.manifest
        saved = self.shell.load(
            tip, partial(local_progress.problem_of, run_id=self.rules.run, tip=tip)
        )
        self.bases = dict(saved.expert_bases) if saved else {}
        self.carried = saved.carried if saved else frozenset()
        self.part_bases = dict(saved.part_bases) if saved else {}
        self.offers = [local_progress.offer_of(saved, self.rules.unit_bytes)] if saved else []
        self.ahead = local_progress.Ahead()
        path = local_progress.manifests_to(newest, saved.base_tip if saved else "")
        if not self._adopt_start(path, newest, saved):
            return False
        if saved:
            # Tokens that are offered again are counted when the round is over.
            again = saved.tokens if self.work else 0
            self.reading.position = saved.data_position
            self.reading.position = self.reading.position_after(-again)
        if self.work is None:
            self._find_offer()
        self.shell.resumed(tip, has_work=bool(self.work or self.again))
        if path:
            self.validate()
        return True

    def _find_offer(self) -> None:
        """Finds an undecided offer that is newer than the private state."""
        newer = self.shell.load_offer()
        if newer is not None:
            self.reading.position = max(self.reading.position, newer.data_position)
            self.again = local_progress.offer_again(newer, self.tip, self.me, self.rules)

    def _adopt_start(
        self, path: Sequence[Manifest], newest: Applied, saved: SavedWork | None
    ) -> bool:
        """Adopts the path after a start; returns whether the tip was reached."""
        if not path and not self.shell.adopt_frozen(newest.manifest):
            return False
        previous, is_kept = saved.base_tip if saved else "", saved is not None
        for manifest in path:
            adoption = self.decide(manifest, previous)
            parent = newest.parent
            before = parent if parent and parent.digest == manifest.parent else manifest
            if self.shell.adopt(manifest, adoption, before, at_start=True):
                is_kept &= adoption.shared is Action.KEEP
                self._book_start(saved, manifest, adoption)
                previous = manifest.digest
                self._moved_to(manifest, adoption)
            elif manifest is newest.manifest:
                return False
        self.tip, self.offers = newest.manifest, []
        # If the peer was killed between the record of a reform and the private state, its work is
        # still valid.
        self.work = saved if is_kept and saved and saved.is_offered else None
        if self.work is not None:
            self.ahead = local_progress.Ahead()
        elif is_kept and saved:
            self.ahead.behind = local_progress.Tally() + saved
        self.reading.next_round(newest.at_s, 0)
        return True

    def _book_start(self, saved: SavedWork | None, manifest: Manifest, adoption: Adoption) -> None:
        """Like `_book_ahead`, for an offer that was in flight when this peer stopped."""
        if saved is None or not self.rules.overlaps:
            return
        follows = manifest.parent == saved.base_tip
        if follows:
            self.ahead.flight = saved
        is_counted = follows and saved.is_offered and manifest.counts(self.me)
        self.ahead.decided(is_counted=is_counted, is_lost=self._loses(manifest, adoption, None))
