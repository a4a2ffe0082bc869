"""An engine that continues with a level of less memory when memory runs out."""

# `Engine` documents the methods.
# ruff: noqa: D102

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.data.masks import Masks
from swarm.errors import OutOfMemory, lacks_memory
from swarm.experts import Slice, expert_shapes
from swarm.model.routing import RoutingControls
from swarm.train.engine.engine import Engine, EngineState, StandIn, StepStats
from swarm.train.engine.engine_options import EngineKind, EngineOptions
from swarm.train.engine.resident import ResidentEngine
from swarm.train.engine.tensor_file import TensorFile
from swarm.train.planning.ladder import describe
from swarm.train.streaming.streaming_engine import StreamingEngine

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Fits = Callable[[EngineOptions, int], bool]
"""Whether an engine with this number of owned experts is predicted to fit."""


def make_engine(run: RunConfig, options: EngineOptions) -> Engine:
    """The engine of these options. It owns no experts, and its tensors are uninitialized."""
    if options.kind is EngineKind.STREAMING:
        return StreamingEngine(run, options)
    return ResidentEngine(run, options)


def next_below(
    now: EngineOptions, below: list[EngineOptions], run: RunConfig, found: str
) -> EngineOptions:
    """Takes the next level from those that need less memory, and logs the change.

    Args:
        now: the level that did not fit.
        below: the levels that are left, the fastest first. The first one is removed.
        run: the model.
        found: the text of the memory error.

    Raises:
        OutOfMemory: no level is left.
    """
    if not below:
        raise OutOfMemory(
            f"no engine below {describe(now, run)} is left: {found}",
            hint="own fewer experts (--capacity), or see what fits with swarm-plan",
        )
    logger.warning(
        "out of memory with %s; stepping down to %s (%s)",
        describe(now, run), describe(below[0], run), found,
    )  # fmt: skip
    return below.pop(0)


class SteppingEngine:
    """An `Engine` that replaces its inner engine by the next lower level when memory runs out.

    The failed call is then repeated. A step that did not fit has changed nothing, so the next
    engine makes the step from the same values. The state moves to the next engine through a file,
    and masters lose no bit. Moments are rounded if the next engine has a smaller format.
    """

    def __init__(
        self,
        run: RunConfig,
        options: EngineOptions,
        below: Sequence[EngineOptions] = (),
        folder: Path | None = None,
        fits: Fits = lambda *_: True,
    ) -> None:
        """Makes the first engine.

        Args:
            run: the model.
            options: options of the first engine.
            below: options of the engines that may follow, in order.
            folder: a folder on a disk with room for a state that moves to the next engine. None for
                the system's folder for temporary files.
            fits: predicts whether an engine fits. Called before more experts are owned.

        Raises:
            OutOfMemory: not even the last engine fits.
        """
        self._run, self._below, self._folder = run, list(below), folder
        self.options, self._fits = options, fits
        self._wait: Callable[[], None] = lambda: None
        self._engine: Engine | None = None
        while self._engine is None:
            try:
                self._engine = make_engine(run, self.options)
            except (MemoryError, RuntimeError) as error:
                self.options = next_below(
                    self.options, self._below, self._run, _memory_error(error)
                )

    def describe(self) -> str:
        """The engine in words."""
        return describe(self.options, self._run)

    @property
    def levels(self) -> tuple[EngineOptions, ...]:
        """The present level, and the remaining levels below."""
        return (self.options, *self._below)

    # ------------------------------------------------ as `Engine`

    @property
    def owned(self) -> tuple[int, ...]:
        return self._now.owned

    @property
    def skipped(self) -> int:
        return self._now.skipped

    @property
    def intact(self) -> bool:
        return self._now.intact

    def own(self, experts: Sequence[int]) -> None:
        self._make_room(len(set(experts)))
        self._ask(lambda engine: engine.own(experts))

    def count_from(self, updates: int) -> None:
        self._now.count_from(updates)

    def before_update(self, wait: Callable[[], None]) -> bool:
        self._wait = wait
        return self._ask(lambda engine: engine.before_update(wait))

    def step(
        self,
        tokens_BT1: Tensor,
        *,
        lr: float,
        controls: RoutingControls | None = None,
        masks: Masks | None = None,
    ) -> StepStats:
        return self._ask(
            lambda engine: engine.step(tokens_BT1, lr=lr, controls=controls, masks=masks)
        )

    def rehearse(self, tokens_BT1: Tensor) -> None:
        self._ask(lambda engine: engine.rehearse(tokens_BT1))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        wanted = list(names)
        return self._ask(lambda engine: engine.read(wanted))

    def write(self, named: Mapping[str, Tensor]) -> None:
        self._now.write(named)

    def read_part(self, part: Slice) -> Tensor:
        return self._ask(lambda engine: engine.read_part(part))

    def write_part(self, part: Slice, values: Tensor) -> None:
        self._now.write_part(part, values)

    @property
    def borrows(self) -> bool:
        return self._now.borrows

    def lend(self, named: Mapping[str, Tensor]) -> None:
        """See `Engine`. After a step down, the tensors are copies until the next call."""
        self._now.lend(named)

    def read_moments(self, names: Collection[str]) -> dict[str, Tensor]:
        return self._ask(lambda engine: engine.read_moments(names))

    def write_moments(self, moments: Mapping[str, Tensor]) -> None:
        self._ask(lambda engine: engine.write_moments(moments))

    def evaluate(
        self,
        tokens_BT1: Tensor,
        *,
        scored_BT: Tensor | None = None,
        agreed: StandIn | None = None,
    ) -> float:
        return self._ask(
            lambda engine: engine.evaluate(tokens_BT1, scored_BT=scored_BT, agreed=agreed)
        )

    def state_dict(self) -> EngineState:
        return self._now.state_dict()

    def load_state_dict(self, state: EngineState) -> None:
        self._make_room(len(state.owned))
        self._ask(lambda engine: engine.load_state_dict(state))

    def close(self) -> None:
        """See `Engine`. May also be called after no level was left."""
        if self._engine is not None:
            self._engine.close()

    # ------------------------------------------------ the way down

    @property
    def _now(self) -> Engine:
        assert self._engine is not None
        return self._engine

    def _make_room(self, num_owned: int) -> None:
        """Steps down before experts move, if the new number is predicted not to fit."""
        if num_owned <= len(self.owned) or not self._below or self._fits(self.options, num_owned):
            return
        while len(self._below) > 1 and not self._fits(self._below[0], num_owned):
            self._below.pop(0)
        self._step_down(f"{num_owned} owned experts are predicted to need more")

    def _ask(self, question: Callable[[Engine], Answer]) -> Answer:
        while True:
            try:
                return question(self._now)
            except (MemoryError, RuntimeError) as error:
                found = _memory_error(error)
                # The frames of the error hold tensors of the engine that will be freed.
                error.__traceback__ = None
            self._step_down(found)

    def _step_down(self, found: str) -> None:
        self._wait()  # until no thread reads the old engine
        if not self._now.intact:
            raise OutOfMemory(
                f"memory ran out in the middle of an update or of a change of experts: {found}",
                hint="start again: the state directory is good; --engine streaming needs less",
            )
        state, frozen = self._carry()
        self._now.close()
        self._engine = None
        while self._engine is None:
            self.options = next_below(self.options, self._below, self._run, found)
            gc.collect()
            if self.options.device == "cuda":
                torch.cuda.empty_cache()
            try:
                self._engine = self._made_from(state, frozen)
            except (MemoryError, RuntimeError) as error:
                found = _memory_error(error)

    def _made_from(self, state: EngineState, frozen: Mapping[str, Tensor]) -> Engine:
        engine = make_engine(self._run, self.options)
        try:
            engine.load_state_dict(state)
            for name in frozen:
                engine.write({name: frozen[name]})
        except BaseException:
            engine.close()
            raise
        return engine

    def _carry(self) -> tuple[EngineState, TensorFile]:
        """Writes the state of the old engine to files, a tensor at a time.

        So memory never holds the states of two engines. The peak is the larger engine plus one
        tensor, in fp32 and in its stored form.

        Returns:
            The state and the frozen tensors. Each tensor is read from a file when it is looked up.

        Raises:
            StateError: the disk has no room for the state. The engine is unchanged.
        """
        engine, options = self._now, self.options
        state, trained = engine.state_dict(), TensorFile.temporary(self._folder)
        for name, tensor in state.tensors.items():
            trained.append(name, tensor)
        # Stored values: bf16 values stay exact in bf16, and int8 values give the same codes again.
        dtype = torch.bfloat16 if options.frozen == "bf16" else torch.float32
        frozen = TensorFile.temporary(self._folder)
        for expert in range(self._run.model.num_experts):
            for name in (
                expert_shapes(self._run.model, expert) if expert not in engine.owned else ()
            ):
                frozen.append(name, engine.read([name])[name].to(dtype))
        return replace(state, tensors=trained), frozen


def _memory_error(error: BaseException) -> str:
    """The text of a memory error in one line. Raises any other error again."""
    if not lacks_memory(error):
        raise error
    return str(error).partition("\n")[0] or type(error).__name__
