"""What work counts for, whatever members say of it: property tests, and a model of whole runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol.manifest import Member, PeerId
from swarm.protocol.rounds.deals import quotas, with_pace
from swarm.protocol.weights import trained, weights
from tests.protocol.round_pump import found, make_offer, make_rules

works = st.dictionaries(st.sampled_from("ABCDEFGH"), st.integers(64, 10**9), min_size=1)


def lower_median(values: list[int]) -> int:
    return sorted(values)[(len(values) - 1) // 2]


def test_equal_work_has_no_weights_and_unequal_work_weighs_its_tokens() -> None:
    assert weights({"A": 5, "B": 5}, "AB") is None
    assert weights({"A": 10, "B": 14}, "AB") == (10, 14)
    assert weights({"A": 5, "B": 15}, "B") is None
    assert weights({"A": 8, "B": 9, "C": 10, "D": 11}, "ABCD") == (8, 9, 10, 11)


def test_a_late_offer_weighs_as_the_least_of_the_others() -> None:
    assert weights({"A": 4, "B": 3}, "AB") == (4, 3)
    assert weights({"A": 40, "B": 30, "D": 31, "E": 32}, "ABCDE") == (40, 30, 30, 31, 32)
    assert weights({"A": 8}, "AC") is None
    assert weights({}, "CD") is None


def test_one_of_two_weighs_at_most_half_more_and_one_of_three_no_more_than_each() -> None:
    assert weights({"A": 5, "B": 500}, "AB") == (5, 7)
    assert weights({"A": 5, "B": 6, "C": 500}, "ABC") is None
    assert weights({"A": 9, "B": 9, "C": 9, "D": 10**9}, "ABCD") == (9, 9, 9, 13)


def test_who_is_vouched_for_weighs_as_many_ones_work() -> None:
    work = {"A": 1000, "B": 1000, "C": 1000, "D": 8000}
    assert weights(work, "ABCD", {"D": 8}) == (1000, 1000, 1000, 8000)
    assert weights({**work, "D": 10**6}, "ABCD", {"D": 8}) == (1000, 1000, 1000, 12000)
    assert weights({"A": 1000, "D": 8000}, "AD", {"D": 8}) == (1000, 8000)
    assert weights({**work, "C": 10**6}, "ABCD", {"D": 8}) == (1000, 1000, 1500, 8000)
    assert trained(work, {"D": 8}) == sum(work.values())


@given(works, st.data())
def test_nobody_weighs_more_than_half_more_than_the_median_nor_more_than_a_third(work, data):
    vouched = data.draw(st.dictionaries(st.sampled_from(sorted(work)), st.integers(2, 64)))
    peers = data.draw(st.lists(st.sampled_from("ABCDEFGH"), min_size=1, max_size=8, unique=True))
    found = weights(work, peers, vouched) or tuple([1] * len(peers))
    each = [max(1, tokens // vouched.get(peer, 1)) for peer, tokens in work.items()]
    for peer, weight in zip(peers, found, strict=True):
        if len(set(found)) > 1 and peer in work:
            assert 1 <= weight <= 1.5 * lower_median(each) * vouched.get(peer, 1)
            assert weight <= work[peer]
        if len(peers) > 2 and peer not in vouched:
            assert 3 * weight <= sum(found)


@given(works)
def test_tokens_of_a_round_are_never_more_than_twice_as_many_as_without_the_largest_claim(work):
    """What one member alone says adds no more than another one has done."""
    found, largest = trained(work), max(work, key=lambda peer: work[peer])
    rest = {peer: tokens for peer, tokens in work.items() if peer != largest}
    assert 0 < found <= sum(work.values())
    if rest:
        assert found <= sum(rest.values()) + max(rest.values())
    assert trained(dict.fromkeys(work, 7)) == 7 * len(work)


# ---------------------------------------------------------------- whole runs

RULES = replace(make_rules(), round_seconds=8.0, planned_peers=4)
"""10 tokens a sample, 10 samples a step; a peer that no round knows is dealt 160 steps."""
BATCH = 100


@dataclass
class Run:
    """Rounds of members with so many steps in the time of one; a liar counts what it is dealt."""

    steps: Mapping[PeerId, int]
    vouched: Mapping[PeerId, int] = field(default_factory=dict)
    liars: frozenset[PeerId] = frozenset()
    done: dict[PeerId, int] = field(default_factory=dict)
    """Tokens that each member has really been trained on, in the last round."""
    said: dict[PeerId, int] = field(default_factory=dict)
    counted: int = 0
    trained: int = 0

    def __post_init__(self) -> None:
        self.members = {p: Member(0, 1.0, weight=self.vouched.get(p, 1)) for p in self.steps}
        self.tip = found(RULES, list(self.steps))

    def round(self) -> None:
        dealt = quotas(self.members, self.counted, None, RULES)
        offers = {}
        for peer, quota in dealt.items():
            most = quota * RULES.sequence_length
            self.done[peer] = min(most, self.steps[peer] * BATCH)
            is_liar = peer in self.liars
            self.said[peer] = most if is_liar else self.done[peer]
            seconds = 0.001 if is_liar else 8.0 * self.done[peer] / (self.steps[peer] * BATCH)
            offer = make_offer(RULES, peer, self.tip)
            offers[peer] = replace(offer, tokens=self.said[peer], seconds=seconds)
        tip = replace(self.tip, tokens=self.counted, members=self.members)
        self.counted = RULES.tokens_after(tip, self.said)
        self.trained += sum(self.done.values())
        self.members = with_pace(self.members, offers, RULES)

    def utilisation(self, peer: PeerId) -> float:
        return self.done[peer] / (self.steps[peer] * BATCH)

    def share(self, peer: PeerId) -> float:
        found = weights(self.said, self.said, self.vouched) or [1] * len(self.said)
        return found[list(self.said).index(peer)] / sum(found)


@pytest.mark.parametrize("honest", [(20, 20, 20), (19, 20, 21), (20, 22, 30), (20, 20, 20, 20)])
def test_a_member_that_counts_all_that_it_is_dealt_gains_next_to_nothing(honest) -> None:
    liar = f"p{len(honest)}"
    run = Run({f"p{n}": steps for n, steps in enumerate((*honest, 20))}, liars=frozenset({liar}))
    for _ in range(30):
        run.round()
        shares = [run.share(peer) for peer in run.steps if peer != liar]
        assert run.share(liar) <= 1.5 * sorted(shares)[len(shares) // 2] * 1.001
        assert run.share(liar) <= 1 / 3
        assert 0.95 <= run.counted / run.trained <= 1.05 + (max(honest) - 20) / 80
    assert run.said[liar] <= 4 * max(honest) * BATCH
    dealt = quotas(run.members, run.counted, None, RULES)
    assert dealt[liar] <= 4 * 10 * max(honest), "of the text as well"


@pytest.mark.parametrize("slow", [1, 3])
def test_a_peer_of_eight_gpus_that_is_vouched_for_keeps_its_weight_and_its_time(slow) -> None:
    steps = {f"p{n}": 20 for n in range(slow)} | {"fast": 160}
    run = Run(steps, vouched={"fast": 8})
    for _ in range(10):
        run.round()
        assert run.share("fast") >= 0.95 * 8 / (8 + slow)
        assert all(run.utilisation(peer) >= 0.95 for peer in steps)
        assert run.counted >= 0.95 * run.trained


def test_two_honest_peers_of_one_to_eight_compute_all_the_time_without_it() -> None:
    run = Run({"slow": 20, "fast": 160})
    for _ in range(10):
        run.round()
        assert run.utilisation("slow") == run.utilisation("fast") == 1.0
        assert run.share("fast") == pytest.approx(0.6)


def test_among_several_slow_ones_it_computes_half_of_the_time_without_it() -> None:
    run = Run({"p0": 20, "p1": 20, "p2": 20, "fast": 160})
    for _ in range(10):
        run.round()
    assert run.utilisation("fast") == pytest.approx(0.5, abs=0.05)


def test_a_peer_that_stood_still_for_a_round_is_back_two_rounds_later() -> None:
    steps = {"p0": 20, "p1": 20, "p2": 20}
    run = Run(steps)
    run.round()
    run.steps = {**steps, "p1": 1}
    run.round()
    run.steps = steps
    run.round()
    run.round()
    assert run.utilisation("p1") == 1.0


def test_a_slow_start_does_not_hold_a_fast_peer_back_for_long() -> None:
    run = Run({"p0": 160, "p1": 160, "p2": 160})
    run.members = {p: replace(m, tokens_per_s=25.0) for p, m in run.members.items()}
    for _ in range(8):
        run.round()
    assert all(run.utilisation(peer) == 1.0 for peer in run.steps)
