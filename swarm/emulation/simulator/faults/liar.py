"""A peer that lies: an honest machine whose outgoing messages are turned into lies.

The liar has only its own key, and knows all that its machine knows. As convener it misstates the
offers behind a round. As reducer it reports units that it was not asked for. As member it claims
absurd attempts, votes for everything, or serves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Protocol

from swarm.emulation.simulator.peers.participant import Setup
from swarm.emulation.simulator.peers.surroundings import Packet
from swarm.emulation.simulator.symbols.crash_disk import Disk
from swarm.emulation.simulator.symbols.signing import sign
from swarm.emulation.simulator.symbols.trained_symbols import Task
from swarm.emulation.simulator.symbols.values import Trained, mean_of
from swarm.experts import expert_of_unit
from swarm.protocol.messages import messages
from swarm.protocol.rounds.policies.composition import Attendance, compose_round
from swarm.protocol.rounds.policies.deals import most_samples
from swarm.protocol.rounds.policies.evidence_checks import Brought, attendance_of, offers_shown
from swarm.protocol.rounds.policies.rosters import Plan, plan_roster
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.invitation import Credential
from swarm.protocol.values.manifest import ALL_EXPERTS, Manifest, PeerId, Unit
from swarm.protocol.values.work import weights

PHANTOM = "x9"
"""A stranger that never asked to join."""
Lie = Callable[["Liar", messages.Propose], messages.Propose | None]


class LyingShell(Protocol):
    """The part of the simulation that a liar sees."""

    task: Task

    @property
    def disks(self) -> Mapping[PeerId, Disk]:
        """Every peer's disk. The liar changes only its own."""

    @property
    def setup(self) -> Setup:
        """The setup, with all peers of the schedule, even future ones."""

    @property
    def credentials(self) -> Mapping[PeerId, Credential]:
        """Credentials that peers show, and that all peers have therefore seen."""

    def asked_of(self, peer: PeerId) -> Collection[Unit]:
        """Units that a peer reduces. No other peer checks these results."""


class Liar:
    """The lies of one peer; see the module."""

    def __init__(self, me: PeerId, lies: Iterable[str], shell: LyingShell, random: Random) -> None:
        self.me = me
        self.lies = frozenset(lies)
        self.is_lying = True
        self.reigns: dict[tuple[str, int], float] = {}
        """When the liar first convened, by its tip and attempt."""
        self._shell = shell
        self._random = random
        self._serials = 0
        self._older: messages.Evidence | None = None
        self._told: dict[tuple[str, bool], messages.Propose] = {}
        """The proposals sent for a manifest, one to each half of the peers."""

    @property
    def tip(self) -> Manifest:
        """The tip of its own machine."""
        return self._shell.disks[self.me].record.tip

    def convening_s(self, timers: Timers, since_s: float, now_s: float) -> float:
        """The longest time for which it has convened since a moment, up to an attempt's limit.

        Policy: takeover.

        A convener that does everything but announce the decision looks like a slow convener until
        its attempt has taken too long. The liar may do so once a height. After that it lets others
        convene (convener turns).
        """
        begun = sorted((s, attempt) for (_, attempt), s in self.reigns.items() if s >= since_s)
        limits = (timers.attempt_limit_s(attempt) for _, attempt in begun)
        spans = (end - start for start, end in pairwise([*(s for s, _ in begun), now_s]))
        return max(map(min, spans, limits), default=0.0)

    # ------------------------------------------------------------ outgoing and incoming

    def convenes(self, packet: Packet, now_s: float) -> None:
        """Notes that the liar convenes, if its machine's packet says so."""
        header, message = packet
        if (
            isinstance(message, messages.Prepare | messages.Propose)
            and message.ballot.convener == self.me
        ):
            self.reigns.setdefault((header.tip, message.ballot.attempt), now_s)

    def says(self, destination: PeerId, packet: Packet) -> list[Packet]:
        """The packets that are sent in place of one packet."""
        header, message = packet
        if not self.is_lying:
            return [packet]
        if isinstance(message, messages.Propose):
            return [Packet(header, self._proposal(destination, message))]
        if isinstance(message, messages.Reduced):
            return [Packet(header, self._results(message))]
        if isinstance(message, messages.Ready):
            return [Packet(header, self._ready(header, message))]
        if isinstance(message, messages.Prepare) and self._will("attempts", 0.1):
            absurd = self._random.choice(
                [messages.MAX_ATTEMPT, messages.MAX_ATTEMPT - 1, 900, 5000]
            )
            return [packet, Packet(header, messages.Prepare(messages.Ballot(absurd, self.me)))]
        return [packet]

    def hears(self, packet: Packet) -> list[Packet]:
        """The liar's immediate answers to a message, whatever its machine does with the message."""
        header, message = packet
        if (
            not self.is_lying
            or not isinstance(message, messages.Propose)
            or "twice" not in self.lies
        ):
            return []
        ballot, digest = message.ballot, message.manifest.digest
        signed = sign(
            self.me, messages.accept_statement(self._shell.task.rules.run, ballot, digest)
        )
        return [Packet(header, messages.Accept(ballot, digest, signed))]

    def serves(self) -> bool:
        """Whether the liar gives others the blobs that they ask for."""
        return not (self.is_lying and "unserved" in self.lies)

    def _will(self, lie: str, chance: float) -> bool:
        return lie in self.lies and self._random.random() < chance

    # ------------------------------------------------------------ member and reducer

    def _ready(self, header: messages.Header, ready: messages.Ready) -> messages.Ready:
        """A READY with another capacity and room, an absurd attempt, or without its vote."""
        if self._will("attempts", 0.1):
            return replace(
                ready, ballot=messages.Ballot(messages.MAX_ATTEMPT, ready.ballot.convener)
            )
        if "hides" in self.lies:
            ready = replace(ready, accepted=None)
        if self._will("capacity", 0.5):
            room = self._random.choice([0, ALL_EXPERTS])
            greedy = replace(ready, capacity=1e6, room=room)
            return self._signed(header, greedy)
        if WORK in self.lies and ready.offer and not ready.offer.is_late:
            return self._signed(header, replace(ready, offer=self._claimed(ready.offer)))
        return ready

    def _signed(self, header: messages.Header, ready: messages.Ready) -> messages.Ready:
        run, said = self._shell.task.rules.run, ready.declared.declaration
        return replace(
            ready, signature=sign(self.me, messages.ready_statement(run, header.tip, said))
        )

    def _claimed(self, offer: messages.Offer) -> messages.Offer:
        """An offer that claims that the whole deal was trained in a millisecond."""
        tip, rules = self.tip, self._shell.task.rules
        tokens = most_samples(self.me, tip, rules) * rules.sequence_length
        if offer.tip != tip.digest or rules.round_seconds is None:
            return offer
        steps = tokens // rules.batch_tokens_at(tip.tokens)
        return replace(offer, steps=steps, tokens=tokens, seconds=0.001)

    def _results(self, reduced: messages.Reduced) -> messages.Reduced:
        """Means of units that other peers have to average, or means for an invented roster."""
        results, roster_id = dict(reduced.results), reduced.roster_id
        if self._will("foreign", 0.7):
            for unit in sorted(
                self._shell.task.rules.unit_bytes.keys() - self._shell.asked_of(self.me)
            ):
                results[unit] = self._mean(unit, self._value(unit, self.me), 100)
        if self._will("other_roster", 0.5):
            roster_id = "another roster"
        signed = sign(
            self.me, messages.reduced_statement(self._shell.task.rules.run, roster_id, results)
        )
        return replace(reduced, results=results, roster_id=roster_id, signature=signed)

    # ------------------------------------------------------------ convener

    def _proposal(self, destination: PeerId, propose: messages.Propose) -> messages.Propose:
        manifest, evidence = propose.manifest, propose.evidence
        if evidence is None or manifest.parent != self.tip.digest:
            return propose
        face = (
            "two_faced" in self.lies
            and sorted(self._shell.setup.characters).index(destination) % 2 == 1
        )
        key = (manifest.digest, face)
        self._older = self._older or evidence
        if key not in self._told:
            lies = {**CONVENING, COPIED: Liar.copied}
            kinds = sorted(self.lies & lies.keys())
            lie = lies[self._random.choice(kinds)] if kinds else None
            told = lie(self, propose) if lie else None
            if "two_faced" in self.lies and not face:
                told = None
            self._told[key] = told or propose
        told = self._told[key]
        return replace(told, ballot=propose.ballot, holders=propose.holders)

    def anew(
        self,
        propose: messages.Propose,
        change: Callable[[dict[PeerId, messages.Offer]], None] | None = None,
        **attended: object,
    ) -> messages.Propose:
        """A consistent proposal of a round with other offers or another attendance."""
        tip, rules, evidence = self.tip, self._shell.task.rules, propose.evidence
        assert evidence is not None
        manifest = propose.manifest
        offers = offers_shown(manifest, evidence, tip, rules)
        if change:
            change(offers)
        able = evidence.able
        plan = plan_roster(tip, offers, rules, offers.keys() - able.keys(), able)
        results = {}
        for unit in plan.reducers:
            values = plan.sources[unit]
            entry = manifest.entries[unit]
            digest = entry.digest
            is_other = values != manifest.sources.get(unit) or change
            if is_other and unit not in rules.averaged_deltas:
                work = {peer: offer.tokens for peer, offer in offers.items() if offer.tokens}
                weighed = weights(work, [peer for peer, _ in values], tip.trusted)
                inputs = [digest for _, digest in values]
                digest = self._keep(
                    self._shell.task.values.digest_of(mean_of(unit, inputs, weighed))
                )
            known = entry.delta if digest == entry.digest else None
            results[unit] = self._mean(unit, digest, rules.unit_bytes[unit], known)
        attendance: Attendance = attendance_of(
            evidence, Brought(manifest.wishes, manifest.invited), tip
        )
        if attended:
            attendance = replace(attendance, **attended)  # type: ignore[arg-type]
        forged = compose_round(tip, plan, results, attendance, rules)
        if self._random.random() < 0.5:
            evidence = self._fitted(evidence, plan, attendance, results)
        return replace(propose, manifest=forged, evidence=evidence)

    def _fitted(
        self,
        evidence: messages.Evidence,
        plan: Plan,
        attendance: Attendance,
        results: Mapping[Unit, messages.ReducedUnit],
    ) -> messages.Evidence:
        """Evidence that fits the lie, except for others' signatures: the liar lacks their keys."""
        run, declared = self._shell.task.rules.run, dict(evidence.declared)
        for peer in [*attendance.heard, *attendance.joiners]:
            capacity = {**attendance.joiners, **attendance.capacities}.get(peer, 1.0)
            room = attendance.rooms.get(peer, ALL_EXPERTS)
            offer, leaves = plan.offers.get(peer), peer in attendance.leaving
            said = messages.declaration_of(offer, capacity, leaves, room)
            known = declared.get(peer)
            if known is None or known.declaration != said:
                statement = messages.ready_statement(run, self.tip.digest, said)
                declared[peer] = messages.Declared(said, sign(self.me, statement))
        reports = []
        for reducer in sorted(set(plan.reducers.values())):
            means = {unit: results[unit] for unit in results if plan.reducers[unit] == reducer}
            statement = messages.reduced_statement(run, plan.roster_id, means)
            reports.append(messages.Report(reducer, means, sign(self.me, statement)))
        if plan.roster_id == evidence.roster_id:
            reports = list(evidence.reports)
        return messages.Evidence(declared, plan.able, plan.roster_id, tuple(reports))

    def _value(self, unit: Unit, writer: PeerId) -> str:
        """An invented value that passes for another peer's work."""
        self._serials += 1
        base = self.tip.entries[unit].digest
        value = Trained(unit, base, writer, 10**6 + self._serials)
        return self._keep(self._shell.task.values.digest_of(value))

    def _delta(self, unit: Unit, writer: PeerId) -> str:
        """An invented delta that brings nothing."""
        base = self.tip.entries[unit].digest
        return self._keep(self._shell.task.values.encoded(unit, base, writer, {}))

    def _offered(self, unit: Unit, writer: PeerId) -> messages.OfferedUnit:
        """An invented offer that passes for another peer's."""
        rules, base = self._shell.task.rules, self.tip.entries[unit].digest
        size = rules.offered_bytes[unit]
        if unit in rules.averaged_deltas:
            return messages.OfferedUnit(self._delta(unit, writer), size, base)
        delta = self._delta(unit, writer) if rules.is_verbatim(unit) else None
        return messages.OfferedUnit(self._value(unit, writer), size, base, delta)

    def _mean(
        self, unit: Unit, value: str, size: int, delta: str | None = None
    ) -> messages.ReducedUnit:
        """A result with the given value of a unit."""
        is_moved = unit in self._shell.task.rules.averaged_deltas
        return messages.ReducedUnit(
            value, size, delta or self._delta(unit, self.me) if is_moved else None
        )

    def _keep(self, digest: str) -> str:
        disk = self._shell.disks[self.me]
        disk.write(digest)
        disk.sync([digest])
        return digest

    # Each of the following methods is one lie about a round.

    def ghost(self, propose: messages.Propose) -> messages.Propose | None:
        """Adds a contributor that has offered nothing."""
        tip = self.tip
        ghosts = [peer for peer in tip.members if peer not in propose.manifest.contributors]
        if not ghosts:
            return None
        peer, rules = self._random.choice(ghosts), self._shell.task.rules
        batch = rules.batch_tokens_at(tip.tokens)
        units = {unit: self._offered(unit, peer) for unit in rules.shared_units}
        offer = messages.Offer(tip.digest, 1, batch, units, 1.0)
        return self.anew(propose, lambda offers: offers.update({peer: offer}))

    def tokens(self, propose: messages.Propose) -> messages.Propose | None:
        """The liar claims more work than it has done."""
        if not propose.manifest.work.get(self.me):
            return None

        def double(offers: dict[PeerId, messages.Offer]) -> None:
            mine = offers[self.me]
            offers[self.me] = replace(mine, steps=2 * mine.steps, tokens=2 * mine.tokens)

        return self.anew(propose, double)

    def strength(self, propose: messages.Propose) -> messages.Propose:
        """States a tiny capacity for other peers."""
        weak = dict.fromkeys(self.tip.members, 1e-3)
        return self.anew(propose, capacities={**weak, self.me: 9.0})

    def rooms(self, propose: messages.Propose) -> messages.Propose:
        """States that other peers have no room for any expert."""
        return self.anew(propose, rooms={**dict.fromkeys(self.tip.members, 0), self.me: 99})

    def joiner(self, propose: messages.Propose) -> messages.Propose:
        """Lets a stranger join that did not ask."""
        return self.anew(propose, joiners={PHANTOM: 9.0})

    def copied(self, propose: messages.Propose) -> messages.Propose | None:
        """Vouches for a member with the credential of another member."""
        manifest, known = propose.manifest, self._shell.credentials
        unvouched = sorted(self.tip.members.keys() - self.tip.vouched)
        others = [known[peer] for peer in sorted(known.keys() - unvouched)]
        if not unvouched or not others:
            return None
        friend = {self._random.choice(unvouched): self._random.choice(others)}
        return self.anew(propose, credentials={**manifest.invited, **friend})

    def silence(self, propose: messages.Propose) -> messages.Propose:
        """States that only peers with an offer were heard."""
        assert propose.evidence
        sources = propose.manifest.sources.values()
        kept = {peer for values in sources for peer, _ in values}  # including late offers
        declared = {p: d for p, d in propose.evidence.declared.items() if p in kept}
        evidence = replace(propose.evidence, declared=declared)
        return self.anew(replace(propose, evidence=evidence))

    def alone(self, propose: messages.Propose) -> messages.Propose:
        """Makes the liar the only member."""
        manifest = propose.manifest
        if self.me not in manifest.members:
            return propose
        owners = dict.fromkeys(manifest.owners, (self.me,))
        dealt = {self.me: manifest.dealt.get(self.me, ())}
        members = {self.me: manifest.members[self.me]}
        forged = replace(manifest, members=members, owners=owners, dealt=dealt)
        return replace(propose, manifest=forged)

    def results(self, propose: messages.Propose) -> messages.Propose:
        """Replaces the means of others by invented values."""
        entries = {
            unit: replace(entry, digest=self._value(unit, self.me))
            if unit in propose.manifest.sources and expert_of_unit(unit) is None
            else entry
            for unit, entry in propose.manifest.entries.items()
        }
        return replace(propose, manifest=replace(propose.manifest, entries=entries))

    def replay(self, propose: messages.Propose) -> messages.Propose:
        """Shows the evidence of an earlier round."""
        return replace(propose, evidence=self._older)

    def replayed_declarations(self, propose: messages.Propose) -> messages.Propose:
        """Shows the declarations of an earlier tip."""
        assert propose.evidence and self._older
        declared = {**propose.evidence.declared, **self._older.declared}
        return self.anew(replace(propose, evidence=replace(propose.evidence, declared=declared)))

    def nothing(self, propose: messages.Propose) -> messages.Propose:
        """Shows no evidence."""
        return replace(propose, evidence=None)


CONVENING: Mapping[str, Lie] = {
    "ghost": Liar.ghost,
    "tokens": Liar.tokens,
    "strength": Liar.strength,
    "rooms": Liar.rooms,
    "joiner": Liar.joiner,
    "silence": Liar.silence,
    "alone": Liar.alone,
    "results": Liar.results,
    "replay": Liar.replay,
    "replayed_declarations": Liar.replayed_declarations,
    "nothing": Liar.nothing,
}
"""Lies of a convener."""
COPIED = "copied"
"""The lie that an anchor vouches for a member, with a copied invitation. In the class of WORK."""
WORK = "work"
"""The lie of having trained the whole deal in no time. A separate class has this lie."""
OTHERS = ("foreign", "other_roster", "attempts", "capacity", "unserved", "two_faced")
"""Further lies: of a member or reducer, and the convener's "two_faced"."""
VOTES = ("twice", "hides")
"""Lies against which no rule helps if two quorums share only the liar: protocol/README.md."""
