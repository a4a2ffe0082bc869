"""Convener, first half: promises and offers, until a roster can be closed [C1-C3]."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection

from swarm.protocol.events import Topic
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.messages import (
    Accepted,
    Ballot,
    Evidence,
    Message,
    Offer,
    Prepare,
    Ready,
    Roster,
)
from swarm.protocol.rounds.campaign import Campaign, Promise, Stage
from swarm.protocol.rounds.closing import (
    Absent,
    OpenRoster,
    Word,
    is_patient,
    keeps_word,
    why_close,
)
from swarm.protocol.rounds.composition import compose_merge
from swarm.protocol.rounds.merger import Merger
from swarm.protocol.rounds.rosters import plan_roster
from swarm.protocol.voting import steadiest


class Collector(Merger):
    """Opens a campaign and collects what the members have to say and to offer."""

    # ------------------------------------------------------------ beginning

    def _may_use_ballot_zero(self) -> bool:
        """Attempt 0 needs no phase 1, so it is used once, by rank 0 alone [C1, P3]."""
        return self.tip.order[0] == self.me and self.record.promised is None and self._top is None

    def _phase1_required(self, ballot: Ballot) -> bool:
        """Whether a quorum must promise before anything may be proposed [C2]."""
        return ballot.attempt >= 1

    def _burn_ballot(self, ballot: Ballot) -> None:
        """The ballot is durable before its first message, so that it is never used twice [P3]."""
        self._persist_promise(ballot)

    def _start_campaign(self, ballot: Ballot, excluded: dict[PeerId, str]) -> None:
        self._campaign = None
        self._burn_ballot(ballot)
        self._claims[self.me] = ballot.attempt
        self._note_ballot(ballot)
        self._convener_at = self._now
        campaign = Campaign(ballot, self._now, self._now + self.timers.poll_s, excluded)
        campaign.enter(Stage.COLLECT, self._now)
        self._campaign = campaign
        if ballot.attempt == 0:
            # Offers that came before the campaign [C1]; what is missing is asked for by polls.
            for peer, ready in self._readies.items():
                self._take_ready(campaign, peer, ready)
        else:
            self._broadcast(Prepare(ballot))
        self._post(self.me, self._ready(ballot))

    def _broadcast(self, message: Message) -> None:
        for peer in self.tip.members:
            if peer != self.me:
                self._post(peer, message)

    # ------------------------------------------------------------ collecting

    def _on_ready(self, source: PeerId, ready: Ready) -> None:
        campaign = self._campaign
        if source in self._electorate() and (
            problem := self._attempt_problem(source, ready.ballot)
        ):
            self._refuse(source, "READY", problem)
            return
        if campaign is None:
            self._readies[source] = ready
            self._redirect(source, ready)
            if source in self._electorate() and ready.ballot.attempt >= 1:
                self._note_ballot(ready.ballot)
            return
        if source in self._electorate() and ready.ballot > campaign.ballot:
            # What is out of turn here deposes nobody: its convener would refuse all others [A7].
            if not self._turn_problem(ready.ballot.convener, ready.ballot):
                self._note_ballot(ready.ballot)
            return
        self._take_ready(campaign, source, ready)
        self._advance_campaign()

    def _redirect(self, source: PeerId, ready: Ready) -> None:
        """Tells a peer that takes this one for the convener about a higher ballot."""
        promised = self._promised()
        if source != self.me and promised > ready.ballot:
            self._post(source, self._ready(promised))

    def _take_ready(self, campaign: Campaign, source: PeerId, ready: Ready) -> None:
        """Notes promise, offer, and the wish to come or go."""
        if source not in self.tip.members:
            self._note_joiner(campaign, source, ready)
            return
        if ready.leave and not ready.wish:
            self._refuse(source, "READY", "it leaves without a signed wish")
            return
        campaign.grounds.note(source, ready.declared)
        campaign.seen[source] = self._now
        if not ready.dialable:
            campaign.undialable.add(source)
        if ready.wish:
            campaign.leaving[source] = ready.wish
        if ready.ballot == campaign.ballot and source in self._electorate():
            campaign.answers[source] = ready
            campaign.answered_at[source] = self._now
        if ready.remaining_s is not None:
            campaign.ready_at[source] = self._now + ready.remaining_s
            self._note_word(campaign, source, ready.remaining_s, ready.worked_s)
        campaign.worked[source] = (ready.worked_s, self._now)
        if ready.offer and campaign.offers.get(source) != ready.offer:
            self._take_offer(campaign, source, ready.offer)

    def _note_joiner(self, campaign: Campaign, stranger: PeerId, ready: Ready) -> None:
        """Notes a stranger's wish to come; who may not is not among those drawn by lot [R8]."""
        guests = self._guests(stranger, ready.invitation)
        if ready.leave or not guests.may_come(stranger):
            return
        campaign.grounds.note(stranger, ready.declared)
        campaign.invitations |= guests.shown

    def _note_word(
        self, campaign: Campaign, peer: PeerId, remaining_s: float, worked_s: float
    ) -> None:
        """A member is held to what it said early: what it says last may slip for ever [C3]."""
        first = campaign.words.get(peer)
        final_at = first.final_at if first else self._now + remaining_s / 2
        if first is None or self._now < final_at:
            due_at, total_s = self._now + remaining_s, worked_s + remaining_s
            campaign.words[peer] = Promise(due_at, total_s, final_at)

    def _take_offer(self, campaign: Campaign, source: PeerId, offer: Offer) -> None:
        if offer.is_late and source in campaign.in_time:
            return  # it was overtaken by the offer that followed it
        problem = self._offer_problem(source, offer)
        if problem:
            self._refuse(source, "READY", f"its offer: {problem}")
            return
        campaign.offers[source] = offer
        campaign.grounds.count(source)
        if campaign.quorum_offered_at is None and self._has_quorum(campaign.in_time):
            campaign.quorum_offered_at = self._now

    def _advance_collecting(self, campaign: Campaign) -> None:
        if self._phase1_required(campaign.ballot):
            promises = self._promises(campaign)
            if not self._has_quorum(promises):
                return
            accepted = self._votes_found(promises)
            if accepted:
                self._propose_again(campaign, self._choose_accepted(accepted))
                return
        if self._is_due(self.tip):
            if self._merged is not None:
                holders = dict.fromkeys(self.rules.expert_units, self.me)
                manifest = compose_merge(self.tip, self._merged, holders, self.rules)
                self._propose(campaign, manifest, None, "merge computed")
            return
        why = self._why_close_roster(campaign)
        if why:
            self._close_roster(campaign, why)

    def _promises(self, campaign: Campaign) -> dict[PeerId, Ready]:
        """Phase 1: the promises to go by, at first without those of excluded peers [C2, C6].

        Any quorum will do. One without the sources of unobtainable blobs does not have to propose
        these again, only because a source itself has voted for them.
        """
        answers = campaign.answers
        sound = {peer: ready for peer, ready in answers.items() if peer not in campaign.excluded}
        is_over = self._now - campaign.started_at >= self.timers.roster_s
        return answers if is_over and not self._has_quorum(sound) else sound

    def _votes_found(self, promises: dict[PeerId, Ready]) -> list[Accepted]:
        """Votes cast under lower ballots, as far as they could have become a decision."""
        votes = (ready.accepted for ready in promises.values())
        return [
            vote
            for vote in votes
            if vote and self._proposal_problem(vote.manifest, vote.evidence) is None
        ]

    def _choose_accepted(self, accepted: list[Accepted]) -> Accepted:
        """What may have been decided already is the vote with the highest ballot [C2]."""
        return max(accepted, key=lambda vote: vote.ballot)

    @abstractmethod
    def _propose(
        self, campaign: Campaign, manifest: Manifest, evidence: Evidence | None, why: str
    ) -> None:
        """Starts phase 2."""

    def _propose_again(self, campaign: Campaign, chosen: Accepted) -> None:
        digest = chosen.manifest.digest
        for peer, ready in campaign.answers.items():
            if ready.accepted and ready.accepted.manifest.digest == digest:
                campaign.holders[peer] = None
        why = f"accepted before under attempt {chosen.ballot.attempt}"
        self._propose(campaign, chosen.manifest, chosen.evidence, why)

    # ------------------------------------------------------------ the roster

    def _why_close_roster(self, campaign: Campaign) -> str | None:
        """Why no more offers are waited for; None while they are [C3]."""
        roster = self._open_roster(campaign)
        why = why_close(roster, self.timers)
        if not why and keeps_word(roster, self.timers):
            campaign.awaited_at = self._now
        is_long = roster.num_all and roster.age_s >= self.timers.roster_s
        if not why and is_long and not campaign.has_told_wait:
            campaign.has_told_wait = True
            self._explain(
                Topic.ROUND,
                f"roster open after {roster.age_s:.1f} s: {roster.num_all} of "
                f"{roster.num_members} offers, waits for {roster.names}",
            )
        return why

    def _open_roster(self, campaign: Campaign) -> OpenRoster:
        gone = campaign.excluded.keys() | campaign.leaving.keys()
        offered, voters = campaign.in_time, self._electorate()
        waiting = {peer for peer in offered if peer in voters}
        quorum_at = campaign.quorum_offered_at
        return OpenRoster(
            age_s=self._now - campaign.started_at,
            waited_s=None if quorum_at is None else self._now - quorum_at,
            num_offers=len(waiting - campaign.excluded.keys()),
            num_of_trainees=len(offered - waiting - campaign.excluded.keys()),
            num_members=len(self.tip.members),
            quorum_answers=self._has_quorum(campaign.seen),
            fastest_s=min((campaign.worked[peer][0] for peer in waiting), default=0.0),
            absent=tuple(
                self._absent(campaign, peer)
                for peer in self.tip.members
                if peer not in offered and peer not in gone
            ),
        )

    def _absent(self, campaign: Campaign, peer: PeerId) -> Absent:
        """What is known of a member that has not offered its shared tensors."""
        ready_at = self._ready_at if peer == self.me else campaign.ready_at.get(peer)
        remaining_s = None if ready_at is None else max(0.0, ready_at - self._now)
        silent_s = 0.0 if peer == self.me else self._now - self._last_sign_of(campaign, peer)
        if peer == self.me and remaining_s is not None:
            self._note_word(campaign, peer, remaining_s, self._worked_s())
        worked_s, at = campaign.worked.get(peer, (0.0, campaign.started_at))
        said = campaign.words.get(peer)
        return Absent(
            peer,
            silent_s,
            remaining_s,
            worked_s + self._now - at,
            word=None if said is None else Word(said.total_s, self._now - said.due_at),
            contributed=not self.tip.contributors or peer in self.tip.contributors,
            is_gone=peer in self._gone,
            is_new=self._is_new(peer),
        )

    def _is_new(self, peer: PeerId) -> bool:
        """Whether a trainee has yet to show that waiting for it pays."""
        is_known = peer in self._electorate() or peer in self.tip.contributors
        return not is_known and not is_patient(self.tip.round + 1)

    def _last_sign_of(self, campaign: Campaign, peer: PeerId) -> float:
        """When a member last answered; who was never asked before is silent since the campaign.

        A convener that was replaced for its silence has been asked twice, and is not waited for
        as long once more. Nor is a peer that was gone before.
        """
        since = campaign.started_at
        if peer in self._gone:
            since = min(since, self._heard.get(peer, since))
        if self._now - since >= 2 * self.timers.poll_s:
            since = campaign.silent_since.get(peer, since)
        return campaign.seen.get(peer, since)

    def _kept_after(self, peers: Collection[PeerId], setbacks: int) -> Collection[PeerId]:
        """Of those that have offered, with whom the roster is closed [C4]."""
        return steadiest(self.tip.members, peers, setbacks, seed=self.tip.digest)

    def _close_roster(self, campaign: Campaign, why: str) -> None:
        """Fixes whose offers are averaged; nothing was proposed yet, so this may be repeated."""
        able = campaign.offers.keys() - campaign.excluded.keys()
        kept = self._kept_after(able, campaign.setbacks)
        offers = {peer: offer for peer, offer in campaign.offers.items() if peer in kept}
        # Who vanished after its offer would hold the round up once more as a reducer.
        unable = campaign.undialable | campaign.relieved | self._gone
        campaign.plan = plan_roster(self.tip, offers, self.rules, unable)
        campaign.grounds.close(offers)
        campaign.results = {}
        campaign.reports = {}
        campaign.reported_at = {}
        campaign.missing = {}
        campaign.extensions = 0
        campaign.enter(Stage.REDUCE, self._now)
        self._explain(Topic.ROUND, why)
        roster = self._roster(campaign)
        for peer in sorted(set(campaign.plan.reducers.values())):
            self._post(peer, roster)
        self._advance_campaign()

    def _roster(self, campaign: Campaign, *, is_heartbeat: bool = False) -> Roster:
        assert campaign.plan is not None
        offers = {} if is_heartbeat else campaign.plan.offers
        able = () if is_heartbeat else campaign.plan.able
        return Roster(campaign.ballot, campaign.plan.roster_id, offers, able)
