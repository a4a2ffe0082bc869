from dataclasses import replace

import pytest

from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.training.adoption import Action, adopt
from swarm.protocol.values.manifest import Entry, Kind, Member
from tests.protocol.round_pump import found, make_rules

TIP = "tip"


def entry(digest, base=None, codec="fp32"):
    return Entry(digest, 1, 3, "me", codec, base)


def manifest(
    expert, *, kind=Kind.QUORUM, parent=TIP, owner="me", contributors=("me", "you"), sources=()
):
    """A successor of TIP with this entry for expert 0."""
    return found(
        make_rules(experts=1, parts=1),
        ["me", "you"],
        height=4,
        round=3,
        kind=kind,
        parent=parent,
        contributors=contributors,
        sources={"expert.0": tuple(sources)},
        owners={0: (owner,)},
        entries={"shared.0": entry("s1"), "expert.0": expert},
    )


def offering(digest, base="e0", steps=2):
    return Offer(TIP, steps, 4 * steps, {"expert.0": OfferedUnit(digest, 1, base)})


def decide(new, *, base="e0", offers=()):
    bases = {} if base is None else {0: base}
    return adopt("me", new, previous=TIP, bases=bases, offers=offers)


MINE = {"offers": [offering("mine")]}


@pytest.mark.parametrize(
    ("agreed", "known", "action", "base"),
    [
        pytest.param(entry("e0"), MINE, Action.KEEP, "e0", id="not moved"),
        pytest.param(entry("mine"), MINE, Action.PUBLISHED, "mine", id="my value"),
        pytest.param(entry("e9"), MINE, Action.RESTART, "e9", id="another value"),
        pytest.param(entry("e9"), {}, Action.RESTART, "e9", id="another value, no offer"),
        pytest.param(entry("e0"), {"base": None}, Action.TAKE_UP, "e0", id="comes back"),
    ],
)
def test_an_expert_of_mine_goes_on_from_the_agreed_value_or_from_it_anew(
    agreed, known, action, base
):
    decision = decide(manifest(agreed), **known).experts[0]
    assert (decision.action, decision.base) == (action, base)


def test_a_lost_expert_is_dropped_even_if_its_value_did_not_move():
    decision = decide(manifest(entry("e0"), owner="you")).experts[0]
    assert (decision.action, decision.base) == (Action.DROP, None)


def test_nothing_is_said_about_experts_that_never_were_mine():
    assert decide(manifest(entry("e0"), owner="you"), base=None).experts == {}


@pytest.mark.parametrize("kind", [Kind.MERGE, Kind.QUORUM])
def test_progress_moves_along_with_one_merge_even_if_a_round_followed_it(kind):
    merged = manifest(entry("m1", base="e0"), kind=kind, parent="other")
    decision = decide(merged).experts[0]
    assert (decision.action, decision.base, decision.rebase_from) == (Action.REBASE, "m1", "e0")


def test_a_published_value_that_was_merged_at_once_is_rebased_from_the_published_value():
    merged = manifest(entry("m1", base="mine"), kind=Kind.MERGE, parent="other")
    decision = decide(merged, offers=[offering("mine")]).experts[0]
    assert (decision.action, decision.rebase_from) == (Action.REBASE, "mine")


@pytest.mark.parametrize("agreed", ["late", "mine"])
def test_either_of_two_offers_may_be_the_agreed_value(agreed):
    """A late offer is sent before the local steps, whose own offer may be late too."""
    offers = [offering("late"), offering("mine")]
    decision = decide(manifest(entry(agreed)), offers=offers).experts[0]
    assert (decision.action, decision.base) == (Action.PUBLISHED, agreed)
    merged = manifest(entry("m1", base=agreed), kind=Kind.MERGE, parent="other")
    assert decide(merged, offers=offers).experts[0].rebase_from == agreed


def test_kept_are_experts_whose_progress_goes_on():
    assert decide(manifest(entry("e0"))).kept == {0}
    assert decide(manifest(entry("mine")), offers=[offering("mine")]).kept == {0}
    assert decide(manifest(entry("m1", base="e0"))).kept == {0}
    assert decide(manifest(entry("e9"))).kept == set()
    assert decide(manifest(entry("e0"), owner="you")).kept == set()
    assert decide(manifest(entry("e0")), base=None).kept == set()


def test_two_merges_cannot_be_jumped():
    twice = manifest(entry("m2", base="m1"), kind=Kind.MERGE, parent="other")
    assert decide(twice).experts[0].action is Action.RESTART


def test_shared_tensors_restart_from_the_mean_whether_i_was_in_it_or_not():
    mine = decide(manifest(entry("e0")), offers=[offering("mine")])
    assert mine.shared is Action.RESTART
    missed = decide(manifest(entry("e0"), contributors=("you",)))
    assert missed.shared is Action.RESTART


@pytest.mark.parametrize("kind", [Kind.MERGE, Kind.REFORM])
def test_shared_progress_is_kept_only_over_a_manifest_that_leaves_its_start_as_it_was(kind):
    assert decide(manifest(entry("e0"), kind=kind)).shared is Action.KEEP
    assert decide(manifest(entry("e0"), kind=kind, parent="other")).shared is Action.RESTART


PARTS = {"shared.0": "s1", "shared.1": "s2"}


def decide_parts(new, part_bases):
    return adopt("me", new, previous=TIP, bases={0: "e0"}, offers=(), part_bases=part_bases)


def in_two_parts(renewed=(), **options):
    new = manifest(entry("e0"), **options)
    entries = {**new.entries, "shared.1": entry("s2")}
    return replace(new, entries=entries, sources=dict.fromkeys(renewed, (("you", "v"),)))


@pytest.mark.parametrize("contributors", [("me", "you"), ("you",)])
def test_a_part_that_was_not_due_goes_on_whether_the_round_counted_me_or_not(contributors):
    renewed = in_two_parts(["shared.0"], contributors=contributors)
    decision = decide_parts(renewed, PARTS | {"shared.0": "before"})
    assert decision.shared is Action.RESTART
    assert decision.kept_parts == {"shared.1"}


def test_a_renewed_part_restarts_even_if_its_value_stayed_the_same():
    assert decide_parts(in_two_parts(["shared.0", "shared.1"]), PARTS).kept_parts == set()


def test_a_part_restarts_if_a_round_that_was_jumped_renewed_it():
    assert decide_parts(in_two_parts(), PARTS | {"shared.1": "older"}).kept_parts == {"shared.0"}


def test_where_every_round_renews_all_parts_none_is_kept():
    assert decide_parts(in_two_parts(["shared.0", "shared.1"]), {}).kept_parts == set()
    reform = in_two_parts(kind=Kind.REFORM, parent="other")
    assert decide_parts(reform, {}).kept_parts == set()


SOURCES = (("me", "mine"), ("you", "yours"))


def test_an_owner_whose_value_is_in_the_mean_keeps_what_the_wire_rounded_off():
    averaged = manifest(entry("mean", codec="bf16"), sources=SOURCES)
    decision = decide(averaged, offers=[offering("mine")]).experts[0]
    found = (decision.action, decision.base, decision.rebase_from)
    assert found == (Action.AVERAGED, "mean", "mine")


def test_an_owner_whose_exact_value_is_in_the_mean_restarts_from_it():
    averaged = manifest(entry("mean"), sources=SOURCES)
    assert decide(averaged, offers=[offering("mine")]).experts[0].action is Action.RESTART


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_steps_since_a_late_offer_outlive_the_mean_that_it_is_in(codec):
    averaged = manifest(entry("mean", codec=codec), sources=SOURCES)
    adoption = decide(averaged, offers=[offering("mine", steps=0)])
    assert adoption.experts[0].rebase_from == "mine"
    assert adoption.kept == {0}


@pytest.mark.parametrize("sources", [(), (("you", "yours"),), (("me", "older"), ("you", "yours"))])
def test_an_owner_whose_offer_is_not_in_the_mean_restarts_from_it(sources):
    averaged = manifest(entry("mean", codec="bf16"), sources=sources)
    assert decide(averaged, offers=[offering("mine")]).experts[0].action is Action.RESTART


def test_a_reform_keeps_the_shared_work_of_its_members_alone():
    reform = replace(manifest(entry("e0"), kind=Kind.REFORM), members={"you": Member(0, 1.0)})
    without = adopt("me", reform, previous=TIP, bases={0: "e0"}, offers=[])
    assert without.shared is Action.RESTART  # the text that it has read is dealt to others
    assert adopt("you", reform, previous=TIP, bases={}, offers=[]).shared is Action.KEEP
