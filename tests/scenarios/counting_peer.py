"""swarm-peer whose local steps move each element by as much in every step, at every peer.

So what rounds have taken in can be read off the agreed values: `moves_of` times a number of steps.
Into the folder that its environment names each peer writes the work of the rounds that it adopts,
as JSON, and its live shared tensors when it ends in order.
"""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "benchmarks"))

from timed_peer import TimedEngine

import swarm.peer.session
from peers.actions.printed import Printed
from peers.peer import main
from swarm.config import RunConfig
from swarm.emulation.controls import INDEX_VARIABLE
from swarm.experts import shared_shapes
from swarm.peer.status.observing import RoundReport
from swarm.protocol.values.manifest import Kind
from swarm.train.engine.engine import StepStats

FOLDER_VARIABLE = "SWARM_COUNTING_FOLDER"
STEP_S, MOVE = 0.05, 1e-4
SHARES = (0.5, 1.5, 0.75, 1.25, -0.5, 1.0, -1.0)
"""Of MOVE, by the place of an element; a prime number of them, so that blocks of 256 differ."""


def moves_of(count: int) -> Tensor:
    """By how much a step moves the elements of a tensor with so many."""
    shares = torch.tensor(SHARES).repeat(math.ceil(count / len(SHARES)))[:count]
    return MOVE * shares


class CountingEngine(TimedEngine):
    """Keeps everything that a resident engine keeps, and moves all that it trains."""

    @torch.no_grad()
    def step(self, tokens_BT1: Tensor, *, lr: float, **_: Any) -> StepStats:
        """Every step moves the same."""
        time.sleep(STEP_S)
        self._wait()
        for parameter in self._optimizer.parameters:
            parameter.detach().view(-1).add_(moves_of(parameter.numel()))
        self._optimizer.count_from(self._optimizer.updates + 1)
        return self._stats(tokens_BT1)

    def close(self) -> None:
        """What is live, is left behind."""
        save_file(self.read(shared_shapes(self._run.model)), told_by("safetensors"))
        super().close()


class Counting(Printed):
    """Writes down what each round counted."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_round(self, report: RoundReport) -> None:
        """Tokens by contributor; a merge repeats its parent's, and a reform has none."""
        tip = report.manifest
        if tip.kind is Kind.QUORUM:
            with self._path.open("a") as file:
                file.write(json.dumps({"round": tip.round, "work": dict(tip.work)}) + "\n")


def told_by(kind: str) -> Path:
    """The file of this peer."""
    return Path(os.environ[FOLDER_VARIABLE]) / f"{os.environ[INDEX_VARIABLE]}.{kind}"


def run_counting() -> None:
    """Runs swarm-peer so."""

    def engine(run: RunConfig, *_of_this_machine: object) -> CountingEngine:
        return CountingEngine(run, STEP_S, seed=0)

    swarm.peer.session.engine_for = engine
    main(obj=Counting(told_by("jsonl")))


if __name__ == "__main__":
    run_counting()
