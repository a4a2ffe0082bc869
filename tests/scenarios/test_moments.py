"""Adam moments outlive their peer: in a backup after kill -9, handed over when it leaves."""

import signal
from pathlib import Path

import pytest

from swarm.emulation.local_swarm import Event, LocalPeer, LocalSwarm
from tests.scenarios.swarms import ROUND_S, has_rounds, peer_id, rounds, write_run

pytestmark = pytest.mark.scenario

EVERY = 2
NUM_EXPERTS = 8


def test_experts_go_on_with_their_moments_after_a_kill_and_after_a_leave(tmp_path: Path) -> None:
    overrides = ["run.rounds=100000", "merging.alpha=0.0"]
    run_file = write_run(tmp_path, [*overrides, f"ownership.backup_every_rounds={EVERY}"])
    with LocalSwarm(tmp_path / "swarm", run_file, 3) as swarm:
        swarm.start()
        swarm.wait_until(has_rounds(2 * EVERY + 1), what="backups", timeout_s=2 * ROUND_S)
        victim, *left = swarm.peers
        lost = rounds(victim)[-1]["owned"]
        victim.kill()
        last = max(event["round"] for event in rounds(victim))
        assert_taken_from_the_backup(swarm, left, lost, last)
        leaver, stays = left
        known = len(stays.events())
        leaver.send(signal.SIGTERM)
        assert leaver.wait(ROUND_S) == 0
        given = of_kind(leaver.events(), "moments_given")
        owned = rounds(leaver)[-1]["owned"] or sorted(given)
        swarm.wait_until(
            lambda _: set(given) <= set(of_kind(stays.events()[known:], "moments_taken")),
            what="the hand-over", timeout_s=ROUND_S,
        )  # fmt: skip
        taken = of_kind(stays.events()[known:], "moments_taken")
        said = leaver.output()
        swarm.kill()
    assert len(given) == len(owned) == NUM_EXPERTS // 2
    assert {e: taken[e]["digest"] for e in given} == {e: given[e]["digest"] for e in given}
    assert f"moments of {len(given)} of {len(given)} experts handed over" in said


def assert_taken_from_the_backup(
    swarm: LocalSwarm, left: list[LocalPeer], lost: list[int], last: int
) -> None:
    def taken() -> dict[int, Event]:
        events = [event for peer in left for event in peer.events()]
        return {e: event for e, event in of_kind(events, "moments_taken").items() if e in lost}

    swarm.wait_until(
        lambda _: set(taken()) == set(lost), what="the adoption", timeout_s=4 * ROUND_S
    )
    printed = "".join(peer.output() for peer in left)
    for expert, event in taken().items():
        assert event["reason"].startswith(f"moments of round {event['round']} from the backup here")
        assert last - EVERY <= event["round"] <= last + 1
        assert f"moments expert {expert}: moments of round {event['round']} from" in printed
    assert peer_id(left[0]) != peer_id(left[1])


def of_kind(events: list[Event], kind: str) -> dict[int, Event]:
    """The last event of a kind for each expert."""
    return {event["expert"]: event for event in events if event["event"] == kind}
