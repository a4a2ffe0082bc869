"""Peers that stay away: their experts are adopted, and returning peers find the one chain.

`test_matrix.py` covers deaths in each phase of a round. The tests share one swarm. Each
begins by restarting the peers that the test before left dead.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm.emulation.local_swarm import Event, LocalPeer, LocalSwarm, applied
from tests.scenarios.swarms import ROUND_S, assert_one_chain, contributes, rounds, started_swarm

pytestmark = pytest.mark.scenario

TIMEOUTS_S = 60.0
"""A few time-outs of the protocol (5 to 14 s each), on a busy machine."""
STARTING_S = (0.3, 1.0, 2.5)
"""Times at which a forked peer starts its node, searches the run, and joins."""
OWNED_AGAIN = 2
"""Rounds from an owner's death to the adoption of its experts."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    folder = tmp_path_factory.mktemp("faults")
    with started_swarm(
        folder, 4, ["run.rounds=100000", "merging.interval_steps=24"], after_rounds=2
    ) as started:
        yield started
        started.kill()
        assert_one_chain(started)


def revive(swarm: LocalSwarm) -> None:
    """Restarts all dead peers, and waits until they contribute."""
    dead = [peer for peer in swarm.peers if not peer.alive]
    other = next(other for other in swarm.peers if other.alive)
    for peer in dead:
        swarm.restart(peer, ["--initial-peers", other.join_address()])
    for peer in dead:
        swarm.wait_until(contributes(peer), what="its return", timeout_s=3 * ROUND_S)


def survivors_of(swarm: LocalSwarm, dead: LocalPeer) -> list[LocalPeer]:
    return [peer for peer in swarm.peers if peer is not dead]


def test_experts_of_a_dead_owner_are_adopted_within_a_few_rounds(swarm: LocalSwarm) -> None:
    victim = swarm.peers[-1]
    victim.kill()
    died_in = max(rounds(peer)[-1]["round"] for peer in swarm.peers)
    left = survivors_of(swarm, victim)

    def adopted(_: LocalSwarm) -> bool:
        return {e for peer in left for e in rounds(peer)[-1]["owned"]} == set(range(8))

    swarm.wait_until(adopted, what="the adoption", timeout_s=(OWNED_AGAIN + 1) * TIMEOUTS_S)
    first = min(e["round"] for peer in left for e in rounds(peer) if owns_more(e, died_in))
    # The present round may have had its offer. Then its silence begins one round later.
    assert first - (died_in + 1) <= OWNED_AGAIN
    assert_one_chain(swarm)


def owns_more(event: Event, after: int) -> bool:
    return bool(event["round"] > after and len(event["owned"]) > 8 // 4)


def test_a_peer_killed_again_and_again_while_it_starts_comes_back(swarm: LocalSwarm) -> None:
    revive(swarm)
    victim = swarm.peers[2]
    for alive_s in STARTING_S:
        victim.kill()
        swarm.restart(victim, ["--initial-peers", swarm.peers[0].join_address()])
        time.sleep(alive_s)
    swarm.wait_until(contributes(victim), what="its return", timeout_s=3 * ROUND_S)
    assert len(applied(victim.events())) > 2


@pytest.mark.exhaustive  # T_reform passes twice
def test_a_lone_survivor_goes_on_and_the_others_return_to_its_chain(tmp_path: Path) -> None:
    with started_swarm(
        tmp_path, 4, ["run.rounds=100000", "round.reform_after_s=20.0"], after_rounds=3
    ) as swarm:
        survivor, *lost = swarm.peers
        for peer in lost:
            peer.kill()
        reformed = has_applied(survivor, "reform", 1)
        swarm.wait_until(reformed, what="a reform", timeout_s=2 * ROUND_S)
        more = has_applied(survivor, "quorum", len(rounds(survivor)) + 2)
        swarm.wait_until(more, what="rounds of one peer", timeout_s=ROUND_S)
        revive(swarm)
        tips = {rounds(peer)[-1]["generation"] for peer in swarm.peers}
        swarm.kill()
    assert len(tips) == 1 and tips != {"0"}


def has_applied(peer: LocalPeer, kind: str, number: int) -> Callable[[LocalSwarm], bool]:
    return lambda _: len(applied(peer.events(), kind)) >= number
