"""The extended model: lost disks, many peers, clocks and one-way links, large blobs, moments."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest

from swarm.emulation.simulator.fault_schedule import build, play, run_schedule
from swarm.emulation.simulator.faults.extended import EXTENDED
from swarm.emulation.simulator.faults.faults import CALM_TIMERS, draw
from swarm.emulation.simulator.faults.world import World
from swarm.emulation.simulator.mutants.extended_mutants import (
    ALL_MUTANTS,
    EXTENDED_MUTANTS,
    SLOW_LINKS,
)
from swarm.emulation.simulator.peers.bulk_transfers import ANSWER_WITHIN_S
from swarm.emulation.simulator.peers.participant import UnderTest
from swarm.emulation.simulator.symbols.values import Violation
from swarm.protocol.chain.chain_record import abstains
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import FOUNDING_GENERATION
from tests.emulation.simulator.faults.test_scenarios import PEERS, best_tip, run, scenario
from tests.emulation.simulator.schedules import require_fails, require_missed, require_sound
from tests.protocol.messages import (
    test_rounds_fetching,
    test_rounds_forks,
    test_rounds_many,
    test_rounds_takeover,
    test_rounds_trainees,
)

SEEDS = [
    pytest.param(range(12), id="few"),
    pytest.param(range(12, 60), id="many", marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("fault_class", sorted(EXTENDED))
def test_no_extended_schedule_breaks_an_invariant(fault_class, seeds):
    for seed in seeds:
        require_sound(fault_class, seed)


CAUGHT = {
    "rolled_back_votes": "F:6",
    "lost_record_votes": "F:219",
    "failed_sync_awaited": "F:4",
    "four_are_a_quorum": "G:0",
    "wall_clock": "H:1",
    "clock_stops_in_sleep": "H:5",
    "goes_on_after_stand_still": "H:4",
    "reform_although_quorum": "M:5",  # a peer that nobody hears still hears others
    "transfer_limit_fixed": "J:20",
    "timers_not_adapted": "J:8",
    "hand_over_not_awaited": "K:2",
    "older_moments_taken": "K:4",
    "waits_for_moments": "K:1",
    "weights_ignored": "N:0",
    "whole_deals_count": "N:0",
    "holes_forgotten": "N:0",
    "dealt_anew_at_reform": "N:111",
    "all_are_kept": "V:31000138",
    "vote_at_once": "V:0",
    "all_that_have_earned_it": "V:1",
    "any_number_unvouched": "V:1",
    "trainees_count": "V:0",
    "any_room": "C:0",
}
"""Mutant -> fault class and seed. After a change of the simulator find new ones with
`scripts/simulate --classes F --mutant NAME`."""


@pytest.mark.parametrize("name", CAUGHT)
def test_a_removed_rule_of_the_extended_model_breaks_an_invariant(name):
    require_missed(ALL_MUTANTS[name], CAUGHT[name])


BY_DIRECTED_TEST = {
    "heard_by_chance": test_rounds_many.test_a_convener_that_dies_is_replaced_among_many,
    "trainees_reform": (
        test_rounds_trainees.test_a_trainee_keeps_what_was_decided_for_a_voter_that_has_yet_to_hear_of_it
    ),
    "silent_sources_awaited": (
        test_rounds_many.test_a_contributor_that_loses_power_while_values_are_fetched_is_soon_left_out
    ),
    "late_by_themselves": (
        test_rounds_many.test_voters_that_are_all_a_little_late_are_counted_together
    ),
    "convenes_meanwhile": (
        test_rounds_many.test_who_fetches_what_was_decided_does_not_convene_meanwhile
    ),
    "unheard_goes_first": (
        test_rounds_takeover.test_a_convener_that_hears_but_is_not_heard_lets_all_others_go_first
    ),
    "last_ones_keep_step": test_rounds_takeover.test_conveners_that_got_no_answers_begin_apart,
    "newest_is_fetched": (
        test_rounds_forks.test_what_is_being_made_durable_is_applied_before_anything_newer_is_fetched
    ),
    "those_behind_are_silent": (
        test_rounds_trainees.test_a_trainee_that_fetches_longer_than_a_lone_voter_trains_is_counted_in_the_end
    ),
    "fetching_is_worth_nothing": partial(
        test_rounds_fetching.test_who_fetched_the_tip_for_long_is_waited_for, 20.0
    ),
}


@pytest.mark.parametrize("name", BY_DIRECTED_TEST)
def test_a_removed_rule_of_the_extended_model_fails_its_directed_test(name, monkeypatch):
    require_fails(BY_DIRECTED_TEST[name], ALL_MUTANTS[name], monkeypatch)


def test_every_extended_mutant_is_caught_by_something():
    by_scenario = {
        "abstains_for_two_heights",
        "lone_abstainer_votes",
        "members_alone_abstain",
        "reform_ends_abstention",
    }
    caught = CAUGHT.keys() | BY_DIRECTED_TEST.keys() | by_scenario
    assert caught >= EXTENDED_MUTANTS.keys()


# ---------------------------------------------------------------- peers without their record


class _Stale:
    """A peer that lost its record is shown a tip four heights before its last vote."""

    def __init__(self):
        self.stage = 0
        self.cut_at = 0

    def look(self, world):
        voter, other, third, far, near = PEERS
        height = {peer: node.disk.record.tip.height for peer, node in world.nodes.items()}
        if self.stage == 0:
            self.cut_at = height[far]
            world.split(((voter, other, third, near), (far,)))
            self.stage = 1
        elif self.stage == 1 and height[near] == height[voter] >= self.cut_at + 3:
            world.split(((voter, other, third), (far,), (near,)))
            self.stage = 2
        elif self.stage == 2 and min(height[p] for p in (voter, other, third)) > height[near]:
            world.lose_disk(voter)
            world.crash(other)
            world.crash(third)
            world.split(((voter, far), (other, third), (near,)))
            world.at(0.1, world.reboot, voter)
            world.at(9.0, world.split, ((voter, far, near), (other, third)))
            world.at(40.0, world.reboot, other)
            world.at(40.0, world.reboot, third)
            self.stage = 3
        if self.stage < 3:
            world.at(0.05, self.look, world)


def shown_a_stale_tip(tested=None):
    stale = _Stale()
    world = run(scenario([(20.0, lambda world: stale.look(world), ())], heal_s=200.0), tested)
    assert stale.stage == 3
    return world


def test_a_peer_without_its_record_does_not_vote_again_where_it_may_have_voted():
    assert len(shown_a_stale_tip().alive()) == len(PEERS)


def test_to_abstain_for_two_heights_is_not_enough_without_a_record():
    with pytest.raises(Violation, match="I1"):
        shown_a_stale_tip(EXTENDED_MUTANTS["abstains_for_two_heights"])


class _ShownAnotherReform:
    """Two peers reform. One continues alone, forgets that, and is shown the founder's reform."""

    def __init__(self):
        self.reform = self.last = self.other = None

    def look(self, world):
        founder, _, _, *pair = PEERS
        tips = [world.disks[peer].record.tip for peer in pair]
        if self.reform is None and tips[0].lineage and tips[0].digest == tips[1].digest:
            self.reform = tips[0]
            self.last, self.other = self.reform.order
            world.crash(self.other)
        elif self.reform and world.disks[self.last].record.tip.height > self.reform.height:
            world.lose_disk(self.last)
            world.split(((founder, self.last), (self.other,)))
            world.at(0.1, world.reboot, self.last)
            world.at(5.0, world.reboot, self.other)
            world.at(10.0, world.split, ())
            return
        world.at(0.05, self.look, world)


def shown_another_reform(tested=None):
    founder, *dead, _, _ = PEERS
    shown = _ShownAnotherReform()
    script = [
        *((10.0, World.kill, (peer,)) for peer in dead),
        (10.0, World.split, (((founder,), PEERS[3:]),)),
        (11.0, lambda world: shown.look(world), ()),
    ]
    world = run(scenario(script, heal_s=200.0), tested)
    assert shown.reform is not None
    return world


def test_a_voter_of_a_reform_that_is_shown_another_chain_abstains():
    assert len(shown_another_reform().alive()) == 3


def test_a_voter_of_a_reform_that_passed_for_a_newcomer_would_decide_a_height_twice():
    with pytest.raises(Violation, match="I1"):
        shown_another_reform(EXTENDED_MUTANTS["members_alone_abstain"])


def lone_member_forgets(tested=None):
    """The only member loses its disk. A stranger that follows it has an older tip."""
    script = [
        (0.1, World.split, ((("p0",), ("p1",)),)),
        (10.0, World.join, ("p1",)),
        (20.0, World.lose_disk, ("p0",)),
        (20.1, World.split, ((),)),
        (20.2, World.reboot, ("p0",)),
    ]
    this = scenario(script, heal_s=21.0, peers=("p0", "p1"))
    return run(replace(this, setup=replace(this.setup, founders=("p0",))), tested)


def test_a_lone_member_without_its_record_goes_on_in_a_generation_of_its_own():
    world = lone_member_forgets()
    assert best_tip(world).generation != FOUNDING_GENERATION


def test_a_lone_member_that_voted_without_its_record_would_decide_a_height_twice():
    with pytest.raises(Violation, match="I1"):
        lone_member_forgets(EXTENDED_MUTANTS["lone_abstainer_votes"])


def lone_member_comes_back(tested=None):
    """It forgets, reforms after an old tip, and then meets its former chain."""
    script = [
        (0.1, World.split, ((("p0",), ("p1",), ("p2",)),)),
        (10.0, World.join, ("p1",)),
        (20.0, World.join, ("p2",)),
        (30.0, World.lose_disk, ("p0",)),
        (30.1, World.split, ((("p0", "p1"), ("p2",)),)),
        (30.2, World.reboot, ("p0",)),
        (40.0, World.split, ((),)),
    ]
    this = scenario(script, heal_s=41.0, peers=PEERS[:3])
    return run(replace(this, setup=replace(this.setup, founders=("p0",))), tested)


def test_a_vote_regained_in_a_generation_of_its_own_is_none_in_the_one_before():
    world = lone_member_comes_back()
    assert best_tip(world).generation != FOUNDING_GENERATION


def test_a_reform_that_gave_back_all_votes_would_decide_a_height_twice():
    with pytest.raises(Violation, match="I1"):
        lone_member_comes_back(EXTENDED_MUTANTS["reform_ends_abstention"])


def forget(world, name):
    """Crashes a peer and leaves it a record that may lack votes at any height."""
    node = world.nodes[name]
    node.crash()
    node.disk.record = replace(
        node.disk.record, promised=None, accepted=None, abstain_until_height=2**62
    )
    world.at(1.0, world.reboot, name)


@pytest.mark.parametrize("forgetful", [PEERS[:1], PEERS[:2], PEERS[:3]])
def test_an_abstention_ends_once_the_peer_has_contributed_or_reformed(forgetful):
    script = [(30.0, forget, (peer,)) for peer in forgetful]
    world = run(scenario(script, heal_s=31.0, peers=PEERS[:3]))
    world.run(lambda: best_tip(world).round > 20)
    records = [world.nodes[peer].disk.record for peer in forgetful]
    assert not any(abstains(record) for record in records)


# ---------------------------------------------------------------- timers, clocks, tried values


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dead", PEERS[:2])
def test_either_of_two_goes_on_alone_however_long_a_vote_may_take(dead, seed):
    timers = replace(CALM_TIMERS, vote_s=30.0, attempt_s=150.0)
    this = scenario([(30.0, World.kill, (dead,))], heal_s=31.0, peers=PEERS[:2])
    slow = replace(this, setup=replace(this.setup, timers=timers), calm_timers=timers)
    (survivor,) = {*PEERS[:2]} - {dead}
    assert best_tip(run(slow, seed=seed)).contributors == (survivor,)


def test_a_wall_clock_that_jumps_changes_nothing():
    jumps = 0
    for seed in range(8):
        tips = []
        for with_jumps in (True, False):
            random = Random(f"H:{seed}")
            this = draw(EXTENDED["H"], random)
            kept = [line for line in this.script if with_jumps or line[1] is not World.skew]
            jumps += len(this.script) - len(kept)
            world = build(replace(this, script=tuple(kept)), random, tested=UnderTest())
            play(world, this)
            tips.append((world.now, best_tip(world).digest))
        assert tips[0] == tips[1]
    assert jumps > 5


def test_the_extended_schedules_hold_what_they_are_meant_to_try():
    lines = []
    for fault_class, seed in (("F", 2), ("G", 0), ("H", 0), ("K", 2), ("K", 31)):
        run_schedule(fault_class, seed, trace=lines.append)
    text = "\n".join(lines)
    happenings = (
        "loses its state directory",
        "has its record rolled back",
        "wall clock of",
        "p8 boots",
        "continues with moments of round 2",
        "continues with moments of round None",
    )
    assert [what for what in happenings if what not in text] == []


def test_peers_adapt_their_timers_to_slow_links_each_to_its_own():
    seen: set[Timers] = set()
    for seed in range(4):
        random = Random(f"J:{seed}")
        this = draw(SLOW_LINKS, random)  # on faster links all timers have their smallest values
        slowest = min(c.up_bytes_per_s for c in this.setup.characters.values())
        largest = sum(this.setup.rules.unit_bytes.values())
        assert largest / slowest > ANSWER_WITHIN_S / 2
        world = build(this, random)
        play(world, this)
        timers = {node.machine.timers for node in world.alive()}
        assert len(timers) == len(world.alive())
        seen |= timers
    assert max(timers.vote_s for timers in seen) > 2 * CALM_TIMERS.vote_s
