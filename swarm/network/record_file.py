"""The protocol's record on disk: one small file, replaced atomically, with its predecessor kept.

Layout: 64 hex digits of BLAKE3 over the rest, a newline, the encoded record. A file whose digest
does not match is torn or was changed; the predecessor is used then, and the peer abstains from
votes that it might already have cast [P5].
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from blake3 import blake3

from swarm import durable
from swarm.errors import BadManifest, BadMessage, CorruptState, no_access
from swarm.network.chain_file import ChainFile
from swarm.protocol import abstaining
from swarm.protocol.events import Record
from swarm.protocol.manifest import Head
from swarm.protocol.messages import Link
from swarm.protocol.recording import decode_record, encode_record
from swarm.protocol.trust import RECENT, Chain

logger = logging.getLogger(__name__)

_NO_DAMAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What keeps a file from being read that is whole."""


def with_digest(body: bytes) -> bytes:
    """What a file holds that is to notice when it was torn or changed."""
    return blake3(body).hexdigest().encode() + b"\n" + body


def without_digest(content: bytes) -> bytes | None:
    """The body of such a file; None if it is not what was written."""
    digest, _, body = content.partition(b"\n")
    return body if blake3(body).hexdigest().encode() == digest else None


@dataclass(frozen=True)
class RecordFile:
    """Where one peer's record of one run lives."""

    path: Path

    @property
    def previous(self) -> Path:
        """The record before the newest."""
        return self.path.with_suffix(".previous")

    @cached_property
    def chain(self) -> ChainFile:
        """The heads behind the record's tip, beside it."""
        return ChainFile(self.path.with_name("chain"))

    def write(self, record: Record, links: Sequence[Link] = ()) -> None:
        """Makes the record durable: when this returns it survives a kill and a power cut.

        Before it, what the chain of heads has gained: a link more than the tip's does no harm.
        Killed at any moment, it leaves an intact record, if there was one.
        """
        self.chain.append(links)
        content = with_digest(encode_record(record))
        if self._is_lost():
            # The damaged one must not become the predecessor, nor the one before it stay there:
            # its peer may have voted at more heights since than it would abstain from [P5].
            durable.write_file(self.previous, content)
            durable.write_file(self.path, content)
        else:
            durable.write_file(self.path, content, previous=self.previous)

    def _is_lost(self) -> bool:
        """Whether there was a record and the newest is missing or damaged."""
        try:
            return without_digest(self.path.read_bytes()) is None
        except FileNotFoundError:
            return self.previous.exists()
        except OSError as error:
            logger.warning("%s cannot be read: %s", self.path, error.strerror)
            return True

    def read(self) -> Record | None:
        """The newest intact record, or None when this peer never had one.

        Raises:
            CorruptState: files are there, but none is intact.
            StateError: this user may not read them.
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
                hint="without a record a peer cannot tell what it has promised: join the others "
                "with a new --state-dir and --initial-peers ADDRESS, or, if there are none, found "
                "the run anew with --run FILE and a new --state-dir",
            )
        return None

    def read_chain(self, record: Record, founding: Head | None = None) -> Chain:
        """The chain that ends with the record's tip; writes the file if there is none.

        Args:
            record: of this peer.
            founding: manifest 0's head, with which a chain begins again that has lost its
                beginning.
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
        """The record before the newest, when the newest's state is lost; None if there is none.

        Its votes are forgotten too: they were for what was lost.
        """
        try:
            record = _read(self.previous)
        except (FileNotFoundError, CorruptState):
            return None
        return abstaining.rolled_back(replace(record, promised=None, accepted=None))


def _rolled_back(record: Record, problems: list[str]) -> Record:
    abstaining_record = abstaining.rolled_back(record)
    logger.warning(
        "%s; going on from height %d without voting up to height %d",
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
    except OSError as error:  # as of a sector that went bad
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
    repaired = abstaining.repaired(record)
    if repaired:
        logger.warning(
            "%s has a ballot beyond the bound; going on without it and without voting up to "
            "height %d",
            path.name,
            repaired.abstain_until_height,
        )
    return repaired or record
