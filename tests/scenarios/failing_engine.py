"""swarm-peer whose engine fails at a given step: `--fail memory@STEP` or `--fail update@STEP`.

memory: the device runs out of memory in the forward pass, once. update: a thread that updates
masters raises. Steps count from the start of the process.
"""

import sys
from typing import Any

import torch

from peers.peer import main
from swarm.model.transformer import Transformer
from swarm.train.streaming.host_model import HostUnit
from swarm.train.streaming.streaming_engine import StreamingEngine


def arm(kind: str, at_step: int) -> None:
    """Inserts the failure."""
    losses, step, update_piece = Transformer.losses, StreamingEngine.step, HostUnit.update_piece
    seen = [0]

    def losing(self: Transformer, *args: Any, **options: Any) -> Any:
        seen[0] += self.training and torch.is_grad_enabled()
        if kind == "memory" and seen[0] == at_step:
            seen[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return losses(self, *args, **options)

    def stepping(self: StreamingEngine, *args: Any, **options: Any) -> Any:
        seen[0] += 1
        return step(self, *args, **options)

    def updating(self: HostUnit, *args: Any) -> None:
        if kind == "update" and seen[0] >= at_step:
            raise ArithmeticError("an update thread fails")
        update_piece(self, *args)

    Transformer.losses = losing  # type: ignore[method-assign]
    StreamingEngine.step = stepping  # type: ignore[method-assign]
    HostUnit.update_piece = updating  # type: ignore[method-assign]


if __name__ == "__main__":
    if "--fail" in sys.argv:
        position = sys.argv.index("--fail")
        kind, _, at_step = sys.argv[position + 1].partition("@")
        arm(kind, int(at_step))
        del sys.argv[position : position + 2]
    main()
