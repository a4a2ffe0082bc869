"""The protocol's record on disk: one small file, replaced atomically, and its chain of heads.

The chain file has one link a line. A link is appended before the record that ends with it.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from blake3 import blake3

from swarm import durable
from swarm.errors import BadManifest, BadMessage, CorruptState, no_access
from swarm.protocol.chain import chain_record
from swarm.protocol.chain.chain_record import decode_link, decode_record, encode_link, encode_record
from swarm.protocol.chain.trust import RECENT, Chain, with_reforms
from swarm.protocol.messages.events import Record
from swarm.protocol.messages.messages import Link
from swarm.protocol.values.manifest import Digest, Head, Kind

logger = logging.getLogger(__name__)

REFORM = f'"{Kind.REFORM.value}"'.encode()
"""Text in the line of each link whose head is a reform, and in some other lines."""


@dataclass(frozen=True)
class Kept:
    """The content of a chain file.

    Attributes:
        links: all intact links, in the order of writing.
        torn: digests of the heads whose line follows directly after a damaged line.
        has_beginning: whether the first line is intact.
        has_end: whether the last line is intact.
    """

    links: tuple[Link, ...] = ()
    torn: frozenset[Digest] = frozenset()
    has_beginning: bool = False
    has_end: bool = False


@dataclass(frozen=True)
class ChainFile:
    """The file of one peer's chain of one run; its methods may run in several threads."""

    path: Path
    _writing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """Held for milliseconds while lines are added, or the file is replaced."""
    _replacing: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def append(self, links: Sequence[Link]) -> None:
        """Appends links to the file, durably."""
        if links:
            with self._writing:
                lines = b"".join(map(_line, links))
                durable.append_lines(self.path, lines, sync=True)

    def rewrite(self, links: Callable[[], Sequence[Link]]) -> None:
        """Replaces the links in the file, durably.

        Links that are appended during the write are kept, after the new links. An append waits only
        while the file is replaced.

        Args:
            links: returns the new links; called once, while no link is appended. The result must
                take the place of all links in the file.

        Raises:
            OSError: the disk refused to write. A file that cannot be read is replaced nevertheless.
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
        """The bytes appended since the file had this size."""
        if self._size() <= size:
            return b""
        with self.path.open("rb") as file:
            file.seek(size, os.SEEK_SET)
            return file.read()

    def read(self, *, holding: bytes = b"") -> tuple[Link, ...]:
        """All intact links, oldest first; none if there is no file, or it cannot be read.

        Args:
            holding: limits the result to lines with these bytes; at 256 members a line has 34 kB.
        """
        return tuple(link for link in self._read(holding) if link)

    def read_kept(self) -> Kept:
        """All intact links, and where links are lost."""
        links, torn, is_torn = list[Link](), set[Digest](), not self.path.exists()
        has_beginning = not is_torn
        for link in self._read(b""):
            if link is None:
                is_torn = True
                continue
            if is_torn:
                has_beginning = has_beginning and bool(links)
                link = replace(link, alike=False)  # the previous line is lost
                torn.add(link.head.digest)
            links.append(link)
            is_torn = False
        return Kept(tuple(links), frozenset(torn), has_beginning and bool(links), not is_torn)

    def _read(self, holding: bytes) -> Iterator[Link | None]:
        """The links; None for a damaged line, or for the unreadable rest of a file."""
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


_NO_DAMAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors that prevent reading an intact file."""


def with_digest(body: bytes) -> bytes:
    """The bytes of a file that begins with the digest of its body, so that damage is noticed."""
    return blake3(body).hexdigest().encode() + b"\n" + body


def without_digest(content: bytes) -> bytes | None:
    """The body of a file made by `with_digest`; None if the file was torn or changed."""
    digest, _, body = content.partition(b"\n")
    return body if blake3(body).hexdigest().encode() == digest else None


@dataclass(frozen=True)
class RecordFile:
    """The file of one peer's record of one run."""

    path: Path

    @property
    def previous(self) -> Path:
        """The record before the newest."""
        return self.path.with_suffix(".previous")

    @cached_property
    def chain(self) -> ChainFile:
        """The heads that lead to the record's tip, in a file in the same folder."""
        return ChainFile(self.path.with_name("chain"))

    def write(self, record: Record, links: Sequence[Link] = ()) -> None:
        """Makes the record durable: when this returns it survives a kill and a power cut.

        The new links of the chain of heads are written first, since a link after the tip does no
        harm. After a kill at any moment there is an intact record, if there was one before.
        """
        self.chain.append(links)
        content = with_digest(encode_record(record))
        if self._is_lost():
            # The damaged record must not become the previous one. The older record must not stay
            # either: the peer may have voted, after that record, at more heights than it would
            # abstain from [P5].
            durable.write_file(self.previous, content)
            durable.write_file(self.path, content)
        else:
            durable.write_file(self.path, content, previous=self.previous)

    def _is_lost(self) -> bool:
        """Whether there was a record, but the newest is missing or damaged."""
        try:
            return without_digest(self.path.read_bytes()) is None
        except FileNotFoundError:
            return self.previous.exists()
        except OSError as error:
            logger.warning("%s cannot be read: %s", self.path, error.strerror)
            return True

    def read(self) -> Record | None:
        """The newest intact record; None if this peer never had a record.

        Raises:
            CorruptState: files are there, but none is intact.
            StateError: this user may not read the files.
            OSError: this process, or the machine, has too many files open.
        """
        problems = []
        for path in (self.path, self.previous):
            try:
                record = _read(path)
            except FileNotFoundError:
                problems.append(f"{path.name} is missing")
                continue
            except CorruptState as error:
                problems.append(str(error))
                continue
            return _rolled_back(record, problems) if problems else record
        if self.path.exists() or self.previous.exists():
            raise CorruptState(
                f"{self.path.parent}: {'; '.join(problems)}",
                hint="without a record a peer does not know its promises: join the others "
                "with a new --state-dir and --initial-peers ADDRESS, or, if there are none, found "
                "the run again with --run FILE and a new --state-dir",
            )
        return None

    def read_chain(self, record: Record, founding: Head | None = None) -> Chain:
        """The chain that ends with the record's tip; writes the file if there is none.

        Args:
            record: record of this peer.
            founding: manifest 0's head, with which a chain begins if its beginning is lost.
        """
        kept = self.chain.read_kept()
        links, torn = kept.links, kept.torn
        if not kept.has_end:
            torn |= {record.tip.head.digest}
        if founding and not kept.has_beginning and founding.digest != record.tip.head.digest:
            logger.warning("%s lacks its beginning; members are asked", self.chain.path.name)
            links = (Link(founding), *links)
        chain = Chain.of(record, links, torn)
        if len(links) > 2 * len(chain.links) + RECENT or not self.chain.path.exists():
            self.chain.rewrite(lambda: chain.links)
        return chain

    def read_earlier(self) -> Record | None:
        """The record before the newest, for a peer whose newest state is lost; or None.

        The vote in the record is dropped, since it was for values that are lost.
        """
        try:
            record = _read(self.previous)
        except (FileNotFoundError, CorruptState):
            return None
        return chain_record.rolled_back(replace(record, promised=None, accepted=None))


def _rolled_back(record: Record, problems: list[str]) -> Record:
    abstaining_record = chain_record.rolled_back(record)
    logger.warning(
        "%s; continuing from height %d without voting up to height %d",
        "; ".join(problems),
        record.tip.height,
        abstaining_record.abstain_until_height,
    )
    return abstaining_record


def _read(path: Path) -> Record:
    try:
        body = without_digest(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:  # for example, a bad sector
        if denied := no_access(error):
            raise denied from error
        if error.errno in _NO_DAMAGE:
            raise
        raise CorruptState(f"{path.name} cannot be read: {error.strerror}") from error
    if body is None:
        raise CorruptState(f"{path.name} is torn or was changed")
    try:
        record = decode_record(body)
    except (BadManifest, BadMessage) as error:
        raise CorruptState(f"{path.name} cannot be read: {error}") from error
    repaired = chain_record.repaired(record)
    if repaired:
        logger.warning(
            "%s has a ballot beyond the bound; continuing without it and without voting up to "
            "height %d",
            path.name,
            repaired.abstain_until_height,
        )
    return repaired or record
