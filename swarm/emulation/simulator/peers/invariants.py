"""Invariants that hold under all faults: I1, I2, I4, I6 to I15, and for deltas E1 to E5.

Checked at every write of a record and at every applied manifest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from swarm.emulation.simulator.peers import member_invariants
from swarm.emulation.simulator.peers.participant import Setup
from swarm.emulation.simulator.symbols.crash_disk import Disk
from swarm.emulation.simulator.symbols.text_ledger import Ledger
from swarm.emulation.simulator.symbols.values import (
    Maker,
    Merged,
    Moved,
    Tag,
    Trained,
    Values,
    Violation,
    mean_of,
    require,
    short,
)
from swarm.experts import expert_of_unit, expert_unit
from swarm.protocol.chain.trust import reform_electors
from swarm.protocol.messages.events import Record
from swarm.protocol.messages.messages import Offer, Reduced
from swarm.protocol.rounds import Rules
from swarm.protocol.values.manifest import FOUNDING_GENERATION, Digest, Kind, Manifest, PeerId, Unit
from swarm.protocol.values.schedule import merge_due, merged_until
from swarm.protocol.values.work import weights


class DeltaInvariants:
    """Judges the invariants of deltas."""

    def __init__(self, rules: Rules, values: Values, liar: PeerId | None) -> None:
        self.rules, self.values = rules, values
        self._offered: dict[tuple[PeerId, Digest, Unit], Digest] = {}
        self._voted: dict[PeerId, list[Manifest]] = {}
        self.liar = liar
        """The liar, whose values and deltas are not judged."""
        self.forgetful: set[PeerId] = set()
        """Peers that have lost a disk or a record."""

    def offered(self, peer: PeerId, offer: Offer) -> None:
        """Judges an offer that a peer's machine was given."""
        if offer.is_late or peer in self.forgetful or peer == self.liar:
            return
        for unit in offer.units.keys() & self.rules.unit_coding.keys():
            digest = offer.units[unit].digest
            first = self._offered.setdefault((peer, offer.tip, unit), digest)
            why = f"{peer} offers {digest} of {unit} after it offered {first}"
            require(first == digest, "E3", why)

    def accepted(self, peer: PeerId, disk: Disk, manifest: Manifest) -> None:
        """Judges a peer's vote for a manifest."""
        self._voted.setdefault(peer, []).append(manifest)
        self._require_durable(peer, disk, manifest.deltas, short(manifest))

    def left(self, peer: PeerId) -> None:
        """A peer has left its generation, so others have to serve the values that it voted for."""
        self._voted.pop(peer, None)

    def kept(self, peer: PeerId, disk: Disk) -> None:
        """Judges a peer's disk after unneeded blobs were deleted."""
        if peer in self.forgetful or not self.rules.unit_coding:
            return
        tips = {each.tip.digest for each in (disk.record, disk.earlier) if each}
        for manifest in self._voted.get(peer, ()):
            if manifest.digest in tips:
                self._require_durable(peer, disk, manifest.deltas, short(manifest))

    def reduced(self, peer: PeerId, disk: Disk, reduced: Reduced) -> None:
        """Judges means that a peer reports."""
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
        """Judges the remainder that a reducer adds to its next mean after this tip."""
        agreed = self.values.contents(tip.entries[unit].digest)
        wrong = {tag: count for tag, count in left.items() if count != 1 or tag in agreed}
        require(not wrong, "E2", f"{peer} has {wrong} left over of {unit} after {short(tip)}")

    def all_are_somewhere(
        self, tip: Manifest, forked: Iterable[Manifest], present: Iterable[Iterable[Tag]]
    ) -> None:
        """Judges the end of a schedule: nothing has vanished.

        Args:
            tip: the newest tip. Nothing is judged in a schedule with a liar, whose means may lose
                steps.
            forked: manifests of other generations, whose work is lost.
            present: tags of live values and of remainders.
        """
        if self.liar is not None:
            return
        units = self.rules.unit_coding
        values = (each.entries[unit].digest for each in (tip, *forked) for unit in units)
        agreed = (self.values.contents(digest) for digest in values)
        found = {*chain.from_iterable(agreed), *chain.from_iterable(present)}
        gone = sorted(self.values.tags - found - self.values.lost - self.values.dropped)
        require(not gone, "E5", f"{gone} are neither agreed nor live nor counted lost")


DECIDED = (Kind.QUORUM, Kind.MERGE)


class Invariants:
    """Judges every write of every peer. Remembers all manifests."""

    def __init__(self, setup: Setup, values: Values, founding: Manifest) -> None:
        rules = self.rules = setup.rules
        self.values = values
        self.manifests: dict[Digest, Manifest] = {founding.digest: founding}
        self.first_seen_s: dict[Digest, float] = {founding.digest: 0.0}
        self._ledger = Ledger(rules, values, founding)
        self.deltas = DeltaInvariants(rules, values, setup.liar)
        self._applied: dict[tuple[str, int], Digest] = {}
        self._acceptors: dict[Digest, set[PeerId]] = {}
        self._forgiven: dict[PeerId, set[Digest]] = {}
        self._offered: dict[tuple[PeerId, Digest], list[Offer]] = {}
        self.setup = setup
        self.given = set(setup.credentials.items())
        """Credentials that peers have been given so far."""
        self.liar = setup.liar
        """The liar, whose word is not judged, and whose disk counts as holding every manifest."""

    # ------------------------------------------------------------ ancestry

    def descends(self, manifest: Manifest, ancestor: Manifest) -> bool:
        """Whether the ancestor is the manifest itself or in the manifest's past."""
        current: Manifest | None = manifest
        while current is not None and current.height >= ancestor.height:
            if current.digest == ancestor.digest:
                return True
            current = self.manifests.get(current.parent or "")
        return False

    def rounds_since(self, manifest: Manifest, time_s: float) -> int:
        """Training rounds in the manifest's past that were first seen at or after this time."""
        rounds = 0
        current: Manifest | None = manifest
        while current is not None and self.first_seen_s[current.digest] >= time_s:
            rounds += current.kind is Kind.QUORUM
            current = self.manifests.get(current.parent or "")
        return rounds

    # ------------------------------------------------------------ writes

    def offered(self, peer: PeerId, offer: Offer) -> None:
        """Notes an offer that a peer's machine was given, for the convener."""
        self._offered.setdefault((peer, offer.tip), []).append(offer)
        self.deltas.offered(peer, offer)

    def persisted(
        self, peer: PeerId, before: Record, disks: Mapping[PeerId, Disk], now: float
    ) -> None:
        """Judges a record that has just been written."""
        disk = disks[peer]
        record = disk.record
        accepted = record.accepted
        if accepted is not None and accepted is not before.accepted:
            self._see(accepted.manifest, now)
            self._require_blobs(peer, disk, accepted.manifest, "I2", "accepted")
            self.deltas.accepted(peer, disk, accepted.manifest)
            self._acceptors.setdefault(accepted.manifest.digest, set()).add(peer)
        if record.tip.digest == before.tip.digest:
            return
        tip = record.tip
        if tip.generation != before.tip.generation:
            self.deltas.left(peer)
        self._see(tip, now)
        self._require_blobs(peer, disk, tip, "I6", "made its tip")
        place = (tip.generation, tip.height)
        is_first = place not in self._applied
        first = self._applied.setdefault(place, tip.digest)
        if first != tip.digest:
            others = short(self.manifests[first])
            raise Violation("I1", f"{peer} applied {short(tip)}, others {others}")
        self._require_rise(peer, before.tip, tip)
        if is_first and tip.kind in DECIDED:
            self._require_quorum(tip, disks)

    def lost_disk(self, peer: PeerId) -> None:
        """Counts this peer's earlier votes as durable, since the peer did write them [I2]."""
        voted = {digest for digest, peers in self._acceptors.items() if peer in peers}
        self._forgiven.setdefault(peer, set()).update(voted)
        self.deltas.forgetful.add(peer)

    def reformed(
        self, peer: PeerId, old: Manifest, new: Manifest, heard: Collection[PeerId]
    ) -> None:
        """Judges a tip in another generation, by the peers heard within the last T_reform."""
        length = len(old.lineage)
        leaves_mine = len(new.lineage) > length and new.lineage[:length] == old.lineage
        require(
            not (leaves_mine and old.is_quorum([peer, *heard])),
            "I10",
            f"{peer} left {short(old)} for {short(new)} while it heard {sorted(heard)} "
            f"of {sorted(old.voters)}",
        )

    def _see(self, manifest: Manifest, now: float) -> None:
        if manifest.digest in self.manifests:
            return
        parent = self.manifests.get(manifest.parent or "")
        require(parent is not None, "I1", f"{short(manifest)} has no known parent")
        assert parent is not None
        self.manifests[manifest.digest] = manifest
        self.first_seen_s[manifest.digest] = now
        self._check_owners(manifest, parent)
        if manifest.kind is Kind.REFORM:
            self._check_reform(manifest, parent)
            self._book_keeping(manifest, parent)
            return
        require(
            manifest.generation == parent.generation and manifest.lineage == parent.lineage,
            "I1",
            f"{short(manifest)} is not of its parent's generation",
        )
        require(manifest.height == parent.height + 1, "I1", f"{short(manifest)} jumps in height")
        require(
            (manifest.kind is Kind.MERGE) == merge_due(parent, self.rules.merging),
            "I11",
            f"{short(manifest)} after {short(parent)} at step {parent.step}, "
            f"merged {parent.merged}",
        )
        if manifest.kind is Kind.MERGE:
            self._check_merge(manifest, parent)
        else:
            self._check_round(manifest, parent)
        self._book_keeping(manifest, parent)

    def _book_keeping(self, manifest: Manifest, parent: Manifest) -> None:
        problem = self._ledger.enter(manifest, parent, self.liar)
        require(problem is None, "I16", f"{short(manifest)}: {problem}")

    def _require_blobs(
        self, peer: PeerId, disk: Disk, manifest: Manifest, invariant: str, what: str
    ) -> None:
        missing = [e.digest for e in manifest.entries.values() if e.digest not in disk.durable]
        if missing:
            why = f"{peer} {what} {short(manifest)}, blobs not durable: {missing}"
            raise Violation(invariant, why)

    def _require_rise(self, peer: PeerId, old: Manifest, new: Manifest) -> None:
        if new.code <= old.code:
            raise Violation("I9", f"{peer} went from {short(old)} down to {short(new)}")
        if old.generation == FOUNDING_GENERATION and not self.descends(new, old):
            why = f"{peer} rolled {short(old)} of the founding generation back for {short(new)}"
            raise Violation("I9", why)

    def _require_quorum(self, manifest: Manifest, disks: Mapping[PeerId, Disk]) -> None:
        parent = self.manifests[manifest.parent or ""]
        holders = [
            peer
            for peer in sorted(parent.voters)
            if peer in disks and self._holds(peer, disks[peer], manifest)
        ]
        require(
            parent.is_quorum(holders),
            "I2",
            f"{short(manifest)} is durable on {holders} only, of {sorted(parent.voters)}",
        )

    def _holds(self, peer: PeerId, disk: Disk, manifest: Manifest) -> bool:
        """Whether the peer has the manifest durably, or lost it with its disk or its generation."""
        if peer == self.liar:
            return True
        if manifest.digest in self._forgiven.get(peer, ()):
            return True
        record = disk.record
        if record.tip.generation != manifest.generation:
            return peer in self._acceptors.get(manifest.digest, ())
        if self.descends(record.tip, manifest):
            return True
        return (
            record.accepted is not None
            and record.accepted.manifest.digest == manifest.digest
            and all(entry.digest in disk.durable for entry in manifest.entries.values())
        )

    # ------------------------------------------------------------ contents

    def _check_owners(self, manifest: Manifest, parent: Manifest) -> None:
        """Requires as many owners as there is room for, and no owner over its room [I4, I13]."""
        wanted = min(self.rules.owners_per_expert, len(manifest.members))
        load = Counter(peer for owners in manifest.owners.values() for peer in owners)
        rooms = {peer: member.room for peer, member in manifest.members.items()}
        free = {peer for peer, room in rooms.items() if load[peer] < room}
        for expert in range(self.rules.num_experts):
            owners = manifest.owners.get(expert, ())
            is_known = len(set(owners)) == len(owners) <= wanted and rooms.keys() >= set(owners)
            if not is_known or (len(owners) < wanted and free - set(owners)):
                why = f"expert {expert} is owned by {owners} of {rooms}"
                raise Violation("I4", f"{short(manifest)}: {why}")
            for peer in set(owners) - set(parent.owners[expert]):
                why = f"{peer} owns {load[peer]} experts, expert {expert} since now"
                require(load[peer] <= rooms[peer], "I13", f"{short(manifest)}: {why} of {rooms}")

    def _check_reform(self, manifest: Manifest, parent: Manifest) -> None:
        survivors = len(reform_electors(parent.head) & manifest.voters)
        place = (manifest.height, (survivors, manifest.generation))
        same = ("height", "round", "step", "tokens", "merged", "entries", "founding")
        for name in same:
            require(
                getattr(manifest, name) == getattr(parent, name),
                "I6",
                f"{short(manifest)} changes {name} of {short(parent)}",
            )
        lineage = (*parent.lineage, place)
        require(manifest.lineage == lineage, "I1", f"lineage of {short(manifest)}")

    def _check_merge(self, manifest: Manifest, parent: Manifest) -> None:
        counted = ("round", "step", "tokens", "work", "cursor", "holes", "dealt")
        same = (*counted, "members", "contributors", "owners", "order")
        for name in same:
            require(
                getattr(manifest, name) == getattr(parent, name),
                "I11",
                f"{short(manifest)} changes {name} of {short(parent)}",
            )
        require(
            manifest.merged == merged_until(parent.step, self.rules.merging)
            and not manifest.sources,
            "I11",
            f"{short(manifest)} sets merged to {manifest.merged}, sources {manifest.sources}",
        )
        experts = tuple(
            parent.entries[expert_unit(expert)].digest for expert in range(self.rules.num_experts)
        )
        for unit, entry in manifest.entries.items():
            before = parent.entries[unit]
            expert = expert_of_unit(unit)
            if expert is None:
                require(entry == before, "I11", f"{short(manifest)} changes {unit}")
                continue
            value = self.values.get(entry.digest)
            require(
                isinstance(value, Merged) and (value.experts, value.expert) == (experts, expert),
                "I11",
                f"{unit} of {short(manifest)} is {value}, not merged from {experts}",
            )
            require(
                (entry.base, entry.version) == (before.digest, before.version),
                "I11",
                f"{unit} of {short(manifest)}: base or version of {entry}",
            )

    def _check_round(self, manifest: Manifest, parent: Manifest) -> None:
        name = short(manifest)
        require(
            (manifest.round, manifest.merged) == (parent.round + 1, parent.merged)
            and manifest.step > parent.step - bool(self.rules.round_seconds)
            and manifest.tokens > parent.tokens,
            "I11",
            f"{name}: round, step, tokens or merged do not follow {short(parent)}",
        )
        require(
            len(manifest.contributors) > 0
            and all(peer in parent.members for peer in manifest.contributors),
            "I8",
            f"{name}: contributors {manifest.contributors} of {sorted(parent.members)}",
        )
        self._check_members(manifest, parent)
        self._check_offers(manifest, parent)
        member_invariants.check_votes(manifest, parent)
        member_invariants.check_trainees(manifest, parent, self.setup.network_of)
        member_invariants.check_vouched(manifest, parent, self.given)
        member_invariants.check_claims(manifest, parent, self.rules, self.values)
        due = self.rules.schedule.due(parent)
        member_invariants.check_brought(manifest, parent, due, self.liar)
        for unit, entry in manifest.entries.items():
            sources = manifest.sources.get(unit, ())
            if not sources:
                require(
                    entry == parent.entries[unit]
                    and not (unit in due and expert_of_unit(unit) is None),
                    "I8",
                    f"{name}: {unit} changed without sources, or lacks them",
                )
                continue
            require(unit in due, "I17", f"{name}: {unit} was not due")
            require(entry.version == manifest.round, "I8", f"{name}: version of {unit}")
            self._check_sources(name, unit, parent, tuple(peer for peer, _ in sources), manifest)
            if unit in self.rules.unit_coding:
                self.deltas.check_move(unit, manifest, parent)
            else:
                self._check_value(name, unit, manifest, parent)

    def _check_members(self, manifest: Manifest, parent: Manifest) -> None:
        """Requires real peers as members, with the capacity and room that they declared [I12]."""
        for peer, member in manifest.members.items():
            before = parent.members.get(peer)
            named = self.setup.characters.get(peer)
            capacity, rooms = (named.capacity, named.rooms) if named else (None, ())
            is_said = member.capacity in (capacity, before and before.capacity)
            is_said &= member.room in (*rooms, before and before.room)
            require(
                is_said or peer == self.liar,
                "I12",
                f"{short(manifest)}: {peer} has not asked to be {member}",
            )

    def _check_offers(self, manifest: Manifest, parent: Manifest) -> None:
        """Requires that a peer has offered exactly what the manifest counts as its offer [I12]."""
        units: dict[PeerId, dict[Unit, Digest]] = {}
        for unit, values in manifest.sources.items():
            for peer, digest in values:
                units.setdefault(peer, {})[unit] = digest
        for peer, values_of in units.items():
            work = manifest.work.get(peer, 0)
            is_known = any(
                offer.tokens == work
                and {unit: value.digest for unit, value in offer.units.items()} == values_of
                for offer in self._offered.get((peer, parent.digest), ())
            )
            require(
                is_known or peer == self.liar,
                "I12",
                f"{short(manifest)}: {peer} has not offered {values_of} with {work} tokens",
            )

    def _check_sources(
        self,
        name: str,
        unit: Unit,
        parent: Manifest,
        peers: tuple[PeerId, ...],
        manifest: Manifest,
    ) -> None:
        require(list(peers) == sorted(set(peers)), "I8", f"{name}: {unit} from {peers}, unordered")
        expert = expert_of_unit(unit)
        if expert is None:
            require(
                peers == manifest.contributors,
                "I8",
                f"{name}: {unit} is from {peers}, contributors are {manifest.contributors}",
            )
        else:
            allowed: Collection[PeerId] = set(parent.owners[expert])
            require(
                all(peer in allowed for peer in peers),
                "I7",
                f"{name}: {unit} is from {peers}, its owners are {parent.owners[expert]}",
            )

    def _check_value(self, name: str, unit: Unit, manifest: Manifest, parent: Manifest) -> None:
        sources, before = manifest.sources[unit], parent.entries[unit]
        inputs = [digest for _, digest in sources]
        weighed = weights(manifest.work, [peer for peer, _ in sources], parent.trusted)
        mean = inputs[0]
        if len(inputs) > 1:
            mean = self.values.digest_of(mean_of(unit, inputs, weighed))
        require(
            manifest.entries[unit].digest == mean,
            "I8",
            f"{name}: {unit} is not the mean of its sources {sources} with weights {weighed}",
        )
        for peer, digest in sources:
            value = self.values.get(digest)
            extends = isinstance(value, Trained) and (value.unit, value.base, value.writer) == (
                unit,
                before.digest,
                peer,
            )
            require(
                extends or digest == before.digest,
                "I7",
                f"{name}: {unit} of {peer} is {value}, which does not extend {before.digest}",
            )
