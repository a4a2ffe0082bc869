"""Bytes that a peer has moved, by kind."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from swarm.network.traffic import Traffic


@dataclass(frozen=True)
class Moved:
    """Bytes since the start, or between two moments."""

    blobs_sent: int
    blobs_received: int
    control_sent: int
    control_received: int
    moments_sent: int
    moments_received: int

    @classmethod
    def of(cls, counted: Traffic) -> Moved:
        """What a node has counted so far."""
        return cls(
            counted.blob_bytes_sent,
            counted.blob_bytes_received,
            counted.control_bytes_sent,
            counted.control_bytes_received,
            counted.moments_bytes_sent,
            counted.moments_bytes_received,
        )

    def __sub__(self, before: Moved) -> Moved:
        return Moved(
            *(now - then for now, then in zip(astuple(self), astuple(before), strict=True))
        )
