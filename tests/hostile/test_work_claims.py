"""A member that claims steps of 1 ms, and counts its whole deal, gains little."""

from itertools import pairwise
from pathlib import Path

import pytest

from swarm.protocol.values.work import num_samples, weights
from tests.hostile.emulated_crew import crew_with
from tests.scenarios.swarms import finish, peer_id, read_record, rounds

pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]

ROUNDS = 6
SECONDS, STEP_S = 4.0, 0.2
"""Seconds of the steps of a round, and of one step."""
SETTINGS = [
    f"round.seconds={SECONDS}",
    "optimizer.schedule_steps=600",
    f"run.rounds={ROUNDS}",
    "run.peers=4",
    "merging.alpha=0.0",
]


def test_false_seconds_and_tokens_move_neither_means_nor_schedule(tmp_path: Path) -> None:
    with crew_with("tests.hostile.overclaiming_peer", tmp_path, SETTINGS, STEP_S) as (swarm, _):
        finish(swarm, 300)
        *honest, liar = map(peer_id, swarm.peers)
        seen = [{e["round"]: e for e in rounds(peer)} for peer in swarm.peers]
        tip = read_record(swarm.peers[0]).tip
    figures = {"work": dict(tip.work), "tokens": tip.tokens, "step": tip.step}
    assert set(tip.contributors) == {*honest, liar}, figures
    usual = sorted(tip.work[peer] for peer in honest)
    assert tip.work[liar] > 1.1 * usual[-1], "the attack did not even arrive"
    # Weights: at most 1.5 times the others', and a third.
    weighed = weights(tip.work, tip.contributors, tip.trusted)
    assert weighed is not None
    mine = weighed[tip.contributors.index(liar)]
    assert mine <= 1.5 * usual[1], figures
    assert 3 * mine <= sum(weighed), figures
    # The schedule: by trained samples, including the liar's own.
    ends = [seen[0][number]["tokens"] for number in range(1, ROUNDS + 1)]
    for number, (before, after) in enumerate(pairwise(ends), 2):
        done = sum(each[number]["trained_tokens"] for each in seen)
        assert after - before == pytest.approx(done, rel=0.05), (number, done, ends, figures)
    assert tip.step == tip.tokens // (4 * 128)
    # The text: at most 4 times as much as another peer reads.
    dealt = {peer: num_samples(tip.dealt[peer]) for peer in tip.members}
    assert dealt[liar] * 32 <= 4.5 * SECONDS / STEP_S * 128, dealt
