"""swarm-peer with an emulated engine: a local step is a timed wait that moves values a little.

Not for people: `bench_utilisation.py` starts it in place of `peers.peer`. Environment variables set
the duration of a step and the file of the times. Masters, moments, blobs and files are as large as
a real engine's. All but the gradients is the real program.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import swarm.peer.session
from peers.actions.printed import Printed
from peers.peer import main
from swarm.config import RunConfig
from swarm.emulation.controls import INDEX_VARIABLE
from swarm.peer.status.observing import RoundReport
from swarm.train.engine.engine import StepStats
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.resident import ResidentEngine

STEP_VARIABLE = "SWARM_TIMED_STEP_S"
"""Environment variable with the seconds of a local step."""
FOLDER_VARIABLE = "SWARM_TIMED_FOLDER"
"""Environment variable with a folder. In it, each peer writes a file with a line of JSON for each
applied manifest."""


class TimedEngine(ResidentEngine):
    """Keeps all state of a resident engine, but computes no gradients."""

    def __init__(self, run: RunConfig, step_s: float, seed: int) -> None:
        """Begins without owned experts.

        Args:
            run: run of the model.
            step_s: duration of a step.
            seed: seed of the moves, which differ between peers like gradients.
        """
        super().__init__(run)
        self._step_s, self._turns, self._turn = step_s, run.round.local_steps, 0
        self._moving_s = 0.0
        """Seconds of the last move."""
        self._draw = torch.Generator().manual_seed(seed)
        self._moves_x = torch.empty(0)

    @property
    def levels(self) -> tuple[EngineOptions, ...]:
        """The only level."""
        return (EngineOptions.of(self._run, device="cpu"),)

    def describe(self) -> str:
        """The engine in words."""
        return f"emulated, a step is {self._step_s:.3g} s"

    @torch.no_grad()
    def step(self, tokens_BT1: Tensor, *, lr: float, **_: Any) -> StepStats:
        """Moves a share of the elements by about `lr`, so that a round moves each element once.

        Since only a share moves, the processor, which all peers of this machine share, is nearly
        idle.
        """
        began_s = time.monotonic()
        time.sleep(max(0.0, self._step_s - self._moving_s))
        self._wait()
        moved_s = time.monotonic()
        for parameter in self._optimizer.parameters:
            values_x = parameter.detach().view(-1)
            each = -(-len(values_x) // self._turns)
            moved_x = values_x[self._turn * each : (self._turn + 1) * each]
            moved_x.add_(self._some_moves(len(moved_x)), alpha=lr)
        self._turn = (self._turn + 1) % self._turns
        self._optimizer.count_from(self._optimizer.updates + 1)
        self._moving_s = time.monotonic() - moved_s
        time.sleep(max(0.0, began_s + self._step_s - time.monotonic()))
        return self._stats(tokens_BT1)

    def _some_moves(self, count: int) -> Tensor:
        if count > len(self._moves_x):
            self._moves_x = torch.randn(count, generator=self._draw)
        return self._moves_x[:count]

    def _stats(self, tokens_BT1: Tensor) -> StepStats:
        model, tokens = self._run.model, tokens_BT1.shape[0] * (tokens_BT1.shape[1] - 1)
        even = (tokens,) * model.num_experts
        return StepStats(
            loss=1.0, cross_entropy=1.0, balance=1.0, router_z=0.0, output_z=0.0, grad_norm=1.0,
            tokens=tokens, expert_tokens=(even,) * model.num_hidden_layers, skipped=False,
        )  # fmt: skip

    def rehearse(self, tokens_BT1: Tensor) -> None:
        """Does nothing."""

    def evaluate(self, *_: Any, **__: Any) -> float:
        """A meaningless loss."""
        return 1.0


class Timed(Printed):
    """Records the times of applied manifests, and this peer's work in between."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps, self._private_s = 0, 0.0
        self._saving_s: float | None = None

    def on_step(self, step: int, stats: StepStats) -> None:  # noqa: ARG002 - an observer's
        """Counts the step."""
        self._steps += 1

    def on_saving(self) -> None:
        """Notes that the offered values are stored. Only the disk now delays the offer."""
        self._saving_s = time.monotonic()

    def before_offer(self) -> None:
        """Notes that the private state is durable, if that is required."""
        if self._saving_s is not None:
            self._private_s += time.monotonic() - self._saving_s
            self._saving_s = None

    def on_round(self, report: RoundReport) -> None:
        """Records the manifest's time by the machine's clock, which all processes share."""
        line = {
            "round": report.manifest.round,
            "kind": report.manifest.kind.value,
            "at_s": time.monotonic(),
            "steps": self._steps,
            "private_s": self._private_s,
            "cpu_s": time.process_time(),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._steps, self._private_s = 0, 0.0


def run_timed() -> None:
    """Runs swarm-peer with this engine and observer."""
    index, step_s = int(os.environ[INDEX_VARIABLE]), float(os.environ[STEP_VARIABLE])

    def timed_engine(run: RunConfig, *_of_this_machine: object) -> TimedEngine:
        return TimedEngine(run, step_s, seed=index)

    module: Any = swarm.peer.session
    module.engine_for = timed_engine
    main(obj=Timed(Path(os.environ[FOLDER_VARIABLE]) / f"peer-{index}.jsonl"))


if __name__ == "__main__":
    run_timed()
