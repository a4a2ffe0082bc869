"""Peers that join, leave and come back, through any living peer.

The tests share one swarm and run in order: each begins with the swarm that the one before left.
"""

import json
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from peers.doctor import main as doctor
from swarm.emulation.local_swarm import Event, LocalPeer, LocalSwarm, applied
from tests.scenarios.swarms import (
    ROUND_S,
    assert_one_chain,
    contributes,
    peer_id,
    rounds,
    started_swarm,
    write_run,
)

pytestmark = pytest.mark.scenario

NUM_FOUNDERS = 3
START_S = 30.0
"""Limit for a peer to print its line."""
NOISE_S = 10.0
"""Processes that start on the two cores of a swarm slow every peer down.

Waiting for a joiner would cost 14 s (T_late).
"""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    folder = tmp_path_factory.mktemp("join")
    with started_swarm(
        folder, NUM_FOUNDERS, ["run.rounds=100000", "round.local_steps=12"], after_rounds=4
    ) as started:
        yield started
        started.kill()
        assert_one_chain(started)


def join(swarm: LocalSwarm, via: LocalPeer, *options: str) -> LocalPeer:
    return swarm.add(["--initial-peers", via.join_address(), *options])


def wait_until_contributing(swarm: LocalSwarm, peer: LocalPeer) -> None:
    swarm.wait_until(contributes(peer), what="its contribution", timeout_s=3 * ROUND_S)


def test_the_first_round_has_all_peers_that_the_founder_waited_for(swarm: LocalSwarm) -> None:
    for peer in swarm.peers:
        assert len(rounds(peer)[0]["members"]) == NUM_FOUNDERS


def test_a_joiner_owns_experts_in_the_manifest_after_the_one_that_lists_it(
    swarm: LocalSwarm,
) -> None:
    before = [event for peer in swarm.peers for event in rounds(peer)[1:]]
    olds, began_s = list(swarm.peers), time.time()
    joiner = join(swarm, via=swarm.peers[1])
    joiner.join_address(START_S)
    wait_until_contributing(swarm, joiner)
    me = peer_id(joiner)
    listed = next(e["round"] for e in rounds(olds[0]) if me in e["members"])
    first = next(event for event in rounds(joiner) if event["round"] > listed)
    assert first["owned"]
    during = [e for peer in olds for e in rounds(peer) if e["time"] > began_s]
    assert most_extra_wait_s(during, before) <= usual_s(before, "seconds") + NOISE_S


def usual_s(events: Sequence[Event], field: str) -> float:
    return statistics.median(event[field] for event in events)


def most_extra_wait_s(during: Sequence[Event], before: Sequence[Event]) -> float:
    return max(event["wait_s"] for event in during) - usual_s(before, "wait_s")


def test_options_of_a_joiner_that_differ_from_the_run_are_refused(swarm: LocalSwarm) -> None:
    stranger = LocalPeer(
        9,
        swarm.folder / "stranger",
        ["--initial-peers", swarm.peers[0].join_address(), "--rounds", "7"],
        swarm.environment,
    )
    stranger.arguments += ["--state-dir", str(stranger.folder)]
    stranger.start()
    assert stranger.wait(2 * ROUND_S) == 7
    assert "run.rounds: asked 7, the run has 100000" in stranger.output()
    assert not (stranger.folder / "runs").exists(), "nothing of the run was kept"


def test_a_peer_joins_through_any_member_after_the_founder_was_killed(swarm: LocalSwarm) -> None:
    swarm.peers[0].kill()
    joiner = join(swarm, via=swarm.peers[2])
    wait_until_contributing(swarm, joiner)


def test_the_doctor_says_that_this_machine_can_take_part(swarm: LocalSwarm, tmp_path: Path) -> None:
    address = swarm.peers[2].join_address()
    options = ["--state-dir", str(tmp_path), "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--json"]
    result = CliRunner().invoke(doctor, ["--initial-peers", address, *options])
    said = json.loads(result.stdout)
    levels = {finding["topic"]: finding["level"] for finding in said["findings"]}
    assert (result.exit_code, said["can_take_part"]) == (0, True), said
    assert levels["link"] == levels["reachability"] == levels["clock"] == "good", said
    assert said["down_mbit"] > 0 and len(said["peers"]) >= 2


def test_ctrl_c_leaves_cleanly_and_the_experts_are_adopted_at_once(swarm: LocalSwarm) -> None:
    leaver, others = swarm.peers[-1], swarm.peers[1:-1]
    me, known = peer_id(leaver), rounds(others[0])[-1]["round"]
    leaver.send(signal.SIGINT)
    assert leaver.wait(ROUND_S) == 0

    def is_gone(_: LocalSwarm) -> bool:
        return all(me not in rounds(peer)[-1]["members"] for peer in others)

    swarm.wait_until(is_gone, what="a manifest without the leaver", timeout_s=ROUND_S)
    first = next(e for e in rounds(others[0]) if e["round"] > known and me not in e["members"])
    owned = {
        expert
        for peer in others
        for event in rounds(peer)
        if event["round"] == first["round"]
        for expert in event["owned"]
    }
    dead = rounds(swarm.peers[0])[-1]["owned"]
    assert owned | set(dead) == set(range(8)), "the killed founder's follow a few rounds later"


def test_a_restarted_peer_has_the_port_it_had_and_contributes_again(swarm: LocalSwarm) -> None:
    leaver = swarm.peers[-1]
    address = leaver.join_address()
    swarm.restart(leaver, [])
    assert leaver.join_address() == address
    wait_until_contributing(swarm, leaver)


def test_peers_whose_initial_peers_are_dead_find_each_other_again(swarm: LocalSwarm) -> None:
    """For example, the founder has been away since the others met."""
    dead = swarm.peers[0].join_address()
    swarm.kill()
    _, second, *rest = swarm.peers
    swarm.restart(second, ["--initial-peers", dead])
    second.join_address(START_S)
    for peer in rest:
        swarm.restart(peer, ["--initial-peers", dead])
    for peer in (second, *rest):
        wait_until_contributing(swarm, peer)


def test_joiners_follow_a_founder_that_was_killed_while_it_gathered(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, ["run.rounds=1"])
    with LocalSwarm(tmp_path / "swarm", run_file, NUM_FOUNDERS) as swarm:
        founding = ["--run", str(run_file), "--wait-for-peers", str(NUM_FOUNDERS)]
        founder = swarm.add(founding)
        join = founder.join_options()
        early = swarm.add(join)
        swarm.wait_until(
            lambda _: "the run gathers" in early.output(), what="gathering", timeout_s=ROUND_S
        )
        founder.kill()
        swarm.restart(founder, founding)
        assert founder.join_options() == join
        swarm.add(join)
        swarm.wait_until(LocalSwarm.finished, what="the run", timeout_s=3 * ROUND_S)
        assert {len(applied(peer.events())) for peer in swarm.peers} == {1}


def test_a_joiner_that_was_killed_before_it_had_a_record_needs_no_address_again(
    tmp_path: Path,
) -> None:
    with started_swarm(
        tmp_path, 1, ["run.rounds=100000", "merging.alpha=0.0"], after_rounds=1
    ) as swarm:
        swarm.program = "tests.scenarios.crashing_peer"
        joiner = join(swarm, swarm.peers[0], "--crash", "joined@1")
        assert joiner.wait(ROUND_S) == -signal.SIGKILL
        assert not list(joiner.folder.glob("runs/*/record"))
        swarm.restart(joiner, [])
        wait_until_contributing(swarm, joiner)
