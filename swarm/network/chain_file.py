"""The chain of heads on disk: one link a line, appended before the record that ends with it.

The chain in memory leaves out what proofs no longer need [L3]. The file is replaced, with the
reforms of other branches, once half of it is such, and when links have come that it had lost.

Layout of a line: 64 hex digits of BLAKE3 over the JSON, a blank, the link as canonical JSON. A line
that does not match its digest is torn or was changed and is left out. A peer that lacks links can
prove less to others, and believes nothing more.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from blake3 import blake3

from swarm import durable
from swarm.errors import BadMessage
from swarm.protocol.manifest import Digest, Kind
from swarm.protocol.messages import Link
from swarm.protocol.recording import decode_link, encode_link
from swarm.protocol.trust import with_reforms

logger = logging.getLogger(__name__)

REFORM = f'"{Kind.REFORM.value}"'.encode()
"""Is in the line of each link whose head is a reform, and of some others."""


@dataclass(frozen=True)
class Kept:
    """What was read of a chain file.

    Attributes:
        links: all that are whole, as they were written.
        torn: digests of links that are behind a damaged line.
        has_beginning: whether the first line is whole.
        has_end: whether the last line is.
    """

    links: tuple[Link, ...] = ()
    torn: frozenset[Digest] = frozenset()
    has_beginning: bool = False
    has_end: bool = False


@dataclass(frozen=True)
class ChainFile:
    """Where one peer's chain of one run lives; its methods may run in several threads."""

    path: Path
    _writing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """While lines are added, or the file changes place: milliseconds."""
    _replacing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def append(self, links: Sequence[Link]) -> None:
        """Makes links durable, behind those that are there."""
        if links:
            with self._writing:
                lines = b"".join(map(_line, links))
                durable.append_lines(self.path, lines, sync=True)

    def rewrite(self, links: Callable[[], Sequence[Link]]) -> None:
        """Puts these links in the place of those that are there, durably.

        What is appended while this writes stays behind them, and waits for no more than the change
        of place.

        Args:
            links: asked once, for the links of now; all that are in the file by then are judged.

        Raises:
            OSError: the disk refused to write; what cannot be read is replaced.
        """
        with self._replacing:
            reforms, new = self.read(holding=REFORM), durable.beside(self.path)
            with self._writing:
                size, now = self._size(), links()
            new.write_bytes(b"".join(map(_line, with_reforms(now, reforms))))
            durable.sync_file(new)
            with self._writing:
                if since := self._since(size):
                    durable.append_lines(new, since, sync=True)
                durable.put_in_place(self.path)

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def _since(self, size: int) -> bytes:
        """What was appended since the file had so many bytes."""
        if self._size() <= size:
            return b""
        with self.path.open("rb") as file:
            file.seek(size, os.SEEK_SET)
            return file.read()

    def read(self, *, holding: bytes = b"") -> tuple[Link, ...]:
        """All links that are whole, oldest first; none if there is no file, or no reading it.

        Args:
            holding: those alone whose lines hold these bytes; at 256 members a line has 34 kB.
        """
        return tuple(link for link in self._read(holding) if link)

    def read_kept(self) -> Kept:
        """The same, and where some are lost."""
        links, torn, is_torn = list[Link](), set[Digest](), not self.path.exists()
        has_beginning = not is_torn
        for link in self._read(b""):
            if link is None:
                is_torn = True
                continue
            if is_torn:
                has_beginning = has_beginning and bool(links)
                link = replace(link, alike=False)  # than one that is not here
                torn.add(link.head.digest)
            links.append(link)
            is_torn = False
        return Kept(tuple(links), frozenset(torn), has_beginning and bool(links), not is_torn)

    def _read(self, holding: bytes) -> Iterator[Link | None]:
        """The links; None in the place of a damaged line, or of the rest if it cannot be read."""
        if not self.path.exists():
            return
        try:
            yield from self._lines(holding)
        except OSError as error:
            logger.warning("%s cannot be read: %s", self.path.name, error.strerror)
            yield None

    def _lines(self, holding: bytes) -> Iterator[Link | None]:
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and holding in line:
                    yield self._link(line.rstrip(b"\n"), number)

    def _link(self, line: bytes, number: int) -> Link | None:
        digest, _, body = line.partition(b" ")
        if blake3(body).hexdigest().encode() != digest:
            logger.warning("%s: line %d is torn or was changed", self.path.name, number)
            return None
        try:
            return decode_link(body)
        except BadMessage as error:
            logger.warning("%s: line %d: %s", self.path.name, number, error)
            return None


def _line(link: Link) -> bytes:
    body = encode_link(link)
    return blake3(body).hexdigest().encode() + b" " + body + b"\n"
