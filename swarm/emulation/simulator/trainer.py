"""The training side of a simulated peer: the real main loop, in virtual time, on symbols.

`swarm.protocol.training` decides; here its effects are carried out. Local steps and the
private state take time, meanwhile the loop stands; all else it need not wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from swarm.emulation.simulator.disk import Disk, PrivateState
from swarm.emulation.simulator.model import Model, Task
from swarm.emulation.simulator.violation import Violation, short
from swarm.protocol.dealing import Stretches, split
from swarm.protocol.events import Expected, Offered
from swarm.protocol.manifest import Manifest, PeerId, Unit
from swarm.protocol.messages import OfferedUnit
from swarm.protocol.moments import Search
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


class Shell(Protocol):
    """What a trainer needs of its peer."""

    me: PeerId
    disk: Disk
    is_up: bool

    def tell(self, event: Offered | Expected) -> None:
        """Hands an event to the machine."""

    def after(self, delay_s: float, method: Callable[..., None], *arguments: object) -> None:
        """Calls the method later, unless the peer crashes first."""

    def now_s(self) -> float:
        """The time."""

    def merge_is_due(self, tip: Manifest) -> bool:
        """Whether the next manifest must be a merge [M2]."""

    def local_steps_s(self) -> float:
        """How long the next local steps take."""

    def step_s(self) -> float:
        """How long each of the next local steps takes, where rounds last a given time."""

    def searches(self) -> tuple[Search, ...]:
        """For moments that the experts lack."""

    def stepped(self) -> None:
        """Hears that the experts were trained."""

    def look_again(self, searches: Sequence[Search], tip: Manifest) -> None:
        """Hears which moments the private state that was just loaded lacks."""

    def adopting(self, before: Manifest, manifest: Manifest) -> None:
        """Hears that experts may be given to others."""

    def adopted(self, taken: Sequence[int], before: Manifest, manifest: Manifest) -> None:
        """Hears that it was done, and which experts that others had trained were taken up."""

    def resumed(self) -> None:
        """Hears that the loop goes on where it was."""


@dataclass(frozen=True)
class Lesson:
    """The local steps of one round, see `effects.Steps`."""

    steps: int
    tokens: int
    seconds: float
    read: Stretches
    """Samples that they are trained on."""
    completed: bool = True


WRITE_S = 0.02
"""Time between the steps that make an offer durable, so that a crash can fall between them."""
LATER = object()
"""The result of an effect that takes time."""


class Trainer:
    """What carries out the effects of one peer's main loop."""

    model_type = Model

    def __init__(self, shell: Shell, task: Task, training: type[Training]) -> None:
        self.shell, self.task = shell, task
        self.training = training(shell.me, task.rules, 2**31, is_due=shell.merge_is_due)
        self.model = self.model_type(shell.me, shell.disk, task)
        self.doing: Effect[Any] | None = None
        """What the loop waits for."""
        self._loop: Coroutine[Any, Any, Manifest]
        self._newer: list[Applied] = []
        """Tips that the loop has not been told of."""
        self._job = 0
        self._lesson = Lesson(0, 0, 0.0, ())
        self._ends_s = 0.0
        self._perform: Mapping[type, Callable[[Any], Any]] = {
            Newest: self._newest,
            Load: self._load,
            AdoptFrozen: lambda effect: self._are_here(effect.tip),
            Resumed: self._resumed,
            MayStop: lambda _: None,
            Train: self._train,
            Store: self._store,
            Save: self._save,
            Submit: self._submit,
            Wait: lambda _: self._take_newer() if self._newer else LATER,
            Adopt: self._adopt,
            Lose: lambda _: None,
            Report: lambda _: None,
            Release: lambda _: self.model.offered.clear(),
            Validate: lambda _: None,
        }

    def start(self) -> None:
        """Begins, or goes on with what is on the disk."""
        self._loop = self.training.run()
        self._go_on(None)

    def apply(self, manifest: Manifest, parent: Manifest | None) -> None:
        """The machine has a new tip."""
        self._newer.append(Applied(manifest, self.shell.now_s(), parent=parent))
        if isinstance(self.doing, Train):
            # The step under way is finished: so there is one at least.
            self._advance()
            left = (self._ends_s - self.shell.now_s()) / self._lesson.seconds
            steps = max(1, int(self._lesson.steps * (1 - left)))
            self._go_on(replace(self._lesson, steps=steps, completed=False))
        elif isinstance(self.doing, Wait):
            self._go_on(self._take_newer())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is done or offered although it could be."""
        if not isinstance(self.doing, Wait) or self.doing.state is PeerState.AVERAGING:
            return False
        tip = self.shell.disk.record.tip
        return self.shell.me in tip.members and not self.shell.merge_is_due(tip)

    def _go_on(self, result: object) -> None:
        while result is not LATER and self.shell.is_up:
            self._job += 1
            self.doing = effect = self._loop.send(result)
            result = self._perform[type(effect)](effect)

    def _ended(self, job: int, result: object) -> None:
        if job == self._job:
            self._go_on(result)

    def _take_newer(self) -> list[Applied]:
        newer, self._newer = self._newer, []
        return newer

    # ------------------------------------------------------------ the start

    def _newest(self, _: Newest) -> Applied:
        self._newer.clear()
        record = self.shell.disk.record
        return Applied(record.tip, self.shell.disk.tip_s, parent=record.parent)

    def _load(self, effect: Load) -> SavedWork | None:
        private = self.shell.disk.private
        if private is None or effect.problem(private.work):
            return None
        self.model.load(private)
        self.shell.look_again(private.searches, effect.tip)
        return private.work

    def _resumed(self, _: Resumed) -> None:
        self.model.offered.clear()
        self.shell.resumed()

    # ------------------------------------------------------------ local steps

    def _train(self, effect: Train) -> object:
        """The local steps begin, or go on; how long they take is known at once."""
        if effect.before is None:
            self._lesson = self._next_lesson(effect)
            self._ends_s = self.shell.now_s() + self._lesson.seconds
        self._start_steps(effect)
        return LATER

    def _start_steps(self, effect: Train) -> None:
        left_s = self._ends_s - self.shell.now_s()
        self.shell.after(WRITE_S, self._expect, self._job, effect.tip, left_s - WRITE_S)
        self.shell.after(left_s, self._finish, self._job)

    def _next_lesson(self, effect: Train) -> Lesson:
        """What the next local steps are: as many as the loop asks for."""
        passed_s = self.shell.now_s() - effect.began_s
        if self.task.rules.round_seconds is None:
            steps, seconds = effect.left(0, 0.0, passed_s).steps, self.shell.local_steps_s()
        else:
            steps, step_s = 0, self._step_s()
            while effect.left(steps, step_s, passed_s + steps * step_s).steps:
                steps += 1
            seconds = steps * step_s
        return self._lesson_of(effect, steps, seconds)

    def _step_s(self) -> float:
        return self.shell.step_s()

    def _lesson_of(self, effect: Train, steps: int, seconds: float) -> Lesson:
        rules = self.task.rules
        tokens = steps * rules.batch_tokens_at(effect.tip.tokens)
        read = split(effect.dealt, tokens // rules.sequence_length)[0]
        return Lesson(steps, tokens, seconds, read)

    def _expect(self, job: int, tip: Manifest, remaining_s: float) -> None:
        if job == self._job:
            self.shell.tell(Expected(tip.digest, remaining_s))

    def _finish(self, job: int) -> None:
        if job == self._job:
            self._advance()
            self._go_on(self._lesson)

    def _advance(self) -> None:
        self.model.advance()
        self.shell.stepped()

    # ------------------------------------------------------------ offers

    def _store(self, effect: Store) -> dict[Unit, OfferedUnit]:
        units = self.model.values(effect.bases, self._lesson.read)
        self.shell.after(WRITE_S, self._write, units)
        return units

    def _save(self, effect: Save) -> object:
        units = self.model.values(effect.bases, self._lesson.read)
        self.shell.after(WRITE_S, self._saved, self._job, effect.work, units)
        return LATER

    def _saved(self, job: int, work: SavedWork, units: Mapping[Unit, OfferedUnit]) -> None:
        self._write(units)
        self.shell.disk.private = PrivateState(
            replace(work, offered={unit: value.digest for unit, value in units.items()}),
            dict(self.model.progress),
            frozenset(self.model.lacking),
            self.shell.searches(),
        )
        self.shell.after(WRITE_S, self._ended, job, units)

    def _write(self, units: Mapping[Unit, OfferedUnit]) -> None:
        digests = [unit.digest for unit in units.values()]
        for digest in digests:
            self.shell.disk.write(digest)
        self.shell.disk.sync(digests)

    def _submit(self, effect: Submit) -> None:
        offer, private = effect.offer, self.shell.disk.private
        offered = {unit: value.digest for unit, value in offer.units.items()}
        work = private.work if private else None
        if offer.steps and (not work or (work.base_tip, work.offered) != (offer.tip, offered)):
            raise Violation("P6", f"{self.shell.me} offers what its private state lacks: {offered}")
        if offer.is_late:
            self.shell.after(WRITE_S, self.shell.tell, Offered(offer))
        else:
            self.shell.tell(Offered(offer))

    # ------------------------------------------------------------ adoption

    def _are_here(self, manifest: Manifest) -> bool:
        disk = self.shell.disk
        missing = [u for u, entry in manifest.entries.items() if entry.digest not in disk]
        if missing and disk.record.tip.digest == manifest.digest:
            raise Violation("I6", f"{self.shell.me} adopts {short(manifest)} without {missing}")
        return not missing

    def _adopt(self, effect: Adopt) -> bool:
        manifest = effect.manifest
        if not self._are_here(manifest):
            return False
        if not effect.at_start:
            self.shell.adopting(effect.before, manifest)
        taken = self.model.adopt(manifest, effect.decision)
        self.shell.adopted(taken, effect.before, manifest)
        return True
