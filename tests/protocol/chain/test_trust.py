"""Proofs of the past: who is believed from which head, and who is not, with any number of keys."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol.chain.trust import (
    MAX_LINKS,
    RECENT,
    Chain,
    proof_problem,
    step_problem,
    with_reforms,
)
from swarm.protocol.messages.messages import Ballot, Certificate, Link
from swarm.protocol.values.manifest import Head, Kind, PeerId

SIGNED = bytes(64)


def head(members: Sequence[PeerId], height: int = 0, parent: Head | None = None, **more) -> Head:
    values = {
        "run": "run-1" if parent else "",
        "generation": parent.generation if parent else "0",
        "height": height,
        "kind": Kind.QUORUM if parent else Kind.FOUNDING,
        "parent": parent.digest if parent else None,
        "lineage": parent.lineage if parent else (),
        "founder": "f",
        "voters": tuple(sorted(members)),
        "anchors": "0" * -(-len(members) // 4),
        "contributed": "0" * -(-len(members) // 4),
        "seed": None,
        "body": f"{height:064x}",
    }
    return Head(**values | more)


def signed(head: Head, *signers: PeerId, parent: Head | None = None) -> Link:
    return Link(head, Certificate(Ballot(0, "a"), dict.fromkeys(signers, SIGNED)), parent)


def chain_of(electorates: Sequence[Sequence[PeerId]]) -> list[Link]:
    """A chain in which all members of the parent have signed each manifest."""
    links = [Link(head(electorates[0]))]
    for height, members in enumerate(electorates[1:], 1):
        before = links[-1].head
        links.append(signed(head(members, height, before), *before.voters))
    return links


def record_of(tip: Link) -> Any:
    """The part of a record that chains read."""
    parent = SimpleNamespace(head=tip.parent)
    return SimpleNamespace(
        tip=SimpleNamespace(head=tip.head), parent=parent, certificate=tip.certificate
    )


def reform(before: Head, members: Sequence[PeerId], **more) -> Head:
    generation = "ab" * 16
    lineage = (*before.lineage, (before.height, (len(members), generation)))
    changed = {"generation": generation, "lineage": lineage, "kind": Kind.REFORM, "run": "run-1"}
    return head(members, before.height, before, **changed | more)


# ---------------------------------------------------------------- one step


def test_the_next_height_needs_a_quorum_of_the_electorate_before() -> None:
    first = head("abcd")
    following = head("abcx", 1, first)
    assert step_problem(first, signed(following, "a", "b", "c")) is None
    assert first.order[0] not in "bc", "half decides with the tie-breaker"
    assert "2 of the 4" in (step_problem(first, signed(following, "x", "y", "b", "c")) or "")
    assert step_problem(first, signed(following, "x", "y", "z", "w", "a")) is not None
    assert step_problem(first, Link(following)) is not None


def test_a_later_height_needs_a_quorum_of_both_electorates() -> None:
    trusted, parent = head("abc"), head("cde", 6, head("abc"))
    target = head("cde", 7, parent)
    assert step_problem(trusted, signed(target, "a", "b", "c", "d", parent=parent)) is None
    of_parent_alone = signed(target, "c", "d", "e", parent=parent)
    assert "1 of the 3 voters of height 0" in (step_problem(trusted, of_parent_alone) or "")
    of_trusted_alone = signed(target, "a", "b", parent=parent)
    assert "voters of height 6" in (step_problem(trusted, of_trusted_alone) or "")
    assert "missing" in (step_problem(trusted, signed(target, "a", "b", "c", "d")) or "")
    other_parent = replace(parent, body="1" * 64)
    assert step_problem(trusted, signed(target, *"abcde", parent=other_parent)) is not None


def test_half_decides_only_with_the_tie_breaker() -> None:
    first = head("ab")
    one, other = first.order
    assert step_problem(first, signed(head("ab", 1, first), one)) is None
    assert step_problem(first, signed(head("ab", 1, first), other)) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"run": "run-2"},
        {"founder": "g"},
        {"height": 2},
        {"generation": "cd" * 16},
        {"parent": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_head_that_contradicts_the_trusted_one_is_refused(change: dict) -> None:
    first = replace(head("abc"), run="run-1")
    assert step_problem(first, signed(head("abc", 1, first), *"abc")) is None
    assert step_problem(first, signed(replace(head("abc", 1, first), **change), *"abc"))


def test_a_reform_is_believed_with_a_signature_of_its_parents_electorate() -> None:
    parent = head("fabc", 3, head("fabc"))
    left = reform(parent, "a")
    assert step_problem(parent, signed(left, "a")) is None
    assert "no voter" in (step_problem(parent, signed(left, "x")) or "")
    assert step_problem(head("fabc"), signed(left, "a")) is not None  # of another parent
    assert step_problem(parent, signed(replace(left, lineage=()), "a")) is not None


def test_a_newcomer_believes_a_reform_only_with_the_founders_signature() -> None:
    parent = head("fabc", 3, head("fabc"))
    left = reform(parent, "fa")
    assert "--tip" in (step_problem(parent, signed(left, "a"), is_new=True) or "")
    assert step_problem(parent, signed(left, "a", "f"), is_new=True) is None


def test_more_than_half_of_the_anchors_vouch_for_a_reform_in_the_founders_place() -> None:
    parent = head("fabcd", 3, head("fabcd"), anchors="1c")  # a, b and c
    assert parent.anchored == set("abc")
    left = reform(parent, "abd")
    assert step_problem(parent, signed(left, "a", "b"), is_new=True) is None
    assert "its 3 anchors" in (step_problem(parent, signed(left, "a", "d"), is_new=True) or "")
    nobody = head("fabcd", 3, head("fabcd"))
    assert step_problem(nobody, signed(reform(nobody, "abcd"), *"abcd"), is_new=True)


def test_the_founder_counts_as_an_elector_of_a_reform_wherever_it_was_gone() -> None:
    parent = head("ab", 3, head("ab"))
    alone = reform(parent, "f")
    assert step_problem(parent, signed(alone, "f")) is None
    assert step_problem(parent, signed(alone, "f"), is_new=True) is None
    assert step_problem(parent, signed(reform(parent, "x"), "x")) is not None


# ---------------------------------------------------------------- proofs and chains


def test_a_stranger_with_an_invented_parent_proves_nothing() -> None:
    links = chain_of(["abc"] * 5)
    invented = head("x", 98, links[0].head)
    forged = signed(head("x", 99, invented), "x", parent=invented)
    for begin in (links[0], links[-1]):
        path = (Link(begin.head), forged)
        assert proof_problem(path, forged.head, {begin.head.digest})
    path = (Link(invented), forged)
    assert "not trusted" in (proof_problem(path, forged.head, {links[-1].head.digest}) or "")
    assert "without a proof" in (proof_problem((), forged.head, {links[0].head.digest}) or "")


def test_a_proof_is_of_the_manifest_that_it_is_for() -> None:
    links = chain_of(["abc"] * 3)
    trusted = {links[0].head.digest}
    assert proof_problem(links, links[-1].head, trusted) is None
    assert "another manifest" in (proof_problem(links[:2], links[-1].head, trusted) or "")


def test_three_hundred_rounds_and_three_changes_of_everybody_are_a_short_proof() -> None:
    groups = ["abcdefgh", "ijklmnop", "qrstuvwx"]
    electorates, members = [], list("ABCDEFGH")
    for group in groups:
        for leaver, joiner in zip(list(members), group, strict=True):
            electorates += ["".join(members)] * 12
            members[members.index(leaver)] = joiner
    electorates += ["".join(members)] * (301 - len(electorates))
    links = chain_of(electorates)
    chain = Chain(tuple(links))
    path = chain.proof(links[0].head.code)
    assert proof_problem(path, chain.tip, {links[0].head.digest}) is None
    assert len(path) < 40
    # Yesterday's majority owns the keys of all members of height 150, and forges what follows.
    thief = links[150].head
    forged = signed(head("z", 151, thief), *thief.voters)
    longer = signed(head("z", 400, forged.head), "z", *thief.voters, parent=forged.head)
    for begin in (links[-1].head, links[200].head):
        for path in ((Link(begin), forged, longer), (Link(begin), longer)):
            assert proof_problem(path, longer.head, {begin.digest})


def test_a_chain_drops_what_its_new_tip_does_not_descend_from() -> None:
    links = chain_of(["abcd"] * 4)
    chain = Chain(tuple(links))
    parent = links[2].head
    left = signed(reform(parent, "d"), "d")
    own = Chain(tuple(links[:3])).grown([left])
    assert own.tip == left.head
    assert own.trusted == {left.head.digest, parent.digest}
    # The old generation continued without it. Its next height has the larger code.
    assert chain.tip.code > own.tip.code
    path = chain.proof(own.tip.code)
    assert path[0].head == parent
    assert proof_problem(path, chain.tip, own.trusted) is None
    assert own.grown(path) == chain


def test_what_takes_the_place_of_a_chain_keeps_the_reforms_behind_the_record_before() -> None:
    """A continued alone, gave way to the others' chain, and reads its previous record again."""
    links = chain_of(["abcd"] * 5)
    left = signed(reform(links[0].head, "a"), "a", parent=links[0].head)
    alone = [links[0], left]
    for height in range(1, 4):
        before = alone[-1].head
        alone.append(signed(head("a", height, before), "a", parent=before))
    was = record_of(alone[-1])
    assert Chain.of(was, alone).trusted == {alone[-1].head.digest, links[0].head.digest}
    assert Chain.of(was, links).trusted == {alone[-1].head.digest}
    kept = with_reforms(links, [*alone, *links[1:]])
    assert kept == (left, *links)
    again = Chain.of(was, kept)
    assert again.trusted == {alone[-1].head.digest, links[0].head.digest}
    path = Chain(tuple(links)).proof(again.tip.code)
    assert proof_problem(path, links[-1].head, again.trusted) is None
    assert with_reforms(kept, kept) == kept


def test_a_jump_keeps_the_parent_that_proves_it() -> None:
    links = chain_of(["abcd"] * 9)
    path = Chain(tuple(links)).proof(links[2].head.code)
    jumped = Chain(tuple(links[:3])).grown(path)
    assert jumped.links[-1].parent == links[-2].head
    again = jumped.proof(links[0].head.digest)
    assert proof_problem(again, links[-1].head, {links[0].head.digest}) is None


def test_a_proof_from_an_older_head_of_ones_own_is_judged_from_a_trusted_one() -> None:
    """A reformed at height 5. B joined at 8 along a jump from manifest 0, and heard no more."""
    links = chain_of(["abcd"] * 9)
    fork = reform(links[5].head, "a")
    mine = Chain((*links[:6], signed(fork, "a")))
    jumped = Chain(tuple(links)).proof(links[0].head.code)
    assert [link.head.height for link in jumped] == [0, 8]
    assert jumped[0].head.digest not in mine.trusted
    rooted = mine.rooted(jumped)
    assert [link.head.height for link in rooted] == [5, 8]
    assert proof_problem(rooted, links[8].head, mine.trusted) is None
    few = (jumped[0], replace(jumped[1], certificate=signed(fork, "b").certificate))
    assert mine.rooted(few) == few, "other links stay a proof from another head"


def test_a_proof_that_begins_elsewhere_is_left_as_it_is() -> None:
    links, others = chain_of(["abcd"] * 9), chain_of(["abcx"] * 4)
    mine = Chain(tuple(links[:6]))
    for path in ((), (links[5], links[6]), tuple(others), (links[0], *links[1:4])):
        assert mine.rooted(path) == path


def test_a_peer_without_the_head_that_is_asked_for_proves_nothing() -> None:
    links = chain_of(["abc"] * 6)
    late = Chain((Link(links[3].head), *links[4:]))
    assert late.proof(links[1].head.code) == ()
    assert late.proof("0" * 64) == ()


@given(st.data())
def test_every_chain_proves_its_tip_from_each_of_its_heads(data: st.DataObject) -> None:
    members = ["a", "b", "c", "d"]
    electorates = [list(members)]
    for number in range(data.draw(st.integers(1, 30))):
        if data.draw(st.booleans()):
            members = [*members[1:], f"p{number}"]
        electorates.append(list(members))
    links = chain_of(electorates)
    chain = Chain(tuple(links))
    for link in links:
        path = chain.proof(link.head.code)
        assert len(path) <= MAX_LINKS
        assert proof_problem(path, chain.tip, {link.head.digest}) is None


class Counted(tuple):
    """Links, and the number that was examined one by one."""

    looks = 0

    def __getitem__(self, at):
        if isinstance(at, int):
            Counted.looks += 1
        return super().__getitem__(at)

    def __iter__(self):
        for link in super().__iter__():
            Counted.looks += 1
            yield link


def test_a_chain_after_hundreds_of_heads_is_not_gone_through_for_each_message() -> None:
    chain, links = Chain(tuple(chain_of(["abcd"]))), chain_of(["abcd"])
    for height in range(1, 400):
        parent, voters = links[-1].head, "abcd" if height < 200 else "abc"
        if height == 200:
            links.append(signed(reform(parent, "abc"), "a", parent=parent))
            chain = chain.grown([links[-1]])
        links.append(signed(head(voters, height, chain.tip), *chain.tip.voters))
        chain = chain.grown([links[-1]])
    assert len(chain.links) < RECENT + 9
    long = Chain(Counted(chain.links))
    Counted.looks = 0
    assert long.trusted == {links[-1].head.digest, links[200].head.parent}
    for since in (links[0].head.digest, links[0].head.code, links[300].head.code, None):
        path = Chain((Link(links[300].head),)).rooted(long.proof(since))
        assert proof_problem(path, long.tip, {path[0].head.digest}) is None
    assert Counted.looks < 100
    longer = long.grown([signed(head("abc", 400, long.tip), *"abc")])
    assert longer.tip.height == 400
    assert longer.beyond(long) == longer.links[-1:]


def test_what_a_path_passes_over_and_is_on_the_chain_stays_in_order() -> None:
    """A proof from a reform's parent may jump over heads that this peer has."""
    links = chain_of(["abcd"] * 3)
    left = signed(reform(links[2].head, "abcd"), *"abcd")
    chain = Chain((*links, left))
    for height in range(3, 8):
        chain = chain.grown([signed(head("abcd", height, chain.tip), *"abcd")])
    target = signed(head("abcd", 8, chain.tip), *"abcd", parent=chain.tip)
    grown = chain.grown((links[2], left, target))
    heights = [link.head.height for link in grown.links]
    assert heights == sorted(heights) and len(heights) == len(chain.links) + 1
    assert grown.beyond(chain) == grown.links[-1:]
    assert (
        proof_problem(grown.proof(links[0].head.code), target.head, {links[0].head.digest}) is None
    )
