"""A value of this peer's own on its way into the store: written and hashed piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from blake3 import blake3

from swarm.network.pack_set import Place
from swarm.protocol.digests import PIECE_BYTES, Buffer, digest_of_index


class Draft:
    """Room in a pack that is filled from its beginning to its end, in memory that does not grow.

    One thread at a time writes. As a context manager it discards itself unless it was finished.

    Attributes:
        num_bytes: how long it will be.
    """

    def __init__(
        self, place: Place, keep: Callable[[str, bytes], None], drop: Callable[[], None]
    ) -> None:
        """See `BlobStore.draft`.

        Args:
            place: its room.
            keep: takes digest and piece index once it is complete.
            drop: gives the room back.
        """
        self.num_bytes = place.num_bytes
        self._place, self._keep, self._drop = place, keep, drop
        self._num_written = 0
        self._piece = blake3()
        self._index = bytearray()
        self._is_closed = False

    def write(self, content: Buffer) -> None:
        """Appends bytes; about 0.5 s per GB beside the disk.

        Raises:
            StateError: the disk did not take them. Nothing was appended, so the same bytes may be
                written again.
            ValueError: there is no room for so many, or the draft is finished or discarded.
        """
        view = memoryview(content).cast("B")
        if self._is_closed:
            raise ValueError("the draft is finished or discarded")
        if self._num_written + len(view) > self.num_bytes:
            raise ValueError(
                f"{self._num_written} + {len(view)} bytes for a draft of {self.num_bytes}"
            )
        self._place.pack.write(self._place.offset, self._num_written, view)
        while view:
            room = PIECE_BYTES - self._num_written % PIECE_BYTES
            part, view = view[:room], view[room:]
            self._piece.update(part)
            self._num_written += len(part)
            if self._num_written % PIECE_BYTES == 0 or self._num_written == self.num_bytes:
                self._index += self._piece.digest()
                self._piece = blake3()

    def finish(self) -> str:
        """Makes it one of the store's blobs, pinned once, and returns its digest.

        Raises:
            ValueError: bytes are missing, or the draft is finished or discarded.
        """
        if self._is_closed or self._num_written != self.num_bytes:
            state = "closed" if self._is_closed else "open"
            raise ValueError(
                f"{self._num_written} of {self.num_bytes} bytes came; the draft is {state}"
            )
        self._is_closed = True
        digest = digest_of_index(bytes(self._index))
        self._keep(digest, bytes(self._index))
        return digest

    def discard(self) -> None:
        """Gives the room back; does nothing to a draft that is finished or discarded."""
        if not self._is_closed:
            self._is_closed = True
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()
