"""Joining and leaving."""

from swarm.protocol.messages.events import LeaveAsked, Record, Topic
from swarm.protocol.messages.messages import Accept, Message, Ready
from swarm.protocol.rounds import Phase
from tests.protocol.round_pump import Node, Pump, in_training, make_rules


def join(pump: Pump, peer: str, *, via: str = "A") -> Node:
    """A stranger that has fetched a member's tip, as the joining code does."""
    model = pump.nodes[via]
    node = pump.add(peer, model.machine.tip)
    node.record = node.machine._standing.record = Record(
        model.record.tip, model.record.certificate, model.record.parent
    )
    pump.boot(peer)
    return node


def test_a_joiner_is_a_member_from_the_next_manifest_and_owns_experts_in_the_one_after() -> None:
    pump = in_training("ABC")
    node = join(pump, "J")
    assert not node.machine.is_member
    pump.run(pump.now + 20, lambda: node.machine.is_member)
    first = node.machine.tip
    assert first.members["J"].silent == 1
    assert not any("J" in owners for owners in first.owners.values())
    pump.run_to_height(first.height + 1)
    second = pump.tip_of("A")
    assert "J" in second.contributors
    assert any("J" in owners for owners in second.owners.values())
    assert len(pump.digests_at(first.height + 1)) == 1


def test_nobody_waits_for_a_joiner_before_it_is_a_member() -> None:
    pump = in_training("ABC")
    join(pump, "J")
    pump.kill("J")
    assert pump.run_to_height(5, "ABC") < 6  # three rounds of a second each


def test_a_joiner_fetches_proposals_and_never_votes() -> None:
    pump = in_training("ABC")
    node = join(pump, "J")
    votes: list[Message] = []

    def watch(source: str, destination: str, message: Message) -> bool:
        if source == "J" and isinstance(message, Accept) and not node.machine.is_member:
            votes.append(message)
        return False

    pump.lose = watch
    pump.run(pump.now + 20, lambda: node.machine.is_member)
    assert not votes
    assert node.machine.phase is not Phase.JOINING


def test_a_joiner_finds_the_convener_that_took_over() -> None:
    pump = in_training("ABC")
    pump.kill(pump.first)
    alive = pump.alive
    node = join(pump, "J", via=alive[0])
    pump.run_to_height(4, alive)
    assert pump.run(pump.now + 20, lambda: node.machine.is_member)


def test_a_leaver_goes_as_soon_as_a_manifest_without_it_is_applied() -> None:
    pump = in_training("ABC")
    leaver = pump.last
    pump.give(leaver, LeaveAsked())
    pump.run(pump.now + 20, lambda: bool(pump.nodes[leaver].left))
    assert "no longer" in pump.nodes[leaver].left
    assert leaver not in pump.tip_of(leaver).members
    assert pump.nodes[leaver].machine.phase is Phase.LEFT
    rest = pump.others(leaver)
    assert pump.run_to_height(6, rest) < 6  # rounds wait for nobody
    tip = pump.tip_of(rest[0])
    assert all(leaver not in owners for owners in tip.owners.values())


def test_a_convener_can_leave_as_well() -> None:
    pump = in_training("ABC")
    convener = pump.first
    pump.give(convener, LeaveAsked())
    pump.run(pump.now + 20, lambda: bool(pump.nodes[convener].left))
    assert convener not in pump.tip_of(convener).members


def test_a_leaver_that_nobody_answers_goes_after_its_deadline() -> None:
    pump = in_training("ABC")
    pump.kill(*"BC")
    pump.give("A", LeaveAsked())
    pump.run(pump.now + pump.timers.leave_s - 1)
    assert not pump.nodes["A"].left
    pump.run(pump.now + 2)
    assert "30.0 s" in pump.nodes["A"].left


def test_a_lone_member_may_go_at_once() -> None:
    pump = in_training("A", height=1)
    pump.give("A", LeaveAsked())
    assert pump.nodes["A"].left


def test_a_leaver_is_not_waited_for_and_does_not_ask_to_join_again() -> None:
    pump = in_training("ABC")
    leaver = pump.last
    pump.nodes[leaver].train_s = 1000.0  # it stopped training
    pump.give(leaver, LeaveAsked())
    assert pump.run_to_height(3) < 3
    count = len(pump.nodes[leaver].sent)
    pump.run(pump.now + 10)
    later = [message for *_, message in pump.nodes[leaver].sent[count:]]
    assert not any(isinstance(message, Ready) for message in later)


def test_silence_removes_after_three_rounds_and_a_live_peer_comes_back_as_a_joiner() -> None:
    pump = in_training("ABCD")
    dead = pump.last
    pump.kill(dead)
    rest = pump.others(dead)
    pump.run_to_height(6, rest)
    tip = pump.tip_of(rest[0])
    assert dead not in tip.members
    assert "silent for 4 rounds" in pump.nodes[rest[0]].said(Topic.MEMBERSHIP)
    assert all(dead not in owners for owners in tip.owners.values())
    pump.restart(dead)
    assert pump.run(pump.now + 30, lambda: pump.nodes[dead].machine.is_member)


def test_a_live_peer_that_is_always_too_slow_keeps_its_vote() -> None:
    pump = in_training("ABCD", height=1)
    slow = pump.last
    pump.nodes[slow].train_s = 1e9
    pump.run_to_height(8, pump.others(slow))
    tip = pump.tip_of("A")
    assert tip.members[slow].silent == 0
    # Its experts were not renewed, and have moved to working peers (expert ownership).
    assert all(slow not in owners for owners in tip.owners.values())


def test_a_member_that_declares_another_capacity_gets_that_share() -> None:
    pump = in_training("AB", make_rules(experts=8))
    assert pump.tip_of("A").members["B"].capacity == 1.0
    pump.nodes["B"].machine._peer.capacity = 3.0  # as after a restart with --capacity 3
    pump.run_to_height(pump.tip_of("A").height + 2)
    tip = pump.tip_of("A")
    assert tip.members["B"].capacity == 3.0
    assert sum(owners == ("B",) for owners in tip.owners.values()) == 6
    assert len(pump.digests_at(tip.height)) == 1
