"""The chain of heads on disk: one link a line, appended before the record that ends with it.

It is replaced when heads have come that it lacked, but for the reforms in it.

Layout of a line: 64 hex digits of BLAKE3 over the JSON, a blank, the link as canonical JSON. A line
that does not match its digest is torn or was changed and is left out; a peer that lacks links can
prove less to others, and believes nothing more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from swarm import durable
from swarm.errors import BadMessage
from swarm.protocol.manifest import Kind
from swarm.protocol.messages import Link
from swarm.protocol.recording import decode_link, encode_link
from swarm.protocol.trust import with_reforms

logger = logging.getLogger(__name__)

REFORM = f'"{Kind.REFORM.value}"'.encode()
"""Is in the line of each link whose head is a reform, and of some others."""


@dataclass(frozen=True)
class ChainFile:
    """Where one peer's chain of one run lives."""

    path: Path

    def append(self, links: Sequence[Link]) -> None:
        """Makes links durable, behind those that are there."""
        if not links:
            return
        durable.append_lines(self.path, b"".join(_line(link) for link in links), sync=True)

    def rewrite(self, links: Sequence[Link]) -> None:
        """Puts these links in the place of those that are there, durably.

        Raises:
            OSError: the disk refused to write; what cannot be read is replaced.
        """
        kept = with_reforms(links, self.read(holding=REFORM))
        durable.write_file(self.path, b"".join(_line(link) for link in kept))

    def read(self, *, holding: bytes = b"") -> tuple[Link, ...]:
        """All links that are whole, oldest first; none if there is no file, or no reading it.

        Args:
            holding: those alone whose lines hold these bytes; at 256 members a line has 34 kB.
        """
        try:
            return tuple(self._read(holding))
        except OSError as error:
            logger.warning("%s cannot be read: %s", self.path.name, error.strerror)
            return ()

    def _read(self, holding: bytes) -> Iterator[Link]:
        if not self.path.exists():
            return
        for number, line in enumerate(self.path.read_bytes().split(b"\n"), 1):
            digest, _, body = line.partition(b" ")
            if not line or holding not in line:
                continue
            if blake3(body).hexdigest().encode() != digest:
                logger.warning("%s: line %d is torn or was changed", self.path.name, number)
                continue
            try:
                yield decode_link(body)
            except BadMessage as error:
                logger.warning("%s: line %d: %s", self.path.name, number, error)


def _line(link: Link) -> bytes:
    body = encode_link(link)
    return blake3(body).hexdigest().encode() + b" " + body + b"\n"
