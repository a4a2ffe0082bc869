"""The training side of a simulated peer: the real main loop, in virtual time, on symbols.

`swarm.protocol.training` decides, and this module is its shell. The loop waits only while local
steps are taken and while the private state is written.
"""

# `TrainingShell` documents the methods of a shell.
# ruff: noqa: D102, ARG002

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from swarm.emulation.simulator.symbols.crash_disk import PrivateState, Shell
from swarm.emulation.simulator.symbols.text_ledger import one_after_the_other
from swarm.emulation.simulator.symbols.trained_symbols import Model, Task
from swarm.emulation.simulator.symbols.values import Violation, short
from swarm.protocol.messages.events import Expected, Offered
from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.records.records import PeerState
from swarm.protocol.timing.deadlines import LocalWork
from swarm.protocol.training import Applied, Assignment, SavedWork, Training, TrainingShell, Work
from swarm.protocol.training.adoption import Adoption
from swarm.protocol.values.manifest import Digest, Manifest, Unit
from swarm.protocol.values.work import Stretches, num_samples, split


class PeerShell(Shell, Protocol):
    """The parts of its peer that a trainer needs."""

    is_up: bool

    def merge_is_due(self, tip: Manifest) -> bool:
        """Whether the next manifest must be a merge."""

    def local_steps_s(self) -> float:
        """How long the next local steps take."""

    def step_s(self) -> float:
        """How long each of the next local steps takes, where rounds last a given time."""

    def adopting(self, before: Manifest, manifest: Manifest) -> None:
        """Notes that experts may be given to others."""

    def adopted(self, taken: Sequence[int], before: Manifest, manifest: Manifest) -> None:
        """Notes the adoption, and the experts that were taken over from other owners."""


@dataclass(frozen=True)
class Lesson:
    """The local steps of one round; see `Work`."""

    steps: int
    tokens: int
    seconds: float
    read: Stretches
    """Samples on which these steps are trained."""
    completed: bool = True


def last(read: Stretches, samples: int) -> Stretches:
    """The last `samples` of the samples that were read, or all if they are fewer."""
    return split(read, max(0, num_samples(read) - samples))[1]


WRITE_S = 0.02
"""Seconds between the writes of an offer, so that a crash can happen between two writes."""


class _Pause:
    """Lets the awaiting code wait until its trainer is woken."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class Trainer(TrainingShell):
    """The shell around one peer's main loop."""

    model_type = Model

    def __init__(self, shell: PeerShell, task: Task, training: type[Training]) -> None:
        self.shell, self.task = shell, task
        self.model = self.model_type(shell.me, shell.disk, task)
        self.training = training(self, shell.me, task.rules, 2**31, is_due=shell.merge_is_due)
        self.is_idle = False
        """Whether the trainer waits for others, and has neither taken steps nor offered."""
        self._loop: Coroutine[None, None, Manifest]
        self._newer: list[Applied] = []
        """Tips that the loop does not know yet."""
        self._looks_out = False
        """Whether a newer tip wakes the trainer."""
        self._job = 0
        self._lesson = Lesson(0, 0, 0.0, ())
        self._read: Stretches = ()
        """Samples on which the model was trained, in order, as far as they are known."""
        self._at: Digest = ""
        """The manifest that the model has adopted."""
        self._ends_s = 0.0
        """When the local steps under way end."""

    def start(self) -> None:
        """Begins, or resumes from the disk."""
        self._loop = self.training.run()
        self._loop.send(None)

    def apply(self, manifest: Manifest, parent: Manifest | None) -> None:
        """Notes that the machine has a new tip."""
        self._newer.append(Applied(manifest, self.shell.now_s(), parent=parent))
        if self._looks_out:
            self._wake(self._job)

    def _wake(self, job: int) -> None:
        if job == self._job:
            self._job += 1
            self._loop.send(None)

    async def _pass(self, seconds: float) -> None:
        """Waits for `seconds`, or until a newer tip comes if a tip may wake the trainer."""
        self.shell.after(seconds, self._wake, self._job)
        await _Pause()

    # ------------------------------------------------------------ the start

    def newest(self) -> Applied:
        self._newer.clear()
        record = self.shell.disk.record
        return Applied(record.tip, self.shell.disk.tip_s, parent=record.parent)

    def load(self, tip: Manifest, problem: Callable[[SavedWork], str | None]) -> SavedWork | None:
        private = self.shell.disk.private
        if private is None or problem(private.work):
            return None
        self.model.load(private)
        self._read, self._at = private.read, private.work.base_tip
        return private.work

    def adopt_frozen(self, tip: Manifest) -> bool:
        disk = self.shell.disk
        missing = [unit for unit, entry in tip.entries.items() if entry.digest not in disk]
        if missing and disk.record.tip.digest == tip.digest:
            raise Violation("I6", f"{self.shell.me} adopts {short(tip)} without {missing}")
        return not missing

    def resumed(self, tip: Manifest, *, has_work: bool) -> None:
        self.model.decided()

    # ------------------------------------------------------------ local steps

    async def train(
        self,
        tip: Manifest,
        task: Assignment,
        before: Work | None,
        left: Callable[[int, float, float], LocalWork],
    ) -> Lesson:
        """Takes local steps, whose number and time are known from the start."""
        if self._newer:  # a newer tip came while an offer was written
            done = before or Lesson(0, 0, 0.0, ())
            return replace(self._lesson, steps=done.steps, tokens=done.tokens, completed=False)
        if before is None or not before.steps:

            def steps_left(done: int, step_s: float) -> int:
                passed_s = self.shell.now_s() - task.began_s + done * step_s
                return left(done, step_s, passed_s).steps

            steps, seconds = self._plan(steps_left)
            tokens = steps * self.task.rules.batch_tokens_at(tip.tokens)
            read = split(task.dealt, tokens // self.task.rules.sequence_length)[0]
            self._look_at(read)
            self._read += read
            self._lesson = Lesson(steps, tokens, seconds, read)
            self._ends_s = self.shell.now_s() + seconds
        self.model.begin(tip)
        self._looks_out = True
        await self._take_steps(tip)
        self._looks_out = False
        self.model.advance()
        if not self._newer:
            return self._lesson
        # The step under way was finished, so there is at least one step.
        left_s = max(0.0, self._ends_s - self.shell.now_s())
        steps = max(1, int(self._lesson.steps * (1 - left_s / self._lesson.seconds)))
        return replace(self._lesson, steps=steps, completed=False)

    def _look_at(self, read: Stretches) -> None:
        """Where rounds overlap, requires that a model reads no sample twice.

        Policy: overlap accounting.
        """
        if self.task.rules.overlaps and one_after_the_other([*self._read, *read]) is None:
            raise Violation("I21", f"{self.shell.me} reads {read} once more after {self._read}")

    async def _take_steps(self, tip: Manifest) -> None:
        # A pause may have outlasted the steps.
        left_s = max(WRITE_S, self._ends_s - self.shell.now_s())
        self.shell.after(WRITE_S, self._expect, self._job, tip, left_s - WRITE_S)
        await self._pass(left_s)

    def _plan(self, left: Callable[[int, float], int]) -> tuple[int, float]:
        """The number of the local steps, and their time."""
        if self.task.rules.round_seconds is None:
            return left(0, 0.0), self.shell.local_steps_s()
        steps, step_s = 0, self.shell.step_s()
        while left(steps, step_s):
            steps += 1
        return steps, steps * step_s

    def _expect(self, job: int, tip: Manifest, remaining_s: float) -> None:
        if job == self._job:
            self.shell.tell(Expected(tip.digest, remaining_s))

    # ------------------------------------------------------------ offers

    def store(
        self,
        tip: Manifest,
        bases: Mapping[Unit, Digest],
        tokens: int,
    ) -> dict[Unit, OfferedUnit]:
        samples = tokens // self.task.rules.sequence_length
        units = self.model.values(bases, last(self._read, samples))
        self.shell.after(WRITE_S, self._write, units)
        return units

    async def save(
        self, tip: Manifest, bases: Mapping[Unit, Digest], work: SavedWork
    ) -> dict[Unit, OfferedUnit]:
        units = self.store(tip, bases, work.tokens)
        await self._pass(WRITE_S)
        self.shell.disk.private = PrivateState(
            work.with_values(units),
            dict(self.model.progress),
            dict(self.model.deltas.live),
            dict(self.model.deltas.named),
            dict(self.model.started),
            last(self._read, work.tokens // self.task.rules.sequence_length),
            self.model.past.missed,
        )
        await self._pass(WRITE_S)
        return units

    async def save_offer(
        self, tip: Manifest, bases: Mapping[Unit, Digest], work: SavedWork
    ) -> dict[Unit, OfferedUnit]:
        units = self.store(tip, bases, work.tokens)
        await self._pass(WRITE_S)
        offer = work.with_values(units)
        self.shell.disk.sync(offer.blobs)
        self.shell.disk.offer = offer
        await self._pass(WRITE_S)
        return units

    def load_offer(self) -> SavedWork | None:
        offer, disk = self.shell.disk.offer, self.shell.disk
        if offer is None:
            return None
        if not all(digest in disk for digest in offer.blobs):
            return None
        self.model.again = offer.blobs
        return offer

    def _write(self, units: Mapping[Unit, OfferedUnit]) -> None:
        """Makes blobs readable, and deltas durable: they may be counted while this peer is down."""
        disk, coding = self.shell.disk, self.task.rules.unit_coding
        for unit, offered in units.items():
            digests = [digest for digest in (offered.digest, offered.delta) if digest]
            for digest in digests:
                disk.write(digest)
            if unit in coding:
                disk.sync(digests)

    def submit(self, tip: Manifest, offer: Offer) -> None:
        if offer.is_late:
            self.shell.after(WRITE_S, self.shell.tell, Offered(offer))
            return
        disk, offered = self.shell.disk, {u: v.digest for u, v in offer.units.items()}
        if self.training.again is None:
            saves_state = self.task.rules.saves_state(tip)
            saved = disk.private and disk.private.work if saves_state else disk.offer
            if not saved or (saved.base_tip, saved.offered) != (tip.digest, offered):
                raise Violation("I25", f"{self.shell.me} offers what its disk lacks: {offered}")
        self.shell.tell(Offered(offer))

    async def wait(self, tip: Manifest, state: PeerState) -> list[Applied]:
        while not (self._newer and self.shell.is_up):
            may_train = self.shell.me in tip.members and not self.shell.merge_is_due(tip)
            self.is_idle = may_train and state is not PeerState.AVERAGING
            self._looks_out = True
            await _Pause()
            self._looks_out = self.is_idle = False
        newer, self._newer = self._newer, []
        return newer

    # ------------------------------------------------------------ a newer tip

    def adopt(
        self, manifest: Manifest, decision: Adoption, before: Manifest, *, at_start: bool = False
    ) -> bool:
        if not self.adopt_frozen(manifest):
            return False
        if not at_start:
            self.shell.adopting(before, manifest)
        if self._is_read_anew(manifest, decision, at_start=at_start):
            self._read = ()
        follows, self._at = manifest.parent == self._at, manifest.digest
        taken = self.model.adopt(manifest, decision, follows=follows)
        self.shell.adopted(taken, before, manifest)
        return True

    def _is_read_anew(self, manifest: Manifest, decision: Adoption, *, at_start: bool) -> bool:
        """Whether samples that were read but not counted are lost, and may come again.

        Policy: overlap accounting.

        On another chain such samples are lost, unless the peer is dealt the same samples there. A
        peer that starts has lost them. Parts that were not due keep their progress (shared
        progress).
        """
        begins_anew = decision.begins_anew(self.task.rules.shared_units)
        if begins_anew or self.shell.me not in manifest.members:
            return True
        if manifest.parent == self._at:
            return False
        ahead = self.training.ahead.uncounted + self.training.work
        samples = ahead.tokens // self.task.rules.sequence_length
        first = split(manifest.dealt[self.shell.me], samples)[0]
        return at_start or one_after_the_other(first) != one_after_the_other(
            last(self._read, samples)
        )

    def release(self) -> None:
        self.model.decided()
        self.model.again.clear()
