"""Faults that shorten a run's life, put back one at a time: the month must show each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from swarm.network import direct
from swarm.peer.publisher import Publisher

Patches = tuple[tuple[Any, str, Any], ...]


@dataclass(frozen=True)
class Mutant:
    """Code as it was, or as it must not become.

    Attributes:
        fault: what is wrong.
        scenario: that shows it.
        shown_by: a part of what the audit says then.
        patches: owner, name and value of each name that is replaced.
    """

    fault: str
    scenario: str
    shown_by: str
    patches: Callable[[], Patches]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Puts the fault in the place of code; KeyError if that is not there."""
        before = [(owner, name, vars(owner)[name]) for owner, name, _ in self.patches()]
        for owner, name, value in self.patches():
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)


def _rests_without_bound(way: Any, now_s: float) -> None:
    way.is_known = False
    pause_s = direct.FIRST_PAUSE_S * 2.0**way.failures
    way.not_before_s = now_s + min(pause_s, direct.LONGEST_PAUSE_S)
    way.failures += 1


async def _leaks_a_task(self: Any) -> None:
    leaked = self.__dict__.setdefault("leaked", [])
    leaked.append(asyncio.get_running_loop().create_task(asyncio.sleep(1e9)))
    await _published(self)


_published = Publisher._publish

MUTANTS: dict[str, Mutant] = {
    "exponent_without_bound": Mutant(
        "1: a pause of 5.0 * 2**failures overflows at the 1,025th failure",
        "transport", "was not fetched",
        lambda: ((direct._Way, "failed", _rests_without_bound),),
    ),
    "task_for_each_record": Mutant(
        "a task is left behind by each publication",
        "publishing", "Publisher.leaked grows",
        lambda: ((Publisher, "_publish", _leaks_a_task),),
    ),
}  # fmt: skip
