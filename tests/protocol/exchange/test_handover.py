import re
from dataclasses import replace
from pathlib import Path

import pytest

import swarm.protocol
from swarm.errors import BadMessage
from swarm.experts import expert_unit
from swarm.protocol.exchange.handover import (
    PATIENCE_S,
    Giving,
    Moments,
    Taking,
    decode_answer,
    decode_question,
    encode_answer,
    encode_question,
    handed_over,
    handover_round,
    layout_of_size,
    moments_layout,
    moments_shapes,
    transfer_limit_s,
)
from swarm.protocol.messages.messages import ReducedUnit
from swarm.protocol.rounds.policies.composition import Attendance, compose_round
from swarm.protocol.rounds.policies.rosters import plan_roster
from swarm.protocol.values.layout import layout_of
from tests.protocol.round_pump import found, make_offer, make_rules, name
from tests.train.runs import tiny_run

RULES = make_rules(experts=8)
LAYOUT = layout_of(tiny_run())
TIP = found(RULES, ["me", "giver", "other"])


def next_round(tip, rules, contributors, *, leaving=(), joiners=None):
    """The manifest of a round that these peers contributed to."""
    plan = plan_roster(tip, {peer: make_offer(rules, peer, tip) for peer in contributors}, rules)
    results = {unit: ReducedUnit(name("mean", unit, tip.digest), 100) for unit in plan.reducers}
    attendance = Attendance(contributors, dict.fromkeys(leaving, ""), joiners or {})
    return compose_round(tip, plan, results, attendance, rules)


def test_a_leaver_hands_over_all_it_had_and_nobody_else_anything():
    before = next_round(found(RULES, ["a", "b", "c"]), RULES, ["a", "b", "c"])
    after = next_round(before, RULES, ["a", "b", "c"], leaving=["b"])
    mine = [expert for expert, owners in before.owners.items() if owners == ("b",)]
    assert handed_over("b", before, after) == {expert: after.owners[expert] for expert in mine}
    assert handed_over("a", before, after) == handed_over("c", before, after) == {}
    assert handed_over("b", before, before) == {}


def test_a_hand_over_is_of_this_round_if_its_owner_counted_else_of_the_one_before():
    before = next_round(found(RULES, ["a", "b", "c"]), RULES, ["a", "b", "c"])
    after = next_round(before, RULES, ["a", "c"], leaving=["b"])
    assert handover_round("a", before, after) == 2
    assert handover_round("b", before, after) == 1


def test_a_new_co_owner_gets_moments_from_the_one_that_stays():
    rules = make_rules(owners_per_expert=2)
    before = next_round(found(rules, ["a", "b", "c"]), rules, ["a", "b", "c"])
    after = next_round(before, rules, ["a", "b", "c"], leaving=["b"])
    for expert, owners in before.owners.items():
        if "b" in owners:
            (stays,) = (peer for peer in owners if peer != "b")
            (comes,) = (peer for peer in after.owners[expert] if peer not in owners)
            assert handed_over(stays, before, after)[expert] == (comes,)


ME, GIVER, OTHER = "me", "giver", "other"


def handed(expert=0, round_=1, fill="a"):
    return Moments(expert, round_, fill * 64, 8)


class Handover:
    """A new owner of some experts. The weights are of round 1."""

    def __init__(self, *, owners=(GIVER,), experts=(0,)):
        peers = [ME, GIVER, OTHER]
        tip = next_round(found(RULES, peers), RULES, peers)
        before = replace(tip, owners=tip.owners | dict.fromkeys(experts, owners))
        after = replace(tip, owners=tip.owners | dict.fromkeys(experts, (ME,)))
        self.taking = Taking()
        self.taking.take_up(ME, experts, before, after, now_s=0.0)

    def choose(self, now_s, **answers):
        return [(c.search.expert, c.found) for c in self.chosen(now_s, **answers)]

    def chosen(self, now_s, **answers):
        return self.taking.choose(answers, now_s)


def test_a_new_owner_asks_the_owners_before_it_and_takes_what_they_have_at_once():
    handover = Handover(owners=(GIVER, ME, OTHER))
    assert handover.taking.whom_to_ask() == [GIVER, OTHER]
    assert handover.choose(1.0, giver=[], other=[handed()]) == [(0, (OTHER, handed()))]
    assert handover.choose(2.0, giver=[handed()]) == []  # it is being fetched
    assert handover.taking.whom_to_ask() == [GIVER, OTHER]  # so that they know


def test_moments_are_waited_for_a_bounded_time_whether_their_owner_answers_or_not():
    for answers in ({"giver": []}, {}):
        handover = Handover()
        assert handover.choose(PATIENCE_S, **answers) == []
        assert handover.choose(PATIENCE_S + 0.1, **answers) == [(0, None)]
        assert not handover.taking.is_looking and handover.taking.whom_to_ask() == []


def test_an_expert_that_nobody_else_owned_keeps_zeros_at_once():
    assert Handover(owners=(ME,)).choose(0.0) == [(0, None)]


def test_moments_that_are_older_than_their_weights_or_of_others_are_not_taken():
    handover = Handover()
    assert handover.choose(1.0, giver=[handed(round_=0)], other=[handed()]) == []
    assert handover.choose(1.0, giver=[handed(expert=1)]) == []
    assert handover.choose(1.0, giver=[handed(round_=2)]) == [(0, (GIVER, handed(round_=2)))]


def test_a_giver_is_waited_for_while_something_comes_from_it_and_as_long_after_that():
    handover = Handover(experts=(0, 1))
    (first,) = handover.chosen(1.0, giver=[handed()])
    assert handover.choose(10 * PATIENCE_S) == []
    assert handover.taking.fetched(first, 10 * PATIENCE_S, is_here=True)
    assert handover.choose(11 * PATIENCE_S) == []
    assert handover.choose(11 * PATIENCE_S + 0.1) == [(1, None)]


def test_an_owner_from_which_a_blob_did_not_come_is_asked_no_more_for_that_expert():
    handover = Handover(owners=(GIVER, OTHER))
    (failed,) = handover.chosen(1.0, giver=[handed()])
    assert not handover.taking.fetched(failed, 2.0, is_here=False)
    (second,) = handover.chosen(2.0, giver=[handed()], other=[handed(fill="b")])
    assert second.found == (OTHER, handed(fill="b"))
    assert not handover.taking.fetched(second, 3.0, is_here=False)
    assert handover.choose(3.0, giver=[handed()]) == [(0, None)]


def test_what_arrives_for_an_expert_that_went_or_came_back_is_not_taken():
    for goes_on in (lambda _: None, lambda h: h.taking.take_up(ME, [0], TIP, TIP, 2.0)):
        handover = Handover()
        (choice,) = handover.chosen(1.0, giver=[handed()])
        handover.taking.keep_only([])
        goes_on(handover)
        assert not handover.taking.fetched(choice, 2.0, is_here=True)


def test_moments_are_out_for_their_new_owners_alone_until_these_have_them():
    giving = Giving()
    giving.put(handed(), [ME, OTHER], 0.0)
    giving.put(handed(1, fill="b"), [OTHER], 0.0)
    assert giving.asked("third", (), 1.0) == ()
    assert giving.asked(ME, (), 1.0) == (handed(),)
    assert giving.asked(ME, ["a" * 64], 2.0) == ()
    assert giving.waits_for(handed(), 2.0) == {OTHER} and giving.taken == set()
    assert giving.asked("third", ["a" * 64], 2.0) == ()  # speaks for itself only
    assert giving.asked(OTHER, ["a" * 64], 2.0) == (handed(1, fill="b"),)
    assert giving.waits_for(handed(), 2.0) == frozenset() and giving.taken == {0}


def test_a_new_owner_that_does_not_ask_is_given_up_and_one_that_asks_not_for_long():
    giving = Giving()
    giving.put(handed(), [ME], 0.0)
    assert giving.waits_for(handed(), PATIENCE_S) and not giving.waits_for(handed(), PATIENCE_S + 1)
    giving.asked(ME, (), 20.0)
    assert giving.waits_for(handed(), PATIENCE_S + 20)
    last_s = PATIENCE_S + transfer_limit_s(8)
    giving.asked(ME, (), last_s)
    assert giving.waits_for(handed(), last_s) and not giving.waits_for(handed(), last_s + 1)
    assert giving.taken == set()


def test_a_blob_counts_as_moments_while_it_is_out():
    giving = Giving()
    giving.put(handed(), [ME], 0.0)
    assert giving.holds("a" * 64) and not giving.holds("b" * 64)
    giving.end(handed())
    assert not giving.holds("a" * 64) and giving.asked(ME, (), 1.0) == ()


@pytest.mark.parametrize(("gigabytes", "minutes"), [(0.0, 5), (2.4, 48), (19.3, 386)])
def test_moments_have_as_long_as_a_slow_line_takes(gigabytes, minutes):
    assert transfer_limit_s(int(gigabytes * 1e9)) == pytest.approx(60 * minutes, rel=0.01)


@pytest.mark.parametrize(
    ("optimizer", "kinds"), [("adamw", ("exp_avg", "exp_avg_sq")), ("muon", ("momentum",))]
)
def test_a_moments_blob_has_the_moments_of_the_runs_optimizer_and_perhaps_masters(optimizer, kinds):
    layout = layout_of(tiny_run(optimizer={"kind": optimizer}))
    unit = layout.by_unit[expert_unit(1)]
    short = moments_layout(layout, 1, with_master=False)
    long = moments_layout(layout, 1, with_master=True)
    each = 4 * unit.num_elements
    assert (short.num_bytes, long.num_bytes) == (each * len(kinds), each * (len(kinds) + 1))
    names = [piece.name for piece in unit.slices]
    every = [f"{kind}.{n}" for kind in (*kinds, "master") for n in names]
    assert [p.name for p in long.slices] == every
    assert list(moments_shapes(layout, 1)) == every
    assert layout_of_size(layout, 1, short.num_bytes) == short
    assert layout_of_size(layout, 1, long.num_bytes) == long
    assert layout_of_size(layout, 1, short.num_bytes - 4) is None
    assert layout_of_size(layout, 99, short.num_bytes) is None


def test_nothing_that_decides_a_round_knows_of_moments():
    """So agreed values cannot depend on them, and rounds cannot wait for them."""
    protocol = Path(swarm.protocol.__file__).parent
    rooms = ("rounds", "values", "membership")
    deciding = [path for room in rooms for path in (protocol / room).rglob("*.py")]
    deciding += [protocol / "messages" / f"{name}.py" for name in ("messages", "message_bytes")]
    assert len(deciding) > 40 and all(path.is_file() for path in deciding)
    imports = re.compile(r"^(from|import) .*handover", re.MULTILINE)
    assert not [path.name for path in deciding if imports.search(path.read_text())]


def test_questions_and_answers_read_back():
    assert decode_question(encode_question(["a" * 64])) == ("a" * 64,)
    answer = (Moments(3, 7, "b" * 64, 1024),)
    assert decode_answer(encode_answer(answer)) == answer


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b'{"settled":["short"]}',
        b'{"settled":[],"more":1}',
        b'{"moments":[{"expert":-1,"round":0,"digest":"' + b"a" * 64 + b'","num_bytes":8}]}',
    ],
)
def test_what_is_no_question_or_answer_is_refused(payload):
    with pytest.raises(BadMessage):
        decode_question(payload)
    with pytest.raises(BadMessage):
        decode_answer(payload)
