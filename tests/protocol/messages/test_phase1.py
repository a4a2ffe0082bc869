"""Phase 1 of a ballot, in isolation: promises that count, and their effect on a convener."""

from dataclasses import replace
from random import Random

from swarm.protocol.messages.events import Record
from swarm.protocol.messages.messages import Accepted, Ballot, Evidence, Ready
from swarm.protocol.rounds import LocalPeer, Parts, RoundMachine
from swarm.protocol.rounds.acceptor import Acceptor
from swarm.protocol.rounds.campaign import Campaign
from swarm.protocol.rounds.phase1 import Phase1
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import Manifest
from tests.protocol.round_pump import found, make_rules

RULES = make_rules()
TIP = found(RULES, list("ABC"))
BALLOT = Ballot(5, "A")
LOW, HIGH, FALSE = (replace(TIP, height=1, tokens=tokens) for tokens in (1, 2, 3))


class Judge(Acceptor):
    def proposal_problem(self, manifest: Manifest, evidence: Evidence | None) -> str | None:
        return "it does not follow" if manifest == FALSE else None


def phase1() -> Phase1:
    peer = LocalPeer("A", 1.0, RULES, Timers(), now=0.0, random=Random(0))
    parts = Parts(acceptor=Judge)
    return RoundMachine(peer, Record(TIP, None, None), stored=[], parts=parts)._phase1


def promise(*vote: tuple[int, Manifest], ballot: Ballot = BALLOT) -> Ready:
    votes = [Accepted(Ballot(attempt, "B"), manifest) for attempt, manifest in vote]
    return Ready(ballot, None, votes[0] if votes else None, 1.0)


def campaign(part: Phase1, ballot: Ballot = BALLOT, **readies: Ready) -> Campaign:
    begun = Campaign(ballot, part.now, part.now + 1.5)
    for peer, ready in readies.items():
        part.take(begun, peer, ready)
    return begun


def test_attempt_0_needs_no_promises_and_binds_to_nothing() -> None:
    part = phase1()
    begun = campaign(part, Ballot(0, "A"))
    assert part.promises(begun) == {}
    assert part.voted_before(begun, {}) is None


def test_a_later_attempt_needs_a_quorum_of_voters_that_promise_its_very_ballot() -> None:
    part = phase1()
    begun = campaign(part, A=promise(), B=promise(ballot=Ballot(4, "B")), D=promise())
    assert part.promises(begun) is None, "B promised another ballot, and D has no vote"
    part.take(begun, "B", promise())
    assert (part.promises(begun) or {}).keys() == {"A", "B"}


def test_promises_of_excluded_peers_count_only_once_no_others_have_come() -> None:
    part = phase1()
    begun = campaign(part, A=promise(), B=promise())
    begun.excluded = {"B": "its value could not be fetched"}
    assert part.promises(begun) is None
    part.peer.now += part.timers.roster_s
    assert (part.promises(begun) or {}).keys() == {"A", "B"}


def test_the_vote_with_the_highest_ballot_binds_and_those_that_cast_it_hold_its_value() -> None:
    for votes in ({"A": (2, HIGH), "B": (1, LOW)}, {"A": (1, LOW), "B": (2, HIGH)}):
        part = phase1()
        begun = campaign(part, **{peer: promise(vote) for peer, vote in votes.items()})
        value = part.voted_before(begun, part.promises(begun) or {})
        assert value and value.manifest == HIGH
        assert begun.holders.keys() == {peer for peer in votes if votes[peer][1] == HIGH}


def test_a_vote_for_what_cannot_have_been_decided_binds_to_nothing() -> None:
    part = phase1()
    begun = campaign(part, A=promise(), B=promise((3, FALSE)))
    assert part.voted_before(begun, part.promises(begun) or {}) is None


def test_answers_to_the_polls_are_those_of_the_last_seconds() -> None:
    part = phase1()
    begun = campaign(part, B=promise(), C=promise())
    part.peer.now = 10.0
    part.take(begun, "C", promise())
    assert part.num_answers(begun, since=5.0) == 1
    assert part.is_answered(begun, since=5.0), "this peer and C are a quorum"
    assert not part.is_answered(begun, since=11.0)
