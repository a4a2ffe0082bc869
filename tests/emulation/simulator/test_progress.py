"""The check that all peers without faults make rounds [I3]."""

from dataclasses import replace

import pytest

from swarm.emulation.simulator.faults.world import World
from swarm.emulation.simulator.peers.participant import UnderTest
from swarm.emulation.simulator.symbols.values import Violation
from swarm.protocol.rounds.adopter import Adopter
from swarm.protocol.rounds.collector import Collector
from swarm.protocol.values.manifest import FOUNDING_GENERATION
from tests.emulation.simulator.faults.test_scenarios import PEERS, best_tip, run, scenario

SPARED, VICTIM = PEERS[:4], PEERS[4]
ISOLATED = replace(
    scenario(
        [(10.0, World.split, ((SPARED, (VICTIM,)),)), (150.0, World.split, ((),))], heal_s=151.0
    ),
    stable=SPARED,
)
"""One peer is cut off for 140 s, so that it reforms and continues alone."""


class _WaitsForAll(Collector):
    """A convener that closes no roster without an offer of every member."""

    def _why_close_roster(self, campaign):
        all_offered = campaign.in_time >= self.tip.members.keys()
        return super()._why_close_roster(campaign) if all_offered else None


class _FirstNeverApplies(Adopter):
    """One of the spared peers stays at its first tip."""

    def _may_apply(self, pursuit):
        return self.me != SPARED[0] and super()._may_apply(pursuit)


def test_a_spared_majority_goes_on_beside_a_victim_that_goes_on_alone():
    world = run(ISOLATED)
    of_victim = [
        manifest
        for manifest in world.invariants.manifests.values()
        if manifest.generation != FOUNDING_GENERATION
    ]
    assert len(of_victim) > 10  # checks the set-up
    assert best_tip(world).generation == FOUNDING_GENERATION


def test_the_rounds_of_a_victim_are_no_progress_of_the_majority():
    with pytest.raises(Violation, match=r"I3: .* most of"):
        run(ISOLATED, UnderTest(collector=_WaitsForAll))


def test_a_single_spared_peer_that_stands_still_is_noticed():
    with pytest.raises(Violation, match=rf"I3: .* at {SPARED[0]}"):
        run(ISOLATED, UnderTest(adopter=_FirstNeverApplies))
