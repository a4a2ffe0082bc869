"""`swarm-peer --tensorboard DIR`: an observer that prints, and writes losses for TensorBoard."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import queue
import time
from pathlib import Path
from typing import Any

from peers.actions.printed import Printed
from swarm.background import SupervisedThread
from swarm.errors import ConfigError
from swarm.peer.status.observing import RoundReport
from swarm.train.engine.engine import StepStats
from swarm.train.engine.rank_figures import folded

logger = logging.getLogger(__name__)

MAX_QUEUED = 256
"""Limit of queued scalars. A step has six scalars."""
FLUSH_S = 10.0
THINNED_AFTER = 100_000
"""Number of drawn steps after which only every second step is drawn, and after the same number
again every fourth. So weeks of steps take some hundred MB. TensorBoard itself shows 1,000 points of
a curve."""
CLOSE_S = 5.0
"""Limit for writing the remaining scalars when the program ends."""


def writer_type() -> Any:
    """The class that writes records of TensorBoard to one file, in the thread that calls it.

    Raises:
        ConfigError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import event_file_writer  # an extra: only where it is asked for
    except ImportError as error:
        raise ConfigError(
            "--tensorboard needs tensorboardX", hint="pip install 'moe-swarm[tensorboard]'"
        ) from error
    return event_file_writer.EventsWriter


class EventFile:
    """A new file of scalars in a folder. A missing folder is made."""

    def __init__(self, folder: Path) -> None:
        """Opens the file.

        Raises:
            ConfigError: tensorboardX is not installed.
            OSError: the folder cannot be written.
        """
        kind = writer_type()
        from tensorboardX.proto import event_pb2  # as above: an extra, only where it is asked for

        folder.mkdir(parents=True, exist_ok=True)
        self._events, self._writer = event_pb2, kind(str(folder / "events"))

    def write(self, name: str, value: float, step: int) -> None:
        """Adds a scalar. Raises an `OSError` now or at the next flush."""
        event = self._events.Event(wall_time=time.time(), step=step)
        event.summary.value.add(tag=name, simple_value=value)
        self._writer.write_event(event)

    def flush(self) -> None:
        """Writes all scalars to the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Writes all scalars to the disk and closes the file."""
        self._writer.close()


class Drawn(Printed):
    """Writes scalars of local steps by the run's step, and of rounds by the round's number.

    A separate thread writes them, so that training never waits for the disk. Scalars that a slow
    disk cannot take in time are left out. After an error, nothing is drawn.
    """

    def __init__(self, folder: Path) -> None:
        """Makes the folder if it is missing.

        Raises:
            ConfigError: tensorboardX is not installed, or the folder cannot be written.
        """
        self._folder, self._queue = folder, queue.Queue[tuple[str, float, int] | None](MAX_QUEUED)
        self._leaves_out = False
        self._steps = self._drawn_steps = 0
        try:
            self._file = EventFile(folder.expanduser())
        except OSError as error:
            raise ConfigError(f"--tensorboard {folder}: {error.strerror}") from error
        self._thread = SupervisedThread("tensorboard", self._drain)
        self._thread.start()
        atexit.register(self.close)

    def on_step(self, step: int, stats: StepStats) -> None:
        """Draws the figures of this peer's own batch, unless this step is thinned out."""
        self._steps += 1
        if self._steps % 2 ** (self._drawn_steps // THINNED_AFTER):
            return
        self._drawn_steps += 1
        self._write(
            "step",
            step,
            cross_entropy=stats.cross_entropy,
            loss=stats.loss,
            balance=stats.balance,
            grad_norm=stats.grad_norm,
            skipped=float(stats.skipped),
            masked=float(stats.masked),
        )
        if workers := folded(stats.workers):
            bubble = {} if workers.bubble is None else {"bubble": workers.bubble}
            between = sum(workers.shares.values())
            self._write("workers", step, step_s=workers.step_s, between=between, **bubble)

    def on_round(self, report: RoundReport) -> None:
        """Draws the figures of a manifest that this peer applied."""
        stats = report.stats
        self._write(
            "round",
            report.manifest.round,
            counted=float(report.counted),
            contributors=float(len(report.manifest.contributors)),
            wait_s=report.wait_s,
            training_s=stats.seconds if stats else 0.0,
            tokens=float(report.manifest.tokens),
        )

    def on_validation(self, round_number: int, val_loss: float, bits_per_byte: float) -> None:
        """Draws the held-out loss of a round that this peer measured."""
        self._write("held_out", round_number, loss=val_loss, bits_per_byte=bits_per_byte)

    def close(self) -> None:
        """Writes the remaining scalars, if the disk takes them within `CLOSE_S`."""
        atexit.unregister(self.close)
        if self._thread.is_alive:
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=CLOSE_S)
            self._thread.stop(CLOSE_S)

    def _write(self, group: str, step: int, **scalars: float) -> None:
        for name, value in scalars.items():
            if math.isfinite(value):
                try:
                    self._queue.put_nowait((f"{group}/{name}", value, step))
                except queue.Full:
                    self._leave_out()

    def _leave_out(self) -> None:
        if not self._leaves_out:
            self._leaves_out = True
            logger.warning(
                "--tensorboard %s: its disk is too slow; some figures are left out", self._folder
            )

    def _drain(self) -> None:
        try:
            self._write_queued()
            self._file.close()
        except OSError as error:
            self._leaves_out = True
            logger.warning(
                "--tensorboard %s: %s; nothing more is drawn until the next start",
                self._folder,
                error.strerror,
            )

    def _write_queued(self) -> None:
        """Writes until the thread is asked to stop. Flushes at most every `FLUSH_S`."""
        flushed_s, is_flushed = time.monotonic(), True
        while True:
            is_ending = self._thread.stopping.is_set()
            try:
                scalar = self._queue.get(timeout=0.0 if is_ending else FLUSH_S)
            except queue.Empty:
                if is_ending:
                    return
            else:
                if scalar is None:
                    return
                self._file.write(*scalar)
                is_flushed = False
            if not is_flushed and time.monotonic() - flushed_s >= FLUSH_S:
                self._file.flush()
                flushed_s, is_flushed = time.monotonic(), True
