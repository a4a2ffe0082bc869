"""Phase 1 of a ballot: a quorum's promises, and the value that they dictate [C1, C2, C6]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.protocol.messages.messages import Accepted, Ballot, Ready
from swarm.protocol.rounds.acceptor import Acceptor
from swarm.protocol.rounds.campaign import Campaign, Value
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.succession import Succession
from swarm.protocol.values.manifest import PeerId


@dataclass(eq=False)
class Phase1(Role):
    """Collects promises, and finds what may have been decided under a lower ballot."""

    succession: Succession
    acceptor: Acceptor

    def may_use_ballot_zero(self) -> bool:
        """Whether this peer may use attempt 0, which has no phase 1: only rank 0, once [C1, P3]."""
        is_first = self.tip.order[0] == self.me and self.standing.record.promised is None
        return is_first and self.succession.top is None

    def _is_required(self, ballot: Ballot) -> bool:
        """Whether a quorum must promise before a proposal [C2]."""
        return ballot.attempt >= 1

    def take(self, campaign: Campaign, source: PeerId, ready: Ready) -> None:
        """Notes a READY, if it comes from a voter and names the campaign's ballot."""
        if ready.ballot == campaign.ballot and source in self.standing.electorate():
            campaign.answers[source] = ready
            campaign.answered_at[source] = self.now

    def num_answers(self, campaign: Campaign, since: float) -> int:
        """How many voters have answered since a time."""
        return sum(at >= since for at in campaign.answered_at.values())

    def is_answered(self, campaign: Campaign, since: float) -> bool:
        """Whether a quorum answered since a time; if not, the convener gives up its attempt."""
        recent = [peer for peer, at in campaign.answered_at.items() if at >= since]
        return self.standing.has_quorum([self.me, *recent])

    def promises(self, campaign: Campaign) -> Mapping[PeerId, Ready] | None:
        """A quorum's promises: {} if no promise is required, None while there is no quorum."""
        if not self._is_required(campaign.ballot):
            return {}
        promises = self._promises(campaign)
        return promises if self.standing.has_quorum(promises) else None

    def _promises(self, campaign: Campaign) -> Mapping[PeerId, Ready]:
        """The promises that count. Those of excluded peers count only after T_roster [C2, C6].

        Excluded peers are sources of blobs that nobody could fetch. A source may have voted for a
        value with these blobs. With a quorum of other peers, the convener need not propose that
        value again.
        """
        answers = campaign.answers
        sound = {peer: ready for peer, ready in answers.items() if peer not in campaign.excluded}
        is_over = self.now - campaign.started_at >= self.timers.roster_s
        return answers if is_over and not self.standing.has_quorum(sound) else sound

    def voted_before(self, campaign: Campaign, promises: Mapping[PeerId, Ready]) -> Value | None:
        """The value that has to be proposed again because a promise shows a vote for it [C2]."""
        accepted = self._votes_found(promises)
        if not accepted:
            return None
        chosen = self._choose_accepted(accepted)
        digest = chosen.manifest.digest
        for peer, ready in campaign.answers.items():
            if ready.accepted and ready.accepted.manifest.digest == digest:
                campaign.holders[peer] = None
        why = f"accepted before under attempt {chosen.ballot.attempt}"
        return Value(chosen.manifest, chosen.evidence, why)

    def _votes_found(self, promises: Mapping[PeerId, Ready]) -> list[Accepted]:
        """Votes under lower ballots that may have led to a decision."""
        votes = (ready.accepted for ready in promises.values())
        return [
            vote
            for vote in votes
            if vote and self.acceptor.proposal_problem(vote.manifest, vote.evidence) is None
        ]

    def _choose_accepted(self, accepted: list[Accepted]) -> Accepted:
        """The vote with the highest ballot: its value may be decided already [C2]."""
        return max(accepted, key=lambda vote: vote.ballot)
