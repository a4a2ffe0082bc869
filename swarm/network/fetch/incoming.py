"""A blob on its way in: who waits for it, which pieces are to come, and whether it is right."""

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
"""Of each check that has judged a content: None, or why it refuses it, in a short word."""
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
        """One attempt failed; a caller that cannot take that is ended, and nobody else."""
        try:
            self.on_failure(digest, peer, reason)
        except Exception as error:  # noqa: BLE001 - it is raised where the call is waited for
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the call with an error."""
        if not self.finished.done():
            self.finished.set_exception(error)


@dataclass(eq=False)
class Incoming:
    """A blob that is being downloaded.

    Attributes:
        digest: that its content must have.
        num_bytes: its size, or the largest acceptable one.
        exact: whether `num_bytes` is the size.
        partial: where the pieces of a blob of several go.
        sources: who may have it, in order of preference.
        callers: who waits for it.
        last_check: of the caller that left last; what nobody waits for any more but has been asked
            for is checked all the same.
        pieces: still to come.
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
        """Two callers share a download if they agree on this."""
        return (self.digest, self.num_bytes, self.exact)

    @property
    def needs_index(self) -> bool:
        """Whether the next ask must bring the piece index."""
        return self.partial is not None and self.partial.index is None

    def checks(self) -> list[Check | None]:
        """Of all who wait for it."""
        return [caller.check for caller in self.callers] or [self.last_check]

    def fault(self, check: Check | None, last_piece: memoryview) -> str | None:
        """Why this check refuses the content, in a short word; None if it does not."""
        if check is None:
            return None
        try:
            check(self.digest, self.partial.content() if self.partial else Content.of(last_piece))
        except BadBlob as error:
            logger.warning("blob %s refused: %s", self.digest, error)
            return error.reason
        return None

    def keep(self, store: BlobStore, last_piece: memoryview) -> None:
        """Makes it one of the store's; StateError if the disk does not take it."""
        if self.partial:
            store.keep(self.partial)
        else:
            store.put(last_piece, self.digest)

    def tell(self, verdicts: Verdicts) -> None:
        """Tells each caller what its check said: None, or why the content is refused."""
        for caller in list(self.callers):
            fault = verdicts[caller.check]
            if fault is None:
                caller.arrived(self.digest)
                continue
            # The digest fixes the content, so every other source would send the same.
            for peer in self.sources:
                caller.failed(self.digest, peer, fault)


@dataclass(frozen=True)
class Piece:
    """What is asked for in one go; the key of all sourcing."""

    blob: Incoming
    number: int

    @property
    def num_bytes(self) -> int:
        """Its size, as far as the blob's is known."""
        return max(0, min(PIECE_BYTES, self.blob.num_bytes - self.number * PIECE_BYTES))

    def __str__(self) -> str:
        return f"{self.blob.digest}[{self.number}]"

    def verify(self, content: memoryview) -> None:
        """Raises BadBlob for wrong bytes; keeps right ones if the blob has several pieces."""
        blob = self.blob
        if blob.partial:
            blob.partial.write_piece(self.number, content)
        elif digest_of(content) != blob.digest:
            raise BadBlob("blob_digest", f"{blob.digest}: the content has another digest")
