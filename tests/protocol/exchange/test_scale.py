"""Decisions that must be fast with hundreds of peers equal those of a plain implementation."""

from __future__ import annotations

from random import Random

import pytest

from swarm.protocol.exchange.sourcing import Assignment, Failure, Limits, Sourcing
from swarm.protocol.membership.ownership import assign
from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.rounds.policies.rosters import assign_reducers, sources_of
from swarm.protocol.values.manifest import turn

# ---------------------------------------------------------------- sourcing


class PlainSourcing(Sourcing[int]):
    """Looks at everything again for each job that it hands out."""

    def assign(self, now, most=None):
        self._wake(now)
        assignments = []
        free = self._free(now)
        while free:
            peer = min(free, key=lambda p: (self._load(p).num_bytes, p))
            job = self._takes(peer, now)
            if job is None:
                free.remove(peer)
                continue
            assignments.append(Assignment(job.key, peer, self._reason(job, peer, now)))
            self._give(job, peer)
            if self._obstacle(peer, now) is not None:
                free = self._free(now)
        return assignments

    def _free(self, now):
        waiting = [peer for peer in sorted(self._waiting) if self._waiting[peer]]
        return [peer for peer in waiting if self._obstacle(peer, now) is None]

    def _takes(self, peer, now):
        for key in self._waiting.get(peer, ()):
            job = self._jobs[key]
            before = job.sources[: job.sources.index(peer)]
            if all(self._obstacle_to(job, other, now) is not None for other in before):
                return job
        return None


@pytest.mark.parametrize("seed", range(60))
def test_pieces_are_asked_of_the_same_peers_in_the_same_order_as_by_the_plain_way(seed):
    random = Random(seed)
    limits = Limits(bytes_per_peer=random.choice([2, 5, 20]), jobs_per_peer=random.choice([2, 9]))
    both = Sourcing(limits), PlainSourcing(limits)
    peers = [f"p{number}" for number in range(random.randint(1, 7))]
    asked: dict[int, str] = {}
    for step in range(120):
        now = step * random.choice([0.1, 0.4])
        key = random.randrange(50)
        what = random.random()
        if what < 0.5:
            sources = random.sample(peers, random.randint(1, len(peers)))
            size = random.randint(0, 4)
            for each in both:
                each.want(key, size, sources)
        elif what < 0.8 and asked:
            key = random.choice(sorted(asked))
            kind = random.choice([None, None, *Failure])
            asked.pop(key)
            for each in both:
                each.failed(key, kind, "why", now) if kind else each.done(key)
        elif what < 0.85:
            asked.pop(key, None)
            for each in both:
                each.forget(key)
        found, plain = (each.assign(now) for each in both)
        assert found == plain
        assert both[0].next_time(now) == both[1].next_time(now)
        asked |= {each.key: each.peer for each in found}


def test_what_is_handed_out_in_slices_is_handed_out_whole():
    whole, sliced = Sourcing[int](), Sourcing[int]()
    for sourcing in (whole, sliced):
        for key in range(100):
            sourcing.want(key, 2**20, [f"p{(key + shift) % 10}" for shift in range(10)])
    expected = {(each.key, each.peer) for each in whole.assign(0.0)}
    slices = []
    while found := sliced.assign(0.0, 7):
        assert len(found) <= 7
        slices += [(each.key, each.peer) for each in found]
    assert len(slices) == len(expected) == 100
    assert set(slices) == expected


def test_a_peer_is_given_the_blobs_that_prefer_it_however_many_are_older():
    sourcing = Sourcing[int](Limits(jobs_per_peer=1))
    for key in range(1000):
        sourcing.want(key, 1, ["b", "a"] if key < 999 else ["a", "b"])
    assert {each.key: each.peer for each in sourcing.assign(0.0)} == {0: "b", 999: "a"}


# ---------------------------------------------------------------- rosters and owners


def plain_reducers(offers, reducers, unit_bytes):
    """The rule of `assign_reducers`, word for word."""
    fan_out = max(1, len(offers) - 1)
    burden = dict.fromkeys(sorted(offers), 0)
    shared = []
    for unit, values in sources_of(offers).items():
        able = [peer for peer, _ in values if peer in reducers] or [peer for peer, _ in values]
        if len(values) > 1:
            shared.append((-unit_bytes[unit], unit, able))
            for peer in able:
                burden[peer] += unit_bytes[unit]
        else:
            burden[able[0]] += unit_bytes[unit] * fan_out
    chosen = {}
    for negative, unit, able in sorted(shared):
        peer = min(able, key=lambda peer: (burden[peer], peer))
        burden[peer] -= negative * (fan_out - 1)
        chosen[unit] = peer
    return dict(sorted(chosen.items()))


@pytest.mark.parametrize("seed", range(40))
def test_units_are_averaged_by_the_same_peers_as_by_the_plain_rule(seed):
    random = Random(seed)
    sizes = {f"shared.{part}": random.choice([5, 5, 9]) for part in range(9)}
    sizes |= {f"expert.{expert}": 7 for expert in range(5)}
    peers = [f"p{number}" for number in range(random.randint(1, 12))]
    random.shuffle(peers)
    offers = {
        peer: Offer(
            "tip",
            1,
            1,
            {unit: OfferedUnit(f"{peer}/{unit}", size, "base") for unit, size in sizes.items()
             if unit.startswith("shared") or random.random() < 0.4},
        )
        for peer in peers
    }  # fmt: skip
    able = dict.fromkeys(random.sample(peers, random.randint(0, len(peers))), 0)
    expected = plain_reducers(offers, able, sizes)
    assert assign_reducers(offers, able, sizes) == expected
    assert list(assign_reducers(offers, able, sizes)) == list(expected)


def plain_owners(previous, members, contributors, wanted, experts, seed):
    """Owners stay, and the least loaded contributor fills gaps one after the other."""
    owners = {expert: [p for p in previous.get(expert, ()) if p in members] for expert in experts}
    load = {peer: sum(peer in of for of in owners.values()) for peer in members}
    for expert in experts:
        while len(owners[expert]) < wanted:
            chosen = min(
                (peer for peer in sorted(members) if peer not in owners[expert]),
                key=lambda peer: (
                    peer not in contributors,
                    (load[peer] + 1) / members[peer],
                    turn(f"{seed}/{expert}", peer),
                ),
            )
            owners[expert].append(chosen)
            load[chosen] += 1
    return {expert: tuple(sorted(of)) for expert, of in owners.items()}


@pytest.mark.parametrize("seed", range(40))
def test_gaps_go_to_the_same_peers_as_by_the_plain_rule(seed):
    random = Random(seed)
    members = dict.fromkeys((f"p{number}" for number in range(random.randint(2, 9))), 1.0)
    contributors = random.sample(sorted(members), random.randint(1, len(members)))
    wanted = random.choice([1, 2])
    # No two owners differ by two, so nothing is moved afterwards.
    found = assign(
        {}, members, members,
        stale=(), owners_per_expert=wanted, num_experts=len(members), seed=f"s{seed}",
    ).owners  # fmt: skip
    assert found == plain_owners({}, members, members, wanted, range(len(members)), f"s{seed}")
    few = assign(
        {}, members, contributors,
        stale=(), owners_per_expert=1, num_experts=20, seed=f"s{seed}",
    ).owners  # fmt: skip
    assert few == plain_owners({}, members, contributors, 1, range(20), f"s{seed}")
