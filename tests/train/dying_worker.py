"""Kills a worker in the middle of each of its tasks, once per request file.

`sitecustomize.py` of the test calls `arm` in every worker. A file with the name of a task kills the
first worker that reaches this point, which removes the file first.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from swarm.model.moe import SparseMLP
from swarm.train.engine import optimizer
from swarm.train.engine.ranks import Ranks
from swarm.train.engine.resident import ResidentEngine
from swarm.train.saving.hashed_file import HashedFile

TASKS = {
    "sum of gradients": (Ranks, "_all_gather"),
    "sum of numbers": (Ranks, "_all_reduce"),
    "offer": (ResidentEngine, "read"),
    "private state": (HashedFile, "finish"),
    "adoption": (ResidentEngine, "write"),
    "ownership": (ResidentEngine, "own"),
    "moments": (ResidentEngine, "write_moments"),
    "return": (ResidentEngine, "load_state_dict"),
}
"""Task -> the method before which a worker is killed. The others then wait for it, or are ahead."""
COMPUTING = ("forward", "backward", "update", "validation")
"""Tasks without their own method."""


def arm(folder: Path) -> None:
    """Inserts the points into the classes of a worker."""

    def reached(task: str) -> None:
        try:
            (folder / task).unlink()
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    for task, (owner, name) in TASKS.items():
        setattr(owner, name, _after(reached, task, getattr(owner, name)))
    _arm_computing(reached)


def _after(reached: Callable[[str], None], task: str, method: Callable[..., Any]) -> Any:
    def called(*args: Any, **options: Any) -> Any:
        reached(task)
        return method(*args, **options)

    return called


def _arm_computing(reached: Callable[[str], None]) -> None:
    """After a layer's experts, forward and backward, and between updates of two tensors."""
    forward, update_tensors = SparseMLP.forward, optimizer.update_tensors

    def passing(self: SparseMLP, *args: Any, **options: Any) -> Any:
        out_BTD, routing = forward(self, *args, **options)
        reached("forward" if torch.is_grad_enabled() else "validation")
        if out_BTD.requires_grad:
            out_BTD.register_hook(lambda _: reached("backward"))
        return out_BTD, routing

    def updating(values: Any, gradients: Any, moments: Any, *args: Any) -> None:
        half = len(values) // 2
        update_tensors(values[:half], gradients[:half], moments[:half], *args)
        reached("update")
        update_tensors(values[half:], gradients[half:], moments[half:], *args)

    SparseMLP.forward = passing  # type: ignore[method-assign]
    optimizer.update_tensors = updating
