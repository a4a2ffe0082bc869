"""Who passes on experts and manifests, so that a thin uplink sends them a few times [D4]. Pure.

An expert with one writer goes to all N - 1 others in one round, and so does a manifest from its
convener: a line with 20 Mbit/s up would hold up everybody for minutes. Relays are only a hint of
whom to ask first. What they send has a digest, and who fails is passed over as any other source.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from swarm.experts import expert_of_unit
from swarm.protocol.manifest import Digest, Manifest, PeerId, Unit, turn
from swarm.protocol.messages import Evidence, Uplinks

FEW = 8
"""Rounds of up to so many peers need no relays for experts."""
RELAYS = 4
"""So many get an expert from its writer, the others from these."""
MOST_TIMES = 4
"""An uplink counts as so many times the median of the relays at most, whatever its peer says of it:
so much a false word draws to a peer, as with what it averages [D3]."""
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
