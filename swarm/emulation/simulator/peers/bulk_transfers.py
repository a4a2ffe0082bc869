"""Bulk transfers of a simulated peer: small, but with losses, delays and changes of source."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple, Protocol

from swarm.emulation.simulator.symbols.crash_disk import Shell
from swarm.emulation.simulator.symbols.signing import holds
from swarm.errors import BadMessage
from swarm.protocol.chain.gaps import Filling, between, filled, gaps
from swarm.protocol.messages.events import Fetch, HeadsFound, Purpose, Stored, Unobtainable
from swarm.protocol.messages.messages import Link
from swarm.protocol.messages.signatures import sound
from swarm.protocol.rounds import RoundMachine
from swarm.protocol.values.manifest import Digest, PeerId

ANSWER_WITHIN_S = 2.5
"""Seconds for which a source may be silent while it should send."""
PAUSE_S = 0.3
"""Wait before another source is asked for a blob."""
PAUSE_AFTER_ALL_S = 1.2
"""Wait after every source of a blob has failed."""


class Get(NamedTuple):
    """Asks for blobs."""

    number: int
    digests: tuple[Digest, ...]


class Data(NamedTuple):
    """Answers a `Get`: blobs that came, and blobs that the sender does not have."""

    number: int
    found: tuple[Digest, ...]
    absent: tuple[Digest, ...]


class FetchingShell(Shell, Protocol):
    """The parts of its peer that a fetcher needs."""

    def post(self, destination: PeerId, payload: Get | Data) -> None:
        """Sends a question or an answer, which may be lost."""


class CatchUp:
    """The manifest that a peer fetches to apply, and the events of the fetch's begin and end [X1].

    Effects are carried out after the whole event. By then the machine may pursue another manifest
    than that of its first `Fetch`. A fetch that begins and ends within one event is therefore not
    judged.
    """

    def __init__(self) -> None:
        self.event = 0
        self._digest: Digest = ""
        self._began, self._ended = 0, inf

    def may_begin(self, digest: Digest) -> bool:
        """Whether no fetch of this manifest runs, or an earlier event gave the fetch up."""
        return digest != self._digest or self._began == self.event or self._ended < self.event

    def begin(self, digest: Digest) -> None:
        """Notes that this event begins the fetch of a manifest."""
        self._digest, self._began, self._ended = digest, self.event, inf

    def end(self) -> None:
        """Notes that this event gives the fetch up, unless an earlier event did."""
        self._ended = min(self._ended, self.event)


class Fetcher:
    """Runs at most one transfer per purpose."""

    def __init__(self, shell: FetchingShell) -> None:
        self._shell = shell
        self._numbers = 0
        self._running: dict[Purpose, dict[Digest, _Want]] = {}
        self._asked: dict[int, tuple[Purpose, PeerId, tuple[_Want, ...]]] = {}

    def start(self, fetch: Fetch) -> None:
        """Begins a transfer, and ends the previous one of the same purpose."""
        wants = {
            want.digest: _Want(want.digest, want.num_bytes, want.sources) for want in fetch.wants
        }
        self._running[fetch.purpose] = wants
        self._ask(fetch.purpose, tuple(wants.values()))

    def cancel(self, purpose: Purpose) -> None:
        """Ends the transfer of this purpose."""
        self._running.pop(purpose, None)

    def serve(self, source: PeerId, get: Get) -> None:
        """Answers with the blobs on the disk."""
        disk = self._shell.disk
        found = tuple(digest for digest in get.digests if digest in disk)
        absent = tuple(digest for digest in get.digests if digest not in disk)
        self._shell.post(source, Data(get.number, found, absent))

    def take(self, source: PeerId, data: Data) -> None:
        """Stores blobs that came, and asks other sources for the missing blobs."""
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
    """A blob, and the source that is asked next."""

    digest: Digest
    num_bytes: int
    sources: tuple[PeerId, ...]
    turn: int = 0

    @property
    def source(self) -> PeerId:
        return self.sources[self.turn % len(self.sources)]


FIRST_S = 0.5
ANSWER_S = 0.1
NEXT_S = 0.1
AGAIN_S = 0.3
"""Wait after a search without result. A real peer, whose rounds take minutes, waits 5 s, 1 s and a
minute. Rounds here take seconds, and in class absence each group of members leaves within 40 s."""
IDLE_S = 2.0
"""Wait while nothing is missing, or there is no peer to ask."""


class SearchingShell(Shell, Protocol):
    """The parts of its peer that the search for heads needs."""

    machine: RoundMachine

    def machine_of(self, name: PeerId) -> RoundMachine | None:
        """Another peer's machine, if the peer runs and the links work."""


class HeadSearch:
    """Fills the gaps of one peer's chain while its process lives."""

    def __init__(self, shell: SearchingShell) -> None:
        self._shell = shell
        self._begun: dict[tuple[Digest, Digest], Filling] = {}
        self._asked = 0
        shell.after(FIRST_S, self._look)

    def _look(self) -> None:
        """Asks one member for a page of one gap. Members and gaps take turns."""
        machine = self._shell.machine
        found = gaps(machine.chain)
        others = sorted(set(machine.tip.members) - {self._shell.me})
        if not found or not others:
            self._shell.after(IDLE_S, self._look)
            return
        self._asked += 1
        other = self._shell.machine_of(others[self._asked % len(others)])
        if other is None:
            self._shell.after(AGAIN_S, self._look)
            return
        gap = found[self._asked // len(others) % len(found)]
        filling = self._begun.get(gap.ends, gap)
        is_member = self._shell.me in other.tip.members  # strangers get none
        page = between(other.chain, filling.question) if is_member else ()
        self._shell.after(ANSWER_S, self._came, filling, page)

    def _came(self, filling: Filling, page: Sequence[Link]) -> None:
        is_sound = partial(sound, run=self._shell.machine.rules.run, holds=holds)
        try:
            filling = filling.extended(page, is_sound)
        except BadMessage:  # the member has no such links
            self._shell.after(AGAIN_S, self._look)
            return
        self._begun[filling.ends] = filling
        chain = self._shell.machine.chain
        _, problem = filled(chain, filling.path)
        if problem is None or filling.links[-1].head.code >= chain.tip.code:
            del self._begun[filling.ends]
        if problem is None:
            self._shell.tell(HeadsFound(filling.path))
        self._shell.after(NEXT_S, self._look)


class StreamingShell(FetchingShell, Protocol):
    """The parts of its peer that a streaming fetcher needs."""

    def is_there(self) -> bool:
        """Whether this peer runs, and is neither paused nor asleep."""

    def peer(self, name: PeerId) -> StreamingShell | None:
        """Another peer, if it runs and the links in both directions work."""

    @property
    def fetcher(self) -> Fetcher:
        """The fetcher of this peer's present life."""

    def rates(self) -> tuple[float, float]:
        """Limits of the bytes per second that this peer sends and receives."""

    def clock_s(self) -> float:
        """This peer's time."""

    def waits_on(self, *, is_flowing: bool) -> bool:
        """Whether to keep waiting for bytes that have not come yet."""

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """Notes a complete transfer, and for how long its bytes flowed."""


class StreamingFetcher(Fetcher):
    """A fetcher whose transfers take time."""

    def __init__(self, shell: StreamingShell) -> None:
        super().__init__(shell)
        self._peer = shell
        self.num_incoming = 0
        self._flowing_s = self._changed_s = 0.0
        """Seconds with incoming bytes before the last change of `num_incoming`, and the time of
        this change."""
        self._flows: dict[tuple[PeerId, int], deque[Digest]] = {}
        """Blobs still to be sent, by receiver and number of the question."""
        self._is_sending = False
        self._began: dict[Purpose, float] = {}
        self._bytes: dict[Purpose, int] = {}

    # ------------------------------------------------------------ asking

    def start(self, fetch: Fetch) -> None:
        """Begins a transfer, and ends the previous one of the same purpose."""
        self._began[fetch.purpose] = self._flowed_s()
        self._bytes[fetch.purpose] = 0
        super().start(fetch)

    def take(self, source: PeerId, data: Data) -> None:
        """Stores blobs that came. The rest of the answer is still under way."""
        asked = self._asked.get(data.number)
        if asked is None or asked[1] != source:
            return
        purpose, _, wants = asked
        rest = tuple(w for w in wants if w.digest not in data.found and w.digest not in data.absent)
        super().take(source, data)
        if rest:
            self._asked[data.number] = (purpose, source, rest)
        sizes = {want.digest: want.num_bytes for want in wants}
        received = sum(sizes.get(digest, 0) for digest in data.found)
        self._bytes[purpose] = self._bytes.get(purpose, 0) + received
        if received and self._running.get(purpose) == {}:
            self._peer.fetched(self._bytes[purpose], self._flowed_s() - self._began[purpose])

    def flow(self, change: int) -> None:
        """Changes the number of peers that send to this peer."""
        self._flowing_s, self._changed_s = self._flowed_s(), self._peer.clock_s()
        self.num_incoming += change

    def _flowed_s(self) -> float:
        now_s = self._peer.clock_s()
        return self._flowing_s + (now_s - self._changed_s if self.num_incoming else 0.0)

    def is_waiting_for(self, number: int, digest: Digest) -> int | None:
        """Size of a blob that was asked for under this number. None if it is not awaited."""
        purpose, _, wants = self._asked.get(number, (Purpose.REDUCE, "", ()))
        sizes = [w.num_bytes for w in wants if w.digest == digest and self._is_wanted(purpose, w)]
        return sizes[0] if sizes else None

    def _overdue(self, number: int) -> None:
        asked = self._asked.get(number)
        if asked is None:
            return
        source = self._peer.peer(asked[1])
        is_flowing = (
            source is not None
            and isinstance(source.fetcher, StreamingFetcher)
            and source.fetcher.is_sending_to(self._peer.me, number)
        )
        if self._peer.waits_on(is_flowing=is_flowing):
            self._peer.after(ANSWER_WITHIN_S, self._overdue, number)
        else:
            super()._overdue(number)

    # ------------------------------------------------------------ sending

    def serve(self, source: PeerId, get: Get) -> None:
        """Reports absent blobs, and queues the present blobs."""
        disk = self._peer.disk
        absent = tuple(digest for digest in get.digests if digest not in disk)
        if absent:
            self._peer.post(source, Data(get.number, (), absent))
        found = deque(digest for digest in get.digests if digest in disk)
        if found:
            self._flows[source, get.number] = found
            self._send_next()

    def is_sending_to(self, destination: PeerId, number: int) -> bool:
        """Whether the answer to this question is still under way."""
        return (destination, number) in self._flows

    def _send_next(self) -> None:
        while self._flows and not self._is_sending:
            key = next(iter(self._flows))
            queue = self._flows.pop(key)
            receiver = self._peer.peer(key[0])
            if not queue or receiver is None:
                continue
            self._flows[key] = queue  # the next turns are those of other receivers
            theirs = receiver.fetcher
            assert isinstance(theirs, StreamingFetcher)
            size = theirs.is_waiting_for(key[1], queue[0])
            if size is None:
                queue.popleft()
                continue
            self._is_sending = True
            theirs.flow(1)
            rate = min(self._peer.rates()[0], receiver.rates()[1] / theirs.num_incoming)
            seconds = 0.0 if rate == inf else size / rate
            self._peer.after(seconds, self._sent, key, queue[0], theirs)

    def _sent(self, key: tuple[PeerId, int], digest: Digest, theirs: StreamingFetcher) -> None:
        self._is_sending = False
        theirs.flow(-1)
        receiver = self._peer.peer(key[0])
        if receiver is None or receiver.fetcher is not theirs or digest not in self._peer.disk:
            self._flows.pop(key, None)
        else:
            queue = self._flows.get(key)
            if queue and queue[0] == digest:
                queue.popleft()
            if not queue:
                self._flows.pop(key, None)
            theirs.take(self._peer.me, Data(key[1], (digest,), ()))
        self._send_next()
