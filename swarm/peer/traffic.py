"""Bytes that a peer has moved, as its events and its record tell them."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.network import traffic as network


@dataclass(frozen=True)
class Traffic:
    """Bytes since the start, or since an earlier moment."""

    blobs_sent: int
    blobs_received: int
    control_sent: int
    control_received: int
    moments_sent: int
    moments_received: int

    @classmethod
    def of(cls, counted: network.Traffic) -> Traffic:
        """The node's counters now."""
        return cls(
            counted.blob_bytes_sent,
            counted.blob_bytes_received,
            counted.control_bytes_sent,
            counted.control_bytes_received,
            counted.moments_bytes_sent,
            counted.moments_bytes_received,
        )

    def since(self, before: Traffic) -> Traffic:
        """The part that was moved after an earlier moment."""
        return Traffic(
            self.blobs_sent - before.blobs_sent,
            self.blobs_received - before.blobs_received,
            self.control_sent - before.control_sent,
            self.control_received - before.control_received,
            self.moments_sent - before.moments_sent,
            self.moments_received - before.moments_received,
        )
