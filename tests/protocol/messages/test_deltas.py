"""Units that move by deltas: their names, the values made from them, remainders."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from swarm.errors import BadManifest, BadMessage
from swarm.protocol.exchange.deltas import MAX_DELTAS, Move, Remainders, way_to
from swarm.protocol.messages.events import (
    CancelFetch,
    Effect,
    Event,
    Fetch,
    Keep,
    NotMade,
    Rebuild,
    Received,
    Record,
    Stored,
    Sync,
    Synced,
    Tick,
    Unobtainable,
)
from swarm.protocol.messages.message_bytes import (
    decode_evidence,
    decode_offer,
    encode_evidence,
    foreign_manifest,
)
from swarm.protocol.messages.messages import (
    Ballot,
    Certificate,
    Commit,
    Declared,
    Evidence,
    Offer,
    OfferedUnit,
    Propose,
    ReducedUnit,
    Report,
    declaration_of,
    reduced_statement,
)
from swarm.protocol.rounds import LocalPeer, RoundMachine, Rules
from swarm.protocol.rounds.policies.checks import successor_problem
from swarm.protocol.rounds.policies.composition import Attendance, compose_merge, compose_round
from swarm.protocol.rounds.policies.evidence_checks import evidence_problem
from swarm.protocol.rounds.policies.rosters import offer_problem, plan_roster
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.training.adoption import Action, Adoption, adopt
from swarm.protocol.values.manifest import Digest, Kind, Manifest, decode_manifest
from tests.protocol.round_pump import found, header_of, make_offer, make_rules, name

SIGNED = bytes(64)
SHARED, NORMS, EXPERT = "shared.1", "shared.0", "expert.0"


def coded(rules: Rules, *units: str) -> Rules:
    return replace(
        rules, unit_coding=dict.fromkeys(units, "b2"), delta_bytes=dict.fromkeys(units, 30)
    )


RULES = coded(make_rules(certificates=False), SHARED, *make_rules().expert_units)
"""One owner of each expert: its delta is taken verbatim."""
TIP = found(RULES, ["A", "B", "C"], run=RULES.run)


def offer_of(peer: str, rules: Rules = RULES, tip: Manifest = TIP, **changes: Any) -> Offer:
    """A peer's offer of deltas. `changes` are those of one unit, by `unit`."""
    offer = make_offer(rules, peer, tip)
    units = dict(offer.units)
    for unit in units.keys() & rules.unit_coding.keys():
        delta, base = name("delta", peer, unit, tip.digest), tip.entries[unit].digest
        if rules.is_verbatim(unit):
            units[unit] = replace(units[unit], delta=delta)
        else:
            units[unit] = OfferedUnit(delta, 30, base)
    if changes:
        unit = changes.pop("unit")
        units[unit] = replace(units[unit], **changes)
    return replace(offer, units=units)


def composed(
    peers: str, rules: Rules = RULES, tip: Manifest = TIP
) -> tuple[Manifest, Evidence, dict[str, Offer]]:
    """The manifest of a round of these peers, and its evidence."""
    offers = {peer: offer_of(peer, rules, tip) for peer in peers}
    plan = plan_roster(tip, offers, rules)
    reports = []
    for reducer in sorted(set(plan.reducers.values())):
        results = {
            unit: ReducedUnit(
                name("mean", unit, tip.digest),
                100,
                name("B", unit, tip.digest) if unit in rules.unit_coding else None,
            )
            for unit, peer in plan.reducers.items()
            if peer == reducer
        }
        reports.append(Report(reducer, results, SIGNED))
    declared = {
        peer: Declared(declaration_of(offers.get(peer), 1.0, False), SIGNED) for peer in tip.members
    }
    evidence = Evidence(declared, plan.able, plan.roster_id, tuple(reports))
    found_ = {unit: each for report in reports for unit, each in report.results.items()}
    heard = Attendance(tip.members.keys(), {}, {}, dict.fromkeys(tip.members, 1.0))
    return compose_round(tip, plan, found_, heard, rules), evidence, offers


NEXT, SHOWN, OFFERS = composed("ABC")


# ---------------------------------------------------------------- names


def test_entries_name_base_delta_and_coding_of_units_that_moved_by_deltas() -> None:
    mean, expert, norms = (NEXT.entries[unit] for unit in (SHARED, EXPERT, NORMS))
    before = TIP.entries[SHARED].digest
    assert (mean.base, mean.delta, mean.coding) == (before, name("B", SHARED, TIP.digest), "b2")
    source = expert.source
    assert expert.delta == name("delta", source, EXPERT, TIP.digest)
    assert expert.digest == OFFERS[source].units[EXPERT].digest
    assert (norms.base, norms.delta, norms.coding) == (None, None, "none")
    assert set(NEXT.deltas.values()) == RULES.unit_coding.keys()


def test_without_deltas_nothing_is_said_of_them() -> None:
    """Otherwise digests of manifests, offers and statements of other runs would change."""
    plain = make_rules()
    tip = found(plain, ["A", "B", "C"])
    assert b"coding" not in tip.encoded
    assert b"delta" not in make_offer(plain, "A", tip).encoded
    means = {"expert.0": ReducedUnit(name("mean"), 100)}
    moved = {"expert.0": ReducedUnit(name("mean"), 100, name("B"))}
    assert reduced_statement("r", name("id"), means) != reduced_statement("r", name("id"), moved)


def test_manifests_offers_and_evidence_with_deltas_come_back_from_their_bytes() -> None:
    assert decode_manifest(NEXT.encoded) == NEXT
    assert all(decode_offer(offer.encoded) == offer for offer in OFFERS.values())
    assert decode_evidence(encode_evidence(SHOWN)) == SHOWN


def test_what_is_absent_by_default_may_not_be_spelled_out() -> None:
    spelled = TIP.encoded.replace(b'"codec":"fp32"', b'"codec":"fp32","coding":"none"')
    with pytest.raises(BadManifest):
        decode_manifest(spelled)
    offered = offer_of("A").encoded.replace(b'"digest"', b'"delta":null,"digest"', 1)
    with pytest.raises(BadMessage):
        decode_offer(offered)


def test_a_units_deltas_have_a_reducer_even_if_one_peer_alone_offers_them() -> None:
    plan = plan_roster(TIP, {"B": offer_of("B")}, RULES)
    assert plan.reducers == {SHARED: "B"}
    alone, shown, _ = composed("B")
    assert evidence_problem(alone, shown, TIP, RULES) is None


def test_an_acceptor_makes_the_manifest_anew_from_the_deltas_that_were_declared() -> None:
    assert evidence_problem(NEXT, SHOWN, TIP, RULES) is None
    assert successor_problem(NEXT, TIP, RULES, due=False) is None


@pytest.mark.parametrize("unit", [SHARED, EXPERT])
@pytest.mark.parametrize(
    "change",
    [
        {"delta": name("other")},
        {"base": name("other")},
        {"delta": None},
        {"base": None},
        {"coding": "b1"},
        {"coding": "none", "base": None, "delta": None},
        {"digest": name("other")},
    ],
    ids=str,
)
def test_a_move_that_nobody_has_signed_gets_no_vote(unit: str, change: dict[str, Any]) -> None:
    """Of these, a decided manifest may only name a delta and a value that nobody can check.

    Policy: delta entries.
    """
    forged = replace(NEXT, entries={**NEXT.entries, unit: replace(NEXT.entries[unit], **change)})
    assert evidence_problem(forged, SHOWN, TIP, RULES)
    judged = change not in ({"delta": name("other")}, {"digest": name("other")})
    assert bool(successor_problem(forged, TIP, RULES, due=False)) == judged


def test_a_manifest_that_renews_what_it_has_no_value_of_is_none() -> None:
    strange = replace(NEXT, sources={**NEXT.sources, "shared.9": (("A", name("x")),)})
    assert foreign_manifest(NEXT.encoded) == NEXT
    with pytest.raises(BadManifest, match="without a value"):
        foreign_manifest(strange.encoded)


def test_a_unit_without_a_coding_moves_by_no_delta() -> None:
    norms = replace(NEXT.entries[NORMS], base=TIP.entries[NORMS].digest, delta=name("delta"))
    forged = replace(NEXT, entries={**NEXT.entries, NORMS: norms})
    assert successor_problem(forged, TIP, RULES, due=False)


@pytest.mark.parametrize(
    "change",
    [
        {"unit": SHARED, "num_bytes": 100},  # a value
        {"unit": SHARED, "delta": name("delta")},
        {"unit": SHARED, "base": name("other")},
        {"unit": EXPERT, "delta": None},
        {"unit": EXPERT, "num_bytes": 30},
        {"unit": NORMS, "delta": name("delta")},
    ],
    ids=str,
)
def test_an_offer_of_the_wrong_kind_is_refused(change: dict[str, Any]) -> None:
    owner = TIP.owners[0][0]
    assert offer_problem(offer_of(owner), owner, TIP, RULES) is None
    assert offer_problem(offer_of(owner, **change), owner, TIP, RULES)


def test_a_merge_ends_the_path_and_names_the_value_before() -> None:
    merged = {unit: ReducedUnit(name("merged", unit), 100) for unit in RULES.expert_units}
    merge = compose_merge(NEXT, merged, dict.fromkeys(merged, "A"), RULES)
    entry = merge.entries[EXPERT]
    assert (entry.base, entry.delta, entry.coding) == (NEXT.entries[EXPERT].digest, None, "none")
    assert merge.deltas == {}
    assert decode_manifest(merge.encoded) == merge


# ---------------------------------------------------------------- values made of deltas


def chain_of(length: int) -> dict[str, Move]:
    return {f"v{n}": Move("u", f"v{n - 1}", f"d{n}", f"v{n}") for n in range(1, length + 1)}


def test_a_way_leads_from_a_value_that_is_here_if_its_deltas_are_fewer_bytes() -> None:
    ways = chain_of(3)
    way = way_to("v3", ways, {"v1"}, 30, 100)
    assert [move.delta for move in way or ()] == ["d2", "d3"]
    assert len(way_to("v3", ways, {"v0"}, 30, 100) or ()) == 3
    assert way_to("v3", ways, {"v0"}, 34, 100) is None  # 102 bytes
    assert way_to("v3", ways, {"v9"}, 30, 100) is None
    assert way_to("v3", ways, {"v3"}, 30, 100) == ()


def test_no_way_is_longer_than_its_limit() -> None:
    ways = chain_of(MAX_DELTAS + 1)
    assert way_to(f"v{MAX_DELTAS}", ways, {"v0"}, 1, 100)
    assert way_to(f"v{MAX_DELTAS + 1}", ways, {"v0"}, 1, 100) is None


class Lone:
    """The machine of C, which hears of actions of A and B, and its effects."""

    def __init__(self) -> None:
        stored = [entry.digest for entry in TIP.entries.values()]
        self.now = 0.0
        peer = LocalPeer("C", 1.0, RULES, Timers(), now=0.0, random=Random(0))
        self.machine = RoundMachine(peer, Record(TIP, None, None), stored=stored)
        self.machine.start(0.0)
        while self.machine.is_listening:
            self.tell(Tick())

    def tell(self, event: Event) -> list[Effect]:
        self.now += 0.1
        return self.machine.handle(event, self.now)

    def propose(self, manifest: Manifest) -> list[Effect]:
        proposal = Propose(Ballot(9, "A"), manifest, ("A",), SHOWN)
        return self.tell(Received("A", header_of(TIP), proposal))

    def commit(self, manifest: Manifest, parent: Manifest) -> list[Effect]:
        certificate = Certificate(Ballot(0, "A"), dict.fromkeys("ABC", SIGNED))
        commit = Commit(manifest, certificate, parent)
        return self.tell(Received("A", header_of(manifest), commit))


def fetched(effects: list[Effect]) -> dict[str, tuple[int, bool]]:
    wants = [want for effect in effects if isinstance(effect, Fetch) for want in effect.wants]
    return {want.digest: (want.num_bytes, want.is_delta) for want in wants}


def test_a_vote_waits_for_each_delta_and_the_value_that_it_makes() -> None:
    peer = Lone()
    wanted = fetched(peer.propose(NEXT))
    assert set(NEXT.deltas) <= wanted.keys()
    assert all(wanted[delta] == (30, True) for delta in NEXT.deltas)
    assert wanted.keys() - NEXT.deltas.keys() == {NEXT.entries[NORMS].digest}
    effects = [effect for digest in wanted for effect in peer.tell(Stored(digest))]
    made = [effect for effect in effects if isinstance(effect, Rebuild)]
    assert {(e.base, e.delta, e.digest) for e in made} == {
        (TIP.entries[unit].digest, NEXT.entries[unit].delta, NEXT.entries[unit].digest)
        for unit in RULES.unit_coding
    }
    assert not any(isinstance(effect, Sync) for effect in effects)
    effects = [effect for each in made for effect in peer.tell(Stored(each.digest))]
    assert [effect for effect in effects if isinstance(effect, Sync)] == [Sync(NEXT)]


def one_that_makes_next() -> tuple[Lone, Digest]:
    """A voter that has all deltas of `NEXT`, and the value that it makes of that of `SHARED`."""
    peer = Lone()
    for digest in fetched(peer.propose(NEXT)):
        peer.tell(Stored(digest))
    return peer, NEXT.entries[SHARED].digest


def test_who_gets_other_bits_fetches_the_value() -> None:
    peer, value = one_that_makes_next()
    effects = peer.tell(NotMade(value, "other bits"))
    assert any(isinstance(effect, CancelFetch) for effect in effects)
    assert fetched(peer.tell(Tick())) == {value: (100, False)}
    peer.tell(Stored(value))
    assert not any(isinstance(effect, Rebuild) for effect in peer.tell(Tick()))


def test_a_value_that_came_whole_while_it_was_made_otherwise_is_here() -> None:
    peer, value = one_that_makes_next()
    peer.tell(Stored(value))
    effects = [*peer.tell(NotMade(value, "other bits")), *peer.tell(Tick())]
    assert value not in fetched(effects)
    assert not any(isinstance(effect, CancelFetch | Rebuild) for effect in effects)


def test_a_value_that_is_lost_while_it_is_made_is_not_here() -> None:
    peer, value = one_that_makes_next()
    peer.tell(Unobtainable(value, "C", "it reads wrongly"))
    peer.tell(NotMade(value, "other bits"))
    assert value in fetched(peer.tell(Tick()))


def test_what_came_out_otherwise_once_is_not_made_again() -> None:
    peer, value = one_that_makes_next()
    peer.tell(NotMade(value, "other bits"))
    effects = [*peer.commit(NEXT, TIP), *peer.tell(Tick())]
    assert value in fetched(effects)
    assert not any(isinstance(e, Rebuild) and e.digest == value for e in effects)


SECOND, _, _ = composed("ABC", tip=NEXT)


def test_who_missed_a_manifest_follows_by_the_deltas_of_both() -> None:
    peer = Lone()
    wanted = fetched(peer.commit(SECOND, NEXT))
    assert {*NEXT.deltas, *SECOND.deltas, SECOND.entries[NORMS].digest} == wanted.keys()
    digests = wanted.keys()
    for made in (NEXT, SECOND):
        effects = [effect for digest in digests for effect in peer.tell(Stored(digest))]
        digests = {effect.digest for effect in effects if isinstance(effect, Rebuild)}
        assert digests == {made.entries[unit].digest for unit in RULES.unit_coding}


def test_of_a_decided_manifest_a_delta_that_nobody_has_is_done_without() -> None:
    peer, delta = Lone(), NEXT.entries[SHARED].delta
    assert delta is not None
    effects = peer.commit(NEXT, TIP)
    (fetch,) = (effect for effect in effects if isinstance(effect, Fetch))
    (want,) = (want for want in fetch.wants if want.digest == delta)
    for source in want.sources:
        peer.tell(Unobtainable(delta, source, "absent"))
    peer.now += 1.0
    again = fetched(peer.tell(Tick()))
    assert delta not in again
    assert again[NEXT.entries[SHARED].digest] == (100, False)


def test_deltas_of_the_tip_are_kept() -> None:
    peer = Lone()
    for digest in fetched(peer.commit(NEXT, TIP)):
        peer.tell(Stored(digest))
    for unit in RULES.unit_coding:
        peer.tell(Stored(NEXT.entries[unit].digest))
    kept = [e for e in peer.tell(Synced(NEXT.digest)) if isinstance(e, Keep)]
    assert kept and kept[-1].digests >= set(NEXT.deltas)


# ---------------------------------------------------------------- adoption


MEANS = coded(make_rules(owners_per_expert=2), SHARED, EXPERT)
START = found(MEANS, ["A", "B", "C"])


def adopted(peers: str, offers: list[Offer], *, me: str = "A", **options: Any) -> Adoption:
    """How A adopts a round of these peers."""
    manifest, _, _ = composed(peers, MEANS, START)
    bases = {0: START.entries[EXPERT].digest}
    fields = {"previous": START.digest, "bases": bases, "offers": offers, **options}
    return adopt(me, manifest, **fields)


def test_my_delta_is_taken_off_once_it_is_in_the_mean() -> None:
    mine = offer_of("A", MEANS, START)
    adoption = adopted("AB", [mine])
    assert adoption.shared is Action.CORRECTED
    assert adoption.shared_from == {u: mine.units[u].digest for u in (NORMS, SHARED)}
    expert = adoption.experts[0]
    assert (expert.action, expert.rebase_from) == (Action.CORRECTED, mine.units[EXPERT].digest)
    assert adoption.carried == frozenset()


def test_a_delta_that_is_not_known_to_be_mine_begins_anew() -> None:
    """As after a crash: x may not contain it, and subtracting it twice would lose it twice."""
    mine = offer_of("A", MEANS, START).units
    older = {unit: replace(mine[unit], digest=name("older", unit)) for unit in (SHARED, EXPERT)}
    other = replace(offer_of("A", MEANS, START), units=mine | older)
    for offers in ([], [other]):
        adoption = adopted("AB", offers)
        assert (adoption.shared, adoption.experts[0].action) == (Action.RESTART, Action.RESTART)


def test_what_a_round_left_out_goes_on_once() -> None:
    adoption = adopted("BC", [])
    assert adoption.shared is Action.CARRIED
    assert adoption.experts[0].action is Action.CARRIED
    assert adoption.kept == {0}
    assert adoption.carried == {EXPERT, NORMS, SHARED}
    again = adopted("BC", [], carried=adoption.carried)
    assert (again.shared, again.experts[0].action) == (Action.RESTART, Action.RESTART)


def test_nothing_goes_on_from_another_base() -> None:
    adoption = adopted("BC", [], previous=name("other"), bases={0: name("other")})
    assert (adoption.shared, adoption.experts[0].action) == (Action.RESTART, Action.RESTART)


def test_the_writer_of_a_verbatim_delta_keeps_its_master() -> None:
    owner = TIP.owners[0][0]
    base = TIP.entries[EXPERT].digest
    adoption = adopt(owner, NEXT, previous=TIP.digest, bases={0: base}, offers=[OFFERS[owner]])
    assert adoption.experts[0].action is Action.PUBLISHED
    without = adopt(owner, NEXT, previous=TIP.digest, bases={0: base}, offers=[])
    assert without.experts[0].action is Action.RESTART


# ---------------------------------------------------------------- remainders of means


def tips(**changes: Any) -> tuple[Remainders[str], Manifest]:
    """The remainder of a mean of `SHARED` after `NEXT`, and the manifest after it."""
    left: Remainders[str] = Remainders(TIP.digest, 3)
    left.found(TIP.digest, SHARED, name("B", SHARED, TIP.digest), "first")
    left.applied(NEXT, TIP)
    return left, replace(SECOND, **changes)


def test_what_is_left_over_waits_for_its_manifest() -> None:
    left: Remainders[str] = Remainders(TIP.digest, 3)
    left.found(TIP.digest, SHARED, name("B", SHARED, TIP.digest), "good")
    left.found(TIP.digest, SHARED, name("tried before"), "bad")
    left.found(name("older tip"), SHARED, name("B", SHARED, TIP.digest), "late")
    assert left.of(SHARED) is None
    assert left.applied(NEXT, TIP) == []
    assert left.of(SHARED) == "good"
    assert list(left.items()) == [(SHARED, "good")]


def test_what_is_left_over_stays_while_others_average_the_unit() -> None:
    left, after = tips()
    assert left.applied(after, NEXT) == []
    assert left.of(SHARED) == "first"


def test_who_passed_a_manifest_over_drops_what_may_be_in_it() -> None:
    left, after = tips(parent=name("unknown"))
    left.found(NEXT.digest, SHARED, name("B2"), "second")
    assert sorted(left.applied(after, NEXT)) == ["first", "second"]
    assert left.of(SHARED) is None


def test_nothing_is_left_over_in_another_generation() -> None:
    left, after = tips(generation="ab" * 16, kind=Kind.REFORM, sources={})
    assert left.applied(after, NEXT) == ["first"]
    assert left.of(SHARED) is None


def test_what_is_left_over_is_good_for_some_rounds() -> None:
    left, after = tips(round=NEXT.round + 4)
    assert left.applied(after, NEXT) == ["first"]
