"""Adam moments of experts that change owners: zeros after kill -9, handed over by a leaver."""

import signal
from pathlib import Path

import pytest

from swarm.emulation.local_swarm import Event, LocalPeer, LocalSwarm
from tests.scenarios.impatient_peer import PATIENCE_S
from tests.scenarios.swarms import ROUND_S, peer_id, rounds, started_swarm

pytestmark = pytest.mark.scenario

NUM_EXPERTS = 8


def test_experts_go_on_with_zeros_after_a_kill_and_with_their_moments_after_a_leave(
    tmp_path: Path,
) -> None:
    program = "tests.scenarios.impatient_peer"
    with started_swarm(
        tmp_path, 3, ["run.rounds=100000", "merging.alpha=0.0"], program=program, after_rounds=3
    ) as swarm:
        victim, leaver, stays = swarm.peers
        lost = rounds(victim)[-1]["owned"]
        victim.kill()
        assert_taken_with_zeros(swarm, [leaver, stays], lost, peer_id(victim))
        known = len(stays.events())
        leaver.send(signal.SIGTERM)
        assert leaver.wait(ROUND_S) == 0
        given = of_kind(leaver.events(), "moments_given")
        swarm.wait_until(
            lambda _: set(given) <= set(of_kind(stays.events()[known:], "moments_taken")),
            what="the hand-over", timeout_s=ROUND_S,
        )  # fmt: skip
        taken = of_kind(stays.events()[known:], "moments_taken")
        said = leaver.output()
        swarm.kill()
    assert len(given) == NUM_EXPERTS // 2
    assert {e: taken[e]["digest"] for e in given} == {e: given[e]["digest"] for e in given}
    assert f"moments of {len(given)} of {len(given)} experts handed over" in said


def assert_taken_with_zeros(
    swarm: LocalSwarm, left: list[LocalPeer], lost: list[int], victim: str
) -> None:
    def taken() -> dict[int, Event]:
        events = [event for peer in left for event in peer.events()]
        return {e: event for e, event in of_kind(events, "moments_taken").items() if e in lost}

    assert lost
    swarm.wait_until(
        lambda _: set(taken()) == set(lost),
        what="the adoption", timeout_s=4 * ROUND_S + 2 * PATIENCE_S,
    )  # fmt: skip
    for event in taken().values():
        assert event["digest"] is None
        assert event["reason"] == f"zero moments: nothing came from {victim}"


def of_kind(events: list[Event], kind: str) -> dict[int, Event]:
    """The last event of a kind for each expert."""
    return {event["expert"]: event for event in events if event["event"] == kind}
