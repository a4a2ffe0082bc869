"""Peers whose record was lost or rolled back: they may have voted and do not know how [P5]."""

from __future__ import annotations

from dataclasses import replace

from swarm.protocol.events import Record
from swarm.protocol.manifest import PeerId

ABSTAIN_HEIGHTS = 2
"""A damaged record may have been one tip ahead of its predecessor and voted once more there."""


def rolled_back(earlier: Record) -> Record:
    """The record of a peer of which only the last but one is left."""
    return replace(earlier, abstain_until_height=earlier.tip.height + ABSTAIN_HEIGHTS)


def without_record(me: PeerId, shown: Record) -> Record:
    """The record of a peer that has none, or no longer, and was shown a tip by others."""
    if me not in shown.tip.members:
        return shown
    return replace(shown, abstain_until_height=shown.tip.height + ABSTAIN_HEIGHTS)
