"""Lost majorities, partitions, restarts: the chain of a peer, and when it may change."""

from dataclasses import replace
from math import inf

from swarm.protocol.membership.membership import absent_after
from swarm.protocol.messages.events import (
    Apply,
    CancelFetch,
    Discovered,
    Fetch,
    Keep,
    Persist,
    Received,
    Send,
    Stored,
    Sync,
    Synced,
    Tick,
    Topic,
    Unobtainable,
)
from swarm.protocol.messages.messages import (
    Accept,
    Ballot,
    Certificate,
    Commit,
    Header,
    Hello,
    Message,
    Prepare,
    Propose,
    Ready,
)
from swarm.protocol.rounds import Phase
from swarm.protocol.rounds.policies.deals import book_of_reform
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import Kind, Manifest
from tests.protocol.round_pump import Pump, found, make_rules, start_swarm

REFORM_S = 60.0


def cut(pump: Pump, left: str) -> None:
    """Cuts all links between these peers and the others."""
    pump.lose = lambda source, destination, message: (source in left) != (destination in left)
    pump.refuse_fetch = lambda peer, source, unit: (peer in left) != (source in left)


def heal(pump: Pump) -> None:
    pump.lose = lambda source, destination, message: False
    pump.refuse_fetch = lambda peer, source, unit: False


def tips(pump: Pump, peers: str) -> set[str]:
    return {pump.nodes[peer].machine.tip.digest for peer in peers}


def lost_majority() -> tuple[Pump, str, str]:
    """Five peers. Three of them die right after round 2. Returns (pump, survivors, dead)."""
    pump = start_swarm("ABCDE")
    pump.run_to_height(2)
    order = pump.nodes["A"].machine.tip.order
    dead, alive = "".join(order[:3]), "".join(order[3:])
    for peer in dead:
        pump.kill(peer)
    return pump, alive, dead


def test_survivors_of_a_lost_majority_wait_and_then_go_on_alone() -> None:
    pump, alive, _ = lost_majority()
    start = pump.now
    pump.run(pump.now + REFORM_S - 1)
    assert all(pump.nodes[peer].machine.tip.height == 2 for peer in alive)
    pump.run_rounds(4, alive)
    assert pump.now - start < REFORM_S + 40
    assert len(tips(pump, alive)) == 1
    tip = pump.nodes[alive[0]].machine.tip
    assert sorted(tip.members) == sorted(alive)
    assert len(tip.lineage) == 1
    assert "no quorum of 5 voters heard for 60.0 s, 2 continue" in "".join(
        pump.nodes[peer].said(Topic.FORK) for peer in alive
    )


def test_a_reform_keeps_round_height_and_values_of_its_parent() -> None:
    pump, alive, _ = lost_majority()
    parent = pump.nodes[alive[0]].machine.tip
    pump.run(pump.now + 80, lambda: pump.nodes[alive[0]].machine.tip.digest != parent.digest)
    reform = pump.nodes[alive[0]].machine.tip
    assert reform.kind is Kind.REFORM
    assert (reform.height, reform.round, reform.step) == (parent.height, parent.round, parent.step)
    assert reform.entries == parent.entries
    assert reform.parent == parent.digest
    assert reform.code > parent.code
    successor = replace(parent, height=parent.height + 1)
    assert successor.code > reform.code  # the quorum's successor beats every reform


def test_a_returning_majority_listens_first_and_joins_the_survivors() -> None:
    pump, alive, dead = lost_majority()
    pump.run_rounds(5, alive, within_s=200)
    generation = pump.nodes[alive[0]].machine.tip.generation
    for peer in dead:
        pump.restart(peer)
    pump.run(pump.now + 60, lambda: len(tips(pump, "ABCDE")) == 1 and all(
        node.machine.is_member for node in pump.nodes.values()
    ))  # fmt: skip
    assert all(node.machine.tip.generation == generation for node in pump.nodes.values())
    assert all(node.machine.is_member for node in pump.nodes.values())


def test_a_minority_that_was_cut_off_yields_to_the_live_majority() -> None:
    pump = start_swarm("ABCDE")
    pump.run_to_height(2)
    order = pump.nodes["A"].machine.tip.order
    minority, majority = "".join(order[3:]), "".join(order[:3])
    cut(pump, minority)
    # The minority reforms and is much faster than the majority from then on.
    for peer in majority:
        pump.nodes[peer].train_s = 12.0
    pump.run(pump.now + 150)
    assert pump.nodes[minority[0]].machine.tip.round > pump.nodes[majority[0]].machine.tip.round
    before = {m.digest for m in pump.nodes[majority[0]].applied}
    heal(pump)
    pump.run(pump.now + 120, lambda: len(tips(pump, "ABCDE")) == 1)
    assert len(tips(pump, "ABCDE")) == 1
    assert pump.nodes[minority[0]].machine.tip.generation == "0"
    after = {m.digest for m in pump.nodes[majority[0]].applied}
    assert before <= after
    assert all(m.generation == "0" for m in pump.nodes[majority[0]].applied)


def test_a_peer_that_hears_a_quorum_holds_a_reform_back_and_says_so() -> None:
    pump = start_swarm("ABCDE")
    pump.run_to_height(2)
    machine = pump.nodes["A"].machine
    reform = reform_of(machine.tip, ["D", "E"])
    header = Header(reform.code, reform.digest, reform.generation)
    left = Certificate(Ballot(0, "D"), {"D": bytes(64)})
    effects = machine.handle(Received("D", header, Commit(reform, left, machine.tip)), pump.now)
    assert not any(isinstance(effect, Persist | Apply) for effect in effects)
    assert "held back" in machine.reason
    assert machine.tip.generation == "0"


def reform_of(tip: Manifest, members: list[str], generation: str = "ab" * 16) -> Manifest:
    chosen = {peer: tip.members[peer] for peer in members}
    book = book_of_reform(tip, chosen, make_rules())
    return replace(
        tip,
        generation=generation,
        kind=Kind.REFORM,
        parent=tip.digest,
        members=chosen,
        absent=absent_after(tip, chosen, tip.round),
        contributors=tuple(members),
        sources={},
        work={},
        **vars(book),
        owners={expert: (members[expert % len(members)],) for expert in tip.owners},
        lineage=(*tip.lineage, (tip.height, (len(members), generation))),
        run="run-1",
    )


def test_of_two_reforms_the_one_with_more_members_wins() -> None:
    pump = start_swarm("ABCDE")
    pump.run_to_height(2)
    tip = pump.nodes["A"].machine.tip
    small, large = reform_of(tip, ["D"], "ff" * 16), reform_of(tip, ["D", "E"], "11" * 16)
    assert large.code > small.code > tip.code


def test_two_survivors_that_reform_at_once_end_up_in_one_generation() -> None:
    pump, alive, _ = lost_majority()
    pump.lose = lambda source, destination, message: isinstance(message, Commit | Hello)
    pump.run(pump.now + 100)
    assert len({pump.nodes[peer].machine.tip.generation for peer in alive}) == 2
    heal(pump)
    pump.run(pump.now + 200, lambda: len(tips(pump, alive)) == 1)
    pump.run_rounds(pump.nodes[alive[0]].machine.tip.round + 2, alive)
    assert len({pump.nodes[peer].machine.tip.generation for peer in alive}) == 1


def test_with_an_endless_reform_time_the_minority_waits() -> None:
    pump = start_swarm("ABCDE", timers=Timers(reform_s=inf))
    pump.run_to_height(2)
    order = pump.nodes["A"].machine.tip.order
    for peer in order[:3]:
        pump.kill(peer)
    pump.run(pump.now + 2000)
    assert {pump.nodes[peer].machine.tip.height for peer in order[3:]} == {2}


def test_of_two_the_tie_breaker_goes_on_and_the_other_waits_and_yields() -> None:
    pump = start_swarm("AB")
    pump.run_to_height(2)
    first, second = pump.nodes["A"].machine.tip.order
    cut(pump, first)
    height = pump.nodes[first].machine.tip.height
    pump.run(pump.now + 50)
    assert pump.nodes[first].machine.tip.height > height + 2
    assert pump.nodes[second].machine.tip.height == height
    pump.run(pump.now + 60)
    assert pump.nodes[second].machine.tip.generation != "0"
    heal(pump)
    pump.run(pump.now + 60, lambda: len(tips(pump, "AB")) == 1)
    assert pump.nodes[second].machine.tip.generation == "0"


def test_parts_that_forgot_each_other_meet_through_the_dht() -> None:
    pump = start_swarm("AB")
    pump.run_to_height(2)
    first, second = pump.nodes["A"].machine.tip.order
    cut(pump, first)
    pump.run(pump.now + 200)
    for peer in "AB":
        assert len(pump.nodes[peer].machine.tip.members) == 1
        pump.kill(peer)
        pump.restart(peer)
    heal(pump)
    pump.run(pump.now + 30)
    assert len({pump.nodes[peer].machine.tip.generation for peer in "AB"}) == 2
    pump.give(first, Discovered((first, second)))
    pump.run(pump.now + 30, lambda: len(tips(pump, "AB")) == 1)
    assert len(tips(pump, "AB")) == 1


# ---------------------------------------------------------------- listening and pauses


def test_a_booting_peer_says_nothing_but_hello() -> None:
    pump = start_swarm("ABC")
    pump.run_to_height(2)
    victim = pump.nodes["A"].machine.tip.order[-1]
    others = "".join(peer for peer in "ABC" if peer != victim)
    pump.kill(victim)
    pump.lose = lambda source, destination, message: source != victim and destination == victim
    count = len(pump.nodes[victim].sent)
    pump.restart(victim)
    pump.run(pump.now + pump.timers.discover_s - 0.6)
    assert pump.nodes[victim].machine.phase is Phase.LISTENING
    said = [message for *_, message in pump.nodes[victim].sent[count:]]
    assert said
    assert all(isinstance(message, Hello) for message in said)
    pump.lose = lambda source, destination, message: False
    pump.run_rounds(4, others + victim)


def tie_breaker_comes_back() -> tuple[Pump, str, str]:
    """Two peers: the tie-breaker was away until the other had reformed. It cannot fetch yet."""
    pump = start_swarm("AB")
    pump.run_to_height(2)
    first, second = pump.nodes["A"].machine.tip.order
    pump.kill(first)
    pump.run(pump.now + 100)
    assert pump.nodes[second].machine.tip.generation != "0"
    pump.refuse_fetch = lambda peer, source, unit: peer == first
    pump.restart(first)
    return pump, first, second


def test_a_booting_peer_waits_for_the_survivors_chain_longer_than_it_listens() -> None:
    pump, first, second = tie_breaker_comes_back()
    pump.run(pump.now + 2 * pump.timers.discover_s)
    assert pump.nodes[first].machine.phase is Phase.LISTENING
    heal(pump)
    pump.run(pump.now + 20, lambda: pump.nodes[first].machine.is_member
             and pump.nodes[first].machine.tip.generation != "0")  # fmt: skip
    assert pump.nodes[first].machine.tip.generation == pump.nodes[second].machine.tip.generation


def test_a_survivors_chain_that_cannot_be_had_does_not_silence_a_peer_for_ever() -> None:
    pump, first, _ = tie_breaker_comes_back()
    # The survivor continues: a newer manifest each second must not count as progress.
    pump.run(pump.now + REFORM_S / 2 + 5)
    assert pump.nodes[first].machine.phase is not Phase.LISTENING
    pump.run(pump.now + 20)
    assert pump.nodes[first].machine.tip.height > 2
    assert pump.nodes[first].machine.tip.generation == "0"


def test_listening_ends_early_when_everybody_is_found_to_be_no_further() -> None:
    pump = start_swarm("ABC")
    pump.run(0.5)
    assert all(node.machine.phase is Phase.TRAINING for node in pump.nodes.values())


def test_a_process_that_stood_still_listens_before_it_goes_on() -> None:
    pump = start_swarm("ABCD")
    pump.run_to_height(2)
    machine = pump.nodes[pump.nodes["A"].machine.tip.order[0]].machine
    assert machine.campaign.stage == "collect"
    effects = machine.handle(Tick(), pump.now + REFORM_S)
    assert machine.phase is Phase.LISTENING
    assert machine.campaign.stage == ""
    assert all(isinstance(e.message, Hello) for e in effects if isinstance(e, Send))
    assert "nothing happened for" in machine.reason


# ---------------------------------------------------------------- catching up


def test_a_peer_that_missed_rounds_jumps_to_the_newest() -> None:
    pump = start_swarm("ABCD")
    pump.run_to_height(1)
    late = pump.nodes["A"].machine.tip.order[-1]
    cut(pump, late)
    pump.run_to_height(4, "".join(peer for peer in "ABCD" if peer != late))
    heal(pump)
    pump.run(pump.now + 12, lambda: pump.nodes[late].machine.tip.height >= 4)
    assert pump.nodes[late].machine.tip.height >= 4
    assert not {2, 3} <= {m.height for m in pump.nodes[late].applied}
    assert pump.nodes[late].record.parent is not None
    assert pump.nodes[late].record.certificate is not None


def test_a_duplicate_commit_does_not_restart_a_fetch() -> None:
    pump = start_swarm("ABCD")
    pump.run_to_height(2)
    late = pump.nodes["A"].machine.tip.order[-1]
    others = "".join(peer for peer in "ABCD" if peer != late)
    cut(pump, late)
    for peer in others:
        pump.nodes[peer].train_s = 1000.0  # so that no newer manifest comes
    pump.run_to_height(3, others)
    machine, source = pump.nodes[late].machine, pump.nodes[others[0]].machine
    commit = Commit(source.tip, source.record.certificate, source.record.parent)
    header = Header(source.tip.code, source.tip.digest, source.tip.generation)
    first = machine.handle(Received(others[0], header, commit), pump.now)
    again = machine.handle(Received(others[1], header, commit), pump.now)
    assert [type(effect).__name__ for effect in first].count("Fetch") == 1
    assert [type(effect).__name__ for effect in again].count("Fetch") == 0


def one_that_cannot_fetch() -> tuple[Pump, str, str]:
    """Four peers at height 2: one of them, and the three others."""
    pump = start_swarm("ABCD")
    pump.run_to_height(2)
    late = pump.nodes["A"].machine.tip.order[-1]
    pump.refuse_fetch = lambda peer, source, unit: peer == late
    return pump, late, "".join(peer for peer in "ABCD" if peer != late)


def test_a_fetch_that_brings_nothing_is_dropped_with_the_reason() -> None:
    pump, late, others = one_that_cannot_fetch()
    for peer in others:
        pump.nodes[peer].train_s = 1000.0
    pump.run_to_height(3, others)
    pump.run(pump.now + 1, lambda: pump.nodes[late].machine.phase is Phase.CATCHING_UP)
    for peer in others:
        pump.kill(peer)  # so that nobody sends the COMMIT again
    pump.run(pump.now + REFORM_S / 2 + 2)
    assert "gave up fetching height 3" in pump.nodes[late].said(Topic.ROUND)


def test_a_fetch_does_not_age_while_its_process_stands_still() -> None:
    pump, late, others = one_that_cannot_fetch()
    pump.run_to_height(3, others)
    machine = pump.nodes[late].machine
    pump.run(pump.now + 1, lambda: machine.phase is Phase.CATCHING_UP)
    effects = machine.handle(Tick(), pump.now + 2 * REFORM_S)
    assert machine.phase is Phase.LISTENING
    assert not any(isinstance(effect, CancelFetch) for effect in effects)


def test_a_blob_that_the_shell_lost_is_fetched_again_before_the_vote() -> None:
    pump = start_swarm("ABC")
    pump.run_to_height(2)
    voter = pump.nodes["A"].machine.tip.order[-1]
    node = pump.nodes[voter]
    count = len(node.effects)
    pump.run(pump.now + 10, lambda: any(isinstance(e, Sync) for e in node.effects[count:]))
    manifest = next(e.manifest for e in node.effects[count:] if isinstance(e, Sync))
    digest = manifest.entries["shared.0"].digest
    effects = node.machine.handle(Unobtainable(digest, voter, "file is gone"), pump.now)
    assert [w.digest for e in effects if isinstance(e, Fetch) for w in e.wants] == [digest]
    effects = node.machine.handle(Synced(manifest.digest), pump.now)
    assert not any(isinstance(effect, Persist | Send) for effect in effects)
    effects = node.machine.handle(Stored(digest), pump.now)
    assert [type(effect) for effect in effects] == [Sync]
    effects = node.machine.handle(Synced(manifest.digest), pump.now)
    assert any(isinstance(effect, Persist) for effect in effects)


def one_that_syncs() -> tuple[Pump, str, Manifest]:
    """A voter that has just begun to make durable a proposal that needs its vote for a quorum."""
    pump = start_swarm("ABC")
    pump.run_to_height(2)
    *_, dead, voter = pump.nodes["A"].machine.tip.order
    pump.kill(dead)
    node = pump.nodes[voter]
    count = len(node.effects)
    pump.fail_syncs.add(voter)
    pump.run(pump.now + 60, lambda: any(isinstance(e, Sync) for e in node.effects[count:]))
    return pump, voter, next(e.manifest for e in node.effects[count:] if isinstance(e, Sync))


def test_a_blob_that_is_missed_again_while_it_is_fetched_is_not_fetched_anew() -> None:
    pump, voter, proposed = one_that_syncs()
    machine = pump.nodes[voter].machine
    lost = Unobtainable(proposed.entries["shared.0"].digest, voter, "absent")
    assert any(isinstance(effect, Fetch) for effect in machine.handle(lost, pump.now))
    effects = [*machine.handle(lost, pump.now), *machine.handle(Tick(), pump.now)]
    assert not any(isinstance(effect, Fetch) for effect in effects)


def test_a_sync_that_failed_is_tried_again_and_then_voted_for() -> None:
    pump, voter, proposed = one_that_syncs()
    node = pump.nodes[voter]
    pump.run(pump.now + 3)
    syncs = [e for e in node.effects if isinstance(e, Sync) and e.manifest == proposed]
    assert 2 <= len(syncs) <= 10, "once a tick"
    assert "not durable here, 0 blobs missing" in node.said(Topic.ROUND)
    assert node.record.accepted is None
    pump.fail_syncs.clear()
    assert pump.run(pump.now + 3, lambda: node.record.tip == proposed)


def test_a_sync_that_never_ends_does_not_hold_up_a_newer_manifest() -> None:
    pump = start_swarm("ABC")
    pump.run_to_height(2)
    stuck = pump.nodes["A"].machine.tip.order[-1]
    pump.endless_syncs[stuck] = 1
    pump.run_to_height(6)
    node = pump.nodes[stuck]
    there = node.machine.tip.height
    pump.run_to_height(there + 2)
    accepted = {m.digest for _, _, m in node.sent if isinstance(m, Accept)}
    assert pump.endless_syncs[stuck] == 0
    assert any(m.digest in accepted for m in node.applied if m.height > there)


def one_with_a_slow_disk() -> tuple[Pump, str, Manifest]:
    """A peer that was away makes a manifest durable, while the others decide three more rounds."""
    pump = start_swarm("ABC")
    pump.run_to_height(2)
    *others, behind = pump.nodes["A"].machine.tip.order
    pump.kill(behind)
    pump.run_rounds(5, "".join(others))
    pump.endless_syncs[behind] = 10**6
    pump.restart(behind)
    node = pump.nodes[behind]
    count = len(node.effects)
    pump.run(pump.now + 10, lambda: any(isinstance(e, Sync) for e in node.effects[count:]))
    synced = next(e.manifest for e in node.effects[count:] if isinstance(e, Sync))
    pump.run_rounds(synced.round + 3, "".join(others))
    return pump, behind, synced


def test_what_is_being_made_durable_is_applied_before_anything_newer_is_fetched() -> None:
    """Otherwise rounds shorter than a sync would keep a peer from ever applying one."""
    pump, behind, first = one_with_a_slow_disk()
    node = pump.nodes[behind]
    assert node.machine.pursued == first
    pump.endless_syncs.clear()
    pump.give(behind, Synced(first.digest))
    assert node.applied[-1] == first
    pump.run_rounds(first.round + 5)


def test_a_disk_that_hangs_keeps_no_peer_from_a_newer_manifest_for_ever() -> None:
    pump, behind, first = one_with_a_slow_disk()
    pump.run(pump.now + Timers().patience_s)
    pump.endless_syncs.clear()
    pump.run_rounds(first.round + 5)
    assert first not in pump.nodes[behind].applied


def test_only_the_tip_its_predecessor_and_fetches_under_way_are_kept() -> None:
    pump = start_swarm("ABC")
    pump.run_to_height(5)
    node = pump.nodes["A"]
    kept = [effect for effect in node.effects if isinstance(effect, Keep)][-1].digests
    tip, previous, older = node.applied[-1], node.applied[-2], node.applied[-3]
    for manifest in (tip, previous):
        assert {entry.digest for entry in manifest.entries.values()} <= kept
    only_older = {e.digest for e in older.entries.values()} - {
        e.digest for m in (tip, previous) for e in m.entries.values()
    }
    assert only_older
    assert not only_older & kept
    assert {tip.founding.config, tip.founding.validation} <= kept


def test_who_leaves_a_generation_keeps_what_it_had_accepted_there() -> None:
    pump = start_swarm("ABCDE")
    pump.run_to_height(2)
    order = pump.nodes["A"].machine.tip.order
    voter, dead = order[4], order[:3]
    pump.lose = lambda source, destination, message: (
        isinstance(message, Commit) and message.manifest.height == 3
    )
    pump.run(pump.now + 20, lambda: pump.nodes[voter].record.accepted is not None)
    accepted = pump.nodes[voter].record.accepted
    assert accepted is not None
    for peer in dead:
        pump.kill(peer)
    pump.run(pump.now + 100, lambda: pump.nodes[voter].machine.tip.kind is Kind.REFORM)
    assert pump.nodes[voter].machine.tip.kind is Kind.REFORM
    digests = {entry.digest for entry in accepted.manifest.entries.values()}
    assert digests <= pump.nodes[voter].disk
    heal(pump)
    pump.run_rounds(pump.nodes[voter].machine.tip.round + 2, "".join(order[3:]))
    assert not digests <= pump.nodes[voter].disk


# ---------------------------------------------------------------- rolled-back records


def test_a_peer_with_a_rolled_back_record_contributes_but_casts_no_vote() -> None:
    rules = make_rules()
    pump = Pump(rules)
    founding = found(rules, list("ABC"))
    for peer in "ABC":
        pump.add(peer, founding)
    rolled_back = pump.nodes["B"]
    rolled_back.record = replace(rolled_back.record, abstain_until_height=2)
    rolled_back.machine = pump._machine("B", rolled_back.record, rolled_back.disk)
    votes: dict[int, set[str]] = {}

    def watch(source: str, destination: str, message: Message) -> bool:
        height = pump.nodes[source].machine.tip.height
        if isinstance(message, Accept):
            votes.setdefault(height, set()).add(source)
        if isinstance(message, Ready) and source == "B" and height < 2:
            assert message.ballot.attempt == 0  # nothing that could count as a promise
        assert not (source == "B" and isinstance(message, Prepare | Propose) and height < 2)
        return False

    pump.lose = watch
    for peer in "ABC":
        pump.boot(peer)
    pump.run_to_height(10)
    assert "B" not in votes.get(0, set()) | votes.get(1, set())
    assert any("B" in votes.get(height, ()) for height in range(2, 10))
    assert "B" in pump.nodes["A"].applied[0].contributors


def test_a_lone_member_with_a_rolled_back_record_goes_on() -> None:
    rules = make_rules()
    pump = Pump(rules)
    node = pump.add("A", found(rules, ["A"]))
    node.record = replace(node.record, abstain_until_height=5, promised=Ballot(0, "A"))
    node.machine = pump._machine("A", node.record, node.disk)
    pump.boot("A")
    pump.run_to_height(2)
