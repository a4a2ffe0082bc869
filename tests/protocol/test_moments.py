import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import swarm.protocol
from swarm.errors import BadMessage
from swarm.experts import expert_unit
from swarm.protocol.layout import layout_of
from swarm.protocol.manifest import Member
from swarm.protocol.messages import ReducedUnit
from swarm.protocol.moments import (
    Moments,
    Question,
    Search,
    backup_holders,
    counts_twice,
    decode_answer,
    decode_question,
    decode_searches,
    encode_answer,
    encode_question,
    encode_searches,
    handed_over,
    handover_round,
    is_backup_round,
    is_in_vain,
    is_outdated,
    is_wanted,
    layout_of_size,
    may_come,
    moments_layout,
    newest,
    whom_to_ask,
)
from swarm.protocol.rounds.composition import Attendance, compose_round
from swarm.protocol.rounds.rosters import plan_roster
from tests.protocol.round_pump import found, make_offer, make_rules, name
from tests.train.runs import tiny_run

RULES = make_rules(experts=8)
LAYOUT = layout_of(tiny_run())


def next_round(tip, rules, contributors, *, leaving=(), joiners=None):
    """The manifest of a round that these peers contributed to."""
    plan = plan_roster(tip, {peer: make_offer(rules, peer, tip) for peer in contributors}, rules)
    results = {unit: ReducedUnit(name("mean", unit, tip.digest), 100) for unit in plan.reducers}
    attendance = Attendance(contributors, dict.fromkeys(leaving, ""), joiners or {})
    return compose_round(tip, plan, results, attendance, rules)


@settings(max_examples=25)
@given(st.integers(2, 7), st.integers(0, 6), st.integers(1, 12), st.booleans())
def test_the_backup_lies_with_the_peer_that_adopts(num_peers, index, num_experts, leaves):
    rules = make_rules(experts=num_experts)
    peers = [f"p{number}" for number in range(num_peers)]
    tip = found(rules, peers)
    lost = peers[index % num_peers]
    left = [peer for peer in peers if peer != lost]
    tip = next_round(tip, rules, peers)
    holders = backup_holders(tip)
    adopted = tip
    if leaves:
        adopted = next_round(tip, rules, left, leaving=[lost])
    else:
        for _ in range(rules.silent_limit + 1):
            adopted = next_round(adopted, rules, left)
    for expert, owners in tip.owners.items():
        if owners == (lost,):
            assert adopted.owners[expert] == (holders[expert],)


def test_nobody_is_its_own_backup_and_one_peer_has_none():
    tip = found(RULES, ["a", "b", "c"])
    holders = backup_holders(tip)
    assert sorted(holders) == list(range(8))
    assert all(holders[expert] != tip.owners[expert][0] for expert in range(8))
    assert backup_holders(found(RULES, ["a"])) == {}


def test_an_expert_with_two_owners_needs_no_backup():
    assert backup_holders(found(make_rules(owners_per_expert=2), ["a", "b", "c"])) == {}


def test_backups_follow_capacity():
    tip = found(RULES, ["a", "b", "c"])
    tip = replace(
        tip,
        members={"a": Member(0, 1.0), "b": Member(0, 1.0), "c": Member(0, 50.0)},
        owners=dict.fromkeys(range(8), ("a",)),
    )
    assert set(backup_holders(tip).values()) == {"c"}


@pytest.mark.parametrize(
    ("number", "every", "due"), [(0, 1, False), (1, 1, True), (5, 0, False), (6, 3, True)]
)
def test_backups_are_due_every_so_many_rounds(number, every, due):
    assert is_backup_round(number, every) is due


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


def test_only_owner_and_holder_want_announced_moments_the_holder_from_an_owner():
    tip = found(RULES, ["a", "b", "c", "d"])
    holder, owner = backup_holders(tip)[0], tip.owners[0][0]
    (other, _) = (peer for peer in tip.members if peer not in (holder, owner))
    assert is_wanted(holder, owner, 0, tip) and is_wanted(owner, holder, 0, tip)
    assert not is_wanted(other, owner, 0, tip)
    assert not is_wanted(holder, other, 0, tip)
    assert not is_wanted(holder, owner, 99, tip)


def test_owners_so_far_are_asked_first_then_the_backup_then_all():
    peers = [f"p{number:02}" for number in range(40)]
    before = next_round(found(RULES, peers), RULES, peers)
    (owner,), holder = before.owners[3], backup_holders(before)[3]
    after = next_round(before, RULES, peers, leaving=[owner])
    asked = whom_to_ask("me", 3, before, after)
    assert asked[:2] == (owner, holder) and len(asked) == 16
    assert owner not in whom_to_ask(owner, 3, before, after)


def test_of_several_owners_the_one_with_the_newest_moments_to_come_is_waited_for():
    rules = make_rules(experts=3, owners_per_expert=2)
    before = next_round(found(rules, ["A", "B", "C"]), rules, ["A", "B", "C"])
    expert = next(e for e, owners in before.owners.items() if owners == ("A", "B"))
    after = next_round(before, rules, ["B", "C"])  # A missed it, so it has those of round 1
    old, new = (Moments(expert, round_, f"{round_}" * 64, 8) for round_ in (1, 2))
    assert may_come(expert, before, after, ["A", "B"], [("A", old)])
    assert not may_come(expert, before, after, ["A", "B"], [("A", old), ("B", new)])
    assert not may_come(expert, before, after, ["A"], [("A", old)])  # B is gone
    assert not may_come(expert, before, after, ["C"], [])


def test_the_latest_round_wins_then_the_blob_with_masters_then_the_peer_id():
    old, new = Moments(0, 3, "a" * 64, 8), Moments(0, 4, "b" * 64, 8)
    with_master = replace(new, num_bytes=12)
    assert newest([("a", old), ("b", new)]) == ("b", new)
    assert newest([("a", new), ("b", with_master)]) == ("b", with_master)
    assert newest([("b", new), ("a", new)]) == ("a", new)
    assert newest([]) is None


def test_a_copy_stays_while_its_expert_is_not_renewed_and_goes_later():
    copy = Moments(0, 10, "a" * 64, 8)
    assert not is_outdated(copy, version=10, every=3)
    assert not is_outdated(copy, version=16, every=3)
    assert is_outdated(copy, version=17, every=3)
    assert not is_outdated(copy, version=12, every=0) and is_outdated(copy, version=13, every=0)


@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("version", [10, 12, 13, 16, 17])
def test_a_search_is_in_vain_once_the_newest_copy_it_is_for_would_be_dropped(version, every):
    taken = replace(found(RULES, ["a", "b"]), round=10)
    unit = expert_unit(0)
    entry = replace(taken.entries[unit], version=version)
    tip = replace(taken, round=20, entries={**taken.entries, unit: entry})
    copy = Moments(0, taken.round, "a" * 64, 8)
    outdated = is_outdated(copy, version, every)
    assert is_in_vain(Search((0,), taken, taken, 5), 0, tip, every) is outdated


def test_copies_made_since_an_expert_is_trained_here_count_twice_and_earlier_ones_do_not():
    taken = replace(found(RULES, ["a", "b"]), round=10)
    handed, since = (Moments(0, number, "a" * 64, 8) for number in (10, 11))
    trained = Search((0,), taken, taken, 5)
    assert counts_twice(trained, since) and not counts_twice(trained, handed)
    assert not counts_twice(replace(trained, steps=0), since)  # nothing is in training yet


def test_searches_read_back_after_a_restart():
    before = next_round(found(RULES, ["a", "b", "c"]), RULES, ["a", "b", "c"])
    after = next_round(before, RULES, ["a", "b", "c"], leaving=["b"])
    searches = (Search((1, 4), before, after, 17), Search((2,), after, after))
    assert decode_searches(encode_searches(searches)) == searches
    assert decode_searches(encode_searches(())) == ()


def test_a_moments_blob_is_first_moments_second_moments_and_perhaps_masters():
    unit = LAYOUT.by_unit[expert_unit(1)]
    short = moments_layout(LAYOUT, 1, with_master=False)
    long = moments_layout(LAYOUT, 1, with_master=True)
    assert (short.num_bytes, long.num_bytes) == (8 * unit.num_elements, 12 * unit.num_elements)
    names = [piece.name for piece in unit.slices]
    kinds = ("exp_avg", "exp_avg_sq", "master")
    assert [p.name for p in long.slices] == [f"{kind}.{n}" for kind in kinds for n in names]
    assert layout_of_size(LAYOUT, 1, short.num_bytes) == short
    assert layout_of_size(LAYOUT, 1, long.num_bytes) == long
    assert layout_of_size(LAYOUT, 1, short.num_bytes - 4) is None
    assert layout_of_size(LAYOUT, 99, short.num_bytes) is None


def test_nothing_that_decides_a_round_knows_of_moments():
    """So no agreed value can depend on them, and nobody can wait for them."""
    protocol = Path(swarm.protocol.__file__).parent
    deciding = [*(protocol / "rounds").glob("*.py")]
    deciding += [protocol / f"{name}.py" for name in ("manifest", "messages", "wire", "membership")]
    assert len(deciding) > 15
    imports = re.compile(r"^(from|import) .*moments", re.MULTILINE)
    assert not [path.name for path in deciding if imports.search(path.read_text())]


def test_questions_and_answers_read_back():
    question = Question(news=True, settled=("a" * 64,))
    assert decode_question(encode_question(question)) == question
    answer = (Moments(3, 7, "b" * 64, 1024),)
    assert decode_answer(encode_answer(answer)) == answer


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b'{"news":true,"settled":["short"]}',
        b'{"news":true,"settled":[],"more":1}',
        b'{"moments":[{"expert":-1,"round":0,"digest":"' + b"a" * 64 + b'","num_bytes":8}]}',
    ],
)
def test_what_is_no_question_or_answer_is_refused(payload):
    with pytest.raises(BadMessage):
        decode_question(payload)
    with pytest.raises(BadMessage):
        decode_answer(payload)
