"""A member that offers but serves nobody delays one round, and no later ones."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from tests.hostile.emulated_crew import crew_with
from tests.hostile.withholding_peer import WITHHOLD
from tests.scenarios.swarms import finish, has_rounds, peer_id, rounds

pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]

HONEST, ROUNDS = 3, 10
"""Rounds before the attack, and in all. The round in progress when the attack began counts as the
attack's."""
SETTINGS = [
    "round.local_steps=8",
    f"run.rounds={ROUNDS}",
    "run.peers=4",
    "merging.alpha=0.0",
    "wire.part_bytes=4096",  # so that each of the four averages a part, as in runs of any size
]
MOST_LONGER = 1.25
"""Limit, in usual rounds, of the rounds after the first one without the peer."""


def test_a_member_that_serves_nobody_is_left_out(tmp_path: Path) -> None:
    with crew_with("tests.hostile.withholding_peer", tmp_path, SETTINGS, 0.5) as (swarm, controls):
        swarm.wait_until(has_rounds(HONEST), what="honest rounds", timeout_s=240.0)
        (controls / WITHHOLD).touch()
        finish(swarm, 300)
        mute = peer_id(swarm.peers[-1])
        seen = rounds(swarm.peers[0])
    took = {b["round"]: b["time"] - a["time"] for a, b in pairwise(seen)}
    counted = {each["round"]: mute in each["contributors"] for each in seen}
    first = min((number for number in counted if not counted[number]), default=ROUNDS)
    usual_s = median(took[number] for number in range(2, HONEST + 1))
    later = [took[number] for number in range(first + 1, ROUNDS + 1)]
    sys.stdout.write(
        json.dumps(
            {
                "attack": "withheld-values",
                "first": took[first] / usual_s,
                "later": max(later) / usual_s,
            }
        )
        + "\n"
    )
    sys.stdout.write(json.dumps({"took": took, "counted": counted}) + "\n")
    assert first <= HONEST + 2 < ROUNDS - 3, counted
    assert took[first] > usual_s + 10.0, "the attack did not even arrive"
    assert not any(counted[number] for number in range(first, ROUNDS + 1)), counted
    assert max(later) <= MOST_LONGER * usual_s, took
