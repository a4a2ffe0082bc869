"""The bulk protocol between an asking and a serving peer on one stream."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

JOINED_AT_ONCE = 8
"""Most blobs queued in one turn of the loop, which takes 20 ms for units of a 7B at 256 peers."""
ASSIGNED_AT_ONCE = 128
"""Most pieces assigned at once, which takes some 30 ms with 256 peers."""
YIELD_EVERY = 32
"""Small blobs that have arrived are read without a pause; after so many, other tasks run."""


PROTOCOL = "swarm.fetch/1"
PART_BYTES = 256 * 1024
_ASK = struct.Struct(">32sQQB")
_HEAD = struct.Struct(">BQI")
ASK_BYTES = _ASK.size
HEAD_BYTES = _HEAD.size


class Status(IntEnum):
    """First byte of a head."""

    HERE = 1  # the bytes follow
    MISSING = 2  # the blob is not here; the next answer follows
    BUSY = 3  # too many streams; nothing follows
    BAD = 4  # the ask is invalid; nothing follows


@dataclass(frozen=True)
class Ask:
    """Asks for `length` bytes of a blob from `offset`, at most to its end, and maybe its index."""

    digest: str
    offset: int
    length: int
    with_index: bool

    def encode(self) -> bytes:
        """The wire form, 49 bytes."""
        return _ASK.pack(bytes.fromhex(self.digest), self.offset, self.length, self.with_index)

    @classmethod
    def decode(cls, encoded: bytes) -> Ask:
        """Reads 49 bytes; every value is valid."""
        digest, offset, length, with_index = _ASK.unpack(encoded)
        return cls(digest.hex(), offset, length, bool(with_index))


@dataclass(frozen=True)
class Head:
    """Begins an answer; has the size of the whole blob, and of the index that follows."""

    status: int
    num_bytes: int = 0
    index_bytes: int = 0

    def encode(self) -> bytes:
        """The wire form, 13 bytes."""
        return _HEAD.pack(self.status, self.num_bytes, self.index_bytes)

    @classmethod
    def decode(cls, encoded: bytes) -> Head:
        """Reads 13 bytes; every value is valid."""
        return cls(*_HEAD.unpack(encoded))
