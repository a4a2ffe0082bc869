"""Which peers an exporter asks for a model, so that it disturbs the training least.

Source of the figures: each peer's `PeerRecord`, repeated every 8 s. It is a hint that may be old or
false: it orders who is asked, and every blob is checked by its digest.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.records import PeerRecord, PeerState

IDLE = (PeerState.FINISHED, PeerState.TRAINING)
"""States in which a peer's link has nothing to do for a round, the best first: one that is through
needs its cores for nothing either, one that trains sends nothing."""


def idle_sources(peers: Mapping[PeerId, PeerRecord], manifest: Manifest) -> list[PeerId]:
    """Peers that have applied a manifest and disturb nobody when they send it.

    All of them are through with the run where any is, else they train. Among them the bulk path
    asks the one first that has least to send (`swarm.protocol.sourcing`).

    Args:
        peers: records of the peers that are present.
        manifest: whose blobs are wanted.
    """
    having = {peer: r.state for peer, r in peers.items() if r.manifest_digest == manifest.digest}
    tiers = ([peer for peer in sorted(having) if having[peer] is state] for state in IDLE)
    return next((tier for tier in tiers if tier), [])
