"""The value of work, whatever members claim: property tests, and a model of whole runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import BadManifest
from swarm.protocol.messages.message_bytes import foreign_manifest
from swarm.protocol.rounds.policies.deals import (
    FASTEST,
    MAX_QUOTA,
    MAX_TOKENS_PER_S,
    book_after,
    book_of_reform,
    most_samples,
    quotas,
    tokens_problem,
    with_pace,
)
from swarm.protocol.rounds.policies.rules import MOST, Rules
from swarm.protocol.training.local_progress import Reading
from swarm.protocol.values.manifest import Member, PeerId
from swarm.protocol.values.texts import Text
from swarm.protocol.values.work import (
    MAX_HOLES,
    MAX_SAMPLES,
    Book,
    book_of,
    book_problem,
    next_book,
    num_samples,
    reformed_book,
    split,
    trained,
    weights,
)
from tests.protocol.round_pump import found, make_offer, make_rules, name

EXACT = make_rules()
"""10 steps per round with 100 tokens each, 10 tokens per sample."""
TIMED = replace(EXACT, round_seconds=8.0, planned_peers=4)
AHEAD = replace(EXACT, overlaps=True)
PER_STEP, USUAL = 10, 100
"""Samples of a step, and of the exact mode's round."""


def samples(stretches):
    """Each sample separately, in order."""
    return list(chain.from_iterable(range(start, stop) for start, stop in stretches))


class History:
    """A run in which peers join, work at different speeds, fall silent and are lost."""

    def __init__(self, rules: Rules, seed: int, most_peers: int = 12) -> None:
        self.rules, self.random, self.most_peers = rules, Random(seed), most_peers
        founders = [f"p{number:03}" for number in range(self.random.randint(1, most_peers))]
        self.joined = len(founders)
        self.tip = found(rules, founders)
        self.seen: list[int] = []
        self.paces: dict[PeerId, float] = {}

    def step(self) -> None:
        if self.random.random() < 0.1:
            self._reform()
        else:
            self._round()

    def _reform(self) -> None:
        alive = [peer for peer in self.tip.members if self.random.random() < 0.6]
        alive = alive or list(self.tip.members)[:1]
        members = {peer: self.tip.members[peer] for peer in alive}
        if self.random.random() < 0.3:
            members[self._newcomer()] = Member(0, 1.0)
        book = book_of_reform(self.tip, dict(sorted(members.items())), self.rules)
        self.tip = replace(self.tip, members=members, **vars(book))

    def _newcomer(self) -> PeerId:
        self.joined += 1
        return f"p{self.random.randrange(1000):03}n{self.joined}"

    def _round(self) -> None:
        tip, random = self.tip, self.random
        peers = [peer for peer in tip.members if random.random() < 0.8] or list(tip.members)[:1]
        work, members = {}, dict(tip.members)
        for peer in peers:
            count = self._count(peer)
            work[peer] = count * self.rules.sequence_length
            self.seen += samples(split(tip.dealt[peer], count)[0])
            seconds = work[peer] / self.paces.setdefault(peer, random.choice([40.0, 150.0, 900.0]))
            offer = replace(make_offer(EXACT, peer, tip), tokens=work[peer], seconds=seconds)
            members = with_pace(members, {peer: offer}, self.rules)
            assert tokens_problem(work[peer], peer, tip, self.rules) is None
        for peer in list(members):
            if random.random() < 0.05 and len(members) > 1:
                del members[peer]
        while random.random() < 0.3 and len(members) < self.most_peers:
            members[self._newcomer()] = Member(1, 1.0)
        tokens = tip.tokens + sum(work.values())
        book = book_after(tip, work, dict(sorted(members.items())), tokens, self.rules)
        self.tip = replace(tip, members=members, tokens=tokens, **vars(book))

    def _count(self, peer: PeerId) -> int:
        """Number of samples of its deal that a peer reads."""
        dealt = num_samples(self.tip.dealt[peer])
        if self.rules.overlaps:
            return self.random.choice([USUAL, dealt])  # of one round, or also of a missed one
        if self.rules.round_seconds is None:
            return dealt
        return self.random.randint(1, dealt // PER_STEP) * PER_STEP

    def check(self) -> None:
        """Each sample before the cursor is exactly one of: counted, open, dealt."""
        book = book_of(self.tip)
        dealt = chain.from_iterable(samples(own) for own in book.dealt.values())
        everything = [*self.seen, *samples(book.holes), *dealt]
        assert sorted(everything) == list(range(book.cursor))
        assert book_problem(book) is None
        assert book.dealt.keys() == self.tip.members.keys()


@pytest.mark.parametrize("rules", [EXACT, TIMED, AHEAD], ids=["exact", "timed", "ahead"])
@pytest.mark.parametrize("seed", range(20))
def test_no_sample_is_counted_twice_and_none_is_forgotten(rules: Rules, seed: int) -> None:
    history = History(rules, seed)
    for _ in range(30):
        history.step()
        history.check()
        assert len(history.tip.holes) <= (3 * history.most_peers if rules is TIMED else 10)


def test_holes_do_not_become_more_with_time() -> None:
    history = History(TIMED, seed=1)
    for _ in range(400):
        history.seen.clear()
        history.step()
        assert len(history.tip.holes) <= 3 * history.most_peers


def test_after_one_lap_everything_is_read_but_what_is_still_open() -> None:
    history = History(EXACT, seed=3)
    windows = 20_000
    while len(history.seen) < windows:
        history.step()
    book = book_of(history.tip)
    still_open = num_samples(book.holes) + sum(map(num_samples, book.dealt.values()))
    assert len(set(history.seen)) == len(history.seen) == book.cursor - still_open
    assert set(range(windows)) - set(history.seen) <= {
        *samples(book.holes),
        *chain.from_iterable(samples(own) for own in book.dealt.values()),
    }


def test_what_was_not_used_is_dealt_first() -> None:
    book = next_book(Book(), {}, {"A": 10, "B": 10})
    assert book == Book(20, (), {"A": ((0, 10),), "B": ((10, 20),)})
    after = next_book(book, {"A": 4, "B": 10}, {"A": 10, "B": 10})
    assert after == Book(34, (), {"A": ((4, 10), (20, 24)), "B": ((24, 34),)})


def test_where_rounds_overlap_what_was_not_counted_stays_its_readers_and_comes_first() -> None:
    book = next_book(Book(), {}, {"A": 20, "B": 20, "C": 20})
    after = next_book(book, {"A": 10, "B": 0}, {"A": 20, "B": 20}, keeps_rest=True)
    # A was counted with half of its deal, B was excluded, and C left. C's samples come after A's
    # own.
    assert after == Book(50, (), {"A": ((10, 20), (40, 50)), "B": ((20, 40),)})
    fewer = next_book(after, {}, {"A": 5, "B": 5}, keeps_rest=True)
    assert fewer.dealt == after.dealt, "it may have been read"


def test_where_rounds_overlap_each_member_is_dealt_two_rounds() -> None:
    tip = found(AHEAD, ["A", "B"])
    assert {num_samples(own) for own in tip.dealt.values()} == {2 * USUAL}
    for rounds in (1, 2):
        assert tokens_problem(rounds * 1000, "A", tip, AHEAD) is None
    assert "more than the 200 samples" in (tokens_problem(2010, "A", tip, AHEAD) or "")
    assert "no whole steps" in (tokens_problem(1005, "A", tip, AHEAD) or "")
    for book in (
        book_after(tip, {"A": 1000}, tip.members, 1000, AHEAD),
        book_of_reform(tip, tip.members, AHEAD),
    ):
        assert {num_samples(own) for own in book.dealt.values()} == {2 * USUAL}


def test_members_of_a_reform_read_on_and_newcomers_get_what_was_lost() -> None:
    book = next_book(Book(), {}, {"A": 10, "B": 10, "C": 10})
    after = reformed_book(book, {"B": 7, "D": 5, "E": 10})
    assert after.dealt["B"] == book.dealt["B"]
    assert after.dealt["D"] == ((0, 5),)
    assert after.dealt["E"] == ((5, 10), (20, 25))
    assert (after.cursor, after.holes) == (25, ())


WRONG_BOOKS = {
    "the cursor": Book(-1),
    "is 4611686018427387904": Book(MAX_SAMPLES),
    "more than": Book(MAX_SAMPLES - 1, tuple((3 * n, 3 * n + 1) for n in range(MAX_HOLES + 1))),
    "touch each other": Book(9, ((0, 1), (1, 2))),
    "not in order": Book(9, ((4, 5), (1, 2))),
    "5 to 5": Book(9, ((5, 5),)),
    "7 to 3": Book(9, (), {"A": ((7, 3),)}),
    "-1 to 3": Book(9, ((-1, 3),)),
    "3 to 5 are listed twice": Book(9, ((2, 4),), {"A": ((3, 5),)}),
    "before 9": Book(9, (), {"A": ((8, 10),)}),
    "0 to 2 are listed twice": Book(9, (), {"A": ((0, 2),), "B": ((0, 2),)}),
}


@pytest.mark.parametrize("words", WRONG_BOOKS)
def test_a_book_that_nobody_wrote_is_refused(words: str) -> None:
    book = WRONG_BOOKS[words]
    assert words in (book_problem(book) or "")
    manifest = replace(found(EXACT, ["A", "B"]), **vars(book))
    with pytest.raises(BadManifest, check=lambda error: error.reason == "manifest_book"):
        foreign_manifest(manifest.encoded)


# ---------------------------------------------------------------- quotas


def test_in_the_exact_mode_everybody_gets_the_samples_of_its_steps() -> None:
    members = {"A": Member(0, 1.0), "B": Member(0, 5.0, tokens_per_s=1e6)}
    assert quotas(members, 0, 10**6, EXACT) == {"A": USUAL, "B": USUAL}


def test_in_rounds_of_a_given_time_a_member_gets_what_it_can_use_and_a_quarter_more() -> None:
    members = {"slow": Member(0, 1.0, 25.0), "fast": Member(0, 1.0, 200.0)}
    # 8 s x 25 tokens/s are 20 samples; a quarter more are 25, in whole steps of 10: 30.
    assert quotas(members, 0, None, TIMED) == {"slow": 30, "fast": 200}


@pytest.mark.parametrize(
    ("windows", "quota"), [(None, 1600), (10**6, 1600), (4000, 1000), (4010, 1000), (100, USUAL)]
)
def test_a_member_of_unknown_pace_gets_much_but_not_laps_of_a_small_text(
    windows: int | None, quota: int
) -> None:
    members = {"A": Member(0, 1.0), "B": Member(0, 1.0)}
    assert set(quotas(members, 0, windows, TIMED).values()) == {quota}


def test_no_pace_makes_a_quota_explode() -> None:
    member = Member(0, 1.0)
    for seconds in (0.0, 5e-324, 1e-9, 1e9):
        offer = replace(make_offer(TIMED, "A", found(TIMED, ["A"])), tokens=2**61, seconds=seconds)
        paced = with_pace({"A": member}, {"A": offer}, TIMED)
        assert paced["A"].tokens_per_s <= MAX_TOKENS_PER_S
        ages = replace(TIMED, round_seconds=1e300)
        assert 0 < quotas(paced, 0, None, ages)["A"] <= MAX_QUOTA + PER_STEP
    one_that_lies = {f"p{n}": Member(0, 1.0, 100.0) for n in range(3)} | {"A": paced["A"]}
    dealt = quotas(one_that_lies, 0, None, TIMED)
    done = 80  # samples, in the time of a round
    assert dealt == {"p0": USUAL, "p1": USUAL, "p2": USUAL, "A": MOST * done}
    of_two = {"p0": one_that_lies["p0"], "A": paced["A"]}
    assert quotas(of_two, 0, None, TIMED)["A"] == FASTEST * done
    trainee = {"A": replace(paced["A"], votes=False, vouched=False), "B": Member(0, 1.0)}
    assert quotas(trainee, 0, None, TIMED) == {"A": 16 * USUAL, "B": 16 * USUAL}
    newcomer = {"A": Member(0, 1.0, 100.0), "B": Member(0, 1.0, votes=False)}
    assert quotas(newcomer, 0, None, TIMED) == {"A": USUAL, "B": MOST * done}
    assert with_pace({"A": member}, {"A": replace(offer, seconds=0.0)}, EXACT) == {"A": member}


def test_the_pace_is_taken_by_the_clock_of_the_run_and_moves_by_a_factor_of_two() -> None:
    """A round has 8 s. A deal of 1.25 times the fitting samples takes at least 5 of them."""

    def pace(tokens: int, seconds: float, known: float = 0.0) -> float:
        offer = replace(make_offer(TIMED, "A", found(TIMED, ["A"])), tokens=tokens, seconds=seconds)
        paced = with_pace({"A": Member(0, 1.0, known)}, {"A": offer}, TIMED)
        return paced["A"].tokens_per_s

    assert pace(1000, 8.0) == 125.0
    assert pace(1000, 0.001) == pace(1000, 0.0) == 200.0
    assert pace(1000, 8.0, known=10.0) == 20.0
    assert pace(1000, 8.0, known=1000.0) == 500.0, "one round without progress is forgiven"


@given(
    st.lists(st.floats(0.1, 1e4), min_size=2, max_size=7), st.integers(1, 64), st.floats(0.0, 1e12)
)
def test_one_voter_alone_moves_no_limit_of_a_deal(paces, weight, lie):
    """Whatever its claim, its deal is at most 4 times another voter's work."""
    members = {f"p{n}": Member(0, 1.0, pace) for n, pace in enumerate(paces)}
    members |= {"liar": Member(0, 1.0, lie, weight=weight)}
    most = max(MOST, 1.25 * weight) * max(paces) * 8.0 / TIMED.sequence_length
    assert quotas(members, 0, None, TIMED)["liar"] <= most + PER_STEP


@pytest.mark.parametrize("rules", [AHEAD, TIMED], ids=["beside", "timed"])
def test_of_a_text_of_its_own_nobody_counts_more_than_it_would_be_dealt(rules: Rules) -> None:
    """Its claimed work is the weight of its values, and limits how far they may have moved."""
    own = replace(rules, is_dealt=False)
    tip = found(own, ["A", "B"])
    assert not tip.dealt
    most = most_samples("A", found(rules, ["A", "B"]), rules)
    assert most_samples("A", tip, own) == most == num_samples(found(rules, "AB").dealt["A"])
    assert tokens_problem(most * 10, "A", tip, own) is None
    assert f"the {most} samples" in (tokens_problem(most * 10 + 100, "A", tip, own) or "")
    reading = Reading(own, "A")
    assert reading.dealt(tip, 0) == ((0, most),)
    assert reading.dealt(tip, most * 10) == ()


def test_steps_follow_tokens_in_rounds_of_a_given_time() -> None:
    tip = replace(found(TIMED, ["A"]), step=7, tokens=3100)
    assert EXACT.step_after(tip, 4100) == 17
    # A step is a batch of 100 tokens of each of the 4 planned peers.
    assert [TIMED.step_after(tip, tokens) for tokens in (3100, 3199, 3200, 8000)] == [7, 7, 8, 20]


def test_the_founders_text_limits_the_first_deal() -> None:
    text = Text("text", "byte", name("text"), documents=1, tokens=4001, windows=400)
    founding = replace(found(TIMED, ["A"]).founding, text=text)
    tip = replace(found(TIMED, ["A"]), founding=founding)
    assert num_samples(book_after(tip, {}, tip.members, 0, TIMED).dealt["A"]) == 200


# ---------------------------------------------------------------- size


def test_what_a_member_costs_in_a_manifest_stays_small() -> None:
    history = History(TIMED, seed=1, most_peers=1024)
    peers = [f"Qm{number:044}" for number in range(1024)]
    history.tip = found(TIMED, peers)
    for _ in range(3):
        history._round()
    tip = replace(history.tip, work=dict.fromkeys(history.tip.members, 123456789))
    members = {peer: replace(m, tokens_per_s=0.0) for peer, m in tip.members.items()}
    bare = replace(tip, work={}, holes=(), dealt={}, members=members)
    more = (len(tip.encoded) - len(bare.encoded)) / len(tip.members)
    assert more < 200, more


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
    """One member's claim adds at most another member's work."""
    found, largest = trained(work), max(work, key=lambda peer: work[peer])
    rest = {peer: tokens for peer, tokens in work.items() if peer != largest}
    assert 0 < found <= sum(work.values())
    if rest:
        assert found <= sum(rest.values()) + max(rest.values())
    assert trained(dict.fromkeys(work, 7)) == 7 * len(work)


# ---------------------------------------------------------------- whole runs

RULES = replace(make_rules(), round_seconds=8.0, planned_peers=4)
"""10 tokens per sample, 10 samples per step. A new peer is dealt 160 steps."""
BATCH = 100


@dataclass
class Run:
    """Rounds of members that take `steps` steps in the time of one.

    A liar counts its whole deal.
    """

    steps: Mapping[PeerId, int]
    vouched: Mapping[PeerId, int] = field(default_factory=dict)
    liars: frozenset[PeerId] = frozenset()
    done: dict[PeerId, int] = field(default_factory=dict)
    """Tokens that each member has really trained on in the last round."""
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
