"""Digests, the names of blobs.

A blob is any byte string: the value of a unit, an offer, a manifest, a run configuration. It is cut
into pieces of 4 MiB (the last may be shorter; the empty blob has none). Its name is its *digest*:
BLAKE3 over the concatenated BLAKE3 digests of its pieces, as 64 hex digits. So each piece of a
large blob can be checked when it arrives, from any peer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from blake3 import blake3

PIECE_BYTES = 4 * 2**20
DIGEST_BYTES = 32

Buffer = bytes | bytearray | memoryview


def pieces(blob: Buffer) -> Iterator[memoryview]:
    """The blob's pieces, in order, without copying."""
    view = memoryview(blob).cast("B")
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def num_pieces(num_bytes: int) -> int:
    """How many pieces a blob of this size has."""
    return -(-num_bytes // PIECE_BYTES)


def piece_index(blob: Buffer) -> bytes:
    """Concatenated digests of the blob's pieces, 32 bytes each."""
    return b"".join(blake3(piece).digest() for piece in pieces(blob))


def digest_of_index(index: bytes) -> str:
    """The digest of the blob whose pieces have these concatenated digests."""
    return blake3(index).hexdigest()


def digest_of(blob: Buffer) -> str:
    """The digest that names this blob."""
    return digest_of_index(piece_index(blob))


def digest_of_chunks(chunks: Iterable[Buffer]) -> str:
    """The digest of the blob with these bytes, whatever the sizes of the chunks."""
    index, piece, room = bytearray(), blake3(), PIECE_BYTES
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while view:
            part, view = view[:room], view[room:]
            piece.update(part)
            room -= len(part)
            if not room:
                index += piece.digest()
                piece, room = blake3(), PIECE_BYTES
    if room < PIECE_BYTES:
        index += piece.digest()
    return digest_of_index(bytes(index))
