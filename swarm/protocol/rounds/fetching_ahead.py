"""What a peer fetches of a roster before it is proposed: experts with one writer [D2]. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from swarm.protocol.events import BlobWanted
from swarm.protocol.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.messages import Roster
from swarm.protocol.rounds.plausible import update_bound
from swarm.protocol.rounds.relays import Relays, relays_among
from swarm.protocol.rounds.rosters import Sources
from swarm.protocol.rounds.rules import Rules


def wanted_ahead(
    roster: Roster,
    sources: Sources,
    averaged: Mapping[Unit, PeerId],
    me: PeerId,
    *,
    stored: Collection[Digest],
    tip: Manifest,
    rules: Rules,
) -> tuple[BlobWanted, ...]:
    """Experts that a manifest of this roster takes verbatim, so that links carry them meanwhile.

    Their bound is that of a peer that trained no tokens in this round: one of a proposal is never
    narrower, whatever work the roster claims, so what comes ahead need not be judged again [U1].

    Args:
        roster: sound, of the tip.
        sources: of each unit of its offers.
        averaged: units that have a reducer, and which.
        me: whose own values are here. Peers begin at different writers.
        stored: blobs that are here.
        tip: what the offers were trained from.
        rules: the run's rules.

    Returns:
        Of a unit that moves by a delta the delta, else the value; each from its writer, or from
        relays [D4], which the writer follows with the proposal.
    """
    relays = relays_among(averaged.values(), roster.reducers)
    wanted = _wants(roster, sources, averaged, tip, rules)
    wants = [want for want in wanted if want.digest not in stored and want.sources != (me,)]
    after = [want for want in wants if want.sources[0] > me]
    before = [want for want in wants if want.sources[0] < me]
    return tuple(_through(relays, want, me) for want in (*after, *before))


def _through(relays: Relays, want: BlobWanted, me: PeerId) -> BlobWanted:
    (writer,) = want.sources
    others = relays.before(want.digest, writer, me)
    return replace(want, sources=others) if others else want


def _wants(
    roster: Roster, sources: Sources, averaged: Collection[Unit], tip: Manifest, rules: Rules
) -> Iterator[BlobWanted]:
    for unit, ((writer, value), *others) in sources.items():
        if unit not in rules.expert_units or unit in averaged or others:
            continue
        delta = roster.offers[writer].units[unit].delta
        bound = update_bound(unit, [writer], {}, tip, rules)
        size = rules.moved_bytes[unit]
        yield BlobWanted(unit, delta or value, size, (writer,), bound, delta is not None)
