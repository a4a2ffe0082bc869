"""Bytes that a peer has moved, by kind."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from swarm.network.traffic import Traffic
from swarm.protocol.life_events import BytesMoved


@dataclass(frozen=True)
class Moved(BytesMoved):
    """Bytes since the start, or between two moments."""

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
