"""Training and arithmetic of a simulated peer, on symbols that record how they were made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from swarm.emulation.simulator.symbols.crash_disk import Disk, Live, PrivateState, Progress
from swarm.emulation.simulator.symbols.values import (
    Merged,
    Tag,
    Trained,
    Values,
    Violation,
    mean_of,
    require,
    short,
)
from swarm.experts import expert_of_unit, expert_unit
from swarm.protocol.exchange.deltas import Remainders
from swarm.protocol.messages import events
from swarm.protocol.messages.messages import OfferedUnit, ReducedUnit
from swarm.protocol.rounds import Rules
from swarm.protocol.training.adoption import Action, Adoption, ExpertDecision
from swarm.protocol.values.manifest import Digest, Entry, Kind, Manifest, PeerId, Unit
from swarm.protocol.values.work import Stretches


@dataclass
class Past:
    """One peer's offers and missed units since its last tip. They decide which progress stays."""

    me: PeerId
    offered: set[Digest] = field(default_factory=set)
    """Values offered on this tip, in this life of the process or according to the private state."""
    missed: frozenset[Unit] = frozenset()
    """Units with steps that a round has left out."""

    def goes_on(self, unit: Unit, base: Digest, manifest: Manifest, *, follows: bool) -> bool:
        """Whether the progress of a unit stays under a manifest.

        Args:
            unit: a unit that moves by deltas.
            base: the agreed value that the live value is based on.
            manifest: the manifest that is being adopted.
            follows: whether its parent is the manifest that this peer has adopted.
        """
        if expert_of_unit(unit) is None:
            return follows and self._shared_goes_on(manifest)
        return self._expert_goes_on(unit, base, manifest)

    def _shared_goes_on(self, manifest: Manifest) -> bool:
        """Decides for all renewed parts together, since they were trained on the same tokens."""
        if manifest.kind is not Kind.QUORUM:
            return manifest.kind is Kind.MERGE or self.me in manifest.members
        moved = {u: dict(v) for u, v in manifest.sources.items() if expert_of_unit(u) is None}
        counted = {values[self.me] for values in moved.values() if self.me in values}
        return counted <= self.offered if counted else self.missed.isdisjoint(moved)

    def _expert_goes_on(self, unit: Unit, base: Digest, manifest: Manifest) -> bool:
        entry, sources = manifest.entries[unit], dict(manifest.sources.get(unit, ()))
        own = {base, *self.offered}
        if entry.digest in own or (entry.delta is None and entry.base in own):
            return True
        is_mean = bool(sources) and entry.digest not in sources.values()
        if not is_mean or entry.base != base:
            return False
        mine = sources.get(self.me)
        return unit not in self.missed if mine is None else mine in self.offered

    def adopt(
        self,
        manifest: Manifest,
        decision: Adoption,
        bases: Mapping[Unit, Digest],
        *,
        follows: bool,
    ) -> None:
        """Judges the restarts of units, and notes the steps that a round has left out.

        Args:
            manifest: the manifest that is being adopted.
            decision: the decision of the main loop.
            bases: for each live value, the agreed value that it is based on.
            follows: see `goes_on`.

        Raises:
            Violation: E5.
        """
        actions = _actions(manifest, decision)
        for unit, base in bases.items():
            begins_anew = actions[unit] in (Action.RESTART, Action.TAKE_UP)
            is_needless = begins_anew and self.goes_on(unit, base, manifest, follows=follows)
            why = f"{self.me} restarts {unit} at {short(manifest)} without need"
            require(not is_needless, "E5", why)
        self.missed = frozenset(
            unit
            for unit, action in actions.items()
            if action is Action.CARRIED
            or (action in (Action.KEEP, Action.REBASE) and unit in self.missed)
        )


def _actions(manifest: Manifest, decision: Adoption) -> dict[Unit, Action]:
    shared = {
        unit: Action.KEEP if unit in decision.kept_parts else decision.shared
        for unit in manifest.entries
        if expert_of_unit(unit) is None
    }
    experts = decision.experts.items()
    return shared | {expert_unit(expert): choice.action for expert, choice in experts}


@dataclass(frozen=True)
class Step:
    """The decision of `swarm.protocol.training.adoption` on the live value of one unit."""

    action: Action
    entry: Entry
    taken: Digest | None = None
    """The value to subtract: the value before a merge, or this peer's offer."""


class Deltas:
    """The units of one peer that move by deltas."""

    def __init__(self, me: PeerId, disk: Disk, rules: Rules, values: Values) -> None:
        self.me, self.disk, self.rules, self.values = me, disk, rules, values
        self.live: dict[Unit, Live] = {}
        self.named: dict[Unit, OfferedUnit] = {}
        """Offers of the present live values. Each blob is made once and kept."""
        values.lost.update(values.tags_of(me))  # unless they are loaded

    @property
    def pinned(self) -> set[Digest]:
        """Blobs that the disk keeps for these units: bases of live values, and offered blobs."""
        named = self.named.values()
        blobs = {digest for each in named for digest in (each.digest, each.delta) if digest}
        return blobs | {live.base for live in self.live.values()}

    def load(self, private: PrivateState) -> None:
        """Resumes from the private state."""
        self.live, self.named = dict(private.live), dict(private.named)
        for live in self.live.values():
            self.values.lost.difference_update(live.extra)

    # ------------------------------------------------------------ training and offering

    def train(self, unit: Unit) -> None:
        """Takes some steps on a unit. The steps get a tag."""
        base, extra = self.live[unit]
        self._set(unit, base, {**extra, self.values.tag(self.me, unit): 1})

    def offer(self, unit: Unit, base: Digest) -> OfferedUnit:
        """The offer of a live value: the same blob until the value changes."""
        if unit not in self.named:
            self.named[unit] = self._encoded(unit, base)
        offered = self.named[unit]
        require(offered.base == base, "E6", f"{self.me} offers {unit} of {offered.base}")
        return offered

    def _encoded(self, unit: Unit, base: Digest) -> OfferedUnit:
        live = self.live[unit]
        require(live.base == base, "E6", f"{self.me} bases {unit} on {live.base}, not {base}")
        delta = self.values.encoded(unit, base, self.me, live.extra)
        if not self.rules.is_verbatim(unit):
            return OfferedUnit(delta, self.rules.delta_bytes[unit], base)
        value = self.values.moved(unit, base, delta)
        return OfferedUnit(value, self.rules.unit_bytes[unit], base, delta)

    # ------------------------------------------------------------ adopting

    def adopt(self, unit: Unit, step: Step) -> None:
        """Moves a live value to an agreed one, and judges the result."""
        live, entry = self.live.get(unit), step.entry
        if live is None or not self._can(step, live):
            self.begin(unit, entry.digest)
        elif step.action is Action.REBASE and step.taken is not None:
            self._set(unit, entry.digest, self._over(live, step.taken))
        elif step.action is Action.PUBLISHED:
            self._set(unit, entry.digest, self._over(live, entry.digest))
        elif step.action is not Action.KEEP:
            self._set(unit, entry.digest, self.followed(live, step))
        self._judge(unit)

    def _can(self, step: Step, live: Live) -> bool:
        """Whether all blobs are here that the peer needs to continue from the live value."""
        if step.action in (Action.KEEP, Action.PUBLISHED):
            return True
        if step.action is Action.REBASE:
            return step.taken is not None and step.taken in self.disk
        return step.action in (Action.CORRECTED, Action.CARRIED) and live.base in self.disk

    def _over(self, live: Live, value: Digest) -> Counter[Tag]:
        """The tags that a live value has beyond an agreed one."""
        extra = Counter(live.extra)
        extra.update(self.values.contents(live.base))
        extra.subtract(self.values.contents(value))
        return extra

    def followed(self, live: Live, step: Step) -> Counter[Tag]:
        """The live value's tags beyond the former agreed value, without the counted delta's."""
        assert step.entry.base is not None
        extra = self._over(live, step.entry.base)
        if step.action is Action.CORRECTED:
            assert step.taken is not None
            extra.subtract(self.values.moves[step.taken])
        return extra

    def begin(self, unit: Unit, value: Digest) -> None:
        """Sets the live value to the agreed one. Tags beyond the previous agreed value are lost."""
        if unit in self.live:
            self.values.lost.update(self.live[unit].extra)
        self._set(unit, value, {})

    def drop(self, unit: Unit) -> None:
        """Ends this peer's training of a unit."""
        self.values.lost.update(self.live.pop(unit).extra)
        self.named.pop(unit, None)

    def _set(self, unit: Unit, base: Digest, extra: Mapping[Tag, int]) -> None:
        before = self.live.get(unit)
        self.live[unit] = Live(base, {tag: count for tag, count in extra.items() if count})
        if self.live[unit] != before:
            self.named.pop(unit, None)

    def _judge(self, unit: Unit) -> None:
        """Requires that a live value has its own tags beyond the agreed value, each once [E2]."""
        base, extra = self.live[unit]
        agreed = self.values.contents(base)
        wrong = {
            tag: count
            for tag, count in extra.items()
            if count != 1 or tag in agreed or tag.writer != self.me
        }
        require(not wrong, "E2", f"{self.me} has {wrong} over {base} in its {unit}")

    @property
    def shared(self) -> list[Unit]:
        """Parts of the shared tensors among the coded units."""
        return [unit for unit in self.rules.unit_coding if expert_of_unit(unit) is None]


@dataclass(frozen=True)
class Task:
    """The objects that all trainers of a schedule share."""

    rules: Rules
    values: Values


class Model:
    """The counterpart of `swarm.peer.training.live_model`: moves values on command."""

    deltas_type = Deltas

    def __init__(self, me: PeerId, disk: Disk, task: Task) -> None:
        self.me, self.disk, self.task = me, disk, task
        self.progress: dict[int, Progress] = {}
        self.shared: dict[Unit, Digest] = {}
        """Values of the shared tensors after the finished local steps."""
        self.started: dict[Unit, Digest] = {}
        """For parts that were not due: the agreed values from which they were actually trained."""
        self.offered: set[Digest] = set()
        """Offered values of experts, kept until they have been adopted."""
        self.again: set[Digest] = set()
        """Blobs of an offer that was in flight when the peer stopped."""
        self.deltas = self.deltas_type(me, disk, task.rules, task.values)
        self.past = Past(me)

    def load(self, private: PrivateState) -> None:
        """Resumes from the private state."""
        self.progress, offered = dict(private.progress), private.work.offered
        self.shared = {u: d for u, d in offered.items() if expert_of_unit(u) is None}
        self.started = dict(private.started)
        self.offered = set(offered.values())
        self.deltas.load(private)
        self.past = Past(self.me, set(offered.values()), private.missed)

    def decided(self) -> None:
        """Forgets the offers, which are in the tip or never will be."""
        self.offered.clear()
        self.past.offered.clear()

    @property
    def pinned(self) -> set[Digest]:
        """Blobs that the disk keeps for the trainer."""
        return self.offered | self.again | self.deltas.pinned

    # ------------------------------------------------------------ training and offering

    def begin(self, tip: Manifest) -> None:
        """Local steps on a tip begin, maybe the first of this peer."""
        for unit in self.deltas.shared:
            if unit not in self.deltas.live:
                self.deltas.begin(unit, tip.entries[unit].digest)

    def advance(self) -> None:
        """Trains every owned expert and the shared tensors for some steps."""
        self.shared = {}
        for unit in self.deltas.live:
            self.deltas.train(unit)
        for expert, (base, value) in sorted(self.progress.items()):
            if expert_unit(expert) in self.deltas.live:
                continue
            trained = self._trained(expert_unit(expert), self._origin(base, value))
            self.progress[expert] = Progress(base, trained)

    def _origin(self, base: Digest, value: Digest) -> Digest:
        """The agreed value that a value was actually trained from, whatever its base says."""
        made = self.task.values[value]
        return made.base if value != base and isinstance(made, Trained) else base

    def _trained(self, unit: Unit, base: Digest) -> Digest:
        return self.task.values.trained(unit, base, self.me)

    def values(self, bases: Mapping[Unit, Digest], read: Stretches) -> dict[Unit, OfferedUnit]:
        """Present values of units. Shared values were trained on the samples `read`."""
        units = self._values(bases, read)
        self.past.offered.update(offered.digest for offered in units.values())
        return units

    def _values(self, bases: Mapping[Unit, Digest], read: Stretches) -> dict[Unit, OfferedUnit]:
        units = {}
        for unit, base in bases.items():
            expert = expert_of_unit(unit)
            if unit in self.deltas.live:
                units[unit] = self.deltas.offer(unit, base)
                self.task.values.reads.setdefault(units[unit].digest, read)
                continue
            if expert is not None:
                value = self.progress[expert].value
                self.offered.add(value)
            elif unit in self.shared:
                value = self.shared[unit]
            else:
                value = self.shared[unit] = self._trained(unit, self.started.get(unit, base))
                self.task.values.reads[value] = read
            units[unit] = OfferedUnit(value, self.task.rules.unit_bytes[unit], base)
        return units

    # ------------------------------------------------------------ adopting

    def adopt(self, manifest: Manifest, decision: Adoption, *, follows: bool) -> list[int]:
        """Moves to an agreed state. Returns newly owned experts that others have trained.

        `follows`: whether the manifest's parent is the manifest that the model has adopted.
        """
        bases = {unit: live.base for unit, live in self.deltas.live.items()}
        self.past.adopt(manifest, decision, bases, follows=follows)
        if decision.shared is not Action.KEEP:
            self._restart(manifest, decision.kept_parts)
        for unit in self.deltas.shared:
            action = Action.KEEP if unit in decision.kept_parts else decision.shared
            step = Step(action, manifest.entries[unit], decision.shared_from.get(unit))
            self.deltas.adopt(unit, step)
        for expert, choice in decision.experts.items():
            self._follow(expert, choice, manifest)
        owned = {expert for expert, owners in manifest.owners.items() if self.me in owners}
        if self.progress.keys() != owned:
            raise Violation("N3", f"{self.me} trains {sorted(self.progress)} of {owned}")
        return [
            expert
            for expert, choice in decision.experts.items()
            if choice.action is Action.TAKE_UP and manifest.entries[expert_unit(expert)].version > 0
        ]

    def _restart(self, manifest: Manifest, kept: frozenset[Unit]) -> None:
        self.shared = {}
        if self.task.rules.shared_every > 1:
            for unit in self.task.rules.shared_units:
                agreed = manifest.entries[unit].digest
                if unit in kept and unit in self.started:
                    continue
                if self.started.get(unit) == agreed and unit not in manifest.sources:
                    raise Violation("I27", f"{self.me} drops its progress on {unit}")
                self.started[unit] = agreed

    def _follow(self, expert: int, choice: ExpertDecision, manifest: Manifest) -> None:
        unit = expert_unit(expert)
        if unit in self.task.rules.unit_coding:
            self._follow_by_delta(expert, choice, manifest.entries[unit])
        elif choice.base is None:
            del self.progress[expert]
        elif choice.action in (Action.REBASE, Action.AVERAGED):
            self._rebase(expert, choice)
        elif choice.action is Action.PUBLISHED and self.progress[expert].value != choice.base:
            # Training continued after that offer, so the present value extends the agreed one.
            now = self._trained(expert_unit(expert), choice.base)
            self.progress[expert] = Progress(choice.base, now)
        elif choice.action is Action.KEEP:
            self.progress[expert] = Progress(choice.base, self.progress[expert].value)
        else:
            self.progress[expert] = Progress(choice.base, self._agreed(manifest, expert))

    def _follow_by_delta(self, expert: int, choice: ExpertDecision, entry: Entry) -> None:
        if choice.base is None:
            del self.progress[expert]
            self.deltas.drop(expert_unit(expert))
            return
        self.progress[expert] = Progress(choice.base, choice.base)
        self.deltas.adopt(expert_unit(expert), Step(choice.action, entry, choice.rebase_from))

    def _agreed(self, manifest: Manifest, expert: int) -> Digest:
        return manifest.entries[expert_unit(expert)].digest

    def _rebase(self, expert: int, choice: ExpertDecision) -> None:
        assert choice.base is not None and choice.rebase_from is not None
        base, value = self.progress[expert]
        # Local progress is the present value minus the value before the merge. There is none if
        # these are equal. After an old merge the value before may be gone: progress is dropped.
        if value == choice.rebase_from or not self._has_before(expert, choice.rebase_from):
            self.progress[expert] = Progress(choice.base, choice.base)
            return
        # The sum extends the merged value only if the base or an offer of this peer was merged.
        extends = choice.base if choice.rebase_from in (base, *self.offered) else base
        self.progress[expert] = Progress(choice.base, self._trained(expert_unit(expert), extends))

    def _has_before(self, expert: int, before: Digest) -> bool:
        """Whether an expert's value before a merge is here [GC] (merge rebase).

        A value that the previous tip names must be here, unless this peer came from another tip.
        """
        if before in self.disk:
            return True
        parent = self.disk.record.parent
        is_known = parent and parent.digest == self.disk.came_from
        if parent and is_known and parent.entries[expert_unit(expert)].digest == before:
            raise Violation("I23", f"{self.me} cannot rebase: {before} is missing")
        return False


def average(
    me: PeerId, disk: Disk, task: Task, effect: events.Reduce, asked_at: Digest
) -> events.UnitReduced | None:
    """Averages and stores a unit. None if the round is over and its offers were dropped."""
    missing = [digest for _, digest in effect.inputs if digest not in disk]
    if missing:
        if disk.record.tip.digest != asked_at:
            return None
        raise Violation("I8", f"{me} cannot average {effect.unit}: {missing} not here")
    mean = mean_of(effect.unit, [digest for _, digest in effect.inputs], effect.weights)
    digest = task.values.digest_of(mean)
    disk.write(digest)
    size = task.rules.unit_bytes[effect.unit]
    return events.UnitReduced(effect.roster_id, effect.unit, ReducedUnit(digest, size))


@dataclass(frozen=True)
class Averaging:
    """Makes means of deltas. Each mean is again a delta."""

    remainders: Remainders[Mapping[Tag, int]]

    def __call__(
        self, me: PeerId, disk: Disk, task: Task, effect: events.Reduce, asked_at: Digest
    ) -> events.UnitReduced | None:
        """Like `average`, for deltas and the remainders of earlier means."""
        assert effect.base is not None
        unit, values = effect.unit, task.values
        missing = [d for d in (effect.base, *(d for _, d in effect.inputs)) if d not in disk]
        if missing:
            if disk.record.tip.digest != asked_at:
                return None
            raise Violation("I8", f"{me} cannot average {unit}: {missing} not here")
        total = Counter(self.remainders.of(unit) or {})
        for _, digest in effect.inputs:
            total.update(values.moves[digest])
        delta = effect.inputs[0][1]
        if len(effect.inputs) > 1 or self.remainders.of(unit):
            delta = values.encoded(unit, effect.base, me, total)
        total.subtract(values.moves[delta])
        left = {tag: count for tag, count in total.items() if count}
        self.found(asked_at, unit, delta, left)
        value = task.values.moved(unit, effect.base, delta)
        self.store(disk, (value, delta))
        size = task.rules.unit_bytes[unit]
        return events.UnitReduced(effect.roster_id, unit, ReducedUnit(value, size, delta))

    def found(self, tip: Digest, unit: Unit, delta: Digest, left: Mapping[Tag, int]) -> None:
        """Remembers the remainder that counts if this delta becomes agreed."""
        self.remainders.found(tip, unit, delta, left)

    def store(self, disk: Disk, digests: Collection[Digest]) -> None:
        """Makes value and delta durable before they are reported."""
        for digest in digests:
            disk.write(digest)
        disk.sync(digests)


def rebuild(
    disk: Disk, task: Task, effect: events.Rebuild, *, is_odd: bool
) -> events.Stored | events.NotMade:
    """Makes a value from a delta and stores it. Odd arithmetic gives other bits [W6]."""
    made = task.values.moved(effect.unit, effect.base, effect.delta)
    if is_odd or made != effect.digest or effect.base not in disk or effect.delta not in disk:
        return events.NotMade(effect.digest, "other bits")
    disk.write(made)
    return events.Stored(made)


def merge(
    me: PeerId, disk: Disk, task: Task, tip: Manifest, variant: int
) -> events.MergeComputed | None:
    """Merges and stores a tip's experts. None if the peer has left the tip and lacks values."""
    units = [expert_unit(expert) for expert in range(task.rules.num_experts)]
    inputs = tuple(tip.entries[unit].digest for unit in units)
    if any(digest not in disk for digest in inputs):
        if disk.record.tip.digest != tip.digest:
            return None
        raise Violation("I23", f"{me} lacks values of its tip {short(tip)}")
    results = {}
    for expert, unit in enumerate(units):
        digest = task.values.digest_of(Merged(inputs, expert, variant))
        disk.write(digest)
        results[unit] = ReducedUnit(digest, task.rules.unit_bytes[unit])
    return events.MergeComputed(tip.digest, results)
