"""Peers that come without a record: their sources, and their knowledge afterwards [L2].

Policy: chain pruning.
"""

from dataclasses import replace
from random import Random

import pytest

from swarm.emulation.simulator.fault_schedule import build, play
from swarm.emulation.simulator.faults.world import World
from swarm.protocol.chain.gaps import gaps
from swarm.protocol.chain.trust import Chain, proof_problem
from swarm.protocol.messages.messages import Link
from swarm.protocol.values.manifest import FOUNDING_GENERATION
from tests.emulation.simulator.faults.test_scenarios import PEERS, best_tip, scenario

NEW = "p9"
FOUNDER = PEERS[0]


def world_of(*script, heal_s):
    """Five founders, the first one the run's, and one more peer that may join."""
    this = scenario(script, heal_s=heal_s, peers=(*PEERS, NEW))
    this = replace(this, setup=replace(this.setup, founders=PEERS))
    return this, build(this, Random(0))


@pytest.mark.parametrize("survivors", [PEERS[3:], (FOUNDER, PEERS[4])])
def test_a_reform_is_believed_by_newcomers_only_with_the_founder(survivors):
    dead = [peer for peer in PEERS if peer not in survivors]
    this, world = world_of(
        *((20.0, World.kill, (peer,)) for peer in dead),
        (110.0, World.join_shown, (NEW,)),
        heal_s=150.0,
    )
    play(world, this)
    assert best_tip(world).generation != FOUNDING_GENERATION  # checks the set-up
    assert (NEW in world.nodes) == (FOUNDER in survivors)


def test_a_member_without_its_record_stays_outside_a_reform_that_the_founder_has_not_signed():
    last, other = PEERS[3:]
    this, world = world_of(
        *((20.0, World.kill, (peer,)) for peer in PEERS[:3]),
        (110.0, World.lose_disk, (other,)),
        (111.0, World.reboot, (other,)),
        heal_s=150.0,
    )
    play(world, this)
    assert [node.me for node in world.alive()] == [last]


def test_a_newcomer_proves_its_tip_at_once_to_who_has_a_head_that_it_passed_over():
    _, world = world_of((60.0, World.join_shown, (NEW,)), heal_s=61.0)
    world.run(lambda: NEW in world.nodes)
    chain, known = world.nodes[NEW].machine.chain, world.nodes[FOUNDER].machine.chain
    assert chain.tip.height > 5 and len(chain.links) == 2
    assert gaps(chain) == ()
    assert NEW not in best_tip(world).members
    for link in known.links[: chain.tip.height]:
        away = Chain((Link(link.head),))
        path = away.rooted(chain.proof(away.tip.code))
        assert proof_problem(path, chain.tip, away.trusted) is None


def test_a_chain_that_lost_links_on_the_disk_is_whole_again_after_a_start():
    _, world = world_of(heal_s=90.0)
    world.run(lambda: world.now > 60.0)
    node = world.nodes[PEERS[2]]
    world.crash(node.me)
    node.disk.links = (node.disk.links[0], *node.disk.links[-2:])  # lines in between were damaged
    world.reboot(node.me)
    assert gaps(node.machine.chain)
    world.run(lambda: not gaps(node.machine.chain))
    assert all(link.certificate for link in node.disk.links[1:])
    assert gaps(Chain.of(node.disk.record, node.disk.links)) == ()
