"""Collector: gathers offers until a roster can be closed (roster deadline)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, replace

from swarm.protocol.membership.membership import steadiest
from swarm.protocol.messages.events import Topic
from swarm.protocol.messages.messages import Offer, Ready
from swarm.protocol.rounds.campaign import Campaign, ClosedRoster, Estimate, Stage
from swarm.protocol.rounds.contacts import Contacts
from swarm.protocol.rounds.contributor import Contributor
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.policies import roster_deadline
from swarm.protocol.rounds.policies.rosters import plan_roster, usual_uplink
from swarm.protocol.rounds.policies.slow_links import Loads, Sender, is_thinner, too_thin
from swarm.protocol.rounds.state import Work
from swarm.protocol.timing.deadlines import SAFETY
from swarm.protocol.values.manifest import PeerId

MAX_TRAINEES = 4
"""The most trainees from one network, including strangers that ask to join."""


@dataclass(eq=False)
class Collector(Role):
    """Collects reports and offers of members and joiners, and decides when to wait no longer."""

    contacts: Contacts
    work: Work
    contributor: Contributor

    def take(self, campaign: Campaign, source: PeerId, ready: Ready) -> bool:
        """Notes an offer, or a wish to join or leave; returns whether a member's READY counts."""
        if source not in self.tip.members:
            self._note_joiner(campaign, source, ready)
            return False
        if ready.leave and not ready.wish:
            self.out.refuse(source, "READY", "it leaves without a signed wish")
            return False
        campaign.grounds.note(source, ready.declared)
        campaign.seen[source] = self.now
        if not ready.dialable:
            campaign.undialable.add(source)
        campaign.uplinks[source] = ready.uplink_mbit
        stalls_in_s = ready.stalls_in_s
        campaign.stalls_at[source] = None if stalls_in_s is None else self.now + stalls_in_s
        if ready.wish:
            campaign.leaving[source] = ready.wish
        if ready.credential:
            campaign.credentials[source] = ready.credential
        if ready.remaining_s is not None:
            campaign.ready_at[source] = self.now + ready.remaining_s
            self._note_word(campaign, source, ready.remaining_s, ready.worked_s)
        campaign.worked[source] = (ready.worked_s, self.now)
        campaign.fetched[source] = ready.fetched_s
        if ready.offer and campaign.offers.get(source) != ready.offer:
            self._take_offer(campaign, source, ready.offer)
        return True

    def _note_joiner(self, campaign: Campaign, stranger: PeerId, ready: Ready) -> None:
        """Notes a stranger's wish to join, if it may join [R8]."""
        guests = self.contributor.guests(stranger, ready.credential)
        if ready.leave or not guests.may_come(stranger):
            return
        if guests.problem(stranger) is None:
            campaign.guests.add(stranger)
        elif not self._has_place(campaign, stranger):
            return
        campaign.grounds.note(stranger, ready.declared)
        self.contacts.forget_strangers(campaign.grounds.last)
        campaign.credentials |= guests.shown

    def _has_place(self, campaign: Campaign, stranger: PeerId) -> bool:
        """Whether a stranger's network has room for a trainee; keys cost nothing, addresses do."""
        network = self.peer.network_of(stranger)
        if network is None:
            return True
        trainees = self.tip.members.keys() - self.tip.voters
        others = {*trainees, *(campaign.grounds.last.keys() - self.tip.members.keys())} - {stranger}
        return sum(self.peer.network_of(peer) == network for peer in others) < MAX_TRAINEES

    def _note_word(
        self, campaign: Campaign, peer: PeerId, remaining_s: float, worked_s: float
    ) -> None:
        """Keeps a member's early estimate, since it could postpone later ones for ever.

        Policy: roster deadline.
        """
        first = campaign.words.get(peer)
        final_at = first.final_at if first else self.now + remaining_s / 2
        if first is None or self.now < final_at:
            due_at, total_s = self.now + remaining_s, worked_s + remaining_s
            campaign.words[peer] = Estimate(due_at, total_s, final_at)

    def _take_offer(self, campaign: Campaign, source: PeerId, offer: Offer) -> None:
        if offer.is_late and source in campaign.in_time:
            return  # the peer's next offer has overtaken this one
        problem = self.contributor.offer_problem(source, offer)
        if problem:
            self.out.refuse(source, "READY", f"its offer: {problem}")
            return
        campaign.offers[source] = offer
        campaign.grounds.count(source)
        if campaign.quorum_offered_at is None and self.standing.has_quorum(campaign.in_time):
            campaign.quorum_offered_at = self.now

    def close_if_due(self, campaign: Campaign) -> None:
        """Closes the roster once it waits for no more offers (roster deadline)."""
        why = self._why_close_roster(campaign)
        if why:
            self._close_roster(campaign, why)

    def _why_close_roster(self, campaign: Campaign) -> str | None:
        """Why the roster waits for no more offers; None while it waits (roster deadline)."""
        offered = campaign.in_time
        absent = self._absentees(campaign, offered)
        roster = self._open_roster(campaign, offered, absent)
        why = roster_deadline.why_close(roster, self.timers)
        if not why and (thin := self._thin_absentees(campaign, roster, absent)):
            awaited = tuple(absent.of(peer) for peer in absent.peers if peer not in thin)
            roster = replace(roster, absent=awaited)
            why = roster_deadline.why_close(roster, self.timers)
            why = why and f"{why}; not for {', '.join(f'{p}: {thin[p]}' for p in sorted(thin))}"
        if not why and roster_deadline.keeps_word(roster, self.timers):
            campaign.awaited_at = self.now
        is_long = roster.num_all and roster.age_s >= self.timers.roster_s
        if not why and is_long and not campaign.has_told_wait:
            campaign.has_told_wait = True
            self.out.explain(
                Topic.ROUND,
                f"roster open after {roster.age_s:.1f} s: {roster.num_all} of "
                f"{roster.num_members} offers, waits for {roster.names}",
            )
        return why

    def _absentees(self, campaign: Campaign, offered: Set[PeerId]) -> roster_deadline.Absentees:
        gone = campaign.excluded.keys() | campaign.leaving.keys()
        behind = self._those_behind(campaign)
        everybody = dict.fromkeys((*self.tip.members, *behind))
        absent = [peer for peer in everybody if peer not in offered and peer not in gone]
        own_s = self._remaining_s(campaign, self.me)
        if own_s is not None and self.me in absent:
            self._note_word(campaign, self.me, own_s, self.contributor.worked_s())
        return roster_deadline.Absentees(
            absent, lambda peer: self._absent(campaign, peer, is_behind=peer in behind)
        )

    def _open_roster(
        self, campaign: Campaign, offered: Set[PeerId], absent: roster_deadline.Absentees
    ) -> roster_deadline.OpenRoster:
        voters = self.standing.electorate()
        waiting = {peer for peer in offered if peer in voters}
        quorum_at = campaign.quorum_offered_at
        return roster_deadline.OpenRoster(
            age_s=self.now - campaign.started_at,
            waited_s=None if quorum_at is None else self.now - quorum_at,
            num_offers=len(waiting - campaign.excluded.keys()),
            num_of_trainees=len(offered - waiting - campaign.excluded.keys()),
            spare_s=self._spare_s(campaign, waiting),
            num_members=len(self.tip.members),
            quorum_answers=self.standing.has_quorum(campaign.seen),
            fastest_s=min((campaign.worked[peer][0] for peer in waiting), default=0.0),
            absent=absent,
        )

    def _spare_s(self, campaign: Campaign, waiting: Collection[PeerId]) -> float:
        """How long the roster may stay open until one of `waiting` has no steps left.

        Policy: stall deadline.
        """
        transfer_s = (self.timers.reduce_s + self.timers.vote_s) / SAFETY
        return max(0.0, self._free_s(campaign, waiting) - transfer_s)

    def _free_s(self, campaign: Campaign, waiting: Collection[PeerId]) -> float:
        """How long all of these peers still have steps left (stall deadline)."""
        known = {**campaign.stalls_at, self.me: self.work.stalls_at}
        ends = [known.get(peer) for peer in waiting]
        stalls_at = min((end for end in ends if end is not None), default=self.now)
        return 0.0 if None in ends else max(0.0, stalls_at - self.now)

    def _absent(
        self, campaign: Campaign, peer: PeerId, *, is_behind: bool
    ) -> roster_deadline.Absent:
        """The state of a member that has not offered its shared tensors."""
        silent_s = 0.0 if peer == self.me else self.now - self._last_sign_of(campaign, peer)
        said = campaign.words.get(peer)
        return roster_deadline.Absent(
            peer,
            silent_s,
            self._remaining_s(campaign, peer),
            self._worked_s(campaign, peer),
            word=None
            if said is None
            else roster_deadline.Word(said.total_s, self.now - said.due_at),
            contributed=not self.tip.contributors or peer in self.tip.contributors,
            is_gone=peer in self.contacts.gone,
            is_new=self._is_new(peer),
            votes=peer in self.standing.electorate(),
            is_behind=is_behind,
            fetched_s=campaign.fetched.get(peer, 0.0),
        )

    def _remaining_s(self, campaign: Campaign, peer: PeerId) -> float | None:
        """Seconds until a peer's local steps end, as it last said."""
        ready_at = self.work.ready_at if peer == self.me else campaign.ready_at.get(peer)
        return None if ready_at is None else max(0.0, ready_at - self.now)

    def _worked_s(self, campaign: Campaign, peer: PeerId) -> float:
        """How long a member has worked on the tip, until its offer."""
        worked_s, at = campaign.worked.get(peer, (0.0, campaign.started_at))
        offer = campaign.offers.get(peer)
        return worked_s if offer and not offer.is_late else worked_s + self.now - at

    def _is_patient(self) -> bool:
        """Whether this round waits for new trainees like voters, and for members that still fetch.

        A lone voter always waits, since only peers that have its tip can join.
        """
        return self.standing.decides_alone or roster_deadline.is_patient(self.tip.round + 1)

    def _is_new(self, peer: PeerId) -> bool:
        """Whether the round is impatient and the peer is a trainee that the tip did not count."""
        is_known = peer in self.standing.electorate() or peer in self.tip.contributors
        return not is_known and not self._is_patient()

    def _those_behind(self, campaign: Campaign) -> tuple[PeerId, ...]:
        """Live members without the tip, which send greetings but do not answer polls.

        In patient rounds, a lone voter also waits for strangers that would join.
        """
        if not self._is_patient():
            return ()
        behind = self.contacts.those_behind() - campaign.seen.keys()
        if not (self.standing.decides_alone and roster_deadline.is_patient(self.tip.round + 1)):
            behind &= self.tip.members.keys()
        return tuple(sorted(behind))

    def _last_sign_of(self, campaign: Campaign, peer: PeerId) -> float:
        """When a member last answered; if it never did, when the campaign began.

        Silence before the campaign counts too, if the peer's machine refuses messages. It also
        counts for a convener that was replaced for its silence, once that has been asked twice.
        """
        since = campaign.started_at
        if peer in self.contacts.gone:
            since = min(since, self.contacts.heard.get(peer, since))
        if self.now - since >= 2 * self.timers.poll_s:
            since = campaign.silent_since.get(peer, since)
        return campaign.seen.get(peer, since)

    def _kept_after(self, peers: Collection[PeerId], setbacks: int) -> Collection[PeerId]:
        """The given peers whose offers enter the roster after these setbacks (roster repair)."""
        return steadiest(self.tip.members, peers, setbacks, seed=self.tip.digest)

    def _close_roster(self, campaign: Campaign, why: str) -> None:
        """Fixes the offers to average, until a later roster replaces this one."""
        offers = self._kept_offers(campaign)
        loads = self._loads(campaign, offers)
        for peer, reason in self._too_thin(campaign, loads).items():
            del offers[peer]
            self.out.explain(Topic.ROUND, f"peer {peer} left out: {reason}")
        loads = loads if len(offers) == len(loads.plan.offers) else self._loads(campaign, offers)
        averaged_s = max(loads.averaged_s.values(), default=0.0)
        roster = campaign.closed = ClosedRoster(loads.plan, self.now, averaged_s)
        campaign.grounds.close(offers)
        campaign.enter(Stage.REDUCE, self.now)
        self.out.explain(Topic.ROUND, why)
        message = roster.message(campaign.ballot)
        for peer in sorted(set(roster.plan.reducers.values())):
            self.out.post(peer, message)

    def _kept_offers(self, campaign: Campaign) -> dict[PeerId, Offer]:
        able = campaign.offers.keys() - campaign.excluded.keys()
        kept = self._kept_after(able, campaign.setbacks)
        return {peer: offer for peer, offer in campaign.offers.items() if peer in kept}

    def _loads(self, campaign: Campaign, offers: Mapping[PeerId, Offer]) -> Loads:
        """The plan of a round with these offers and the known uplinks; cached."""
        # A peer that vanished after its offer would delay the round again if it were a reducer.
        unable = campaign.undialable | campaign.relieved | self.contacts.gone.keys()
        follows_from = offers, unable, dict(campaign.uplinks)
        if campaign.planned is None or campaign.planned[0] != follows_from:
            uplinks, voters = follows_from[2], self.standing.electorate()
            plan = plan_roster(self.tip, offers, self.rules, unable, uplinks)
            loads = Loads(plan, uplinks, self.tip, self.rules, voters)
            campaign.planned = ({**offers}, *follows_from[1:]), loads
        return campaign.planned[1]

    def _thin_absentees(
        self,
        campaign: Campaign,
        roster: roster_deadline.OpenRoster,
        absentees: roster_deadline.Absentees,
    ) -> dict[PeerId, str]:
        """Absent peers whose slow links would exclude their offers, with the reason.

        Policy: slow-link exclusion.
        """
        if campaign.quorum_offered_at is None:
            return {}
        uplinks = campaign.uplinks
        usual = usual_uplink(mbit for peer in campaign.offers if (mbit := uplinks.get(peer)))
        late = [peer for peer in absentees.peers if is_thinner(uplinks.get(peer, 0), usual)]
        others = roster_deadline.Absentees(
            [p for p in absentees.peers if p not in late], absentees.of
        )
        if not late or roster_deadline.keeps_word(replace(roster, absent=others), self.timers):
            return {}  # the roster waits in any case, for a peer with a faster link
        loads = self._loads(campaign, self._kept_offers(campaign))
        out = self._too_thin(campaign, loads, roster_deadline.Absentees(late, absentees.of))
        return {peer: out[peer] for peer in late if peer in out}

    def _too_thin(
        self, campaign: Campaign, loads: Loads, late: roster_deadline.Absentees | None = None
    ) -> dict[PeerId, str]:
        """Peers to leave out because their links would delay the others, and why.

        Policy: slow-link exclusion.
        """

        def invested_s(sender: Sender) -> float:
            if late and sender.is_late:
                absent = late.of(sender.peer)
                return absent.invested_s + (absent.remaining_s or 0.0)
            return self._worked_s(campaign, sender.peer) + campaign.fetched.get(sender.peer, 0.0)

        lines = loads.lines(tuple(late.peers) if late else ())
        free_s, limit_s = self._free_s(campaign, loads.waiting), 2 * self.timers.reduce_s
        return too_thin(lines, invested_s, free_s, limit_s)
