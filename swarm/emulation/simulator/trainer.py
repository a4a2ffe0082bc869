"""The training side of a simulated peer: local steps take time, values are symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.emulation.simulator.disk import Disk, PrivateState, Progress
from swarm.emulation.simulator.values import Trained, Values
from swarm.emulation.simulator.violation import Violation
from swarm.experts import expert_of_unit, expert_unit
from swarm.protocol.adoption import Action, Adoption, ExpertDecision, adopt, due_units, still_late
from swarm.protocol.dealing import Stretches, num_samples, split
from swarm.protocol.events import Expected, Offered
from swarm.protocol.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.messages import Offer, OfferedUnit
from swarm.protocol.rounds import Rules


class Shell(Protocol):
    """What a trainer needs of its peer."""

    me: PeerId
    disk: Disk

    def tell(self, event: Offered | Expected) -> None:
        """Hands an event to the machine."""

    def after(self, delay_s: float, method: Callable[..., None], *arguments: object) -> None:
        """Calls the method later, unless the peer crashes first."""

    def merge_is_due(self, tip: Manifest) -> bool:
        """Whether the next manifest must be a merge [M2]."""

    def local_steps_s(self) -> float:
        """How long the next local steps take."""

    def step_s(self) -> float:
        """How long each of the next local steps takes, where rounds last a given time."""

    def next_serial(self) -> int:
        """A number that this peer never used before."""


@dataclass(frozen=True)
class Lesson:
    """The local steps of one round."""

    steps: int
    seconds: float
    read: Stretches
    """Samples that they are trained on."""


@dataclass(frozen=True)
class Task:
    """What all trainers of a schedule share."""

    rules: Rules
    values: Values


WRITE_S = 0.02
"""Time between the steps that make an offer durable, so that a crash can fall between them."""


class Trainer:
    """Local steps, offers and adoption of one peer."""

    def __init__(self, shell: Shell, task: Task, tip: Manifest) -> None:
        self.shell = shell
        self.task = task
        self.tip = tip
        self.model: dict[Unit, Digest] = {}
        """The live agreed model: what the next local steps start from."""
        self.progress: dict[int, Progress] = {}
        self.offer: Offer | None = None
        """The finished round."""
        self.late: frozenset[int] = frozenset()
        """Experts with progress that the rounds so far have left out [O2]."""
        self._late_offer: Offer | None = None
        self._job = 0
        self._is_training = False
        self._lesson = Lesson(0, 0.0, ())

    def restore(self) -> Adoption | None:
        """Takes up the private state on the disk, at the record's tip [P6].

        Returns:
            What became of it, or None if it was of this very tip.
        """
        self._swap(self.tip)
        private = self.shell.disk.private
        if private is None:
            return self._adopt(self.tip, self.tip.digest, [])
        self.progress = dict(private.progress)
        if private.tip == self.tip.digest:
            self.offer = private.offer
            return None
        return self._adopt(self.tip, private.tip, [private.offer] if private.offer else [])

    def resume(self) -> None:
        """Goes on after a start."""
        self._go_on()

    def apply(self, manifest: Manifest, previous: Digest) -> Adoption:
        """Takes the agreed values of a new tip and decides on the local progress."""
        if self._is_training:
            self._advance()
        if self._is_training or self.offer is not None:
            self.late |= self.progress.keys()
        offers = [offer for offer in (self._late_offer, self.offer) if offer]
        adoption = self._adopt(manifest, previous, offers)
        is_counted = manifest.parent == previous and manifest.counts(self.shell.me)
        self.late = still_late(self.late, adoption, is_counted=is_counted)
        self._late_offer = None
        self.tip = manifest
        self._swap(manifest)
        keeps_shared = adoption.shared is Action.KEEP
        if keeps_shared and self.offer is not None:
            self.offer = self._make_offer(self._done_before(self.offer))
        elif not (keeps_shared and self._is_training and self._may_train()):
            self.offer = None
            self._job += 1
            self._is_training = False
        if not self._is_training:
            self._go_on()
        return adoption

    @property
    def is_idle(self) -> bool:
        """Whether nothing is done or offered although it could be."""
        return self._may_train() and not self._is_training and self.offer is None

    def _swap(self, manifest: Manifest) -> None:
        self.model = {unit: entry.digest for unit, entry in manifest.entries.items()}

    def _may_train(self) -> bool:
        return self.shell.me in self.tip.members and not self.shell.merge_is_due(self.tip)

    def _go_on(self) -> None:
        """Offers what is finished, or starts the local steps [O1, M2]."""
        if not self._may_train():
            return
        if self.offer is not None:
            self._job += 1
            self.shell.after(WRITE_S, self._publish, self._job)
            return
        self._job += 1
        self._offer_late()
        self._is_training = True
        self._lesson = self._next_lesson()
        self._start_steps()

    def _start_steps(self) -> None:
        """The local steps begin; how long they take is known at once."""
        steps_s = self._lesson.seconds
        self.shell.after(WRITE_S, self._expect, self._job, steps_s - WRITE_S)
        self.shell.after(steps_s, self._finish, self._job)

    def _next_lesson(self) -> Lesson:
        """What the next local steps are: as many as fit the time, or as everybody takes [T3]."""
        rules, dealt = self.task.rules, self.tip.dealt[self.shell.me]
        per_step = rules.batch_tokens_at(self.tip.tokens) // rules.sequence_length
        if rules.round_seconds is None:
            steps, seconds = rules.local_steps_at(self.tip.tokens), self.shell.local_steps_s()
        else:
            step_s = self.shell.step_s()
            most = num_samples(dealt) // per_step
            steps = max(1, min(most, int(rules.round_seconds / step_s)))
            seconds = steps * step_s
        return Lesson(steps, seconds, split(dealt, steps * per_step)[0])

    def _done_before(self, offer: Offer) -> Lesson:
        """The local steps behind an offer."""
        shared = next(unit for unit in offer.units if expert_of_unit(unit) is None)
        read = self.task.values.reads[offer.units[shared].digest]
        return Lesson(offer.steps, offer.seconds, read)

    def _offer_late(self) -> None:
        """What the rounds so far have left out is offered at once; the shared steps follow [O2]."""
        due = due_units(self.shell.me, self.tip, self.task.rules.experts_every)
        late = {expert_unit(e): self.progress[e] for e in sorted(self.late) if e in self.progress}
        units = {
            unit: OfferedUnit(value, self.task.rules.unit_bytes[unit], base)
            for unit, (base, value) in late.items()
            if unit in due and value != base
        }
        if units:
            self._late_offer = Offer(self.tip.digest, 0, 0, units)
            self.shell.after(WRITE_S, self._publish_late, self._job, self._late_offer)

    def _publish_late(self, job: int, offer: Offer) -> None:
        if job == self._job:
            self._write(offer)
            self.shell.tell(Offered(offer))

    def _expect(self, job: int, remaining_s: float) -> None:
        if job == self._job and self._is_training:
            self.shell.tell(Expected(self.tip.digest, remaining_s))

    def _finish(self, job: int) -> None:
        """The local steps are done."""
        if job != self._job:
            return
        self._is_training = False
        self._advance()
        self.offer = self._make_offer(self._lesson)
        self.shell.after(WRITE_S, self._publish, job)

    def _publish(self, job: int) -> None:
        """Makes blobs and private state durable, then offers [P6]."""
        if job != self._job or self.offer is None:
            return
        self._write(self.offer)
        self._save()
        self.shell.after(WRITE_S, self._announce, job, self.offer)

    def _write(self, offer: Offer) -> None:
        digests = [unit.digest for unit in offer.units.values()]
        for digest in digests:
            self.shell.disk.write(digest)
        self.shell.disk.sync(digests)

    def _announce(self, job: int, offer: Offer) -> None:
        if job == self._job:
            self.shell.tell(Offered(offer))

    def _save(self) -> None:
        self.shell.disk.private = PrivateState(
            self.tip.digest,
            dict(self.progress),
            self.offer,
        )

    def save_if_rebased(self, adoption: Adoption) -> None:
        """The rebased master and its new base go to the disk in one write [M10]."""
        if any(choice.action is Action.REBASE for choice in adoption.experts.values()):
            self._save()

    def _advance(self) -> None:
        """Trains every owned expert a bit further."""
        for expert, (base, value) in sorted(self.progress.items()):
            trained = self._trained(expert_unit(expert), self._origin(base, value))
            self.progress[expert] = Progress(base, trained)

    def _origin(self, base: Digest, value: Digest) -> Digest:
        """The agreed value that a value really was trained from, whatever its base says."""
        made = self.task.values[value]
        return made.base if value != base and isinstance(made, Trained) else base

    def _trained(self, unit: Unit, base: Digest) -> Digest:
        return self.task.values.digest_of(
            Trained(unit, base, self.shell.me, self.shell.next_serial())
        )

    def _make_offer(self, done: Lesson) -> Offer:
        rules = self.task.rules
        units = {}
        for unit in due_units(self.shell.me, self.tip, rules.experts_every):
            expert = expert_of_unit(unit)
            if expert is None:
                base = self.model[unit]
                value = self._trained(unit, base)
                self.task.values.reads[value] = done.read
            else:
                base, value = self.progress[expert]
            units[unit] = OfferedUnit(value, rules.unit_bytes[unit], base)
        tokens = done.steps * rules.batch_tokens_at(self.tip.tokens)
        return Offer(self.tip.digest, done.steps, tokens, units, done.seconds)

    def decide(
        self,
        manifest: Manifest,
        previous: Digest,
        bases: dict[int, Digest],
        offers: Sequence[Offer],
    ) -> Adoption:
        """The adoption rule."""
        return adopt(self.shell.me, manifest, previous=previous, bases=bases, offers=offers)

    def _adopt(self, manifest: Manifest, previous: Digest, offers: Sequence[Offer]) -> Adoption:
        bases = {expert: progress.base for expert, progress in self.progress.items()}
        adoption = self.decide(manifest, previous, bases, offers)
        for expert, choice in adoption.experts.items():
            offered = [offer.units.get(expert_unit(expert)) for offer in offers]
            self._follow(expert, choice, [unit.digest for unit in offered if unit])
        return adoption

    def _follow(self, expert: int, choice: ExpertDecision, offered: Sequence[Digest]) -> None:
        if choice.base is None:
            del self.progress[expert]
        elif choice.action in (Action.REBASE, Action.AVERAGED):
            self._rebase(expert, choice, offered)
        elif choice.action is Action.PUBLISHED and self.progress[expert].value != choice.base:
            # It was trained on after that was offered, so what it is now extends the agreed value.
            now = self._trained(expert_unit(expert), choice.base)
            self.progress[expert] = Progress(choice.base, now)
        elif choice.action is not Action.KEEP:
            self.progress[expert] = Progress(choice.base, choice.base)

    def _rebase(self, expert: int, choice: ExpertDecision, offered: Sequence[Digest]) -> None:
        assert choice.base is not None and choice.rebase_from is not None
        base, value = self.progress[expert]
        # The difference is nothing if my offer was merged, and unknown if the merge is so far back
        # that the value before it need not be kept any more.
        if value == choice.rebase_from or not self._has_before(expert, choice.rebase_from):
            self.progress[expert] = Progress(choice.base, choice.base)
            return
        # Only a difference to the very value it was trained from makes it extend the merged one.
        extends = choice.base if choice.rebase_from in (base, *offered) else base
        self.progress[expert] = Progress(choice.base, self._trained(expert_unit(expert), extends))

    def _has_before(self, expert: int, before: Digest) -> bool:
        """Whether an expert's value before a merge is here; the tip before has to be [GC, M10]."""
        if before in self.shell.disk:
            return True
        parent = self.shell.disk.record.parent
        if parent and parent.entries[expert_unit(expert)].digest == before:
            raise Violation("M10", f"{self.shell.me} cannot rebase: {before} is gone")
        return False


def taken_up(adoption: Adoption, manifest: Manifest) -> list[int]:
    """Experts that are newly this peer's and have been trained by others."""
    return [
        expert
        for expert, choice in adoption.experts.items()
        if choice.action is Action.TAKE_UP and manifest.entries[expert_unit(expert)].version > 0
    ]
