"""The due rounds of units: once per period, with equal bytes in each round.

Policies: slice schedule, due units.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from swarm import load_run
from swarm.config import MergingConfig
from swarm.experts import expert_of_unit, shared_unit
from swarm.protocol.membership.ownership import assign
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Kind, Manifest, PeerId, Unit
from swarm.protocol.values.schedule import (
    Schedule,
    alpha_at,
    expert_slots,
    merge_due,
    merged_until,
    part_slots,
)
from tests.protocol.round_pump import found, make_rules

QUARTERS = Schedule(experts_every=4, shared_every=4, stagger=True)


def tip_of(peers: int, experts: int, parts: int) -> Manifest:
    """Manifest 0 of a number of peers, with the owners that a founder assigns."""
    rules = make_rules(experts=experts, parts=parts)
    names = [f"p{index:03}" for index in range(peers)]
    sizes = {"owners_per_expert": 1, "num_experts": experts}
    shares = assign({}, dict.fromkeys(names, 1.0), names, stale=(), seed="", **sizes)
    return found(rules, names, owners=shares.owners)


def after(tip: Manifest, renewed: set[Unit] | frozenset[Unit]) -> Manifest:
    """The next round's manifest, which renews these units."""
    number = tip.round + 1
    entries = {
        unit: replace(entry, digest=f"{unit}/{number}", version=number)
        if unit in renewed
        else entry
        for unit, entry in tip.entries.items()
    }
    return replace(tip, round=number, height=tip.height + 1, parent=tip.digest, entries=entries)


def rounds_of(
    schedule: Schedule, tip: Manifest, rounds: int, missed: frozenset[Unit] = frozenset()
) -> list[frozenset[Unit]]:
    """The due units of each of the next rounds, if all but `missed` are renewed in time."""
    dues = []
    for _ in range(rounds):
        due = frozenset(schedule.due(tip))
        dues.append(due)
        tip = after(tip, due - missed)
    return dues


@pytest.mark.parametrize("shared_every", [1, 2, 4])
@pytest.mark.parametrize(("experts_every", "peers"), [(1, 3), (4, 3), (5, 4), (3, 9)])
def test_each_unit_is_due_exactly_once_in_each_period(
    experts_every: int, shared_every: int, peers: int
) -> None:
    schedule = Schedule(experts_every, shared_every, stagger=True)
    tip = tip_of(peers, experts=8, parts=8)
    times: dict[Unit, list[int]] = {unit: [] for unit in tip.entries}
    for number, due in enumerate(rounds_of(schedule, tip, 24), 1):
        for unit in due:
            times[unit].append(number)
    for unit, numbers in times.items():
        every = shared_every if expert_of_unit(unit) is None else experts_every
        assert numbers[0] <= every
        assert {later - sooner for sooner, later in pairwise(numbers)} == {every}


def test_each_round_has_a_part_of_the_shared_tensors() -> None:
    """So an offer without one is a late one."""
    for parts in range(4, 12):
        for due in rounds_of(QUARTERS, tip_of(2, experts=3, parts=parts), 8):
            assert any(expert_of_unit(unit) is None for unit in due)


def test_without_stagger_experts_are_due_in_every_kth_round_and_parts_in_all() -> None:
    tip = tip_of(2, experts=2, parts=2)
    parts = {"shared.0", "shared.1"}
    third = Schedule(experts_every=3)
    assert [set(due) for due in rounds_of(third, tip, 6)] == [parts, parts, {*tip.entries}] * 2
    missed = frozenset({"expert.0"})
    assert rounds_of(third, tip, 6, missed) == rounds_of(third, tip, 6)


def test_what_was_missed_is_due_until_it_is_renewed_and_then_in_its_slot_again() -> None:
    tip = tip_of(2, experts=4, parts=4)
    slot = expert_slots(tip, 4)[2]
    missed, dues = frozenset({"expert.2"}), []
    for number in range(1, 20):
        due = frozenset(QUARTERS.due(tip))
        if "expert.2" in due:
            dues.append(number)
        tip = after(tip, due if number > 10 else due - missed)
    in_slot = [number for number in range(1, 20) if number % 4 == slot]
    overdue = [number for number in range(5, 12) if number not in in_slot]
    assert dues == sorted([*in_slot, *overdue])


def test_the_last_round_of_a_run_is_whole() -> None:
    tip = tip_of(2, experts=8, parts=4)
    limited = replace(QUARTERS, rounds=6)
    sizes = [len(due) for due in rounds_of(limited, tip, 6)]
    assert sizes == [3, 3, 3, 3, 3, 12]
    unstaggered = Schedule(experts_every=3, rounds=2)
    assert [len(due) for due in rounds_of(unstaggered, tip, 2)] == [4, 4]


def test_a_peer_offers_all_parts_that_are_due_and_its_own_experts_alone() -> None:
    tip = tip_of(3, experts=6, parts=8)
    due = QUARTERS.due(tip)
    for peer in tip.members:
        own = {e for e, owners in tip.owners.items() if peer in owners}
        expected = [u for u in due if (e := expert_of_unit(u)) is None or e in own]
        assert QUARTERS.due_of(peer, tip) == tuple(sorted(expected))


def test_slots_follow_from_owners_and_change_for_the_two_that_exchange_an_expert_alone() -> None:
    tip = tip_of(4, experts=16, parts=4)
    before = expert_slots(tip, 4)
    giver, taker = "p000", "p003"
    given = next(expert for expert, owners in tip.owners.items() if owners == (giver,))
    moved = replace(tip, owners={**tip.owners, given: (taker,)})
    after_it = expert_slots(moved, 4)
    changed = {expert for expert in before if before[expert] != after_it[expert]}
    assert {moved.owners[expert][0] for expert in changed} <= {giver, taker}
    assert after_it == expert_slots(replace(moved, reasons=("told otherwise",)), 4)


def test_an_expert_that_moves_is_renewed_within_a_period_and_a_round() -> None:
    tip = tip_of(3, experts=9, parts=4)
    gaps: Counter[int] = Counter()
    last = dict.fromkeys(range(9), 0)
    for number in range(1, 60):
        due = frozenset(QUARTERS.due(tip))
        for unit in due:
            expert = expert_of_unit(unit)
            if expert is not None:
                gaps[number - last[expert]] += 1
                last[expert] = number
        tip = after(tip, due)
        owners = {e: (f"p{(e * number + number // 3) % 3:03}",) for e in range(9)}
        tip = replace(tip, owners=owners if number % 5 == 0 else tip.owners)
    assert max(gaps) <= 5
    assert gaps[4] > gaps[5]


def test_parts_of_each_codec_are_spread_over_the_period_and_neighbours_stay_together() -> None:
    codecs = {shared_unit(0): "fp32", **{shared_unit(part): "bf16" for part in range(1, 13)}}
    slots = part_slots(codecs, 4)
    assert [slots[shared_unit(part)] for part in range(13)] == [0] + [0] * 3 + [1] * 3 + [2] * 3 + [
        3
    ] * 3


@pytest.mark.parametrize("every", [4, 5])
@pytest.mark.parametrize("peers", [4, 256])
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_all_rounds_of_a_7b_move_the_same_bytes(peers: int, every: int, codec: str) -> None:
    settings = [f"run.peers={peers}", f"round.shared_every={every}", f"wire.shared={codec}"]
    settings += [f"round.experts_every={every}", "round.stagger=true"]
    run = load_run("spes_7b", settings)
    layout = layout_of(run)
    tip = tip_of(peers, run.model.num_experts, 1)
    entry = tip.entries["shared.0"]
    entries = {u.unit: replace(entry, codec=u.codec, num_bytes=u.num_bytes) for u in layout.units}
    tip = replace(tip, entries=entries)
    schedule = Schedule(every, every, stagger=True)
    dues = rounds_of(schedule, tip, 2 * every)
    for kind in (None, *tip.members) if peers == 4 else (None,):
        sizes = [_num_bytes(tip, due, kind) for due in dues]
        mean = sum(sizes) / len(sizes)
        # Of 32 experts, each of 5 rounds has 6 or 7. Of an owner's 8, each has 1 or 2.
        limit = 0.03 if every == 4 else 0.1 if kind is None else 0.3
        assert all(abs(size - mean) <= limit * mean for size in sizes), (kind, sizes)


def _num_bytes(tip: Manifest, due: frozenset[Unit], owner: PeerId | None) -> int:
    """Bytes of the due units: of all, or of one peer's."""
    experts = {unit: expert_of_unit(unit) for unit in due}
    return sum(
        tip.entries[unit].num_bytes
        for unit, expert in experts.items()
        if None in (owner, expert) or owner in tip.owners[expert]
    )


def test_a_layout_has_as_many_parts_for_each_round_of_a_period() -> None:
    run = load_run("demo", ["round.shared_every=5", "round.stagger=true"])
    shared = [unit for unit in layout_of(run).units if expert_of_unit(unit.unit) is None]
    by_codec = Counter(unit.codec for unit in shared)
    assert all(number % 5 == 0 for number in by_codec.values())
    for codec in by_codec:
        sizes = [unit.num_elements for unit in shared if unit.codec == codec]
        assert max(sizes) - min(sizes) <= 1


PAPER = MergingConfig(alpha=0.1, top_k=4, decay_steps=12_500, interval_steps=500)
TIP = found(make_rules(), ["a"])


def test_alpha_falls_linearly_to_zero_and_stays_there():
    assert alpha_at(0, PAPER) == 0.1
    assert alpha_at(6_250, PAPER) == pytest.approx(0.05)
    assert alpha_at(12_500, PAPER) == 0.0
    assert alpha_at(10**9, PAPER) == 0.0


def test_the_papers_schedule_has_24_merges_whose_alphas_sum_to_1_2():
    manifest, alphas = TIP, []
    for _ in range(400):  # also beyond the schedule's end
        manifest = replace(manifest, step=manifest.step + 50)
        if merge_due(manifest, PAPER):
            alphas.append(alpha_at(manifest.step, PAPER))
            manifest = replace(manifest, merged=merged_until(manifest.step, PAPER))
    assert len(alphas) == 24
    assert sum(alphas) == pytest.approx(1.2)


def test_a_merge_is_due_once_even_if_two_intervals_went_by():
    late = replace(TIP, step=1_000)
    assert merge_due(late, PAPER)
    done = replace(late, kind=Kind.MERGE, merged=merged_until(late.step, PAPER))
    assert done.merged == 2
    assert not merge_due(done, PAPER)


@pytest.mark.parametrize("kind", list(Kind))
def test_the_kind_of_the_tip_plays_no_part(kind):
    assert merge_due(replace(TIP, kind=kind, step=500), PAPER)
    assert not merge_due(replace(TIP, kind=kind, step=500, merged=1), PAPER)
    assert not merge_due(replace(TIP, kind=kind, step=499), PAPER)


def test_no_merge_is_due_when_merging_is_off_or_over():
    assert not merge_due(replace(TIP, step=500), MergingConfig(alpha=0.0, interval_steps=500))
    assert not merge_due(replace(TIP, step=12_500), PAPER)
