"""Ranks as threads of one process: their operations without processes, sockets and gloo."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarm.train.engine.ranks import Ranks

WAIT_S = 60.0


class Meeting:
    """The place where the threads of one set of ranks exchange tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self._given: list[Any] = [None] * size
        self._parts: dict[tuple[int, ...], Meeting] = {}
        self._lock = threading.Lock()

    def swap(self, rank: int, what: str, given: Any, take: Callable[[list[Any]], None]) -> None:
        """Gives each rank the tensors of all ranks in the same operation."""
        self._given[rank] = (what, given)
        self.barrier.wait()
        assert len({kind for kind, _ in self._given}) == 1, self._given
        take([each for _, each in self._given])
        self.barrier.wait()
        self._given[rank] = None

    def part(self, ranks: Sequence[int]) -> "Meeting":
        """The meeting of some of the ranks."""
        with self._lock:
            return self._parts.setdefault(tuple(ranks), Meeting(len(ranks)))

    def abort(self) -> None:
        """Ends the waits for a failed thread."""
        self.barrier.abort()
        for part in self._parts.values():
            part.abort()


@dataclass(frozen=True, kw_only=True)
class ThreadRanks(Ranks):
    """A thread's place among the others."""

    whole: Meeting

    def _meet(self, what: str, given: Any, take: Callable[[list[Any]], None]) -> None:
        meeting: Any = self.handle or self.whole
        meeting.swap(self.rank, what, given, take)

    def _group(self, ranks: Sequence[int]) -> Any:
        return self.whole.part(ranks)

    def _all_to_all(
        self, into: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        def take(found: list[Any]) -> None:
            for part, given in zip(into.split(list(received)), found, strict=True):
                assert len(part) == len(given[self.rank])
                part.copy_(given[self.rank])

        self._meet("all to all", rows.split(list(sent)), take)

    def _all_gather(self, into: Tensor, part: Tensor) -> None:
        def take(found: list[Any]) -> None:
            for place, given in zip(into.chunk(self.size), found, strict=True):
                place.copy_(given)

        self._meet("all gather", part, take)

    def _all_reduce(self, numbers: Tensor) -> None:
        sums: list[Tensor] = []
        self._meet("all reduce", numbers, lambda found: sums.append(torch.stack(found).sum(0)))
        numbers.copy_(sums[0])


def together(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """The results of `work` on a number of ranks. Raises the first error of any."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = work(ThreadRanks(rank, size, torch.device("cpu"), whole=meeting))
        except BaseException as error:  # noqa: BLE001 - it is raised again by the caller
            failed.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return results
