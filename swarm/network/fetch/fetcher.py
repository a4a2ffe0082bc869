"""Fetches blobs from several peers at once; each piece is fetched once and verified."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from swarm.background import Helpers, is_cancelled
from swarm.errors import BadBlob, NetworkDown, NobodyReachable, StateError, Unreachable
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.bulk import ASSIGNED_AT_ONCE, JOINED_AT_ONCE, PROTOCOL, YIELD_EVERY
from swarm.network.fetch.flow import (
    BAD_SIZE,
    FIRST_ANSWER_S,
    Flow,
    FlowFailed,
    NotTaken,
    TakeFailed,
    off_loop,
)
from swarm.network.fetch.incoming import Caller, Check, Incoming, OnBlob, OnFailure, Piece, Verdicts
from swarm.network.node.node import Node
from swarm.protocol.exchange.sourcing import Failure, Limits, Sourcing
from swarm.protocol.values.digests import PIECE_BYTES, num_pieces

logger = logging.getLogger(__name__)

PROGRESS_S = 15.0
FLOWS_PER_PEER = 2
FLOWS = 64
"""Limit of open streams over all peers: each has a thread and a buffer of `PIECE_BYTES`."""
PUMP_AGAIN_S = 1.0
"""Pause after a fault of this machine prevented the assignment of pieces."""


@dataclass(frozen=True)
class Want:
    """A wanted blob.

    Attributes:
        digest: digest of the blob.
        num_bytes: size of the blob.
        sources: peers that may have it, in order of preference.
        at_most: whether `num_bytes` is only the largest acceptable size, which is 4 MiB at most.
    """

    digest: str
    num_bytes: int
    sources: tuple[str, ...]
    at_most: bool = False


class Downloads:
    """All downloads of a node into one `store`; its coroutines run in the node's loop."""

    def __init__(
        self,
        node: Node,
        store: BlobStore,
        *,
        progress_s: float = PROGRESS_S,
        flows_per_peer: int = FLOWS_PER_PEER,
        limits: Limits | None = None,
    ) -> None:
        self._node = node
        self.store = store
        self._progress_s = progress_s
        self._flows_per_peer = flows_per_peer
        limits = limits or Limits()
        self._ahead_bytes = limits.bytes_per_peer // flows_per_peer
        self._threads = Helpers("swarm-receive", FLOWS)
        self._sourcing: Sourcing[Piece] = Sourcing(limits)
        self._downloads: dict[tuple[str, int, bool], Incoming] = {}
        self._queues: dict[str, deque[Piece]] = {}
        self._flows: dict[str, list[Flow]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False
        self._arrivals = 0

    async def fetch(
        self,
        wants: Sequence[Want],
        *,
        check: Check | None = None,
        on_blob: OnBlob = lambda _: None,
        on_failure: OnFailure = lambda *_: None,
    ) -> None:
        """Returns when all blobs are in the store; retries until the caller cancels it.

        A blob that two calls want is fetched once. Blobs in the store count as checked.

        Args:
            wants: the blobs; those that are here cost nothing.
            check: raises BadBlob for bad content, which is neither kept nor requested again. It may
                run in another thread, and must not keep the buffer.
            on_blob: called with the digest of each blob as it arrives.
            on_failure: called with digest, peer and a short reason for each failed attempt.
        """
        finished = asyncio.get_running_loop().create_future()
        caller = Caller(check, on_blob, on_failure, finished)
        digests = sorted({want.digest for want in wants})
        self.store.pin(digests)
        try:
            for digest in digests:
                if self.store.has(digest):
                    on_blob(digest)
            missing = [want for want in wants if not self.store.has(want.digest)]
            caller.waits_for |= {want.digest for want in missing}
            for number, want in enumerate(missing, 1):
                if not self.store.has(want.digest):
                    self._join(want, caller)
                elif want.digest in caller.waits_for:
                    caller.arrived(want.digest)  # another call has fetched it
                if number % JOINED_AT_ONCE == 0:
                    self._pump_soon()
                    await asyncio.sleep(0)
            if caller.waits_for:
                self._pump_soon()
                await caller.finished
        finally:
            self._leave(caller)
            self.store.unpin(digests)

    async def fetch_one(
        self, want: Want, *, timeout_s: float, check: Check | None = None
    ) -> memoryview:
        """One blob's content.

        Raises:
            NobodyReachable: it did not arrive in time; names the last failure of each peer.
        """
        failures: dict[str, str] = {}

        def note(_: str, peer: str, reason: str) -> None:
            failures[peer] = reason

        try:
            async with asyncio.timeout(timeout_s):
                await self.fetch([want], check=check, on_failure=note)
        except TimeoutError:
            known = ", ".join(f"{peer}: {reason}" for peer, reason in sorted(failures.items()))
            raise NobodyReachable(
                f"blob {want.digest} did not come within {timeout_s:g} s ({known or 'no source'})"
            ) from None
        content = self.store.get(want.digest)
        assert content is not None, "collected while it was pinned"
        return content

    def _join(self, want: Want, caller: Caller) -> None:
        assert not want.at_most or want.num_bytes <= PIECE_BYTES
        caller.waits_for.add(want.digest)
        key = (want.digest, want.num_bytes, not want.at_most)
        download = self._downloads.get(key)
        if download is None:
            download = self._downloads[key] = Incoming(*key)
            self.store.pin([want.digest])
            try:
                self._prepare(download)
            except BaseException:
                self._remove(download)
                raise
        if caller not in download.callers:
            download.callers.append(caller)
        others = [peer for peer in want.sources if peer != self._node.peer_id]
        others.sort(key=self._node.is_far)  # bytes of far peers use a third peer's link too
        download.sources += [peer for peer in others if peer not in download.sources]
        self._want_pieces(download)

    def _prepare(self, download: Incoming) -> None:
        count, numbers = max(1, num_pieces(download.num_bytes)), [0]
        if count > 1:
            arriving = self.store.writer(download.digest, download.num_bytes)
            if arriving.complete:  # an earlier download failed to keep it
                self.store.discard(arriving)
                arriving = self.store.writer(download.digest, download.num_bytes)
            download.partial = arriving
            numbers = [number for number in range(count) if not arriving.has_piece(number)]
        download.pieces = [Piece(download, number) for number in numbers]

    def _want_pieces(self, download: Incoming) -> None:
        for piece in download.pieces:
            self._sourcing.want(piece, piece.num_bytes, download.sources)

    def _leave(self, caller: Caller) -> None:
        left = [download for download in self._downloads.values() if caller in download.callers]
        for download in left:
            download.callers.remove(caller)
            download.last_check = caller.check
        for queue in self._queues.values():
            for piece in [piece for piece in queue if not piece.blob.callers]:
                queue.remove(piece)
                self._sourcing.released(piece)
        for download in left:
            self._tidy(download)

    def _tidy(self, download: Incoming) -> None:
        """Drops a download without callers; pieces already requested still arrive.

        So a caller that cancels and asks again at once fetches nothing twice.
        """
        if download.callers or not download.pieces:
            return  # a caller waits, or it is being kept
        for piece in download.pieces:
            if self._sourcing.is_waiting(piece):
                self._sourcing.forget(piece)
        if not any(self._sourcing.knows(piece) for piece in download.pieces):
            self._remove(download)

    def _remove(self, download: Incoming) -> None:
        if self._downloads.get(download.key) is download:
            del self._downloads[download.key]
            self.store.unpin([download.digest])

    def _pump_soon(self) -> None:
        """Schedules one assignment of pieces, for all arrivals in this turn of the loop."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Assigns pieces, and schedules the next call; after a fault, tries again."""
        self._pumping = False
        loop = asyncio.get_running_loop()
        if self._timer:
            self._timer.cancel()
        next_time: float | None = loop.time() + PUMP_AGAIN_S
        try:
            self._hand_out(loop)
            next_time = self._sourcing.next_time(loop.time())
        except Exception:
            logger.exception("pieces could not be asked for; tried again in %g s", PUMP_AGAIN_S)
        self._timer = loop.call_at(next_time, self._pump) if next_time is not None else None

    def _hand_out(self, loop: asyncio.AbstractEventLoop) -> None:
        """Assigns pieces to peers, and opens streams if needed."""
        assignments = self._sourcing.assign(loop.time(), ASSIGNED_AT_ONCE)
        if len(assignments) == ASSIGNED_AT_ONCE:
            self._pump_soon()
        for assignment in assignments:
            piece, peer = assignment.key, assignment.peer
            logger.debug("%s of %s: %s", piece, peer, assignment.reason)
            self._queues.setdefault(peer, deque()).append(piece)
        for peer in sorted(self._queues):
            try:
                self._serve_queue(peer)
            except Exception as error:  # noqa: BLE001 - logged; counts against the source
                self._fault(peer, (), error)
                self._pump_soon()
            if not self._queues.get(peer, True):  # peer ids are free to create
                del self._queues[peer]

    def _serve_queue(self, peer: str) -> None:
        flows = self._flows.get(peer, [])
        for flow in flows:
            flow.ask()
        queued = sum(piece.num_bytes for piece in self._queues[peer])
        room = sum(flow.room_bytes for flow in flows)
        while self._queues[peer] and len(flows) < self._flows_per_peer:
            if (flows and queued <= room) or sum(map(len, self._flows.values())) >= FLOWS:
                break
            flow = Flow(
                self, peer, self._node.traffic, ahead_bytes=self._ahead_bytes, threads=self._threads
            )
            task = asyncio.create_task(self._run_flow(flow))  # starts in the next turn of the loop
            flows.append(flow)
            self._flows[peer] = flows
            room += flow.room_bytes
            self._tasks.add(task)
            task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error:  # a bug in the handling of a failure: pieces may be lost
            logger.error("a stream was not ended in order", exc_info=error)
            for download in list(self._downloads.values()):
                self._give_up(download, error)

    async def _run_flow(self, flow: Flow) -> None:
        try:
            connection = await self._node.open_stream(flow.peer, PROTOCOL, FIRST_ANSWER_S)
            try:
                await flow.run(connection, self._progress_s)
            except BaseException:
                connection.close()
                raise
            self._node.give_back(flow.peer, PROTOCOL, connection)
        except FlowFailed as error:
            self._flow_failed(flow, error.kind, error.reason)
        except TimeoutError:
            if not self.is_answering(flow.peer):
                self._node.unanswered(flow.peer)
            self._flow_failed(flow, Failure.SILENT, "no_progress")
        except (Unreachable, NetworkDown) as error:
            logger.debug("no stream: %s", error)
            self._flow_failed(flow, Failure.SILENT, "unreachable")
        except OSError as error:
            logger.debug("stream of %s: %s", flow.peer, error)
            self._node.traffic.refuse("ended_early")
            self._flow_failed(flow, Failure.SILENT, "ended_early")
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            self._fault(flow.peer, flow.asked, error)
        except Exception as error:  # noqa: BLE001 - logged; counts against the source
            self._fault(flow.peer, flow.asked, error)
        finally:
            self._flows[flow.peer].remove(flow)
            if not self._flows[flow.peer]:
                del self._flows[flow.peer]
        self._pump_soon()

    def _fault(self, peer: str, asked: Iterable[Piece], error: BaseException) -> None:
        """Handles an exception of this peer with one source; other sources fetch the pieces."""
        logger.error("a stream of %s failed by a fault of this peer", peer, exc_info=error)
        self._source_failed(peer, asked, Failure.SILENT, "own_fault")

    def _flow_failed(self, flow: Flow, kind: Failure | None, reason: str) -> None:
        logger.debug("stream of %s: %s", flow.peer, reason)
        self._source_failed(flow.peer, flow.asked, kind, reason)

    def _source_failed(
        self, peer: str, asked: Iterable[Piece], kind: Failure | None, reason: str
    ) -> None:
        self._sourcing.peer_failed(peer, reason, asyncio.get_running_loop().time())
        abandoned = [*asked, *self._queues.pop(peer, ())]
        if abandoned and kind:
            self._piece_failed(abandoned.pop(0), kind, reason, peer)
        for piece in abandoned:
            self._sourcing.released(piece)
            self._tidy(piece.blob)

    def _piece_failed(self, piece: Piece, kind: Failure, reason: str, peer: str) -> None:
        # A wrong size may come from the peer that named the blob, so the link may not be at fault.
        of_line = kind is Failure.WRONG and self._node.distrust(peer, for_good=reason != BAD_SIZE)
        kind = Failure.SILENT if of_line else kind
        self._sourcing.failed(piece, kind, reason, asyncio.get_running_loop().time())
        if kind is Failure.WRONG:
            self._node.traffic.refuse(reason)
        for caller in list(piece.blob.callers):
            caller.failed(piece.blob.digest, peer, reason)
        self._tidy(piece.blob)

    # What a flow needs

    def is_answering(self, peer: str) -> bool:
        """See `FlowOwner`."""
        return any(flow.has_answer for flow in self._flows.get(peer, ()))

    def next_piece(self, peer: str) -> Piece | None:
        """See `FlowOwner`."""
        queue = self._queues.get(peer)
        return queue.popleft() if queue else None

    def piece_missing(self, piece: Piece, peer: str) -> None:
        """See `FlowOwner`."""
        self._piece_failed(piece, Failure.MISSING, "missing", peer)
        self._pump_soon()

    def taker(self, piece: Piece) -> Callable[[memoryview], Verdicts]:
        """See `FlowOwner`; a blob of one piece is judged and kept in the same call."""
        download, checks = piece.blob, piece.blob.checks()

        def take(content: memoryview) -> Verdicts:
            try:
                piece.verify(content)
                return {} if download.partial else self._judge(download, content, checks, {})
            except (BadBlob, StateError):
                raise
            except Exception as error:
                raise TakeFailed(str(piece)) from error

        return take

    async def piece_taken(self, piece: Piece, content: memoryview, verdicts: Verdicts) -> None:
        """See `FlowOwner`."""
        download = piece.blob
        self._sourcing.done(piece)
        download.pieces.remove(piece)
        try:
            if not download.pieces:
                await self._finish(download, content, verdicts)
        except Exception as error:  # noqa: BLE001 - of disk, check or caller: reported
            self._give_up(download, error)
        self._tidy(download)
        self._arrivals += 1
        if self._arrivals % YIELD_EVERY == 0:
            await asyncio.sleep(0)
        self._pump_soon()

    def piece_not_taken(self, piece: Piece, error: NotTaken, peer: str) -> None:
        """See `FlowOwner`; a fault that is not the source's fails the callers of the blob."""
        if isinstance(error, BadBlob):
            self._piece_failed(piece, Failure.WRONG, error.reason, peer)
            return
        fault = error.__cause__ if isinstance(error, TakeFailed) else error
        self._give_up(piece.blob, fault or error)
        self._pump_soon()

    async def _finish(self, download: Incoming, last_piece: memoryview, verdicts: Verdicts) -> None:
        """Called when all pieces are here; keeps the blob unless all callers refuse its content."""
        size = download.num_bytes if download.partial else len(last_piece)
        while unjudged := [check for check in download.checks() if check not in verdicts]:
            # The blob has several pieces, or callers joined while this one waited.
            judge = partial(self._judge, download, last_piece, unjudged, verdicts)
            verdicts = await off_loop(size, judge)
        self._remove(download)
        for reason in verdicts.values():
            if reason:
                self._node.traffic.refuse(reason)
        download.tell(verdicts)
        if download.partial and None not in verdicts.values():
            self.store.discard(download.partial)

    def _judge(
        self,
        download: Incoming,
        last_piece: memoryview,
        checks: Sequence[Check | None],
        known: Verdicts,
    ) -> Verdicts:
        """Adds the verdicts of these checks; keeps the content once any check accepts it."""
        verdicts = dict(known)
        for check in dict.fromkeys(checks):
            verdicts[check] = download.fault(check, last_piece)
        if None in verdicts.values() and None not in known.values():
            download.keep(self.store, last_piece)
        return verdicts

    def _give_up(self, download: Incoming, error: BaseException) -> None:
        """Gives up a blob that this machine cannot keep. The blob's callers get the error."""
        for piece in download.pieces:
            self._sourcing.forget(piece)
        self._remove(download)
        for caller in list(download.callers):
            caller.fail(error)
