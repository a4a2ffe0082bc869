"""Strangers that come before the friends, or that work in an open run, decide nothing."""

from pathlib import Path

import pytest

from swarm.emulation.local_swarm import LocalSwarm
from swarm.protocol.membership.membership import TRIAL_ROUNDS
from tests.scenarios.swarms import ROUND_S, finish, peer_id, read_record, rounds, write_run

pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]  # half a minute of real peers

ROUNDS = TRIAL_ROUNDS + 6
"""Enough rounds for each stranger to earn a vote by its work."""
NUM_FRIENDS = 3


def test_strangers_that_come_first_found_nothing_and_stay_under_a_third(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, [f"run.rounds={ROUNDS}", "merging.alpha=0.0"])
    founding = ["--run", str(run_file), "--wait-for-peers", str(NUM_FRIENDS)]
    with LocalSwarm(tmp_path / "swarm", run_file, NUM_FRIENDS) as swarm:
        founder = swarm.add(founding)
        whole = founder.join_options()
        strangers = [swarm.add(whole[:2]) for _ in range(3)]
        swarm.wait_until(
            lambda _: "3 without the invitation" in founder.output(),
            what="the strangers",
            timeout_s=ROUND_S,
        )
        assert not founder.events(), "the run has begun without the friends"
        for stranger in strangers:
            assert "lacks: start this peer with the founder's whole line" in stranger.output()
        friends = [founder, *(swarm.add(whole) for _ in range(NUM_FRIENDS - 1))]
        finish(swarm, ROUNDS * ROUND_S)
        voters = {peer_id(peer) for peer in friends}
        tip = read_record(founder).tip
        counted = [
            sum(peer_id(stranger) in event["contributors"] for event in rounds(founder))
            for stranger in strangers
        ]
    assert tip.vouched == voters
    assert min(counted) > TRIAL_ROUNDS, "the attack did not even arrive"
    assert len(tip.voters - voters) == 1 and 3 * len(tip.voters - voters) < len(tip.voters)
