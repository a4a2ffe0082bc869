"""Real peers that train while their rounds are under way: one state everywhere, kills included."""

from pathlib import Path

import pytest

from swarm.emulation.local_swarm import LocalSwarm
from tests.scenarios.swarms import finish, has_rounds, write_run
from tests.scenarios.test_deltas import CODED, check

pytestmark = [pytest.mark.scenario]

OVERLAPPED = [
    *CODED,
    'round.overlap="round"',
    'data.mode="common"',
    "merging.alpha=0.0",
    "round.local_steps=6",
]


def test_rounds_that_overlap_end_in_one_state_and_count_every_step(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, [*OVERLAPPED, "run.rounds=6"])
    with LocalSwarm(tmp_path / "swarm", run_file, 2) as swarm:
        swarm.start()
        finish(swarm, 300)
        check(swarm, run_file, 6)


@pytest.mark.exhaustive
def test_peers_that_are_all_killed_between_steps_go_on_with_their_offers(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, [*OVERLAPPED, "run.rounds=8"])
    with LocalSwarm(tmp_path / "swarm", run_file, 2) as swarm:
        swarm.start()
        for rounds in (2, 4, 6):
            swarm.wait_until(has_rounds(rounds), what=f"{rounds} rounds", timeout_s=200)
            for peer in swarm.peers:
                peer.kill()
            for peer in swarm.peers:
                swarm.restart(peer, [])
        finish(swarm, 300)
        check(swarm, run_file, 8)


@pytest.mark.exhaustive
def test_rounds_of_a_given_time_overlap_too(tmp_path: Path) -> None:
    """Each peer takes what steps fit, and offers them while it takes the next."""
    timed = ["round.seconds=3.0", "optimizer.schedule_steps=200", "run.rounds=5"]
    run_file = write_run(tmp_path, [*OVERLAPPED, *timed])
    with LocalSwarm(tmp_path / "swarm", run_file, 2) as swarm:
        swarm.start()
        finish(swarm, 300)
        check(swarm, run_file, 5)
