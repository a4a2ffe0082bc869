"""Convener, second half: results, proposal, votes, announcement, and when it ends [C4-C7]."""

from __future__ import annotations

from swarm.protocol.events import Topic
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.messages import (
    MAX_ATTEMPT,
    Accept,
    Ballot,
    Certificate,
    Commit,
    Evidence,
    Prepare,
    Propose,
    Reduced,
    Report,
)
from swarm.protocol.rounds.campaign import Campaign, Stage
from swarm.protocol.rounds.collector import Collector
from swarm.protocol.rounds.evidence import Brought, compose_from, newest_results
from swarm.protocol.rounds.state import Proposal
from swarm.protocol.schemas import MAX_HOLDERS
from swarm.protocol.updates import REFUSALS


class Convener(Collector):
    """Leads one attempt to decide the next manifest."""

    # ------------------------------------------------------------ reducing

    def _advance_campaign(self) -> None:
        campaign = self._campaign
        if campaign is None:
            return
        if campaign.stage is Stage.COLLECT:
            self._advance_collecting(campaign)
        elif campaign.stage is Stage.REDUCE:
            self._advance_reducing(campaign)
        elif campaign.stage is Stage.VOTE and self._is_chosen(campaign):
            self._decide(campaign)

    def _on_reduced(self, source: PeerId, reduced: Reduced) -> None:
        campaign = self._campaign
        if campaign is None or not self._is_result_of_roster(campaign, reduced):
            return
        plan = campaign.plan
        assert plan is not None
        for unit, result in reduced.results.items():
            if plan.reducers.get(unit) != source:
                self._refuse(source, "REDUCED", f"the reducer of {unit} is another peer")
            elif result.num_bytes != self.rules.unit_bytes[unit]:
                self._refuse(source, "REDUCED", f"{unit} has {result.num_bytes} bytes")
            else:
                campaign.results[unit] = result
        report = Report(source, reduced.results, reduced.signature)
        known = campaign.reports.get(source, ())
        campaign.reports[source] = newest_results((report, *known), plan, self.rules)
        campaign.reported_at[source] = self._now
        campaign.missing[source] = dict(reduced.missing)
        self._advance_campaign()

    def _is_result_of_roster(self, campaign: Campaign, reduced: Reduced) -> bool:
        """Whether a result belongs to the roster that is out: one roster per manifest [C3]."""
        return (
            campaign.stage is Stage.REDUCE
            and campaign.plan is not None
            and reduced.ballot == campaign.ballot
            and reduced.roster_id == campaign.plan.roster_id
        )

    def _advance_reducing(self, campaign: Campaign) -> None:
        plan = campaign.plan
        if plan is None or any(unit not in campaign.results for unit in plan.reducers):
            return
        evidence = Evidence(
            campaign.grounds.shown(self.tip),
            plan.able,
            plan.roster_id,
            tuple(report for _, each in sorted(campaign.reports.items()) for report in each),
        )
        brought = Brought(campaign.leaving, campaign.invitations)
        manifest = compose_from(self.tip, plan, evidence, brought, self.rules)
        why = (
            f"{len(plan.sources)} units of {len(plan.offers)} peers, "
            f"{len(plan.reducers)} averaged in {self._now - campaign.stage_at:.1f} s"
        )
        self._propose(campaign, manifest, evidence, why)

    def _tick_reducing(self, campaign: Campaign) -> None:
        """A new roster without those that hold the round up, once T_red is over [C4].

        What is held up by peers that are gone is not waited for so long.
        """
        age_s = self._now - campaign.stage_at
        self._exclude(campaign, self._refused_values(campaign), 0.0)
        if campaign.stage is not Stage.REDUCE:
            return
        limit_s, grace_s = self.timers.reduce_s * (1 + campaign.extensions), self.timers.grace_s
        if age_s < limit_s:
            if age_s >= grace_s:
                self._exclude(campaign, self._gone_that_are_missed(campaign), grace_s)
            return
        bad = self._whom_to_exclude(campaign)
        if bad:
            self._exclude(campaign, bad, limit_s)
        elif not self._relieve(campaign):
            campaign.extensions += 1

    def _exclude(self, campaign: Campaign, bad: dict[PeerId, str], limit_s: float) -> None:
        """Begins a new roster without these peers; goes on as before if there are none."""
        if not bad:
            return
        age_s = self._now - campaign.stage_at
        campaign.excluded |= bad
        campaign.setbacks += any(peer not in self._electorate() for peer in bad)
        for peer, why in bad.items():
            self._explain(
                Topic.ROUND,
                f"peer {peer} left out after {age_s:.1f} s (limit {limit_s:.1f}): {why}",
            )
        campaign.enter(Stage.COLLECT, self._now)
        self._advance_campaign()

    def _refused_values(self, campaign: Campaign) -> dict[PeerId, str]:
        """Whose values came and were refused: waiting makes no other of them [C4, U1]."""
        assert campaign.plan is not None
        return {
            peer: f"{reporter} refuses its values: {why}"
            for reporter in sorted(self._late_reducers(campaign) & campaign.missing.keys())
            for peer, why in sorted(campaign.missing[reporter].items())
            if why in REFUSALS and peer in campaign.plan.offers and peer != self.me
        }

    def _gone_that_are_missed(self, campaign: Campaign) -> dict[PeerId, str]:
        """Whom the round waits for in vain: their machines refuse messages."""
        late = self._late_reducers(campaign)
        reported = (campaign.missing.get(reporter, {}) for reporter in late)
        missed = late.union(*reported) & self._gone
        return dict.fromkeys(sorted(missed), "it is gone")

    def _late_reducers(self, campaign: Campaign) -> set[PeerId]:
        """Reducers whose results are not here yet."""
        assert campaign.plan is not None
        reducers = campaign.plan.reducers.items()
        return {peer for unit, peer in reducers if unit not in campaign.results}

    def _relieve(self, campaign: Campaign) -> bool:
        """Gives the units of reducers that are there, but stuck, to others; once a campaign [C4].

        Two peers that do not reach each other are no reason to drop the work of either: others
        reach both.
        """
        plan, stuck = campaign.plan, self._late_reducers(campaign)
        assert plan is not None
        if campaign.relieved or not set(plan.able) - stuck:
            return False
        campaign.relieved = stuck
        names = ", ".join(sorted(stuck))
        self._explain(Topic.ROUND, f"others reduce instead of {names}: no results in time")
        campaign.enter(Stage.COLLECT, self._now)
        self._advance_campaign()
        return True

    def _whom_to_exclude(self, campaign: Campaign) -> dict[PeerId, str]:
        """Contributors reported missing and reducers that are silent, with the reason [C4]."""
        plan = campaign.plan
        assert plan is not None
        late = self._late_reducers(campaign)
        bad: dict[PeerId, str] = {}
        for reducer in sorted(late - {self.me}):
            reported_at = campaign.reported_at.get(reducer)
            if reported_at is None or self._now - reported_at > self.timers.reduce_s / 2:
                bad[reducer] = "it is silent as a reducer"
        for reporter in sorted(late & campaign.missing.keys()):
            for peer, why in sorted(campaign.missing[reporter].items()):
                if peer == self.me:
                    bad[reporter] = f"it cannot fetch from the convener: {why}"
                elif peer in plan.offers:
                    bad.setdefault(peer, f"{reporter} cannot fetch from it: {why}")
        if not bad and campaign.extensions:
            bad = dict.fromkeys(sorted(late - {self.me}), "its results are late")
        return bad

    # ------------------------------------------------------------ voting

    def _propose(
        self, campaign: Campaign, manifest: Manifest, evidence: Evidence | None, why: str
    ) -> None:
        """Phase 2; one ballot never proposes two values [C6]."""
        assert campaign.proposal is None, "a ballot proposes once"
        campaign.proposal, campaign.evidence = manifest, evidence
        campaign.enter(Stage.VOTE, self._now)
        self._explain(Topic.ROUND, f"proposed height {manifest.height}: {why}")
        message = Propose(campaign.ballot, manifest, self._holders(campaign), evidence)
        for peer in self._concerned(manifest):
            self._post(peer, message)

    def _holders(self, campaign: Campaign) -> tuple[PeerId, ...]:
        """The last that said that they have everything: earlier messages have named the others."""
        return tuple(campaign.holders)[-MAX_HOLDERS:]

    def _concerned(self, manifest: Manifest) -> list[PeerId]:
        """Members before and after a manifest."""
        return sorted({**self.tip.members, **manifest.members})

    def _on_accept(self, source: PeerId, accept: Accept) -> None:
        campaign = self._campaign
        if (
            campaign is None
            or campaign.stage is not Stage.VOTE
            or campaign.proposal is None
            or source not in self._electorate()
            or accept.ballot != campaign.ballot
            or accept.digest != campaign.proposal.digest
        ):
            return
        campaign.accepts[source] = accept.signature
        campaign.holders[source] = None
        self._advance_campaign()

    def _is_chosen(self, campaign: Campaign) -> bool:
        """A majority decides at once, half with the tie-breaker after a grace [C5].

        The grace keeps a swarm of two from deciding every round on one disk. It lasts T_vote / 2,
        or until none of the others has been heard for as long as a convener may be deaf.
        """
        votes = [peer for peer in campaign.accepts if peer in self._electorate()]
        if 2 * len(votes) > len(self.tip.voters):
            return True
        if not self._has_quorum(votes):
            return False
        since = self._now - 2 * self.timers.heartbeat_s
        others = (peer for peer in self._electorate() if peer not in campaign.accepts)
        is_awaited = any(self._heard.get(peer, campaign.stage_at) >= since for peer in others)
        return not is_awaited or self._now - campaign.stage_at >= self.timers.vote_s / 2

    def _decide(self, campaign: Campaign) -> None:
        """Announces the decision to old and new members, this peer among them [C5]."""
        manifest = campaign.proposal
        assert manifest is not None
        campaign.enter(Stage.DECIDED, self._now)
        signatures = {peer: campaign.accepts[peer] for peer in self._signers(campaign)}
        self._explain(
            Topic.ROUND,
            f"height {manifest.height} decided with {len(campaign.accepts)} of "
            f"{len(self.tip.voters)} votes under attempt {campaign.ballot.attempt}",
        )
        commit = Commit(manifest, Certificate(campaign.ballot, signatures), self.tip)
        for peer in self._concerned(manifest):
            self._post(peer, commit)
            # Votes that are still under way show a peer behind that has just been told.
            self._told[peer, manifest.digest] = self._now

    def _signers(self, campaign: Campaign) -> list[PeerId]:
        """A smallest quorum among the votes, so that certificates stay small."""
        votes = sorted(peer for peer in campaign.accepts if peer in self._electorate())
        return votes[: len(self.tip.voters) // 2 + 1]

    def _tick_voting(self, campaign: Campaign) -> None:
        """Blobs are missing here and T_vote is over: start anew without their sources [C6].

        It is over sooner when the sources have failed, or are gone and nothing arrives any more.
        """
        proposal = self._proposal
        if proposal is None or not proposal.missing or proposal.ballot != campaign.ballot:
            return
        if self._is_out_of_attempts():
            return
        age_s = self._now - campaign.stage_at
        limit_s = self._voting_limit_s(proposal)
        if age_s < limit_s:
            return
        excluded = dict(campaign.excluded)
        for digest, unit in proposal.missing.items():
            source = proposal.manifest.entries[unit].source
            if source != self.me:
                excluded[source] = f"{unit} ({digest[:12]}) could not be fetched from it"
        self._explain(
            Topic.TAKEOVER,
            f"attempt {campaign.ballot.attempt} given up: {len(proposal.missing)} blobs of its "
            f"proposal still missing after {age_s:.1f} s (limit {limit_s:.1f})",
        )
        self._start_campaign(self._next_ballot(), excluded)

    def _voting_limit_s(self, proposal: Proposal) -> float:
        """How long this peer waits for the blobs of what it has proposed."""
        sources = {
            digest: proposal.manifest.entries[unit].source
            for digest, unit in proposal.missing.items()
        }
        is_still = self._now - proposal.progress_at >= self.timers.grace_s
        if is_still and self._gone.issuperset(sources.values()):
            return self.timers.grace_s
        have_failed = all(
            source in proposal.failed.get(digest, ()) for digest, source in sources.items()
        )
        return self.timers.vote_s / 2 if have_failed else self.timers.vote_s

    def _is_out_of_attempts(self) -> bool:
        """Whether there is no higher ballot at this height: nobody would believe one [A5]."""
        return max(self._promised(), self._top or self._promised()).attempt >= MAX_ATTEMPT

    def _next_ballot(self) -> Ballot:
        """Higher than everything seen or promised at this height [K1]."""
        highest = max(self._promised(), self._top or self._promised())
        return Ballot(max(highest.attempt, self._passed_over) + 1, self.me)

    # ------------------------------------------------------------ time

    def _tick_campaign(self) -> None:
        campaign = self._campaign
        if campaign is None:
            return
        deaf = self._why_deaf(campaign)
        reason = deaf or self._why_step_down(campaign)
        if reason:
            self._was_deaf = deaf is not None
            self._step_down(reason)
            return
        if self._now >= campaign.next_poll:
            # From when it was due: from now on, each would come a tick later than the one before.
            campaign.next_poll = max(campaign.next_poll, self._now - self.timers.tick_s)
            campaign.next_poll += self.timers.poll_s
            campaign.num_polls += 1
            self._poll(campaign)
        if campaign.stage is Stage.REDUCE:
            self._tick_reducing(campaign)
        elif campaign.stage is Stage.VOTE:
            self._advance_campaign()
            if campaign.stage is Stage.VOTE:
                self._tick_voting(campaign)
        else:
            self._advance_campaign()

    def _poll(self, campaign: Campaign) -> None:
        """Repeats the stage's message, as a question and as heartbeat."""
        self._convener_at = self._now
        if campaign.stage is Stage.COLLECT:
            self._broadcast(Prepare(campaign.ballot))
        elif campaign.stage is Stage.REDUCE:
            self._poll_reducers(campaign)
        elif campaign.stage is Stage.VOTE and campaign.proposal:
            message = Propose(
                campaign.ballot, campaign.proposal, self._holders(campaign), campaign.evidence
            )
            for peer in self._concerned(campaign.proposal):
                # Those that have voted need a sign of life only now and then.
                if peer not in campaign.accepts or campaign.num_polls % 2 == 0:
                    self._post(peer, message)

    def _poll_reducers(self, campaign: Campaign) -> None:
        plan = campaign.plan
        assert plan is not None
        late = self._late_reducers(campaign)
        full, heartbeat = self._roster(campaign), self._roster(campaign, is_heartbeat=True)
        for peer in self.tip.members:
            if peer in late:
                self._post(peer, full)
            elif peer != self.me:
                self._post(peer, heartbeat)

    def _why_step_down(self, campaign: Campaign) -> str | None:
        """Why a campaign has no prospect: overtaken or too old [C7]."""
        attempt = campaign.ballot.attempt
        if self._top and self._top > campaign.ballot:
            return f"overtaken by attempt {self._top.attempt} of {self._top.convener}"
        if campaign.stage is Stage.DECIDED and self._catch_up is None:
            return "what was decided gave way to a better manifest, which could not be fetched"
        age_s = self._now - max(campaign.started_at, campaign.awaited_at)
        limit_s = self.timers.attempt_limit_s(attempt)
        if age_s > limit_s and not self._decides_alone:
            return f"attempt {attempt} took {age_s:.1f} s (limit {limit_s:.1f})"
        return None

    def _why_deaf(self, campaign: Campaign) -> str | None:
        """Why a campaign cannot hear enough to succeed; None when it may [C7]."""
        limit_s = 2 * self.timers.heartbeat_s
        if self._decides_alone or self._now - campaign.started_at <= limit_s:
            return None
        if campaign.stage is Stage.VOTE and self._has_quorum([self.me]):
            return None  # its own vote decides, after a grace that may be longer [C5]
        if not self._hears_quorum(limit_s):
            return f"no quorum was heard for {limit_s:.1f} s"
        since = self._now - limit_s
        if campaign.stage is Stage.COLLECT and not self._answers_suffice(campaign, since):
            answered = sum(at >= since for at in campaign.answered_at.values())
            return f"only {answered} answers within {limit_s:.1f} s, no quorum"
        return None

    def _answers_suffice(self, campaign: Campaign, since: float) -> bool:
        """Whether a quorum answered lately; an almost deaf convener must not hold an attempt."""
        recent = [peer for peer, at in campaign.answered_at.items() if at >= since]
        return self._has_quorum([self.me, *recent])

    def _step_down(self, reason: str) -> None:
        self._campaign = None
        self._convener_at = self._now
        self._explain(Topic.TAKEOVER, f"stepped down: {reason}")
