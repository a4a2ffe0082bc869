"""Merges: agreed on like a round, computed by all peers, never judged by a peer's own bits."""

from dataclasses import replace

from swarm.config import MergingConfig
from swarm.protocol.messages.events import ComputeMerge, Offered, Purpose
from swarm.protocol.messages.messages import Accept, Message, Offer, Ready, Roster
from swarm.protocol.rounds.policies.checks import successor_problem
from swarm.protocol.values.manifest import Kind, Manifest
from tests.protocol.round_pump import Pump, found, in_training, make_rules, name

# A round is 10 steps, so every second round makes a merge due, until step 1000.
MERGING = MergingConfig(alpha=0.1, top_k=2, decay_steps=1000, interval_steps=20)
RULES = make_rules(merging=MERGING)


def merging_swarm(peers: str, height: int = 0, **options: object) -> Pump:
    return in_training(peers, RULES, height=height, **options)


def test_a_merge_follows_the_round_that_made_it_due_before_training_goes_on() -> None:
    pump = merging_swarm("ABC", 9)
    kinds = [manifest.kind.value for manifest in pump.nodes["A"].applied[:9]]
    assert kinds == ["quorum", "quorum", "merge"] * 3
    assert all(len(pump.digests_at(height)) == 1 for height in range(1, 9))


def test_a_merge_changes_nothing_but_the_experts_values() -> None:
    pump = merging_swarm("ABC", 3)
    parent, merge = pump.nodes["A"].applied[1:3]
    for unit, entry in merge.entries.items():
        before = parent.entries[unit]
        if unit.startswith("shared"):
            assert entry == before
        else:
            assert entry.digest == name("merged", unit, before.digest)
            assert entry.base == before.digest
            assert entry.version == before.version
    assert merge.merged == 1
    assert (merge.height, merge.round) == (parent.height + 1, parent.round)
    assert merge.order == parent.order
    same = replace(
        merge,
        height=parent.height,
        kind=parent.kind,
        parent=parent.parent,
        merged=parent.merged,
        sources=parent.sources,
        entries=parent.entries,
        seed=parent.seed,
        reasons=parent.reasons,
    )
    assert same == parent


def test_no_bytes_travel_for_a_merge() -> None:
    pump = merging_swarm("ABC", tick_s=0.0)
    fetched: list[str] = []

    def watch(peer: str, source: str, unit: str) -> bool:
        if pump.tip_of(peer).round == 2 and pump.tip_of(peer).merged == 0:
            fetched.append(unit)
        return False

    pump.refuse_fetch = watch
    pump.run_to_height(3)
    assert not fetched


def test_no_offer_and_no_roster_while_a_merge_is_due() -> None:
    pump = merging_swarm("ABC")
    pump.merge_s = 5.0
    due: list[Message] = []

    def watch(source: str, destination: str, message: Message) -> bool:
        tip = pump.tip_of(source)
        if tip.height == 2 and isinstance(message, Ready | Roster):
            due.append(message)
        return False

    pump.lose = watch
    pump.run_to_height(3)
    assert not any(isinstance(message, Roster) for message in due)
    assert not any(isinstance(message, Ready) and message.offer for message in due)


def test_a_peer_with_other_arithmetic_fetches_the_proposed_bits() -> None:
    pump = merging_swarm("ABC")
    pump.merge_result = lambda peer, unit, old: name("merged", unit, old, peer == "B")
    pump.run_to_height(4)
    assert len(pump.digests_at(3)) == len(pump.digests_at(4)) == 1


def test_irreproducible_arithmetic_everywhere_still_ends_in_one_merge() -> None:
    pump = merging_swarm("ABCD")
    pump.merge_result = lambda peer, unit, old: name("merged", unit, old, peer)
    pump.run_to_height(6)
    assert all(len(pump.digests_at(height)) == 1 for height in range(1, 7))


def test_a_peer_that_computes_slowly_waits_a_while_and_then_fetches() -> None:
    pump = merging_swarm("ABC")
    computing = Pump._merge

    def merge(peer: str, node: object, tip: Manifest) -> None:
        pump.merge_s = 1000.0 if peer == tip.order[-1] else 0.2
        computing(pump, peer, node, tip)  # type: ignore[arg-type]

    pump.run_to_height(1)
    pump._merge = merge  # type: ignore[method-assign]
    pump.train_times(1000.0)  # so that no newer manifest replaces this one
    pump.run_to_height(2)
    *quick, slow = pump.order
    pump.run_to_height(3, "".join(quick))
    assert pump.tip_of(slow).height == 2
    fetches = pump.nodes[slow].fetches.get(Purpose.CATCH_UP, 0)
    start = pump.now
    pump.run(pump.now + 9)
    assert pump.nodes[slow].fetches.get(Purpose.CATCH_UP, 0) == fetches
    pump.run(pump.now + 30, lambda: pump.tip_of(slow).height >= 3)
    assert pump.now - start <= 2 * pump.timers.reduce_s + 2
    assert len(pump.digests_at(3)) == 1


def test_a_dead_convener_of_a_merge_is_replaced_with_full_phase_1() -> None:
    pump = merging_swarm("ABC", 2)
    first = pump.first
    pump.lose = lambda source, destination, message: (
        destination == first and isinstance(message, Accept)
    )
    rest = pump.others(first)
    pump.run(pump.now + 10, lambda: all(pump.nodes[p].record.accepted for p in rest))
    voted = {pump.nodes[peer].record.accepted.manifest.digest for peer in rest}  # type: ignore[union-attr]
    pump.kill(first)
    pump.run_to_height(3, rest)
    assert pump.digests_at(3, rest) == voted


def test_a_restarted_peer_computes_the_due_merge_again() -> None:
    pump = merging_swarm("ABC")
    pump.merge_s = 3.0
    pump.run_to_height(2)
    victim = pump.last
    pump.kill(victim)
    pump.restart(victim)
    pump.run_to_height(3)
    asked = [e for e in pump.nodes[victim].effects if isinstance(e, ComputeMerge)]
    assert len(asked) == 2
    assert len(pump.digests_at(3)) == 1


def test_a_merge_is_refused_unless_it_is_due_and_changes_experts_alone() -> None:
    tip, merge = merging_swarm("ABC", 3).nodes["A"].applied[1:3]
    assert successor_problem(merge, tip, RULES, due=True) is None
    other_bits = {
        unit: replace(entry, digest=name("other", unit)) if unit.startswith("expert") else entry
        for unit, entry in merge.entries.items()
    }
    # The digests of the experts are never judged.
    assert successor_problem(replace(merge, entries=other_bits), tip, RULES, due=True) is None
    shared = {**merge.entries, "shared.0": replace(merge.entries["shared.0"], digest=name("x"))}
    for wrong in (
        replace(merge, kind=Kind.QUORUM, round=merge.round + 1),
        replace(merge, entries=shared),
        replace(merge, merged=2),
        replace(merge, step=merge.step + 10),
        replace(merge, tokens=merge.tokens + 1),
        replace(merge, seed=None),
        replace(merge, contributors=("A",)),
        replace(merge, members={"A": merge.members["A"]}),
        replace(merge, owners={**merge.owners, 0: ("A",), 1: ("A",)}),
    ):
        assert successor_problem(wrong, tip, RULES, due=True), wrong
    # And none when none is due: the parent of the due tip.
    early = replace(merge, parent=merge.digest, height=merge.height + 1)
    assert "not due" in (successor_problem(early, merge, RULES, due=False) or "")


def test_stale_experts_keep_their_version_through_a_merge() -> None:
    pump = merging_swarm("ABCD", 1)
    slow = pump.last
    pump.nodes[slow].train_s = 1e9  # from round 3 on
    pump.run_to_height(6, pump.others(slow))
    merge = pump.tip_of(pump.others(slow)[0])
    assert merge.kind is Kind.MERGE
    mine = [expert for expert, owners in merge.owners.items() if slow in owners]
    assert mine and merge.round == 4
    for expert in mine:
        entry = merge.entries[f"expert.{expert}"]
        assert entry.version == 2 and entry.base is not None


def test_an_offer_made_while_a_merge_is_due_is_kept_with_the_reason() -> None:
    founding = found(RULES, ["A"], step=20)
    pump = Pump(RULES)
    node = pump.add("A", founding)
    pump.merge_s = 100.0
    pump.boot("A")
    offer = Offer(founding.digest, 10, 10, {})
    effects = node.machine.handle(Offered(offer), pump.now)
    assert "a merge is due first" in node.machine.reason
    assert not any(type(effect).__name__ == "Send" for effect in effects)
