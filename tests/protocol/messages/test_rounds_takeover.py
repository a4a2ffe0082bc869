"""Failing conveners, and the duties of their successors."""

import string
from dataclasses import replace

import pytest

from swarm.experts import expert_unit
from swarm.protocol.messages.events import Persist, Received, Send, Sync, Topic, Undeliverable
from swarm.protocol.messages.messages import (
    Accept,
    Accepted,
    Ballot,
    Commit,
    Hello,
    Message,
    Prepare,
    Propose,
    Ready,
    Roster,
)
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import PeerId
from tests.protocol.round_pump import Pump, header_of, in_training, start_swarm


@pytest.mark.parametrize("last_words", [Prepare, Roster, Propose, Accept, Commit])
def test_the_others_finish_the_round_when_its_convener_dies(last_words: type) -> None:
    pump = start_swarm("ABCD")
    pump.train_times(2.0)  # long enough for a poll
    pump.run_to_height(2)
    convener = pump.first

    def die(source: PeerId, destination: PeerId, message: Message) -> bool:
        if source == convener and isinstance(message, last_words):
            pump.kill(convener)
        if destination == convener and isinstance(message, Accept) and last_words is Accept:
            pump.kill(convener)
        return not pump.nodes[source].is_up

    pump.lose = die
    took_s = pump.run_to_height(3, pump.others(convener))
    assert not pump.nodes[convener].is_up
    assert len(pump.digests_at(3, pump.alive)) == 1
    # Rank 1 waits 10 s for the dead convener, the roster then 6 s for its offer.
    assert took_s < 2 * pump.timers.heartbeat_s + pump.timers.roster_s + 6
    assert f"convener {convener} silent for 10." in pump.said(Topic.TAKEOVER)


def test_a_successor_proposes_what_may_have_been_decided() -> None:
    pump = in_training("ABC")
    first, second, third = pump.order
    proposed: list[str] = []

    def lose(source: PeerId, destination: PeerId, message: Message) -> bool:
        if isinstance(message, Propose) and message.manifest.height == 3:
            proposed.append(message.manifest.digest)
        # The first convener hears no votes, so it alone does not know its decision.
        return destination == first and isinstance(message, Accept)

    pump.lose = lose
    pump.run(pump.now + 20, lambda: pump.nodes[second].machine.record.accepted is not None)
    accepted = pump.nodes[second].machine.record.accepted
    assert accepted is not None
    pump.kill(first)
    pump.run_to_height(3, second + third)
    assert pump.digests_at(3, second + third) == {accepted.manifest.digest}
    assert set(proposed) == {accepted.manifest.digest}


def campaigning(pump: Pump, peer: PeerId) -> None:
    """Runs until a peer takes over."""
    sent = pump.nodes[peer].sent
    start = len(sent)
    pump.run(pump.now + 60, lambda: any(isinstance(m, Prepare) for *_, m in sent[start:]))


def test_nothing_is_proposed_before_a_quorum_has_promised() -> None:
    pump = in_training("ABC")
    first, second, third = pump.order
    pump.kill(first)
    # The third hears the PREPAREs, but its promises are lost for a while.
    pump.lose = lambda source, destination, message: source == third and isinstance(message, Ready)
    campaigning(pump, second)
    pump.run(pump.now + 9)
    sent = [message for *_, message in pump.nodes[second].sent]
    assert not any(isinstance(m, Propose) and m.manifest.height == 3 for m in sent)
    pump.lose = lambda source, destination, message: False
    pump.run_to_height(3, second + third)


def test_of_several_votes_the_one_with_the_highest_ballot_is_proposed_again() -> None:
    pump = in_training("ABC", height=3)
    first, second, third = pump.order
    machine, tip = pump.nodes[first].machine, pump.tip_of(first)
    # Two values of the same height, as two conveners might have composed them.
    candidates = [replace(tip, tokens=tip.tokens + tokens) for tokens in (1, 2)]
    low, high = map(Accepted, (Ballot(1, second), Ballot(2, third)), candidates)
    assert machine._phase1._choose_accepted([high, low]) == high
    assert machine._phase1._choose_accepted([low, high]) == high


def test_a_convener_of_a_lower_ballot_is_refused_with_the_promised_one() -> None:
    pump = in_training("ABC")
    _first, second, third = pump.order
    node = pump.nodes[third]
    effects = node.machine.handle(
        Received(second, header_of(node.machine.tip), Prepare(Ballot(4, second))), pump.now
    )
    kinds = [type(effect) for effect in effects]
    assert kinds.index(Persist) < kinds.index(Send)
    assert node.machine.record.promised == Ballot(4, second)
    for message in (
        Prepare(Ballot(3, second)),
        Propose(Ballot(3, second), node.machine.tip, ()),
        Roster(Ballot(3, second), "0" * 64, {}, {}),
    ):
        effects = node.machine.handle(
            Received(second, header_of(node.machine.tip), message), pump.now
        )
        (answer,) = [effect for effect in effects if isinstance(effect, Send)]
        assert isinstance(answer.message, Ready)
        assert answer.message.ballot == Ballot(4, second)


def test_a_convener_steps_down_when_it_is_refused() -> None:
    pump = in_training("ABC")
    first, _second, third = pump.order
    node = pump.nodes[first]
    assert node.machine.campaign.stage == "collect"
    nack = Ready(Ballot(7, third), None, None, 1.0)
    node.machine.handle(Received(third, header_of(node.machine.tip), nack), pump.now)
    assert node.machine.campaign.stage == ""
    assert node.machine.campaign.attempt == 7
    assert "overtaken by attempt 7" in node.machine.reason


def test_a_ballot_is_durable_before_its_first_message() -> None:
    pump = in_training("ABC")
    first, second, _third = pump.order
    pump.kill(first)
    campaigning(pump, second)
    effects = pump.nodes[second].effects
    prepare = Prepare(Ballot(1, second))
    sends = [isinstance(e, Send) and e.message == prepare for e in effects]
    burnt = [isinstance(e, Persist) and e.record.promised == prepare.ballot for e in effects]
    assert burnt.index(True) < sends.index(True)


def test_a_restarted_first_convener_never_uses_ballot_zero_again() -> None:
    pump = in_training("ABC")
    first = pump.first
    assert pump.nodes[first].record.promised == Ballot(0, first)
    pump.kill(first)
    pump.run(pump.now + 1)
    start = len(pump.nodes[first].sent)
    pump.restart(first)
    pump.run_to_height(3)
    sent = [message for *_, message in pump.nodes[first].sent[start:]]
    ballots = {m.ballot for m in sent if isinstance(m, Prepare | Roster | Propose)}
    assert Ballot(0, first) not in ballots
    assert len(pump.digests_at(3)) == 1


def test_a_vote_is_durable_before_it_is_sent_and_only_once_all_blobs_are() -> None:
    pump = in_training("ABCD", height=3)
    for node in pump.nodes.values():
        written: set[tuple[Ballot, str]] = set()
        synced: set[str] = set()
        for effect in node.effects:
            if isinstance(effect, Persist) and effect.record.accepted:
                accepted = effect.record.accepted
                written.add((accepted.ballot, accepted.manifest.digest))
            if isinstance(effect, Sync):
                synced.add(effect.manifest.digest)
            if isinstance(effect, Send) and isinstance(effect.message, Accept):
                vote = effect.message
                assert (vote.ballot, vote.digest) in written
                assert vote.digest in synced


def test_a_deaf_peer_does_not_depose_a_convener_that_others_hear() -> None:
    pump = in_training("ABCD")
    deaf = pump.last
    pump.lose = lambda source, destination, message: destination == deaf
    pump.run_rounds(6, pump.others(deaf))
    assert pump.tip_of(deaf).height == 2
    assert "begins" not in pump.nodes[deaf].said(Topic.TAKEOVER)
    pump.lose = lambda source, destination, message: False
    pump.run(pump.now + 15)
    assert pump.tip_of(deaf).height >= 6


def test_a_peer_that_comes_back_does_not_end_the_campaign_that_went_on_without_it() -> None:
    pump = in_training("ABCDE")
    first, second, third, *_ = pump.order
    pump.train_times(dict.fromkeys(set("ABCDE") - {second}, 40.0))
    pump.kill(first)
    # The next in turn is cut off. First it hears from less than a quorum, and of no campaign.
    pump.lose = lambda source, destination, message: second in (source, destination)
    pump.run(pump.now + 30.0)
    pump.lose = lambda source, destination, message: (
        destination == second and (source != third or not isinstance(message, Hello))
    )
    pump.run(pump.now + 8.0)
    assert "no quorum of the 5 voters was heard" in pump.nodes[second].said(Topic.TAKEOVER)
    pump.lose = lambda source, destination, message: False
    pump.run_to_height(3, pump.alive)
    assert "begins" not in pump.nodes[second].said(Topic.TAKEOVER)
    assert pump.nodes[third].machine.record.tip.height == 3
    assert "stepped down" not in pump.nodes[third].said(Topic.TAKEOVER)


def test_a_convener_that_hears_nobody_steps_down() -> None:
    pump = in_training("ABCD")
    first = pump.first
    pump.lose = lambda source, destination, message: destination == first
    pump.run(pump.now + 35)
    assert "stepped down" in pump.nodes[first].said(Topic.TAKEOVER)
    assert len(pump.digests_at(3)) == 1


def test_an_almost_deaf_convener_does_not_hold_its_attempt() -> None:
    pump = in_training("ABCDE")
    first, second, *_ = pump.order
    # It hears only one other member, so no quorum of answers can ever come.
    pump.lose = lambda source, destination, message: destination == first and source != second
    assert pump.run_to_height(3, pump.others(first)) < pump.timers.attempt_s
    said = pump.nodes[first].said(Topic.TAKEOVER)
    assert "no quorum was heard for 10.0 s" in said


def test_a_convener_that_hears_but_is_not_heard_lets_all_others_go_first() -> None:
    # Of two equal attempts the mute member's is the higher one, so its hearers refuse others.
    names = string.ascii_letters
    swarms = (in_training(names[first : first + 7]) for first in range(len(names) - 6))
    pump = next(pump for pump in swarms if pump.order[1] > max(pump.order[3:]))
    first, mute, third, *others = pump.order
    pump.train_times(60.0)
    pump.kill(first)
    pump.kill(third)
    # It hears everybody, but only one of the four others, who are a quorum, hears it.
    pump.lose = lambda source, destination, message: source == mute and destination != others[-1]

    def greet() -> None:
        for peer in others:
            pump.give(mute, Received(peer, header_of(pump.tip_of(peer)), Hello(ask=False)))
        pump.after(1.0, greet)

    greet()
    pump.run_to_height(3, "".join(others), within_s=60.0)
    assert "only 1 answers within 10.0 s, no quorum" in pump.nodes[mute].said(Topic.TAKEOVER)
    assert "attempt 2 begins" not in pump.nodes[mute].said(Topic.TAKEOVER)
    assert f"overtaken by attempt 1 of {mute}" in pump.said(Topic.TAKEOVER, others)


def test_a_convener_that_hears_but_is_not_heard_tries_again_after_all_others() -> None:
    pump = in_training("ABC")
    first, second, third = pump.order
    pump.train_times(120.0)
    pump.kill(first)
    # Only the second convenes: the third hears no quorum.
    pump.lose = lambda source, destination, message: source == second or destination == third
    pump.run(pump.now + 30.0)
    limit_s = pump.timers.heartbeat_s * (1 + 3 + 1)  # behind all three, and by its own turn
    said = pump.nodes[second].said(Topic.TAKEOVER)
    assert "only 0 answers within 10.0 s, no quorum" in said
    assert "attempt 2 begins" not in said
    pump.run(pump.now + 30.0)
    said = pump.nodes[second].said(Topic.TAKEOVER)
    assert f"attempt 2 begins: convener {second} silent for" in said
    assert f"(limit {limit_s:.1f})" in said


def test_a_convener_that_gets_no_votes_because_it_hears_no_quorum_steps_down() -> None:
    pump = in_training("ABCDE")
    first, second, *_ = pump.order
    has_proposed = False

    def lose(source: PeerId, destination: PeerId, message: Message) -> bool:
        nonlocal has_proposed
        has_proposed |= isinstance(message, Propose) and message.manifest.height == 3
        return has_proposed and destination == first and source != second

    pump.lose = lose
    assert pump.run_to_height(3, pump.others(first)) < pump.timers.attempt_s
    assert "no quorum was heard for 10.0 s" in pump.nodes[first].said(Topic.TAKEOVER)


def test_a_proposal_of_which_a_part_cannot_be_had_does_not_hold_its_attempt() -> None:
    # As before the first measured round: a roster may wait for half an hour.
    pump = in_training("ABCD", timers=Timers(attempt_s=1841.0, roster_late_s=1800.0))
    first, second, *_ = pump.order
    tip = pump.tip_of(first)
    refused = {expert_unit(e) for e, owners in tip.owners.items() if first in owners}
    pump.refuse_fetch = lambda peer, source, unit: unit in refused
    assert pump.run_to_height(3, pump.others(first)) < 3 * pump.timers.proposal_limit_s(0)
    assert "cannot be had: nothing new for" in pump.nodes[second].said(Topic.TAKEOVER)
    assert first not in pump.tip_of(second).contributors


def test_a_message_counts_only_under_the_tip_that_it_was_made_for() -> None:
    pump = in_training("ABC")
    _first, second, third = pump.order
    node = pump.nodes[third]
    before = node.machine.record
    received = Received(second, header_of(node.applied[0]), Prepare(Ballot(4, second)))
    now = pump.now + pump.timers.poll_s  # it may just have received the tip
    effects = node.machine.handle(received, now)
    assert node.machine.record is before
    (answer,) = [effect for effect in effects if isinstance(effect, Send)]
    assert isinstance(answer.message, Commit)  # the sender is behind
    assert answer.message.manifest == node.machine.tip
    again = node.machine.handle(received, pump.now)
    assert not [effect for effect in again if isinstance(effect, Send)]  # at most once per poll


def test_what_comes_before_the_tip_it_belongs_to_is_kept_for_it() -> None:
    pump = in_training("ABC")
    _first, _second, third = pump.order
    late: list[Message] = []

    def hold_back(source: PeerId, destination: PeerId, message: Message) -> bool:
        if destination == third and isinstance(message, Commit) and len(late) < 2:
            late.append(message)
            return True
        return False

    pump.lose = hold_back
    pump.run_to_height(5)
    assert len(pump.digests_at(5)) == 1


@pytest.mark.parametrize(("refuses", "limit_s"), [(False, 10.0), (True, 3.0)])
def test_a_convener_whose_machine_refuses_messages_is_replaced_sooner(
    refuses: bool, limit_s: float
) -> None:
    pump = in_training("ABCD")
    pump.dead_refuse = refuses
    first, second, *_ = pump.order
    pump.train_times(60.0)  # nobody has a message for it
    pump.run_to_height(3)
    first, second, *_ = pump.order
    pump.kill(first)
    start = pump.now
    assert pump.run(start + 30.0, lambda: pump.nodes[second].machine.campaign.stage != "")
    assert limit_s < pump.now - start < limit_s + 2.5
    assert f"(limit {limit_s})" in pump.nodes[second].said(Topic.TAKEOVER)


def test_a_convener_that_is_heard_is_not_deposed_because_a_message_was_refused() -> None:
    pump = in_training("ABCD")
    pump.train_times(60.0)
    pump.run_to_height(3)
    first, second, *_ = pump.order
    for _ in range(20):
        pump.give(second, Undeliverable(first))
        pump.run(pump.now + 1.0)
    assert pump.nodes[second].machine.campaign.attempt == 0


def test_conveners_that_got_no_answers_begin_apart() -> None:
    """Each may have refused the other while it convened itself (convener turns).

    This lasts forever if both begin at the same moment after all others.
    """
    pump = start_swarm("ABCDEF")
    places = {node.machine._takeover._last_place() for node in pump.nodes.values()}
    assert len(places) == 6 and min(places) >= 6
