"""Scripts of two faults that once broke a draft of the protocol."""

from dataclasses import replace
from random import Random

import pytest

from swarm.config import MergingConfig
from swarm.emulation.simulator.fault_schedule import build, play
from swarm.emulation.simulator.faults.faults import CALM_TIMERS, Scenario
from swarm.emulation.simulator.faults.world import Weather, World
from swarm.emulation.simulator.mutants.mutants import MUTANTS
from swarm.emulation.simulator.peers.participant import Character, Setup, UnderTest
from swarm.emulation.simulator.symbols.values import Violation
from swarm.protocol.rounds import Rules
from swarm.protocol.rounds.listener import Listener
from swarm.protocol.values.manifest import FOUNDING_GENERATION

PEERS = ("p0", "p1", "p2", "p3", "p4")
UNITS = dict.fromkeys(("shared.0", "expert.0", "expert.1", "expert.2"), 100)
RULES = Rules(
    run="run",
    num_experts=3,
    owners_per_expert=1,
    merging=MergingConfig(),
    unit_bytes=UNITS,
    unit_codec=dict.fromkeys(UNITS, "fp32"),
    experts_every=1,
    local_steps_at=lambda _: 2,
    batch_tokens_at=lambda _: 8,
    sequence_length=4,
    is_dealt=True,
)


def scenario(script, *, heal_s, slow=(), peers=PEERS):
    """Founders on good links. The slow ones need four times as long for local steps."""
    characters = {peer: Character(local_steps_s=12.0 if peer in slow else 3.0) for peer in peers}
    return Scenario(
        setup=Setup(peers, RULES, CALM_TIMERS, characters),
        calm_timers=CALM_TIMERS,
        weather=Weather(delay_s=0.05),
        rough={},
        stable=(),
        heal_s=heal_s,
        script=tuple(script),
    )


def run(this, tested=None, seed=0):
    world = build(this, Random(seed), tested=tested)
    play(world, this)
    return world


def best_tip(world):
    return max((node.disk.record.tip for node in world.alive()), key=lambda tip: tip.code)


FAST_MINORITY = scenario(
    [
        (20.0, World.split, (((PEERS[0], PEERS[1], PEERS[2]), (PEERS[3], PEERS[4])),)),
        (300.0, World.split, ((),)),
    ],
    heal_s=301.0,
    slow=PEERS[:3],
)


def test_a_fast_minority_that_was_cut_off_does_not_roll_the_majority_back():
    world = run(FAST_MINORITY)
    manifests = world.invariants.manifests.values()
    of_minority = [m for m in manifests if m.generation != FOUNDING_GENERATION]
    before_healing = [
        m.tokens
        for m in manifests
        if m.generation == FOUNDING_GENERATION and world.invariants.first_seen_s[m.digest] < 300
    ]
    # Checks the set-up: the minority has continued, and is further than the majority.
    assert max(m.tokens for m in of_minority) > max(before_healing)
    assert best_tip(world).generation == FOUNDING_GENERATION


def test_fork_choice_by_tokens_would_never_bring_them_together():
    # The majority is not stalled, so it does not follow the richer reform [F2]. The minority sees
    # no better chain than its own.
    with pytest.raises(Violation, match="I5"):
        run(FAST_MINORITY, MUTANTS["most_tokens_win"])


MAJORITY_RETURNS = scenario(
    [(30.0, World.crash, (peer,)) for peer in PEERS[:3]]
    + [(230.0, World.reboot, (peer,)) for peer in PEERS[:3]],
    heal_s=231.0,
)


class DeafAtBoot(Listener):
    """Sends as soon as it runs, without [B1]."""

    def have_spoken(self):
        return True


def survivors_rounds(world):
    """Rounds of the reformed generation before the others came back: (all, kept)."""
    manifests = world.invariants.manifests.values()
    before = [
        m
        for m in manifests
        if m.generation != FOUNDING_GENERATION and world.invariants.first_seen_s[m.digest] < 230
    ]
    tip = best_tip(world)
    return before, [m for m in before if world.invariants.descends(tip, m)]


@pytest.mark.parametrize("seed", range(5))
def test_a_majority_that_comes_back_goes_on_with_the_survivors_chain(seed):
    made, kept = survivors_rounds(run(MAJORITY_RETURNS, seed=seed))
    assert len(made) > 5
    assert kept == made


def test_a_majority_that_does_not_listen_first_drops_the_survivors_work():
    kept = [
        len(survivors_rounds(run(MAJORITY_RETURNS, UnderTest(listener=DeafAtBoot), seed))[1])
        for seed in range(5)
    ]
    assert 0 in kept


def roll_back(world, ranks):
    """Crashes the peers of these ranks and leaves them a record that may lack a vote [P5]."""
    order = best_tip(world).order
    for rank in ranks:
        node = world.nodes[order[rank]]
        node.crash()
        record = node.disk.record
        node.disk.record = replace(
            record, promised=None, accepted=None, abstain_until_height=record.tip.height + 2
        )
        world.at(1.0, world.reboot, node.me)


@pytest.mark.parametrize(
    ("num_peers", "ranks"), [(1, (0,)), (2, (0,)), (2, (1,)), (2, (0, 1)), (3, (0,)), (3, (0, 1))]
)
def test_peers_that_abstain_never_stop_a_swarm_for_ever(num_peers, ranks):
    script = [(30.0, roll_back, (ranks,))]
    world = run(scenario(script, heal_s=31.0, peers=PEERS[:num_peers]))
    assert len(world.alive()) == num_peers  # and all are on one chain, or `play` would have raised
