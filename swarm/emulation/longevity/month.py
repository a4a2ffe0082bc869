"""One month: its machines, its time, and the real nodes that live in it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from pathlib import Path
from queue import Queue, SimpleQueue
from types import ModuleType
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.config import NetworkSection
from swarm.emulation.longevity import kernel, sockets, virtual_dht
from swarm.emulation.longevity.kernel import Clock, Threads, VirtualLoopThread
from swarm.emulation.longevity.sockets import HereClock, Internet, Line, Machine, SocketLoop, here
from swarm.emulation.longevity.virtual_dht import Net, identity_content, opener
from swarm.emulation.longevity.virtual_ports import Disk, Ports, bound
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import PROTOCOL
from swarm.network.node import node as node_module
from swarm.network.node import substrate
from swarm.network.node.node import Node
from swarm.network.node.peer_probe import PROTOCOL as MEASURE
from swarm.network.node.peer_probe import QUESTION, Prober
from swarm.network.wire import daemon, steady_clock, streams, upload_rate
from swarm.network.wire.loop_thread import LoopThread
from swarm.network.wire.streams import Handlers

DAY_S = 86_400.0
HEAL_LOOK_EVERY_S = 30.0
"""In place of 2 s, because a look decides something at most every 30 s."""


class Said(logging.Handler):
    """Counts logged messages by level and text, so that a month can be judged by its log.

    Attributes:
        counts: numbers by level and message without its arguments, at most `MOST` of them.
        recent: the newest messages in full.
    """

    MOST = 500

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.counts: Counter[tuple[int, str]] = Counter()
        self.recent: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Counts a message."""
        key = (record.levelno, str(record.msg))
        if key in self.counts or len(self.counts) < self.MOST:
            self.counts[key] += 1
        if record.levelno >= logging.WARNING:
            self.recent = [*self.recent[-20:], record.getMessage()]


class World:
    """See the module.

    Attributes:
        folder: folder of all files.
        loop: event loop of the whole month.
        threads: the virtual threads.
        said: counts of the logged messages.
        disk: disk of the peer under test.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.internet = Internet()
        self.loop = SocketLoop(self.internet)
        self.net = Net(self.internet)
        self.said, self.disk = Said(), Disk()
        self.threads, self._hosts = Threads.of(self.loop), 0
        self._undo: list[Callable[[], None]] = []

    @property
    def now_s(self) -> float:
        """Seconds since the month began."""
        return self.loop.now_s

    def set(self, module: ModuleType, name: str, value: object) -> None:
        """Replaces the value of a module's constant while this world lasts."""
        before = getattr(module, name)
        self._undo.append(lambda: setattr(module, name, before))
        setattr(module, name, value)

    def at_end(self, call: Callable[[], None]) -> None:
        """Registers a call for the end of this world, even if an error ends it."""
        self._undo.append(call)

    def machine(self, line: Line | None = None, *, is_reachable: bool = True) -> Machine:
        """Adds a host."""
        self._hosts += 1
        host = f"10.0.{self._hosts // 250}.{self._hosts % 250 + 1}"
        machine = Machine(host, Clock(self.loop), line or Line(), is_reachable=is_reachable)
        return self.internet.add(machine)

    @contextmanager
    def at(self, machine: Machine) -> Iterator[None]:
        """Runs code on a machine."""
        token = here.set(machine)
        try:
            yield
        finally:
            here.reset(token)

    def node(
        self,
        machine: Machine,
        *,
        known_peers: Sequence[str] = (),
        store: BlobStore | None = None,
        name: str = "",
        **network: Any,
    ) -> Node:
        """A real node that serves a store and answers probes, in virtual threads."""
        folder = self.folder / (name or machine.host)
        folder.mkdir(exist_ok=True)
        path = folder / "identity.key"
        if not path.exists():
            key = Ed25519PrivateKey.from_private_bytes(self.rng.randbytes(32))
            path.write_bytes(identity_content(key))
        prober, nodes = Prober(), list[Node]()

        async def on_request(source: str, payload: bytes) -> bytes:
            assert payload.startswith(QUESTION)
            return await prober.answer(nodes[0], source, payload)

        async def on_message(*_: object) -> None:
            return None

        serving = {MEASURE: prober.serve}
        if store is not None:
            server = BlobServer()
            server.attach(store)
            serving[PROTOCOL] = server.serve
        with self.at(machine):
            node = Node.start(
                identity_path=path,
                network=NetworkSection(**network),
                known_peers=known_peers,
                handlers=Handlers(on_message, on_request, serving),
                must_reach=False,
            )
        nodes.append(node)
        return node

    def run(self, main: Callable[[], None]) -> None:
        """Runs a virtual thread to its end, then ends the world.

        Raises:
            Exception: the exception that `main` raised.
        """
        failed: list[BaseException] = []

        def guarded() -> None:
            try:
                main()
            except BaseException as error:  # noqa: BLE001
                failed.append(error)
            finally:
                self.loop.stop()

        with self._bound():
            thread = kernel.VirtualThread(target=guarded, name="main")
            thread.start()
            self.loop.run_forever()
            try:
                self._end()
            finally:
                if failed:
                    raise failed[0]

    def _end(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.call_later(1.0, self.loop.stop)
        self.loop.run_forever()

    @contextmanager
    def _bound(self) -> Iterator[None]:
        kernel.enter_world(self.loop)
        random.seed(self.rng.random())
        ports = Ports(HereClock(), self.threads, self.internet, self.disk)
        others: dict[Callable[..., Any], object] = {
            substrate.open_substrate: opener(self.net),
            daemon.end_daemon: virtual_dht.end_daemon,
            streams.open_stream: virtual_dht.open_stream,
            steady_clock.dht_clock: virtual_dht.dht_clock,
            upload_rate.CountedSocket: sockets.counted,
            upload_rate.moved_by_process: virtual_dht.moved_by_process,
            LoopThread: VirtualLoopThread,
            SimpleQueue: kernel.VirtualQueue,
            Queue: kernel.VirtualQueue,
            ThreadPoolExecutor: kernel.VirtualExecutor,
            Future: kernel.VirtualFuture,
            wait_for_futures: kernel.wait,
        }
        self.set(node_module, "HEAL_LOOK_EVERY_S", HEAL_LOOK_EVERY_S)
        log = logging.getLogger("swarm")
        level, propagate = log.level, log.propagate
        log.addHandler(self.said)
        log.setLevel(logging.INFO)
        log.propagate = False
        token = here.set(self.machine())
        try:
            with bound(ports, others):
                yield
        finally:
            here.reset(token)
            for undo in self._undo:
                undo()
            log.removeHandler(self.said)
            log.setLevel(level)
            log.propagate = propagate
            kernel.leave_world(self.loop)
            self.loop.close()


@contextmanager
def world(seed: int) -> Iterator[World]:
    """A world whose files are deleted at the end."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    gc.collect()
    gc.freeze()  # imported modules are no garbage, and a collection over them takes 0.5 s
    try:
        with tempfile.TemporaryDirectory(prefix="longevity-", dir=place) as folder:
            yield World(Path(folder), seed)
    finally:
        gc.unfreeze()
