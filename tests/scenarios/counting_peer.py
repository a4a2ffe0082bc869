"""swarm-peer whose local steps move each element equally in every step, at every peer.

So the agreed values show the counted work of rounds: `moves_of` times a number of steps. Each peer
writes the work of its adopted rounds as JSON into a folder that an environment variable names. At
an orderly end it also writes its live shared tensors.
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
"""Multiples of MOVE, by the place of an element. Their number is prime, so that blocks of 256
differ."""


def moves_of(count: int) -> Tensor:
    """The changes of a tensor's elements in a step."""
    shares = torch.tensor(SHARES).repeat(math.ceil(count / len(SHARES)))[:count]
    return MOVE * shares


class CountingEngine(TimedEngine):
    """Keeps all state of a resident engine, and moves all trained elements."""

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
        """Writes the live values."""
        save_file(self.read(shared_shapes(self._run.model)), told_by("safetensors"))
        super().close()


class Counting(Printed):
    """Writes the counted work of each round."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_round(self, report: RoundReport) -> None:
        """Tokens by contributor. A merge repeats its parent's, and a reform has none."""
        tip = report.manifest
        if tip.kind is Kind.QUORUM:
            with self._path.open("a") as file:
                file.write(json.dumps({"round": tip.round, "work": dict(tip.work)}) + "\n")


def told_by(kind: str) -> Path:
    """The file of this peer."""
    return Path(os.environ[FOLDER_VARIABLE]) / f"{os.environ[INDEX_VARIABLE]}.{kind}"


def run_counting() -> None:
    """Runs swarm-peer with this engine."""

    def engine(run: RunConfig, *_of_this_machine: object) -> CountingEngine:
        return CountingEngine(run, STEP_S, seed=0)

    swarm.peer.session.engine_for = engine
    main(obj=Counting(told_by("jsonl")))


if __name__ == "__main__":
    run_counting()
