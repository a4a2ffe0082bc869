"""Whose line is too thin for a round [D5]. Pure.

A round lasts as long as the line that needs longest for what its peer sends. So a convener that
closes a roster counts as it does for a late peer [C3]: each second by which an offer lengthens the
round costs the voters that have offered one second each, and leaving it out costs what its peer has
worked in this round. Where rounds overlap, seconds in which they take their next steps cost nothing
[V8]. All follows from the convener's own knowledge, and what it decides is only whose offers are in
the roster, so nobody has to agree with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf

from swarm.experts import expert_unit
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.messages import Uplinks
from swarm.protocol.rounds.relays import RELAYS, relays_among
from swarm.protocol.rounds.rosters import Plan, usual_uplink
from swarm.protocol.rounds.rules import Rules

UNEQUAL, LEAST_S = 3, 3.0
"""Nobody is left out whose line does not need so many times what those need that stay, and so many
seconds more: what peers measure of their lines while others send, too, is off by a factor of two
now and then."""


@dataclass(frozen=True)
class Sender:
    """A peer whose offer may enter a roster."""

    peer: PeerId
    needs_s: float
    """For all that it sends in the round; of a line that was not measured, what a usual one would
    need."""
    invested_s: float
    """What is lost if it is left out."""
    waits: bool
    """Whether it is a voter that has done its steps; the others' seconds do not count, or keys
    that offer at once would have a slow voter left out."""
    uplink_mbit: int = 0
    """0: not known. Such a peer is never left out."""
    averaged_s: float = 0.0
    """Of these seconds, for the values that others average: reducers wait for them [C4]."""


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
        tip: names what it owns, and what is due.
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


class Loads:
    """What the lines of a plan carry, worked out once: of 256 peers that takes a tenth of a second.

    Attributes:
        plan: of the roster.
    """

    def __init__(self, plan: Plan, tip: Manifest, rules: Rules) -> None:
        self.plan = plan
        self._tip, self._rules = tip, rules
        self._least: dict[PeerId, int] = {}

    @cached_property
    def _averaged(self) -> dict[PeerId, int]:
        return averaged_bytes(self.plan, self._rules)

    @cached_property
    def _sent(self) -> dict[PeerId, int]:
        return bytes_to_send(self.plan, self._rules)

    def seconds(self, uplinks: Uplinks) -> dict[PeerId, float]:
        """How long each line is busy; see `seconds_to_send`."""
        return seconds_to_send(self._sent, uplinks)

    def averaged_s(self, uplinks: Uplinks) -> dict[PeerId, float]:
        """For how long lines that were measured are busy with values that others average."""
        sent = self._averaged
        return {peer: sent[peer] * 8e-6 / uplinks[peer] for peer in sent if uplinks.get(peer)}

    def least_s(self, peer: PeerId, mbit: int) -> float:
        """For how long the line of a peer that has not offered would be busy at least."""
        if peer not in self._least:
            others = len(self.plan.offers)
            self._least[peer] = least_to_send(peer, self._tip, others, self._rules)
        return self._least[peer] * 8e-6 / mbit


def is_thinner(uplink_mbit: int, usual_mbit: int | None) -> bool:
    """Whether a line is so much thinner than a usual one that its peer may be left out.

    Of a peer that has not offered yet, this is looked at before anything that takes time.
    """
    return usual_mbit is not None and 0 < UNEQUAL * uplink_mbit < usual_mbit


def too_thin(senders: Sequence[Sender], free_s: float, limit_s: float = inf) -> dict[PeerId, str]:
    """Who is left out of a roster, and why: those without whom most seconds are won.

    Args:
        senders: whose offers there are.
        free_s: seconds from now on in which no voter waits.
        limit_s: for how long reducers may wait for a value: who needs longer is left out, whatever
            its work is worth, or the round would end without it, and later.
    """
    slowest_first = sorted(senders, key=lambda s: (not s.uplink_mbit, -s.needs_s, s.peer))
    at_least_s = max((s.needs_s for s in senders if not s.uplink_mbit), default=0.0)
    num_waiting, invested_s = sum(s.waits for s in senders), 0.0
    won, out, whole_s = 0.0, 0, 0.0
    for num, (sender, following) in enumerate(pairwise(slowest_first), 1):
        if not sender.uplink_mbit:
            break
        num_waiting -= sender.waits
        invested_s += sender.invested_s
        usual_s = max(following.needs_s, at_least_s)
        rest_s = max(usual_s, free_s)
        is_thin = sender.needs_s > max(rest_s + LEAST_S, UNEQUAL * usual_s)
        gain = (slowest_first[0].needs_s - rest_s) * num_waiting - invested_s
        if is_thin and (gain > won or sender.averaged_s > limit_s):
            won, out, whole_s = max(gain, won), num, rest_s
    return {sender.peer: _why(sender, whole_s) for sender in slowest_first[:out]}


def _why(sender: Sender, whole_s: float) -> str:
    return (
        f"its uplink of {sender.uplink_mbit} Mbit/s would be busy for {sender.needs_s:.1f} s, not "
        f"{whole_s:.1f}, and its {sender.invested_s:.1f} s of work are not worth that to the others"
    )
