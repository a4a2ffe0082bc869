"""Threads that work on several units at once: while values are offered and adopted, steps wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

from swarm.background import SYSTEM, Joinable
from swarm.deltas.units import Parts
from swarm.errors import OutOfMemory
from swarm.experts import Slice

WORTH_ELEMENTS = 2**22
"""Fewer are done before threads have started."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class OneAtATime:
    """The parts of an engine, which is made for one thread, for several."""

    def __init__(self, engine: Parts) -> None:
        self._engine, self._lock = engine, threading.Lock()

    def read_part(self, part: Slice) -> Tensor:
        """See `Engine`."""
        with self._lock:
            return self._engine.read_part(part)

    def write_part(self, part: Slice, values: Tensor) -> None:
        """See `Engine`."""
        with self._lock:
            self._engine.write_part(part, values)


class UnitThreads:
    """So many threads, the caller's among them; each computes with one thread of torch's."""

    def __init__(self, number: int) -> None:
        self.number = number

    def each(
        self, work: Callable[[Item], Result], items: Sequence[Item], elements: int
    ) -> list[Result]:
        """What `work` makes of each item, in their order.

        After an error nothing new is begun, and it is raised when all have come to an end. Threads
        that cannot be started are done without.

        Args:
            work: may be called by several threads at once, in any order.
            items: such as units.
            elements: of all items together; with few of them the caller works alone.
        """
        if min(self.number, len(items)) == 1 or elements < WORTH_ELEMENTS:
            return [work(item) for item in items]
        found: dict[int, Result] = {}
        errors: list[BaseException] = []
        todo, lock = iter(range(len(items))), threading.Lock()

        def run() -> None:
            torch.set_num_threads(1)
            while not errors:
                with lock:
                    index = next(todo, None)
                if index is None:
                    return
                try:
                    found[index] = work(items[index])
                except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
                    errors.append(error)

        usual = torch.get_num_threads()
        threads = _started(run, min(self.number, len(items)) - 1)
        run()
        for thread in threads:
            thread.join()
        torch.set_num_threads(usual)  # of this thread, and of those that torch has not met
        if errors:
            raise errors[0]
        return [found[index] for index in range(len(items))]


ONE_THREAD = UnitThreads(1)


def _started(run: Callable[[], None], number: int) -> list[Joinable]:
    started = []
    with suppress(OutOfMemory):  # the others do its work
        for _ in range(number):
            started.append(SYSTEM.start(run, "swarm-units"))
    return started
