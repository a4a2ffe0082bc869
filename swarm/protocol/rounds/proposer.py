"""Proposer: proposes one value for a ballot, collects votes, announces the decision [C5, C6]."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.protocol.messages.events import Topic
from swarm.protocol.messages.messages import Accept, Certificate, Commit, Evidence, Hello, Propose
from swarm.protocol.messages.schemas import MAX_HOLDERS
from swarm.protocol.rounds.blobs import Blobs, Proposal
from swarm.protocol.rounds.campaign import Campaign, Stage
from swarm.protocol.rounds.contacts import Contacts
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.policies.slow_links import relays_of_body
from swarm.protocol.rounds.succession import Succession
from swarm.protocol.values.manifest import Digest, Manifest, PeerId


@dataclass(eq=False)
class Proposer(Role):
    """Proposes a manifest and collects the votes."""

    contacts: Contacts
    blobs: Blobs
    succession: Succession

    def propose(
        self, campaign: Campaign, manifest: Manifest, evidence: Evidence | None, why: str
    ) -> None:
        """Phase 2: proposes a manifest; one ballot never proposes two values [C6]."""
        assert campaign.proposal is None, "a ballot proposes once"
        campaign.proposal, campaign.evidence = manifest, evidence
        campaign.enter(Stage.VOTE, self.now)
        self.out.explain(Topic.ROUND, f"proposed height {manifest.height}: {why}")
        message = self._message(campaign, manifest)
        for peer in self._concerned(manifest):
            self.out.post(peer, message)

    def _message(self, campaign: Campaign, manifest: Manifest) -> Propose:
        relays = relays_of_body(self._uplinks(campaign))
        holders = self._holders(campaign)
        return Propose(campaign.ballot, manifest, holders, campaign.evidence, relays)

    def _uplinks(self, campaign: Campaign) -> dict[PeerId, int]:
        """Uplinks in Mbit/s of the other members that can be dialed."""
        unable = campaign.undialable | self.contacts.gone.keys() | {self.me}
        said = campaign.uplinks.items()
        return {p: mbit for p, mbit in said if p in self.tip.members and p not in unable}

    def _holders(self, campaign: Campaign) -> tuple[PeerId, ...]:
        """The newest peers that have all blobs; earlier messages have named the others."""
        return tuple(campaign.holders)[-MAX_HOLDERS:]

    def _concerned(self, manifest: Manifest) -> list[PeerId]:
        """Members before and after a manifest."""
        return sorted({**self.tip.members, **manifest.members})

    def repeat(self, campaign: Campaign, manifest: Manifest) -> None:
        """Asks for missing votes again, and greets the sources of missing values."""
        message = self._message(campaign, manifest)
        for peer in self._concerned(manifest):
            # Peers that have voted need a sign of life only now and then.
            if peer not in campaign.accepts or campaign.num_polls % 2 == 0:
                self.out.post(peer, message)
        proposal, lost_s = self.blobs.proposal, self.timers.lost_after_s(self.timers.vote_s)
        if proposal and proposal.ballot == campaign.ballot and lost_s < self.timers.vote_s:
            for source in sorted(set(self._sources(proposal).values()) - {self.me}):
                self.out.post(source, Hello(ask=True))

    def _sources(self, proposal: Proposal) -> dict[Digest, PeerId]:
        """Sources of the proposed values that this peer does not have yet."""
        entries = proposal.manifest.entries
        return {digest: entries[unit].source for digest, unit in proposal.missing.items()}

    def take(self, campaign: Campaign, source: PeerId, accept: Accept) -> bool:
        """Notes a vote; returns whether it is for the proposal."""
        if (
            campaign.stage is not Stage.VOTE
            or campaign.proposal is None
            or source not in self.standing.electorate()
            or accept.ballot != campaign.ballot
            or accept.digest != campaign.proposal.digest
        ):
            return False
        campaign.accepts[source] = accept.signature
        campaign.holders[source] = None
        return True

    def is_chosen(self, campaign: Campaign) -> bool:
        """Whether the votes decide: a majority at once, exactly half after a wait [C5].

        The half includes the tie-breaker. Without the wait, a swarm of two would have each decided
        round on one disk only. The wait takes T_vote / 2, or less if no other voter was heard for 2
        T_hb.
        """
        votes = [peer for peer in campaign.accepts if peer in self.standing.electorate()]
        if 2 * len(votes) > len(self.tip.voters):
            return True
        if not self.standing.has_quorum(votes):
            return False
        since = self.now - 2 * self.timers.heartbeat_s
        others = (peer for peer in self.standing.electorate() if peer not in campaign.accepts)
        heard = self.contacts.heard
        is_awaited = any(heard.get(peer, campaign.stage_at) >= since for peer in others)
        return not is_awaited or self.now - campaign.stage_at >= self.timers.vote_s / 2

    def decide(self, campaign: Campaign) -> None:
        """Announces the decision to old and new members, including this peer [C5]."""
        manifest = campaign.proposal
        assert manifest is not None
        campaign.enter(Stage.DECIDED, self.now)
        signatures = {peer: campaign.accepts[peer] for peer in self._signers(campaign)}
        self.out.explain(
            Topic.ROUND,
            f"height {manifest.height} decided with {len(campaign.accepts)} of "
            f"{len(self.tip.voters)} votes under attempt {campaign.ballot.attempt}",
        )
        commit = Commit(manifest, Certificate(campaign.ballot, signatures), self.tip)
        for peer in self._concerned(manifest):
            self.out.post(peer, commit)
            # A peer whose vote is still in flight seems behind, but has just been sent the tip.
            self.contacts.told[peer, manifest.digest] = self.now

    def _signers(self, campaign: Campaign) -> list[PeerId]:
        """As few voters as form a quorum, so that certificates stay small."""
        votes = sorted(peer for peer in campaign.accepts if peer in self.standing.electorate())
        return votes[: len(self.tip.voters) // 2 + 1]

    def give_up(self, campaign: Campaign) -> dict[PeerId, str] | None:
        """Peers that the next attempt excludes, if blobs are still missing after T_vote [C6].

        The wait is shorter if all peers that have the blobs failed to give them. It is also shorter
        if nothing arrives any more and all these peers refuse messages, or all are silent. The
        peers that have a blob are its source and all peers that voted for the proposal.
        """
        proposal = self.blobs.proposal
        if proposal is None or not proposal.missing or proposal.ballot != campaign.ballot:
            return None
        if self.succession.is_out_of_attempts():
            return None
        age_s = self.now - campaign.stage_at
        limit_s = self._voting_limit_s(campaign, proposal)
        if age_s < limit_s:
            return None
        excluded = dict(campaign.excluded)
        for digest, source in self._sources(proposal).items():
            if source != self.me:
                unit = proposal.missing[digest]
                excluded[source] = f"{unit} ({digest[:12]}) could not be fetched from it"
        self.out.explain(
            Topic.TAKEOVER,
            f"attempt {campaign.ballot.attempt} given up: {len(proposal.missing)} blobs of its "
            f"proposal still missing after {age_s:.1f} s (limit {limit_s:.1f})",
        )
        return excluded

    def _voting_limit_s(self, campaign: Campaign, proposal: Proposal) -> float:
        """How long this peer waits for the blobs of its proposal."""
        voted = campaign.holders.keys() - {self.me}
        having = {d: {source, *voted} for d, source in self._sources(proposal).items()}
        have_failed = all(peers <= proposal.failed.get(d, set()) for d, peers in having.items())
        limit_s = self.timers.vote_s / 2 if have_failed else self.timers.vote_s
        if self.now - proposal.progress_at < self.timers.grace_s:
            return limit_s
        anybody = set[PeerId]().union(*having.values())
        if self.contacts.gone.keys() >= anybody:
            return self.timers.grace_s
        lost_s = self.timers.lost_after_s(self.timers.vote_s)
        if all(self._is_silent(peer, proposal.since, lost_s) for peer in anybody):
            return min(limit_s, lost_s)
        return limit_s

    def _is_silent(self, peer: PeerId, since: float, limit_s: float) -> bool:
        """Whether another peer, asked at `since`, was not heard for `limit_s` after that."""
        heard_at = max(since, self.contacts.heard.get(peer, since))
        return peer != self.me and self.now - heard_at >= limit_s
