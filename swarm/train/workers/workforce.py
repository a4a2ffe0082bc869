"""Workers that are restarted when they end, and restored to their state."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from swarm.config import RunConfig
from swarm.errors import SwarmError, WorkersFailed
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.tensor_file import TensorFile
from swarm.train.fallback_engine import next_below
from swarm.train.workers.command_history import Command, History
from swarm.train.workers.crew import Crew
from swarm.train.workers.exchange import Message, listed, opened, options_message
from swarm.train.workers.members import Lost

logger = logging.getLogger(__name__)

TRIES = 3
"""So many starts of workers in a row for one command end the peer."""
HINT = "the state directory is good; see the log, and dmesg for the GPUs"
Answer = TypeVar("Answer")
COMPUTES = ("step", "rehearse", "evaluate")
STEPS = ("step", "begin_step", "stands", "finish_step")
"""A step as one command, or in parts."""
KEPT = 64
"""The longest of this many last computations of a kind determines the deadline of the next."""
STANDS_EVERY_S = 0.02
"""Seconds between two checks of a begun step; other questions can come between them."""


@dataclass(frozen=True)
class CommandTimeouts:
    """Time limits of commands.

    Attributes:
        least_s: least limit of any command.
        first_s: limit of the first computation of its kind.
        times: limit of a later computation, in multiples of the longest recent one of its kind.
        bytes_per_s: least rate of reading or writing a private state.
    """

    least_s: float = 300.0
    first_s: float = 3600.0
    times: float = 20.0
    bytes_per_s: float = 20e6

    def within_s(self, message: Message, longest_s: Mapping[str, float], num_bytes: int) -> float:
        """The deadline of a command that comes with this number of bytes."""
        kind = "step" if message["do"] in STEPS else message["do"]
        if kind in COMPUTES and kind not in longest_s:
            return max(self.least_s, self.first_s)
        return self.least_s + self.times * longest_s.get(kind, 0.0) + num_bytes / self.bytes_per_s


class Workforce:
    """Asks workers, and replaces lost workers. Any thread may ask; one question runs at a time.

    Attributes:
        options: options of the engine of each worker.
        size: number of workers.
    """

    def __init__(
        self,
        run: RunConfig,
        options: Sequence[EngineOptions],
        start: Callable[[], Crew],
        history: History,
        patience: CommandTimeouts,
    ) -> None:
        """Starts workers; see `ParallelEngine`."""
        self.options, *self._below = options
        self._run, self._start, self._history, self._patience = run, start, history, patience
        self._lock = threading.RLock()
        self._crew: Crew | None = None
        self.size = 0
        self._took_s: dict[str, deque[float]] = {}
        self._stood_s, self._losses = 0.0, 0
        self.ask({"do": "count_from", "updates": 0})

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by rank; empty before the workers are started."""
        return self._crew.pids if self._crew else ()

    @property
    def here(self) -> int:
        """The number of workers on this machine; these have the first ranks."""
        return self._crew.place.size if self._crew else 0

    def tell(self, command: Command) -> list[Message]:
        """Sends all workers a command that changes them. Returns the answers by rank.

        Raises:
            SwarmError: raised by an engine.
            OutOfMemory: memory is short with all options.
            WorkersFailed: workers ended repeatedly.
        """
        with self._lock:
            begins = command.message["do"] in ("step", "begin_step")
            if begins and self._crew is not None and self._crew.may_grow:
                logger.info("workers of other machines are back; all workers are started again")
                self.close()
            answers = self.ask(command.message, command.tensors)
            self._history.add(command)
            return answers

    def ask(self, message: Message, tensors: Mapping[str, Tensor] | None = None) -> list[Message]:
        """Sends all workers a command that new workers need not repeat. Raises as `tell`."""
        return self._until_done(lambda crew: self._carry_out(crew, message, tensors))

    def until_it_stands(self) -> None:
        """Waits until all workers have computed the gradients of a begun step.

        Raises as `tell`. All questions count as one command. Workers that take too long count as
        lost, and new workers begin the step.
        """
        message, losses = {"do": "stands"}, self._losses
        within_s = self._patience.within_s(message, self._longest_s(), 0)
        asked: dict[Crew, float] = {}

        def stands(crew: Crew) -> bool:
            began_s = asked.setdefault(crew, time.monotonic())
            is_there = all(answer["stands"] for answer in self._timed(crew, message, None))
            self._stood_s = time.monotonic() - began_s
            if not is_there and self._stood_s > within_s:
                raise Lost(f"no end of a step within {within_s:.0f} s")
            return is_there

        while not self._until_done(stands, losses):
            time.sleep(STANDS_EVERY_S)

    def read(self, message: Message) -> TensorFile:
        """Tensors of the first worker. Raises as `tell`."""

        def read(crew: Crew) -> TensorFile:
            out = TensorFile.in_memory()
            return opened(out.file, self._timed(crew, message, out)[0]["tensors"])

        return self._until_done(read)

    def saves_within_s(self, num_bytes: int) -> float:
        """Time limit for workers to write a number of bytes to files."""
        return self._patience.least_s + num_bytes / self._patience.bytes_per_s

    def close(self) -> None:
        """Ends the workers."""
        with self._lock:
            if self._crew is not None:
                self._crew.end()
            self._crew = None

    # ------------------------------------------------ again and again

    def _until_done(self, work: Callable[[Crew], Answer], before: int | None = None) -> Answer:
        """`before`: the count of losses before the command, if this call is only a part of it."""
        before = self._losses if before is None else before
        while True:
            with self._lock:
                try:
                    return self._once(work)
                except Lost as lost:
                    self._losses += not lost.is_memory
                    self._judge(lost, self._losses - before)

    def _once(self, work: Callable[[Crew], Answer]) -> Answer:
        try:
            if self._crew is None:
                self._come_back()
            assert self._crew is not None
            return work(self._crew)
        except SwarmError as error:
            if isinstance(error, WorkersFailed):
                self.close()
            raise
        except BaseException:
            # The workers are lost, or answers for which nobody waits may be in flight.
            self.close()
            raise

    def _come_back(self) -> None:
        """Starts workers, which repeat the recorded commands."""
        began_s = time.monotonic()
        crew = self._start()
        try:
            options = options_message(self.options)
            run = self._run.canonical_json().decode()
            self._timed(crew, {"do": "make", "run": run, "options": options}, None)
            commands = self._history.commands()
            for command in commands:
                self._carry_out(crew, command.message, command.tensors)
        except BaseException:
            crew.end()
            raise
        crew.is_starting = False
        self._crew, self.size = crew, len(crew.pids)
        again = sum(command.message["do"] in ("step", "finish_step") for command in commands)
        logger.info(
            "%d workers began within %.1f s (processes %s)%s",
            self.size,
            time.monotonic() - began_s,
            ", ".join(map(str, crew.pids)),
            f"; steps made again: {again}" if again else "",
        )

    @property
    def levels(self) -> tuple[EngineOptions, ...]:
        """The present level, and the remaining levels below."""
        return (self.options, *self._below)

    def _judge(self, lost: Lost, tries: int) -> None:
        """Logs the loss. Raises if a restart of workers would be useless."""
        if not lost.is_memory:
            if tries >= TRIES:
                raise WorkersFailed(
                    f"the workers ended {tries} times in a row, the last time: {lost}",
                    hint=HINT,
                )
            logger.warning("%s; all workers are started again", lost)
            return
        self.options = next_below(self.options, self._below, self._run, str(lost))

    # ------------------------------------------------ one command

    def _carry_out(
        self, crew: Crew, message: Message, tensors: Mapping[str, Tensor] | None
    ) -> list[Message]:
        if tensors is None:
            return self._timed(crew, message, None)
        if isinstance(tensors, TensorFile):
            file = tensors
        else:
            file = TensorFile.in_memory()
            file.take(tensors)
        return self._timed(crew, message | {"tensors": listed(file)}, file)

    def _longest_s(self) -> Mapping[str, float]:
        """Longest recent time of each kind of computation.

        A duration in which the machine slept is dropped.
        """
        return {kind: max(took_s) for kind, took_s in self._took_s.items()}

    def _timed(self, crew: Crew, message: Message, file: TensorFile | None) -> list[Message]:
        num_bytes = sum(place.num_bytes for place in file.places.values()) if file else 0
        num_bytes = message.get("bytes", num_bytes)
        began_s = time.monotonic()
        within_s = self._patience.within_s(message, self._longest_s(), num_bytes)
        answers = crew.ask(message, file, within_s)
        kind, seconds = message["do"], time.monotonic() - began_s
        if kind == "begin_step":
            self._stood_s = 0.0
        elif kind == "finish_step":
            kind, seconds = "step", self._stood_s + seconds
        if kind in COMPUTES:
            self._took_s.setdefault(kind, deque(maxlen=KEPT)).append(seconds)
        return answers
