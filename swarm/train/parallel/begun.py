"""A step whose products are computed in a thread of its own, while its rank answers questions.

Where rounds overlap with local steps, a peer makes its offer beside a step [V9], and asks its
workers for values meanwhile. These do not change before the step has been let through.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from swarm.background import SYSTEM, Joinable
from swarm.train.engine import EngineState
from swarm.train.parallel.exchange import Message, controls_of, masks_of
from swarm.train.parallel.ranks import Ranks
from swarm.train.parallel.sharding import RankEngine
from swarm.train.parallel.streaming_rank import StreamingRank


def step_of(
    engine: RankEngine | StreamingRank, ranks: Ranks, message: Message, given: Mapping[str, Tensor]
) -> Callable[[], Message]:
    """Makes the step that a message asks for; its tensors are read now."""
    controls = controls_of(message["controls"])
    masks, tokens_BT1 = masks_of(given), given["tokens"]

    def step() -> Message:
        ranks.traffic.take()  # of what came before
        began_s = time.perf_counter()
        stats = engine.step(tokens_BT1, lr=message["lr"], controls=controls, masks=masks)
        figures = engine.figures(len(tokens_BT1), time.perf_counter() - began_s)
        return {
            "stats": dataclasses.asdict(stats),
            "skipped": engine.skipped,
            "figures": dataclasses.asdict(figures),
        }

    return step


class BegunStep:
    """One step, which stands still before it changes the first value.

    Attributes:
        state: the private state before it, as views.
    """

    def __init__(
        self,
        engine: RankEngine | StreamingRank,
        step: Callable[[], Message],
        *,
        is_beside: bool,
    ) -> None:
        """Begins.

        Args:
            engine: of the rank.
            step: makes the step with it, and gives the answer.
            is_beside: whether the engine can be read meanwhile; else `finish` makes the whole step.
        """
        self.state: EngineState = engine.state_dict()
        self._step = step
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._stands, self._may_go = threading.Event(), threading.Event()
        self._stood_s = 0.0
        self._answer: Message | None = None
        self._error: BaseException | None = None
        self._thread: Joinable | None = None
        if is_beside and engine.before_update(self._hold):
            self._thread = SYSTEM.start(self._run, "swarm-step")

    @property
    def stands(self) -> bool:
        """Whether it waits to be let through, or has ended without any change."""
        return self._thread is None or self._stands.is_set()

    def wait(self) -> None:
        """Returns when it stands, so that values may be changed."""
        if self._thread is not None:
            self._stands.wait()

    def finish(self) -> Message:
        """Lets it through; returns its answer, or raises what it raised."""
        if self._thread is None:
            return self._step()
        self._may_go.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        self._answer["figures"]["seconds"] -= self._stood_s
        return self._answer

    def _hold(self) -> None:
        # An engine goes on calling it in later steps, which nobody holds up.
        self._stands.set()
        began_s = time.perf_counter()
        self._may_go.wait()
        self._stood_s += time.perf_counter() - began_s

    def _run(self) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        try:
            self._answer = self._step()
        except BaseException as error:  # noqa: BLE001 - it is raised where the answer is wanted
            self._error = error
        finally:
            self._stands.set()
