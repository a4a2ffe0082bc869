"""A pruned chain convinces every peer that the whole chain convinces (chain pruning)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest

from swarm.protocol.chain import trust
from swarm.protocol.chain.chain_record import decode_link, encode_link
from swarm.protocol.chain.trust import RECENT, Chain, proof_problem
from swarm.protocol.messages.messages import Link
from swarm.protocol.values.manifest import Head, PeerId
from tests.protocol.chain.test_trust import chain_of, head, reform, signed

PEOPLE = "abcdefghijkm"


def quorum(before: Head, random: Random) -> list[PeerId]:
    """A random smallest quorum, which may be half of the voters with the tie-breaker."""
    voters = list(before.voters)
    random.shuffle(voters)
    if len(voters) % 2 == 0 and random.random() < 0.2:
        others = [peer for peer in voters if peer != before.order[0]]
        return [before.order[0], *others[: len(voters) // 2 - 1]]
    return voters[: len(voters) // 2 + 1]


def reformed(before: Head, random: Random) -> Link:
    voters = sorted({"f", *random.sample(before.voters, (len(before.voters) + 1) // 2)})
    generation = f"{random.getrandbits(128):032x}"
    electors = len({before.founder, *before.voters}.intersection(voters))
    lineage = (*before.lineage, (before.height, (electors, generation)))
    new = reform(before, voters, generation=generation, lineage=lineage)
    return signed(new, "f", parent=before)


def history(random: Random, heights: int, turnover: float, reforms: float) -> list[Link]:
    """All links of a run whose voters join, leave and return."""
    members = random.sample(PEOPLE, random.randint(1, 8))
    links = [Link(head(members))]
    for height in range(1, heights):
        before = links[-1].head
        if random.random() < reforms:
            links.append(reformed(before, random))
            before = links[-1].head
            members = list(before.voters)
        if random.random() < turnover:
            members = changed(members, random)
        links.append(signed(head(members, height, before), *quorum(before, random)))
    return links


def changed(members: Sequence[PeerId], random: Random) -> list[PeerId]:
    stay = [peer for peer in members if random.random() < 0.8] or [random.choice(PEOPLE)]
    come = random.sample(PEOPLE, random.randint(0, 2))
    return sorted({*stay, *come})


def stages(links: Sequence[Link]) -> list[Chain]:
    """The chain, after each manifest, of a peer that was there from the beginning."""
    chains = [Chain(tuple(links[:1]))]
    for link in links[1:]:
        chains.append(chains[-1].grown([link]))
    return chains


def lived(chains: Sequence[Chain], links: Sequence[Link], random: Random) -> Iterator[Chain]:
    """The chain, after each applied manifest, of a peer that joins and sometimes lags behind."""
    chain, at = chains[0], 0
    if random.random() < 0.5:
        at = random.randrange(len(links))
        chain = joined(carried(chains[at].proof()))
    yield chain
    while at < len(links) - 1:
        ahead = min(len(links) - 1, at + (1 if random.random() < 0.7 else random.randint(1, 12)))
        path = [links[ahead]]
        if ahead > at + 1:
            path = chain.rooted(carried(chains[ahead].proof(chain.tip.code)))
            assert proof_problem(path, links[ahead].head, chain.trusted) is None
        chain, at = chain.grown(path), ahead
        yield chain


def carried(path: Sequence[Link]) -> tuple[Link, ...]:
    return tuple(decode_link(encode_link(link)) for link in path)


def joined(path: Sequence[Link]) -> Chain:
    return Chain(tuple(path[:1])).grown(path)


def grown(links: Sequence[Link]) -> Chain:
    return stages(links)[-1]


@pytest.fixture
def few_are_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "RECENT", 3)


@pytest.mark.parametrize("seed", range(30))
def test_who_comes_back_with_any_old_tip_is_convinced_by_any_pruned_chain(
    seed: int, few_are_recent: None
) -> None:
    """The whole chain convinces all, because each link is a step from the one before."""
    random = Random(seed)
    heights, turnover = random.randint(2, 70), random.choice([0.02, 0.1, 0.3, 1.0])
    links = history(random, heights, turnover, random.choice([0.0, 0.0, 0.05]))
    founding = {links[0].head.digest}
    assert proof_problem(links, links[-1].head, founding, is_new=True) is None
    chains = stages(links)
    *_, behind = lived(chains, links, random)
    provers = [chains[-1], behind, joined(chains[-1].proof()), joined(behind.proof())]
    for prover in provers[: 2 if behind.links[0] != links[0] else 4]:
        assert proof_problem(prover.proof(), links[-1].head, founding, is_new=True) is None
    for returner in (*lived(chains, links, random), *chains):
        for prover in provers:
            if prover.num_behind(returner.tip.code):
                path = returner.rooted(prover.proof(returner.tip.code))
                assert proof_problem(path, links[-1].head, returner.trusted) is None


@pytest.mark.parametrize("seed", range(15))
def test_who_went_on_alone_is_convinced_by_the_chain_that_it_left(
    seed: int, few_are_recent: None
) -> None:
    """Its reform branched off at a head that the others have left out."""
    random = Random(seed)
    links = history(random, random.randint(2, 40), 0.2, 0.0)
    at = random.randrange(len(links))
    own = grown(links[: at + 1]).grown([reformed(links[at].head, random)])
    for height in range(at + 1, at + 9):
        own = own.grown([signed(head(own.tip.voters, height, own.tip), *own.tip.voters)])
    prover = grown(links)
    path = own.rooted(prover.proof(own.tip.code))
    assert proof_problem(path, prover.tip, own.trusted) is None
    if len(path) > 1:
        assert own.grown(path).tip == prover.tip


def test_the_length_of_a_chain_follows_the_turnover_of_voters_and_not_rounds() -> None:
    crowd = [f"p{number}" for number in range(9)]
    lengths = []
    for rounds in (200, 600):
        electorates, members = [], list(crowd)
        for height in range(rounds):
            if height % (rounds // 6) == 10:
                members = [*members[1:], f"q{height}"]
            electorates.append(sorted(members))
        chain = grown(chain_of(electorates))
        lengths.append(len(chain.links))
        assert len(chain.proof()) <= 3
    assert abs(lengths[0] - lengths[1]) < 3
    assert max(lengths) < RECENT + 10


def test_every_reform_stays_with_its_parent(few_are_recent: None) -> None:
    links = chain_of(["abcd"] * 20)
    gone_on = [*links, replace(signed(reform(links[-1].head, "abc"), "a"), parent=links[-1].head)]
    for height in range(20, 60):
        before = gone_on[-1].head
        gone_on.append(signed(head("abc", height, before), *"abc"))
    chain = grown(gone_on)
    heads = [(link.head.height, link.head.kind.value) for link in chain.links]
    assert heads[:3] == [(0, "founding"), (19, "quorum"), (19, "reform")]
    assert len(heads) < 10
    assert chain.trusted == {chain.tip.digest, links[-1].head.digest}


def test_a_link_that_half_has_signed_is_not_relied_upon(few_are_recent: None) -> None:
    """Half decides only with the tie-breaker of its parent. Other heads have another one."""
    links = chain_of(["ab"] * 3)
    for height in range(3, 12):
        before = links[-1].head
        links.append(signed(head("ab", height, before), before.order[0]))
    chain = grown(links)
    for link in links:
        path = Chain((link,)).rooted(chain.proof(link.head.code))
        assert proof_problem(path, chain.tip, {link.head.digest}) is None
