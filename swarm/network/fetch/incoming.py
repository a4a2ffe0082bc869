"""A blob that is being fetched: its callers, its missing pieces, and its checks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from swarm.codecs import Content
from swarm.errors import BadBlob
from swarm.network.blobs.blob_store import BlobStore, Partial
from swarm.protocol.values.digests import PIECE_BYTES, digest_of

logger = logging.getLogger(__name__)

Check = Callable[[str, Content], None]
Verdicts = Mapping["Check | None", str | None]
"""The verdict of each check on a content: None, or a short reason to refuse it."""
OnBlob = Callable[[str], None]
OnFailure = Callable[[str, str, str], None]


@dataclass(eq=False)
class Caller:
    """One call of `fetch` and the digests that it still waits for."""

    check: Check | None
    on_blob: OnBlob
    on_failure: OnFailure
    finished: asyncio.Future[None]
    waits_for: set[str] = field(default_factory=set)

    def arrived(self, digest: str) -> None:
        """The blob is in the store."""
        self.waits_for.discard(digest)
        self.on_blob(digest)
        if not self.waits_for and not self.finished.done():
            self.finished.set_result(None)

    def failed(self, digest: str, peer: str, reason: str) -> None:
        """Reports a failed attempt; an exception of the callback ends only this call."""
        try:
            self.on_failure(digest, peer, reason)
        except Exception as error:  # noqa: BLE001 - the waiting caller raises it
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the call with an error."""
        if not self.finished.done():
            self.finished.set_exception(error)


@dataclass(eq=False)
class Incoming:
    """A blob that is being downloaded.

    Attributes:
        digest: digest of its content.
        num_bytes: size of the blob, or its largest acceptable size.
        exact: whether `num_bytes` is the size.
        partial: the pieces of a blob of several pieces.
        sources: peers that may have the blob, in order of preference.
        callers: calls that wait for the blob.
        last_check: the check of the caller that left last, used for requested pieces without a
            waiting caller.
        pieces: pieces that are still missing.
    """

    digest: str
    num_bytes: int
    exact: bool
    partial: Partial | None = None
    sources: list[str] = field(default_factory=list)
    callers: list[Caller] = field(default_factory=list)
    last_check: Check | None = None
    pieces: list[Piece] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int, bool]:
        """The key of a download, which callers with equal keys share."""
        return (self.digest, self.num_bytes, self.exact)

    @property
    def needs_index(self) -> bool:
        """Whether the next request must ask for the piece index."""
        return self.partial is not None and self.partial.index is None

    def checks(self) -> list[Check | None]:
        """The checks of all callers."""
        return [caller.check for caller in self.callers] or [self.last_check]

    def fault(self, check: Check | None, last_piece: memoryview) -> str | None:
        """A short reason why this check refuses the content; None if it accepts."""
        if check is None:
            return None
        try:
            check(self.digest, self.partial.content() if self.partial else Content.of(last_piece))
        except BadBlob as error:
            logger.warning("blob %s refused: %s", self.digest, error)
            return error.reason
        return None

    def keep(self, store: BlobStore, last_piece: memoryview) -> None:
        """Adds the blob to the store; raises StateError if the disk does not take it."""
        if self.partial:
            store.keep(self.partial)
        else:
            store.put(last_piece, self.digest)

    def tell(self, verdicts: Verdicts) -> None:
        """Reports its check's verdict to each caller: None, or why the content is refused."""
        for caller in list(self.callers):
            fault = verdicts[caller.check]
            if fault is None:
                caller.arrived(self.digest)
                continue
            # The content follows from the digest, so every other source would send the same.
            for peer in self.sources:
                caller.failed(self.digest, peer, fault)


@dataclass(frozen=True)
class Piece:
    """The part of a blob for which one request asks; a key in the tables of sources."""

    blob: Incoming
    number: int

    @property
    def num_bytes(self) -> int:
        """Size of the piece, as far as the blob's size is known."""
        return max(0, min(PIECE_BYTES, self.blob.num_bytes - self.number * PIECE_BYTES))

    def __str__(self) -> str:
        return f"{self.blob.digest}[{self.number}]"

    def verify(self, content: memoryview) -> None:
        """Raises BadBlob for wrong bytes; keeps correct bytes if the blob has several pieces."""
        blob = self.blob
        if blob.partial:
            blob.partial.write_piece(self.number, content)
        elif digest_of(content) != blob.digest:
            raise BadBlob("blob_digest", f"{blob.digest}: the content has another digest")
