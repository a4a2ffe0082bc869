"""What a simulated peer trains of units that move by deltas: sets of tags, one for each training.

An agreed value is the tags that deltas have brought into it, a live one what it was based on and
the peer's own tags since. A delta brings some of these, by lot: what its coding loses stays. Tags
are counted, so that what comes twice, or is taken away where it never was, shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from swarm.emulation.simulator.disk import Disk, Live, PrivateState
from swarm.emulation.simulator.values import Tag, Values
from swarm.emulation.simulator.violation import require
from swarm.experts import expert_of_unit
from swarm.protocol.adoption import Action
from swarm.protocol.manifest import Digest, Entry, PeerId, Unit
from swarm.protocol.messages import OfferedUnit
from swarm.protocol.rounds import Rules


@dataclass(frozen=True)
class Step:
    """What becomes of the live value of one unit, as `swarm.protocol.adoption` decided."""

    action: Action
    entry: Entry
    taken: Digest | None = None
    """What to subtract: the value before a merge, or what this peer offered."""


class Deltas:
    """The units of one peer that move by deltas."""

    def __init__(self, me: PeerId, disk: Disk, rules: Rules, values: Values) -> None:
        self.me, self.disk, self.rules, self.values = me, disk, rules, values
        self.live: dict[Unit, Live] = {}
        self.named: dict[Unit, OfferedUnit] = {}
        """What was offered of the present live values: a blob is made once, and kept."""
        values.lost.update(values.tags_of(me))  # unless they are loaded

    @property
    def pinned(self) -> set[Digest]:
        """Blobs that the disk keeps for it: what it is based on, and what it has offered."""
        named = self.named.values()
        blobs = {digest for each in named for digest in (each.digest, each.delta) if digest}
        return blobs | {live.base for live in self.live.values()}

    def load(self, private: PrivateState) -> None:
        """Goes on from the private state."""
        self.live, self.named = dict(private.live), dict(private.named)
        for live in self.live.values():
            self.values.lost.difference_update(live.extra)

    # ------------------------------------------------------------ training and offering

    def train(self, unit: Unit) -> None:
        """Takes some steps, which get a tag."""
        base, extra = self.live[unit]
        self._set(unit, base, {**extra, self.values.tag(self.me, unit): 1})

    def offer(self, unit: Unit, base: Digest) -> OfferedUnit:
        """What is offered of a live value: the same blob until that changes."""
        if unit not in self.named:
            self.named[unit] = self._encoded(unit, base)
        offered = self.named[unit]
        require(offered.base == base, "W8", f"{self.me} offers {unit} of {offered.base}")
        return offered

    def _encoded(self, unit: Unit, base: Digest) -> OfferedUnit:
        live = self.live[unit]
        require(live.base == base, "W8", f"{self.me} bases {unit} on {live.base}, not {base}")
        delta = self.values.encoded(unit, base, self.me, live.extra)
        if not self.rules.is_verbatim(unit):
            return OfferedUnit(delta, self.rules.delta_bytes[unit], base)
        value = self.values.moved(unit, base, delta)
        return OfferedUnit(value, self.rules.unit_bytes[unit], base, delta)

    # ------------------------------------------------------------ adopting

    def adopt(self, unit: Unit, step: Step) -> None:
        """Moves a live value to an agreed one, and judges what it is then."""
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
        """Whether the blobs are here that it takes to go on from the live value."""
        if step.action in (Action.KEEP, Action.PUBLISHED):
            return True
        if step.action is Action.REBASE:
            return step.taken is not None and step.taken in self.disk
        return step.action in (Action.CORRECTED, Action.CARRIED) and live.base in self.disk

    def _over(self, live: Live, value: Digest) -> Counter[Tag]:
        """What a live value has over an agreed one."""
        extra = Counter(live.extra)
        extra.update(self.values.contents(live.base))
        extra.subtract(self.values.contents(value))
        return extra

    def followed(self, live: Live, step: Step) -> Counter[Tag]:
        """What x + (v' - v) - c has over v' [W8]."""
        assert step.entry.base is not None
        extra = self._over(live, step.entry.base)
        if step.action is Action.CORRECTED:
            assert step.taken is not None
            extra.subtract(self.values.moves[step.taken])
        return extra

    def begin(self, unit: Unit, value: Digest) -> None:
        """The live value is the agreed one; what it had over the one before is lost."""
        if unit in self.live:
            self.values.lost.update(self.live[unit].extra)
        self._set(unit, value, {})

    def drop(self, unit: Unit) -> None:
        """The unit is no longer trained here."""
        self.values.lost.update(self.live.pop(unit).extra)
        self.named.pop(unit, None)

    def _set(self, unit: Unit, base: Digest, extra: Mapping[Tag, int]) -> None:
        before = self.live.get(unit)
        self.live[unit] = Live(base, {tag: count for tag, count in extra.items() if count})
        if self.live[unit] != before:
            self.named.pop(unit, None)

    def _judge(self, unit: Unit) -> None:
        """A live value has its own tags over the agreed one, each once [E2]."""
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
