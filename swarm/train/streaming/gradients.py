"""Sends gradients from the device to the host, unit by unit, and updates the masters there."""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from swarm.background import SupervisedThread
from swarm.train.engine.guard import norm_of, square_sums
from swarm.train.engine.host_memory import Arena, HostMemory, Packing
from swarm.train.engine.optimizer_moments import Piece, Update
from swarm.train.engine.ranks import Ranks
from swarm.train.streaming.bus import Bus, Mark
from swarm.train.streaming.host_model import HostUnit

logger = logging.getLogger(__name__)


class GradientBuffer:
    """Host memory that receives the gradients of one unit at a time."""

    def __init__(self, num_bytes: int, memory: HostMemory, *, pinned: bool) -> None:
        self._arena = memory.take(num_bytes, pinned=pinned)
        self.busy: Future[bool] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return self._arena.buffer.nbytes

    def bytes_for(self, packing: Packing) -> Tensor:
        """The part of the memory for a unit's gradients."""
        return self._arena.buffer[: packing.num_bytes]

    def close(self) -> None:
        """Gives the memory back."""
        self._arena.close()


@dataclass(frozen=True)
class GradientOffload:
    """The transfer of one unit's gradients to the host.

    Attributes:
        unit: the unit of the gradients.
        place_in_forward: the unit's place in the order of the forward pass.
        buffer: host memory in which the gradients arrive.
        squares: fp64, on the host: the sum of squares of each gradient, in the unit's order.
        arrived: a mark, reached once the gradients are on the host.
    """

    unit: HostUnit
    place_in_forward: int
    buffer: GradientBuffer
    squares: Tensor
    arrived: Mark

    @property
    def norms(self) -> dict[str, Tensor]:
        """The fp32 norm of each gradient by name; valid once they have arrived."""
        names = [field.name for field in self.unit.packing.fields]
        each = zip(names, self.squares, strict=True)
        return {name: norm_of(square, 1.0) for name, square in each}


Factors = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor] | None]
"""Maps the norms of a unit's gradients to the factors of those that change; None skips the unit."""


@dataclass(order=True)
class _Job:
    place_in_forward: int
    offload: GradientOffload = field(compare=False)
    factors: Factors = field(compare=False)
    update: Update = field(compare=False)
    done: Future[bool] = field(compare=False)


class HostOptimizer:
    """Updates units on threads of the CPU while the device computes.

    Of the waiting units, the one that the forward pass needs first is updated first. So the next
    step can begin while later units are still being updated. `HostUnit.wait`, and fetching the
    unit, raise the error of an update.

    Attributes:
        failed: whether an update failed, so that some masters may be partly updated.
    """

    def __init__(self, num_threads: int, begin: Callable[[], None]) -> None:
        """Starts the threads. The one that waits for gradients first calls `begin`.

        If `begin` fails, that update fails too, and the next update calls `begin` again.
        """
        self._jobs: list[_Job] = []
        self._begin, self._has_begun = begin, False
        self._changed = threading.Condition()
        self._closed = self.failed = False
        self._pool = ThreadPoolExecutor(num_threads, "swarm-update", _one_thread)
        self._thread = SupervisedThread("swarm-host", self._work)
        self._thread.start()

    def submit(self, offload: GradientOffload, factors: Factors, update: Update) -> None:
        """Updates a unit once its gradients have arrived; the unit's version rises at once.

        Args:
            offload: gradients of the unit. Their buffer is busy until the update is done.
            factors: see `Factors`; called once the gradients have arrived.
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
            factor = numbers.get(piece.name, 1.0)
            unit.update_piece(piece, gradients[piece.name], factor, job.update)

        list(self._pool.map(work, unit.own_pieces()))
        return True


def _one_thread() -> None:
    # The pool's threads compute in parallel; torch's own threads would compete with them.
    torch.set_num_threads(1)


class Accumulator:
    """One flat fp32 buffer for the gradients of one unit at a time.

    Attributes:
        views: the gradient of each parameter.
    """

    def __init__(self, num_bytes: int, num_tensors: int, bus: Bus, ranks: Ranks) -> None:
        self._bus, self._ranks = bus, ranks
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=bus.device)
        self._squares = torch.empty(num_tensors, dtype=torch.float64, device=bus.device)
        self._left = Mark()
        self.views: dict[str, Tensor] = {}
        self._written: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self._buffer.nbytes + self._squares.nbytes

    def begin(self, unit: HostUnit, before: GradientOffload | None = None) -> None:
        """Starts another unit, once the last unit's gradients have left.

        Args:
            unit: the unit whose gradients follow.
            before: the unit's sums over earlier passes, to which the new gradients are added.
        """
        self.packing, self.views = unit.packing, unit.packing.views(self._buffer)
        self._runs = unit.runs()
        if before is None:
            self._bus.wait(self._left)
            self._written = set()
            return
        sums, free = before.buffer.bytes_for(self.packing), self._left
        here = self._buffer[: self.packing.num_bytes]
        if self._ranks.size > 1:
            # Only this process's share continues earlier sums; the others start from zero.
            self._bus.wait(free)
            here.view(torch.float32).fill_(-0.0)
            free = self._bus.mark()
        here, sums = here[self._run], sums[self._run]
        self._bus.wait(self._bus.fetch(here, sums, free, before.arrived))
        self._written = set(self.views)

    @property
    def _run(self) -> slice:
        """The bytes of this process's share."""
        return self._runs[self._ranks.rank]

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds one micro-batch's gradient of a parameter, of any type."""
        if name in self._written:
            self.views[name].add_(gradient.float())
        else:
            self.views[name].copy_(gradient)
            self._written.add(name)

    def add_up(self) -> None:
        """Adds up the gradients of all processes; each process gets the sums of its own share.

        Raises:
            Disconnected: another rank has ended.
        """
        for name in self.views.keys() - self._written:
            assert self._ranks.size > 1, f"{name} has no gradient"
            # This rank had no micro-batch. A negative zero changes no bit of any sum.
            self.views[name].fill_(-0.0)
        flat = self._buffer[: self.packing.num_bytes].view(torch.float32)
        runs = [slice(run.start // 4, run.stop // 4) for run in self._runs]
        self._ranks.add_up_shares([[flat[run]] for run in runs])

    def send(self, target: Tensor, squares: Tensor) -> Mark:
        """Sends this process's share of the gradients, and the sums of their squares, to the host.

        Returns:
            A mark that is reached once gradients and sums have arrived.
        """
        flat = self._buffer[: self.packing.num_bytes].view(torch.float32)
        found = square_sums([flat[part] for part in _parts(self.packing, self._run)])
        self._squares[: len(found)] = found
        done = self._bus.mark()
        self._bus.send(squares, self._squares[: len(found)], done)
        self._left = self._bus.send(target[self._run], self._buffer[self._run], done)
        return self._left


def _parts(packing: Packing, run: slice) -> Iterator[slice]:
    """For each tensor of a packed buffer, its fp32 elements that lie in a run of bytes."""
    for each in packing.fields:
        start, stop = each.offset, each.offset + each.num_bytes
        start = min(max(start, run.start), stop)
        yield slice(start // 4, max(start, min(stop, run.stop)) // 4)


class Buffers:
    """Host memory for gradients: one buffer for every unit, or a few that layers share.

    Args:
        units: all units, in the order of the forward pass.
        shared: how many buffers the layers share; 0 gives each layer its own.
        memory: where gradients lie.
        pinned: whether the memory is pinned, for a GPU.
    """

    def __init__(
        self, units: Sequence[HostUnit], shared: int, memory: HostMemory, *, pinned: bool
    ) -> None:
        self._units = {unit.name: (place, unit) for place, unit in enumerate(units)}
        own = [unit for unit in units if not shared or unit.layer is None]
        layers = [unit.packing.num_bytes for unit in units if unit.layer is not None]
        self._own = {
            unit.name: GradientBuffer(unit.packing.num_bytes, memory, pinned=pinned) for unit in own
        }
        self._ring = [GradientBuffer(max(layers), memory, pinned=pinned) for _ in range(shared)]
        self._squares = Arena(8 * sum(len(unit.packing.fields) for unit in units), pinned=pinned)
        self._squares_of, start = {}, 0
        for unit in units:
            stop = start + len(unit.packing.fields)
            self._squares_of[unit.name] = self._squares.buffer.view(torch.float64)[start:stop]
            start = stop

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(buffer.num_bytes for buffer in [*self._own.values(), *self._ring])

    def offload(
        self, name: str, gradients: Accumulator, scale: float | None = None
    ) -> GradientOffload:
        """Starts the transfer of a unit's gradients.

        Waits until the buffer's previous update has ended, and raises that update's error.

        Args:
            name: name of the unit.
            gradients: gradients of the unit.
            scale: scale of the loss, where the device computes Muon's directions; else None.

        Raises:
            Disconnected: another rank has ended.
        """
        buffer = self._own.get(name)
        if buffer is None:
            buffer = self._ring.pop(0)
            self._ring.append(buffer)
        if buffer.busy is not None:
            busy, buffer.busy = buffer.busy, None
            busy.result()
        place, unit = self._units[name]
        squares = self._squares_of[name]
        gradients.add_up()
        if scale is not None:
            unit.orthogonalise(gradients.views, scale)
        arrived = gradients.send(buffer.bytes_for(unit.packing), squares)
        return GradientOffload(unit, place, buffer, squares, arrived)

    def close(self) -> None:
        """Gives the memory back."""
        for buffer in [*self._own.values(), *self._ring]:
            buffer.close()
        self._squares.close()


def tell(ranks: Ranks, offloads: Sequence[GradientOffload]) -> None:
    """Adds up sums of squares over all processes, once the gradients have arrived.

    Raises:
        Disconnected: another rank has ended.
    """
    if ranks.size == 1:
        return
    for offload in offloads:
        offload.arrived.wait()
    # One row for each rank, so that the sum over the ranks has a fixed order.
    mine = torch.cat([offload.squares for offload in offloads])
    rows = torch.zeros(ranks.size, len(mine), dtype=torch.float64)
    rows[ranks.rank] = mine
    sizes = [len(offload.squares) for offload in offloads]
    sums = ranks.united(rows).sum(0).split(sizes)
    for offload, squares in zip(offloads, sums, strict=True):
        offload.squares.copy_(squares)
