"""What tensors take of a process: blocks that go back to the system, and counts of those alive."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

LARGE_BYTES = 4 * 2**20
"""A chunk of values in fp32 has as many: each thread would keep some in a heap of its own."""
TRIM_BYTES = 16 * 2**20
_SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": (-1, TRIM_BYTES),
    "MALLOC_MMAP_THRESHOLD_": (-3, LARGE_BYTES),
}
"""Of mallopt(3), by the variables of the environment that set the same."""


def return_large_blocks() -> None:
    """Has freed blocks of `LARGE_BYTES` and more go back to the system at once.

    glibc raises that bound up to 32 MiB as blocks are freed. Tensors below it leave holes then: a
    model of 83 M parameters took 1.3 to 1.5 times its plan. A step pays for fresh pages, which
    larger tensors do anyway. Other C libraries, and a bound from the environment, stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for variable, (parameter, value) in _SETTINGS.items():
        if mallopt is not None and variable not in os.environ:
            mallopt(parameter, value)


class LiveBytes(TorchDispatchMode):
    """While it is entered, counts storages that operations of this thread make, and their peak.

    Source: the idea of torch.distributed._tools.mem_tracker. The memory within a
    single operation is not seen, nor that of other threads: the pieces that the host updates, some
    8 MB.

    Attributes:
        now: bytes alive.
        peak: the most since it was entered or since `reset`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.now = self.peak = 0

    def reset(self) -> None:
        """Starts to look for the peak anew."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation and counts the tensors that it returns."""
        out = func(*args, **(kwargs or {}))
        for each in tree_iter(out):
            if isinstance(each, Tensor):
                self._count(each)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if num_bytes == 0 or tensor.is_meta or key in self._alive:
            return
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        self._alive[key] = weakref.ref(storage, lambda _: self._gone(key, num_bytes))

    def _gone(self, key: int, num_bytes: int) -> None:
        del self._alive[key]
        self.now -= num_bytes
