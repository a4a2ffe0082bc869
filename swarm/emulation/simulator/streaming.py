"""Large blobs over slow links: a transfer takes as long as its bytes, and links are shared.

A peer sends one blob at a time, in turn to everybody who asked it; a receiver's rate is shared by
those that send to it when a blob begins. A transfer over a link that is cut when it should end,
to or from a peer that is gone, comes to nothing, and the receiver notices by the silence.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import Protocol

from swarm.emulation.simulator.fetching import ANSWER_WITHIN_S, Data, Fetcher, FetchingShell, Get
from swarm.protocol.events import Fetch, Purpose
from swarm.protocol.manifest import Digest, PeerId


class StreamingShell(FetchingShell, Protocol):
    """What a streaming fetcher needs of its peer."""

    def is_there(self) -> bool:
        """Whether this peer runs, neither paused nor asleep."""

    def peer(self, name: PeerId) -> StreamingShell | None:
        """Another peer whose links to and from this one work, if it runs."""

    @property
    def fetcher(self) -> Fetcher:
        """Of this peer, in its present life."""

    def rates(self) -> tuple[float, float]:
        """Bytes per second that this peer sends and receives at most."""

    def clock_s(self) -> float:
        """This peer's time."""

    def waits_on(self, *, is_flowing: bool) -> bool:
        """Whether to wait on for what has not come yet."""

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """Hears that a whole transfer is done, whose bytes flowed for so long."""


class StreamingFetcher(Fetcher):
    """A fetcher whose bytes take their time."""

    def __init__(self, shell: StreamingShell) -> None:
        super().__init__(shell)
        self._peer = shell
        self.num_incoming = 0
        self._flowing_s = self._changed_s = 0.0
        """Seconds in which something came, up to the last change of `num_incoming`; and when."""
        self._flows: dict[tuple[PeerId, int], deque[Digest]] = {}
        """What is still to be sent to whom, by the number of the question."""
        self._is_sending = False
        self._began: dict[Purpose, float] = {}
        self._bytes: dict[Purpose, int] = {}

    # ------------------------------------------------------------ asking

    def start(self, fetch: Fetch) -> None:
        """Begins a transfer; the one of the same purpose ends."""
        self._began[fetch.purpose] = self._flowed_s()
        self._bytes[fetch.purpose] = 0
        super().start(fetch)

    def take(self, source: PeerId, data: Data) -> None:
        """Stores what came; the rest of the answer is still under way."""
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
        """So many more peers send to this one; fewer if negative."""
        self._flowing_s, self._changed_s = self._flowed_s(), self._peer.clock_s()
        self.num_incoming += change

    def _flowed_s(self) -> float:
        now_s = self._peer.clock_s()
        return self._flowing_s + (now_s - self._changed_s if self.num_incoming else 0.0)

    def is_waiting_for(self, number: int, digest: Digest) -> int | None:
        """Size of a blob that was asked for under this number; None if nobody waits for it."""
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
        """Says what is not here, and queues what is."""
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
            self._flows[key] = queue  # the others first, next time
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
