"""Rules on what a member's word of its work is worth, removed one at a time; see `mutants.py`."""

# A method without its rule has no use for what the rule looked at.
# ruff: noqa: ARG002

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import inf

from swarm.emulation.simulator.mutants import Mutant
from swarm.emulation.simulator.signing import Door
from swarm.emulation.simulator.taking_part import under
from swarm.protocol.invitation import Credential, Invitation, invitation_problem
from swarm.protocol.manifest import Manifest, Member, PeerId
from swarm.protocol.membership import Guests
from swarm.protocol.messages import Signature
from swarm.protocol.rounds import Rules
from swarm.protocol.rounds.campaign import Campaign
from swarm.protocol.rounds.collector import Collector
from swarm.protocol.voting import Electorate, Members


class _AllTokensWeigh(Rules):
    def weights(
        self, work: Mapping[PeerId, int], peers: Sequence[PeerId], parent: Manifest
    ) -> tuple[int, ...] | None:
        tokens = tuple(work.get(peer) or min(work.values()) for peer in peers)
        return tokens if len(set(tokens)) > 1 else None


class _AllTokensCount(Rules):
    def tokens_after(self, parent: Manifest, work: Mapping[PeerId, int]) -> int:
        return parent.tokens + sum(work.values())


class _OwnClock(Rules):
    def pace_after(self, known: float, tokens: int, seconds: float) -> float:
        return tokens / seconds if seconds else known


class _AnyDeal(Rules):
    def most_of_median(self, member: Member) -> float:
        return 64.0


class _CopiedInvitations(Door):
    def holds(self, peer: PeerId, statement: bytes, signature: Signature) -> bool:
        return statement.startswith(b"swarm join ") or super().holds(peer, statement, signature)


class _AnyNumberOfUses(Guests):
    def _problem_of(self, invitation: Invitation, peer: PeerId) -> str | None:
        left, number = self._left_to(invitation.inviter), self.parent.round + 1
        return invitation_problem(invitation, peer, run=self.run, number=number, uses={}, left=left)


class _NeverExpired(Guests):
    def _problem_of(self, invitation: Invitation, peer: PeerId) -> str | None:
        left, uses = self._left_to(invitation.inviter), self.uses
        return invitation_problem(invitation, peer, run=self.run, number=0, uses=uses, left=left)


class _AnyNumberOfGuests(Guests):
    def _left_to(self, inviter: PeerId) -> float:
        return inf if super()._left_to(inviter) else 0


def _guests_of(changed: type[Guests]) -> type[Rules]:
    class Changed(Rules):
        def guests(self, parent: Manifest, shown: Mapping[PeerId, Credential]) -> Guests:
            return changed.of(parent, shown, run=self.run, is_open=self.is_open)

    return Changed


class _AnyNumberOfTrainees(Collector):
    def _has_place(self, campaign: Campaign, stranger: PeerId) -> bool:
        return True


class _VotesAreKept(Rules):
    def with_voters(
        self, members: Members, contributors: Collection[PeerId], seed: str
    ) -> Electorate:
        given = super().with_voters(members, contributors, seed)
        kept = {p: replace(m, votes=m.votes or members[p].votes) for p, m in given.members.items()}
        return Electorate(kept, given.reasons)


CLAIMS_MUTANTS: Mapping[str, Mutant] = {
    "all_tokens_weigh": Mutant(
        "W1: no value weighs much more than the others", rules=under(_AllTokensWeigh)
    ),
    "all_tokens_count": Mutant(
        "W2: one member alone moves no schedule", rules=under(_AllTokensCount)
    ),
    "own_clock": Mutant("T3: pace is by the clock of the run", rules=under(_OwnClock)),
    "copied_invitations": Mutant(
        "R8: a guest proves that it was given its invitation", door=_CopiedInvitations
    ),
    "any_number_of_uses": Mutant(
        "R8: an invitation lets in as many as it says", rules=under(_guests_of(_AnyNumberOfUses))
    ),
    "never_expired": Mutant("R8: invitations expire", rules=under(_guests_of(_NeverExpired))),
    "any_number_of_guests": Mutant(
        "R8: an anchor lets in no more than it may", rules=under(_guests_of(_AnyNumberOfGuests))
    ),
    "any_number_of_trainees": Mutant(
        "R2: four trainees of a network", collector=_AnyNumberOfTrainees
    ),
    "votes_are_kept": Mutant(
        "R7: the unvouched stay under a third when vouched members leave",
        rules=under(_VotesAreKept),
    ),
    "any_deal": Mutant("T2: a deal is at most 4 times the median's", rules=under(_AnyDeal)),
}
