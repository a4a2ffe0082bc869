"""Checks of single schedules, named as for `scripts/simulate --replay`."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from swarm.emulation.simulator.fault_schedule import Outcome, run_schedule
from swarm.emulation.simulator.faults.faults import LONG_S
from swarm.emulation.simulator.faults.hostile import ALL_CLASSES
from swarm.emulation.simulator.mutants.mutants import Mutant
from swarm.protocol.rounds import Parts
from tests.protocol.round_pump import Pump

WHEN_FOUND_S = (60.0, 150.0)
"""Former length of the faults that now last `LONG_S`."""


def require_sound(fault_class: str, seed: int) -> Outcome:
    """Requires that no invariant breaks."""
    outcome = run_schedule(fault_class, seed)
    assert outcome.violation is None, (
        f"{outcome.violation}; trace: scripts/simulate --replay {fault_class}:{seed}"
    )
    return outcome


def require_missed(mutant: Mutant, schedule: str) -> None:
    """Requires that an invariant breaks without the mutant's rule, and none with it.

    Args:
        mutant: with its rule, and the faults that need the rule.
        schedule: fault class and seed, as A:0.
    """
    fault_class, _, seed = schedule.partition(":")
    without = run_schedule(fault_class, int(seed), tested=mutant, mix=mutant.mix)
    assert without.violation is not None, f"nothing noticed the lack of {mutant.rule}"
    assert run_schedule(fault_class, int(seed), mix=mutant.mix).violation is None


def as_found(fault_class: str, seed: int) -> Outcome:
    """A schedule with the former, shorter faults of some classes."""
    mix = ALL_CLASSES[fault_class]
    window_s = WHEN_FOUND_S if mix.window_s == LONG_S else mix.window_s
    return run_schedule(fault_class, seed, mix=replace(mix, window_s=window_s))


def require_fails(
    check: Callable[[], None],
    mutant: Parts,
    patch: pytest.MonkeyPatch,
    errors: tuple[type[Exception], ...] = (AssertionError,),
) -> None:
    """Requires that a directed test of the round machine fails without the mutant's rule alone."""
    check()
    patch.setattr(Pump, "parts", mutant)
    with pytest.raises(errors):
        check()
