"""Whether a unit that moves by deltas may begin anew: W8, M8, S1 and S2 from outside [E5]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.emulation.simulator.violation import require, short
from swarm.experts import expert_of_unit, expert_unit
from swarm.protocol.adoption import Action, Adoption
from swarm.protocol.manifest import Digest, Kind, Manifest, PeerId, Unit


@dataclass
class Past:
    """What one peer has done since its last tip, of which it depends what goes on."""

    me: PeerId
    offered: set[Digest] = field(default_factory=set)
    """On that tip, in this life of the process or by the private state."""
    missed: frozenset[Unit] = frozenset()
    """Units with steps that a round has left out."""

    def goes_on(self, unit: Unit, base: Digest, manifest: Manifest, *, follows: bool) -> bool:
        """Whether what is trained of a unit goes on under a manifest.

        Args:
            unit: that moves by deltas.
            base: the agreed value that the live one is based on.
            manifest: that is being adopted.
            follows: whether its parent is the manifest that this peer is at.
        """
        if expert_of_unit(unit) is None:
            return follows and self._shared_goes_on(manifest)
        return self._expert_goes_on(unit, base, manifest)

    def _shared_goes_on(self, manifest: Manifest) -> bool:
        """All parts that a round has renewed fare alike: they were trained on the same tokens."""
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
        """Judges what begins anew, and knows from now on which steps a round has left out.

        Args:
            manifest: that is being adopted.
            decision: what the main loop makes of it.
            bases: of the live values: the agreed ones that they are based on.
            follows: see `goes_on`.

        Raises:
            Violation: E5.
        """
        actions = _actions(manifest, decision)
        for unit, base in bases.items():
            begins_anew = actions[unit] in (Action.RESTART, Action.TAKE_UP)
            is_needless = begins_anew and self.goes_on(unit, base, manifest, follows=follows)
            why = f"{self.me} begins {unit} anew at {short(manifest)} without need"
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
