"""Memory of tensors: what was freed goes back to the system, living bytes are counted."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def return_free_memory() -> None:
    """Gives memory that was freed back to the system, also from the middle of the heap.

    glibc keeps freed blocks below 32 MiB. What one phase of a round has freed would be there in
    the next one's peak: a model of 83 M parameters took 1.3 to 1.5 times its plan. To have each
    block go back as it is freed (M_MMAP_THRESHOLD) costs a quarter to a third of a step's time on
    a CPU. Other C libraries are left alone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
