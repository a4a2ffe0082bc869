"""The protocol with exactly one rule removed: what the simulator must be able to catch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.emulation.simulator.faults import Mix
from swarm.emulation.simulator.node import Cast


@dataclass(frozen=True)
class Mutant:
    """Code without one rule, and faults under which that shows soon."""

    rule: str
    """The rule that it lacks."""
    cast: Cast
    mix: Mix | None = None
    """Faults of its own; None: those of the class that is run."""


MUTANTS: Mapping[str, Mutant] = {}
