"""Ranks that are threads of one process: their operations without processes, sockets and gloo."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarm.train.parallel.ranks import Ranks

WAIT_S = 60.0


class Meeting:
    """Where the threads of one set of ranks give each other tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self._given: list[Any] = [None] * size
        self._parts: dict[tuple[int, ...], Meeting] = {}
        self._lock = threading.Lock()

    def swap(self, rank: int, what: str, given: Any) -> list[Any]:
        """What each rank gives in the same operation."""
        self._given[rank] = (what, given)
        self.barrier.wait()
        found = list(self._given)
        self.barrier.wait()
        assert len({kind for kind, _ in found}) == 1, found
        return [each for _, each in found]

    def part(self, ranks: Sequence[int]) -> "Meeting":
        """That of some of the ranks."""
        with self._lock:
            return self._parts.setdefault(tuple(ranks), Meeting(len(ranks)))

    def abort(self) -> None:
        """Nobody waits for a thread that has failed."""
        self.barrier.abort()
        for part in self._parts.values():
            part.abort()


@dataclass(frozen=True, kw_only=True)
class ThreadRanks(Ranks):
    """A thread's place among the others."""

    whole: Meeting

    def _meet(self, what: str, given: Any) -> list[Any]:
        meeting: Any = self.handle or self.whole
        return meeting.swap(self.rank, what, given)

    def _group(self, ranks: Sequence[int]) -> Any:
        return self.whole.part(ranks)

    def _all_to_all(
        self, into: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        found = self._meet("all to all", rows.clone().split(list(sent)))
        parts = [given[self.rank] for given in found]
        assert [len(part) for part in parts] == list(received)
        into.copy_(torch.cat(parts))

    def _all_gather(self, into: Tensor, part: Tensor) -> None:
        into.copy_(torch.cat(self._meet("all gather", part.clone())))

    def _all_reduce(self, numbers: Tensor) -> None:
        numbers.copy_(torch.stack(self._meet("all reduce", numbers.clone())).sum(0))


def together(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """The results of `work` on each of so many ranks; raises what the first of them raised."""
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
