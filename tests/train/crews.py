"""Workers that tests share: starting some takes seconds, so that healthy ones are used again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from swarm.config import RunConfig
from swarm.errors import SwarmError
from swarm.model.initialise import initial_tensors
from swarm.train.options import EngineOptions
from swarm.train.parallel.crew import Crew, Place
from swarm.train.parallel.engine import ParallelEngine
from tests.train.runs import all_names


class SharedCrew(Crew):
    """Workers that go back to their pool unless something went wrong with them."""

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
    """Workers of any number, started when there are none to be used again."""

    def __init__(self) -> None:
        self._idle: list[SharedCrew] = []

    def start(self, size: int) -> Crew:
        for crew in self._idle:
            if crew.place.size == size:
                self._idle.remove(crew)
                return crew
        crew = SharedCrew(Place(size))
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
        """A parallel engine with the run's initial weights that owns some experts; to be closed."""
        first = replace(EngineOptions.of(run), **options)
        start = lambda: self.start(workers)  # noqa: E731
        engine = ParallelEngine(run, [first, *below], start, **(given or {}))
        engine.write(initial_tensors(run, all_names(run)))
        engine.own(owned)
        return engine


@contextmanager
def lent_engines(crews: Crews, **defaults: Any) -> Iterator[Callable[..., ParallelEngine]]:
    """Makes engines as `Crews.engine`, and gives their workers back in the end."""
    made: list[ParallelEngine] = []

    def make(*args: Any, **options: Any) -> ParallelEngine:
        made.append(crews.engine(*args, **{**defaults, **options}))
        return made[-1]

    try:
        yield make
    finally:
        for engine in made:
            engine.close()


@contextmanager
def shared_crews() -> Iterator[Crews]:
    """For the tests of a module."""
    crews = Crews()
    try:
        yield crews
    finally:
        crews.end()
