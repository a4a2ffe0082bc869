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
from tests.protocol.round_pump import Pump, found, header_of, in_training, make_rules, start_swarm

REFORM_S = 60.0


def cut(pump: Pump, left: str) -> None:
    """Cuts all links between these peers and the others."""
    pump.lose = lambda source, destination, message: (source in left) != (destination in left)
    pump.refuse_fetch = lambda peer, source, unit: (peer in left) != (source in left)


def heal(pump: Pump) -> None:
    pump.lose = lambda source, destination, message: False
    pump.refuse_fetch = lambda peer, source, unit: False


def tips(pump: Pump, peers: str) -> set[str]:
    return {pump.tip_of(peer).digest for peer in peers}


def lost_majority() -> tuple[Pump, str, str]:
    """Five peers. Three of them die right after round 2. Returns (pump, survivors, dead)."""
    pump = in_training("ABCDE")
    dead, alive = "".join(pump.order[:3]), "".join(pump.order[3:])
    pump.kill(*dead)
    return pump, alive, dead


def test_survivors_of_a_lost_majority_wait_and_then_go_on_alone() -> None:
    pump, alive, _ = lost_majority()
    start = pump.now
    pump.run(pump.now + REFORM_S - 1)
    assert all(pump.tip_of(peer).height == 2 for peer in alive)
    pump.run_rounds(4, alive)
    assert pump.now - start < REFORM_S + 40
    assert len(tips(pump, alive)) == 1
    tip = pump.tip_of(alive[0])
    assert sorted(tip.members) == sorted(alive)
    assert len(tip.lineage) == 1
    assert "no quorum of 5 voters heard for 60.0 s, 2 continue" in pump.said(Topic.FORK, alive)


def test_a_reform_keeps_round_height_and_values_of_its_parent() -> None:
    pump, alive, _ = lost_majority()
    parent = pump.tip_of(alive[0])
    pump.run(pump.now + 80, lambda: pump.tip_of(alive[0]).digest != parent.digest)
    reform = pump.tip_of(alive[0])
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
    generation = pump.tip_of(alive[0]).generation
    pump.restart(*dead)
    machines = [node.machine for node in pump.nodes.values()]
    assert pump.run(
        pump.now + 60,
        lambda: all(m.is_member and m.tip.generation == generation for m in machines),
    )


def test_a_minority_that_was_cut_off_yields_to_the_live_majority() -> None:
    pump = in_training("ABCDE")
    minority, majority = "".join(pump.order[3:]), "".join(pump.order[:3])
    cut(pump, minority)
    # The minority reforms and is much faster than the majority from then on.
    pump.train_times(dict.fromkeys(majority, 12.0))
    pump.run(pump.now + 150)
    assert pump.tip_of(minority[0]).round > pump.tip_of(majority[0]).round
    heal(pump)
    assert pump.run(pump.now + 120, lambda: len(tips(pump, "ABCDE")) == 1)
    assert pump.tip_of(minority[0]).generation == "0"
    assert {m.generation for m in pump.nodes[majority[0]].applied} == {"0"}


def test_a_peer_that_hears_a_quorum_holds_a_reform_back_and_says_so() -> None:
    pump = in_training("ABCDE")
    machine = pump.nodes["A"].machine
    reform = reform_of(machine.tip, ["D", "E"])
    left = Certificate(Ballot(0, "D"), {"D": bytes(64)})
    commit = Commit(reform, left, machine.tip)
    effects = machine.handle(Received("D", header_of(reform), commit), pump.now)
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
    pump = in_training("ABCDE")
    tip = pump.tip_of("A")
    small, large = reform_of(tip, ["D"], "ff" * 16), reform_of(tip, ["D", "E"], "11" * 16)
    assert large.code > small.code > tip.code


def test_two_survivors_that_reform_at_once_end_up_in_one_generation() -> None:
    pump, alive, _ = lost_majority()
    pump.lose = lambda source, destination, message: isinstance(message, Commit | Hello)
    pump.run(pump.now + 100)
    assert len({pump.tip_of(peer).generation for peer in alive}) == 2
    heal(pump)
    pump.run(pump.now + 200, lambda: len(tips(pump, alive)) == 1)
    pump.run_rounds(pump.tip_of(alive[0]).round + 2, alive)
    assert len({pump.tip_of(peer).generation for peer in alive}) == 1


def test_with_an_endless_reform_time_the_minority_waits() -> None:
    pump = in_training("ABCDE", timers=Timers(reform_s=inf))
    pump.kill(*pump.order[:3])
    pump.run(pump.now + 2000)
    assert {pump.tip_of(peer).height for peer in pump.alive} == {2}


def test_of_two_the_tie_breaker_goes_on_and_the_other_waits_and_yields() -> None:
    pump = in_training("AB")
    first, second = pump.order
    cut(pump, first)
    height = pump.tip_of(first).height
    pump.run(pump.now + 50)
    assert pump.tip_of(first).height > height + 2
    assert pump.tip_of(second).height == height
    pump.run(pump.now + 60)
    assert pump.tip_of(second).generation != "0"
    heal(pump)
    pump.run(pump.now + 60, lambda: len(tips(pump, "AB")) == 1)
    assert pump.tip_of(second).generation == "0"


def test_parts_that_forgot_each_other_meet_through_the_dht() -> None:
    pump = in_training("AB")
    first, second = pump.order
    cut(pump, first)
    pump.run(pump.now + 200)
    for peer in "AB":
        assert len(pump.tip_of(peer).members) == 1
        pump.kill(peer)
        pump.restart(peer)
    heal(pump)
    pump.run(pump.now + 30)
    assert len({pump.tip_of(peer).generation for peer in "AB"}) == 2
    pump.give(first, Discovered((first, second)))
    assert pump.run(pump.now + 30, lambda: len(tips(pump, "AB")) == 1)


# ---------------------------------------------------------------- listening and pauses


def test_a_booting_peer_says_nothing_but_hello() -> None:
    pump = in_training("ABC")
    victim = pump.last
    pump.kill(victim)
    pump.lose = lambda source, destination, message: source != victim and destination == victim
    count = len(pump.nodes[victim].sent)
    pump.restart(victim)
    pump.run(pump.now + pump.timers.discover_s - 0.6)
    assert pump.nodes[victim].machine.phase is Phase.LISTENING
    said = [message for *_, message in pump.nodes[victim].sent[count:]]
    assert said and all(isinstance(message, Hello) for message in said)
    pump.lose = lambda source, destination, message: False
    pump.run_rounds(4)


def tie_breaker_comes_back() -> tuple[Pump, str, str]:
    """Two peers: the tie-breaker was away until the other had reformed. It cannot fetch yet."""
    pump = in_training("AB")
    first, second = pump.order
    pump.kill(first)
    pump.run(pump.now + 100)
    assert pump.tip_of(second).generation != "0"
    pump.refuse_fetch = lambda peer, source, unit: peer == first
    pump.restart(first)
    return pump, first, second


def test_a_booting_peer_waits_for_the_survivors_chain_longer_than_it_listens() -> None:
    pump, first, second = tie_breaker_comes_back()
    pump.run(pump.now + 2 * pump.timers.discover_s)
    assert pump.nodes[first].machine.phase is Phase.LISTENING
    heal(pump)
    pump.run(pump.now + 20, lambda: pump.nodes[first].machine.is_member
             and pump.tip_of(first).generation != "0")  # fmt: skip
    assert pump.tip_of(first).generation == pump.tip_of(second).generation


def test_a_survivors_chain_that_cannot_be_had_does_not_silence_a_peer_for_ever() -> None:
    pump, first, _ = tie_breaker_comes_back()
    # The survivor continues: a newer manifest each second must not count as progress.
    pump.run(pump.now + REFORM_S / 2 + 5)
    assert pump.nodes[first].machine.phase is not Phase.LISTENING
    pump.run(pump.now + 20)
    assert pump.tip_of(first).height > 2
    assert pump.tip_of(first).generation == "0"


def test_listening_ends_early_when_everybody_is_found_to_be_no_further() -> None:
    pump = start_swarm("ABC")
    pump.run(0.5)
    assert all(node.machine.phase is Phase.TRAINING for node in pump.nodes.values())


def test_a_process_that_stood_still_listens_before_it_goes_on() -> None:
    pump = in_training("ABCD")
    machine = pump.nodes[pump.first].machine
    assert machine.campaign.stage == "collect"
    effects = machine.handle(Tick(), pump.now + REFORM_S)
    assert machine.phase is Phase.LISTENING
    assert machine.campaign.stage == ""
    assert all(isinstance(e.message, Hello) for e in effects if isinstance(e, Send))
    assert "nothing happened for" in machine.reason


# ---------------------------------------------------------------- catching up


def test_a_peer_that_missed_rounds_jumps_to_the_newest() -> None:
    pump = in_training("ABCD", height=1)
    late = pump.last
    cut(pump, late)
    pump.run_to_height(4, pump.others(late))
    heal(pump)
    assert pump.run(pump.now + 12, lambda: pump.tip_of(late).height >= 4)
    assert not {2, 3} <= {m.height for m in pump.nodes[late].applied}
    assert pump.nodes[late].record.parent is not None
    assert pump.nodes[late].record.certificate is not None


def test_a_duplicate_commit_does_not_restart_a_fetch() -> None:
    pump = in_training("ABCD")
    late = pump.last
    others = pump.others(late)
    cut(pump, late)
    pump.train_times(1000.0)  # so that no newer manifest comes
    pump.run_to_height(3, others)
    machine, source = pump.nodes[late].machine, pump.nodes[others[0]].machine
    commit = Commit(source.tip, source.record.certificate, source.record.parent)
    first, again = (
        machine.handle(Received(peer, header_of(source.tip), commit), pump.now)
        for peer in others[:2]
    )
    assert sum(isinstance(effect, Fetch) for effect in first) == 1
    assert not any(isinstance(effect, Fetch) for effect in again)


def one_that_cannot_fetch() -> tuple[Pump, str, str]:
    """Four peers at height 2: one of them, and the three others."""
    pump = in_training("ABCD")
    late = pump.last
    pump.refuse_fetch = lambda peer, source, unit: peer == late
    return pump, late, pump.others(late)


def test_a_fetch_that_brings_nothing_is_dropped_with_the_reason() -> None:
    pump, late, others = one_that_cannot_fetch()
    pump.train_times(1000.0)
    pump.run_to_height(3, others)
    pump.run(pump.now + 1, lambda: pump.nodes[late].machine.phase is Phase.CATCHING_UP)
    pump.kill(*others)  # so that nobody sends the COMMIT again
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
    pump = in_training("ABC")
    voter = pump.last
    node, manifest = pump.nodes[voter], pump.run_to_sync(voter)
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
    pump = in_training("ABC")
    *_, dead, voter = pump.order
    pump.kill(dead)
    pump.fail_syncs.add(voter)
    return pump, voter, pump.run_to_sync(voter)


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
    pump = in_training("ABC")
    stuck = pump.last
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
    pump = in_training("ABC")
    *others, behind = pump.order
    pump.kill(behind)
    pump.run_rounds(5, "".join(others))
    pump.endless_syncs[behind] = 10**6
    pump.restart(behind)
    synced = pump.run_to_sync(behind)
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
    pump = in_training("ABC", height=5)
    node = pump.nodes["A"]
    kept = [effect for effect in node.effects if isinstance(effect, Keep)][-1].digests
    older, previous, newest = (
        {entry.digest for entry in manifest.entries.values()} for manifest in node.applied[-3:]
    )
    assert newest | previous <= kept
    only_older = older - newest - previous
    assert only_older and not only_older & kept
    tip = node.applied[-1]
    assert {tip.founding.config, tip.founding.validation} <= kept


def test_who_leaves_a_generation_keeps_what_it_had_accepted_there() -> None:
    pump = in_training("ABCDE")
    *dead, other, voter = pump.order
    pump.lose = lambda source, destination, message: (
        isinstance(message, Commit) and message.manifest.height == 3
    )
    pump.run(pump.now + 20, lambda: pump.nodes[voter].record.accepted is not None)
    accepted = pump.nodes[voter].record.accepted
    assert accepted is not None
    pump.kill(*dead)
    assert pump.run(pump.now + 100, lambda: pump.tip_of(voter).kind is Kind.REFORM)
    digests = {entry.digest for entry in accepted.manifest.entries.values()}
    assert digests <= pump.nodes[voter].disk
    heal(pump)
    pump.run_rounds(pump.tip_of(voter).round + 2, other + voter)
    assert not digests <= pump.nodes[voter].disk


# ---------------------------------------------------------------- rolled-back records


def test_a_peer_with_a_rolled_back_record_contributes_but_casts_no_vote() -> None:
    pump = Pump(make_rules())
    for peer in "ABC":
        pump.add(peer, found(pump.rules, list("ABC")))
    rolled_back = pump.nodes["B"]
    rolled_back.record = replace(rolled_back.record, abstain_until_height=2)
    rolled_back.machine = pump._machine("B", rolled_back.record, rolled_back.disk)
    votes: dict[int, set[str]] = {}

    def watch(source: str, destination: str, message: Message) -> bool:
        height = pump.tip_of(source).height
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
    pump = Pump(make_rules())
    node = pump.add("A", found(pump.rules, ["A"]))
    node.record = replace(node.record, abstain_until_height=5, promised=Ballot(0, "A"))
    node.machine = pump._machine("A", node.record, node.disk)
    pump.boot("A")
    pump.run_to_height(2)
