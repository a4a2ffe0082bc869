"""The convener with failing peers: waiting, exclusions, and votes that count."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from swarm.protocol.messages.events import CancelFetch, Expected, Offered, Purpose, Received, Topic
from swarm.protocol.messages.messages import (
    Accept,
    Ballot,
    Commit,
    Message,
    Offer,
    Prepare,
    Propose,
    Ready,
    Reduced,
    ReducedUnit,
    Roster,
)
from swarm.protocol.rounds import collector
from swarm.protocol.rounds.collector import Collector
from swarm.protocol.rounds.policies import slow_links as thin_lines
from swarm.protocol.rounds.policies.rosters import offer_problem, plan_roster
from swarm.protocol.rounds.policies.slow_links import (
    Sender,
    averaged_bytes,
    bytes_to_send,
    least_to_send,
)
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import PeerId
from tests.protocol.round_pump import (
    Pump,
    header_of,
    in_training,
    make_offer,
    make_rules,
    name,
    start_swarm,
)


def test_a_dead_contributor_is_not_waited_for() -> None:
    pump = in_training("ABCD")
    dead = pump.last
    pump.kill(dead)
    assert pump.run_to_height(3, pump.others(dead)) < pump.timers.roster_s + 2
    assert len(pump.digests_at(3)) == 1
    tip = pump.tip_of(pump.first)
    assert dead not in tip.contributors
    assert dead in tip.members  # one silent round removes nobody
    said = pump.said(Topic.ROUND)
    assert f"roster closed with 3 of 4 offers: peer {dead} silent for 6." in said
    assert pump.nodes[pump.first].record.tip == tip


def counted(function: Callable[..., object], calls: Counter[str]) -> Callable[..., object]:
    """The function, which counts its calls under its name."""

    def call(*arguments: object, **options: object) -> object:
        calls[function.__name__] += 1
        return function(*arguments, **options)

    return call


def test_answers_to_a_poll_have_the_convener_look_at_an_absentee_or_two(monkeypatch) -> None:
    pump = in_training("ABCDEFGHIJKLMNOP")
    pump.train_times(100.0)
    pump.run_to_height(3)
    for peer in pump.nodes:
        pump.give(peer, Expected(pump.tip_of(peer).digest, 100.0))
    calls: Counter[str] = Counter()
    for method in (Collector.close_if_due, Collector._absent):
        monkeypatch.setattr(Collector, method.__name__, counted(method, calls))
    pump.run(pump.now + 20.0)
    assert pump.tip_of("A").height == 3
    assert calls["close_if_due"] > 100  # 15 answers to each of 13 polls
    assert calls["_absent"] <= 2 * calls["close_if_due"]


@pytest.mark.parametrize(("awaited", "plans"), [("H", 0), ("", 1)])
def test_lines_are_worked_out_once_and_not_while_others_are_waited_for(
    awaited: str, plans: int, monkeypatch
) -> None:
    pump = in_training("ABCDEFGH")
    pump.train_times(100.0)
    pump.run_to_height(3)
    machine = pump.nodes[pump.first].machine
    tip = machine.tip
    thin, *others = sorted(pump.nodes.keys() - {pump.first})
    made: Counter[str] = Counter()

    def answers(peer: PeerId) -> None:
        late = peer in (thin, *awaited)
        offer = None if late else make_offer(pump.rules, peer, tip)
        said = Ready(
            Ballot(0, pump.first), offer, None, 1.0,
            remaining_s=5.0 if late else None,
            worked_s=1e6 if late else 10.0,  # so it is worth waiting for
            uplink_mbit=3 if peer == thin else 100,
        )  # fmt: skip
        machine.handle(Received(peer, header_of(tip), said), pump.now)

    machine.handle(Offered(make_offer(pump.rules, pump.first, tip)), pump.now)
    for peer in (thin, *others):
        answers(peer)
    monkeypatch.setattr(collector, "plan_roster", counted(plan_roster, made))
    for of_lines in (averaged_bytes, bytes_to_send, least_to_send, Sender):
        monkeypatch.setattr(thin_lines, of_lines.__name__, counted(of_lines, made))
    machine._succession.campaign.planned = None
    for _ in range(10):
        for peer in (thin, *others):
            answers(peer)
    assert machine.campaign.stage == "collect"
    assert made.pop("Sender", 0) == plans * len(pump.nodes), "each once, not with each answer"
    # Averaged units are among the sent ones too.
    assert made == dict.fromkeys(made, plans) | ({"averaged_bytes": 2} if plans else {})
    assert len(made) == 4 * plans


def test_a_peer_that_is_silent_long_enough_when_a_quorum_offers_costs_no_time_at_all() -> None:
    pump = in_training("ABCD")
    dead = pump.last
    pump.train_times(20.0)
    pump.run_to_height(3)
    pump.kill(dead)
    assert pump.run_to_height(4, pump.others(dead)) < 21.0


def test_a_slow_peer_is_waited_for_as_long_as_the_rule_says() -> None:
    pump = in_training("ABCD", timers=Timers(roster_late_s=20.0))
    slow = pump.last
    pump.train_times(dict.fromkeys("ABCD", 10.0) | {slow: 14.0})
    pump.run_to_height(4)
    assert pump.tip_of("A").contributors == tuple("ABCD")
    pump.train_times({slow: 45.0})  # a quorum after 10, and T_late is 20
    pump.run_to_height(6, pump.others(slow))
    tip = pump.tip_of(pump.first)
    assert slow not in tip.contributors
    assert tip.members[slow].silent == 0  # it is slow, not silent: it answered the polls
    assert "did not say when, " in pump.said(Topic.ROUND)


def late_offer(pump: Pump, peer: PeerId) -> Offer:
    """The late offer of an excluded peer: progress on its experts, and no shared tensors."""
    tip = pump.tip_of(peer)
    whole = make_offer(pump.rules, peer, tip)
    units = {
        unit: replace(offered, digest=name("late", unit))
        for unit, offered in whole.units.items()
        if unit in pump.rules.expert_units
    }
    pump.nodes[peer].disk.update(offered.digest for offered in units.values())
    return Offer(tip.digest, 0, 0, units)


def test_a_peer_four_times_slower_is_not_waited_for_and_its_experts_advance() -> None:
    pump = in_training("ABCD", timers=Timers(roster_late_s=20.0))
    slow = pump.last
    pump.train_times(dict.fromkeys("ABCD", 10.0) | {slow: 40.0})
    pump.run_to_height(4)
    # The uncounted peer has the highest rank, for any digests.
    assert slow not in pump.tip_of(slow).contributors and slow == pump.last
    start, offer = pump.now, late_offer(pump, slow)
    pump.give(slow, Offered(offer))
    pump.give(slow, Expected(pump.tip_of(slow).digest, 40.0))
    pump.run_to_height(5)
    assert pump.now - start < 11.5
    tip = pump.tip_of(slow)
    assert slow not in tip.contributors and len(tip.contributors) == 3
    assert tip.tokens - pump.nodes[slow].applied[-2].tokens == 3000
    for unit, offered in offer.units.items():
        assert (tip.entries[unit].digest, tip.entries[unit].version) == (offered.digest, 5)
    assert f"roster closed with 3 of 4 offers: peer {slow} needs " in pump.said(Topic.ROUND)
    # It does not answer on the next tip, as if its present step had not ended yet.
    assert pump.run_to_height(6) < 11.5


def test_the_offer_that_follows_takes_the_place_of_the_late_one() -> None:
    pump = in_training("ABCD")
    peer = pump.last
    late = late_offer(pump, peer)
    whole = make_offer(pump.rules, peer, pump.tip_of(peer))
    pump.give(peer, Offered(late))
    pump.nodes[peer].disk.update(unit.digest for unit in whole.units.values())
    pump.give(peer, Offered(whole))
    # The network may deliver the older one last.
    ballot = pump.nodes[peer].record.promised or Ballot(0, pump.first)
    for offer in (whole, late):
        ready = Ready(ballot, offer, None, 1.0)
        pump.give(pump.first, Received(peer, header_of(pump.tip_of(peer)), ready))
    pump.run_to_height(3)
    tip = pump.tip_of(peer)
    assert peer in tip.contributors
    assert all(tip.entries[unit].digest != offered.digest for unit, offered in late.units.items())


def test_two_peers_that_do_not_reach_each_other_do_not_reduce_and_lose_nothing() -> None:
    """Once it costs T_red. In the next rounds others reduce at once."""
    pump = in_training("ABCDE", make_rules(parts=8))
    apart = pump.order[-2:]
    pump.stall_inputs = lambda peer, source: {peer, source} == set(apart)
    assert pump.run_to_height(3) < pump.timers.reduce_s + 3.5
    assert pump.tip_of("A").contributors == tuple("ABCDE")
    assert "others reduce instead of" in pump.said(Topic.ROUND)
    assert pump.run_to_height(5) < 5.0
    assert pump.tip_of("A").contributors == tuple("ABCDE")


def test_who_most_reducers_wait_for_is_left_out_and_not_these() -> None:
    """One uplink is far too slow. After twice T_red the round continues without this peer."""
    pump = in_training("ABCDE", rules=make_rules(parts=8))
    thin = pump.last
    pump.stall_inputs = lambda peer, source: source == thin
    assert pump.run_to_height(3, pump.others(thin)) < 2 * pump.timers.reduce_s + 3.5
    assert pump.tip_of("A").contributors == tuple(sorted(pump.others(thin)))
    said = pump.nodes[pump.first].said(Topic.ROUND)
    assert "4 of 4 late reducers wait for its values" in said
    assert "others reduce instead of" not in said, "they would wait as long"


def test_one_reducer_that_waits_for_a_peer_is_not_believed_over_the_others() -> None:
    pump = in_training("ABCDE", rules=make_rules(parts=8))
    named, reducer = pump.order[-2:]
    pump.stall_inputs = lambda peer, source: (peer, source) == (reducer, named)
    pump.run_to_height(3)
    assert pump.tip_of("A").contributors == tuple("ABCDE")


def test_a_peer_whose_line_would_hold_the_others_up_is_left_out_at_once() -> None:
    """Its uplink needs 16 s for its values, the others' one second.

    It has worked for a second (slow-link exclusion).
    """
    rules = make_rules(parts=1)
    rules = replace(rules, unit_bytes=dict.fromkeys(rules.unit_bytes, 500_000))
    pump = in_training("ABCD", rules, uplinks={"A": 20, "B": 20, "C": 20, "D": 1}, height=1)
    assert pump.now < 3.0
    assert pump.tip_of("A").contributors == tuple("ABC")
    assert "its uplink of 1 Mbit/s would be busy for 16.0 s, not 1.2" in pump.said(Topic.ROUND)
    pump.run_to_height(3)
    assert ("D",) not in pump.tip_of("A").owners.values(), "its expert went stale"
    pump.run_to_height(4)
    assert pump.tip_of("A").contributors == tuple("ABCD"), "the rest takes 4 s"


def test_late_offers_alone_make_no_round() -> None:
    """The shared tensors would have no value."""
    pump = in_training("AB")
    pump.train_times(60.0)
    pump.run_to_height(3)
    for peer in "AB":
        pump.give(peer, Offered(late_offer(pump, peer)))
    pump.run(pump.now + 30.0)
    assert {node.machine.tip.height for node in pump.nodes.values()} == {3}


def test_an_offer_without_shared_tensors_counts_no_steps() -> None:
    pump = in_training("ABCD")
    peer = pump.last
    counted = replace(late_offer(pump, peer), steps=10, tokens=1000)
    problem = offer_problem(counted, peer, pump.tip_of(peer), pump.rules)
    assert problem is not None and "no shared part, but 10 steps" in problem
    empty = replace(counted, steps=0, tokens=0, units={})
    assert offer_problem(empty, peer, pump.tip_of(peer), pump.rules)


def test_a_convener_that_was_replaced_for_its_silence_is_not_waited_for_once_more() -> None:
    pump = in_training("ABCD")
    pump.train_times(3.0)
    pump.run_to_height(3)
    dead = pump.first
    pump.kill(dead)
    assert pump.run_to_height(4, pump.others(dead)) < 10.0 + 2 * pump.timers.poll_s + 1.5
    # 10 s until its replacement, two polls, and less than a second for the round.


def test_a_reducer_that_dies_is_left_out_and_the_round_ends() -> None:
    pump = in_training("ABCD", rules=make_rules(parts=8))  # so that everybody reduces
    victim = pump.last

    def die(source: PeerId, destination: PeerId, message: Message) -> bool:
        if source == victim and isinstance(message, Reduced):
            pump.kill(victim)
        return not pump.nodes[source].is_up

    pump.lose = die
    pump.run_to_height(3, pump.others(victim))
    assert len(pump.digests_at(3)) == 1
    assert victim not in pump.tip_of(pump.first).contributors
    assert f"peer {victim} left out" in pump.said(Topic.ROUND)
    assert pump.count_sent(Prepare) < 60  # no takeover was needed
    assert all(not n.said(Topic.TAKEOVER) for p, n in pump.nodes.items() if p != victim)


def test_a_contributor_whose_values_nobody_can_fetch_is_left_out() -> None:
    pump = in_training("ABCD")
    mute = pump.last
    pump.refuse_fetch = lambda peer, source, unit: source == mute
    pump.run_to_height(3)
    tip = pump.tip_of(pump.first)
    assert mute not in tip.contributors
    assert len(tip.contributors) >= 2
    assert "cannot fetch from it: refused" in pump.said(Topic.ROUND)


def test_a_reducer_that_cannot_reach_the_convener_is_left_out_itself() -> None:
    pump = in_training("ABC")
    convener, deaf = pump.first, pump.last
    pump.refuse_fetch = lambda peer, source, unit: peer == deaf and source == convener
    pump.run_to_height(3)
    assert convener in pump.tip_of(convener).contributors


def test_results_of_an_older_roster_are_ignored() -> None:
    pump = in_training("ABCD")
    convener = pump.first
    node = pump.nodes[convener]
    stale = ReducedUnit(name("forged"), 100)

    def forge(source: PeerId, destination: PeerId, message: Message) -> bool:
        if isinstance(message, Roster) and message.offers and source == convener:
            for unit in ("shared.0", "shared.1"):
                forged = Reduced(message.ballot, name("older"), {unit: stale}, {})
                pump.nodes[destination].machine._out.post(convener, forged)
        return False

    pump.lose = forge
    pump.run_to_height(3)
    assert stale.digest not in {e.digest for e in node.machine.tip.entries.values()}


def accept_of(pump: Pump, manifest_of: PeerId) -> Callable[[PeerId, PeerId, Message], bool]:
    """Loses every ACCEPT of this peer."""
    return lambda source, destination, message: (
        source == manifest_of and isinstance(message, Accept)
    )


def test_half_with_the_tie_breaker_decides_only_after_the_grace() -> None:
    pump = in_training("AB")
    second = pump.last
    times: dict[str, float] = {}

    def watch(source: PeerId, destination: PeerId, message: Message) -> bool:
        if isinstance(message, Propose | Commit) and message.manifest.height == 3:
            times.setdefault(type(message).__name__, pump.now)
        return accept_of(pump, second)(source, destination, message)

    pump.lose = watch
    pump.run_to_height(3)
    waited_s = times["Commit"] - times["Propose"]
    assert pump.timers.vote_s / 2 <= waited_s < pump.timers.vote_s / 2 + 1


def test_half_without_the_tie_breaker_never_decides() -> None:
    pump = in_training("AB")
    first, second = pump.order
    pump.kill(first)
    pump.run(pump.now + 50)
    assert pump.tip_of(second).height == 2
    # It hears nobody, so it does not even try, and logs this once.
    assert pump.nodes[second].said(Topic.TAKEOVER).startswith(f"waits: convener {first} silent")
    assert "\n" not in pump.nodes[second].said(Topic.TAKEOVER)


def test_a_proposal_that_its_convener_cannot_fetch_is_given_up_without_its_sources() -> None:
    pump = in_training("ABC")
    convener = pump.first
    owner = pump.last
    # Nobody can fetch the owner's experts. Its shared parts were averaged before.
    pump.refuse_fetch = lambda peer, source, unit: source == owner and unit.startswith("expert")
    pump.run_to_height(3)
    tip = pump.tip_of(convener)
    assert owner not in tip.contributors
    assert "given up" in pump.nodes[convener].said(Topic.TAKEOVER)
    assert len(pump.digests_at(3)) == 1


def test_a_convener_waits_for_blobs_that_a_voter_has() -> None:
    """Their source has refused them. The voter sends nothing yet, and other votes are missing."""
    pump = in_training("ABCDE")
    convener, owner = pump.first, pump.last
    voter = pump.others(convener, owner)[0]
    pump.refuse_fetch = lambda peer, source, unit: (
        (peer, source) == (convener, owner) and unit.startswith("expert")
    )
    pump.lose = lambda source, _, message: isinstance(message, Accept) and source != voter
    pump.run(pump.now + 10, lambda: pump.nodes[voter].machine.record.accepted is not None)
    pump.fetches_hang = lambda source: source != owner
    pump.run(pump.now + 20, lambda: "given up" in pump.nodes[convener].said(Topic.TAKEOVER))
    limit_s = f"(limit {pump.timers.vote_s:.1f})"
    assert limit_s in pump.nodes[convener].said(Topic.TAKEOVER)


def test_a_repeated_proposal_gets_the_same_vote_and_no_second_write() -> None:
    pump = in_training("ABC")
    voter = pump.last
    pump.lose = accept_of(pump, voter)
    pump.run(pump.now + 0.9)
    pump.run(pump.now + 20, lambda: pump.nodes[voter].machine.record.accepted is not None)
    pump.lose = lambda source, destination, message: False
    machine = pump.nodes[voter].machine
    accepted = machine.record.accepted
    assert accepted is not None
    before = machine.record
    convener = accepted.ballot.convener
    pump.nodes[convener].machine._out.post(voter, Propose(accepted.ballot, accepted.manifest, ()))
    assert machine.record is before


def test_an_expert_is_verbatim_with_one_owner_and_averaged_with_two() -> None:
    for copies in (1, 2):
        pump = in_training("ABC", make_rules(owners_per_expert=copies), height=1)
        tip = pump.tip_of("A")
        for expert in range(4):
            values = tip.sources[f"expert.{expert}"]
            assert len(values) == copies
            digests = {digest for _, digest in values}
            assert (tip.entries[f"expert.{expert}"].digest in digests) == (copies == 1)


def test_experts_travel_only_in_the_rounds_in_which_they_are_due() -> None:
    pump = in_training("AB", make_rules(experts_every=3), height=6)
    for manifest in pump.nodes["A"].applied:
        units = {unit.split(".")[0] for unit in manifest.sources}
        assert units == ({"shared", "expert"} if manifest.round % 3 == 0 else {"shared"})


def test_the_results_of_a_busy_reducer_come_in_messages_of_bounded_size() -> None:
    pump = start_swarm("ABC", make_rules(parts=750))  # 250 each, and two are no conveners
    pump.run_to_height(1)
    sizes = [
        len(message.results)
        for node in pump.nodes.values()
        for *_, message in node.sent
        if isinstance(message, Reduced)
    ]
    assert max(sizes) <= 200
    assert sum(sizes) >= 450


def test_a_fetch_is_cancelled_when_its_round_is_over() -> None:
    pump = in_training("ABC")
    slow = pump.last
    pump.refuse_fetch = lambda peer, source, unit: peer == slow
    pump.run_to_height(3, pump.others(slow))
    pump.refuse_fetch = lambda peer, source, unit: False
    pump.run_to_height(3)
    assert CancelFetch(Purpose.PROPOSAL) in pump.nodes[slow].effects


def test_commits_go_to_everybody_and_carry_a_quorum_of_votes() -> None:
    pump = in_training("ABCDE")
    convener = pump.first
    pump.run_to_height(3)
    commits = {
        destination: message
        for _, destination, message in pump.nodes[convener].sent
        if isinstance(message, Commit) and message.manifest.height == 3
    }
    assert commits.keys() == set(pump.others(convener))
    for commit in commits.values():
        assert len(commit.certificate.signatures) == 3
        assert commit.parent.is_quorum(commit.certificate.signatures)


def test_ballot_zero_belongs_to_the_first_convener_alone() -> None:
    pump = in_training("ABC")
    impostor, victim = pump.last, pump.order[1]
    machine = pump.nodes[impostor].machine
    for ballot in (Ballot(0, impostor), Ballot(1, victim), Ballot(-1, impostor)):
        pump.nodes[impostor].machine._out.post(victim, Prepare(ballot))
        pump._carry_out(impostor, machine._finish())
    pump.run(pump.now + 0.2)
    assert pump.nodes[victim].said(Topic.REFUSED).count("refused") == 3
    assert not any(
        isinstance(message, Ready) and destination == impostor
        for _, destination, message in pump.nodes[victim].sent[-3:]
    )


@pytest.mark.parametrize(("refuses", "limit_s"), [(False, 5.0), (True, 3.0)])
def test_a_reducer_whose_machine_refuses_messages_is_left_out_sooner(
    refuses: bool, limit_s: float
) -> None:
    pump = in_training("ABCD")
    pump.dead_refuse = refuses
    first, dead = pump.first, pump.last
    # It offers, and dies before it has fetched any blob.
    pump.stall_inputs = lambda peer, source: peer == dead
    convener = pump.nodes[first].machine
    assert pump.run(pump.now + 20.0, lambda: convener.campaign.stage == "reduce")
    pump.kill(dead)
    assert limit_s < pump.run_to_height(3, pump.others(dead)) < limit_s + 1.5
    assert dead not in pump.tip_of(first).contributors


@pytest.mark.parametrize(("seconds_dead", "grace_s"), [(1.0, 3.5), (15.0, 0.0)])
def test_half_of_the_votes_wait_for_the_others_only_while_these_were_heard_lately(
    seconds_dead: float, grace_s: float
) -> None:
    pump = in_training("AB", timers=Timers(vote_s=60.0, attempt_s=200.0))
    pump.train_times(20.0)
    pump.run_to_height(3)
    first, other = pump.first, pump.last
    pump.run(pump.now + 20.0 - seconds_dead)
    pump.kill(other)
    convener = pump.nodes[first].machine
    assert pump.run(pump.now + 30.0, lambda: convener.campaign.stage == "vote")
    assert grace_s <= pump.run_to_height(4, first) < grace_s + 2.0


@pytest.mark.parametrize(("refuses", "waits_s"), [(False, 6.0), (True, 0.0)])
def test_a_peer_that_was_gone_before_the_campaign_costs_nothing_more(
    refuses: bool, waits_s: float
) -> None:
    pump = in_training("ABCD")
    pump.dead_refuse = refuses
    dead = pump.last
    pump.kill(dead)
    pump.run_to_height(3, pump.others(dead))
    assert waits_s <= pump.run_to_height(4, pump.others(dead)) < waits_s + 3.0


@pytest.mark.parametrize(("refuses", "limit_s"), [(False, 10.0), (True, 3.0)])
def test_a_proposal_whose_sources_are_gone_is_given_up_sooner(
    refuses: bool, limit_s: float
) -> None:
    pump = in_training("ABCD", timers=Timers(vote_s=20.0, attempt_s=100.0, heartbeat_s=60.0))
    pump.dead_refuse = refuses
    first, dead = pump.first, pump.last
    convener = pump.nodes[first].machine
    assert pump.run(pump.now + 20.0, lambda: convener.campaign.stage == "vote")
    pump.kill(dead)  # nobody has fetched its experts yet
    start = pump.now
    assert pump.run(start + 60.0, lambda: convener.campaign.attempt > 0)
    assert limit_s <= pump.now - start < limit_s + 2.0
