"""Workers that tests share. Starting takes seconds, so healthy ones are used again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from swarm.config import RunConfig
from swarm.errors import SwarmError
from swarm.experts import Slice, expert_shapes
from swarm.model.initial_weights import initial_tensors
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.workers.crew import Crew, Place
from swarm.train.workers.parallel_engine import ParallelEngine
from tests.train.runs import all_names, same


class SharedCrew(Crew):
    """Workers that go back to their pool unless one has failed."""

    pool: "list[SharedCrew] | None" = None
    is_broken = False

    def ask(self, *args: Any) -> Any:
        try:
            return super().ask(*args)
        except SwarmError:
            raise
        except BaseException:
            self.is_broken = True
            raise

    def end(self) -> None:
        if self.pool is None or self.is_broken:
            super().end()
        else:
            self.pool.append(self)


class Crews:
    """Crews of any size, started when no idle one is there. With "cuda", each worker has a GPU."""

    def __init__(self, device: str = "cpu") -> None:
        self._device, self._idle = device, list[SharedCrew]()

    def start(self, size: int, *, are_new: bool = False) -> Crew:
        for crew in self._idle:
            if crew.place.size == size and not are_new:
                self._idle.remove(crew)
                return crew
        return self.new(size)

    def new(self, size: int) -> Crew:
        """Starts workers that become idle ones when their engine is closed."""
        backend = "nccl" if self._device == "cuda" else "gloo"
        return self._to_be_kept(SharedCrew(Place(size, self._device, backend=backend)))

    def _to_be_kept(self, crew: SharedCrew) -> Crew:
        crew.pool = self._idle
        return crew

    def end(self) -> None:
        for crew in self._idle:
            crew.pool = None
            crew.end()

    def engine(
        self,
        run: RunConfig,
        owned: Sequence[int] = (),
        *,
        workers: int = 2,
        below: Sequence[EngineOptions] = (),
        given: dict[str, Any] | None = None,
        **options: Any,
    ) -> ParallelEngine:
        """A parallel engine with the run's initial weights and some owned experts. Close it.

        An engine that is to step down gets new workers, because used ones keep freed memory.
        """
        first = replace(EngineOptions.of(run, device=self._device), **options)
        start = lambda: self.start(workers, are_new=bool(below))  # noqa: E731
        engine = ParallelEngine(run, [first, *below], start, **(given or {}))
        engine.write(initial_tensors(run, all_names(run)))
        engine.own(owned)
        return engine


@contextmanager
def lent_engines(crews: Crews, **defaults: Any) -> Iterator[Callable[..., ParallelEngine]]:
    """Makes engines as `Crews.engine`, and returns their workers at the end."""
    made: list[ParallelEngine] = []

    def make(*args: Any, **options: Any) -> ParallelEngine:
        made.append(crews.engine(*args, **{**defaults, **options}))
        return made[-1]

    try:
        yield make
    finally:
        for engine in made:
            engine.close()


def assert_holders_answer(engine: ParallelEngine, run: RunConfig, shared: Sequence[str]) -> None:
    """Reads and writes shared tensors, the trained experts 1 and 3, and the frozen ones 0 and 2."""
    experts = [name for e in (1, 3) for name in expert_shapes(run.model, e)]
    for name in (*shared, *experts):
        before = engine.read([name])[name]
        part = Slice(name, 3, 9)
        assert torch.equal(engine.read_part(part), before.flatten()[3:9])
        engine.write_part(part, torch.arange(6.0))
        assert torch.equal(engine.read([name])[name].flatten()[3:9], torch.arange(6.0))
        moments = engine.read_moments([name])
        assert moments.keys() == {f"exp_avg.{name}", f"exp_avg_sq.{name}"}
        doubled = {stored: 2 * moment for stored, moment in moments.items()}
        engine.write_moments(doubled)
        assert same(engine.read_moments([name]), doubled)
    frozen = {name: torch.randn(16, 16) for e in (0, 2) for name in expert_shapes(run.model, e)}
    engine.write(frozen)
    assert same(engine.read(list(frozen)), frozen)
    assert engine.read_moments(list(frozen)) == {}


@contextmanager
def shared_crews(device: str = "cpu") -> Iterator[Crews]:
    """Ends all crews at the end."""
    crews = Crews(device)
    try:
        yield crews
    finally:
        crews.end()
