"""Bulk transfers of a simulated peer: small, but lossy, slow and rotating like the real ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from swarm.emulation.simulator.shell import Shell
from swarm.protocol.events import Fetch, Purpose, Stored, Unobtainable
from swarm.protocol.manifest import Digest, PeerId

ANSWER_WITHIN_S = 2.5
"""How long a source may be silent while it is to send."""
PAUSE_S = 0.3
"""Wait before a blob is asked for elsewhere."""
PAUSE_AFTER_ALL_S = 1.2
"""Wait after every source of a blob has failed."""


class Get(NamedTuple):
    """Asks for blobs."""

    number: int
    digests: tuple[Digest, ...]


class Data(NamedTuple):
    """Answers a `Get`: which blobs came, and which the sender does not have."""

    number: int
    found: tuple[Digest, ...]
    absent: tuple[Digest, ...]


class FetchingShell(Shell, Protocol):
    """What a fetcher needs of its peer."""

    def post(self, destination: PeerId, payload: Get | Data) -> None:
        """Sends it; it may be lost."""


class CatchUp:
    """Which manifest a peer fetches to apply it, and in which events this began and ended [X1].

    Effects are carried out after the whole event, when the machine may pursue another manifest
    than the one a first `Fetch` was for. So what begins and ends within one event is not judged.
    """

    def __init__(self) -> None:
        self.event = 0
        self._digest: Digest = ""
        self._began, self._ended = 0, inf

    def may_begin(self, digest: Digest) -> bool:
        """Whether this manifest is another, or was given up by an earlier event than this."""
        return digest != self._digest or self._began == self.event or self._ended < self.event

    def begin(self, digest: Digest) -> None:
        """This event has it fetched."""
        self._digest, self._began, self._ended = digest, self.event, inf

    def end(self) -> None:
        """This event gives it up, if none has before."""
        self._ended = min(self._ended, self.event)


class Fetcher:
    """Runs at most one transfer per purpose."""

    def __init__(self, shell: FetchingShell) -> None:
        self._shell = shell
        self._numbers = 0
        self._running: dict[Purpose, dict[Digest, _Want]] = {}
        self._asked: dict[int, tuple[Purpose, PeerId, tuple[_Want, ...]]] = {}

    def start(self, fetch: Fetch) -> None:
        """Begins a transfer; the one of the same purpose ends."""
        wants = {
            want.digest: _Want(want.digest, want.num_bytes, want.sources) for want in fetch.wants
        }
        self._running[fetch.purpose] = wants
        self._ask(fetch.purpose, tuple(wants.values()))

    def cancel(self, purpose: Purpose) -> None:
        """Ends the transfer of this purpose."""
        self._running.pop(purpose, None)

    def serve(self, source: PeerId, get: Get) -> None:
        """Answers with what is on the disk."""
        disk = self._shell.disk
        found = tuple(digest for digest in get.digests if digest in disk)
        absent = tuple(digest for digest in get.digests if digest not in disk)
        self._shell.post(source, Data(get.number, found, absent))

    def take(self, source: PeerId, data: Data) -> None:
        """Stores what came, and turns to other sources for what did not."""
        asked = self._asked.pop(data.number, None)
        if asked is None or asked[1] != source:
            return
        purpose, _, wants = asked
        wanted = {want.digest: want for want in wants if self._is_wanted(purpose, want)}
        for digest in data.found:
            if digest in wanted:
                self._running[purpose].pop(digest, None)
                self._shell.disk.write(digest)
                self._shell.tell(Stored(digest))
        self._failed(
            purpose, source, tuple(wanted[d] for d in data.absent if d in wanted), "absent"
        )

    def _is_wanted(self, purpose: Purpose, want: _Want) -> bool:
        return self._running.get(purpose, {}).get(want.digest) is want

    def _ask(self, purpose: Purpose, wants: tuple[_Want, ...]) -> None:
        by_source: dict[PeerId, list[_Want]] = {}
        for want in wants:
            if not self._is_wanted(purpose, want):
                continue
            if want.digest in self._shell.disk:
                del self._running[purpose][want.digest]
                self._shell.tell(Stored(want.digest))
            elif want.sources:
                by_source.setdefault(want.source, []).append(want)
        for source, batch in by_source.items():
            self._numbers += 1
            number = self._numbers
            self._asked[number] = (purpose, source, tuple(batch))
            self._shell.post(source, Get(number, tuple(want.digest for want in batch)))
            self._shell.after(ANSWER_WITHIN_S, self._overdue, number)

    def _overdue(self, number: int) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            purpose, source, wants = asked
            self._failed(purpose, source, wants, f"no answer within {ANSWER_WITHIN_S} s")

    def _failed(
        self, purpose: Purpose, source: PeerId, wants: tuple[_Want, ...], reason: str
    ) -> None:
        again = tuple(want for want in wants if self._is_wanted(purpose, want))
        if not again:
            return
        for want in again:
            want.turn += 1
            self._shell.tell(Unobtainable(want.digest, source, reason))
        all_failed = all(want.turn % len(want.sources) == 0 for want in again)
        self._shell.after(PAUSE_AFTER_ALL_S if all_failed else PAUSE_S, self._ask, purpose, again)


@dataclass(eq=False, slots=True)
class _Want:
    """A blob and whose turn it is."""

    digest: Digest
    num_bytes: int
    sources: tuple[PeerId, ...]
    turn: int = 0

    @property
    def source(self) -> PeerId:
        return self.sources[self.turn % len(self.sources)]
