"""Peers that die or stop in the middle of a round: the others finish it, and all stay on one chain.

The tests share one swarm; each begins by starting again whom the one before left dead.
"""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm.emulation.local_swarm import Event, LocalPeer, LocalSwarm, applied, digests_by_height
from tests.scenarios.swarms import ROUND_S, contributes, has_rounds, peer_id, rounds, write_run

pytestmark = pytest.mark.scenario

TIMEOUTS_S = 60.0
"""A few time-outs of the protocol (5 to 14 s each), on a machine that is busy with other things."""
ROUNDS_BEFORE = 5
"""A peer that is to die takes part in some rounds first."""
SILENT_LIMIT = 3
"""K: rounds in which a dead peer stays a member, and an owner of what nobody renews."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    folder = tmp_path_factory.mktemp("faults")
    run_file = write_run(folder, ["run.rounds=100000", "merging.interval_steps=24"])
    with LocalSwarm(
        folder / "swarm", run_file, 4, program="tests.scenarios.crashing_peer"
    ) as started:
        started.start()
        started.wait_until(has_rounds(2), what="two rounds", timeout_s=2 * ROUND_S)
        yield started
        started.kill()
        assert_one_chain(started)


def assert_one_chain(swarm: LocalSwarm) -> None:
    by_height = digests_by_height([peer.events() for peer in swarm.peers])
    assert {len(digests) for digests in by_height.values()} == {1}


def start_with_crash(swarm: LocalSwarm, peer: LocalPeer, place: str) -> None:
    """Starts a peer that will die at a place of a later round, once it contributes again."""
    revive(swarm, but=peer)
    peer.kill()
    other = next(other for other in swarm.peers if other.alive)
    swarm.restart(
        peer, ["--initial-peers", other.join_address(), "--crash", f"{place}@+{ROUNDS_BEFORE}"]
    )
    swarm.wait_until(contributes(peer), what="its return", timeout_s=3 * ROUND_S)


def revive(swarm: LocalSwarm, but: LocalPeer | None = None) -> None:
    """Starts again whoever is dead and waits until they contribute."""
    dead = [peer for peer in swarm.peers if not peer.alive and peer is not but]
    other = next(other for other in swarm.peers if other.alive)
    for peer in dead:
        swarm.restart(peer, ["--initial-peers", other.join_address()])
    for peer in dead:
        swarm.wait_until(contributes(peer), what="its return", timeout_s=3 * ROUND_S)


def survivors_of(swarm: LocalSwarm, dead: LocalPeer) -> list[LocalPeer]:
    return [peer for peer in swarm.peers if peer is not dead]


def time_of_next_round(swarm: LocalSwarm, gone: LocalPeer) -> float:
    """Seconds until all others applied a round that they finished without a peer."""
    began_s = time.monotonic()
    known = max(rounds(peer)[-1]["round"] for peer in swarm.peers)

    def went_on(swarm: LocalSwarm) -> bool:
        return all(
            any(e["round"] > known and peer_id(gone) not in e["contributors"] for e in rounds(peer))
            for peer in survivors_of(swarm, gone)
        )

    swarm.wait_until(went_on, what="a round without the dead", timeout_s=2 * TIMEOUTS_S)
    return time.monotonic() - began_s


@pytest.mark.parametrize(
    "place",
    [
        "offered",  # a contributor whose values nobody can fetch any more
        "reducing",  # a reducer
        pytest.param("accepting", marks=pytest.mark.exhaustive),  # an acceptor
        "proposing",  # a convener with a complete roster
        "deciding",  # a convener that alone knows of the decision
    ],
)
def test_the_others_finish_the_round_without_a_peer_that_dies(
    swarm: LocalSwarm, place: str
) -> None:
    victim = swarm.peers[-1]
    start_with_crash(swarm, victim, place)
    swarm.wait_until(lambda _: not victim.alive, what=f"death at {place}", timeout_s=2 * ROUND_S)
    assert time_of_next_round(swarm, victim) < TIMEOUTS_S
    assert_one_chain(swarm)


def test_experts_of_a_dead_owner_are_adopted_within_a_few_rounds(swarm: LocalSwarm) -> None:
    victim = swarm.peers[-1]
    start_with_crash(swarm, victim, "offering")
    swarm.wait_until(lambda _: not victim.alive, what="its death", timeout_s=2 * ROUND_S)
    died_in = max(rounds(peer)[-1]["round"] for peer in swarm.peers)
    left = survivors_of(swarm, victim)

    def adopted(_: LocalSwarm) -> bool:
        return {e for peer in left for e in rounds(peer)[-1]["owned"]} == set(range(8))

    swarm.wait_until(adopted, what="the adoption", timeout_s=(SILENT_LIMIT + 2) * TIMEOUTS_S)
    first = min(e["round"] for peer in left for e in rounds(peer) if owns_more(e, died_in))
    assert first - died_in <= SILENT_LIMIT + 1
    assert_one_chain(swarm)


def owns_more(event: Event, after: int) -> bool:
    return bool(event["round"] > after and len(event["owned"]) > 8 // 4)


def test_a_stopped_peer_is_left_behind_and_catches_up(swarm: LocalSwarm) -> None:
    revive(swarm)
    stopped = swarm.peers[0]
    stopped.send(signal.SIGSTOP)
    try:
        assert time_of_next_round(swarm, stopped) < TIMEOUTS_S
        time_of_next_round(swarm, stopped)
    finally:
        stopped.send(signal.SIGCONT)
    swarm.wait_until(contributes(stopped), what="its return", timeout_s=2 * ROUND_S)
    assert_one_chain(swarm)


def test_a_peer_killed_again_and_again_while_it_starts_comes_back(swarm: LocalSwarm) -> None:
    revive(swarm)
    victim = swarm.peers[2]
    for alive_s in (0.5, 2.0, 4.0):
        victim.kill()
        swarm.restart(victim, ["--initial-peers", swarm.peers[0].join_address()])
        time.sleep(alive_s)
    swarm.wait_until(contributes(victim), what="its return", timeout_s=3 * ROUND_S)
    assert len(applied(victim.events())) > 2


@pytest.mark.exhaustive  # T_reform passes twice
def test_a_lone_survivor_goes_on_and_the_others_return_to_its_chain(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, ["run.rounds=100000", "round.reform_after_s=20.0"])
    with LocalSwarm(tmp_path / "swarm", run_file, 4) as swarm:
        swarm.start()
        swarm.wait_until(has_rounds(3), what="three rounds", timeout_s=2 * ROUND_S)
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
