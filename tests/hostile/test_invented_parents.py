"""A stranger claims a decision whose parents it has invented.

Before proofs, one such message made three honest peers adopt an all-zero model within a second,
and `swarm-export` write one. Limits: nothing forged is applied, fetched for export or made durable,
in 100 tries; every round continues with the same digest everywhere.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from swarm.emulation.local_swarm import applied, summary
from swarm.protocol.messages.messages import Commit, Link
from swarm.protocol.values.manifest import Kind, Manifest
from tests.hostile.forger import Forger, forger
from tests.protocol.round_pump import header_of
from tests.scenarios.swarms import ROUND_S, finish, started_swarm

pytestmark = pytest.mark.scenario

ROUNDS = 12
TRIES = 20
"""Tries of each of the five kinds."""


def forgeries(liar: Forger, tip: Manifest, number: int) -> list[Commit]:
    """One COMMIT of every kind."""
    far = {"height": tip.height + 100 + number, "round": tip.round + 100 + number}
    invented = liar.zeros(tip, height=far["height"] - 1, round=far["round"] - 1)
    child = liar.zeros(tip, parent=invented.digest, **far)
    follower = liar.zeros(tip, parent=tip.digest, height=tip.height + 1, round=tip.round + 1)
    generation = f"{number:032x}"
    lineage = (*tip.lineage, (tip.height, (1, generation)))
    reform = replace(
        liar.zeros(tip, parent=tip.digest), kind=Kind.REFORM, generation=generation,
        lineage=lineage, sources={}, work={}, seed=None,
    )  # fmt: skip
    proof = (Link(invented.head), Link(child.head, liar.sign(child), invented.head))
    jump = (Link(tip.head), Link(child.head, liar.sign(child), invented.head))
    return [
        liar.commit(child, parent=invented),
        liar.commit(child, parent=invented, path=proof),
        liar.commit(child, parent=invented, path=jump),
        liar.commit(follower, parent=tip),
        liar.commit(reform, parent=tip),
    ]


def test_nothing_that_a_stranger_says_was_decided_is_believed(tmp_path: Path) -> None:
    with started_swarm(tmp_path, 3, [f"run.rounds={ROUNDS}"], after_rounds=1) as swarm:
        with forger([swarm.peers[0].join_address()]) as liar:
            heard, forged = 0, set()
            tip = liar.look()
            for number in range(TRIES):
                tip = tip if number % 5 else liar.look()
                assert tip.digest not in forged, "a newcomer was shown a forged tip"
                for commit in forgeries(liar, tip, number):
                    forged.add(commit.manifest.digest)
                    heard += liar.say(header_of(commit.manifest), commit)
            assert heard > 100, "few members accepted it"
            assert len(forged) > 40
        finish(swarm, ROUNDS * ROUND_S)
        histories = [peer.events() for peer in swarm.peers]
        verdict = summary(swarm)
    assert verdict["digests_per_height"] == [1] * len(verdict["digests_per_height"])
    told = [[event["round"] for event in applied(events, "quorum")] for events in histories]
    assert set().union(*told) == set(range(1, ROUNDS + 1)), "each was decided"
    for events, rounds in zip(histories, told, strict=True):
        # A peer that hears of the next height during a fetch fetches that height instead [X1].
        assert rounds == sorted(set(rounds)) and rounds[-1] == ROUNDS
        assert not {event["digest"] for event in events if "digest" in event} & forged
    assert sum(events[-1]["refused"].get("false_proof", 0) for events in histories) > 0
