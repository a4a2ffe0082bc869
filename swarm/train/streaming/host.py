"""The host's half of a step: gradients that have left the device become updates of masters."""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarm.background import SupervisedThread
from swarm.train.adam_moments import Piece, Update
from swarm.train.guard import norm_of
from swarm.train.streaming.arena import HostMemory, Packing
from swarm.train.streaming.bus import Mark
from swarm.train.streaming.units import HostUnit

logger = logging.getLogger(__name__)


class GradientBuffer:
    """Host memory into which the gradients of one unit at a time leave the device."""

    def __init__(self, num_bytes: int, memory: HostMemory, *, pinned: bool) -> None:
        self._arena = memory.take(num_bytes, pinned=pinned)
        self.busy: Future[bool] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return self._arena.buffer.nbytes

    def bytes_for(self, packing: Packing) -> Tensor:
        """The part that a unit's gradients fill."""
        return self._arena.buffer[: packing.num_bytes]

    def close(self) -> None:
        """Gives the memory back."""
        self._arena.close()


@dataclass(frozen=True)
class GradientOffload:
    """Gradients of one unit on their way to the host.

    Attributes:
        unit: the one that they belong to.
        place_in_forward: of the unit.
        buffer: where they will be.
        squares: fp64, in the unit's order, on the host: the sum of the squares of each.
        arrived: when they are there.
    """

    unit: HostUnit
    place_in_forward: int
    buffer: GradientBuffer
    squares: Tensor
    arrived: Mark

    @property
    def norms(self) -> dict[str, Tensor]:
        """The fp32 norm of each by name, once they have arrived."""
        names = [field.name for field in self.unit.packing.fields]
        each = zip(names, self.squares, strict=True)
        return {name: norm_of(square, 1.0) for name, square in each}


Factors = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor] | None]
"""From the norms of a unit's gradients to the factor of each; None skips the unit."""


@dataclass(order=True)
class _Job:
    place_in_forward: int
    offload: GradientOffload = field(compare=False)
    factors: Factors = field(compare=False)
    update: Update = field(compare=False)
    done: Future[bool] = field(compare=False)


class HostOptimizer:
    """Updates units on threads of the CPU while the device computes.

    Of the units that wait, the one that the forward pass needs first goes first, so that the next
    step can begin while units further up are still updated. An error of an update is raised
    again by `HostUnit.wait`, and where the unit is fetched.

    Attributes:
        failed: whether an update did, so that some masters are half updated.
    """

    def __init__(self, num_threads: int, begin: Callable[[], None]) -> None:
        """Starts the threads; `begin` is called by the one that waits for gradients, at the first.

        Where that fails, so does the update; the next one tries it again.
        """
        self._jobs: list[_Job] = []
        self._begin, self._has_begun = begin, False
        self._changed = threading.Condition()
        self._closed = self.failed = False
        self._pool = ThreadPoolExecutor(num_threads, "swarm-update", _one_thread)
        self._thread = SupervisedThread("swarm-host", self._work)
        self._thread.start()

    def submit(self, offload: GradientOffload, factors: Factors, update: Update) -> None:
        """Updates a unit once its gradients have arrived; its version rises at once.

        Args:
            offload: its gradients; their buffer is busy until the update is done.
            factors: see `Factors`; called when they have arrived.
            update: learning rate and count.
        """
        done: Future[bool] = Future()
        offload.unit.decide(done)
        offload.buffer.busy = done
        with self._changed:
            job = _Job(offload.place_in_forward, offload, factors, update, done)
            heapq.heappush(self._jobs, job)
            self._changed.notify()

    def close(self) -> None:
        """Finishes all submitted work and ends the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.stop(None)
        self._pool.shutdown()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = heapq.heappop(self._jobs)
            try:
                if not self._has_begun:
                    self._begin()
                    self._has_begun = True
                updated = self._update(job)
                job.offload.unit.finish()
                job.done.set_result(updated)
            except BaseException as error:
                logger.debug("an update of %s failed", job.offload.unit.name, exc_info=True)
                self.failed = True
                job.done.set_exception(error)

    def _update(self, job: _Job) -> bool:
        offload, unit = job.offload, job.offload.unit
        offload.arrived.wait()
        factors = job.factors(offload.norms)
        if factors is None:
            return False
        gradients = unit.packing.views(offload.buffer.bytes_for(unit.packing))
        numbers = {name: factor.item() for name, factor in factors.items()}

        def work(piece: Piece) -> None:
            unit.update_piece(piece, gradients[piece.name], numbers[piece.name], job.update)

        list(self._pool.map(work, unit.own_pieces()))
        return True


def _one_thread() -> None:
    # Every thread of the pool computes by itself; torch's own threads would only get in the way.
    torch.set_num_threads(1)
