"""The offers of a peer, checked against the bounds of the peers that fetch them (update bounds).

A separate thread reads the values while the peer trains (background offers).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Generic, Protocol, TypeVar

from swarm.background import SYSTEM, Joinable
from swarm.codecs import Content
from swarm.codings import coded_bytes
from swarm.deltas.unit_deltas import apply_delta, check_delta
from swarm.errors import BadBlob, OutOfMemory
from swarm.experts import expert_of_unit
from swarm.network.blobs.blob_store import BlobGone
from swarm.peer.status.status import PeerStatus
from swarm.peer.training.live_model import LiveModel
from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.rounds import Rules
from swarm.protocol.rounds.policies.update_bounds import update_bound
from swarm.protocol.training import Applied, SavedWork
from swarm.protocol.values.manifest import Digest, Manifest, Unit

logger = logging.getLogger(__name__)


class Rounds(Protocol):
    """See `swarm.network.rounds.round_driver.RoundDriver`; any thread may call the methods."""

    @property
    def rules(self) -> Rules:
        """The rules of the run."""

    @property
    def newest(self) -> Applied:
        """The newest tip."""

    def wait_for_tip(self, after: Digest, timeout_s: float) -> list[Applied]:
        """Tips after the one with digest `after`, oldest first; empty if none came in time."""

    def store_value(self, value: Content) -> tuple[Digest, int]:
        """Stores one of this peer's own values; returns digest and size."""

    def offer(self, offer: Offer) -> None:
        """Puts an offer into the round."""

    def expect(self, tip: Digest, remaining_s: float) -> None:
        """Says in how many seconds the local steps on a tip will end."""

    def leave(self) -> None:
        """Asks to leave the run."""

    @property
    def left(self) -> str | None:
        """Why this peer is no longer a member, once it has left."""

    @property
    def last_reason(self) -> str:
        """Reason for the last action of the protocol, in a sentence."""


Result = TypeVar("Result")


class BackgroundWork(Generic[Result]):
    """One background task at a time, reading values that the starting thread does not change.

    The starting thread calls `wait` before it changes these values. If the task has to change a
    value, the starting thread makes the change; see `in_turn`.
    """

    def __init__(self) -> None:
        self._thread: Joinable | None = None
        self._is_running = False
        """The task reads this too, which may run before `_thread` is set."""
        self._owner, self._is_calling = 0, False
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._result: Result | None = None
        self._error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        """Whether a task was begun whose end nobody has awaited yet."""
        return self._is_running

    def begin(self, work: Callable[[], Result]) -> None:
        """Starts a task; if no thread can be started, runs it in the calling thread.

        The previous task must have been awaited.
        """
        assert not self._is_running, "one at a time"
        self._result = self._error = None
        self._owner = threading.get_ident()

        def run() -> None:
            try:
                self._result = work()
            except BaseException as error:  # noqa: BLE001 - `result` raises it
                self._error = error
            finally:
                self._calls.put(None)

        self._is_running = True
        try:
            self._thread = SYSTEM.start(run, "swarm-beside")
        except OutOfMemory:
            self._is_running = False
            run()
            self._calls.get()

    def in_turn(self, call: Callable[[], None]) -> None:
        """Runs a call in the waiting thread; without a background task, at once."""
        if not self._is_running:
            call()
            return
        done = threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                failed.append(error)
            finally:
                done.set()

        self._calls.put(run)
        done.wait()
        if failed:
            raise failed[0]

    def require_waiter(self) -> None:
        """Requires that the caller may wait for the running task.

        Raises:
            MemoryError: the caller is the task itself, which would wait for its own end. An engine
                calls this before it frees memory. The local step that runs now frees memory when it
                ends.
        """
        if self._is_calling or threading.get_ident() != self._owner:
            raise MemoryError("a step runs at the same time")

    def wait(self) -> None:
        """Waits until no task runs; raises as `require_waiter`."""
        if not self._is_running:
            return
        self.require_waiter()
        while (call := self._calls.get()) is not None:
            self._is_calling = True
            try:
                call()
            finally:
                self._is_calling = False
        assert self._thread is not None, "its owner has started it"
        self._thread.join()
        self._thread, self._is_running = None, False

    def result(self) -> Result:
        """The result of the last task; waits for it, and raises the error that it raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class Offering:
    """Stores offered values. A unit whose value peers would refuse restarts from the agreed one."""

    def __init__(
        self,
        model: LiveModel,
        rounds: Rounds,
        status: PeerStatus,
        in_turn: Callable[[Callable[[], None]], None] = lambda call: call(),
    ) -> None:
        """Offers nothing yet; `in_turn` runs a call in the thread that may change the engine."""
        self.model, self.rounds, self.status = model, rounds, status
        self._in_turn = in_turn
        self._refusing = threading.Lock()
        self._before_refusal: Callable[[], None] = lambda: None
        self._named: dict[Unit, OfferedUnit] = {}
        """Deltas of the present live values, which need not be computed again."""

    def changed(self) -> None:
        """Call after live values have changed."""
        self._named.clear()

    def resume(self, tip: Manifest, saved: SavedWork) -> None:
        """Restores the offered deltas of loaded live values that belong to this tip."""
        layouts = self.model.agreed.layout.by_unit
        for unit, digest in saved.offered.items():
            layout, delta = layouts[unit], saved.deltas.get(unit)
            if layout.coding != "none":
                num_bytes = layout.num_bytes if delta else coded_bytes(layout)
                base = tip.entries[unit].digest
                self._named[unit] = OfferedUnit(digest, num_bytes, base, delta)
                self.model.keep_offered(filter(None, [digest, delta]))

    @contextmanager
    def refusing_after(self, end: Callable[[], None]) -> Iterator[None]:
        """While the block runs, calls `end` before a value restarts, to stop a reader of the value.

        `end` may be called several times.
        """
        before, self._before_refusal = self._before_refusal, end
        try:
            yield
        finally:
            self._before_refusal = before

    def sync(self, units: Mapping[Unit, OfferedUnit]) -> None:
        """Makes offered blobs durable, since peers may count them while this peer is down."""
        layouts = self.model.agreed.layout.by_unit
        coded = [each for unit, each in units.items() if layouts[unit].coding != "none"]
        blobs = [digest for each in coded for digest in (each.digest, each.delta) if digest]
        if blobs:
            self.model.agreed.store.sync(blobs)

    def offered_all(
        self,
        tip: Manifest,
        bases: Mapping[Unit, Digest],
        tokens: int,
        patiently: Callable[[Callable[[], OfferedUnit]], OfferedUnit] = lambda work: work(),
    ) -> dict[Unit, OfferedUnit]:
        """The offers of these units, computed several at a time; arguments as of `offered`.

        `patiently` makes each call, again after temporary errors.
        """

        def offered(unit: Unit) -> OfferedUnit:
            return patiently(partial(self.offered, tip, unit, bases[unit], tokens))

        return dict(zip(bases, self.model.each(offered, bases), strict=True))

    def offered(self, tip: Manifest, unit: Unit, base: Digest, tokens: int) -> OfferedUnit:
        """The offer of a unit, whose blobs are in the store.

        Keeps blobs that an adoption may need.

        Args:
            tip: the tip on which the unit is offered.
            unit: a unit that this peer trains.
            base: the agreed value from which the unit was trained.
            tokens: tokens of the local steps since the tip.
        """
        layout, named = self.model.agreed.layout.by_unit[unit], self._named.get(unit)
        if layout.coding == "none":
            digest, num_bytes = self.store(tip, unit, self.model.value_of(unit), tokens)
            return OfferedUnit(digest, num_bytes, base)
        if named and named.base == base:
            self.model.keep_offered(filter(None, [named.digest, named.delta]))
            if self._has(named):
                return named
        made = self._named[unit] = self._moved(tip, unit, base, tokens)
        return made

    def _has(self, named: OfferedUnit) -> bool:
        store = self.model.agreed.store
        return all(store.has(digest) for digest in (named.digest, named.delta) if digest)

    def _moved(self, tip: Manifest, unit: Unit, base: Digest, tokens: int) -> OfferedUnit:
        """A unit's delta, and the resulting value if that may become agreed.

        Policy: delta means.
        """
        bound = update_bound(unit, [self.model.me], {self.model.me: tokens}, tip, self.rounds.rules)
        limits = {"absolute": bound.absolute, "relative": bound.relative} if bound else {}
        with self.model.agreed.held([base]):
            try:
                return self._judged(unit, base, limits)
            except BadBlob as error:
                self._begin_anew(tip, unit, error)
                return self._judged(unit, base, {})

    def _judged(self, unit: Unit, base: Digest, limits: Mapping[str, float]) -> OfferedUnit:
        agreed, store = self.model.agreed, self._stored
        layout, before = agreed.layout.by_unit[unit], agreed.read(base)
        digest, num_bytes = store(self.model.difference(unit, base))
        delta = agreed.delta(digest)
        if self.rounds.rules.is_verbatim(unit):
            return OfferedUnit(*store(apply_delta(layout, before, delta, **limits)), base, digest)
        if limits:
            check_delta(layout, delta, before, **limits)
        return OfferedUnit(digest, num_bytes, base)

    def store(self, tip: Manifest, unit: Unit, value: Content, tokens: int) -> tuple[Digest, int]:
        """Digest and size of a unit's value in the store, after local steps on `tip`.

        These steps can move a value only up to a limit. A value beyond it is not offered: this peer
        logs the reason, restarts from the agreed value and offers that.
        """
        me = self.model.me
        bound = update_bound(unit, [me], {me: tokens}, tip, self.rounds.rules)
        is_kept = self.model.is_coded or expert_of_unit(unit) is not None
        store = self._stored if is_kept else self.rounds.store_value
        if bound is None:
            return store(value)
        try:
            with self.model.agreed.held([bound.base]):
                try:
                    return store(self.model.guarded(unit, value, bound))
                except BadBlob as error:
                    self._begin_anew(tip, unit, error)
        except BlobGone as error:
            logger.info("%s is offered unjudged: %s", unit, error)
        return store(self.model.value_of(unit))

    def _stored(self, content: Content) -> tuple[Digest, int]:
        """Stores content, and keeps it for the adoption.

        A round that is decided during this call drops blobs that nothing names. If that happens to
        this blob before `keep_offered`, the content is stored again; then its digest is already
        kept.
        """
        digest, num_bytes = self.rounds.store_value(content)
        self.model.keep_offered([digest])
        if not self.model.agreed.store.has(digest):
            self.rounds.store_value(content)
        return digest, num_bytes

    def _begin_anew(self, tip: Manifest, unit: Unit, why: BadBlob) -> None:
        def begin_anew() -> None:
            logger.error("not offered, restarts from the agreed value: %s", why)
            self.status.refused(unit, str(why))
            self.model.begin_anew(tip, unit)

        with self._refusing:
            self._before_refusal()
            self._in_turn(begin_anew)
