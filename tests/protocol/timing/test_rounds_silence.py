"""Peers that vanish silently while a round waits for their values [C6] (roster repair)."""

from __future__ import annotations

import pytest

from swarm.protocol.timing.deadlines import Timers
from tests.protocol.round_pump import Pump, in_training

PHASES = [(12.0, 6.0), (40.0, 20.0), (1000.0, 30.0)]
"""Limits of a phase, and of a peer's silence in it."""


def timers(phase_s: float) -> Timers:
    """Timers of a run with long phases, in which conveners never count as dead."""
    return Timers(reduce_s=phase_s, vote_s=phase_s, attempt_s=10 * phase_s, heartbeat_s=2000.0)


def until_stage(pump: Pump, stage: str) -> None:
    """Runs until the convener has reached this stage."""
    convener = pump.nodes[pump.first].machine
    assert pump.run(pump.now + 20.0, lambda: convener.campaign.stage == stage)


@pytest.mark.parametrize(("phase_s", "limit_s"), PHASES)
def test_a_silent_reducer_is_not_waited_for_until_t_red_is_over(
    phase_s: float, limit_s: float
) -> None:
    pump = in_training("ABCD", timers=timers(phase_s))
    dead = pump.last
    pump.stall_inputs = lambda peer, source: peer == dead  # it dies before it has fetched anything
    until_stage(pump, "reduce")
    pump.kill(dead)
    assert limit_s < pump.run_to_height(3, pump.others(dead)) < limit_s + 3.0
    assert dead not in pump.tip_of(pump.first).contributors


def test_a_reducer_that_answers_has_all_of_t_red() -> None:
    pump = in_training("ABCD", timers=timers(40.0))
    slow = pump.last
    pump.stall_inputs = lambda peer, source: peer == slow
    until_stage(pump, "reduce")
    assert 40.0 < pump.run_to_height(3) < 43.0
    assert slow in pump.tip_of(pump.first).contributors, "others reduce instead"


@pytest.mark.parametrize(("phase_s", "limit_s"), PHASES)
def test_a_proposal_is_given_up_when_those_that_hold_the_rest_are_silent(
    phase_s: float, limit_s: float
) -> None:
    pump = in_training("ABCD", timers=timers(phase_s))
    dead = pump.last
    until_stage(pump, "vote")
    pump.fetches_hang = lambda source: source == dead
    pump.kill(dead)
    start = pump.now
    convener = pump.nodes[pump.first].machine
    assert pump.run(start + 2 * phase_s, lambda: convener.campaign.attempt > 0)
    assert limit_s <= pump.now - start < limit_s + 2.0
    pump.run_to_height(3, pump.others(dead))
    assert dead not in convener.tip.contributors


def test_a_source_that_answers_has_all_of_t_vote() -> None:
    pump = in_training("ABCD", timers=timers(40.0))
    slow = pump.last
    until_stage(pump, "vote")
    pump.fetches_hang = lambda source: source == slow
    start = pump.now
    convener = pump.nodes[pump.first].machine
    assert pump.run(start + 100.0, lambda: convener.campaign.attempt > 0)
    assert 40.0 <= pump.now - start < 42.0
