"""Local steps that the tip does not count yet, while rounds overlap [V1, V6].

A peer offers, and takes its next steps while the round is under way. What it offered is then *in
flight*; what a round has left out, but goes on in the model, is *behind*, and is offered once more
with the next steps. Where rounds do not overlap both stay empty. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.protocol.training.shell import Work


@dataclass(frozen=True)
class Tally:
    """What some local steps amount to; see `Work`."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Work | Tally | None) -> Tally:
        """With those of another; None: there are none."""
        if other is None:
            return self
        return Tally(
            self.steps + other.steps, self.tokens + other.tokens, self.seconds + other.seconds
        )


class Ahead:
    """What the model contains beyond the tip, apart from the steps since the last offer."""

    def __init__(self) -> None:
        self.flight: Work | None = None
        """Offered last; no manifest has decided on it."""
        self.behind = Tally()
        """Offered before, and counted by none."""

    @property
    def uncounted(self) -> Tally:
        """All of it."""
        return self.behind + self.flight

    def decided(self, *, is_counted: bool, is_lost: bool) -> int:
        """A newer manifest is adopted.

        Args:
            is_counted: whether it took in what was in flight, with all that was behind.
            is_lost: whether the shared tensors begin anew.

        Returns:
            Tokens that are in the model no longer, and in no manifest.
        """
        uncounted, self.flight = Tally() if is_counted else self.uncounted, None
        self.behind = Tally() if is_lost else uncounted
        return uncounted.tokens if is_lost else 0
