"""Every valid cell of the fault matrix in real processes: one chain, no hang, nothing unowned.

One swarm goes through many cells. The histories of its peers show which ones it survived.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from swarm.emulation.fault_runner import Bounds, FaultRunner
from swarm.emulation.fault_verdict import rounds_without_owner
from swarm.emulation.local_swarm import LocalSwarm, digests_by_height
from tests.scenarios.matrix import CELLS, IN_CI, PHASES_OF, Cell, faults_of, plan_of
from tests.scenarios.swarms import has_rounds, write_run

STEP_S = 0.15
BOUNDS = Bounds(manifest_s=90.0, return_s=120.0, trap_s=120.0)
"""Some time-outs of the protocol (5 to 14 s each), on a busy machine."""
UNOWNED_ROUNDS = 2
"""Rounds after which a living peer owns the victim's experts. The victim has returned before, or
was silent in two rounds and its experts were adopted."""
SETTINGS = [
    "run.rounds=1000000",
    "model.num_experts=12",
    "round.local_steps=6",
    "round.roster_after_s=3.0",
    "round.reform_after_s=600.0",
    "merging.interval_steps=12",
    "merging.decay_steps=1000000",  # merges do not end before their cells come up
]
START_S = 180.0
CELL_S = 60.0


def run_cells(folder: Path, cells: Sequence[Cell], *, num_peers: int, max_down: int) -> FaultRunner:
    """Runs a swarm through cells. Asserts that all happened and that the swarm is sound."""
    run_file = write_run(folder, SETTINGS)
    swarm = LocalSwarm(folder / "swarm", run_file, num_peers)
    plan = plan_of(cells, max_down=max_down, step_s=STEP_S, num_peers=num_peers)
    said: list[str] = []
    runner = FaultRunner(swarm, plan, say=said.append, bounds=BOUNDS)
    runner.prepare()
    try:
        swarm.start()
        swarm.wait_until(has_rounds(1), what="a round", timeout_s=START_S)
        runner.begin()
        runner.run(runner.all_done, CELL_S * len(cells))
    finally:
        swarm.kill()
    histories = [peer.events() for peer in swarm.peers]
    assert runner.hangs == runner.ended == [], said[-5:]
    assert {len(digests) for digests in digests_by_height(histories).values()} == {1}
    met = [fault for fault in runner.happened if fault.kind in ("kill", "pause")]
    assert len(met) == len(cells)
    unowned = {
        f"{fault.kind}-{fault.role}-{fault.phase}": rounds_without_owner(fault, histories)
        for fault in met
    }
    assert not {cell: count for cell, count in unowned.items() if count > UNOWNED_ROUNDS}
    return runner


def test_the_table_has_every_role_and_phase() -> None:
    assert len(set(CELLS)) == len(CELLS) == 76
    assert {phase for phases in PHASES_OF.values() for phase in phases} == {
        "local_steps", "save", "offer", "roster", "reduce", "propose",
        "fetch", "accept", "commit", "apply", "merge", "leave",
    }  # fmt: skip
    assert set(IN_CI) <= set(CELLS) and len(IN_CI) == 12


def test_a_peer_that_leaves_is_caught_after_its_trap_is_set() -> None:
    trap, leave = faults_of(Cell("kill", "convener", "leave"))
    assert (trap.kind, leave.kind) == ("kill", "leave")


@pytest.mark.scenario
def test_twelve_named_cells_leave_one_chain(tmp_path: Path) -> None:
    run_cells(tmp_path, IN_CI, num_peers=7, max_down=3)


@pytest.mark.scenario
@pytest.mark.exhaustive
@pytest.mark.parametrize("role", [role for role in PHASES_OF if role != "joiner"])
def test_all_cells_of_a_role_leave_one_chain(tmp_path: Path, role: str) -> None:
    cells = [cell for cell in CELLS if cell.role == role]
    run_cells(tmp_path, cells, num_peers=5, max_down=2)


@pytest.mark.scenario
@pytest.mark.exhaustive
def test_joiners_may_be_lost_at_any_moment(tmp_path: Path) -> None:
    cells = [cell for cell in CELLS if cell.role == "joiner"]
    # Two: the trap that waits for the newcomer, and the newcomer.
    run_cells(tmp_path, cells, num_peers=4, max_down=2)
