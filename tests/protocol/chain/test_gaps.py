"""Missing heads of a chain come from others, and no other heads do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import BadMessage
from swarm.protocol.chain import gaps as module
from swarm.protocol.chain import trust
from swarm.protocol.chain.gaps import (
    MAX_PAGE_BYTES,
    Filling,
    Question,
    between,
    decode_page,
    decode_question,
    encode_page,
    encode_question,
    filled,
    gaps,
)
from swarm.protocol.chain.trust import Chain, proof_problem, step_problem
from swarm.protocol.messages.events import HeadsFound, Record, RewriteChain
from swarm.protocol.messages.messages import Certificate, Link
from swarm.protocol.messages.schemas import MAX_LINKS
from swarm.protocol.rounds import LocalPeer, RoundMachine
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import Digest, Head
from tests.protocol.chain.test_pruning import history, lived, stages
from tests.protocol.chain.test_trust import SIGNED, chain_of, head, reform, signed
from tests.protocol.exchange.test_handover import next_round
from tests.protocol.round_pump import found, make_rules

WRONG = b"w" * 64
PEOPLE = "ABCDEFGHJK"


def sound(certificate: Certificate, _: Digest) -> Certificate:
    """Makes signatures right or wrong by their content."""
    right = {peer: s for peer, s in certificate.signatures.items() if s == SIGNED}
    return replace(certificate, signatures=right)


def long_chain(heights: int, reformed: Sequence[int] = ()) -> list[Link]:
    """All members are replaced gradually, with reforms at some heights."""
    links = chain_of(["ABCD"])
    members = list("ABCD")
    for height in range(1, heights):
        members[height % 4] = PEOPLE[height % len(PEOPLE)]
        before = links[-1].head
        if height in reformed:
            generation = f"{height:032x}"
            electors = len({*before.voters, before.founder}.intersection(members))
            lineage = (*before.lineage, (before.height, (electors, generation)))
            new = reform(before, members, generation=generation, lineage=lineage)
            links.append(signed(new, *before.voters))
            before = new
        links.append(chain_of_next(before, members))
    return links


def chain_of_next(before: Head, members: Sequence[str]) -> Link:
    return signed(head(sorted(set(members)), before.height + 1, before), *before.voters)


def without(links: Sequence[Link], lost: set[int]) -> Chain:
    """The chain without some of its links, as after damage of their lines."""
    kept = [link for at, link in enumerate(links) if at not in lost]
    torn = {link.head.digest for at, link in enumerate(links) if at - 1 in lost and at not in lost}
    return Chain(tuple(kept), frozenset(torn))


def carried(page: Sequence[Link]) -> tuple[Link, ...]:
    return decode_page(encode_page(page))


def completed(chain: Chain, whole: Chain) -> Chain:
    """The chain after its peer has asked one with all heads."""
    while found := gaps(chain):
        gap, problem = found[0], "nothing is here"
        while problem:
            question = decode_question(encode_question(gap.question))
            gap = gap.extended(carried(between(whole, question)), sound)
            closed, problem = filled(chain, gap.path)
        chain = closed
    return chain


# ---------------------------------------------------------------- whole again


@given(st.data())
def test_a_chain_with_any_gaps_is_whole_again_after_it_has_asked_for_them(
    data: st.DataObject,
) -> None:
    heights = data.draw(st.integers(3, 40))
    reforms = data.draw(st.lists(st.integers(1, heights - 1), max_size=3))
    links = long_chain(heights, reforms)
    whole = Chain(tuple(links))
    middle = st.integers(1, len(links) - 2)
    chain = without(links, data.draw(st.sets(middle, max_size=len(links) - 2)))
    lacking = [
        (before.head, after.head)
        for before, after in pairwise(chain.links)
        if after.head.parent != before.head.digest
    ]
    assert [(gap.before.head, gap.after.head) for gap in gaps(chain)] == lacking
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "MAX_LINKS", data.draw(st.integers(1, 6)))
        links = completed(chain, whole).links
        assert [(link.head, link.certificate) for link in links] == [
            (link.head, link.certificate) for link in whole.links
        ]
    assert gaps(whole) == ()


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_that_lost_links_takes_those_of_another_that_keeps_others(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Returning peers are convinced by it again, wherever the damage was."""
    monkeypatch.setattr(trust, "RECENT", 3)
    random = Random(seed)
    links = history(random, random.randint(20, 70), 0.3, 0.0)
    chains = stages(links)
    *_, other = lived(chains, links, random)
    mine = chains[-1]
    lost = {at for at in range(1, len(mine.links) - 1) if random.random() < 0.3}
    torn = [
        replace(link, alike=False) if at - 1 in lost else link for at, link in enumerate(mine.links)
    ]
    chain = completed(without(torn, lost), other if other.links[0] == links[0] else mine)
    assert gaps(chain) == ()
    for returner in chains:
        path = returner.rooted(chain.proof(returner.tip.code))
        assert proof_problem(path, chain.tip, returner.trusted) is None


def test_closing_an_older_gap_leaves_a_newer_one_open() -> None:
    """The tip has its parent's head from the record, so it follows from any head of its voters."""
    links = chain_of(["ABCD"] * 8)
    tip = replace(links[7], parent=links[6].head)
    torn = frozenset({links[5].head.digest, tip.head.digest})
    whole, lacking = Chain(tuple(links)), Chain((*links[:2], links[5], tip), torn)
    older, newer = gaps(lacking)
    page = between(whole, older.question)
    chain, problem = filled(lacking, older.extended(page, sound).path)
    assert problem is None
    assert [gap.ends for gap in gaps(chain)] == [newer.ends]
    page = between(whole, newer.question)
    chain, problem = filled(chain, newer.extended(page, sound).path)
    assert (problem, chain) == (None, whole)


def test_a_page_is_bounded_in_number_and_bytes() -> None:
    links = long_chain(MAX_LINKS + 20)
    (gap,) = gaps(without(links, set(range(1, len(links) - 1))))
    page = between(Chain(tuple(links)), gap.question)
    assert len(page) == MAX_LINKS
    assert len(encode_page(page)) < MAX_PAGE_BYTES
    crowd = [f"{number:052d}".replace("0", "z") for number in range(256)]
    crowded = chain_of([crowd] * 60)
    (gap,) = gaps(without(crowded, set(range(1, 59))))
    page = between(Chain(tuple(crowded)), gap.question)
    assert 10 < len(page) < 59
    assert MAX_PAGE_BYTES / 2 < len(encode_page(page)) < 1_000_000


def test_nothing_is_shown_of_what_this_peer_has_not_got() -> None:
    links = long_chain(9)
    late = Chain((Link(links[5].head), *links[6:]))
    assert between(late, Question(links[3].head.code, links[6].head.code)) == ()
    assert between(late, Question(late.tip.code, late.tip.code)) == ()


def test_more_heads_than_a_page_has_are_refused() -> None:
    line = encode_page(long_chain(2)[1:])
    with pytest.raises(BadMessage):
        decode_page(b"\n".join([line] * (MAX_LINKS + 1)))


# ---------------------------------------------------------------- false heads


def spoil(page: list[Link], how: str, at: int) -> list[Link]:
    link = page[at]
    if how == "signatures":
        certificate = replace(link.certificate, signatures=dict.fromkeys(PEOPLE, WRONG))
        page[at] = replace(link, certificate=certificate)
    elif how == "too few":
        few = dict(list(link.certificate.signatures.items())[:1])
        page[at] = replace(link, certificate=replace(link.certificate, signatures=few))
    elif how == "no certificate":
        page[at] = replace(link, certificate=None)
    elif how == "another body":
        page[at] = replace(link, head=replace(link.head, body="1" * 64))
    elif how == "another parent":
        page[at] = replace(link, head=replace(link.head, parent="1" * 64))
    elif how == "order":
        page.reverse()
    elif how == "left out":
        del page[at]
    return page


FALSE = ("signatures", "too few", "no certificate", "another body", "another parent", "order",
         "left out")  # fmt: skip


@given(st.sampled_from(FALSE), st.integers(0, 5))
def test_links_that_are_no_steps_change_nothing(how: str, at: int) -> None:
    links = long_chain(10)
    chain = without(links, set(range(2, 9)))
    (gap,) = gaps(chain)
    page = spoil(list(between(Chain(tuple(links)), gap.question)), how, at)
    before, after = page[-1], chain.tip
    has_end = step_problem(before.head, chain.links[-1]) is None and before.head.code < after.code
    with pytest.raises(BadMessage):
        gap.extended(page, sound)
        assert not has_end
    same, problem = filled(chain, (gap.before, *page))
    assert (same is chain and problem) or how == "signatures"


def test_heads_of_no_gap_and_beyond_the_tip_are_refused() -> None:
    links = long_chain(10)
    chain = without(links, {4, 5})
    for useless in (links[3:4], links[6:9], links[7:9], links[4:7], links[9:]):
        same, problem = filled(chain, useless)
        assert same is chain
        assert problem


# ---------------------------------------------------------------- use


def test_who_joined_along_a_proof_proves_its_tip_to_who_has_a_head_that_it_passed_over() -> None:
    """This matters if all members have joined like that."""
    links = long_chain(30)
    joined = Chain(links[:1]).grown(Chain(tuple(links)).proof(links[0].head.digest))
    assert len(joined.links) < len(links) and not gaps(joined)
    for link in links:
        away = Chain((Link(link.head),))
        path = away.rooted(joined.proof(away.tip.code))
        assert proof_problem(path, joined.tip, away.trusted) is None


RULES = make_rules()
MANIFESTS = [found(RULES, ["A", "B", "C"])]
for _ in range(6):
    MANIFESTS.append(next_round(MANIFESTS[-1], RULES, ["A", "B", "C"]))


def machine_of(chain: Chain) -> RoundMachine:
    tip, parent = MANIFESTS[-1], MANIFESTS[-2]
    record = Record(tip, chain.links[-1].certificate, parent)
    peer = LocalPeer("A", 1.0, RULES, Timers(), now=0.0, random=random.Random(1))
    machine = RoundMachine(peer, record, stored=[], chain=chain)
    machine.start(0.0)
    return machine


def test_the_machine_puts_what_was_found_into_its_chain_and_onto_the_disk() -> None:
    heads = [manifest.head for manifest in MANIFESTS]
    links = [Link(heads[0]), *(signed(head, "A", "B", "C") for head in heads[1:])]
    machine = machine_of(without(links, {2, 3, 4}))
    (gap,) = gaps(machine.chain)
    whole = Filling(gap.before, gap.after, tuple(links[2:5]))
    effects = machine.handle(HeadsFound(whole.path), 1.0)
    assert machine.chain == Chain(tuple(links))
    assert RewriteChain(tuple(links)) in effects
    effects = machine.handle(HeadsFound(whole.path), 2.0)  # it had been closed meanwhile
    assert machine.chain == Chain(tuple(links))
    assert not [effect for effect in effects if isinstance(effect, RewriteChain)]
