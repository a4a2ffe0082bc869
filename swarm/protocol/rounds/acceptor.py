"""Acceptor: promises and votes, each durable before it is sent [A1, A2, P1, P2]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.protocol.messages import messages
from swarm.protocol.messages.events import Purpose, Unobtainable
from swarm.protocol.rounds.blobs import Blobs, Proposal
from swarm.protocol.rounds.contributor import Contributor
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.merger import Merger
from swarm.protocol.rounds.policies.checks import proposal_problem
from swarm.protocol.rounds.succession import Succession
from swarm.protocol.values.manifest import Manifest, PeerId
from swarm.protocol.values.updates import REFUSALS

LEAP = 1024
"""How many attempts others may have made without this peer, which is over an hour of continuous
takeovers. A peer that was away for longer believes a higher attempt once a second member names
it."""


def attempt_problem(
    ballot: messages.Ballot,
    source: PeerId,
    claims: Mapping[PeerId, int],
    *,
    passed_s: float,
    takeover_s: float,
) -> str | None:
    """Why takeovers cannot have led to a ballot's attempt, or None.

    The attempt may exceed the highest attempt that another member named by `LEAP`, plus the number
    of takeovers that were possible since this peer reached this height. The sender's own earlier
    claims do not count. So a liar raises attempts by at most `LEAP` for each takeover by an honest
    member, and needs half a year to reach attempt 2^31 at one height.

    Args:
        ballot: ballot of a message.
        source: the member that sent it.
        claims: the highest attempt that each member has named at this height, whether believed or
            not.
        passed_s: time since this peer applied the tip, or started.
        takeover_s: the least time between two attempts.
    """
    others = max((attempt for peer, attempt in claims.items() if peer != source), default=0)
    limit = min(others + LEAP + int(passed_s / takeover_s), messages.MAX_ATTEMPT)
    if ballot.attempt <= limit:
        return None
    return (
        f"attempt {ballot.attempt} is implausible: no other member has named more than {others} "
        f"in {passed_s:.0f} s (limit {limit})"
    )


MAX_PROPOSALS = 2
"""How many different proposals of one convener in a row a member takes up at one height (convener
turns). The second proposal may leave out sources whose blobs the first one lacked [C6]."""


@dataclass(eq=False)
class Acceptor(Role):
    """Votes on proposals. Members without a vote fetch proposals too, but send no ACCEPT."""

    blobs: Blobs
    succession: Succession
    contributor: Contributor
    merger: Merger

    def _ballot_problem(self, source: PeerId, ballot: messages.Ballot) -> str | None:
        """Why a ballot is invalid: only voters convene, in their own name, and rank 0 attempt 0."""
        if ballot.convener != source:
            return f"its ballot belongs to {ballot.convener}"
        if source not in self.standing.electorate():
            return "its sender has no vote"
        if ballot.attempt < 1 and (ballot.attempt < 0 or source != self.tip.order[0]):
            return f"attempt {ballot.attempt} is not its sender's"
        if self._is_distrusted(source):
            return "it has proposed at this height what cannot follow the tip"
        return self.attempt_problem(source, ballot) or self.turn_problem(source, ballot)

    def turn_problem(self, source: PeerId, ballot: messages.Ballot) -> str | None:
        """Why `source` must let others convene first: its proposals led to no decision.

        Policy: convener turns.

        Without this rule, a convener that collects votes and never announces a decision could
        always return before its successors, and block the height for ever.
        """
        had = self._what_it_had(source)
        if source == self.me or had is None or ballot.attempt <= had[0]:
            return None
        # If another peer convenes, that peer has its turn (takeover). If `source` still convenes,
        # each of the other voters has a turn first.
        places = 1 if self.succession.convener != source else len(self.standing.electorate())
        limit_s = self.timers.heartbeat_s * (1 + places)
        if self.now - self.succession.convener_at > limit_s:
            return None
        self.succession.passed_over = max(self.succession.passed_over, ballot.attempt)
        return f"{had[1]}: others convene next"

    def _what_it_had(self, convener: PeerId) -> tuple[int, str] | None:
        """The attempt that counts as a convener's turn at this height, and why; or None."""
        vote = self.standing.record.accepted
        if vote and vote.ballot.convener == convener:
            return vote.ballot.attempt, f"its attempt {vote.ballot.attempt} had this peer's vote"
        reign = self.succession.reign
        if self.succession.convener == convener and len(reign.proposals) >= MAX_PROPOSALS:
            return reign.last_attempt, f"{len(reign.proposals)} proposals of it came to nothing"
        return None

    def attempt_problem(self, source: PeerId, ballot: messages.Ballot) -> str | None:
        """Why an attempt that a member names is not believed, or None. Notes the claim in any case.

        Policy: attempt limit.
        """
        if source == self.me:
            return None
        claims = self.succession.claims
        claims[source] = max(ballot.attempt, claims.get(source, 0))
        return attempt_problem(
            ballot,
            source,
            claims,
            passed_s=self.now - self.standing.applied_at,
            takeover_s=self.timers.poll_s,
        )

    def _is_distrusted(self, convener: PeerId) -> bool:
        """Whether a convener is no longer followed at this height [A4].

        Members that ignore a convener replace it like a silent one, however often it asks
        (takeover). Withholding a promise is always safe.
        """
        return convener in self.succession.distrusted

    def hear_convener(self, source: PeerId, what: str, ballot: messages.Ballot) -> bool:
        """Whether to handle a convener's message. An overtaken one gets this peer's promise."""
        problem = self._ballot_problem(source, ballot)
        if problem:
            self.out.refuse(source, what, problem)
            return False
        if not self._may_follow(ballot):
            self.out.post(source, self.contributor.ready(self.standing.promised()))
            return False
        self.succession.note_ballot(ballot)
        if ballot == self.succession.top:
            self.succession.convener_at = self.now
        return True

    def _may_follow(self, ballot: messages.Ballot) -> bool:
        """Whether this peer has promised no higher ballot [A1, A2]."""
        promised = self.standing.record.promised
        return promised is None or ballot >= promised

    def on_prepare(self, source: PeerId, prepare: messages.Prepare) -> None:
        """Promises and answers with offer and vote [A1]."""
        ballot = prepare.ballot
        if not self.hear_convener(source, "PREPARE", ballot):
            return
        if ballot == self.succession.top:
            # The convener itself limits how long it collects (campaign end).
            self.succession.collected_at = self.now
        if self.standing.may_vote():
            if ballot.attempt >= 1 and ballot != self.standing.record.promised:
                self.standing.persist_promise(ballot)
            self.out.post(source, self.contributor.ready(ballot))
        elif self.standing.is_member:
            # A member that abstains, or has no vote, still contributes. It answers with attempt 0,
            # which promises nothing.
            self.out.post(source, self.contributor.ready(messages.Ballot(0, self.tip.order[0])))

    def on_propose(self, source: PeerId, propose: messages.Propose) -> None:
        """Starts to fetch the proposal; a repeated proposal gets the same vote again [A2]."""
        ballot, manifest = propose.ballot, propose.manifest
        if not self.hear_convener(source, "PROPOSE", ballot):
            return
        if self._has_accepted(ballot, manifest):
            self.out.post(source, self.standing.signed_accept(ballot, manifest.digest))
            return
        if self._voted_otherwise(ballot):
            self._refuse_second_value(source, ballot)
            return
        running = self.blobs.proposal
        if running and ballot < running.ballot:
            return
        if running and running.manifest.digest == manifest.digest:
            running.ballot = ballot
            self._add_holders(running, propose.holders)
        else:
            # This peer has composed its own proposal just now, or checked it before it voted for it
            # [C2].
            is_own = source == self.me
            problem = None if is_own else self.proposal_problem(manifest, propose.evidence)
            if problem:
                self.out.refuse(source, "PROPOSE", f"manifest {manifest.digest[:12]}: {problem}")
                self.succession.distrusted.add(source)
                return
            self._take_up(propose)
        self.pursue()

    def _has_accepted(self, ballot: messages.Ballot, manifest: Manifest) -> bool:
        """Whether this peer has cast exactly this vote, which it repeats on request [A2]."""
        vote = self.standing.record.accepted
        return vote is not None and (vote.ballot, vote.manifest.digest) == (ballot, manifest.digest)

    def _voted_otherwise(self, ballot: messages.Ballot) -> bool:
        """Whether this peer voted for another value under this ballot, which may have only one."""
        vote = self.standing.record.accepted
        return vote is not None and vote.ballot == ballot

    def _refuse_second_value(self, convener: PeerId, ballot: messages.Ballot) -> None:
        """Stops following a convener that proposed two values, which may have split the votes [A4].

        An honest convener never proposes two values under one ballot [P3, C6].
        """
        self.out.refuse(convener, "PROPOSE", f"a second value under attempt {ballot.attempt}")
        self.succession.distrusted.add(convener)

    def proposal_problem(
        self, manifest: Manifest, evidence: messages.Evidence | None
    ) -> str | None:
        """Why a manifest does not follow from the tip and its evidence [H1, A6] (merge manifests).

        Merged values are not checked.
        """
        due = self.standing.is_due(self.tip)
        return proposal_problem(manifest, evidence, self.tip, self.rules, due=due)

    def _take_up(self, propose: messages.Propose) -> None:
        reign = self.succession.reign
        reign.proposals.add(propose.manifest.digest)
        reign.last_attempt = propose.ballot.attempt
        self.blobs.cancel_fetch(Purpose.PROPOSAL, self.blobs.proposal)
        self.blobs.proposal = Proposal(
            propose.manifest,
            self.blobs.lacking(propose.manifest),
            propose.holders,
            moves=self.blobs.moves_of(propose.manifest),
            since=self.now,
            progress_at=self.now,
            ballot=propose.ballot,
            evidence=propose.evidence,
        )

    def _add_holders(self, proposal: Proposal, holders: tuple[PeerId, ...]) -> None:
        """Adds peers that now have all blobs. Without a new peer the fetch does not change."""
        new = [peer for peer in holders if peer not in proposal.sources]
        idle_s = self.now - proposal.progress_at
        if new and (proposal.failed or idle_s > self.timers.heartbeat_s):
            proposal.sources = (*new, *proposal.sources)
            proposal.is_fetching = False

    def pursue(self) -> None:
        """Continues towards a vote on the proposal, if there is one."""
        proposal = self.blobs.proposal
        if proposal is None:
            return
        if self._may_accept(proposal):
            self._vote(proposal)
        elif self.blobs.is_complete(proposal):
            self.blobs.start_sync(proposal)
        elif not (
            proposal.is_fetching
            or self._is_caught_up(proposal)
            or self.merger.awaits_own_merge(proposal)
        ):
            self.blobs.start_fetch(Purpose.PROPOSAL, proposal, [proposal.ballot.convener])

    def _is_caught_up(self, proposal: Proposal) -> bool:
        """Whether the proposed manifest is already being fetched as a decided one."""
        digest = proposal.manifest.digest
        return self.blobs.catch_up is not None and self.blobs.catch_up.manifest.digest == digest

    def _may_accept(self, proposal: Proposal) -> bool:
        """Whether a vote may be cast: all blobs durable, no higher ballot promised [A2, P2]."""
        return (
            self.standing.may_vote()
            and self._may_follow(proposal.ballot)
            and self.blobs.is_complete(proposal)
            and proposal.manifest.digest in self.blobs.synced
        )

    def _vote(self, proposal: Proposal) -> None:
        """Makes the vote durable, then sends it [P2]."""
        ballot, manifest = proposal.ballot, proposal.manifest
        self.standing.persist_accepted(messages.Accepted(ballot, manifest, proposal.evidence))
        self.blobs.proposal = None
        self.out.post(ballot.convener, self.standing.signed_accept(ballot, manifest.digest))

    def judge_proposer(self, event: Unobtainable) -> None:
        """Stops following a convener whose own proposed value is refused [A4] (update bounds)."""
        proposal = self.blobs.proposal
        if proposal is None or event.reason not in REFUSALS:
            return
        unit, convener = proposal.missing.get(event.digest), proposal.ballot.convener
        if unit and proposal.manifest.entries[unit].source == convener:
            self.out.refuse(convener, "PROPOSE", f"its value of {unit}: {event.reason}")
            self.succession.distrusted.add(convener)
