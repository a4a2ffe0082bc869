"""Slow uplinks: which peers relay blobs for them, and which are too slow for a round. Pure.

Policy: slow-link exclusion.
"""

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
"""Rounds of up to this many peers need no relays for experts."""
RELAYS = 4
"""Number of peers that get an expert from its writer; the others get it from these."""
MOST_TIMES = 4
"""An uplink counts as at most this many times the relays' median, whatever its peer claims. This
limits how many blobs a false claim brings to a peer. A similar limit holds for the units that a
peer averages (balanced uploads)."""
_WORD = 8
_POINTS = 256**_WORD


@dataclass(frozen=True)
class Relays:
    """Peers that may relay blobs, each in proportion to its uplink.

    Attributes:
        peers: in order of their ids.
        ends: for each peer, the sum of all weights up to and including its own.
    """

    peers: tuple[PeerId, ...] = ()
    ends: tuple[float, ...] = ()

    def of(self, digest: Digest, writer: PeerId) -> tuple[PeerId, ...]:
        """The relays of this blob, by a lot that is the same at all peers with equal `uplinks`."""
        if not self.peers:
            return ()
        drawn_by = turn(digest, writer)
        words = (drawn_by[n * _WORD : (n + 1) * _WORD] for n in range(RELAYS))
        points = (int.from_bytes(word) / _POINTS * self.ends[-1] for word in words)
        last = len(self.peers) - 1
        drawn = (self.peers[min(last, bisect_right(self.ends, point))] for point in points)
        return tuple(peer for peer in dict.fromkeys(drawn) if peer != writer)

    def before(self, digest: Digest, writer: PeerId, me: PeerId) -> tuple[PeerId, ...]:
        """Relays to ask before the writer, in an order that depends on `me`; a relay asks none."""
        relays = self.of(digest, writer)
        if not relays or me in relays:
            return ()
        return in_turn(relays, me)


NONE = Relays()


def in_turn(relays: Sequence[PeerId], me: PeerId) -> tuple[PeerId, ...]:
    """Relays in the order in which `me` asks them; other peers begin with other relays."""
    start = sum(me.encode()) % max(1, len(relays))
    return (*relays[start:], *relays[:start])


BODY_FEW = 32
"""Rounds of up to this many peers need no relays for manifests: for 32 peers, a manifest has a
third of a megabyte."""
BODY_RELAYS = 8
"""Number of peers that get a manifest from its convener; the others get it from these."""


def relays_of_body(uplinks: Uplinks) -> tuple[PeerId, ...]:
    """The relays of a proposal's manifest and evidence: peers with the fastest uplinks.

    Policy: blob relays.

    Args:
        uplinks: claimed Mbit/s of the members that others can dial; 0: not known.
    """
    if len(uplinks) <= BODY_FEW:
        return ()
    known = [peer for peer, mbit in uplinks.items() if mbit > 0]
    return tuple(sorted(known, key=lambda peer: (-uplinks[peer], peer))[:BODY_RELAYS])


def relays_among(reducers: Collection[PeerId], uplinks: Uplinks) -> Relays:
    """The faster half of a round's reducers.

    Reducers relay because they fetch ahead, and send much in the round anyway (balanced uploads).

    Args:
        reducers: the reducers of the roster.
        uplinks: Mbit/s of the possible reducers, by which units were assigned; 0: not known.
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
    """Whether the manifest's round took the unit exactly as a single peer offered it."""
    return expert_of_unit(unit) is not None and len(manifest.sources.get(unit, ())) == 1


def relays_of_proposal(manifest: Manifest, evidence: Evidence | None) -> Relays:
    """The relays of a proposed round: its evidence names the uplinks [A6]."""
    if evidence is None or len(evidence.able) <= FEW or not any(evidence.able.values()):
        return NONE
    reducers = {
        entry.source
        for unit, entry in manifest.entries.items()
        if entry.version == manifest.round and expert_of_unit(unit) is None
    }
    return relays_among(reducers, evidence.able)


UNEQUAL, LEAST_S = 3, 3.0
"""A peer is left out only if its link needs UNEQUAL times as long as the links that stay, and
LEAST_S seconds more. The factor is large since an uplink that is measured while others send may be
wrong by a factor of two."""


@dataclass(frozen=True)
class Sender:
    """A peer whose offer may enter a roster, with facts that are fixed while that is open."""

    peer: PeerId
    needs_s: float
    """Seconds for all its uploads in the round. An unmeasured link counts as a usual one."""
    waits: bool
    """Whether it is a voter that has finished its steps. The seconds of other peers do not count.
    Otherwise anybody with many keys that offer at once could have a slow voter left out."""
    uplink_mbit: int = 0
    """0: not known. Such a peer is never left out."""
    averaged_s: float = 0.0
    """The part of `needs_s` for values that other peers average. Reducers wait for these values
    (roster repair)."""
    is_late: bool = False
    """Whether it has yet to offer."""


def bytes_to_send(plan: Plan, rules: Rules) -> dict[PeerId, int]:
    """Bytes that each peer of a roster sends in its round.

    A value to be averaged goes to the reducer, and the mean from the reducer to all others. An
    expert with one writer goes from the writer to all others, or to the expert's relays (blob
    relays).
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
    """The fewest bytes that a peer without an offer would have to send: its own values.

    Args:
        peer: a member of the tip.
        tip: names the peer's experts, and the units that are due.
        others: number of peers that have offered.
        rules: the rules of the run.
    """
    units = rules.schedule.due_of(peer, tip)
    mine = {expert_unit(expert) for expert, owners in tip.owners.items() if owners == (peer,)}
    copies = min(others, RELAYS)
    return sum(
        rules.moved_bytes[unit] * copies if unit in mine else rules.offered_bytes[unit]
        for unit in units
    )


def averaged_bytes(plan: Plan, rules: Rules) -> dict[PeerId, int]:
    """Bytes that each peer of a roster sends to the reducers of its values."""
    sent = dict.fromkeys(plan.offers, 0)
    for unit, reducer in plan.reducers.items():
        for peer, _ in plan.sources[unit]:
            if peer != reducer:
                sent[peer] += rules.offered_bytes[unit]
    return sent


def seconds_to_send(sent: Mapping[PeerId, int], uplinks: Uplinks) -> dict[PeerId, float]:
    """How long the round keeps each link of a roster busy; {} if no link was measured.

    Args:
        sent: bytes that each peer of the roster sends.
        uplinks: claimed Mbit/s of these peers; 0 or missing: not known.
    """
    usual = usual_uplink(uplinks[peer] for peer in sent if uplinks.get(peer))
    if usual is None:
        return {}
    return {peer: size * 8e-6 / (uplinks.get(peer) or usual) for peer, size in sent.items()}


class RosterLinks:
    """The links of a roster, in the order in which they are left out.

    The order depends only on the links' loads, so it is computed once. The worth of a peer's work,
    which changes each second, is not part of it.

    Attributes:
        slowest_first: the senders. Senders with unmeasured links come last.
        num_waiting: number of senders that wait.
        gaps: places in the order where the next link is so much faster that all links before may be
            too slow. Each place is a number of senders, with the time that the next sender needs.
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
    """Loads of the links of a plan, computed once, since that takes 0.1 s for 256 peers.

    Attributes:
        plan: the plan of the roster.
        waiting: the voters whose shared tensors are in the plan.
    """

    def __init__(
        self, plan: Plan, uplinks: Uplinks, tip: Manifest, rules: Rules, voters: Collection[PeerId]
    ) -> None:
        """Stores the inputs, and computes nothing yet.

        Args:
            plan: the plan of the roster.
            uplinks: claimed Mbit/s of members; 0 or missing: not known.
            tip: the manifest from which the offers were trained.
            rules: the rules of the run.
            voters: peers whose seconds count.
        """
        self.plan = plan
        self.waiting = {peer for peer in plan.contributors if peer in voters}
        self._uplinks, self._tip, self._rules, self._voters = uplinks, tip, rules, voters
        self._least: dict[PeerId, int] = {}
        self._lines: dict[tuple[PeerId, ...], RosterLinks] = {}

    @cached_property
    def averaged_s(self) -> dict[PeerId, float]:
        """How long values that others average keep each measured link busy."""
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
        """The links of the plan and of `late`: peers without an offer, but with a known uplink."""
        if late not in self._lines:
            senders = [*self._senders, *map(self._late, late)]
            self._lines = {late: RosterLinks(senders)}  # valid for these late peers
        return self._lines[late]

    def _late(self, peer: PeerId) -> Sender:
        """A peer without an offer, as a sender of the fewest bytes that it would have to send."""
        if peer not in self._least:
            others = len(self.plan.offers)
            self._least[peer] = least_to_send(peer, self._tip, others, self._rules)
        mbit = self._uplinks[peer]
        needs_s = self._least[peer] * 8e-6 / mbit
        return Sender(peer, needs_s, peer in self._voters, mbit, is_late=True)


def is_thinner(uplink_mbit: int, usual_mbit: int | None) -> bool:
    """Whether a link is so much slower than the usual link that its peer may be left out.

    For a peer without an offer, this quick check is made before the slow checks.
    """
    return usual_mbit is not None and 0 < UNEQUAL * uplink_mbit < usual_mbit


def too_thin(
    lines: RosterLinks, invested_s: Callable[[Sender], float], free_s: float, limit_s: float = inf
) -> dict[PeerId, str]:
    """Peers to leave out of a roster, and why: those whose exclusion saves the most seconds.

    Args:
        lines: links of the peers with an offer.
        invested_s: gives the seconds of work that are lost if a peer is left out. It is called only
            for peers that may be left out.
        free_s: seconds from now on in which no voter waits.
        limit_s: how long reducers may wait for a value. A peer that needs longer is left out,
            whatever its work is worth, since the round would leave it out later.
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
    """Whether a link needs so much longer than the next link that its peer may be left out.

    `rest_s`: how long the round would last without the link, at least `usual_s`.
    """
    return sender.needs_s > max(rest_s + LEAST_S, UNEQUAL * usual_s)


def _why(sender: Sender, invested_s: float, whole_s: float) -> str:
    return (
        f"its uplink of {sender.uplink_mbit} Mbit/s would be busy for {sender.needs_s:.1f} s, not "
        f"{whole_s:.1f}, and its {invested_s:.1f} s of work are not worth that to the others"
    )
