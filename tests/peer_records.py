"""Records like those of real peers."""

import dataclasses
from typing import Any

from swarm.protocol.records.records import PeerRecord, PeerState

DIGEST = "ab12cd34" * 8


def peer_record(peer_id: str, **changes: Any) -> PeerRecord:
    """A record of a peer in its sixth round, with these changes."""
    record = PeerRecord(
        peer_id=peer_id,
        name=f"name-of-{peer_id}",
        addresses=(),
        state=PeerState.TRAINING,
        capacity=1.0,
        room=4,
        generation="0",
        height=6,
        round=5,
        rounds_total=8,
        manifest_digest=DIGEST,
        owned_experts=(0, 1),
        step=270,
        tokens=9000,
        loss=2.345,
        val_loss=2.4,
        tokens_per_s=4100.0,
        blob_bytes_sent=12_345_678,
        blob_bytes_received=23_456_789,
        round_blob_bytes_sent=2_200_000,
        round_blob_bytes_received=2_300_000,
        control_bytes_sent=45_000,
        control_bytes_received=43_000,
        steps_skipped=0,
        refused={},
        reason="round 5 decided by 4 of 4 members",
        version="0.1.0",
        moments_bytes_sent=0,
        moments_bytes_received=0,
        zero_moments=0,
        moments_reason="",
        routing=None,
        grad_norm=None,
        grad_spikes=0,
        last_round=None,
        tokens_lost=0,
        engine="resident",
        trouble="",
        link=None,
        workers=None,
        possession="",
    )
    return dataclasses.replace(record, **changes)
