"""Processes that compute together, the operations between them, and their traffic.

Sums are added up in the order of the ranks, so that their bits depend on the number of ranks alone.

Shapes: N micro-batches, X elements of a bucket, M rows.
"""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from swarm.errors import lacks_memory
from swarm.train.engine.mesh import Sets
from swarm.train.engine.sizes import BUCKET

PIPELINE, STAGE = "pipeline", "stage"
"""Names of durations that are not operations between ranks: a pipeline's schedule, and all forwards
and backwards of the stage in it."""


class Watch:
    """Adds up seconds by name.

    On a GPU, seconds are measured between two events in its queue. So the process waits for the GPU
    only when the seconds are read, once a step.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def timing(self, name: str, device: torch.device) -> Iterator[None]:
        """Counts the time of the context on this device, also if it fails."""
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            try:
                yield
            finally:
                end.record()
                self._events.append((name, begin, end))
            return
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - began_s)

    def take(self) -> dict[str, float]:
        """Returns seconds by name and resets them. Waits for a GPU that lags behind."""
        for name, begin, end in self._events:
            end.synchronize()
            self._add(name, begin.elapsed_time(end) / 1000)
        found, self._seconds = self._seconds, {}
        self._events.clear()
        return found

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds


COLLECTIVE_S = 1800.0
"""Longest wait of a rank for the others. The controller ends hanging workers much sooner."""


class Disconnected(Exception):
    """Another rank did not take part in a collective operation."""


def meeting_at(host: str, port: int, *, listening: int | None = None) -> object:
    """A store of torch.distributed with which ranks of several machines find each other.

    Args:
        host: address of the machine that listens.
        port: port on which that machine listens.
        listening: descriptor of the listening socket, which the store takes over. None for a
            client.
    """
    own: dict[str, Any] = {
        "is_master": True,
        "wait_for_workers": False,
        "master_listen_fd": listening,
    }
    # torch documents the name and exports it, but its types do not.
    store: object = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        timeout=datetime.timedelta(seconds=COLLECTIVE_S),
        **({} if listening is None else own),
    )
    return store


@dataclass
class Traffic:
    """Operations of one rank, by their purpose.

    Attributes:
        operations: number of operations of each kind.
        num_bytes: bytes that this rank sent to others, by kind.
        watch: seconds of operations of each kind.
    """

    operations: dict[str, int] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)

    def count(self, kind: str, num_bytes: int) -> None:
        """Adds one operation."""
        self.operations[kind] = self.operations.get(kind, 0) + 1
        self.num_bytes[kind] = self.num_bytes.get(kind, 0) + num_bytes

    def take(self) -> dict[str, tuple[int, int]]:
        """Returns operations and bytes of each kind, and resets them and the watch."""
        self.watch.take()
        found = {kind: (self.operations[kind], self.num_bytes[kind]) for kind in self.operations}
        self.operations.clear()
        self.num_bytes.clear()
        return found


@dataclass(frozen=True)
class Ranks:
    """The rank of this process in a set of a peer's processes, all or some, that compute together.

    Attributes:
        rank: rank of this process.
        size: number of ranks, at least one.
        device: device of the tensors in operations between ranks.
        handle: group of these ranks in torch.distributed. None for all ranks.
        traffic: one record for all sets of ranks that contain this process.
    """

    rank: int
    size: int
    device: torch.device
    handle: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    _parts: dict[Sets, Ranks] = field(default_factory=dict, compare=False, repr=False)

    def block(self, count: int, rank: int | None = None) -> range:
        """The consecutive micro-batches that a rank computes, perhaps none.

        Args:
            count: number of micro-batches.
            rank: number of the rank. None for this rank.
        """
        rank = self.rank if rank is None else rank
        return range(count * rank // self.size, count * (rank + 1) // self.size)

    def part(self, parts: Sets) -> Ranks:
        """The set with this rank, out of several disjoint sets of ranks.

        All ranks make this call together. A second call with the same sets returns the same object.

        Args:
            parts: the sets, the same at all ranks.

        Raises:
            Disconnected: another rank has ended.
        """
        if parts not in self._parts:
            self._parts[parts] = self._part(parts)
        return self._parts[parts]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replaces contiguous fp32 tensors by their sums over the ranks, in the ranks' order.

        Each element goes to one rank, which adds the values and sends the sum to all. This moves as
        many bytes as a ring, but the values are always added in the order of the ranks.

        Raises:
            Disconnected: another rank has ended.
        """
        if self.size == 1:
            return
        for bucket in _buckets(tensors, BUCKET):
            sizes = [len(part) for part in bucket]
            padding = bucket[0].new_zeros(-sum(sizes) % self.size)
            mine_X = torch.cat([each.to(self.device) for each in (*bucket, padding)])
            sums_X = self.gathered(self.scattered(mine_X, "sums"), "sums")
            for part, total in zip(bucket, sums_X[: sum(sizes)].split(sizes), strict=True):
                part.copy_(total)

    def add_up_shares(self, shares: Sequence[Sequence[Tensor]]) -> None:
        """Replaces this rank's share of fp32 tensors by the sums over the ranks, in their order.

        Like `add_up`, but each sum stays at its rank.

        Args:
            shares: for each rank, flat views of the tensors whose sums it receives.

        Raises:
            Disconnected: another rank has ended.
        """
        if self.size == 1:
            return
        for parts in _rounds(shares, BUCKET // self.size):
            cut = [sum(map(len, part)) for part in parts]
            own = cut[self.rank]
            mine_X = torch.cat([each.to(self.device) for part in parts for each in part])
            received_X = mine_X.new_empty(own * self.size)
            with self._counted("sums", 4 * (sum(cut) - own)):
                self._all_to_all(received_X, mine_X, [own] * self.size, cut)
            total = _in_order(received_X.view(self.size, own))
            sizes = [len(each) for each in parts[self.rank]]
            for each, found in zip(parts[self.rank], total.split(sizes), strict=True):
                each.copy_(found)

    def spread(self, shares: Sequence[Sequence[Tensor]]) -> None:
        """Copies each rank's share to all ranks: an all-gather. All tensors have one type.

        Args:
            shares: for each rank, flat views of the tensors of its share. The views of other ranks
                are overwritten.

        Raises:
            Disconnected: another rank has ended.
        """
        if self.size == 1:
            return
        for parts in _rounds(shares, BUCKET // self.size):
            cut = [sum(map(len, part)) for part in parts]
            dtype = next(each.dtype for part in parts for each in part)
            padding = torch.zeros(max(cut) - cut[self.rank], dtype=dtype, device=self.device)
            mine = torch.cat([*(each.to(self.device) for each in parts[self.rank]), padding])
            found = mine.new_empty(self.size * max(cut))
            with self._counted("values", mine.nbytes * (self.size - 1)):
                self._all_gather(_as_bytes(found), _as_bytes(mine))
            for rank, whole in enumerate(found.view(self.size, max(cut))):
                sizes = [len(each) for each in parts[rank]]
                theirs = whole[: cut[rank]].split(sizes) if sizes and rank != self.rank else ()
                for each, values in zip(parts[rank], theirs, strict=False):
                    each.copy_(values)

    def shared(
        self, mine: Sequence[Sequence[float]], count: int, width: int, own: range | None = None
    ) -> Tensor:
        """Rows of numbers of all micro-batches, fp64 [count, width], from the rows of each rank.

        Fp32 values and whole numbers below 2^53 are sent exactly.

        Args:
            mine: the rows of this rank.
            count: number of micro-batches.
            width: numbers in a row.
            own: the micro-batches of these rows; None for this rank's block.

        Raises:
            Disconnected: another rank has ended.
        """
        rows = torch.zeros(count, width, dtype=torch.float64)
        for index, row in zip(self.block(count) if own is None else own, mine, strict=True):
            rows[index] = torch.tensor(row, dtype=torch.float64)
        return self.united(rows)

    def united(self, numbers: Tensor) -> Tensor:
        """Unites fp64 numbers on the CPU. Only one rank knows each number; the others have 0 there.

        Raises:
            Disconnected: another rank has ended.
        """
        if self.size == 1:
            return numbers
        numbers = numbers.to(self.device)
        with self._counted("numbers", 8 * numbers.numel()):
            self._all_reduce(numbers)
        return numbers.cpu()

    def exchange(
        self, rows_MX: Tensor, sent: Sequence[int], received: Sequence[int], kind: str
    ) -> Tensor:
        """Sends rows and receives others, both in the order of the ranks. Rows may have any type.

        Args:
            rows_MX: the rows to send; those for rank 0 come first.
            sent: number of rows to each rank.
            received: number of rows from each rank.
            kind: purpose of the exchange, in the record.

        Raises:
            Disconnected: another rank has ended.
        """
        if self.size == 1:
            return rows_MX
        # As bytes, because gloo does not support all types.
        mine = rows_MX.contiguous().view(torch.uint8).to(self.device)
        row_bytes = mine.shape[1]
        theirs = mine.new_empty(sum(received), row_bytes)
        with self._counted(kind, row_bytes * (sum(sent) - sent[self.rank])):
            self._all_to_all(theirs, mine, received, sent)
        return theirs.to(rows_MX.device).view(rows_MX.dtype)

    def total(self, part: Tensor, kind: str) -> Tensor:
        """The sum of tensors of one shape and any one type, on every rank: an all-reduce.

        For each element, one rank adds the values in fp32, in the order of the ranks, and rounds
        once. This moves as many bytes as a ring. The traffic counts two operations of this `kind`.

        Raises:
            Disconnected: another rank has ended.
        """
        size = part.numel()
        mine_X = F.pad(part.reshape(-1), (0, -size % self.size))
        return self.gathered(self.scattered(mine_X, kind), kind)[:size].view(part.shape)

    def gathered(self, rows_nX: Tensor, kind: str) -> Tensor:
        """The rows of all ranks, in the order of ranks, on every rank: an all-gather, [N, X].

        Each rank has the same number of rows, of one type.

        Args:
            rows_nX: the rows of this rank.
            kind: purpose of the exchange, in the record.

        Raises:
            Disconnected: another rank has ended.
        """
        if self.size == 1:
            return rows_nX
        mine_nX = rows_nX.contiguous().to(self.device)
        found_NX = mine_nX.new_empty(self.size * len(mine_nX), *mine_nX.shape[1:])
        with self._counted(kind, mine_nX.nbytes * (self.size - 1)):
            self._all_gather(_as_bytes(found_NX), _as_bytes(mine_nX))
        return found_NX.to(rows_nX.device)

    def scattered(self, rows_NX: Tensor, kind: str) -> Tensor:
        """A reduce-scatter: each rank gets an equal share of the sums of rows over the ranks.

        The share has the shape [n, X]. Rows are added up as in `total`.

        Args:
            rows_NX: the rows of this rank, all of one type. Their number is a multiple of the
                number of ranks.
            kind: purpose of the exchange, in the record.

        Raises:
            Disconnected: another rank has ended.
        """
        if self.size == 1:
            return rows_NX
        assert len(rows_NX) % self.size == 0, rows_NX.shape
        mine_NX = rows_NX.contiguous().to(self.device)
        received_NX = torch.empty_like(mine_NX)
        cut = [mine_NX.nbytes // self.size] * self.size
        with self._counted(kind, cut[0] * (self.size - 1)):
            self._all_to_all(_as_bytes(received_NX), _as_bytes(mine_NX), cut, cut)
        total_X = _in_order(received_NX.view(self.size, -1)).to(rows_NX.dtype)
        return total_X.view(-1, *rows_NX.shape[1:]).to(rows_NX.device)

    def _counted(self, kind: str, num_bytes: int) -> AbstractContextManager[None]:
        """Records an operation and its duration."""
        self.traffic.count(kind, num_bytes)
        return self.traffic.watch.timing(kind, self.device)

    def _part(self, parts: Sets) -> Ranks:
        mine: Ranks | None = None
        for ranks in parts:
            handle = None
            if 1 < len(ranks) < self.size:
                handle = self._group(ranks)
            if self.rank in ranks:
                index = ranks.index(self.rank)
                mine = replace(self, rank=index, size=len(ranks), handle=handle, _parts={})
        assert mine is not None, "every rank is in one of the parts"
        return mine

    # ------------------------------------------------ torch.distributed

    def _group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        wait = datetime.timedelta(seconds=COLLECTIVE_S)
        found: dist.ProcessGroup = _collective(lambda: dist.new_group(list(ranks), timeout=wait))
        return found

    def _all_to_all(
        self, into: Tensor, rows: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        _collective(
            lambda: dist.all_to_all_single(
                into, rows, list(received), list(sent), group=self.handle
            )
        )

    def _all_gather(self, into: Tensor, part: Tensor) -> None:
        _collective(lambda: dist.all_gather_single(into, part, group=self.handle))

    def _all_reduce(self, numbers: Tensor) -> None:
        _collective(lambda: dist.all_reduce(numbers, group=self.handle))


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor as flat bytes, because gloo does not support all types."""
    return tensor.view(-1).view(torch.uint8)


def _in_order(parts_RX: Tensor) -> Tensor:
    """The fp32 sum of the values of R ranks, added in order."""
    total = parts_RX[0].to(torch.float32, copy=True)
    for part in parts_RX[1:]:
        total += part
    return total


def _rounds(shares: Sequence[Sequence[Tensor]], most: int) -> Iterator[Sequence[Sequence[Tensor]]]:
    """The shares of all ranks, in rounds with at most `most` elements of each share."""
    yield from itertools.zip_longest(*(_buckets(each, most) for each in shares), fillvalue=())


def _buckets(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Flat views of all elements, in lists of at most `most` elements."""
    bucket: list[Tensor] = []
    room = most
    for tensor in tensors:
        rest = tensor.view(-1)
        while len(rest):
            bucket.append(rest[:room])
            rest, room = rest[room:], room - len(bucket[-1])
            if not room:
                yield bucket
                bucket, room = [], most
    if bucket:
        yield bucket


def _collective(operation: Callable[[], Any]) -> Any:
    try:
        return operation()
    except (RuntimeError, ValueError) as error:
        if lacks_memory(error):
            raise
        raise Disconnected(str(error).partition("\n")[0]) from error
