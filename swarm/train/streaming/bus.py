"""Copies between host and device that overlap the computation, and waits for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mark:
    """A point in the work given to a device; on a CPU it is always reached already."""

    event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Blocks this thread until the point is reached."""
        if self.event is not None:
            self.event.synchronize()


class Bus:
    """Two lanes of copies, in and out, on streams of their own.

    Attributes:
        device: the one that computes.
        bytes_in: copied to the device so far.
        bytes_out: copied from it so far.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        # Threads have no current device of their own: that of a process may not be the first GPU.
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else device
        self.bytes_in = self.bytes_out = 0
        self._in = torch.cuda.Stream(device) if cuda else None
        self._out = torch.cuda.Stream(device) if cuda else None

    def enter(self) -> None:
        """Makes the device the current one of the calling thread, for all that it does.

        A thread begins with the first GPU. To wait for an event, or to leave the stream of a copy,
        would make a context there, some 0.5 GB of a GPU that another rank computes on.
        """
        if self._in is not None:
            torch.cuda.set_device(self.device)

    def mark(self) -> Mark:
        """A mark behind all that the device has been given to compute so far."""
        if self._in is None:
            return Mark()
        return Mark(torch.cuda.current_stream(self.device).record_event())

    def wait(self, mark: Mark) -> None:
        """Lets all later computation wait for a mark."""
        if mark.event is not None:
            torch.cuda.current_stream(self.device).wait_event(mark.event)

    def fetch(self, target: Tensor, source: Tensor, *after: Mark) -> Mark:
        """Copies to the device, once all of `after` are reached; returns when it will have been."""
        self.bytes_in += source.nbytes
        return self._copy(self._in, target, source, after)

    def send(self, target: Tensor, source: Tensor, *after: Mark) -> Mark:
        """Copies from the device likewise."""
        self.bytes_out += source.nbytes
        return self._copy(self._out, target, source, after)

    def settle(self) -> None:
        """Blocks this thread until nothing is under way, so that memory can be given back."""
        if self._in is not None:
            torch.cuda.synchronize(self.device)

    def keep(self, tensor: Tensor) -> None:
        """Says that a lane still uses a tensor of the device that is about to be dropped."""
        for lane in (self._in, self._out):
            if lane is not None:
                tensor.record_stream(lane)

    def _copy(
        self,
        lane: torch.cuda.Stream | None,
        target: Tensor,
        source: Tensor,
        after: tuple[Mark, ...],
    ) -> Mark:
        if lane is None:
            target.copy_(source)
            return Mark()
        for mark in after:
            if mark.event is not None:
                lane.wait_event(mark.event)
        with torch.cuda.stream(lane):
            target.copy_(source, non_blocking=True)
        # Threads of the host wait for it: asleep, not spinning on a core that updates could use.
        event = torch.cuda.Event(blocking=True)
        event.record(lane)
        return Mark(event)
