"""What must hold of units that move by deltas: E1 to E5; swarm/README.md, 3.8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from swarm.emulation.simulator.disk import Disk
from swarm.emulation.simulator.values import Maker, Moved, Tag, Values
from swarm.emulation.simulator.violation import require, short
from swarm.protocol.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.messages import Offer, Reduced
from swarm.protocol.rounds import Rules


class DeltaInvariants:
    """Judges what concerns deltas alone."""

    def __init__(self, rules: Rules, values: Values, liar: PeerId | None) -> None:
        self.rules, self.values = rules, values
        self._offered: dict[tuple[PeerId, Digest, Unit], Digest] = {}
        self._voted: dict[PeerId, list[Manifest]] = {}
        self.liar = liar
        """A peer whose values and deltas are not judged."""
        self.forgetful: set[PeerId] = set()
        """Peers that have lost a disk or a record."""

    def offered(self, peer: PeerId, offer: Offer) -> None:
        """A peer's machine has got this offer."""
        if offer.is_late or peer in self.forgetful or peer == self.liar:
            return
        for unit in offer.units.keys() & self.rules.unit_coding.keys():
            digest = offer.units[unit].digest
            first = self._offered.setdefault((peer, offer.tip, unit), digest)
            why = f"{peer} offers {digest} of {unit} after it offered {first}"
            require(first == digest, "E3", why)

    def accepted(self, peer: PeerId, disk: Disk, manifest: Manifest) -> None:
        """A peer has voted for a manifest."""
        self._voted.setdefault(peer, []).append(manifest)
        self._require_durable(peer, disk, manifest.deltas, short(manifest))

    def left(self, peer: PeerId) -> None:
        """A peer has another generation: what it voted for before is others' to serve."""
        self._voted.pop(peer, None)

    def kept(self, peer: PeerId, disk: Disk) -> None:
        """A peer's disk was cleared of what nothing needs."""
        if peer in self.forgetful or not self.rules.unit_coding:
            return
        tips = {each.tip.digest for each in (disk.record, disk.earlier) if each}
        for manifest in self._voted.get(peer, ()):
            if manifest.digest in tips:
                self._require_durable(peer, disk, manifest.deltas, short(manifest))

    def reduced(self, peer: PeerId, disk: Disk, reduced: Reduced) -> None:
        """A peer reports means."""
        for unit, result in reduced.results.items():
            if result.delta is not None:
                self._require_durable(peer, disk, (result.digest, result.delta), unit)

    def _require_durable(
        self, peer: PeerId, disk: Disk, digests: Iterable[Digest], what: str
    ) -> None:
        missing = [digest for digest in digests if digest not in disk.durable]
        require(not missing, "E4", f"{peer} lacks {missing} of {what}")

    def check_move(self, unit: Unit, manifest: Manifest, parent: Manifest) -> None:
        """Judges how a round moved a unit."""
        entry, before = manifest.entries[unit], parent.entries[unit].digest
        is_judged = self.liar is None or entry.source != self.liar
        made = Moved(unit, before, entry.delta or "")
        name, sources = short(manifest), manifest.sources[unit]
        require(
            entry.delta is not None
            and (entry.base, entry.coding) == (before, self.rules.unit_coding[unit])
            and (not is_judged or self.values.get(entry.digest) == made),
            "E1",
            f"{name}: {unit} is {entry}, not made of {before}",
        )
        for peer, digest in sources:
            if peer == self.liar:
                continue
            delta = entry.delta if self.rules.is_verbatim(unit) else digest
            is_verbatim = not self.rules.is_verbatim(unit) or digest == entry.digest
            maker = self.values.makers.get(delta or "")
            require(
                maker == Maker(unit, before, peer) and is_verbatim,
                "E1",
                f"{name}: {unit} from {sources}, the delta {delta} is {maker}",
            )
        twice = [tag for tag, count in self.values.contents(entry.digest).items() if count != 1]
        require(not twice, "E2", f"{name}: {unit} has {twice} twice or less than once")

    def left_over(self, peer: PeerId, unit: Unit, left: Mapping[Tag, int], tip: Manifest) -> None:
        """Judges what a reducer adds to its next mean after this tip."""
        agreed = self.values.contents(tip.entries[unit].digest)
        wrong = {tag: count for tag, count in left.items() if count != 1 or tag in agreed}
        require(not wrong, "E2", f"{peer} has {wrong} left over of {unit} after {short(tip)}")

    def all_are_somewhere(
        self, tip: Manifest, forked: Iterable[Manifest], present: Iterable[Iterable[Tag]]
    ) -> None:
        """Judges the end: nothing has vanished.

        Args:
            tip: the newest; what a liar's means have swallowed is nobody's loss to judge.
            forked: what other generations agreed on; their work is lost with them.
            present: what is live, and what is left over.
        """
        if self.liar is not None:
            return
        units = self.rules.unit_coding
        values = (each.entries[unit].digest for each in (tip, *forked) for unit in units)
        agreed = (self.values.contents(digest) for digest in values)
        found = {*chain.from_iterable(agreed), *chain.from_iterable(present)}
        gone = sorted(self.values.tags - found - self.values.lost - self.values.dropped)
        require(not gone, "E5", f"{gone} are neither agreed nor live nor counted lost")
