"""Peers without a vote train and are counted, and no decision depends on them [R7]."""

from dataclasses import replace

from swarm.protocol.messages.events import Expected, LeaveAsked, Purpose, Topic
from swarm.protocol.messages.messages import Accept, Prepare, Propose, Ready, Roster
from swarm.protocol.rounds.policies.roster_deadline import PATIENT_EVERY
from swarm.protocol.values.invitation import Credential, Invitation
from swarm.protocol.values.manifest import Manifest, Member, PeerId
from tests.protocol.messages.test_rounds_membership import join
from tests.protocol.round_pump import Pump, found, in_training, make_rules, start_swarm

REFORM_S = 60.0
OLD = "ABCDEFGH"


IDLE_S = 1e9
"""Local steps of a peer that no round ever counts."""


class Talking(Pump):
    """Peers that report the duration of their local steps."""

    def _train(self, peer: PeerId, tip: Manifest) -> None:
        super()._train(peer, tip)
        expected = Expected(tip.digest, self.nodes[peer].train_s)
        self.after(0.1, lambda: self.give(peer, expected))


def swarm_of(
    voters: str,
    trainees: str,
    *,
    train_s: float = IDLE_S,
    voters_train_s: float = 1.0,
    kind: type[Pump] = Pump,
) -> Pump:
    """A swarm with voters and trainees, and given training times."""
    rules = make_rules(experts=16)
    manifest = found(rules, [*voters, *trainees])
    members = {
        peer: member if peer in voters else replace(member, counted=0, votes=False, vouched=False)
        for peer, member in manifest.members.items()
    }
    tip = replace(manifest, members=members, contributors=tuple(voters))
    times = dict.fromkeys(voters, voters_train_s) | dict.fromkeys(trainees, train_s)
    return start_swarm(voters + trainees, rules, tip=tip, train_s=times, kind=kind)


def invitation_by(anchor: str, key: str = "K") -> Credential:
    """A guest's credential. These tests check no signatures."""
    return Credential(Invitation(make_rules().run, key, 9, 0, 99, anchor, ""), "")


def members(pump: Pump) -> dict[str, Member]:
    return dict(pump.tip_of("A").members)


def test_keys_that_join_and_vanish_cost_three_voters_no_quorum() -> None:
    """Without the rule, seven members with four dead ones waited for T_reform (vanishing keys)."""
    pump = in_training("ABC")
    for key in "WXYZ":
        join(pump, key).train_s = 1e9
    assert pump.run(pump.now + 30, lambda: set("WXYZ") <= members(pump).keys())
    assert pump.tip_of("A").voters == set("ABC")
    pump.kill(*"WXYZ")
    began = height = 0.0
    for _ in range(4):
        began, height = pump.now, pump.tip_of("A").height
        pump.run_to_height(int(height) + 1, "ABC")
        assert pump.now - began < pump.timers.silence_s + 3
    pump.run_to_height(int(height) + 2, "ABC")
    assert members(pump).keys() == set("ABC")
    assert pump.tip_of("A").generation == "0"


def test_a_trainee_works_owns_and_reduces_but_convenes_and_votes_in_nothing() -> None:
    pump = swarm_of(OLD, "XYZ", train_s=1.0)
    pump.run_to_height(4)
    said = [m for peer in "XYZ" for *_, m in pump.nodes[peer].sent]
    tip = pump.tip_of("A")
    assert set("XYZ") <= set(tip.contributors)
    assert any("X" in owners for owners in tip.owners.values())
    assert tip.members["X"].counted == 4
    assert tip.order and not set(tip.order) & set("XYZ")
    of_voters = (Accept, Prepare, Propose, Roster)
    assert said and not [m for m in said if isinstance(m, of_voters)]
    assert not [m for m in said if isinstance(m, Ready) and m.ballot.attempt]
    assert pump.nodes["X"].record.promised is None and pump.nodes["X"].record.accepted is None


def test_a_slow_trainee_is_counted_in_a_patient_round_and_waited_for_from_then_on() -> None:
    """It needs more than a quarter of the voters' time, and its work is worth the wait."""
    pump = swarm_of("ABC", "X", train_s=38.0, voters_train_s=30.0, kind=Talking)
    pump.run(pump.now + 900, lambda: pump.tip_of("A").round >= PATIENT_EVERY + 3)
    counted = [m.round for m in pump.nodes["A"].applied if "X" in m.contributors]
    assert counted == [*range(PATIENT_EVERY, PATIENT_EVERY + 4)]


def test_voters_decide_without_trainees_and_trainees_never_without_voters() -> None:
    pump = swarm_of("ABC", "VWXYZ")
    pump.run_to_height(1)
    first = pump.order
    pump.kill(*first[:2])
    height, alive = pump.tip_of(first[2]).height, pump.alive
    pump.run(pump.now + REFORM_S - 1)
    assert {pump.tip_of(peer).height for peer in alive} == {height}
    pump.run_rounds(4, first[2], within_s=200)
    pump.run(pump.now + 5)
    tip = pump.tip_of(first[2])
    assert len({pump.tip_of(peer).generation for peer in alive}) == 1
    assert tip.lineage[0][1][0] == 1, "one elector of the parent continues"
    assert set("VWXYZ") <= tip.members.keys()


def test_trainees_stay_trainees_in_a_reform() -> None:
    pump = swarm_of("ABC", "XYZ")
    pump.run_to_height(1, "ABC")
    first, *others = pump.order
    pump.kill(*others)
    assert not pump.tip_of(first).lineage
    pump.run(pump.now + 2 * REFORM_S, lambda: bool(pump.tip_of(first).lineage))
    tip = pump.tip_of(first)
    assert tip.voters == {first}
    assert tip.members.keys() == {first, *"XYZ"}


def test_a_run_outlives_its_founder_once_it_has_let_guests_in() -> None:
    pump = in_training("A", height=1)
    for peer in "BCD":
        join(pump, peer).machine._peer.credential = invitation_by("A")
    pump.run(pump.now + 60, lambda: len(pump.tip_of("A").voters) == 4)
    pump.kill("A")
    start = pump.tip_of("B").round
    pump.run_rounds(start + 3, "BCD", within_s=2 * REFORM_S)
    assert len({pump.tip_of(peer).generation for peer in "BCD"}) == 1


def test_strangers_work_for_a_lone_founder_without_ever_getting_a_vote() -> None:
    pump = in_training("A", height=1)
    for peer in "BCD":
        join(pump, peer)
    pump.run_to_height(pump.tip_of("A").height + 20, "A")
    tip = pump.tip_of("A")
    assert tip.voters == {"A"} and set(tip.contributors) == set("ABCD")
    assert "swarm-invite --for B" in pump.nodes["B"].said(Topic.ADMISSION)


def test_an_anchor_may_vouch_for_a_member_that_is_there() -> None:
    pump = in_training("A", height=1)
    stranger = join(pump, "B")
    pump.run(pump.now + 30, lambda: "B" in members(pump))
    assert not members(pump)["B"].votes
    stranger.machine._peer.credential = invitation_by("A", key="B")
    pump.run(pump.now + 30, lambda: members(pump)["B"].votes)
    pump.run(pump.now + 30, lambda: stranger.machine.tip.voters == {"A", "B"})
    assert members(pump)["B"].vouched and stranger.machine.tip.voters == {"A", "B"}
    assert stranger.machine._contributor._credential() is None, "it has the requested blobs"


def test_a_convener_takes_up_four_trainees_of_one_network() -> None:
    pump = in_training("A", height=1)
    machine = pump.nodes["A"].machine
    others = {"Y": "198.51.100.0/24", "Z": None}
    machine._peer.network_of = lambda peer: others.get(peer, "192.0.2.0/24")
    for peer in "BCDEFG":
        join(pump, peer)
    pump.run_to_height(machine.tip.height + 6, "A")
    assert len(machine.tip.members) == 5
    for peer in "YZ":
        join(pump, peer)
    (late,) = [peer for peer in "FG" if peer not in machine.tip.members][:1]
    guest = pump.nodes[late].machine._peer  # it may convene once it votes
    guest.credential, guest.network_of = invitation_by("A"), machine._peer.network_of
    pump.run_to_height(machine.tip.height + 6, "A")
    assert {"Y", "Z", late} < machine.tip.members.keys(), "others, and guests, have their places"
    assert len(machine.tip.members) == 8


def test_of_strangers_that_work_a_third_at_most_votes_after_ten_rounds() -> None:
    pump = in_training("ABCDEF", height=1)
    for peer in "WXYZ":
        join(pump, peer)
    pump.run(pump.now + 30, lambda: set("WXYZ") <= members(pump).keys())
    before = pump.tip_of("A").height
    pump.run_to_height(before + 5)
    assert pump.tip_of("A").voters == set("ABCDEF")
    pump.run_to_height(before + 20)
    assert len(pump.tip_of("A").voters) == 8, "6 are vouched for"


def test_a_vouched_voter_that_was_silent_comes_back_with_its_vote() -> None:
    pump = in_training(OLD, height=1)
    gone = next(peer for peer in reversed(pump.order) if peer != "A")
    pump.kill(gone)
    rest = pump.others(gone)
    assert pump.run(pump.now + 90, lambda: gone not in members(pump))
    assert pump.tip_of("A").absent.keys() == {gone}
    pump.restart(gone)
    pump.run(pump.now + 30, lambda: gone in members(pump))
    assert members(pump)[gone].votes and members(pump)[gone].counted < 10
    assert pump.tip_of(rest[-1]).voters <= set(rest) | {gone}


def test_the_founder_votes_at_once_when_it_comes_back() -> None:
    pump = in_training(OLD, height=1)
    pump.kill("A")
    pump.run(pump.now + 90, lambda: "A" not in pump.tip_of("B").members)
    pump.restart("A")
    pump.run(pump.now + 30, lambda: "A" in pump.tip_of("B").members)
    assert "A" in pump.tip_of("B").voters


def test_the_only_voter_leaves_its_run_to_a_trainee() -> None:
    pump = swarm_of("A", "XY")
    pump.run_to_height(1, "A")
    pump.give("A", LeaveAsked())
    pump.run(pump.now + 30, lambda: bool(pump.nodes["A"].left))
    assert "no longer" in pump.nodes["A"].left
    pump.run(pump.now + 5)
    tip = pump.tip_of("X")
    assert len(tip.voters) == 1 and tip.voters < set("XY")
    assert "nobody else would be left to decide" in pump.nodes["A"].said(Topic.MEMBERSHIP)


def test_trainees_that_have_lost_all_voters_wait_for_one_and_say_so() -> None:
    pump = swarm_of("A", "XY")
    pump.run_to_height(1, "A")
    pump.run(pump.now + 1)
    pump.kill("A")
    height = pump.tip_of("X").height
    pump.run(pump.now + 3 * REFORM_S)
    assert {pump.tip_of(peer).generation for peer in "XY"} == {"0"}
    said = pump.nodes["X"].said(Topic.FORK)
    assert said.count("has no vote, so it waits") == 1 and "--initialise-from" in said
    pump.restart("A")
    pump.run_to_height(height + 2)
    assert {node.machine.tip.generation for node in pump.nodes.values()} == {"0"}


def test_a_trainee_that_hears_the_voters_says_nothing_however_long_a_round_is() -> None:
    pump = swarm_of("A", "B", train_s=3 * REFORM_S, voters_train_s=3 * REFORM_S)
    pump.run(3 * REFORM_S - 1)
    assert "has no vote" not in pump.nodes["B"].said(Topic.FORK)
    pump.kill("A")
    pump.run(pump.now + 2 * REFORM_S)
    assert "has no vote, so it waits" in pump.nodes["B"].said(Topic.FORK)


def test_a_trainee_keeps_what_was_decided_for_a_voter_that_has_yet_to_hear_of_it() -> None:
    """Had it continued alone, its chain would be longer than that voter's, and not believed."""
    pump = swarm_of("ABC", "X")
    pump.run_to_height(1)
    pump.kill("A")
    pump.run_to_height(3, "BCX")
    pump.kill("C")
    height = pump.tip_of("X").height
    pump.run(pump.now + REFORM_S - 2)
    pump.kill("B")
    pump.run(pump.now + REFORM_S)
    pump.restart("A")
    pump.run(pump.now + REFORM_S + 30)
    tips = [pump.tip_of(peer) for peer in "AX"]
    assert {tip.generation for tip in tips} != {"0"} and len({t.lineage for t in tips}) == 1
    assert tips[0].lineage[0][0] == height
    assert min(tip.height for tip in tips) > height


def test_a_trainee_that_fetches_longer_than_a_lone_voter_trains_is_counted_in_the_end() -> None:
    """One round in `PATIENT_EVERY` waits for it. Otherwise it would fetch old tips forever."""
    pump = swarm_of("A", "B", train_s=2.0, voters_train_s=2.0)
    of_tips = (Purpose.CATCH_UP, Purpose.PROPOSAL)
    pump.fetch_s = lambda peer, purpose: 6.0 if peer == "B" and purpose in of_tips else 0.0
    pump.run(300.0)
    counted = [m.round for m in pump.nodes["A"].applied if "B" in m.contributors]
    assert counted[-1] > 2 * PATIENT_EVERY
