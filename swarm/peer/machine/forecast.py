"""Predicts how long the rounds of a run take to train and to average. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarm.config import PhaseConfig, RunConfig

ASSUMED_MBIT = 100.0
"""Assumed rate of a peer's link in each direction, unless a person names one."""
WANTED_UTILISATION = 0.97
"""Share of time computing from which on a run fits a link, unless a person names one."""
DAY_S = 86_400.0


@dataclass(frozen=True)
class Forecast:
    """Seconds of a run, if nobody is lost and links carry nothing else.

    Attributes:
        training_s: seconds of the local steps of a round, after the last of the run's phases.
        averaging_s: seconds of a round's bytes on a peer's link, with both directions at the same
            time.
        overlaps: whether these bytes move during the local steps.
        run_s: seconds of all rounds, each by its own phase.
    """

    training_s: float
    averaging_s: float
    overlaps: bool
    run_s: float

    @property
    def round_s(self) -> float:
        """Seconds of a whole round, after the last of the run's phases."""
        return _round_s(self.training_s, self.averaging_s, overlaps=self.overlaps)

    @property
    def run_days(self) -> float:
        """Days of the run."""
        return self.run_s / DAY_S


def _round_s(training_s: float, averaging_s: float, *, overlaps: bool) -> float:
    """Seconds of a round; only one round is in flight at a time (overlapped rounds)."""
    return max(training_s, averaging_s) if overlaps else training_s + averaging_s


def rounds_by_phase(run: RunConfig) -> list[tuple[int, PhaseConfig]]:
    """The number of rounds in each phase of a run, if all of its peers take part."""
    found, left, tokens = [], run.run.rounds, 0
    while left:
        phase = run.phase_at(tokens)
        round_tokens = run.run.peers * phase.local_steps * phase.batch_tokens
        rounds = min(left, math.ceil((phase.until_tokens - tokens) / round_tokens))
        found.append((rounds, phase))
        left, tokens = left - rounds, tokens + rounds * round_tokens
    return found


def forecast(run: RunConfig, *, step_s: float, round_bytes: float, mbit: float) -> Forecast:
    """Predicts the seconds of a run.

    Args:
        run: gives steps and rounds, by its phases.
        step_s: seconds of a local step after the last phase; steps of other phases scale with
            their batches.
        round_bytes: bytes that a peer sends in a round, and also receives.
        mbit: rate of the link of a peer in each direction, in Mbit/s.
    """
    averaging_s, overlaps = round_bytes * 8 / (mbit * 1e6), run.round.overlap == "round"

    def training_s(local_steps: int, batch_tokens: int) -> float:
        return run.round.seconds or local_steps * step_s * batch_tokens / run.train.batch_tokens

    run_s = sum(
        rounds
        * _round_s(training_s(of.local_steps, of.batch_tokens), averaging_s, overlaps=overlaps)
        for rounds, of in rounds_by_phase(run)
    )
    last_s = training_s(run.round.local_steps, run.train.batch_tokens)
    return Forecast(last_s, averaging_s, overlaps, run_s)
