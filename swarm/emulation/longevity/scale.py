"""How long a scenario lasts, and when it is sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from swarm.emulation.longevity.audit import SAMPLES, Audit
from swarm.emulation.longevity.world import DAY_S, World

HOUR_S = 3600.0


@dataclass(frozen=True)
class Scale:
    """How long a scenario lasts.

    Attributes:
        days: of virtual time.
        rounds: of the run in it.
    """

    days: float
    rounds: int

    @property
    def seconds(self) -> float:
        """Of virtual time."""
        return self.days * DAY_S

    @property
    def round_s(self) -> float:
        """From one round to the next."""
        return self.seconds / self.rounds


def sampler(world: World, scale: Scale, audit: Audit) -> Callable[[], None]:
    """Samples when that is due; to be called often."""
    due = count(1)
    next_s = [scale.seconds / SAMPLES]

    def look() -> None:
        while world.now_s >= next_s[0]:
            audit.sample()
            next_s[0] = scale.seconds / SAMPLES * (next(due) + 1)

    return look
