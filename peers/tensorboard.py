"""`swarm-peer --tensorboard DIR`: what a peer prints, and its losses as TensorBoard reads them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from peers.printed import Printed
from swarm.errors import ConfigError
from swarm.peer.observing import RoundReport
from swarm.train.engine import StepStats
from swarm.train.parallel.figures import folded


def writer_type() -> Any:
    """What writes for TensorBoard.

    Raises:
        ConfigError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter  # an extra: only where it is asked for
    except ImportError as error:
        raise ConfigError(
            "--tensorboard needs tensorboardX", hint="pip install 'moe-swarm[tensorboard]'"
        ) from error
    return SummaryWriter


class Drawn(Printed):
    """Writes scalars: of local steps by the run's step, of rounds by the round's number."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder if it is missing.

        Raises:
            ConfigError: tensorboardX is not installed, or the folder cannot be written.
        """
        kind = writer_type()
        try:
            self._writer = kind(str(folder.expanduser()), flush_secs=10)
        except OSError as error:
            raise ConfigError(f"--tensorboard {folder}: {error.strerror}") from error

    def on_step(self, step: int, stats: StepStats) -> None:
        """Of this peer's own batches."""
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
        """Of each manifest that it applies."""
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
        """Of the rounds that this peer measured."""
        self._write("held_out", round_number, loss=val_loss, bits_per_byte=bits_per_byte)
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()

    def _write(self, group: str, step: int, **scalars: float) -> None:
        for name, value in scalars.items():
            if math.isfinite(value):
                self._writer.add_scalar(f"{group}/{name}", value, step)
