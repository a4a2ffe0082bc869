"""Peers whose record was lost or rolled back: they may have voted and do not know how [P5]."""

from __future__ import annotations

from dataclasses import replace

from swarm.protocol.events import Record
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.messages import MAX_ATTEMPT, Offer

ABSTAIN_HEIGHTS = 2
"""A damaged record may have been one tip ahead of its predecessor and voted once more there."""
UNTIL_IT_CONTRIBUTES = 2**62
"""A height that is never reached."""


def rolled_back(earlier: Record) -> Record:
    """The record of a peer of which only the last but one is left."""
    return replace(earlier, abstain_until_height=earlier.tip.height + ABSTAIN_HEIGHTS)


def repaired(record: Record) -> Record | None:
    """A record whose promise or vote is of an attempt that nobody may make; None if none is.

    Nobody can be told of such a ballot, and what it forbids is forgotten with it: the peer casts no
    vote at the height that it was for, so none that contradicts it.
    """
    ballots = [record.promised, record.accepted.ballot if record.accepted else None]
    if not any(ballot and ballot.attempt > MAX_ATTEMPT for ballot in ballots):
        return None
    until = max(record.abstain_until_height, record.tip.height + 1)
    return replace(record, promised=None, accepted=None, abstain_until_height=until)


def without_record(me: PeerId, shown: Record) -> Record:
    """The record of a peer that has none, or no longer, and was shown a tip by others.

    Those that showed it may be far behind what it had voted for, so no height is high enough.
    """
    if me not in shown.tip.members:
        return shown
    return replace(shown, abstain_until_height=UNTIL_IT_CONTRIBUTES)


def abstain_until(record: Record, manifest: Manifest, me: PeerId, offer: Offer | None) -> int:
    """Up to which height a peer casts no vote once it has applied a manifest.

    The abstention ends one height after a manifest that took in what the peer offered since it
    came back. Let v be the height of its last vote before. Its offer of now cannot be in a
    manifest below v, which was decided before, so that manifest's height is v at least; and v + 1
    at least if the offer is an old one that the private state had kept. Both are behind it then.
    """
    if manifest.parent != record.tip.digest or offer is None:
        return record.abstain_until_height
    mine = {(me, unit.digest) for unit in offer.units.values()}
    if mine.isdisjoint(source for sources in manifest.sources.values() for source in sources):
        return record.abstain_until_height
    return min(record.abstain_until_height, manifest.height + 1)
