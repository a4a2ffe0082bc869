"""Real peers that train during their rounds: one state everywhere, even after kills."""

from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.emulation.local_swarm import LocalSwarm, summary
from swarm.peer.machine.state_directory import RunDirectory
from tests.scenarios.swarms import finish, has_rounds, kill_and_restart, run_folder, started_swarm
from tests.scenarios.test_deltas import CODED, check

pytestmark = [pytest.mark.scenario]

OVERLAPPED = [
    *CODED,
    'round.overlap="round"',
    'data.mode="common"',
    "merging.alpha=0.0",
    "round.local_steps=6",
]


@pytest.mark.parametrize("second", ["streams", pytest.param("works", marks=pytest.mark.exhaustive)])
def test_rounds_that_overlap_end_in_one_state_and_count_every_step(
    tmp_path: Path, second: str
) -> None:
    """The second peer streams, or has two workers. Both engines are read during steps."""
    settings, engines = [*OVERLAPPED, "run.rounds=6"], _of_second(second)
    with started_swarm(tmp_path, 2, settings, own_options=engines) as swarm:
        finish(swarm, 300)
        check(swarm, 6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("second", ["streams", "works"])
def test_peers_that_are_all_killed_between_steps_go_on_with_their_offers(
    tmp_path: Path, second: str
) -> None:
    settings, engines = [*OVERLAPPED, "run.rounds=8"], _of_second(second)
    with started_swarm(tmp_path, 2, settings, own_options=engines) as swarm:
        for rounds in (2, 4, 6):
            swarm.wait_until(has_rounds(rounds), what=f"{rounds} rounds", timeout_s=200)
            kill_and_restart(swarm)
        finish(swarm, 300)
        check(swarm, 8)


@pytest.mark.exhaustive
def test_rounds_of_a_given_time_overlap_too(tmp_path: Path) -> None:
    """Each peer takes the steps that fit, and offers them during the next ones."""
    timed = ["round.seconds=3.0", "optimizer.schedule_steps=200", "run.rounds=5"]
    with started_swarm(tmp_path, 2, [*OVERLAPPED, *timed]) as swarm:
        finish(swarm, 300)
        check(swarm, 5)


@pytest.mark.exhaustive
def test_peers_that_are_all_killed_within_a_cycle_make_their_offers_again(tmp_path: Path) -> None:
    """Their private states are from earlier rounds. They repeat the offers made since."""
    slices = ["round.experts_every=2", "round.stagger=true", "run.rounds=8"]
    with started_swarm(tmp_path, 2, [*OVERLAPPED, *slices]) as swarm:
        for rounds in (1, 3, 5):
            swarm.wait_until(has_rounds(rounds), what=f"{rounds} rounds", timeout_s=200)
            swarm.wait_until(_have_offered(rounds), what="the next offers", timeout_s=200)
            kill_and_restart(swarm)
        finish(swarm, 300)
        verdict = summary(swarm)
    assert set(verdict["digests_per_height"]) == {1}
    assert (verdict["rounds"], verdict["tokens_lost"]) == (8, 0)
    assert all("offered again" in peer.output() for peer in swarm.peers)


def _of_second(engine: str) -> Callable[[int], list[str]]:
    """The options of a peer by its index."""
    whole = ["--set", "compute.tensor_parallel=1", "--set", "compute.shard=none"]
    streams, works = ["--engine", "streaming"], ["--device", "cpu", "--gpus", "2", *whole]
    return lambda index: {"streams": streams, "works": works}[engine] if index else []


def _have_offered(rounds: int) -> Callable[[LocalSwarm], bool]:
    """Whether all peers have written their offers on the tip of this round."""

    def have(swarm: LocalSwarm) -> bool:
        offers = [RunDirectory(run_folder(peer)).read_offer() for peer in swarm.peers]
        return all(offer is not None and offer.round > rounds for offer in offers)

    return have
