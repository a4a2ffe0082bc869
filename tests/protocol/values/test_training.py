"""The main loop of a peer, and its calls."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Self

import pytest

from swarm.experts import expert_of_unit, expert_unit
from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.records.records import PeerState
from swarm.protocol.training import (
    Applied,
    Assignment,
    SavedWork,
    Training,
    TrainingShell,
    WhyPaused,
    Work,
    at_once,
)
from swarm.protocol.training.adoption import Adoption
from swarm.protocol.training.local_progress import manifests_to, problem_of
from swarm.protocol.values.manifest import Digest, Kind, Manifest, Unit
from tests.protocol.round_pump import found, make_rules

RULES = make_rules(experts=2, parts=1)
TIP = found(RULES, ["me", "you"])
MINE = next(expert for expert, owners in TIP.owners.items() if "me" in owners)
STEPS = RULES.local_steps_at(0)


@dataclass(frozen=True)
class Done:
    """Local steps."""

    steps: int = STEPS
    tokens: int = 1000
    seconds: float = 1.0
    completed: bool = True


class Over(Exception):
    """The script has no more tips."""


@dataclass
class Peer(TrainingShell):
    """A shell that acts by script, and records its calls."""

    tips: list[list[Applied]]
    """Results of the waits."""
    steps: list[Done] = field(default_factory=list)
    """Results of local steps, or one for all."""
    saved: SavedWork | None = None
    offer: SavedWork | None = None
    """Calls after this save."""
    at: Applied = field(default_factory=lambda: Applied(TIP, 0.0))
    gone: frozenset[str] = frozenset()
    """Manifests whose blobs were collected."""
    value: str = "trained"
    while_paused: list[Applied] = field(default_factory=list)
    """Result of a pause."""
    calls: list[SimpleNamespace] = field(default_factory=list)

    def go(self, **options: Any) -> Self:
        """Runs until the rounds or the script are over."""
        rules, rounds = options.pop("rules", RULES), options.pop("rounds", 9)
        with contextlib.suppress(Over):
            at_once(Training(self, "me", rules, rounds, **options).run())
        return self

    @property
    def offers(self) -> list[Offer]:
        return [call.offer for call in self.of("submit")]

    def of(self, name: str) -> list[SimpleNamespace]:
        """Arguments of the calls of a name."""
        return [call for call in self.calls if call.name == name]

    def names(self) -> list[str]:
        """Names of the calls, in order."""
        return [call.name for call in self.calls]

    def _note(self, name: str, **said: Any) -> None:
        self.calls.append(SimpleNamespace(name=name, **said))

    def newest(self) -> Applied:
        self._note("newest")
        return self.at

    def load(self, tip: Manifest, problem: Any) -> SavedWork | None:
        self._note("load")
        return self.saved

    def adopt_frozen(self, tip: Manifest) -> bool:
        self._note("adopt_frozen")
        return True

    def resumed(self, tip: Manifest, *, has_work: bool) -> None:
        self._note("resumed")

    def may_stop(self) -> None:
        self._note("may_stop")

    async def train(self, tip: Manifest, task: Assignment, before: Work | None, left: Any) -> Done:
        self._note("train", tip=tip, before=before, began_s=task.began_s, task=task)
        return self.steps.pop(0) if self.steps else Done()

    def store(
        self, tip: Manifest, bases: Mapping[Unit, Digest], tokens: int
    ) -> dict[Unit, OfferedUnit]:
        self._note("store")
        return self._values(bases)

    async def save(
        self, tip: Manifest, bases: Mapping[Unit, Digest], work: SavedWork
    ) -> dict[Unit, OfferedUnit]:
        self._note("save", work=work)
        return self._values(bases)

    async def save_offer(
        self, tip: Manifest, bases: Mapping[Unit, Digest], work: SavedWork
    ) -> dict[Unit, OfferedUnit]:
        self._note("save_offer", work=work)
        return self._values(bases)

    def load_offer(self) -> SavedWork | None:
        return self.offer

    def _values(self, bases: Mapping[Unit, Digest]) -> dict[Unit, OfferedUnit]:
        return {u: OfferedUnit(f"{self.value}.{u}", 100, base) for u, base in bases.items()}

    def submit(self, tip: Manifest, offer: Offer) -> None:
        self._note("submit", offer=offer)

    async def pause(self, tip: Manifest, why: WhyPaused) -> Sequence[Applied]:
        self._note("pause", why=why)
        return self.while_paused

    async def wait(self, tip: Manifest, state: PeerState) -> Sequence[Applied]:
        self._note("wait", state=state)
        if not self.tips:
            raise Over
        return self.tips.pop(0)

    def adopt(
        self, manifest: Manifest, decision: Adoption, before: Manifest, *, at_start: bool = False
    ) -> bool:
        self._note("adopt", manifest=manifest, decision=decision, at_start=at_start)
        return manifest.digest not in self.gone

    def lose(self, tokens: int, reason: str) -> None:
        self._note("lose", tokens=tokens, reason=reason)

    def report(self, applied: Applied, work: Work | None, *, counted: bool) -> None:
        self._note("report", applied=applied, counted=counted)

    def release(self) -> None:
        self._note("release")

    def validate(self, manifest: Manifest) -> None:
        self._note("validate", manifest=manifest)


def after(parent: Manifest, *, kind: Kind = Kind.QUORUM, **changes: Any) -> Manifest:
    """A successor without anybody's values."""
    fields: dict[str, Any] = {"kind": kind, "parent": parent.digest, "contributors": ("you",)}
    if kind is Kind.REFORM:
        fields |= {"generation": "fresh"}
    else:
        fields |= {"height": parent.height + 1}
    if kind is Kind.QUORUM:
        fields |= {"round": parent.round + 1}
    return replace(parent, **fields | changes)


def applied(*manifests: Manifest, at_s: float = 5.0) -> list[Applied]:
    return [Applied(manifest, at_s, "why") for manifest in manifests]


def saved_on(tip: Manifest, **changes: Any) -> SavedWork:
    bases = {MINE: tip.entries[expert_unit(MINE)].digest}
    saved = SavedWork("run-1", tip.digest, tip.round + 1, STEPS, 1000, 1.0, 0, bases, {})
    return replace(saved, **changes)


# ---------------------------------------------------------------- a round


def test_a_round_is_trained_saved_offered_adopted_and_reported_in_this_order() -> None:
    mine = after(TIP, contributors=("me", "you"))
    peer = Peer([applied(mine)]).go(rounds=1)
    assert peer.names() == [
        "newest", "load", "adopt", "resumed", *(["validate"] if TIP.order[0] == "me" else []),
        "may_stop", "train", "save", "submit", "wait", "adopt", "report", "release",
        *(["validate"] if mine.order[0] == "me" else []),
    ]  # fmt: skip
    (offer,) = peer.offers
    assert (offer.tip, offer.steps, offer.tokens) == (TIP.digest, STEPS, 1000)
    assert {expert_of_unit(unit) for unit in offer.units} == {None, MINE}
    assert peer.of("report")[0].counted


def test_a_stranger_neither_trains_nor_offers() -> None:
    outside = replace(TIP, members={"you": TIP.members["you"]}, owners={0: ("you",), 1: ("you",)})
    peer = Peer([], at=Applied(outside, 0.0)).go()
    assert peer.of("train") == []
    assert [wait.state for wait in peer.of("wait")] == [PeerState.JOINING]


def test_on_a_due_tip_there_are_no_steps_and_no_offers_and_what_is_merged_is_measured() -> None:
    due = after(TIP, seed="1" * 64)
    merge = after(due, kind=Kind.MERGE)
    peer = Peer([applied(due), applied(merge, at_s=7.0)])
    peer.go(is_due=lambda tip: tip.digest == due.digest)
    assert [train.tip.digest for train in peer.of("train")] == [TIP.digest, merge.digest]
    assert [wait.state for wait in peer.of("wait")][1] is PeerState.MERGING
    assert due.digest not in [validate.manifest.digest for validate in peer.of("validate")]
    assert peer.of("train")[1].began_s == 7.0


def test_a_merge_after_the_last_round_is_part_of_the_run() -> None:
    due = after(TIP, seed="1" * 64)
    merge = after(due, kind=Kind.MERGE)
    peer = Peer([applied(due), applied(merge)])
    peer.go(rounds=1, is_due=lambda tip: tip.digest == due.digest)
    assert [r.applied.manifest.digest for r in peer.of("report")] == [due.digest, merge.digest]
    assert peer.tips == []


# ---------------------------------------------------------------- use of earlier work


def test_a_round_that_went_on_takes_the_steps_away_and_their_tokens_are_lost() -> None:
    peer = Peer([applied(after(TIP))]).go(rounds=1)
    assert [(lose.tokens, lose.reason) for lose in peer.of("lose")] == [(1000, "why")]
    assert not peer.of("report")[0].counted


def test_steps_that_go_on_in_a_unit_of_deltas_are_lost_if_a_second_round_leaves_them_out() -> None:
    first = moved_by_a_delta(TIP)
    second = moved_by_a_delta(first)
    peer = Peer([applied(first), applied(second)]).go(rounds=2)
    assert [save.work.carried for save in peer.of("save")] == [frozenset(), frozenset(["shared.0"])]
    assert [lose.tokens for lose in peer.of("lose")] == [2000]


def moved_by_a_delta(parent: Manifest) -> Manifest:
    """A round in which only another peer's delta moved a part of the shared tensors."""
    before = parent.entries["shared.0"]
    delta = f"delta of round {parent.round + 1}"
    moved = replace(before, digest=f"by {delta}", base=before.digest, delta=delta, coding="b2")
    entries = {**parent.entries, "shared.0": moved}
    return after(parent, sources={"shared.0": (("you", delta),)}, entries=entries)


def test_a_reform_gets_the_finished_work_and_that_is_saved_for_it_first() -> None:
    reform = after(TIP, kind=Kind.REFORM)
    peer = Peer([applied(reform)]).go()
    assert len(peer.of("train")) == 1
    assert [save.work.base_tip for save in peer.of("save")] == [TIP.digest, reform.digest]
    assert [offer.tip for offer in peer.offers] == [TIP.digest, reform.digest]
    assert peer.of("lose") == []


def test_steps_that_a_reform_interrupts_go_on_where_they_were() -> None:
    half = Done(steps=1, tokens=250, completed=False)
    reform = after(TIP, kind=Kind.REFORM)
    peer = Peer([applied(reform)], steps=[half]).go()
    assert [train.before for train in peer.of("train")] == [None, half]
    assert [(o.tip, o.steps) for o in peer.offers if not o.is_late] == [(reform.digest, STEPS)]


def test_a_manifest_whose_blobs_are_gone_is_jumped_over() -> None:
    first = after(TIP)
    second = after(first)
    peer = Peer([applied(first), applied(second)], gone=frozenset({first.digest})).go(rounds=2)
    assert [report.applied.manifest.digest for report in peer.of("report")] == [second.digest]


def test_what_a_manifest_counts_is_not_lost_where_its_blobs_are_gone() -> None:
    first = after(TIP, contributors=("me", "you"))
    peer = Peer([applied(first), applied(after(first))], gone=frozenset({first.digest}))
    peer.go(rounds=2)
    assert peer.of("lose") == []


# ---------------------------------------------------------------- late offers


@pytest.mark.parametrize(
    ("experts_every", "value", "late"),
    [(1, "trained", 1), (2, "trained", 0), (1, "as agreed", 0)],
    ids=["offered", "not due", "nothing new"],
)
def test_what_a_round_left_out_of_own_experts_is_offered_before_the_next_steps(
    experts_every: int, value: str, late: int
) -> None:
    rules = replace(RULES, experts_every=experts_every)
    missed = after(TIP) if experts_every == 1 else after(after(TIP))
    unit = expert_unit(MINE)
    peer = Peer([applied(missed)], value=value)
    if value == "as agreed":
        entries = {**TIP.entries, unit: replace(TIP.entries[unit], digest=f"{value}.{unit}")}
        peer.at = Applied(replace(TIP, entries=entries), 0.0)
        peer.tips = [applied(after(peer.at.manifest))]
    peer.go(rules=rules)
    offers = peer.offers
    assert [offer.is_late for offer in offers].count(True) == late
    if late:
        assert offers[1].is_late and offers[1].units.keys() == {unit}
        assert (offers[1].steps, offers[1].tokens) == (0, 0)
        kinds = peer.names()
        assert kinds.index("store") < len(kinds) - 1 - kinds[::-1].index("train")


def test_a_round_that_counts_leaves_nothing_late() -> None:
    peer = Peer([applied(after(TIP, contributors=("me",)))]).go()
    assert peer.of("store") == []


# ---------------------------------------------------------------- rounds with slices of the units

SLICED = make_rules(experts=8, parts=4, experts_every=4, shared_every=4, stagger=True)
FIRST = found(SLICED, ["me", "you"])


def renewed(tip: Manifest, contributors: tuple[str, ...]) -> Manifest:
    """The next round, in which these peers renew their due experts."""
    due = SLICED.schedule.due(tip)
    owned = {u for peer in contributors for u in SLICED.schedule.due_of(peer, tip)}
    entries = {
        unit: replace(entry, digest=f"{unit}@{tip.round + 1}", version=tip.round + 1)
        if unit in due & owned
        else entry
        for unit, entry in tip.entries.items()
    }
    sources = {unit: tuple((peer, "v") for peer in contributors) for unit in due & owned}
    return after(tip, contributors=contributors, entries=entries, sources=sources)


def test_each_offer_holds_what_is_due_trained_from_its_own_base() -> None:
    first = renewed(FIRST, ("me", "you"))
    second = renewed(first, ("me", "you"))
    peer = Peer([applied(first), applied(second)], at=Applied(FIRST, 0.0)).go(rules=SLICED)
    offers = peer.offers
    for offer, tip in zip(offers, [FIRST, first, second], strict=True):
        assert tuple(sorted(offer.units)) == SLICED.schedule.due_of("me", tip)
        assert all(value.base == tip.entries[u].digest for u, value in offer.units.items())
    assert len({unit for offer in offers for unit in offer.units}) == sum(
        len(offer.units) for offer in offers
    )


def test_parts_that_were_not_due_go_on_and_the_private_state_says_from_where() -> None:
    first = renewed(FIRST, ("you",))
    peer = Peer([applied(first)], at=Applied(FIRST, 0.0)).go(rules=SLICED)
    (due,) = [unit for unit in SLICED.schedule.due(FIRST) if expert_of_unit(unit) is None]
    decision = peer.of("adopt")[-1].decision
    assert decision.kept_parts == set(SLICED.shared_units) - {due}
    bases = peer.of("save")[-1].work.part_bases
    assert bases == {unit: first.entries[unit].digest for unit in SLICED.shared_units}
    assert bases[due] != FIRST.entries[due].digest


def test_after_a_crash_parts_go_on_unless_they_were_renewed_meanwhile() -> None:
    first = renewed(FIRST, ("you",))
    second = renewed(first, ("you",))
    bases = {unit: FIRST.entries[unit].digest for unit in SLICED.shared_units}
    saved = saved_on(FIRST, part_bases=bases)
    peer = Peer([], saved=saved, at=Applied(second, 0.0, parent=first)).go(rules=SLICED)
    moved = {u for u in bases if second.entries[u].digest != bases[u]}
    assert len(moved) == 2
    kept = [adopt.decision.kept_parts for adopt in peer.of("adopt")]
    assert len(kept) == 2 and kept[0] & kept[1] == bases.keys() - moved


def test_an_expert_that_missed_its_round_is_offered_late_and_the_others_wait_for_theirs() -> None:
    first = renewed(FIRST, ("you",))
    chain = [first]
    for _ in range(4):
        chain.append(renewed(chain[-1], ("me", "you")))
    missed = {u for u in SLICED.schedule.due_of("me", FIRST) if expert_of_unit(u) is not None}
    assert missed
    peer = Peer([applied(tip) for tip in chain], at=Applied(FIRST, 0.0)).go(rules=SLICED)
    late = [offer for offer in peer.offers if offer.is_late]
    assert all(offer.units.keys() <= set(SLICED.schedule.due_of("me", first)) for offer in late)
    in_time = [offer for offer in peer.offers if not offer.is_late]
    assert missed & in_time[0].units.keys()
    assert sum(bool(missed & offer.units.keys()) for offer in in_time) == 2


def test_what_rounds_agree_on_is_measured_once_a_cycle_and_in_the_end() -> None:
    tips = [FIRST]
    for _ in range(6):
        tips.append(renewed(tips[-1], ("me",)))
    peer = Peer([applied(tip) for tip in tips[1:]], at=Applied(FIRST, 0.0))
    mine = [tip for tip in tips if tip.order[0] == "me"]
    peer.go(rules=SLICED, rounds=6)
    measured = [validate.manifest.round for validate in peer.of("validate")]
    assert measured == [tip.round for tip in mine if tip.round in (0, 4, 6)]


# ---------------------------------------------------------------- after a crash


def test_saved_work_on_the_tip_is_offered_again_without_a_step() -> None:
    peer = Peer([], saved=saved_on(TIP)).go()
    assert peer.names()[:4] == ["newest", "load", "adopt_frozen", "resumed"]
    assert peer.of("train") == [] and len(peer.offers) == 1


def test_saved_work_of_an_older_tip_is_dropped_and_experts_follow_the_way() -> None:
    due = after(TIP, contributors=("me",))
    merge = after(due, kind=Kind.MERGE)
    peer = Peer([], saved=saved_on(TIP), at=Applied(merge, 3.0, parent=due)).go()
    assert [adopt.manifest.digest for adopt in peer.of("adopt")] == [due.digest, merge.digest]
    assert all(adopt.at_start for adopt in peer.of("adopt"))
    assert peer.of("train")[0].before is None
    assert peer.of("train")[0].began_s == 3.0


def test_the_way_goes_over_the_parent_only_from_before_it() -> None:
    parent = after(TIP)
    tip = after(parent, kind=Kind.MERGE)
    newest = Applied(tip, 0.0, parent=parent)
    assert manifests_to(newest, tip.digest) == []
    assert manifests_to(newest, parent.digest) == [tip]
    assert manifests_to(newest, TIP.digest) == [parent, tip]
    assert manifests_to(newest, "elsewhere") == [tip]
    assert manifests_to(Applied(tip, 0.0), TIP.digest) == [tip]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run_id": "other"}, "belongs to the run other, not run-1"),
        ({"round": 7}, "cannot follow the manifest"),
        ({"tokens": 0}, "cannot follow the manifest"),
        ({"base_tip": "older", "round": 7}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("is_reformed", [False, True])
def test_a_private_state_that_does_not_fit_has_a_problem(
    changes: dict[str, Any], words: str | None, *, is_reformed: bool
) -> None:
    tip = after(TIP, kind=Kind.REFORM) if is_reformed else TIP
    problem = problem_of(saved_on(TIP, **changes), "run-1", tip)
    assert (problem is None) if words is None else (problem and words in problem)


# ---------------------------------------------------------------- too few owned experts


def test_a_peer_waits_while_too_few_experts_have_an_owner_and_no_machine_has_room() -> None:
    rules = replace(RULES, min_owned_share=1.0)
    waiting = replace(TIP, owners={**TIP.owners, 1 - MINE: ()})
    peer = Peer([applied(after(waiting))], at=Applied(waiting, 0.0)).go(rules=rules, rounds=1)
    names = peer.names()
    assert names.index("pause") < names.index("train")
    (call,) = peer.of("pause")
    why = call.why({"me": 1})
    assert why == (
        "1 of 2 experts have an owner, ownership.min_owned_share asks for 2, and the machines of "
        "the 1 peers here have room for 1: start more peers, or some of these with more memory"
    )
    assert call.why({"me": 1, "newcomer": 1}) is None, "a round gives it an owner"
    half = Peer([applied(after(waiting))], at=Applied(waiting, 0.0))
    half.go(rules=replace(RULES, min_owned_share=0.5), rounds=1)
    assert not half.of("pause")


def test_a_tip_that_comes_while_it_waits_is_adopted_without_training() -> None:
    waiting = replace(TIP, owners={**TIP.owners, 1 - MINE: ()})
    peer = Peer([], at=Applied(waiting, 0.0), while_paused=applied(after(waiting)))
    peer.go(rules=replace(RULES, min_owned_share=1.0), rounds=1)
    assert not peer.of("train") and len(peer.of("report")) == 1
