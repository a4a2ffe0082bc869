"""The ports through which a peer sees its machine, and how modules get the virtual ones.

Not all classes of a peer take their ports at construction: many modules name `time`, `threading`,
`socket` or `os` themselves. `bound` replaces these names in every module of the peer, also where
their functions are defaults of arguments or of dataclass fields. `reached_past` lists the modules
that need this. The list shrinks as modules take ports.
"""

from __future__ import annotations

import errno
import inspect
import os as real_os
import socket as real_socket
import sys
import threading as real_threading
import time as real_time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

from swarm.emulation.longevity import kernel
from swarm.emulation.longevity.kernel import Threads, running_world
from swarm.export import run_follower
from swarm.monitor import server
from swarm.network.node import node
from swarm.peer import session

WRITING = ("open", "fsync", "fdatasync", "pwrite", "link")


@dataclass
class Disk:
    """The disk of the peer under test; see the module.

    Attributes:
        full: times when the disk is full, (from, to) in seconds of the month.
        hanging: times when the disk does not answer, in the same form.
        calls: number of system calls, by name.
        refused: number of failed system calls, by name.
    """

    full: list[tuple[float, float]] = field(default_factory=list)
    hanging: list[tuple[float, float]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def passes(self, name: str, flags: int = real_os.O_WRONLY) -> None:
        """Called before each system call.

        Raises:
            OSError: the disk is full.
        """
        self.calls[name] += 1
        loop = running_world()
        for begin_s, end_s in self.hanging:
            if begin_s <= loop.now_s < end_s:
                Threads.of(loop).sleep(end_s - loop.now_s)
        reads_only = name == "open" and not flags & (real_os.O_WRONLY | real_os.O_RDWR)
        if not reads_only and any(b <= loop.now_s < e for b, e in self.full):
            self.refused[name] += 1
            raise OSError(errno.ENOSPC, real_os.strerror(errno.ENOSPC))

    def calls_of_os(self) -> dict[str, Callable[..., Any]]:
        """The replacements for functions of `os`."""

        def opened(path: Any, flags: int, mode: int = 0o777, **named: Any) -> int:
            self.passes("open", flags)
            return real_os.open(path, flags, mode, **named)

        def written(descriptor: int, data: Any, offset: int) -> int:
            self.passes("pwrite")
            return real_os.pwrite(descriptor, data, offset)

        def linked(*arguments: Any, **named: Any) -> None:
            self.passes("link")
            real_os.link(*arguments, **named)

        return {
            "open": opened,
            "pwrite": written,
            "link": linked,
            "fsync": lambda _: self.passes("fsync"),
            "fdatasync": lambda _: self.passes("fdatasync"),
        }


ENTRIES = (run_follower, server, node, session)
"""Modules that import all modules of the peer that a scenario uses."""


class ClockPort(Protocol):
    """The part of `time` that a peer uses: three clocks, in seconds."""

    def monotonic(self) -> float:
        """As `time.monotonic`."""

    def boot(self) -> float:
        """As `time.clock_gettime(CLOCK_BOOTTIME)`."""

    def wall(self) -> float:
        """As `time.time`."""


class SocketPort(Protocol):
    """The part of `socket` that a peer uses: making unconnected and listening sockets."""

    def socket(self, family: int, kind: int) -> Any:
        """As `socket.socket`."""

    def create_server(self, address: tuple[str, int], *, family: int, backlog: int) -> Any:
        """Like `socket.create_server`."""


@dataclass(frozen=True)
class Ports:
    """All ports of one machine."""

    clock: ClockPort
    threads: kernel.Threads
    sockets: SocketPort
    disk: Disk


class _Stand:
    """A module with some of its names replaced."""

    def __init__(self, real: ModuleType, **names: object) -> None:
        self._real = real
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _stands(ports: Ports) -> dict[ModuleType, _Stand]:
    clock = ports.clock

    def clock_gettime(which: int) -> float:
        return clock.boot() if which == real_time.CLOCK_BOOTTIME else clock.monotonic()

    return {
        real_time: _Stand(
            real_time,
            monotonic=clock.monotonic,
            perf_counter=clock.monotonic,
            time=clock.wall,
            sleep=ports.threads.sleep,
            clock_gettime=clock_gettime,
        ),
        real_threading: _Stand(
            real_threading,
            Thread=kernel.VirtualThread,
            Event=kernel.VirtualEvent,
            Condition=kernel.VirtualCondition,
            Timer=kernel.VirtualTimer,
            Semaphore=kernel.VirtualSemaphore,
            current_thread=kernel.current_thread,
            get_ident=kernel.get_ident,
        ),
        real_socket: _Stand(
            real_socket,
            socket=ports.sockets.socket,
            create_server=ports.sockets.create_server,
        ),
        real_os: _Stand(real_os, **ports.disk.calls_of_os()),
    }


def _functions(ports: Ports) -> dict[Callable[..., Any], Callable[..., Any]]:
    clock = ports.clock
    return {
        real_time.monotonic: clock.monotonic,
        real_time.perf_counter: clock.monotonic,
        real_time.time: clock.wall,
        real_time.sleep: ports.threads.sleep,
    }


def modules_of_peer() -> list[ModuleType]:
    """Every module of the peer that is imported."""
    named = [name for name in sys.modules if name.startswith("swarm.")]
    return [sys.modules[n] for n in sorted(named) if not n.startswith("swarm.emulation")]


def reached_past() -> dict[str, list[str]]:
    """The names of a machine's clock, threads or sockets that each module itself uses."""
    machine = (real_time, real_threading, real_socket, real_os)
    found = {
        module.__name__: sorted(real.__name__ for real in machine if _name_of(module, real))
        for module in modules_of_peer()
    }
    return {name: which for name, which in found.items() if which}


def _name_of(module: ModuleType, real: ModuleType) -> str | None:
    return next((name for name, value in vars(module).items() if value is real), None)


@contextmanager
def bound(ports: Ports, others: dict[Callable[..., Any], object]) -> Iterator[None]:
    """Gives all modules of the peer these ports in place of the machine's.

    Args:
        ports: ports of the machine.
        others: replacements of functions and classes of the peer.
    """
    stands, functions, undo = _stands(ports), _functions(ports), list[Callable[[], None]]()
    replaced = functions | others

    def put(owner: Any, name: str, value: object) -> None:
        before = vars(owner)[name]
        undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    def bind(module: ModuleType) -> None:
        for name, value in list(vars(module).items()):
            stand = stands.get(value) if isinstance(value, ModuleType) else None
            other = stand or _replacement(value, replaced)
            if other is not None:
                put(module, name, other)
        for function in _functions_of(module):
            _rebind_defaults(function, functions, undo)

    try:
        for module in modules_of_peer():
            bind(module)
        yield
    finally:
        for each in reversed(undo):
            each()


def _replacement(value: object, replaced: dict[Callable[..., Any], Any]) -> object | None:
    return next((other for one, other in replaced.items() if value is one), None)


def _functions_of(module: ModuleType) -> Iterator[Any]:
    own = [v for v in vars(module).values() if getattr(v, "__module__", None) == module.__name__]
    yield from (value for value in own if inspect.isfunction(value))
    for kind in (value for value in own if inspect.isclass(value)):
        members = [getattr(member, "__func__", member) for member in vars(kind).values()]
        yield from (member for member in members if inspect.isfunction(member))


def _rebind_defaults(
    function: Any,
    functions: dict[Callable[..., Any], Callable[..., Any]],
    undo: list[Callable[[], None]],
) -> None:
    defaults, named = function.__defaults__, function.__kwdefaults__
    if defaults and any(_is_clock(value, functions) for value in defaults):
        undo.append(lambda: setattr(function, "__defaults__", defaults))
        function.__defaults__ = tuple(
            functions[value] if _is_clock(value, functions) else value for value in defaults
        )
    if named and any(_is_clock(value, functions) for value in named.values()):
        undo.append(lambda: setattr(function, "__kwdefaults__", named))
        function.__kwdefaults__ = {
            name: functions[value] if _is_clock(value, functions) else value
            for name, value in named.items()
        }


def _is_clock(value: object, functions: dict[Callable[..., Any], Callable[..., Any]]) -> bool:
    return any(value is function for function in functions)
