"""No thread or task of a peer ends for good, or fails silently, by its own exception.

The syntax trees say where threads and tasks are started. Each one that lives as long as the process
then fails once, as the real class with faked dependencies, and must continue.
"""

from __future__ import annotations

import ast
import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from peers import emulated
from peers.actions import exports, monitor_page, tensorboard
from swarm import background
from swarm.background import SupervisedThread, System, Tasks, supervised, supervised_async
from swarm.codecs import Content
from swarm.config import NetworkSection
from swarm.emulation import networks
from swarm.emulation.controls import ControlFolder, Controls
from swarm.emulation.links import Link
from swarm.errors import ConfigError, NobodyReachable, OutOfMemory, SwarmError
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.node import node as node_module
from swarm.network.node.node import Handlers, Node
from swarm.network.rounds import chain_gaps, moments_exchange
from swarm.network.runs import observer
from swarm.network.wire.identity import load_or_create_identity
from swarm.network.wire.ledger import Ledger
from swarm.network.wire.loop_thread import LoopThread
from swarm.network.wire.tcp_listener import TcpListener
from swarm.network.wire.traffic import Traffic
from swarm.network.wire.upload_rate import UploadRate
from swarm.peer.machine import local_faults
from swarm.peer.machine.state_directory import StateDirectory
from swarm.peer.start import founding, quota
from swarm.peer.status.publisher import Publisher
from swarm.peer.training.leaving import Stop
from swarm.train.streaming.gradients import HostOptimizer
from swarm.train.workers import nodes, worker_process
from swarm.train.workers.roster import Wanted
from tests.network.rounds.test_round_driver import LAYOUT, TIP, Bench
from tests.test_imports import FUNCTION, Module, modules
from tests.waiting import wait_until

WAIT_S = 30.0
FAULTS = (RuntimeError("can't start new thread"), MemoryError(), asyncio.CancelledError("other's"))


class HastySystem(System):
    """Waits take almost no time, but advance its clock: a day passes in some hundred waits."""

    def __init__(self, real_s: float = 0.0005) -> None:
        self.now_s, self.real_s = 0.0, real_s
        self.waits: list[float | None] = []
        self.started: list[str] = []

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        self.waits.append(timeout_s)
        self.now_s += timeout_s or 0.0
        return event.wait(self.real_s)

    def start(self, run: Callable[[], object], name: str) -> background.Joinable:
        self.started.append(name)
        return super().start(run, name)


class Once:
    """Raises a fault at its first call. All other calls go to the real function."""

    def __init__(
        self, fault: BaseException, then: Callable[..., Any] = lambda *_: None, at: int = 1
    ) -> None:
        self.fault, self.then, self.at, self.num_calls = fault, then, at, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == self.at:
            raise self.fault
        return self.then(*arguments, **named)

    def has_gone_on(self, calls: int = 3) -> bool:
        """Waits until it was called again."""
        return wait_until(lambda: self.num_calls >= calls)

    async def has_gone_on_here(self, calls: int = 3) -> bool:
        """The same in a loop."""
        async with asyncio.timeout(WAIT_S):
            while self.num_calls < calls:
                await asyncio.sleep(0.001)
        return True


async def nothing(*_: Any) -> None:
    """Has no effect."""


@pytest.fixture
def short_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.001)


# ---------------------------------------------------------------- supervision itself


def test_rests_grow_to_a_limit_and_are_short_again_after_steady_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = 0

    def body() -> None:
        nonlocal failures
        failures += 1
        if failures == 2_000:
            system.now_s += background.LONGEST_PAUSE_S
        if failures <= 2_001:
            raise OverflowError(f"failure {failures}")

    system = HastySystem(real_s=0.0)
    thread = SupervisedThread("steady", body, system)
    thread.start()
    assert wait_until(lambda: not thread.is_alive)
    assert system.started == ["steady"]
    assert "the thread steady failed; it begins again in 1 s" in caplog.text
    assert "OverflowError: failure 1\n" in caplog.text, "with its traceback"
    assert system.waits[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    assert set(system.waits[7:1_999]) == {60.0}
    assert system.waits[1_999:] == [1.0, 2.0]


def test_a_stop_during_a_rest_lets_the_body_finish_once() -> None:
    calls, system = [], HastySystem()

    def body() -> None:
        calls.append(thread.stopping.is_set())
        raise ValueError("whatever it does")

    thread = SupervisedThread("ending", body, system)
    thread.start()
    assert wait_until(lambda: len(calls) > 2)
    assert thread.stop(WAIT_S)
    assert calls.count(True) in (1, 2) and calls[0] is False
    assert not thread.is_alive


def test_what_says_that_the_work_is_over_is_raised() -> None:
    with pytest.raises(ConfigError):
        supervised("it", Once(ConfigError("so")), threading.Event(), ends=(SwarmError,))


def test_a_thread_that_cannot_start_is_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (RuntimeError("can't start new thread"), MemoryError()):
        monkeypatch.setattr(threading.Thread, "start", Once(error))
        with pytest.raises(OutOfMemory, match="the thread some"):
            SupervisedThread("some", lambda: None).start()


def test_a_thread_that_does_not_end_is_named(caplog: pytest.LogCaptureFixture) -> None:
    may_end = threading.Event()
    thread = SupervisedThread("stubborn", may_end.wait)
    assert thread.stop(0.0), "it has not begun"
    thread.start()
    assert not thread.stop(0.01)
    assert "the thread stubborn did not end within 0.01 s" in caplog.text
    may_end.set()
    assert thread.stop(WAIT_S)


async def test_stop_ends_every_task_that_runs() -> None:
    async def for_ever() -> None:
        await asyncio.Event().wait()

    tasks, other = Tasks("a test"), asyncio.create_task(for_ever())
    tasks.spawn(for_ever())
    tasks.supervise(for_ever)
    tasks.add(other)
    assert len(tasks) == 3
    await asyncio.sleep(0)
    await tasks.stop()
    assert other.cancelled()
    assert len(tasks) == 0


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
async def test_the_failure_of_a_task_is_logged_and_told(
    fault: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def failing() -> None:
        raise fault

    told: list[BaseException] = []
    tasks = Tasks("a test", told.append)
    tasks.spawn(failing())
    await asyncio.sleep(0.01)
    assert len(tasks) == 0
    assert [type(each) for each in told] == [type(fault)]
    assert "a task of a test failed" in caplog.text


@pytest.mark.usefixtures("short_rests")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
async def test_a_supervised_task_goes_on_until_it_is_cancelled(
    fault: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def for_ever() -> None:
        await asyncio.Event().wait()

    body = Once(fault, for_ever)
    task = asyncio.create_task(supervised_async("it", body))
    assert await body.has_gone_on_here(2)
    await asyncio.sleep(0.01)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert f"{type(fault).__name__}" in caplog.text


# ---------------------------------------------------------------- every thread and task there is

STARTS = frozenset(
    {
        "Thread", "Timer", "start_new_thread", "ThreadPoolExecutor", "create_task",
        "ensure_future", "run_coroutine_threadsafe", "Helpers",
    }
)  # fmt: skip
SUPERVISES = frozenset({"SupervisedThread", "supervise", "supervised", "supervised_async"})
HELPER = "swarm/background.py"

HEARD = "its starter waits for it, and receives its exceptions"
SHORT = {
    "swarm/data/encoders.py": {
        "encode": "its futures are waited for in their order",
        "_Process._within": "it only kills a process that is late; a start that fails is raised",
    },
    "swarm/data/loader.py": {"Loader.__init__": "each batch is waited for"},
    "swarm/emulation/networks.py": {
        "ProxyLinks.place": HEARD,
        "ProxyLinks.close": HEARD,
        "ProxyLinks._join": "ends with its connection, as which a fault shows",
        "ProxyLinks._carry": "a group of tasks, whose first failure ends its connection",
    },
    "swarm/emulation/longevity/kernel.py": {"VirtualLoopThread.run": HEARD},
    "swarm/emulation/longevity/runner.py": {"_leaks_a_task": "the audit has to see it"},
    "swarm/emulation/longevity/virtual_dht.py": {
        "VirtualP2P.__init__": "a child that waits for its end alone",
        "VirtualP2P.call_protobuf_handler": HEARD,
        "VirtualP2P.open_stream": "serves until its stream ends, as which a fault shows",
    },
    "swarm/network/wire/tcp_dialer.py": {
        "TcpDialer._looked_for": "any failure is logged and a pause: the way is not there"
    },
    "swarm/network/fetch/fetcher.py": {
        "Downloads.__init__": "a flow waits for each piece",
        "Downloads._serve_queue": "any failure is logged, and its source's",
    },
    "swarm/network/runs/run_search.py": {"_heard_of": HEARD, "_open_first": HEARD},
    "swarm/network/runs/joiner.py": {
        "_comes": HEARD,
        "_Keeping.arrived": "the sync of everything syncs the rest, or raises",
    },
    "swarm/network/wire/loop_thread.py": {"LoopThread.run": HEARD, "started_pool": HEARD},
    "swarm/network/rounds/moments_exchange.py": {"MomentsClient._download": HEARD},
    "swarm/network/node/peer_probe.py": {
        "_transmit": "the other side then acknowledges nothing in time"
    },
    "swarm/network/wire/relay.py": {
        "Relay._splice": "ends with its streams, as which a fault shows"
    },
    "swarm/network/rounds/round_driver.py": {
        "RoundDriver.start": "the coroutine itself passes its exceptions to the trainer"
    },
    "swarm/network/node/substrate.py": {"Substrate.ended": HEARD},
    "swarm/network/runs/tips.py": {"first_and_soon": HEARD},
    "swarm/network/rounds/transfers.py": {
        "Transfers.start": "any failure is logged; the machine fetches again",
        "Transfers._bring": HEARD,
    },
    "swarm/peer/training/offering.py": {"BackgroundWork.begin": HEARD},
    "swarm/peer/start/entry.py": {"Starter.wait_for.watched": HEARD},
    "swarm/peer/start/founding.py": {
        "_gathering_on": "runs a supervised body until it is cancelled"
    },
    "swarm/peer/machine/cpu_threads.py": {"_started": HEARD},
    "swarm/train/saving/hashed_file.py": {"HashedFile.__init__": "both halves are waited for"},
    "swarm/train/workers/nodes.py": {
        "Nodes._begin_to_let_in": "any failure is logged, and costs one connection"
    },
    "swarm/train/workers/command_history.py": {"PartSaving.__init__": "asked for until it is done"},
    "swarm/train/workers/worker_process.py": {
        "SplitStep.__init__": HEARD,
        "serve": "any failure ends the process with its traceback",
    },
    "swarm/train/streaming/gradients.py": {
        "HostOptimizer.__init__": "each update waits for its pieces"
    },
    "swarm/train/streaming/device.py": {"Places.__init__": "each unit is waited for"},
}
"""Starts of threads and tasks with an end, without supervision, and the receiver of their
errors."""


def places_of(module: Module, is_one: Callable[[ast.AST], bool]) -> set[tuple[str, str]]:
    """(path, enclosing class and function) of the selected nodes."""
    found = set()

    def look(node: ast.AST, scope: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            is_scope = isinstance(child, (*FUNCTION, ast.ClassDef))
            if is_one(child):
                found.add((module.path, ".".join(scope)))
            look(child, (*scope, child.name) if is_scope else scope)

    look(module.tree, ())
    return found


def names_of(node: ast.AST | None) -> tuple[str, str]:
    """The last two names of a call or reference, as `loop` and `create_task`."""
    if isinstance(node, ast.Call):
        return names_of(node.func)
    if isinstance(node, ast.Attribute):
        return names_of(node.value)[1], node.attr
    return "", node.id if isinstance(node, ast.Name) else ""


def starts(node: ast.AST) -> bool:
    of, name = names_of(node) if isinstance(node, ast.Call) else ("", "")
    return name in STARTS or (name == "start" and of.lower().endswith("system"))


def supervises(node: ast.AST) -> bool:
    """Also as an argument, such as `call_soon_threadsafe(tasks.supervise, ...)`."""
    if isinstance(node, ast.Attribute) and node.attr == "supervise":
        return True
    return isinstance(node, ast.Call) and names_of(node)[1] in SUPERVISES


def everywhere(is_one: Callable[[ast.AST], bool]) -> set[tuple[str, str]]:
    found = (places_of(each, is_one) for each in modules() if each.path != HELPER)
    return set().union(*found)


def test_what_is_started_without_supervision_has_a_reason() -> None:
    known = {(path, scope) for path, scopes in SHORT.items() for scope in scopes}
    assert everywhere(starts) == known
    assert all(len(why.split()) >= 4 for scopes in SHORT.values() for why in scopes.values())


def test_a_thread_that_somebody_adds_is_found() -> None:
    text = "class A:\n    def f(self):\n        threading.Thread(target=self.g).start()\n"
    module = Module("swarm.a", "swarm/a.py", text)
    assert places_of(module, starts) == {("swarm/a.py", "A.f")}
    module = Module("swarm.a", "swarm/a.py", "loop.call_soon_threadsafe(tasks.supervise, body)")
    assert places_of(module, supervises) == {("swarm/a.py", "")}


# ---------------------------------------------------------------- long-lived work

Fails = Callable[[BaseException, pytest.MonkeyPatch, Path], None]


def publisher_fails(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    def run(coroutine: Coroutine[Any, Any, None], _: float) -> None:
        coroutine.close()
        publishes()

    publishes = Once(fault)
    node: Any = SimpleNamespace(peer_id="Qm9", run=run, known_addresses=())
    status: Any = SimpleNamespace(changed=threading.Event())
    state: Any = SimpleNamespace(known_peers=())
    run_record: Any = SimpleNamespace(run="run")
    publisher = Publisher(
        node,
        status,
        run_record,
        state,
        on_present=lambda _: None,
        beside=nothing,
        system=HastySystem(),
    )
    publisher.start()
    assert publishes.has_gone_on(4)
    publisher.stop()
    assert not publisher._thread.is_alive


def quota_fails(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    moved = Once(fault, lambda _: 5)
    patch.setattr(quota, "bytes_moved", moved)
    state, section = StateDirectory(folder), NetworkSection(data_quota_gb=1.0)
    node: Any = SimpleNamespace(traffic=None)
    watch = quota.QuotaWatch(section, state, node, Stop(1.0), HastySystem())
    assert moved.has_gone_on()
    watch.end()
    assert quota.count_of(state).num_bytes == 5
    state.close()


def local_faults_fail(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    looks = Once(fault, lambda *_: ["a thread"] if looks.num_calls == 4 else [])
    codes: list[int] = []
    patch.setattr(local_faults.UnbornThreads, "look", looks)
    patch.setattr(local_faults.os, "_exit", codes.append)
    local_faults.watch_for_unborn_threads(HastySystem())
    assert wait_until(lambda: codes == [OutOfMemory.exit_code])


def emulation_fails(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    control = ControlFolder(folder)
    control.create()
    emulation = emulated.Emulation(control, peer=0)
    asked = Once(fault, lambda _: Controls(skew_s=3.0))
    patch.setattr(emulated, "REFRESH_S", 0.001)
    patch.setattr(ControlFolder, "controls", lambda _, peer: asked(peer))
    emulation.follow()
    assert wait_until(lambda: emulation.controls.skew_s == 3.0)
    assert emulation.following.stop(WAIT_S)


def monitor_page_fails(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    def serve(feed: Any, *_: Any) -> None:
        assert wait_until(lambda: "nobody answers" in str(feed.state))
        assert looks.has_gone_on()

    looks = Once(fault, Mock(side_effect=NobodyReachable("nobody answers")))
    source: Any = SimpleNamespace(refresh_s=0.001, look=looks)
    patch.setattr(monitor_page, "serve", serve)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        monitor_page._show_page(bound, "localhost", source)


def tensorboard_fails(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    written = Once(fault)
    file = SimpleNamespace(write=written, flush=lambda: None, close=lambda: None)
    patch.setattr(tensorboard, "EventFile", lambda _: file)
    drawn = tensorboard.Drawn(folder)
    for number in range(3):
        drawn.on_validation(number, 1.0, 1.0)
    drawn.close()
    assert written.num_calls == 6 and not drawn._thread.is_alive


def shaper_fails(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    class Shaper:
        def __init__(self, *_: Any) -> None:
            self.arrived = lambda _: []

        next_s = property(lambda _: arrives())

    arrives = Once(fault, time.monotonic)
    patch.setattr(networks, "Shaper", Shaper)
    patch.setattr(networks, "_remove_leftovers", lambda: None)
    links = networks.NamespaceLinks(Link(8.0, 8.0, 0.0))
    assert arrives.has_gone_on()
    links.close()
    assert not links._thread.is_alive


def fail_in_select(loop: asyncio.AbstractEventLoop, fault: BaseException) -> Once:
    """The loop itself fails, as without memory. No exception of a task has this effect."""
    selector = getattr(loop, "_selector")  # noqa: B009 - private to every loop
    select = Once(fault, selector.select)
    selector.select = select
    loop.call_soon_threadsafe(lambda: None)
    return select


def proxies_fail(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    links = networks.ProxyLinks(Link(8.0, 8.0, 0.0))
    assert fail_in_select(links._loop, fault).has_gone_on(2)
    links.place(0)
    links.close()
    assert not links._thread.is_alive


def network_thread_fails(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    thread = LoopThread("test-network")
    selects = fail_in_select(thread.loop, fault)
    assert thread.run(asyncio.sleep(0.01, "alive"), WAIT_S) == "alive"
    assert selects.has_gone_on(2)
    thread.stop(WAIT_S)
    assert thread.loop.is_closed()


def nodes_fail(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    class Listener:
        def __init__(self, real: socket.socket) -> None:
            self.accept = accepts
            self.fileno, self.close, self.shutdown = real.fileno, real.close, real.shutdown
            self.getsockname = real.getsockname

    real = socket.create_server(("127.0.0.1", 0))
    accepts = Once(fault, real.accept)
    patch.setattr(nodes, "listen", lambda *_: Listener(real))
    system = HastySystem()
    listening = nodes.Nodes(("", 0), b"", Wanted(1, 1), device="cpu", wait_s=1.0, system=system)
    with socket.create_connection(real.getsockname()):
        assert wait_until(lambda: "nodes-handshake" in system.started)
    listening.close()
    assert wait_until(lambda: not listening._thread.is_alive)


def host_fails(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    def job() -> Any:
        unit = SimpleNamespace(name="layer.0", decide=decided.append, finish=lambda: None)
        arrived = SimpleNamespace(wait=lambda: None)
        parts = {"place_in_forward": 0, "norms": {}, "buffer": SimpleNamespace(busy=None)}
        return SimpleNamespace(unit=unit, arrived=arrived, **parts)

    decided: list[Future[bool]] = []
    host = HostOptimizer(1, Once(fault))
    for _ in range(2):
        host.submit(job(), lambda _: None, Any)
        assert wait_until(decided[-1].done)
    assert decided[0].exception() is fault and host.failed
    assert decided[1].result(WAIT_S) is False, "nothing to update"
    host.close()


def node_fails(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    class Daemon:
        addresses, neighbours, p2p = (), frozenset[str](), None

        def __init__(self) -> None:
            lives.append(self)
            self.dies = asyncio.Event()

        async def ended(self) -> str:
            watches()
            await self.dies.wait()
            return "it was killed"

        async def close(self, *, is_dead: bool) -> None:
            closes.append(is_dead)

    async def open_substrate(*_: Any, **__: Any) -> Daemon:
        if lives:
            opens()
        return Daemon()

    async def kill() -> None:
        lives[0].dies.set()

    lives: list[Daemon] = []
    closes: list[bool] = []
    watches, opens, heals = Once(fault), Once(fault), Once(fault, lambda *_: [])
    patch.setattr(node_module, "open_substrate", open_substrate)
    patch.setattr(node_module, "HEAL_LOOK_EVERY_S", 0.001)
    patch.setattr(node_module, "RESTART_AFTER_S", (0.0, 0.0, 0.0))
    node = Node(
        load_or_create_identity(folder / "me.key"),
        NetworkSection(client_mode=True),
        Handlers(),
        forgotten=None,
    )
    patch.setattr(node._book, "next", heals)
    try:
        node.run(node._open([], None, must_reach=False), WAIT_S)
        assert heals.has_gone_on() and watches.has_gone_on(2)
        node.run(kill(), WAIT_S)
        assert wait_until(lambda: len(lives) == 2 and node.failure is None)
        assert opens.num_calls == 2 and node.alive
    finally:
        node.stop(WAIT_S)
    assert closes == [True, True, False]


def door_fails(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    async def sock_accept(*arguments: Any) -> Any:
        return await accepts(*arguments)

    async def enter(connection: socket.socket, _: str) -> None:
        connection.close()
        entered.set()

    async def work() -> None:
        identity = load_or_create_identity(folder / "me.key")
        door = TcpListener(identity, Traffic(), Ledger(), {})
        patch.setattr(door, "_enter", enter)
        door.open(["127.0.0.1"], 0)
        with socket.create_connection(("127.0.0.1", door.port)):
            async with asyncio.timeout(WAIT_S):
                await entered.wait()
        await door.close()

    loop, entered = asyncio.SelectorEventLoop, asyncio.Event()
    accepts = Once(fault, loop.sock_accept)
    patch.setattr(loop, "sock_accept", sock_accept)
    asyncio.run(work())
    assert accepts.num_calls >= 2


def scores_fail(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    async def publish(*_: Any) -> bool:
        return published()

    async def repeats() -> None:
        assert await published.has_gone_on_here(4)
        await showing._renewing.stop()

    thread = LoopThread("test-scores")
    node: Any = SimpleNamespace(peer_id="me", run=thread.run, traffic=Traffic())
    patch.setattr(observer, "RENEW_S", 0.001)
    patch.setattr(observer, "publish", publish)
    showing = observer.Observer(node, BlobStore())
    published = Once(fault, lambda *_: True, at=2)  # the first goes to its caller
    showing.publish_scores("run", Any, WAIT_S)
    thread.run(repeats(), WAIT_S)
    thread.stop(WAIT_S)


@contextmanager
def moments(patch: pytest.MonkeyPatch) -> Iterator[tuple[LoopThread, Any]]:
    thread = LoopThread("test-moments")
    node: Any = SimpleNamespace(peer_id="me", loop=thread.loop, traffic=Traffic())
    patch.setattr(moments_exchange, "RETRY_S", 0.001)
    exchange = moments_exchange.MomentsExchange(node, BlobStore(), Any, LAYOUT, run="run")
    yield thread, exchange
    thread.run(exchange.stop(), WAIT_S)
    thread.stop(WAIT_S)


def giving_fails(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    with moments(patch) as (_, exchange):
        waited_for = Once(fault, lambda *_: waited_for.num_calls < 4)
        patch.setattr(exchange, "is_waited_for", waited_for)
        given = exchange.give(0, 1, Content.of(b"moments"), ["other"])
        assert waited_for.has_gone_on(4)
        assert wait_until(lambda: not exchange.holds(given.digest))


def taking_fails(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    class Taking:
        take_up = whom_to_ask = choose = staticmethod(lambda *_: [])
        is_looking = property(lambda _: looks())

    looks = Once(fault, lambda: looks.num_calls < 4)
    with moments(patch) as (_, exchange):
        patch.setattr(exchange, "_taking", Taking())
        exchange.take_up([0], TIP, TIP)
        assert looks.has_gone_on(4)
        assert wait_until(lambda: not exchange._is_looking)


def heads_fail(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    lacks = Once(fault, lambda _: [])
    for name in ("FIRST_S", "AGAIN_S"):
        patch.setattr(chain_gaps, name, 0.001)
    patch.setattr(chain_gaps, "gaps", lacks)
    bench = Bench()
    try:
        bench.start()
        assert lacks.has_gone_on()
        bench.driver._raise_failure()  # there is none
    finally:
        bench.stop()


def gathering_fails(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    async def announce(*_: Any) -> None:
        announces()
        await asyncio.Event().wait()

    announces, thread = Once(fault), LoopThread("test-gathering")
    patch.setattr(founding, "keep_gathering", announce)
    starter: Any = SimpleNamespace(
        node=SimpleNamespace(loop=thread.loop), status=lambda _: SimpleNamespace(record=None)
    )
    announced: Any = SimpleNamespace(wait_for_peers=2)
    with founding._gathering_on(starter, Any, announced):
        assert announces.has_gone_on(2)
    thread.stop(WAIT_S)


def export_fails(fault: BaseException, patch: pytest.MonkeyPatch, folder: Path) -> None:
    @contextmanager
    def observing(*_: Any) -> Iterator[None]:
        yield

    follows = Once(fault)
    fakes = {
        "ExportManager": lambda *_: SimpleNamespace(close=lambda: None, require_run=lambda _: None),
        "BlobStore": lambda _: None,
        "_observing": observing,
        "FromPeers": lambda *_, **__: SimpleNamespace(run_id="run"),
        "Follower": lambda *_: SimpleNamespace(follow=follows),
    }
    for name, fake in fakes.items():
        patch.setattr(exports, name, fake)
    given: Any = SimpleNamespace(initial_peers=("/one",), corpus=None)
    exports.follow(given, exports.Plan(folder, 1, None), None, Any)
    assert follows.num_calls == 2


LIVE: dict[tuple[str, str], Fails] = {
    ("peers/emulated.py", "Emulation.follow"): emulation_fails,
    ("peers/actions/exports.py", "follow"): export_fails,
    ("peers/actions/monitor_page.py", "_show_page"): monitor_page_fails,
    ("peers/actions/tensorboard.py", "Drawn.__init__"): tensorboard_fails,
    ("swarm/emulation/networks.py", "NamespaceLinks.__init__"): shaper_fails,
    ("swarm/emulation/networks.py", "ProxyLinks.__init__"): proxies_fail,
    ("swarm/network/wire/tcp_listener.py", "TcpListener.open"): door_fails,
    ("swarm/network/wire/loop_thread.py", "LoopThread.__init__"): network_thread_fails,
    ("swarm/network/rounds/moments_exchange.py", "MomentsExchange.give"): giving_fails,
    ("swarm/network/rounds/moments_exchange.py", "MomentsExchange._take_up"): taking_fails,
    ("swarm/network/node/node.py", "Node._open"): node_fails,
    ("swarm/network/runs/observer.py", "Observer.publish_scores.store"): scores_fail,
    ("swarm/network/rounds/round_driver.py", "RoundDriver._start"): heads_fail,
    ("swarm/peer/start/founding.py", "_gathering_on"): gathering_fails,
    ("swarm/peer/machine/local_faults.py", "watch_for_unborn_threads"): local_faults_fail,
    ("swarm/peer/status/publisher.py", "Publisher.__init__"): publisher_fails,
    ("swarm/peer/start/quota.py", "QuotaWatch.__init__"): quota_fails,
    ("swarm/train/workers/nodes.py", "Nodes.__init__"): nodes_fail,
    ("swarm/train/streaming/gradients.py", "HostOptimizer.__init__"): host_fails,
}
"""Starts of work that lives as long as the process, and a way to make it fail once."""


def test_all_that_lives_as_long_as_the_process_is_made_to_fail() -> None:
    assert everywhere(supervises) == set(LIVE)


@pytest.mark.usefixtures("short_rests")
@pytest.mark.parametrize("fault", FAULTS[:2], ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("place", sorted(LIVE), ids=lambda place: f"{place[0]}:{place[1]}")
def test_one_foreign_exception_ends_none_of_it(
    place: tuple[str, str],
    fault: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    LIVE[place](fault, monkeypatch, tmp_path)
    if place[0] != "swarm/train/streaming/gradients.py":  # the update's own waiter receives it
        assert "failed; it begins again in" in caplog.text
        assert f"{type(fault).__name__}" in caplog.text, "with its traceback"


# ---------------------------------------------------------------- work that must not continue


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
@pytest.mark.parametrize("where", ["an event", "a tick", "the start"])
def test_a_failure_of_the_round_driver_ends_the_peer_with_its_cause(
    where: str, fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    fails = Once(fault)
    if where == "an event":
        monkeypatch.setattr(bench.machine, "handle", fails)
    elif where == "a tick":
        bench.machine.timers = SimpleNamespace()  # has no `tick_s`
    else:
        monkeypatch.setattr(bench.driver._work, "supervise", fails)
    bench.driver.start()
    try:
        kind = OutOfMemory if fails.num_calls and fault in FAULTS[:2] else SwarmError
        with pytest.raises(kind, match="the round driver") as raised:
            bench.driver.wait_for_tip(TIP.digest, WAIT_S)
        cause = AttributeError if where == "a tick" else type(fault)
        assert isinstance(raised.value.__cause__, cause)
    finally:
        bench.stop()


def test_a_worker_that_cannot_read_on_ends_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ended(BaseException):
        pass

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(worker_process.os, "_exit", end)
    channel: Any = SimpleNamespace(take=Once(MemoryError("no room")))
    with pytest.raises(Ended) as ended:
        worker_process._listen(channel, Any)
    assert ended.value.args == (1,)
    assert "MemoryError: no room" in capsys.readouterr().err


@pytest.mark.usefixtures("short_rests")
@pytest.mark.parametrize("fault", FAULTS[:2], ids=lambda fault: type(fault).__name__)
def test_a_thread_of_a_pool_that_fails_between_two_calls_does_those_that_wait(
    fault: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = background.Helpers("few", 1)
    changed = pool._shared.changed
    monkeypatch.setattr(changed, "wait_for", Once(fault, changed.wait_for))
    assert [each.result(WAIT_S) for each in (pool.submit(int, "1"), pool.submit(int, "2"))] == [
        1,
        2,
    ]
    assert pool.end(WAIT_S)
    assert "a thread of few failed; it begins again" in caplog.text


async def test_a_sample_that_fails_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connected() -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            return ours, server.accept()[0]

    heard: list[Any] = []
    monkeypatch.setattr("swarm.network.wire.upload_rate.LINE_SAMPLE_S", 0.001)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    rate = UploadRate()
    samples = Once(RuntimeError("a bug"))
    monkeypatch.setattr(rate, "sample", samples)
    ours, theirs = await connected()
    with ours, theirs, rate.watching("other", ours):
        assert await samples.has_gone_on_here()
    assert len(heard) == 1
