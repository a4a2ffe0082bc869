"""Convener: leads one attempt from its ballot to its end [C1, C2, C5, C6].

Policies: roster deadline, roster repair, campaign end.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.protocol.messages.events import Topic
from swarm.protocol.messages.messages import Accept, Ballot, Hello, Message, Prepare, Ready, Reduced
from swarm.protocol.rounds.acceptor import Acceptor
from swarm.protocol.rounds.averaging import Averaging
from swarm.protocol.rounds.campaign import Campaign, Stage, Value
from swarm.protocol.rounds.collector import Collector
from swarm.protocol.rounds.contacts import Contacts
from swarm.protocol.rounds.contributor import Contributor
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.merger import Merger
from swarm.protocol.rounds.phase1 import Phase1
from swarm.protocol.rounds.proposer import Proposer
from swarm.protocol.rounds.succession import Succession
from swarm.protocol.rounds.withholding import Withholding
from swarm.protocol.values.manifest import PeerId

SLACK, LONGEST = 1.25, 2.5
"""A roster's slowest link gets SLACK times its predicted time, but at most LONGEST x T_red, since
other peers allow an attempt three times T_red."""


@dataclass(eq=False)
class Convener(Role):
    """Takes a campaign through its stages: collect, reduce, vote, decided."""

    contacts: Contacts
    succession: Succession
    contributor: Contributor
    acceptor: Acceptor
    merger: Merger
    phase1: Phase1
    collector: Collector
    averaging: Averaging
    proposer: Proposer
    withholding: Withholding

    def _burn_ballot(self, ballot: Ballot) -> None:
        """Makes a ballot durable before its first message, so that it is never used twice [P3]."""
        self.standing.persist_promise(ballot)

    def start(self, ballot: Ballot, excluded: dict[PeerId, str]) -> None:
        """Begins a campaign under a new ballot, without the offers of excluded peers.

        Peers that withheld their values from earlier rounds are excluded too (withholding
        exclusion).
        """
        withheld = self.withholding.left_out()
        succession = self.succession
        succession.campaign = None
        self._burn_ballot(ballot)
        succession.claims[self.me] = ballot.attempt
        succession.note_ballot(ballot)
        succession.convener_at = self.now
        excluded = {**withheld, **excluded}
        campaign = Campaign(ballot, self.now, self.now + self.timers.poll_s, excluded)
        for peer, why in withheld.items():
            self.out.explain(Topic.ROUND, f"peer {peer} left out: {why}")
        campaign.enter(Stage.COLLECT, self.now)
        succession.campaign = campaign
        if ballot.attempt == 0:
            # Some offers may have arrived before the campaign [C1]; polls ask for the others.
            for peer, ready in self.contacts.readies.items():
                self._take_ready(campaign, peer, ready)
        else:
            self._broadcast(Prepare(ballot))
        self.out.post(self.me, self.contributor.ready(ballot))

    def _broadcast(self, message: Message) -> None:
        for peer in self.tip.members:
            if peer != self.me:
                self.out.post(peer, message)

    def on_ready(self, source: PeerId, ready: Ready) -> None:
        """Takes a peer's READY into the campaign; without a campaign, keeps it for one."""
        campaign = self.succession.campaign
        if source in self.standing.electorate() and (
            problem := self.acceptor.attempt_problem(source, ready.ballot)
        ):
            self.out.refuse(source, "READY", problem)
            return
        if campaign is None:
            self.contacts.keep_ready(source, ready)
            self._redirect(source, ready)
            if source in self.standing.electorate() and ready.ballot.attempt >= 1:
                self.succession.note_ballot(ready.ballot)
            return
        if source in self.standing.electorate() and ready.ballot > campaign.ballot:
            # A ballot out of turn replaces no campaign (convener turns).
            if not self.acceptor.turn_problem(ready.ballot.convener, ready.ballot):
                self.succession.note_ballot(ready.ballot)
            return
        self._take_ready(campaign, source, ready)
        self.advance()

    def _take_ready(self, campaign: Campaign, source: PeerId, ready: Ready) -> None:
        if self.collector.take(campaign, source, ready):
            self.phase1.take(campaign, source, ready)

    def _redirect(self, source: PeerId, ready: Ready) -> None:
        """Sends the higher ballot to a peer that believes this peer to be the convener."""
        promised = self.standing.promised()
        if source != self.me and promised > ready.ballot:
            self.out.post(source, self.contributor.ready(promised))

    def on_reduced(self, source: PeerId, reduced: Reduced) -> None:
        """Takes the results of a reducer."""
        campaign = self.succession.campaign
        if campaign and self.averaging.take(campaign, source, reduced):
            self._exclude_refused(campaign)
            self.advance()

    def on_accept(self, source: PeerId, accept: Accept) -> None:
        """Takes a vote."""
        campaign = self.succession.campaign
        if campaign and self.proposer.take(campaign, source, accept):
            self.advance()

    def advance(self) -> None:
        """Advances the campaign, if there is one, through as many stages as possible."""
        campaign = self.succession.campaign
        if campaign is None:
            return
        value = None
        if campaign.stage is Stage.COLLECT:
            value = self._collected(campaign)
        if campaign.stage is Stage.REDUCE:
            value = self.averaging.composed(campaign)
        if value:
            self.proposer.propose(campaign, value.manifest, value.evidence, value.why)
        elif campaign.stage is Stage.VOTE and self.proposer.is_chosen(campaign):
            self.proposer.decide(campaign)

    def _collected(self, campaign: Campaign) -> Value | None:
        """A value that needs no roster. If there is none, closes the roster if due."""
        promises = self.phase1.promises(campaign)
        if promises is None:
            return None
        value = self.phase1.voted_before(campaign, promises)
        if value:
            return value
        if self.standing.is_due(self.tip):
            return self.merger.composed()
        self.collector.close_if_due(campaign)
        return None

    def tick(self) -> None:
        """Polls, stops waiting for overdue answers, and ends a campaign that cannot succeed."""
        campaign = self.succession.campaign
        if campaign is None:
            return
        deaf = self._why_deaf(campaign)
        reason = deaf or self.succession.why_step_down(campaign)
        if reason:
            self.succession.was_deaf = deaf is not None
            self.succession.step_down(reason)
            return
        if self.now >= campaign.next_poll:
            # The next poll is due one period after this poll was due, not after now. Otherwise the
            # delays of polls would add up.
            campaign.next_poll = max(campaign.next_poll, self.now - self.timers.tick_s)
            campaign.next_poll += self.timers.poll_s
            campaign.num_polls += 1
            self._poll(campaign)
        if campaign.stage is Stage.REDUCE:
            self._tick_reducing(campaign)
        elif campaign.stage is Stage.VOTE:
            self.advance()
            excluded = self.proposer.give_up(campaign) if campaign.stage is Stage.VOTE else None
            if excluded is not None:
                self.withholding.suspect(excluded.keys() - campaign.excluded, campaign.offers)
                self.start(self.succession.next_ballot(), excluded)
        else:
            self.advance()

    def _tick_reducing(self, campaign: Campaign) -> None:
        """Begins a new roster without the peers that delay the round, once T_red is over.

        Policy: roster repair.

        The limit is longer than T_red if a link of the roster is known to need more time (slow-link
        exclusion). It is shorter for late reducers, or sources of missing values, that are silent
        or refuse messages.
        """
        age_s = self.now - campaign.stage_at
        self._exclude_refused(campaign)
        if campaign.stage is not Stage.REDUCE:
            return
        reduce_s, grace_s = self.timers.reduce_s, self.timers.grace_s
        known_s = min(SLACK * campaign.roster.averaged_s, LONGEST * reduce_s)
        limit_s = max(reduce_s * (1 + campaign.roster.extensions), known_s)
        if age_s < limit_s:
            lost_s = self.timers.lost_after_s(reduce_s)
            silent = self.averaging.silent_sources(campaign.roster, lost_s)
            silent |= self.averaging.silent_reducers(campaign.roster, lost_s)
            self._exclude(campaign, silent, lost_s)
            if campaign.stage is Stage.REDUCE and age_s >= grace_s:
                self._exclude(
                    campaign, self.averaging.gone_that_are_missed(campaign.roster), grace_s
                )
            return
        bad = self.averaging.whom_to_exclude(campaign.roster)
        if bad:
            accused = self.averaging.accused(campaign.roster) & bad.keys()
            self.withholding.suspect(accused, campaign.offers)
            self._exclude(campaign, bad, limit_s)
        elif self.averaging.slow_sources(campaign.roster) or not self._relieve(campaign):
            campaign.roster.extensions += 1

    def _exclude_refused(self, campaign: Campaign) -> None:
        """Leaves out, at once, peers whose values were refused (roster repair, update bounds)."""
        self._exclude(campaign, self.averaging.refused_values(campaign.roster), 0.0)

    def _exclude(self, campaign: Campaign, bad: dict[PeerId, str], limit_s: float) -> None:
        """Begins a new roster without these peers; changes nothing if there are none."""
        if not bad:
            return
        age_s = self.now - campaign.stage_at
        campaign.excluded |= bad
        campaign.setbacks += any(peer not in self.standing.electorate() for peer in bad)
        for peer, why in bad.items():
            self.out.explain(
                Topic.ROUND,
                f"peer {peer} left out after {age_s:.1f} s (limit {limit_s:.1f}): {why}",
            )
        campaign.enter(Stage.COLLECT, self.now)
        self.advance()

    def _relieve(self, campaign: Campaign) -> bool:
        """Reassigns the units of reducers that are alive but stuck, once per campaign.

        Policy: roster repair.

        If two peers cannot reach each other, a third peer that reaches both can reduce, so that the
        work of neither is lost.
        """
        stuck = self.averaging.late_reducers(campaign.roster)
        if campaign.relieved or not set(campaign.roster.plan.able) - stuck:
            return False
        campaign.relieved = stuck
        names = ", ".join(sorted(stuck))
        self.out.explain(Topic.ROUND, f"others reduce instead of {names}: no results in time")
        campaign.enter(Stage.COLLECT, self.now)
        self.advance()
        return True

    def _poll(self, campaign: Campaign) -> None:
        """Repeats the stage's message, as a poll and as a heartbeat.

        Of these messages, all peers answer only a PREPARE (liveness tracking).
        """
        self.succession.convener_at = self.now
        self.contacts.ask_unheard(self._deaf_after_s)
        if campaign.stage is Stage.COLLECT:
            self._broadcast(Prepare(campaign.ballot))
        elif campaign.stage is Stage.REDUCE:
            self._poll_reducers(campaign)
        elif campaign.stage is Stage.VOTE and campaign.proposal:
            self.proposer.repeat(campaign, campaign.proposal)

    def _poll_reducers(self, campaign: Campaign) -> None:
        late = self.averaging.late_reducers(campaign.roster)
        full = campaign.roster.message(campaign.ballot)
        heartbeat = campaign.roster.heartbeat(campaign.ballot)
        for peer in self.tip.members:
            if peer in late:
                self.out.post(peer, full)
            elif peer != self.me:
                self.out.post(peer, heartbeat)
        for peer in sorted(self.averaging.missed(campaign.roster)):
            self.out.post(peer, Hello(ask=True))

    @property
    def _deaf_after_s(self) -> float:
        return 2 * self.timers.heartbeat_s

    def _why_deaf(self, campaign: Campaign) -> str | None:
        """Why a campaign hears too few peers to succeed; None while it may (campaign end)."""
        limit_s = self._deaf_after_s
        if self.standing.decides_alone or self.now - campaign.started_at <= limit_s:
            return None
        if campaign.stage is Stage.VOTE and self.standing.has_quorum([self.me]):
            return None  # its own vote decides, after a wait that may be longer [C5]
        if not self.contacts.hears_quorum(limit_s):
            return f"no quorum was heard for {limit_s:.1f} s"
        since = self.now - limit_s
        if campaign.stage is Stage.COLLECT and not self.phase1.is_answered(campaign, since):
            answered = self.phase1.num_answers(campaign, since)
            return f"only {answered} answers within {limit_s:.1f} s, no quorum"
        return None
