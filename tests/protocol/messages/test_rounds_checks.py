"""Checks of offers, rosters, successors and certificates of others, and hostile events."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.protocol.chain.trust import step_problem
from swarm.protocol.messages import events
from swarm.protocol.messages.events import Event, Received, Topic
from swarm.protocol.messages.messages import (
    Accept,
    Accepted,
    Ballot,
    Certificate,
    Commit,
    Hello,
    Link,
    Message,
    Offer,
    Prepare,
    Propose,
    Ready,
    Reduced,
    ReducedUnit,
    Roster,
)
from swarm.protocol.rounds import Rules
from swarm.protocol.rounds.policies.checks import commit_problem, reform_problem, successor_problem
from swarm.protocol.rounds.policies.rosters import (
    MOST_SHARES,
    Plan,
    assign_reducers,
    offer_problem,
    plan_roster,
    sources_of,
)
from swarm.protocol.values.manifest import Entry, Kind, Manifest, Member
from tests.protocol.round_pump import found, header_of, in_training, make_offer, make_rules, name

RULES = make_rules()


PUMP = in_training("ABC", RULES, height=3)
PARENT, TIP = PUMP.nodes["A"].applied[1:3]
RECORD = PUMP.nodes["A"].record
SIGNED = bytes(64)


# ---------------------------------------------------------------- offers and rosters


def test_an_offer_counts_only_when_trained_from_the_tip_and_complete() -> None:
    good = make_offer(RULES, "A", TIP)
    mine = next(unit for unit in good.units if unit.startswith("expert"))
    foreign = next(f"expert.{e}" for e, owners in TIP.owners.items() if "A" not in owners)
    assert offer_problem(good, "A", TIP, RULES) is None
    without = {unit: offered for unit, offered in good.units.items() if unit != "shared.1"}
    late = {unit: offered for unit, offered in good.units.items() if unit != mine}
    assert offer_problem(replace(good, units=late), "A", TIP, RULES) is None
    value = good.units[mine]

    def offering(unit: str, **changes: object) -> Offer:
        return replace(good, units={**good.units, unit: replace(value, **changes)})

    wrong = {
        "is missing": replace(good, units=without),
        "starts from": replace(good, tip=PARENT.digest),
        "was trained from": offering(mine, base=name("old")),
        "bytes instead of": offering(mine, num_bytes=7),
        "does not own": offering(foreign, base=TIP.entries[foreign].digest),
        "has no unit": offering("shared.99"),
        "tokens": replace(good, tokens=-1),
        "are not the 10 steps": replace(good, steps=9, tokens=900),
        "11 steps and 1000 tokens": replace(good, steps=11),
        "no whole steps": replace(good, steps=0, tokens=0),
        "took nan seconds": replace(good, seconds=nan),
        "took -1.0 seconds": replace(good, seconds=-1.0),
        "took inf seconds": replace(good, seconds=inf),
    }
    for text, offer in wrong.items():
        assert text in (offer_problem(offer, "A", TIP, RULES) or "")


def offers_of(peers: list[str], rules: Rules) -> tuple[Manifest, dict[str, Offer]]:
    """Manifest 0 of these members, and the offers of all."""
    tip = found(rules, peers)
    return tip, {peer: make_offer(rules, peer, tip) for peer in peers}


@pytest.mark.parametrize("copies", [1, 2, 4])
@pytest.mark.parametrize("parts", [4, 8])
def test_traffic_of_a_round_is_what_the_formula_says(copies: int, parts: int) -> None:
    peers = list("ABCD")
    rules = make_rules(experts=8, parts=parts, owners_per_expert=copies)
    tip, offers = offers_of(peers, rules)
    plan = plan_roster(tip, offers, rules)
    sent = dict.fromkeys(peers, 0)
    for unit, values in plan.sources.items():
        reducer = plan.reducers.get(unit, values[0][0])
        for peer, _ in values:
            if peer != reducer:
                sent[peer] += 100
        sent[reducer] += 100 * (len(peers) - 1)
    shared, experts, count = 100 * parts, 100 * 8, len(peers)
    total = 2 * shared * (count - 1) + experts * (count + copies - 2)
    assert sum(sent.values()) == total
    # Uploads are even up to one unit.
    assert max(sent.values()) - min(sent.values()) <= 100 * count


def test_reducers_are_sources_and_everybody_derives_the_same() -> None:
    peers = list("ABCDE")
    rules = make_rules(experts=10, parts=6, owners_per_expert=2)
    _, offers = offers_of(peers, rules)
    reducers = assign_reducers(offers, dict.fromkeys(peers, 0), rules.unit_bytes)
    shuffled = {peer: offers[peer] for peer in reversed(peers)}
    again = dict.fromkeys(reversed(peers), 70)
    assert assign_reducers(shuffled, again, rules.unit_bytes) == reducers
    sources = sources_of(offers)
    for unit, peer in reducers.items():
        assert peer in {source for source, _ in sources[unit]}
    assert set(reducers) == {unit for unit, values in sources.items() if len(values) > 1}


def test_who_cannot_be_dialled_reduces_only_what_nobody_else_has() -> None:
    peers = list("ABCD")
    rules = make_rules(experts=8, parts=6, owners_per_expert=2)
    tip, offers = offers_of(peers, rules)
    plan = plan_roster(tip, offers, rules, {"A", "B"})
    assert plan.able == {"C": 0, "D": 0}
    for unit, reducer in plan.reducers.items():
        sources = {peer for peer, _ in plan.sources[unit]}
        assert reducer in (sources & {"C", "D"} or sources), unit
    assert set(plan.reducers) == set(plan_roster(tip, offers, rules).reducers)
    assert assign_reducers(offers, plan.able, rules.unit_bytes) == plan.reducers
    assert plan_roster(tip, offers, rules, set(peers)).able.keys() == set(peers), "one peer must"


def seconds_of(plan: Plan, uplinks: Mapping[str, int]) -> dict[str, float]:
    """Sending time of each peer of a plan, in units of 100 bytes divided by its uplink."""
    sent = dict.fromkeys(plan.offers, 0)
    for unit, values in plan.sources.items():
        reducer = plan.reducers.get(unit, values[0][0])
        for peer, _ in values:
            sent[peer] += peer != reducer
        sent[reducer] += len(plan.offers) - 1
    return {peer: sent[peer] / uplinks[peer] for peer in sent}


def test_who_has_a_thin_uplink_averages_less_so_that_all_send_for_as_long() -> None:
    uplinks = {"A": 100, "B": 20, "C": 100, "D": 300}
    rules = make_rules(experts=4, parts=80)
    tip, offers = offers_of(list(uplinks), rules)
    equal, fitted = plan_roster(tip, offers, rules), plan_roster(tip, offers, rules, (), uplinks)
    averaged = Counter(fitted.reducers.values())
    assert averaged == {"A": 20, "C": 20, "D": 40}, "twice its share is the most"
    before, after = seconds_of(equal, uplinks), seconds_of(fitted, uplinks)
    assert max(before.values()) == before["B"] and after["B"] == pytest.approx(80.0 / 20 + 3 / 20)
    assert max(after.values()) == after["B"]
    assert fitted.roster_id != equal.roster_id, "reducers sign the uplinks that they received"


@pytest.mark.parametrize("said", [10**6, 1])
def test_a_false_word_of_an_uplink_is_worth_little(said: int) -> None:
    uplinks = {"A": 100, "B": said, "C": 0, "D": 100}
    rules = make_rules(experts=4, parts=80)
    tip, offers = offers_of(list(uplinks), rules)
    averaged = Counter(plan_roster(tip, offers, rules, (), uplinks).reducers.values())
    others = [averaged[peer] for peer in "ACD"]
    assert max(others) - min(others) <= 1, "an unknown one is a usual one"
    assert averaged["B"] == (MOST_SHARES * 80 / 4 if said > 100 else 0)


def test_a_roster_of_other_offers_has_another_id() -> None:
    offers = {peer: make_offer(RULES, peer, TIP) for peer in "ABC"}
    ids = {
        plan_roster(TIP, {p: offers[p] for p in chosen}, RULES).roster_id
        for chosen in ("ABC", "AB", "AC", "A")
    }
    assert len(ids) == 4


def test_a_roster_of_other_work_has_another_id() -> None:
    """Weights follow from the work, so the same values would have another mean."""
    timed = replace(RULES, round_seconds=5.0)
    offers = {peer: make_offer(RULES, peer, TIP) for peer in "ABC"}
    other = {**offers, "B": replace(offers["B"], steps=3, tokens=300)}
    assert plan_roster(TIP, offers, timed).sources == plan_roster(TIP, other, timed).sources
    assert plan_roster(TIP, offers, timed).roster_id != plan_roster(TIP, other, timed).roster_id


def test_in_rounds_of_a_given_time_an_offer_is_within_its_deal() -> None:
    timed = replace(RULES, round_seconds=5.0)
    good = make_offer(timed, "A", TIP)  # dealt 100 samples of 10 tokens
    assert offer_problem(replace(good, steps=1, tokens=100), "A", TIP, timed) is None
    more = replace(good, steps=11, tokens=1100)
    assert "more than the 100 samples" in (offer_problem(more, "A", TIP, timed) or "")
    undealt = replace(timed, is_dealt=False)
    assert offer_problem(more, "A", TIP, undealt) is None


# ---------------------------------------------------------------- successors


def changed_member(peer: str, **changes: object) -> Manifest:
    member = replace(TIP.members.get(peer, Member(1, 1.0)), **changes)  # type: ignore[arg-type]
    return replace(TIP, members={**TIP.members, peer: member})


def changed_entry(**changes: object) -> Manifest:
    entry: Entry = replace(TIP.entries["shared.0"], **changes)  # type: ignore[arg-type]
    return replace(TIP, entries={**TIP.entries, "shared.0": entry})


WRONG = {
    "another parent": replace(TIP, parent=name("other")),
    "another run": replace(TIP, run="run-2"),
    "another generation": replace(TIP, generation="ab"),
    "another lineage": replace(TIP, lineage=((0, (1, "ab")),)),
    "a jump": replace(TIP, height=TIP.height + 1),
    "a round too far": replace(TIP, round=TIP.round + 1),
    "steps of its own": replace(TIP, step=TIP.step + 1),
    "fewer tokens": replace(TIP, tokens=PARENT.tokens - 1),
    "more tokens": replace(TIP, tokens=TIP.tokens + 1),
    "work of fewer": replace(TIP, work={"A": 1000, "B": 1000}),
    "more work than dealt": replace(TIP, work={**TIP.work, "A": 1100}, tokens=TIP.tokens + 100),
    "less work than everybody's": replace(
        TIP, work={**TIP.work, "A": 900}, tokens=TIP.tokens - 100
    ),
    "a pace of a silent member": changed_member("Z", tokens_per_s=3.0),
    "an endless pace": changed_member("A", tokens_per_s=inf),
    "a pace below zero": changed_member("A", tokens_per_s=-1.0),
    "a cursor of its own": replace(TIP, cursor=TIP.cursor + 1),
    "a hole of its own": replace(TIP, holes=((0, 1),)),
    "a deal of its own": replace(
        TIP, dealt={**TIP.dealt, "A": TIP.dealt["B"], "B": TIP.dealt["A"]}
    ),
    "no deal": replace(TIP, dealt={}, cursor=0),
    "merges": replace(TIP, merged=1),
    "a chosen order": replace(TIP, seed=name("seed")),
    "a founding": replace(TIP, kind=Kind.FOUNDING),
    "a merge that is not due": replace(TIP, kind=Kind.MERGE),
    "no contributors": replace(TIP, contributors=()),
    "strange contributors": replace(TIP, contributors=("A", "B", "C", "X")),
    "contributors out of order": replace(TIP, contributors=("C", "B", "A")),
    "no members": replace(TIP, members={}),
    "no capacity": replace(TIP, members={**TIP.members, "A": Member(0, 0.0)}),
    "endless capacity": replace(TIP, members={**TIP.members, "A": Member(0, inf)}),
    "no number": replace(TIP, members={**TIP.members, "A": Member(0, nan)}),
    "no owner": replace(TIP, owners={**TIP.owners, 0: ()}),
    "a strange owner": replace(TIP, owners={**TIP.owners, 0: ("X",)}),
    "a forgotten expert": replace(TIP, owners={0: ("A",)}),
    "no sources": replace(TIP, sources={}),
    "a part of fewer": replace(
        TIP, sources={**TIP.sources, "shared.0": TIP.sources["shared.0"][:1]}
    ),
    "a strange unit": replace(TIP, sources={**TIP.sources, "shared.9": TIP.sources["shared.0"]}),
    "an expert of nobody": replace(TIP, sources={**TIP.sources, "expert.0": ()}),
    "an old version": changed_entry(version=0),
    "another size": changed_entry(num_bytes=1),
    "another codec": changed_entry(codec="bf16"),
    "a base": changed_entry(base=name("base")),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_a_manifest_that_cannot_follow_is_refused(what: str) -> None:
    assert successor_problem(TIP, PARENT, RULES, due=False) is None
    assert successor_problem(WRONG[what], PARENT, RULES, due=False)


def test_an_entry_changes_only_with_an_offer() -> None:
    without = {unit: values for unit, values in TIP.sources.items() if unit != "expert.0"}
    stale = replace(
        TIP, sources=without, entries={**TIP.entries, "expert.0": PARENT.entries["expert.0"]}
    )
    assert successor_problem(stale, PARENT, RULES, due=False) is None
    assert successor_problem(replace(TIP, sources=without), PARENT, RULES, due=False)


# ---------------------------------------------------------------- certificates


def commit_of(*signers: str, **changes: object) -> Commit:
    certificate = Certificate(Ballot(0, "A"), dict.fromkeys(signers, SIGNED))
    return replace(Commit(TIP, certificate, PARENT), **changes)  # type: ignore[arg-type]


def test_a_decided_manifest_needs_a_quorum_of_its_parents_members() -> None:
    assert commit_problem(commit_of("A", "B"), PARENT, RULES) is None

    def problem(*signers: str) -> str:
        return step_problem(PARENT.head, Link(TIP.head, commit_of(*signers).certificate)) or ""

    assert problem("A", "B") == ""
    assert "1 of the 3 voters" in problem("A")
    assert "0 of the 3 voters" in problem("X", "Y", "Z")
    assert "no certificate" in (step_problem(PARENT.head, Link(TIP.head)) or "")
    far = PUMP.nodes["A"].applied[0]
    alone = Link(TIP.head, commit_of("A", "B").certificate)
    assert "parent of height" in (step_problem(far.head, alone) or "")


def test_what_comes_with_a_manifest_must_be_its_parent() -> None:
    far = PUMP.nodes["A"].applied[0]
    assert "is not its parent" in (commit_problem(commit_of("A", parent=far), far, RULES) or "")


def test_a_manifest_without_certificate_is_refused_and_counted_and_changes_nothing() -> None:
    pump = in_training("ABC", RULES)
    machine = pump.nodes["A"].machine
    before = machine.record
    forged = replace(machine.tip, height=99, round=99, parent=machine.tip.digest)
    for commit in (
        Commit(forged, None, machine.tip),
        Commit(forged, Certificate(Ballot(0, "X"), {"X": SIGNED}), machine.tip),
        Commit(replace(forged, run="other"), None, None),
        Commit(replace(forged, kind=Kind.FOUNDING), None, None),
    ):
        effects = machine.handle(Received("X", header_of(forged), commit), pump.now)
        reasons = [e for e in effects if isinstance(e, events.Reason)]
        assert [reason.topic for reason in reasons] == [Topic.REFUSED]
        assert not any(isinstance(effect, events.Fetch | events.Persist) for effect in effects)
    assert machine.record is before


def test_a_reform_must_at_least_agree_with_itself() -> None:
    generation = "ab" * 16
    reform = replace(
        TIP,
        generation=generation,
        kind=Kind.REFORM,
        parent=TIP.digest,
        members={"A": TIP.members["A"]},
        contributors=("A",),
        sources={},
        work={},
        dealt={"A": TIP.dealt["A"]},
        owners=dict.fromkeys(TIP.owners, ("A",)),
        lineage=((TIP.height, (1, generation)),),
    )
    assert reform_problem(reform, RULES) is None
    for wrong in (
        replace(reform, lineage=()),
        replace(reform, lineage=((TIP.height, (3, generation)),)),
        replace(reform, lineage=((TIP.height + 5, (1, generation)),)),
        replace(reform, seed=name("seed")),
        replace(reform, members={"A": Member(0, 0.0)}),
        replace(reform, owners={}),
        replace(reform, run="other"),
    ):
        assert reform_problem(wrong, RULES)


# ---------------------------------------------------------------- hostile events

peers = st.sampled_from(["A", "B", "C", "X"])
ballots = st.builds(Ballot, st.integers(0, 3), peers)
digests = st.sampled_from([TIP.digest, PARENT.digest, name("unknown")])
NO_JSON = {"an endless pace"}
"""No message holds these."""
manifests = st.sampled_from(
    [TIP, PARENT, *(each for what, each in WRONG.items() if what not in NO_JSON)]
)
offers = st.sampled_from(
    [make_offer(RULES, "A", TIP), make_offer(RULES, "B", PARENT), Offer(TIP.digest, 1, 1, {})]
)
units = st.sampled_from(["shared.0", "expert.0", "expert.77"])
results = st.dictionaries(units, st.builds(ReducedUnit, digests, st.integers(0, 200)), max_size=2)
certificates = st.none() | st.builds(
    Certificate, ballots, st.dictionaries(peers, st.just(SIGNED), max_size=4)
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, st.booleans()),
    st.builds(Prepare, ballots),
    st.builds(
        Ready,
        ballots,
        st.none() | offers,
        st.none() | st.builds(Accepted, ballots, manifests),
        st.just(1.0),
        st.booleans(),
    ),
    st.builds(
        Roster,
        ballots,
        digests,
        st.dictionaries(peers, offers, max_size=3),
        st.lists(peers, max_size=3).map(tuple),
    ),
    st.builds(Reduced, ballots, digests, results, st.dictionaries(peers, st.just("no"))),
    st.builds(Propose, ballots, manifests, st.lists(peers, max_size=3).map(tuple)),
    st.builds(Accept, ballots, digests, st.just(SIGNED)),
    st.builds(Commit, manifests, certificates, st.none() | manifests),
)
headers = st.sampled_from(list(map(header_of, (TIP, PARENT, replace(TIP, height=9)))))
hostile: st.SearchStrategy[Event] = st.one_of(
    st.builds(Received, peers, headers, messages),
    st.builds(events.Stored, digests),
    st.builds(events.Unobtainable, digests, peers, st.just("no")),
    st.builds(events.NotMade, digests, st.just("no")),
    st.builds(events.Synced, digests),
    st.builds(events.SyncFailed, digests, st.just("full")),
    st.builds(events.UnitReduced, digests, units, st.builds(ReducedUnit, digests, st.just(100))),
    st.builds(events.MergeComputed, digests, results),
    st.just(events.Tick()),
)


@settings(max_examples=300)
@given(st.lists(st.tuples(hostile, st.floats(0.0, 9.0)), max_size=25))
def test_no_sequence_of_events_raises_and_the_tip_never_moves_down(
    sequence: list[tuple[Event, float]],
) -> None:
    machine = PUMP._machine("A", RECORD, set(PUMP.nodes["A"].disk))
    now = PUMP.now
    machine.start(now)
    for event, pause_s in sequence:
        before = machine.tip.code
        now += pause_s
        machine.handle(event, now)
        assert machine.tip.code >= before
        assert machine.phase
