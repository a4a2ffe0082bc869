"""Rounds with slices of the units: offers, refusals and waits (due units)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from swarm.config import MergingConfig
from swarm.experts import expert_of_unit
from swarm.protocol.messages.messages import OfferedUnit
from swarm.protocol.rounds.policies.checks import successor_problem
from swarm.protocol.rounds.policies.composition import stale_experts
from swarm.protocol.rounds.policies.rosters import offer_problem
from swarm.protocol.rounds.policies.update_bounds import update_bound
from swarm.protocol.values.manifest import Manifest, Unit
from swarm.protocol.values.updates import StepBound
from tests.protocol.round_pump import Pump, make_offer, make_rules, name, start_swarm

PERIOD = 4
RULES = make_rules(experts=12, parts=8, experts_every=PERIOD, shared_every=PERIOD, stagger=True)


def run_of_three(rounds: int) -> Pump:
    pump = start_swarm("ABC", RULES)
    pump.run_rounds(rounds)
    return pump


PUMP = run_of_three(2 * PERIOD + 1)
CHAIN = PUMP.nodes["A"].applied
TIP = CHAIN[PERIOD]
DUE = RULES.schedule.due(TIP)


def test_all_units_are_renewed_once_a_cycle_and_all_peers_agree() -> None:
    for manifest in CHAIN:
        assert PUMP.digests_at(manifest.height) == {manifest.digest}
    for first in range(PERIOD + 1):
        cycle = CHAIN[first : first + PERIOD]
        renewed = [unit for manifest in cycle for unit in manifest.sources]
        assert sorted(renewed) == sorted(RULES.unit_bytes)


def test_rounds_move_the_same_bytes() -> None:
    assert {len(manifest.sources) for manifest in CHAIN} == {20 // PERIOD}
    for peer in "ABC":
        own = [_brought_by(peer, parent, tip) for parent, tip in pairwise(CHAIN)]
        assert {len(units) for units in own} == {12 // 3 // PERIOD}


def _brought_by(peer: str, parent: Manifest, tip: Manifest) -> list[Unit]:
    return [
        unit
        for unit in tip.sources
        if (expert := expert_of_unit(unit)) is not None and peer in parent.owners[expert]
    ]


def test_an_offer_holds_all_parts_that_are_due_and_nothing_that_is_not() -> None:
    good = make_offer(RULES, "A", TIP)
    assert offer_problem(good, "A", TIP, RULES) is None
    part = next(unit for unit in good.units if expert_of_unit(unit) is None)
    without = {unit: value for unit, value in good.units.items() if unit != part}
    assert "is missing" in (offer_problem(replace(good, units=without), "A", TIP, RULES) or "")
    owned = [f"expert.{expert}" for expert, owners in TIP.owners.items() if "A" in owners]
    for unit in (*RULES.shared_units, *owned):
        value = OfferedUnit(name("early", unit), 100, TIP.entries[unit].digest)
        problem = offer_problem(replace(good, units={**good.units, unit: value}), "A", TIP, RULES)
        assert (problem is None) == (unit in DUE)
        if problem:
            assert problem == f"{unit} is not due in round {TIP.round + 1}"


def test_a_part_must_be_trained_from_its_value_in_the_tip_however_old_that_is() -> None:
    good = make_offer(RULES, "A", TIP)
    part = next(unit for unit in good.units if expert_of_unit(unit) is None)
    assert TIP.entries[part].version == TIP.round + 1 - PERIOD
    stale = replace(good.units[part], base=name("older"))
    problem = offer_problem(replace(good, units={**good.units, part: stale}), "A", TIP, RULES)
    assert problem and "was trained from" in problem


def test_a_decided_manifest_renews_all_parts_that_were_due_and_nothing_that_was_not() -> None:
    good = CHAIN[PERIOD + 1]
    assert good.parent == TIP.digest
    assert successor_problem(good, TIP, RULES, due=False) is None
    renewed = next(unit for unit in good.sources if expert_of_unit(unit) is None)
    without = {unit: values for unit, values in good.sources.items() if unit != renewed}
    entries = {**good.entries, renewed: TIP.entries[renewed]}
    problem = successor_problem(
        replace(good, sources=without, entries=entries), TIP, RULES, due=False
    )
    assert problem == f"{renewed} is not the mean of its contributors"
    for unit in (next(u for u in RULES.shared_units if u not in DUE), _not_due_expert()):
        sources = dict(sorted({**good.sources, unit: good.sources[renewed]}.items()))
        problem = successor_problem(replace(good, sources=sources), TIP, RULES, due=False)
        assert problem == f"{unit} is not due"


def _not_due_expert() -> Unit:
    return next(unit for unit in RULES.expert_units if unit not in DUE)


def test_an_expert_is_stale_after_k_periods() -> None:
    entries = {unit: replace(entry, version=10) for unit, entry in TIP.entries.items()}
    assert stale_experts(entries, 10 + 3 * PERIOD - 1, RULES) == ()
    assert stale_experts(entries, 10 + 3 * PERIOD, RULES) == tuple(range(12))


def test_a_silent_peer_keeps_its_experts_for_a_cycle_and_its_seat_for_three() -> None:
    """Slices are shorter than whole rounds, so K counts whole rounds.

    Policies: member removal, expert ownership.
    """
    pump = start_swarm("ABC", RULES)
    pump.run_rounds(1)
    pump.kill("C")
    pump.run_rounds(1 + PERIOD, "AB", within_s=200.0)
    tip = pump.tip_of("A")
    assert tip.members["C"].silent == PERIOD
    assert any("C" in owners for owners in tip.owners.values())
    pump.run_rounds(2 + PERIOD, "AB", within_s=200.0)
    assert not any("C" in owners for owners in pump.tip_of("A").owners.values())
    pump.run_rounds(1 + 3 * PERIOD, "AB", within_s=600.0)
    assert "C" in pump.tip_of("A").members
    pump.run_rounds(2 + 3 * PERIOD, "AB", within_s=200.0)
    assert "C" not in pump.tip_of("A").members


def test_experts_of_a_vanished_owner_are_renewed_by_the_next_as_soon_as_it_has_them() -> None:
    pump = start_swarm("ABC", RULES)
    pump.run_rounds(1)
    pump.kill("C")
    pump.run_rounds(3 + 2 * PERIOD, "AB", within_s=400.0)
    tip = pump.tip_of("A")
    assert all(tip.round - entry.version <= PERIOD for entry in tip.entries.values())


@pytest.mark.parametrize("unit", ["shared.0", "expert.0"])
def test_a_value_may_have_moved_by_the_steps_since_its_version(unit: Unit) -> None:
    rules = replace(RULES, step_bound=StepBound(1.0, 0.0))
    aged = replace(TIP.entries[unit], version=TIP.round + 1 - PERIOD)
    fresh = replace(aged, version=TIP.round)
    bounds = [
        update_bound(
            unit, ["A"], {"A": 1000}, replace(TIP, entries={**TIP.entries, unit: e}), rules
        )
        for e in (aged, fresh)
    ]
    assert bounds[0] and bounds[1]
    assert bounds[0].absolute == pytest.approx(PERIOD * bounds[1].absolute, rel=1e-3)


def test_time_outs_leave_room_for_what_may_be_renewed() -> None:
    assert RULES.may_be_renewed(TIP) == dict.fromkeys(DUE, 100)
    assert make_rules(experts_every=3).may_be_renewed(TIP) == make_rules().unit_bytes
    coded = replace(
        RULES,
        unit_coding=dict.fromkeys(RULES.unit_bytes, "b2"),
        delta_bytes=dict.fromkeys(RULES.unit_bytes, 7),
    )
    assert coded.may_be_renewed(TIP) == dict.fromkeys(DUE, 7)
    due = replace(RULES, merging=MergingConfig(alpha=0.1, interval_steps=10, decay_steps=10**6))
    assert due.may_be_renewed(TIP) == dict.fromkeys(RULES.expert_units, 100)
    assert replace(coded, merging=due.merging).may_be_renewed(TIP) == dict.fromkeys(
        RULES.expert_units, 100
    ), "a merge has no deltas"
