"""An engine without weights, whose worker processes hold the weights and compute together.

Legend: B sequences, T predicted tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from swarm.config import RunConfig
from swarm.data.masks import Masks
from swarm.experts import Slice, expert_shapes
from swarm.model.routing import RoutingControls
from swarm.train.engine.engine import EngineState, StandIn, StepStats, is_trained
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.rank_figures import RankFigures
from swarm.train.engine.tensor_file import JoinedFiles, TensorFile
from swarm.train.planning.ladder import describe
from swarm.train.workers.command_history import Command, Found, History, Saved, load_commands
from swarm.train.workers.crew import Crew
from swarm.train.workers.exchange import controls_message, masks_tensors, state_of, stats_of
from swarm.train.workers.worker_tensors import WorkersTensors
from swarm.train.workers.workforce import CommandTimeouts, Workforce


class ParallelEngine:
    """An `Engine` of several workers that share the micro-batches and, by options, the experts.

    If a worker ends, is silent or has no memory left, all workers are restarted. New workers begin
    with the private state on disk and repeat the later commands bit for bit, so the caller only
    loses time. After a lack of memory the new workers keep less for backward, use smaller moments,
    or share the experts.

    Attributes:
        traffic: operations between workers in the newest step, by kind: their number, and the bytes
            that the first worker sent.
    """

    def __init__(
        self,
        run: RunConfig,
        options: Sequence[EngineOptions],
        start: Callable[[], Crew],
        *,
        folder: Path | None = None,
        saved: Saved | None = None,
        patience: CommandTimeouts | None = None,
        ending: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the workers.

        Args:
            run: the model.
            options: options of each worker: first the options to begin with, then those to step
                down to, in order.
            start: starts workers.
            folder: a folder on a disk with room for the commands that new workers must repeat. None
                for the system's folder for temporary files.
            saved: the saved private state. None if none is saved.
            patience: time limits of commands.
            ending: called at the end of `close`, after the workers have ended.

        Raises:
            OutOfMemory: no options fit.
            WorkersFailed: the workers do not start.
        """
        self._run = run
        self._ending = ending
        self._history = History(folder, saved or Saved.at(None))
        self._force = Workforce(run, options, start, self._history, patience or CommandTimeouts())
        self._owned: tuple[int, ...] = ()
        self._skipped = 0
        self._wait: Callable[[], None] | None = None
        self.traffic: dict[str, tuple[int, int]] = {}

    def describe(self) -> str:
        """The engine in words."""
        each = describe(self._force.options, self._run)
        return f"{self._force.size} workers, each {each}"

    @property
    def levels(self) -> tuple[EngineOptions, ...]:
        """The present level of each worker, and the remaining levels below."""
        return self._force.levels

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by rank."""
        return self._force.pids

    # ------------------------------------------------ as `Engine`

    @property
    def owned(self) -> tuple[int, ...]:
        """See `Engine`."""
        return self._owned

    @property
    def skipped(self) -> int:
        """See `Engine`."""
        return self._skipped

    @property
    def intact(self) -> bool:
        """See `Engine`.

        If a worker ended during a step, the workers are restored to the state before the step.
        """
        return True

    def own(self, experts: Sequence[int]) -> None:
        """See `Engine`."""
        wanted = tuple(sorted(set(experts)))
        if wanted != self._owned:
            self._force.tell(Command({"do": "own", "experts": wanted}))
            self._own_now(wanted)

    def count_from(self, updates: int) -> None:
        """See `Engine`."""
        self._force.tell(Command({"do": "count_from", "updates": updates}))

    def before_update(self, wait: Callable[[], None]) -> bool:
        """See `Engine`. Counts for the next step only; workers begin it in the background."""
        if not self._force.options.is_read_beside(self._run):
            return False
        self._wait = wait
        return True

    def step(
        self,
        tokens_BT1: Tensor,
        *,
        lr: float,
        controls: RoutingControls | None = None,
        masks: Masks | None = None,
    ) -> StepStats:
        """See `Engine`."""
        message = {"do": "step", "lr": lr, "controls": controls_message(controls)}
        kept = self._history.kept({"tokens": tokens_BT1} | masks_tensors(masks))
        wait, self._wait = self._wait, None
        if wait is None:
            answers = self._force.tell(Command(message, kept))
        else:
            self._force.tell(Command({**message, "do": "begin_step"}, kept))
            self._force.until_it_stands()
            wait()
            answers = self._force.tell(Command({"do": "finish_step"}))
        self._skipped = answers[0]["skipped"]
        workers = tuple(RankFigures(**answer["figures"]) for answer in answers)
        self.traffic = workers[0].moved
        return replace(stats_of(answers[0]["stats"]), workers=workers)

    def rehearse(self, tokens_BT1: Tensor) -> None:
        """See `Engine`."""
        self._force.ask({"do": "rehearse"}, {"tokens": tokens_BT1})

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """See `Engine`."""
        return dict(self._force.read({"do": "read", "names": list(names)}))

    def write(self, named: Mapping[str, Tensor]) -> None:
        """See `Engine`."""
        self._write(named, self._history.kept(named))

    def read_part(self, part: Slice) -> Tensor:
        """See `Engine`."""
        return self._force.read({"do": "read_part", "part": _fields(part)})["values"]

    def write_part(self, part: Slice, values: Tensor) -> None:
        """See `Engine`."""
        assert is_trained(part.name, self._owned), part
        kept = self._history.kept({"values": values})
        self._force.tell(Command({"do": "write_part", "part": _fields(part)}, kept))

    @property
    def borrows(self) -> bool:
        """See `Engine`. New workers read lent tensors from their original place."""
        return True

    def lend(self, named: Mapping[str, Tensor]) -> None:
        """See `Engine`."""
        self._write(named, named)

    def read_moments(self, names: Collection[str]) -> dict[str, Tensor]:
        """See `Engine`."""
        return dict(self._force.read({"do": "read_moments", "names": list(names)}))

    def write_moments(self, moments: Mapping[str, Tensor]) -> None:
        """See `Engine`."""
        self._force.tell(Command({"do": "write_moments"}, self._history.kept(moments)))

    def evaluate(
        self,
        tokens_BT1: Tensor,
        *,
        scored_BT: Tensor | None = None,
        agreed: StandIn | None = None,
    ) -> float:
        """See `Engine`.

        Asks `agreed` once for each value, and keeps the values in a file during the call.
        """
        given: dict[str, StandIn] = {"tokens": lambda _: tokens_BT1}
        if scored_BT is not None:
            given["scored"] = lambda _: scored_BT
        for expert in self._owned if agreed else ():
            assert agreed is not None
            given |= dict.fromkeys(expert_shapes(self._run.model, expert), agreed)
        file = self._history.aside(Found(given))
        mean: float = self._force.ask({"do": "evaluate"}, file)[0]["mean"]
        return mean

    def state_dict(self) -> EngineState:
        """See `Engine`. Each tensor comes from a worker on look-up.

        Workers of this machine can write their tensors to files themselves; see `PartedTensors`.
        """
        answer = self._force.ask({"do": "state"})[0]
        state = state_of(answer, WorkersTensors(self._force, answer))
        self._history.mark(state.counts, lambda name: is_trained(name, self._owned))
        return state

    def load_state_dict(self, state: EngineState) -> None:
        """See `Engine`."""
        state.require(self._run)
        if not isinstance(state.tensors, (TensorFile, JoinedFiles)):
            state = replace(state, tensors=self._history.kept(state.tensors))
        for command in load_commands(state):
            answers = self._force.tell(command)
        self._skipped = answers[0]["skipped"]
        self._own_now(tuple(sorted(state.owned)))

    def close(self) -> None:
        """See `Engine`."""
        self._force.close()
        self._ending()

    def _write(self, named: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
        self._force.tell(Command({"do": "write"}, kept))
        self._history.froze((n for n in named if not is_trained(n, self._owned)), kept)

    def _own_now(self, experts: tuple[int, ...]) -> None:
        """Notes the values of experts that have become frozen."""
        gone = [expert for expert in self._owned if expert not in experts]
        self._owned = experts
        for expert in gone:
            names = list(expert_shapes(self._run.model, expert))
            self._history.froze(names, self._history.kept(self.read(names)))


def _fields(part: Slice) -> list[object]:
    return [part.name, part.start, part.stop]
