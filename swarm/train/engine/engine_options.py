"""Options of an engine on one machine; other peers do not see them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Literal

from swarm.config import RunConfig
from swarm.model.frozen import FrozenFormat
from swarm.model.transformer import ComputeType, Recompute
from swarm.train.engine.optimizer_moments import MomentsFormat

ScheduleName = Literal["1f1b", "gpipe", "interleaved"]
"""1f1b: backward of a micro-batch begins as soon as possible. gpipe: all forward, then all
backward. interleaved: like 1f1b, but each rank has several chunks of layers.
"""


PASS_TOKENS = 32_768
"""The most tokens that pass through the layers of a streaming engine together, unless an option
sets the number. Computing this number of tokens takes long enough to hide the copies."""


class EngineKind(Enum):
    """Which engine holds the model."""

    RESIDENT = "resident"  # everything on one device
    STREAMING = "streaming"  # masters and moments in host memory, weights copied when needed


class ActivationCheckpoints(Enum):
    """Where the streaming engine keeps the input of every layer until backward."""

    DEVICE = "device"  # on the device, fp32
    HOST = "host"  # in host memory, fp32
    HOST_BF16 = "host_bf16"  # in host memory at half the size. Backward starts from rounded values


@dataclass(frozen=True)
class EngineOptions:
    """Options that a person or the planner chooses for this machine.

    Attributes:
        device: "cpu" or "cuda".
        compute: type of all matrix products.
        frozen: storage of the experts that this peer does not own.
        moments: storage of the optimizer's moments.
        ep: workers over which the resident engine's experts are distributed (expert parallel). With
            1 each worker holds all experts.
        tp: workers over which attention is cut by heads: 1 or `ep`. These workers share
            micro-batches, and everything but attention and experts is cut over them by tokens.
        pp: workers over which the resident engine's layers are cut, as stages of a pipeline.
        shards: number of ranks of a stage over which masters and moments of their common tensors
            are cut. With 1 each rank holds all of them. A tensor that fewer ranks have in common is
            cut over these.
        schedule: schedule of a pipeline. gpipe takes as long as 1f1b, which keeps fewer
            micro-batches for backward. interleaved waits less and keeps more.
        chunks: runs of layers of each rank of a pipeline. More than one only with "interleaved".
        recompute: layers that backward computes again. The streaming engine always recomputes
            layers, and keeps their routing.
        kind: which engine.
        resident_layers: number of first layers whose weights the streaming engine keeps on the
            device. It streams the others through two places. None keeps all.
        activation_checkpoints: where the streaming engine keeps the inputs of layers.
        frozen_folder: where the streaming engine memory-maps its frozen experts. None holds them in
            memory.
        frozen_lent: whether the frozen experts are already on disk, as agreed values, and are lent
            to the engine.
        pass_micro_batches: number of micro-batches that the streaming engine takes through all
            layers together. It adds up the gradients of several such passes on the host. 0 takes
            all.
        gradient_buffers: number of layers whose gradients host memory holds at a time. A number
            above 0 needs clipping by unit. With 0, host memory holds the gradients of all layers.
        host_threads: threads that update host memory.
    """

    device: str = "cpu"
    compute: ComputeType = "fp32"
    frozen: FrozenFormat = "bf16"
    moments: MomentsFormat = "fp32"
    recompute: Recompute = "none"
    ep: int = 1
    tp: int = 1
    pp: int = 1
    shards: int = 1
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    kind: EngineKind = EngineKind.RESIDENT
    resident_layers: int | None = 0
    activation_checkpoints: ActivationCheckpoints = ActivationCheckpoints.DEVICE
    frozen_folder: Path | None = None
    frozen_lent: bool = False
    pass_micro_batches: int = 0
    gradient_buffers: int = 0
    host_threads: int = 1

    @classmethod
    def of(cls, run: RunConfig, *, device: str = "cpu") -> EngineOptions:
        """The run's settings, everything else at its default."""
        return cls(device=device, compute=run.train.compute, frozen=run.train.frozen)

    @property
    def alike(self) -> tuple[int, int]:
        """Numbers of ranks over which the state of a shared tensor, and of an expert, is cut."""
        return self.shards, max(1, self.shards // self.ep)

    def together(self, run: RunConfig, workers: int) -> int:
        """Micro-batches of one worker that go through all layers together in a step, at most."""
        tokens = run.train.micro_batch_sequences * run.data.sequence_length
        batches = -(-max(1, run.train.batch_tokens // tokens) // workers)
        return min(batches, self.pass_micro_batches or batches)

    def evaluated_together(self, run: RunConfig, workers: int) -> int:
        """Like `together`, for a held-out loss."""
        tokens = run.train.micro_batch_sequences * run.data.sequence_length
        return min(self.together(run, workers), max(1, PASS_TOKENS // tokens))

    def is_read_beside(self, run: RunConfig) -> bool:
        """Whether an engine can be read while it steps; see `Engine.before_update`.

        State that is cut over ranks cannot: reading it needs operations between ranks, as steps do.
        """
        if self.shards > 1 or self.tp > 1:
            return False
        return self.kind is EngineKind.RESIDENT or run.optimizer.clip == "global"

    def but(
        self,
        *,
        compute: Literal["run"] | ComputeType = "run",
        frozen: Literal["run"] | FrozenFormat = "run",
        moments: MomentsFormat = "fp32",
    ) -> EngineOptions:
        """The same options with the precision of this machine; "run" keeps the run's."""
        return replace(
            self,
            compute=self.compute if compute == "run" else compute,
            frozen=self.frozen if frozen == "run" else frozen,
            moments=moments,
        )
