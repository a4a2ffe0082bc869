"""Records of a small swarm, as peers would have published them."""

import dataclasses
from typing import Any

from swarm.monitor.history import with_history
from swarm.monitor.snapshot import Sighting, Snapshot, snapshot_of
from swarm.protocol.records.records import MergeRecord, PeerState, ValidationRecord
from swarm.protocol.values.manifest import Entry, Founding, Kind, Manifest, Member
from tests.peer_records import DIGEST, peer_record

EQUAL, OLD, OTHER = DIGEST, "99" * 32, "cd" * 32


def manifest(**changes: Any) -> Manifest:
    whole = Manifest(
        run="demo-1",
        generation="0",
        height=7,
        round=6,
        kind=Kind.QUORUM,
        parent=OLD,
        founding=Founding("QmA", "nonce", OLD, 10, OLD, 10),
        step=300,
        tokens=10_000,
        merged=2,
        members={peer: Member(0, 1.0) for peer in ("QmA", "QmB", "QmGone")},
        contributors=("QmA", "QmB"),
        sources={},
        owners={0: ("QmA",), 1: ("QmA", "QmB"), 2: ("QmGone",)},
        entries={f"expert.{e}": Entry(OLD, 10, 4 + e, "QmA", "bf16") for e in range(3)},
        reasons=("expert 1: QmB joined",),
    )
    return dataclasses.replace(whole, **changes)


def sighting(**changes: Any) -> Sighting:
    peers = {
        "QmA": peer_record("QmA"),
        "QmB": peer_record(
            "QmB",
            owned_experts=(2,),
            manifest_digest=OLD,
            height=5,
            round=4,
            state=PeerState.CATCHING_UP,
            steps_skipped=2,
            refused={"non_finite": 1, "size": 3},
            reason="asks QmA for 3 blobs",
        ),
        "QmC": peer_record("QmC", owned_experts=(3, 4, 5, 7), name="", loss=None),
    }
    merges = {
        "QmA": MergeRecord("0", 4, 2, 200, 0.0333, {0: ((1, 2), (2, 1)), 1: ((0, 2), (2, 0))}),
        "QmB": MergeRecord("0", 4, 2, 200, 0.0333, {2: ((1, 0), (0, 1))}),
        "QmC": MergeRecord("0", 2, 1, 100, 0.0667, {3: ((1, 0), (0, 1))}),
    }
    validations = {
        "QmA": ValidationRecord(3, OLD, 2.9, 100, 200, ((1, 4.5), (2, 3.5))),
        "QmB": ValidationRecord(5, EQUAL, 2.31, 100, 200, ((2, 3.4), (4, 2.5))),
    }
    return dataclasses.replace(
        Sighting("demo-1", "demo", peers, merges, validations, None), **changes
    )


def project(seen: Sighting) -> Snapshot:
    found = snapshot_of(seen)
    assert found is not None
    return found


def snapshot_with(**changes: Any) -> Snapshot:
    """What a monitor makes of the swarm."""
    return project(sighting(**changes))


def remembered(*looks: Snapshot) -> Snapshot:
    """The last of these looks of one monitor, with its memory of the others."""
    found = None
    for look in looks:
        found = with_history(look, found)
    assert found is not None
    return found
