"""Experts with one writer are fetched while means are computed, before they are proposed.

Policy: fetch ahead.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from swarm.experts import expert_of_unit, expert_unit
from swarm.protocol.messages import events
from swarm.protocol.messages.events import CancelFetch, Fetch, Purpose
from swarm.protocol.messages.messages import Ballot, Reduced, Roster
from swarm.protocol.rounds import collector, reducer
from swarm.protocol.rounds.policies import evidence_checks, rosters
from swarm.protocol.rounds.policies.rosters import sources_of
from swarm.protocol.rounds.policies.update_bounds import update_bound
from swarm.protocol.rounds.reducer import Reducer, wanted_ahead
from swarm.protocol.values.updates import IMPLAUSIBLE, StepBound
from tests.protocol.round_pump import (
    Pump,
    found,
    make_offer,
    make_rules,
    start_swarm,
)


def eager_swarm(peers: str) -> Pump:
    rules = make_rules(experts=6, parts=3)
    return start_swarm(peers, rules, fetches_ahead=True)


def fetches(pump: Pump, peer: str, purpose: Purpose) -> list[Fetch]:
    effects = pump.nodes[peer].effects
    return [each for each in effects if isinstance(each, Fetch) and each.purpose is purpose]


def is_expert(want: events.BlobWanted) -> bool:
    return expert_of_unit(want.unit) is not None


def test_a_proposal_finds_the_experts_here_and_fetches_the_means_alone() -> None:
    pump = eager_swarm("ABC")
    pump.run_rounds(3)
    for peer in "ABC":
        ahead = fetches(pump, peer, Purpose.AHEAD)
        assert len(ahead) == 3
        for fetch in ahead:
            assert len(fetch.wants) == 4
            assert all(is_expert(want) and want.sources != (peer,) for want in fetch.wants)
        proposed = [want for each in fetches(pump, peer, Purpose.PROPOSAL) for want in each.wants]
        assert proposed
        assert not any(is_expert(want) for want in proposed)
    assert all(len(pump.digests_at(height)) == 1 for height in (1, 2, 3))


def test_whose_values_a_roster_has_is_found_once_by_each_reducer(monkeypatch) -> None:
    """For 256 peers these are 120,000 values, used for averaging, relaying and fetching ahead."""
    calls: Counter[str] = Counter()

    def counted(owner: Any, function: str) -> None:
        counted_one = getattr(owner, function)

        def call(*arguments: Any, **options: Any) -> Any:
            calls[function] += 1
            return counted_one(*arguments, **options)

        monkeypatch.setattr(owner, function, call)

    for module in (rosters, reducer):
        if hasattr(module, "sources_of"):
            counted(module, "sources_of")
    for module in (collector, evidence_checks):
        counted(module, "plan_roster")
    counted(Reducer, "_start_job")
    pump = eager_swarm("ABC")
    pump.run_rounds(2)
    assert calls["_start_job"] == 6 and fetches(pump, "A", Purpose.AHEAD)
    assert calls["sources_of"] == calls["_start_job"] + calls["plan_roster"]


def test_a_machine_that_was_not_told_to_fetches_nothing_ahead() -> None:
    pump = start_swarm("AB", make_rules(experts=6))
    pump.run_rounds(1)
    assert not fetches(pump, "A", Purpose.AHEAD)
    proposed = [want for each in fetches(pump, "A", Purpose.PROPOSAL) for want in each.wants]
    assert any(is_expert(want) for want in proposed)


def test_what_is_not_needed_any_more_is_cancelled_with_the_height() -> None:
    pump = eager_swarm("ABC")
    pump.run_rounds(1)
    for peer in "ABC":
        effects = pump.nodes[peer].effects
        assert CancelFetch(Purpose.AHEAD) in effects
        applied = next(i for i, each in enumerate(effects) if isinstance(each, events.Apply))
        assert effects.index(CancelFetch(Purpose.AHEAD)) > applied


@pytest.mark.parametrize("reason", ["unreachable", IMPLAUSIBLE])
def test_an_expert_that_does_not_come_ahead_is_no_input_that_is_missing(reason: str) -> None:
    """Acceptors check it after the proposal. A reducer has all its inputs."""
    pump = eager_swarm("ABC")
    pump.refuse_fetch = lambda peer, source, unit: expert_of_unit(unit) is not None

    def is_reducing() -> bool:
        return all(fetches(pump, peer, Purpose.AHEAD) for peer in "ABC")

    assert pump.run(20.0, is_reducing)
    want = fetches(pump, "A", Purpose.AHEAD)[0].wants[0]
    pump.give("A", events.Unobtainable(want.digest, want.sources[0], reason))
    pump.run(pump.now + 2.0)
    nodes = pump.nodes.values()
    sent = [message for node in nodes for *_, message in node.sent]
    reports = [message for message in sent if isinstance(message, Reduced)]
    assert reports
    assert not any(report.missing for report in reports)
    pump.refuse_fetch = lambda peer, source, unit: False
    pump.run_rounds(1)


@pytest.mark.parametrize("shared_every", [1, 2])
@pytest.mark.parametrize("tokens", [0, 100, 1000])
def test_what_is_taken_ahead_would_be_taken_in_any_proposal(shared_every: int, tokens: int) -> None:
    """Otherwise a convener that lies about work to one peer could win its vote for too much."""
    rules = replace(
        make_rules(experts=6, shared_every=shared_every, stagger=shared_every > 1),
        step_bound=StepBound(1e-3, 1e-4),
    )
    tip = found(rules, ["A", "B"])
    offers = {peer: make_offer(rules, peer, tip) for peer in "AB"}
    roster = Roster(Ballot(0, "A"), "roster", offers, {"A": 0, "B": 0})
    sources = sources_of(offers)
    wants = wanted_ahead(roster, sources, {}, "A", stored=(), tip=tip, rules=rules)
    assert wants
    for want in wants:
        proposed = update_bound(want.unit, want.sources, {"B": tokens}, tip, rules)
        assert want.bound is not None
        assert proposed is not None
        assert want.bound.base == proposed.base
        assert 0 < want.bound.absolute <= proposed.absolute
        assert want.bound.relative <= proposed.relative


def test_nothing_that_is_averaged_or_here_or_own_is_wanted_and_each_begins_elsewhere() -> None:
    rules = make_rules(experts=6)
    tip = found(rules, ["A", "B", "C"])
    offers = {peer: make_offer(rules, peer, tip) for peer in "ABC"}
    roster = Roster(Ballot(0, "A"), "roster", offers, {"A": 0, "B": 0, "C": 0})

    def writers(me: str, averaged: tuple[str, ...] = (), stored: tuple[str, ...] = ()) -> str:
        reduced = dict.fromkeys(averaged, "A")
        sources = sources_of(offers)
        wants = wanted_ahead(roster, sources, reduced, me, stored=stored, tip=tip, rules=rules)
        return "".join(want.sources[0] for want in wants)

    assert (writers("A"), writers("B"), writers("C")) == ("BCBC", "CCAA", "ABAB")
    assert writers("A", averaged=(expert_unit(1),)) == "CBC"
    assert writers("A", stored=(offers["B"].units[expert_unit(1)].digest,)) == "CBC"
