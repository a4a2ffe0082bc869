"""What tests ask of single schedules, which are named as `scripts/simulate --replay` takes them."""

from swarm.emulation.simulator.mutants import Mutant
from swarm.emulation.simulator.schedule import run_schedule


def require_sound(fault_class: str, seed: int) -> None:
    """No invariant breaks."""
    outcome = run_schedule(fault_class, seed)
    assert outcome.violation is None, (
        f"{outcome.violation}; trace: scripts/simulate --replay {fault_class}:{seed}"
    )


def require_missed(mutant: Mutant, schedule: str) -> None:
    """An invariant breaks without the mutant's rule, and none with it.

    Args:
        mutant: with its rule, and the faults under which that is missed.
        schedule: fault class and seed, as A:0.
    """
    fault_class, _, seed = schedule.partition(":")
    without = run_schedule(fault_class, int(seed), tested=mutant.tested, mix=mutant.mix)
    assert without.violation is not None, f"nothing noticed the lack of {mutant.rule}"
    assert run_schedule(fault_class, int(seed), mix=mutant.mix).violation is None
