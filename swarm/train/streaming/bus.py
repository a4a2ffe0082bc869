"""Copies between host and device that overlap the computation, and waits for such copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mark:
    """A point in a device's queue of work; on a CPU every point is reached at once."""

    event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Blocks this thread until the point is reached."""
        if self.event is not None:
            self.event.synchronize()


class Bus:
    """Copies to and from a device, on one CUDA stream for each direction.

    Attributes:
        device: the device that computes.
        bytes_in: bytes copied to the device so far.
        bytes_out: bytes copied from it so far.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        # A new thread's current device is the first GPU, which may not be that of this process.
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else device
        self.bytes_in = self.bytes_out = 0
        self._in = torch.cuda.Stream(device) if cuda else None
        self._out = torch.cuda.Stream(device) if cuda else None

    def enter(self) -> None:
        """Makes the device the calling thread's current one.

        A new thread's current device is the first GPU. To wait for an event, or to leave the stream
        of a copy, would make a context there, which takes 0.5 GB of a GPU on which another rank
        computes.
        """
        if self._in is not None:
            torch.cuda.set_device(self.device)

    def mark(self) -> Mark:
        """A mark after all computation given to the device so far."""
        if self._in is None:
            return Mark()
        return Mark(torch.cuda.current_stream(self.device).record_event())

    def wait(self, mark: Mark) -> None:
        """Makes all later computation wait for a mark."""
        if mark.event is not None:
            torch.cuda.current_stream(self.device).wait_event(mark.event)

    def fetch(self, target: Tensor, source: Tensor, *after: Mark) -> Mark:
        """Copies to the device once all of `after` are reached; returns a mark after the copy."""
        self.bytes_in += source.nbytes
        return self._copy(self._in, target, source, after)

    def send(self, target: Tensor, source: Tensor, *after: Mark) -> Mark:
        """Copies from the device; otherwise like `fetch`."""
        self.bytes_out += source.nbytes
        return self._copy(self._out, target, source, after)

    def settle(self) -> None:
        """Blocks this thread until the device is idle, so that memory can be freed."""
        if self._in is not None:
            torch.cuda.synchronize(self.device)

    def keep(self, tensor: Tensor) -> None:
        """Keeps a tensor's memory until running copies have ended, even if the caller drops it."""
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
        # Waiting threads sleep (`blocking`), since spinning would take a core from updates.
        event = torch.cuda.Event(blocking=True)
        event.record(lane)
        return Mark(event)
