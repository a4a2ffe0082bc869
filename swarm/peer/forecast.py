"""How long a run takes: its rounds, as training and averaging. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.config import RunConfig

ASSUMED_MBIT = 100.0
"""Of a peer's link each way, where the person names no other."""
WANTED_UTILISATION = 0.97
"""Share of the time computing with which a run fits a link, where the person names no other."""
DAY_S = 86_400.0


@dataclass(frozen=True)
class Forecast:
    """Seconds of a run, if nobody is lost and links carry nothing else.

    Attributes:
        training_s: of the local steps of a round.
        averaging_s: of the bytes of a round over a peer's link, sent and received at once.
        overlaps: whether they move beside the local steps.
        rounds: of the run.
    """

    training_s: float
    averaging_s: float
    overlaps: bool
    rounds: int

    @property
    def round_s(self) -> float:
        """Of a whole round; one is in flight at a time [V1]."""
        if self.overlaps:
            return max(self.training_s, self.averaging_s)
        return self.training_s + self.averaging_s

    @property
    def run_s(self) -> float:
        """Of all rounds."""
        return self.rounds * self.round_s

    @property
    def run_days(self) -> float:
        """Of the run."""
        return self.run_s / DAY_S


def forecast(run: RunConfig, *, step_s: float, round_bytes: float, mbit: float) -> Forecast:
    """Predicts the seconds of a run.

    Args:
        run: gives steps and rounds; of several phases the last one counts.
        step_s: seconds of a local step.
        round_bytes: that a peer sends in a round, and receives.
        mbit: of its link each way, Mbit/s.
    """
    training_s = run.round.seconds or run.round.local_steps * step_s
    averaging_s = round_bytes * 8 / (mbit * 1e6)
    return Forecast(training_s, averaging_s, run.round.overlap == "round", run.run.rounds)
