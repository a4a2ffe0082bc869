"""A large blob on its way in: verified piece by piece, so that nothing good is fetched twice."""

from __future__ import annotations

from collections.abc import Iterator

from blake3 import blake3

from swarm.codecs import Content
from swarm.errors import BadBlob
from swarm.network.pack_set import Place
from swarm.protocol.digests import DIGEST_BYTES, PIECE_BYTES, Buffer, digest_of_index, num_pieces


class Partial:
    """A blob that is still arriving: room in a pack, and which verified pieces lie there.

    Attributes:
        digest: what it will be.
        num_bytes: how long it will be.
        index: concatenated digests of its pieces, once known.
        place: its room.
    """

    def __init__(self, digest: str, place: Place) -> None:
        self.digest = digest
        self.num_bytes = place.num_bytes
        self.index: bytes | None = None
        self.place = place
        self._have: set[int] = set()

    def set_index(self, index: bytes) -> None:
        """Takes the piece index; BadBlob unless it is the one that the digest names."""
        if len(index) != DIGEST_BYTES * num_pieces(self.num_bytes):
            raise BadBlob("blob_index", f"{self.digest}: piece index of {len(index)} bytes")
        if digest_of_index(index) != self.digest:
            raise BadBlob("blob_index", f"{self.digest}: the piece index has another digest")
        self.index = index

    def has_piece(self, number: int) -> bool:
        """Whether this piece has arrived and was verified."""
        return number in self._have

    @property
    def num_bytes_here(self) -> int:
        """Bytes of the pieces that have arrived, the last of which may be shorter."""
        return min(len(self._have) * PIECE_BYTES, self.num_bytes)

    @property
    def complete(self) -> bool:
        """Whether all pieces are there."""
        return len(self._have) == num_pieces(self.num_bytes)

    def write_piece(self, number: int, piece: memoryview) -> None:
        """Verifies and keeps one piece; 4 MiB take about 2 ms. BadBlob if it is another's."""
        assert self.index is not None, "pieces cannot be verified without the index"
        start = DIGEST_BYTES * number
        if blake3(piece).digest() != self.index[start : start + DIGEST_BYTES]:
            raise BadBlob("blob_digest", f"{self.digest}: piece {number} has another digest")
        self.place.pack.write(self.place.offset, number * PIECE_BYTES, piece)
        self._have.add(number)

    def content(self) -> Content:
        """All bytes, once complete; read piece by piece."""
        return Content(self.num_bytes, self._pieces)

    def _pieces(self) -> Iterator[Buffer]:
        for start in range(0, self.num_bytes, PIECE_BYTES):
            length = min(PIECE_BYTES, self.num_bytes - start)
            yield self.place.read(start, length)
