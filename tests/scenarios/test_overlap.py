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


def offered_beside_a_round(swarm: LocalSwarm) -> int:
    """How many rounds ended in the middle of local steps, rather than in a wait for them."""
    rounds = [event for peer in swarm.peers for event in peer.events() if event["event"] == "round"]
    return sum(1 for event in rounds if not event.get("waited_s"))


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
