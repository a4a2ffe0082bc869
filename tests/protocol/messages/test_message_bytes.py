"""The cache of decoded offers: limited by bytes, with the last used ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from swarm.errors import BadMessage, HostileInput
from swarm.protocol.messages import message_bytes
from swarm.protocol.messages.events import Received
from swarm.protocol.messages.message_bytes import (
    MAX_OFFERS,
    MAX_OFFERS_BYTES,
    KnownOffers,
    decode_evidence,
    encode_evidence,
)
from swarm.protocol.messages.messages import (
    Accept,
    Accepted,
    Ballot,
    Declaration,
    Declared,
    Evidence,
    Header,
    Message,
    Offer,
    OfferedUnit,
    Propose,
    Ready,
    Reduced,
    ReducedUnit,
    Report,
    Signature,
    declaration_of,
    ready_statement,
    reduced_statement,
)
from swarm.protocol.messages.signatures import verified
from swarm.protocol.rounds.campaign import Declarations
from swarm.protocol.rounds.policies.checks import proposal_problem, successor_problem
from swarm.protocol.rounds.policies.composition import Attendance, compose_round
from swarm.protocol.rounds.policies.deals import book_after
from swarm.protocol.rounds.policies.evidence_checks import evidence_problem, offers_shown
from swarm.protocol.rounds.policies.rosters import plan_roster
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.manifest import Manifest, PeerId, Wish
from tests.protocol.round_pump import Pump, in_training, make_offer, make_rules, name, start_swarm

# With a time instead of a number of steps, tokens depend on a peer's claim.
RULES = replace(make_rules(experts=6), round_seconds=3.2)
RUN = RULES.run


@dataclass(frozen=True)
class Round:
    """The true messages to a convener, and its possible statements."""

    tip: Manifest
    offers: Mapping[PeerId, Offer]
    declared: Mapping[PeerId, Declaration]
    results: Mapping[str, str]
    """Other means than the true ones."""
    joiners: Mapping[PeerId, float]
    capacities: Mapping[PeerId, float]
    heard: frozenset[PeerId]
    wishes: Mapping[PeerId, Wish]

    def manifest(self) -> Manifest:
        plan = plan_roster(self.tip, self.offers, RULES)
        results = {
            unit: ReducedUnit(
                self.results.get(unit, name("mean", *plan.sources[unit])), RULES.unit_bytes[unit]
            )
            for unit in plan.reducers
        }
        attendance = Attendance(self.heard, self.wishes, self.joiners, self.capacities)
        return compose_round(self.tip, plan, results, attendance, RULES)

    def evidence(self) -> Evidence:
        plan = plan_roster(self.tip, self.offers, RULES)
        reports = []
        for reducer in sorted(set(plan.reducers.values())):
            means = {
                unit: ReducedUnit(name("mean", *plan.sources[unit]), RULES.unit_bytes[unit])
                for unit, peer in plan.reducers.items()
                if peer == reducer
            }
            reports.append(Report(reducer, means, sign(reducer, plan.roster_id, means)))
        declared = {
            peer: Declared(said, stub(peer, ready_statement(RUN, self.tip.digest, said)))
            for peer, said in self.declared.items()
        }
        return Evidence(declared, plan.able, plan.roster_id, tuple(reports))


def stub(peer: PeerId, statement: bytes) -> Signature:
    return digest_of(peer.encode() + statement).encode()


def holds(peer: PeerId, statement: bytes, signature: Signature) -> bool:
    return signature == stub(peer, statement)


def sign(peer: PeerId, roster_id: str, means: Mapping[str, ReducedUnit]) -> Signature:
    return stub(peer, reduced_statement(RUN, roster_id, means))


def parent() -> Manifest:
    pump = in_training("ABCDE", RULES)
    return pump.tip_of("A")


TIP = parent()


def true_round(**changes: Any) -> Round:
    """A, B and C have offered, D has only answered, and E has not. S asks to join."""
    offers = {peer: replace(make_offer(RULES, peer, TIP), seconds=2.5) for peer in "ABC"}
    declared = {peer: declaration_of(offers.get(peer), 1.0, leave=False) for peer in "ABCDS"}
    fields = {
        "tip": TIP,
        "offers": offers,
        "declared": declared,
        "results": {},
        "joiners": {"S": 1.0},
        "capacities": dict.fromkeys("ABCD", 1.0),
        "heard": frozenset("ABCD"),
        "wishes": {},
    }
    return Round(**{**fields, **changes})


TRUE = true_round()


def problem_of(manifest: Manifest, evidence: Evidence | None) -> str | None:
    return proposal_problem(manifest, evidence, TIP, RULES, due=False)


def test_what_follows_from_its_evidence_may_be_voted_for() -> None:
    assert problem_of(TRUE.manifest(), TRUE.evidence()) is None
    offers = offers_shown(TRUE.manifest(), TRUE.evidence(), TIP, RULES)
    assert offers == TRUE.offers
    assert [each.digest for each in offers.values()] == [o.digest for o in TRUE.offers.values()]


def test_nothing_is_voted_for_without_evidence() -> None:
    assert problem_of(TRUE.manifest(), None) == "it comes without evidence"


def longer(offer: Offer) -> Offer:
    return replace(offer, steps=20, tokens=2000)


def other_value(offer: Offer) -> Offer:
    unit = next(iter(offer.units))
    units = {**offer.units, unit: replace(offer.units[unit], digest=name("another"))}
    return replace(offer, units=units)


def without_expert(offer: Offer) -> Offer:
    expert = next(unit for unit in offer.units if unit.startswith("expert"))
    return replace(offer, units={u: v for u, v in offer.units.items() if u != expert})


def swapped(offers: Mapping[PeerId, Offer]) -> dict[PeerId, Offer]:
    """The shared tensors of one contributor appear under another's name."""
    mine, other = offers["A"].units, offers["B"].units
    shared = [unit for unit in mine if unit.startswith("shared")]
    return {
        **offers,
        "A": replace(offers["A"], units={**mine, **{unit: other[unit] for unit in shared}}),
        "B": replace(offers["B"], units={**other, **{unit: mine[unit] for unit in shared}}),
    }


OFFERS = TRUE.offers
LIES: dict[str, Round] = {
    "a contributor that was not heard": replace(
        TRUE, offers={**OFFERS, "E": make_offer(RULES, "E", TIP)}
    ),
    "a contributor that has not offered": replace(
        TRUE, offers={**OFFERS, "D": make_offer(RULES, "D", TIP)}
    ),
    "more tokens": replace(TRUE, offers={**OFFERS, "A": longer(OFFERS["A"])}),
    "another pace": replace(TRUE, offers={**OFFERS, "A": replace(OFFERS["A"], seconds=0.5)}),
    "another value": replace(TRUE, offers={**OFFERS, "B": other_value(OFFERS["B"])}),
    "an expert left out of an offer": replace(
        TRUE, offers={**OFFERS, "B": without_expert(OFFERS["B"])}
    ),
    "swapped values": replace(TRUE, offers=swapped(OFFERS)),
    "another mean": replace(TRUE, results={"shared.0": name("bad")}),
    "a member heard that was not": replace(TRUE, heard=frozenset("ABCDE")),
    "another capacity": replace(TRUE, capacities={**TRUE.capacities, "A": 9.0}),
    "a joiner that did not ask": replace(TRUE, joiners={"S": 1.0, "Z": 1.0}),
    "another joiner": replace(TRUE, joiners={"Z": 1.0}),
    "a joiner's other capacity": replace(TRUE, joiners={"S": 50.0}),
    "a wish that was not declared": replace(TRUE, wishes={"D": ""}),
}


@pytest.mark.parametrize("what", LIES)
def test_each_lie_of_a_convener_is_found_by_what_was_signed(what: str) -> None:
    lie = LIES[what].manifest()
    # Parent and manifest do not show it. Before there was evidence, it was believed.
    assert successor_problem(lie, TIP, RULES, due=False) is None
    assert problem_of(lie, TRUE.evidence())


def test_who_declared_to_leave_is_let_go_and_with_its_wish_only() -> None:
    leaves = {**TRUE.declared, "D": replace(TRUE.declared["D"], leave=True)}
    evidence = replace(TRUE, declared=leaves).evidence()
    gone = replace(TRUE, wishes={"D": "signed"}).manifest()
    assert problem_of(gone, evidence) is None
    assert problem_of(TRUE.manifest(), evidence)
    assert problem_of(replace(gone, wishes={}), evidence)


def test_who_is_said_not_to_have_been_heard_is_the_conveners_word() -> None:
    """The same holds for an excluded offer: nobody can prove that a message did not come."""
    unheard = replace(
        TRUE,
        heard=frozenset("ABC"),
        capacities=dict.fromkeys("ABC", 1.0),
        declared={peer: said for peer, said in TRUE.declared.items() if peer != "D"},
    )
    assert problem_of(unheard.manifest(), unheard.evidence()) is None
    left_out = replace(TRUE, offers={peer: OFFERS[peer] for peer in "AB"})
    assert problem_of(left_out.manifest(), left_out.evidence()) is None
    assert problem_of(unheard.manifest(), TRUE.evidence())
    assert problem_of(TRUE.manifest(), unheard.evidence())


def test_offers_that_nobody_may_make_are_found_though_they_were_declared() -> None:
    """Their maker and the convener may be the same liar."""

    def declared(peer: PeerId, offer: Offer) -> Round:
        said = {**TRUE.declared, peer: declaration_of(offer, 1.0, leave=False)}
        return replace(TRUE, offers={**OFFERS, peer: offer}, declared=said)

    def foreign(offer: Offer) -> Offer:
        owned = {unit for unit in offer.units if unit.startswith("expert")}
        unit = next(unit for unit in RULES.expert_units if unit not in owned)
        value = OfferedUnit(name("x"), RULES.unit_bytes[unit], TIP.entries[unit].digest)
        return replace(offer, units={**offer.units, unit: value})

    empty = replace(OFFERS["A"], units={}, steps=0, tokens=0)
    for lie, why in [
        (declared("A", replace(OFFERS["A"], steps=10**6, tokens=10**8)), "samples"),
        (declared("A", foreign(OFFERS["A"])), "does not own"),
        (replace(declared("A", empty), offers={"A": empty}), "nobody"),
    ]:
        assert why in (problem_of(lie.manifest(), lie.evidence()) or ""), why
    lie = declared("S", replace(make_offer(RULES, "A", TIP), units=OFFERS["A"].units))
    found = evidence_problem(lie.manifest(), lie.evidence(), TIP, RULES)
    assert "is no member" in (found or "")


def test_results_are_those_of_the_reducers_of_the_very_roster() -> None:
    manifest, evidence = TRUE.manifest(), TRUE.evidence()
    first, *others = evidence.reports
    bad = {unit: replace(mean, digest=name("bad")) for unit, mean in first.results.items()}
    stolen = Report(others[0].reducer, bad, others[0].signature)
    forged = Report(first.reducer, bad, first.signature)
    assert problem_of(manifest, replace(evidence, reports=(stolen, *evidence.reports))) is None
    assert problem_of(manifest, replace(evidence, reports=(forged, *evidence.reports)))
    assert problem_of(manifest, replace(evidence, reports=(first, forged, *others))) is None
    assert "has not signed a mean" in (
        problem_of(manifest, replace(evidence, reports=tuple(others))) or ""
    )
    assert problem_of(manifest, replace(evidence, roster_id=name("older")))
    assert problem_of(manifest, replace(evidence, able={"A": 0}))


# ---------------------------------------------------------------- signatures


def heard(message: Message, source: PeerId, tip: str = TIP.digest) -> Message:
    return verified(Header(((2, ()),), tip, "0"), message, source, RUN, holds)


def test_a_ready_and_results_are_signed_by_their_sender() -> None:
    said = TRUE.declared["A"]
    ballot, offer = Ballot(0, "B"), OFFERS["A"]
    signature = stub("A", ready_statement(RUN, TIP.digest, said))
    ready = Ready(ballot, offer, None, 1.0, signature=signature)
    assert heard(ready, "A") is ready
    assert heard(replace(ready, ballot=Ballot(7, "C"), remaining_s=3.0), "A")
    means = {"shared.0": ReducedUnit(name("mean"), 100)}
    reduced = Reduced(ballot, name("roster"), means, {}, sign("A", name("roster"), means))
    assert heard(reduced, "A") is reduced
    for wrong, source, tip in [
        (ready, "B", TIP.digest),
        (ready, "A", name("tip before")),
        (replace(ready, capacity=2.0), "A", TIP.digest),
        (replace(ready, leave=True), "A", TIP.digest),
        (replace(ready, offer=longer(offer)), "A", TIP.digest),
        (replace(ready, offer=None), "A", TIP.digest),
        (reduced, "B", TIP.digest),
        (replace(reduced, roster_id=name("other")), "A", TIP.digest),
        (replace(reduced, results={}), "A", TIP.digest),
    ]:
        with pytest.raises(HostileInput):
            heard(wrong, source, tip)


def test_of_evidence_only_what_is_signed_for_this_tip_and_roster_is_left() -> None:
    manifest, evidence = TRUE.manifest(), TRUE.evidence()
    ballot = Ballot(0, "A")
    sound = Propose(ballot, manifest, (), evidence)
    vote = Ready(
        ballot, None, Accepted(ballot, manifest, evidence), 1.0,
        signature=stub("B", ready_statement(RUN, TIP.digest, declaration_of(None, 1.0, False))),
    )  # fmt: skip
    assert heard(sound, "A") is sound
    assert heard(vote, "B") is vote
    old = stub("D", ready_statement(RUN, name("tip before"), TRUE.declared["D"]))
    replayed = {**evidence.declared, "D": Declared(TRUE.declared["D"], old)}
    mine = Declared(TRUE.declared["D"], stub("A", b"whatever"))
    first, *others = evidence.reports
    older = sign(first.reducer, name("older roster"), first.results)
    for forged, kept in [
        (replace(evidence, declared=replayed), "ABCS"),
        (replace(evidence, declared={**evidence.declared, "E": mine}), "ABCDS"),
        (replace(evidence, reports=(replace(first, signature=older), *others)), "ABCDS"),
        (replace(evidence, roster_id=name("older roster")), "ABCDS"),
    ]:
        left = heard(replace(sound, evidence=forged), "A")
        assert isinstance(left, Propose) and left.evidence
        assert "".join(left.evidence.declared) == kept
        shown = heard(replace(vote, accepted=replace(vote.accepted, evidence=forged)), "B")
        assert shown.accepted.evidence == left.evidence
        is_harmless = left.evidence == evidence
        assert (problem_of(manifest, left.evidence) is None) == is_harmless


def test_a_vote_that_all_show_is_verified_once_and_what_differs_by_itself() -> None:
    """In a takeover each of 255 READYs shows the same vote."""
    manifest, evidence = TRUE.manifest(), TRUE.evidence()
    said, asked = declaration_of(None, 1.0, leave=False), []

    def counted(peer: PeerId, statement: bytes, signature: Signature) -> bool:
        asked.append(peer)
        return holds(peer, statement, signature)

    def shown(source: PeerId, evidence: Evidence, run: str = RUN, **changes: Any) -> Evidence:
        vote = Accepted(Ballot(0, "A"), replace(manifest, **changes), evidence)
        signature = stub(source, ready_statement(run, TIP.digest, said))
        ready = Ready(Ballot(1, "B"), None, vote, 1.0, signature=signature)
        left = verified(Header(((2, ()),), TIP.digest, "0"), ready, source, run, counted)
        assert isinstance(left, Ready) and left.accepted and left.accepted.evidence
        return left.accepted.evidence

    sources = [f"p{number}" for number in range(255)]
    assert all(shown(source, evidence) is evidence for source in sources)
    num_shown = len(evidence.declared) + len(evidence.reports)
    assert len(asked) == num_shown + len(sources)

    asked.clear()
    first, *others = evidence.reports
    unsigned = stub("A", b"whatever")
    declared = {**evidence.declared, "B": replace(evidence.declared["B"], signature=unsigned)}
    forgeries = [
        replace(evidence, declared=declared),
        replace(evidence, reports=(replace(first, signature=unsigned), *others)),
    ]
    for forged in forgeries:
        left = shown("p0", forged)
        assert left != forged and left is shown("p1", forged), "the rest is the same, too"
        assert problem_of(manifest, left)
    assert len(asked) == len(forgeries) * (num_shown + 2)
    assert not shown("p0", evidence, parent=name("tip before")).declared
    assert not shown("p0", evidence, run="run-2").reports
    assert shown("p0", evidence) is evidence


# ---------------------------------------------------------------- the machine's use


def signing(pump: Pump) -> list[tuple[PeerId, bytes]]:
    """Makes the machines of a swarm sign by the stub. Returns their signed messages."""
    statements: list[tuple[PeerId, bytes]] = []
    for peer, node in pump.nodes.items():

        def sign_as(statement: bytes, peer: str = peer) -> Signature:
            statements.append((peer, statement))
            return stub(peer, statement)

        node.machine._peer.sign = sign_as
        node.machine._work.signed.clear()
    return statements


def test_machines_sign_what_others_verify_and_once_for_each_declaration() -> None:
    pump = start_swarm("ABC", RULES, tick_s=0.5)
    statements = signing(pump)
    refused = []

    def check(source: PeerId, destination: PeerId, message: Message) -> bool:
        header = Header(((0, ()),), pump.nodes[source].machine._out.header.tip, "0")
        try:
            assert verified(header, message, source, RUN, holds) == message
        except HostileInput as error:
            refused.append((message, error))
        return False

    pump.lose = check
    pump.train_times(20.0)  # polls repeat earlier statements
    pump.run_to_height(3)
    assert not refused
    ready = [each for each in statements if each[1].startswith(b"swarm ready")]
    assert len(set(ready)) == len(ready)
    assert pump.count_sent(Ready) > 2 * len(ready)


def test_a_vote_keeps_its_evidence_so_that_it_can_be_shown_again() -> None:
    """The first convener dies after its proposal. The next one must propose the same [C2]."""
    pump = in_training("ABC", RULES)
    first = pump.first
    pump.lose = lambda source, destination, message: (
        source == first and not isinstance(message, Propose)
    )
    others = pump.others(first)
    pump.run(pump.now + 60, lambda: all(pump.nodes[p].record.accepted for p in others))
    vote = pump.nodes[others[0]].record.accepted
    assert vote is not None and vote.evidence is not None
    pump.kill(first)
    pump.run_to_height(3, others)
    assert pump.digests_at(3, others) == {vote.manifest.digest}


@pytest.mark.parametrize("what", ["nothing", "another"])
def test_who_proposes_without_its_evidence_is_followed_no_more(what: str) -> None:
    pump = in_training("ABCD", RULES)
    convener, voter = pump.order[:2]
    proposals: list[Propose] = []

    def watch(source: PeerId, destination: PeerId, message: Message) -> bool:
        if isinstance(message, Propose) and destination == voter:
            proposals.append(message)
            return True
        return False

    pump.lose = watch
    pump.run(pump.now + 20, lambda: bool(proposals))
    other = replace(proposals[0].evidence, declared={})
    evidence = other if what == "another" else None
    header = pump.nodes[convener].machine._out.header
    pump.give(voter, Received(convener, header, replace(proposals[0], evidence=evidence)))
    assert convener in pump.nodes[voter].machine._succession.distrusted
    assert pump.nodes[voter].record.accepted is None


def test_a_second_value_under_one_attempt_is_refused_and_its_convener_followed_no_more() -> None:
    """It may have split the votes. Almost no schedule depends on this rule alone."""
    pump = in_training("ABCD", RULES)
    convener, voter = pump.order[:2]
    proposals: list[Propose] = []

    def watch(source: PeerId, destination: PeerId, message: Message) -> bool:
        if isinstance(message, Propose) and destination == voter:
            proposals.append(message)
        return isinstance(message, Accept) and source != convener  # nothing is decided

    pump.lose = watch
    node, header = pump.nodes[voter], pump.nodes[convener].machine._out.header
    pump.run(pump.now + 20, lambda: node.record.accepted is not None)
    pump.give(voter, Received(convener, header, proposals[0]))
    assert convener not in node.machine._succession.distrusted, "the same once more"
    other = replace(proposals[0].manifest, tokens=proposals[0].manifest.tokens + 1)
    pump.give(voter, Received(convener, header, replace(proposals[0], manifest=other)))
    assert convener in node.machine._succession.distrusted
    assert node.record.accepted.manifest == proposals[0].manifest


# ---------------------------------------------------------------- the convener's evidence


def said(offer: str | None, *, leave: bool = False, mark: bytes = b"") -> Declared:
    return Declared(Declaration(offer, 0.0, 1.0, leave), mark * 64)


def test_of_what_a_peer_said_the_last_counts_that_names_the_offer_in_the_roster() -> None:
    grounds = Declarations()
    grounds.note("A", said("first", mark=b"1"))
    grounds.count("A")
    grounds.close(["A"])
    grounds.note("A", said(None, mark=b"2"))  # it was in flight for longer, or A restarts
    assert grounds.shown(TIP)["A"] == said("first", mark=b"1")
    grounds.note("A", said("first", leave=True, mark=b"3"))
    assert grounds.shown(TIP)["A"] == said("first", leave=True, mark=b"3")
    grounds.note("A", said("second", mark=b"4"))
    grounds.count("A")
    assert grounds.shown(TIP)["A"] == said("first", leave=True, mark=b"3")
    grounds.close([])
    assert grounds.shown(TIP)["A"] == said("second", mark=b"4")


def test_no_more_strangers_are_shown_than_may_come_however_many_ask() -> None:
    grounds = Declarations()
    for number in range(1000):
        grounds.note(f"Z{number}", said(None))
    grounds.note("A", said(None))
    shown = grounds.shown(TIP)
    assert len(shown) == 1 + len(TIP.members)
    everybody = replace(TRUE, joiners={f"Z{k}": 1.0 for k in range(1000)}).manifest()
    assert set(shown) - {"A"} == {peer for peer in everybody.members if peer.startswith("Z")}
    left_out = next(f"Z{number}" for number in range(1000) if f"Z{number}" not in shown)
    assert left_out in grounds.shown(TIP, {left_out}), "a guest's place is taken by no stranger"


# ---------------------------------------------------------------- bytes


def test_evidence_comes_back_as_it_was_and_only_in_canonical_form() -> None:
    evidence = TRUE.evidence()
    encoded = encode_evidence(evidence)
    assert decode_evidence(encoded) == evidence
    for wrong in (
        encoded.replace(b",", b", ", 1),
        encoded.replace(b'"leave":false', b'"leave":0', 1),
        encoded.replace(b'"capacity":1.0', b'"capacity":NaN', 1),
        encoded.replace(b'"capacity":1.0', b'"capacity":-1.0', 1),
        encoded.replace(b'"reducer":"', b'"reducer":"../', 1),
        encoded.replace(b'"able":{', b'"able":{"A":-1,', 1),
        encoded.replace(b'"able":{', b'"unknown":1,"able":{', 1),
        b" " * (8 * 2**20 + 1),
    ):
        assert wrong != encoded
        with pytest.raises(BadMessage):
            decode_evidence(wrong)


def test_deals_follow_from_the_members_of_each_lie() -> None:
    """Otherwise the deals would reveal a lie, and not the signatures."""
    for lie in LIES.values():
        manifest = lie.manifest()
        book = book_after(TIP, manifest.work, manifest.members, manifest.tokens, RULES)
        assert manifest.dealt == book.dealt


MIB = 2**20


@pytest.fixture(autouse=True)
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Counts decoded offers, each from dummy bytes."""
    seen = list[bytes]()

    def decode(encoded: bytes) -> Offer:
        seen.append(encoded)
        return Offer("f" * 64, 1, 1, {})

    monkeypatch.setattr(message_bytes, "decode_offer", decode)
    return seen


def test_100_offers_of_2_mib_are_not_all_kept() -> None:
    known = KnownOffers()
    for number in range(100):
        known(number.to_bytes(2 * MIB))
        assert known.num_bytes <= MAX_OFFERS_BYTES
    assert known.num_bytes == MAX_OFFERS_BYTES


def test_the_same_offer_is_the_same_object_while_others_come(decoded: list[bytes]) -> None:
    known, one = KnownOffers(), bytes(MIB)
    offer = known(one)
    for number in range(1, 200):
        known(number.to_bytes(MIB))
        assert known(bytes(MIB)) is offer, "the last used one stays"
    assert len(decoded) == 200 and offer.encoded is one
    assert known((1).to_bytes(MIB)) is not offer and len(decoded) == 201, "it had left"


def test_small_offers_are_bounded_by_their_number() -> None:
    known = KnownOffers()
    for number in range(MAX_OFFERS + 9):
        known(number.to_bytes(100))
    assert known.num_bytes == 100 * MAX_OFFERS
    known.cache_clear()
    assert known.num_bytes == 0
