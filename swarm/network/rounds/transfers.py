"""Executes the round machine's `Fetch` effects: one running fetch for each purpose."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

from swarm.codecs import Content, check_finite, check_update
from swarm.deltas.unit_deltas import check_delta, in_order
from swarm.errors import BadBlob
from swarm.experts import expert_of_unit
from swarm.network.blobs.blob_store import BlobStore, content_of, reader
from swarm.network.blobs.disk_retry import patiently_async
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.fetch.incoming import Check, OnBlob
from swarm.network.node.node import Node
from swarm.protocol.messages.events import BlobWanted, Event, Fetch, Purpose, Stored, Unobtainable
from swarm.protocol.timing.deadlines import Measured
from swarm.protocol.timing.pace import Pace
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.manifest import Digest, PeerId, Unit

logger = logging.getLogger(__name__)


class Transfers:
    """Fetches blobs and reports each as an event; runs in the node's loop.

    Attributes:
        downloads: fetch into the peer's own store.
        experts: fetches experts into the same store, on separate streams, so that values for means
            do not wait behind less urgent experts.
        attached: fetches blobs that messages name into the same store, on separate streams, so that
            these blobs do not wait for values requested earlier.
        aside: fetches into memory, for messages of strangers.
        pace: the measured speed of fetches.
    """

    def __init__(
        self,
        node: Node,
        store: BlobStore,
        layout: Layout,
        deliver: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.downloads = Downloads(node, store)
        self.experts = Downloads(node, store)
        self.attached = Downloads(node, store, flows_per_peer=1)
        self.aside = Downloads(node, BlobStore())
        self.pace = Pace(
            {unit.unit: unit.num_bytes for unit in layout.units},
            cap_bytes_per_s=node.traffic.down.bytes_per_s,
            cap_of_others_bytes_per_s=node.traffic.up.bytes_per_s,
        )
        self._node, self._store, self._layout = node, store, layout
        self._deliver = deliver
        self._running: dict[Purpose, asyncio.Task[None]] = {}

    @property
    def rate_bytes_per_s(self) -> float:
        """The rate at which this peer receives; 0 if unknown."""
        return self.pace.rate_bytes_per_s(self._clock())

    def measured(self, due: Mapping[Unit, int]) -> Measured:
        """The figures from which timers are computed; see `Pace.measured`."""
        return self.pace.measured(due, self._clock())

    async def start(self, effect: Fetch) -> None:
        """Starts a fetch, in place of the running one for the same purpose."""
        await self.cancel(effect.purpose)
        units = {want.digest: want for want in effect.wants}
        pinned = set(units)
        self._store.pin(pinned)
        task = asyncio.create_task(self._fetch(effect, units, pinned))
        # No event unpins a blob that never arrived. Nor does a task that is cancelled before its
        # first step.
        task.add_done_callback(lambda _: self._store.unpin(pinned))
        self._running[effect.purpose] = task

    async def cancel(self, purpose: Purpose) -> None:
        """Ends the fetch of a purpose, if one runs."""
        task = self._running.pop(purpose, None)
        if task and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def stop(self) -> None:
        """Ends all fetches."""
        for purpose in list(self._running):
            await self.cancel(purpose)

    async def _fetch(
        self, effect: Fetch, units: dict[Digest, BlobWanted], pinned: set[Digest]
    ) -> None:
        def stored(digest: Digest) -> None:
            if digest in pinned:  # false if an earlier attempt that failed has reported it
                pinned.discard(digest)  # the event now holds the pin
                self._deliver(Stored(digest))

        try:
            wants = await self._sound(effect.wants)
            arriving = self._node.traffic.arriving
            before = arriving.begin()
            await patiently_async(
                lambda: self._bring(
                    wants,
                    check=lambda digest, content: self._check(units[digest], content),
                    on_blob=stored,
                ),
                f"blobs for {effect.purpose.value}",
            )
            self.pace.fetched(*arriving.since(before), self._clock())
        except Exception:
            logger.exception("fetching for %s failed", effect.purpose.value)

    async def _bring(self, wants: Iterable[BlobWanted], *, check: Check, on_blob: OnBlob) -> None:
        """Fetches the averaged units and the experts at the same time."""
        kinds: dict[Downloads, list[Want]] = {self.downloads: [], self.experts: []}
        for want in wants:
            kind = self.downloads if expert_of_unit(want.unit) is None else self.experts
            kinds[kind].append(Want(want.digest, want.num_bytes, want.sources))
        fetches = [
            asyncio.create_task(
                kind.fetch(each, check=check, on_blob=on_blob, on_failure=self._failed)
            )
            for kind, each in kinds.items()
        ]
        try:
            await asyncio.gather(*fetches)
        finally:
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)

    async def _sound(self, wants: tuple[BlobWanted, ...]) -> tuple[BlobWanted, ...]:
        """The wants without updates that are already here and fail their check.

        Policy: update bounds.
        """
        return tuple([want for want in wants if await self._is_sound(want)])

    async def _is_sound(self, want: BlobWanted) -> bool:
        if want.bound is None or not self._store.has(want.digest):
            return True
        try:
            await asyncio.to_thread(self._check, want, content_of(self._store, want.digest))
        except BadBlob as error:
            logger.warning("blob %s refused: %s", want.digest, error)
            for peer in want.sources:
                self._failed(want.digest, peer, error.reason)
            return False
        return True

    def _check(self, want: BlobWanted, content: Content) -> None:
        layout, bound = self._layout.by_unit.get(want.unit), want.bound
        if layout is None:
            raise BadBlob("unknown_unit", f"no unit is called {want.unit}")
        if bound and not self._store.has(bound.base):
            raise BadBlob("no_base", f"{want.unit}: its base is not here")
        if want.is_delta:
            limits = {"absolute": bound.absolute, "relative": bound.relative} if bound else {}
            base = reader(self._store, bound.base) if bound else None
            check_delta(layout, in_order(content), base, **limits)
            return
        check_finite(layout, content)
        if bound is None:
            return
        base = reader(self._store, bound.base)
        check_update(layout, content, base, absolute=bound.absolute, relative=bound.relative)

    def _failed(self, digest: Digest, peer: PeerId, reason: str) -> None:
        self._deliver(Unobtainable(digest, peer, reason))
