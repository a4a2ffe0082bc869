"""Slow uplinks: who relays blobs for them [D4], and which are too slow for a round [D5]. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf

from swarm.experts import expert_of_unit, expert_unit
from swarm.protocol.messages.messages import Evidence, Uplinks
from swarm.protocol.rounds.policies.rosters import Plan, usual_uplink
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.values.manifest import Digest, Manifest, PeerId, Unit, turn

FEW = 8
"""Rounds of up to so many peers need no relays for experts."""
RELAYS = 4
"""So many get an expert from its writer, the others from these."""
MOST_TIMES = 4
"""An uplink counts as at most this many times the relays' median, whatever its peer claims. This
bounds how much a false claim draws to a peer, as for the units that a peer averages [D3]."""
_WORD = 8
_POINTS = 256**_WORD


@dataclass(frozen=True)
class Relays:
    """Peers that may pass on, each as often as its uplink is fast.

    Attributes:
        peers: in order of their ids.
        ends: sums of their weights up to each.
    """

    peers: tuple[PeerId, ...] = ()
    ends: tuple[float, ...] = ()

    def of(self, digest: Digest, writer: PeerId) -> tuple[PeerId, ...]:
        """Who passes this blob on, by lot: the same for all that know the same uplinks."""
        if not self.peers:
            return ()
        drawn_by = turn(digest, writer)
        words = (drawn_by[n * _WORD : (n + 1) * _WORD] for n in range(RELAYS))
        points = (int.from_bytes(word) / _POINTS * self.ends[-1] for word in words)
        last = len(self.peers) - 1
        drawn = (self.peers[min(last, bisect_right(self.ends, point))] for point in points)
        return tuple(peer for peer in dict.fromkeys(drawn) if peer != writer)

    def before(self, digest: Digest, writer: PeerId, me: PeerId) -> tuple[PeerId, ...]:
        """Whom a peer asks before the writer; peers begin at different relays, these ask nobody."""
        relays = self.of(digest, writer)
        if not relays or me in relays:
            return ()
        return in_turn(relays, me)


NONE = Relays()


def in_turn(relays: Sequence[PeerId], me: PeerId) -> tuple[PeerId, ...]:
    """Relays in the order in which a peer asks them: peers begin at different ones."""
    start = sum(me.encode()) % max(1, len(relays))
    return (*relays[start:], *relays[:start])


BODY_FEW = 32
"""Nor up to so many for manifests: one of 32 peers has a third of a megabyte."""
BODY_RELAYS = 8
"""So many get a manifest from its convener, the others from these."""


def relays_of_body(uplinks: Uplinks) -> tuple[PeerId, ...]:
    """Who passes a proposal's manifest and evidence on: those with the fastest lines [D4].

    Args:
        uplinks: Mbit/s of the members that others can dial, as they said; 0: not known.
    """
    if len(uplinks) <= BODY_FEW:
        return ()
    known = [peer for peer, mbit in uplinks.items() if mbit > 0]
    return tuple(sorted(known, key=lambda peer: (-uplinks[peer], peer))[:BODY_RELAYS])


def relays_among(reducers: Collection[PeerId], uplinks: Uplinks) -> Relays:
    """The faster half of those that average something in a round.

    Reducers, since these fetch ahead, and a round has asked them to send already [D2, D3].

    Args:
        reducers: of the roster.
        uplinks: Mbit/s of those that may reduce, by which units were dealt; 0: not known.
    """
    known = {peer: uplinks[peer] for peer in set(reducers) if uplinks.get(peer)}
    if len(uplinks) <= FEW or len(known) < 2 * RELAYS:
        return NONE
    least = sorted(known.values())[len(known) // 2]
    chosen = {peer: known[peer] for peer in sorted(known) if known[peer] >= least}
    most = MOST_TIMES * sorted(chosen.values())[len(chosen) // 2]
    ends = tuple(accumulate(min(mbit, most) for mbit in chosen.values()))
    return Relays(tuple(chosen), ends)


def has_one_writer(unit: Unit, manifest: Manifest) -> bool:
    """Whether the round that made a manifest took a unit as one peer had offered it."""
    return expert_of_unit(unit) is not None and len(manifest.sources.get(unit, ())) == 1


def relays_of_proposal(manifest: Manifest, evidence: Evidence | None) -> Relays:
    """The same of a round that is proposed: its evidence names the uplinks [A6]."""
    if evidence is None or len(evidence.able) <= FEW or not any(evidence.able.values()):
        return NONE
    reducers = {
        entry.source
        for unit, entry in manifest.entries.items()
        if entry.version == manifest.round and expert_of_unit(unit) is None
    }
    return relays_among(reducers, evidence.able)


UNEQUAL, LEAST_S = 3, 3.0
"""Nobody is left out whose line does not need so many times what those need that stay, and so many
seconds more: what peers measure of their lines while others send, too, is off by a factor of two
now and then."""


@dataclass(frozen=True)
class Sender:
    """A peer whose offer may enter a roster: what does not change while the roster is open."""

    peer: PeerId
    needs_s: float
    """For all that it sends in the round; of a line that was not measured, what a usual one would
    need."""
    waits: bool
    """Whether it is a voter that has done its steps; the others' seconds do not count, or keys
    that offer at once would have a slow voter left out."""
    uplink_mbit: int = 0
    """0: not known. Such a peer is never left out."""
    averaged_s: float = 0.0
    """Of these seconds, for the values that others average: reducers wait for them [C4]."""
    is_late: bool = False
    """Whether it has yet to offer."""


def bytes_to_send(plan: Plan, rules: Rules) -> dict[PeerId, int]:
    """What each peer of a roster sends in its round.

    A value that is averaged goes to its reducer, its mean from there to all others. An expert with
    one writer goes from it to all others, or to its relays [D4].
    """
    others = len(plan.offers) - 1
    is_relayed = relays_among(plan.reducers.values(), plan.able).peers
    copies = min(others, RELAYS) if is_relayed else others
    sent = averaged_bytes(plan, rules)
    for unit, values in plan.sources.items():
        if reducer := plan.reducers.get(unit):
            sent[reducer] += rules.moved_bytes[unit] * others
            continue
        for peer, _ in values:
            sent[peer] += rules.moved_bytes[unit] * copies
    return sent


def least_to_send(peer: PeerId, tip: Manifest, others: int, rules: Rules) -> int:
    """What a peer would send at least that has not offered yet: bytes of its own values.

    Args:
        peer: a member of the tip.
        tip: names the peer's experts, and the units that are due.
        others: how many have offered.
        rules: of the run.
    """
    units = rules.schedule.due_of(peer, tip)
    mine = {expert_unit(expert) for expert, owners in tip.owners.items() if owners == (peer,)}
    copies = min(others, RELAYS)
    return sum(
        rules.moved_bytes[unit] * copies if unit in mine else rules.offered_bytes[unit]
        for unit in units
    )


def averaged_bytes(plan: Plan, rules: Rules) -> dict[PeerId, int]:
    """What each peer of a roster sends to those that average it."""
    sent = dict.fromkeys(plan.offers, 0)
    for unit, reducer in plan.reducers.items():
        for peer, _ in plan.sources[unit]:
            if peer != reducer:
                sent[peer] += rules.offered_bytes[unit]
    return sent


def seconds_to_send(sent: Mapping[PeerId, int], uplinks: Uplinks) -> dict[PeerId, float]:
    """How long each line of a roster is busy with its round; {} while none was measured.

    Args:
        sent: bytes that each of its peers sends.
        uplinks: Mbit/s of these, as they said; 0 or missing: not known.
    """
    usual = usual_uplink(uplinks[peer] for peer in sent if uplinks.get(peer))
    if usual is None:
        return {}
    return {peer: size * 8e-6 / (uplinks.get(peer) or usual) for peer, size in sent.items()}


class RosterLinks:
    """The lines of a roster in the order in which they are left out.

    It follows from what they carry, and is made once; what work is worth changes with each second.

    Attributes:
        slowest_first: the senders; behind them those whose lines were not measured.
        num_waiting: how many of them wait.
        gaps: after how many senders the next needs so much less that these may be too thin, and how
            long that one needs.
    """

    def __init__(self, senders: Iterable[Sender]) -> None:
        self.slowest_first = sorted(senders, key=lambda s: (not s.uplink_mbit, -s.needs_s, s.peer))
        self.num_waiting = sum(sender.waits for sender in self.slowest_first)
        self.gaps = tuple(self._found_gaps())

    def _found_gaps(self) -> Iterator[tuple[int, float]]:
        unknown = (s.needs_s for s in self.slowest_first if not s.uplink_mbit)
        at_least_s = max(unknown, default=0.0)
        for num, (sender, following) in enumerate(pairwise(self.slowest_first), 1):
            usual_s = max(following.needs_s, at_least_s)
            if sender.uplink_mbit and _is_thin(sender, usual_s, usual_s):
                yield num, usual_s


class Loads:
    """What the lines of a plan carry, worked out once: of 256 peers that takes a tenth of a second.

    Attributes:
        plan: of the roster.
        waiting: the voters whose shared tensors are in it.
    """

    def __init__(
        self, plan: Plan, uplinks: Uplinks, tip: Manifest, rules: Rules, voters: Collection[PeerId]
    ) -> None:
        """Works nothing out yet.

        Args:
            plan: of the roster.
            uplinks: Mbit/s of members, as they said; 0 or missing: not known.
            tip: what the offers were trained from.
            rules: of the run.
            voters: whose seconds count.
        """
        self.plan = plan
        self.waiting = {peer for peer in plan.contributors if peer in voters}
        self._uplinks, self._tip, self._rules, self._voters = uplinks, tip, rules, voters
        self._least: dict[PeerId, int] = {}
        self._lines: dict[tuple[PeerId, ...], RosterLinks] = {}

    @cached_property
    def averaged_s(self) -> dict[PeerId, float]:
        """For how long lines that were measured are busy with values that others average."""
        sent, uplinks = averaged_bytes(self.plan, self._rules), self._uplinks
        return {peer: sent[peer] * 8e-6 / uplinks[peer] for peer in sent if uplinks.get(peer)}

    @cached_property
    def _senders(self) -> tuple[Sender, ...]:
        uplinks, averaged_s = self._uplinks, self.averaged_s
        seconds = seconds_to_send(bytes_to_send(self.plan, self._rules), uplinks)
        return tuple(
            Sender(
                peer,
                needs_s,
                waits=peer in self.waiting,
                uplink_mbit=uplinks.get(peer, 0),
                averaged_s=averaged_s.get(peer, 0.0),
            )
            for peer, needs_s in seconds.items()
        )

    def lines(self, late: tuple[PeerId, ...] = ()) -> RosterLinks:
        """The lines of the plan, and of peers that have yet to offer; their uplinks are known."""
        if late not in self._lines:
            senders = [*self._senders, *map(self._late, late)]
            self._lines = {late: RosterLinks(senders)}  # until others are late
        return self._lines[late]

    def _late(self, peer: PeerId) -> Sender:
        """A peer that has not offered, whose line would be busy for so long at least."""
        if peer not in self._least:
            others = len(self.plan.offers)
            self._least[peer] = least_to_send(peer, self._tip, others, self._rules)
        mbit = self._uplinks[peer]
        needs_s = self._least[peer] * 8e-6 / mbit
        return Sender(peer, needs_s, peer in self._voters, mbit, is_late=True)


def is_thinner(uplink_mbit: int, usual_mbit: int | None) -> bool:
    """Whether a line is so much thinner than a usual one that its peer may be left out.

    Of a peer that has not offered yet, this is looked at before anything that takes time.
    """
    return usual_mbit is not None and 0 < UNEQUAL * uplink_mbit < usual_mbit


def too_thin(
    lines: RosterLinks, invested_s: Callable[[Sender], float], free_s: float, limit_s: float = inf
) -> dict[PeerId, str]:
    """Who is left out of a roster, and why: those without whom most seconds are won.

    Args:
        lines: of those whose offers there are.
        invested_s: what is lost if one is left out; asked only of those that may be.
        free_s: seconds from now on in which no voter waits.
        limit_s: for how long reducers may wait for a value: who needs longer is left out, whatever
            its work is worth, or the round would end without it, and later.
    """
    num_waiting, lost_s = lines.num_waiting, 0.0
    won, out, whole_s, looked_at = 0.0, 0, 0.0, 0
    for num, usual_s in lines.gaps:
        for each in lines.slowest_first[looked_at:num]:
            num_waiting -= each.waits
            lost_s += invested_s(each)
        looked_at, sender = num, lines.slowest_first[num - 1]
        rest_s = max(usual_s, free_s)
        gain = (lines.slowest_first[0].needs_s - rest_s) * num_waiting - lost_s
        is_won = gain > won or sender.averaged_s > limit_s
        if is_won and _is_thin(sender, usual_s, rest_s):
            won, out, whole_s = max(gain, won), num, rest_s
    left_out = lines.slowest_first[:out]
    return {each.peer: _why(each, invested_s(each), whole_s) for each in left_out}


def _is_thin(sender: Sender, usual_s: float, rest_s: float) -> bool:
    """Whether a line needs so much longer than the next that it may be left out.

    `rest_s`: how long the round would last then, `usual_s` or more.
    """
    return sender.needs_s > max(rest_s + LEAST_S, UNEQUAL * usual_s)


def _why(sender: Sender, invested_s: float, whole_s: float) -> str:
    return (
        f"its uplink of {sender.uplink_mbit} Mbit/s would be busy for {sender.needs_s:.1f} s, not "
        f"{whole_s:.1f}, and its {invested_s:.1f} s of work are not worth that to the others"
    )
