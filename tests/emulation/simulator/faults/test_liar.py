"""One member that lies, strangers that forge, and a peer that was away for hundreds of rounds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from swarm.emulation.simulator.fault_schedule import build, run_schedule
from swarm.emulation.simulator.faults.faults import draw
from swarm.emulation.simulator.faults.hostile import ALL_CLASSES
from swarm.emulation.simulator.mutants.extended_mutants import LYING_MUTANTS
from tests.emulation.simulator.schedules import require_fails, require_missed, require_sound
from tests.hostile import test_invented_members

CAUGHT_BY_SCHEDULE = {
    "nothing_is_shown": "P:5",
    "anybody_signs": "P:5",
    "any_proof": "P:2",
    "any_attempt": "P:20",
    "pruned_by_count": "Q:2",
}
"""Mutant -> fault class and seed. After a change of the simulator find new ones with
`scripts/simulate --classes P --mutant NAME`."""


@pytest.mark.parametrize("seed", range(6))
def test_honest_peers_agree_and_go_on_beside_a_liar(seed: int) -> None:
    require_sound("P", seed)


def test_a_liar_that_serves_nobody_fetches_for_itself_and_goes_on() -> None:
    random = Random("P:1")
    scenario = draw(ALL_CLASSES["P"], random)
    lies = frozenset({"unserved", "ghost"})
    world = build(replace(scenario, setup=replace(scenario.setup, lies=lies)), random)
    world.run(lambda: world.now > scenario.heal_s - 1)
    assert world.liar and world.liar.is_lying
    heights = {node.me: node.disk.record.tip.height for node in world.alive()}
    assert heights[world.liar.me] == max(heights.values()) > 5


@pytest.mark.slow
def test_a_peer_comes_back_along_certificates_after_the_whole_membership_changed_thrice() -> None:
    """It was away for some 400 of these rounds. A reform would mean that it gave up."""
    outcome = require_sound("Q", 2)
    assert outcome.rounds > 400
    assert outcome.reforms == 0


BY_DIRECTED_TEST = {
    "returns_at_once": (
        test_invented_members.test_a_convener_that_takes_votes_and_announces_nothing_is_replaced
    ),
}
"""Almost no random schedule needs one of these rules alone."""


@pytest.mark.parametrize("name", BY_DIRECTED_TEST)
def test_a_rule_that_is_removed_fails_its_directed_test(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_fails(BY_DIRECTED_TEST[name], LYING_MUTANTS[name], monkeypatch)


def test_every_rule_has_a_test_that_shows_its_absence() -> None:
    assert CAUGHT_BY_SCHEDULE.keys() | BY_DIRECTED_TEST.keys() == LYING_MUTANTS.keys()
    assert all(where[0] in ALL_CLASSES for where in CAUGHT_BY_SCHEDULE.values())


@pytest.mark.parametrize("name", sorted(CAUGHT_BY_SCHEDULE.keys() - {"pruned_by_count"}))
def test_a_rule_that_is_removed_is_missed(name: str) -> None:
    require_missed(LYING_MUTANTS[name], CAUGHT_BY_SCHEDULE[name])


def test_a_chain_that_is_pruned_by_the_number_of_its_links_proves_too_little() -> None:
    """Its schedule holds with the rule: it is that of the peer that comes back."""
    mutant = LYING_MUTANTS["pruned_by_count"]
    outcome = run_schedule("Q", 2, tested=mutant, mix=mutant.mix)
    assert outcome.violation and outcome.violation.startswith("I20: ")
