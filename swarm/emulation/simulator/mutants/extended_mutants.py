"""Rules that only the extended model or a liar tests, removed one at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import attrgetter
from typing import cast

from swarm.emulation.simulator.faults.extended import EXTENDED
from swarm.emulation.simulator.faults.hostile import LYING, LyingMix
from swarm.emulation.simulator.faults.strangers import KEYS, KeysMix
from swarm.emulation.simulator.mutants.delta_mutants import DELTA_MUTANTS
from swarm.emulation.simulator.mutants.mutants import MUTANTS, Mutant
from swarm.emulation.simulator.mutants.overlap_mutants import OVERLAP_MUTANTS, SLICE_MUTANTS
from swarm.emulation.simulator.peers.participant import under
from swarm.emulation.simulator.symbols.signing import Door
from swarm.protocol.chain import chain_record
from swarm.protocol.chain.trust import RECENT, Chain
from swarm.protocol.exchange.handover import Moments, Search, Taking
from swarm.protocol.membership.membership import TRIAL_ROUNDS, Electorate, Guests, Members
from swarm.protocol.messages import messages
from swarm.protocol.messages.events import Record, SyncFailed
from swarm.protocol.records.records import PeerState
from swarm.protocol.rounds import Rules
from swarm.protocol.rounds.acceptor import Acceptor
from swarm.protocol.rounds.adopter import Adopter
from swarm.protocol.rounds.averaging import Averaging
from swarm.protocol.rounds.blobs import Blobs, CatchUp
from swarm.protocol.rounds.campaign import Campaign, ClosedRoster
from swarm.protocol.rounds.collector import Collector
from swarm.protocol.rounds.contacts import Contacts
from swarm.protocol.rounds.durable_state import Standing
from swarm.protocol.rounds.listener import Listener
from swarm.protocol.rounds.policies.checks import successor_problem
from swarm.protocol.rounds.policies.roster_deadline import Absent, Absentees, OpenRoster
from swarm.protocol.rounds.policies.slow_links import Loads
from swarm.protocol.rounds.reformer import Reformer
from swarm.protocol.rounds.takeover import Takeover
from swarm.protocol.training import Applied, Training
from swarm.protocol.values.invitation import Credential, Invitation, invitation_problem
from swarm.protocol.values.manifest import Manifest, Member, PeerId
from swarm.protocol.values.work import Book, Counts, num_samples

# A method without its rule ignores the rule's inputs.
# ruff: noqa: ARG002


class _WordsIgnored(Collector):
    def _note_word(
        self, campaign: Campaign, peer: PeerId, remaining_s: float, worked_s: float
    ) -> None:
        return


class _LastWordCounts(Collector):
    def _note_word(
        self, campaign: Campaign, peer: PeerId, remaining_s: float, worked_s: float
    ) -> None:
        campaign.words.pop(peer, None)
        super()._note_word(campaign, peer, remaining_s, worked_s)


class _AlwaysTrusted(Collector):
    def _absent(self, campaign: Campaign, peer: PeerId, *, is_behind: bool) -> Absent:
        return replace(super()._absent(campaign, peer, is_behind=is_behind), contributed=True)


class _ThinLinesAwaited(Collector):
    def _too_thin(
        self, campaign: Campaign, loads: Loads, late: Absentees | None = None
    ) -> dict[PeerId, str]:
        return {}


class _ThinAbsenteesAwaited(Collector):
    def _thin_absentees(
        self, campaign: Campaign, roster: OpenRoster, absentees: Absentees
    ) -> dict[PeerId, str]:
        return {}


class _WaitingAgesCampaign(Collector):
    def _why_close_roster(self, campaign: Campaign) -> str | None:
        why = super()._why_close_roster(campaign)
        campaign.awaited_at = 0.0
        return why


class _CollectingAgesAttempt(Acceptor):
    def on_prepare(self, source: PeerId, prepare: messages.Prepare) -> None:
        before = self.succession.collected_at
        super().on_prepare(source, prepare)
        self.succession.collected_at = before


class _ReformsAtWork(Reformer):
    def _is_at_work(self) -> bool:
        return False


WAITING_MUTANTS: Mapping[str, Mutant] = {
    "words_ignored": Mutant(
        "roster deadline: a peer that said when is waited for", collector=_WordsIgnored
    ),
    "last_word_counts": Mutant(
        "roster deadline: a word does not slip for ever", collector=_LastWordCounts
    ),
    "always_trusted": Mutant(
        "roster deadline: a useless wait is not repeated", collector=_AlwaysTrusted
    ),
    "thin_lines_awaited": Mutant(
        "slow-link exclusion: no link holds up the others", collector=_ThinLinesAwaited
    ),
    "thin_absentees_awaited": Mutant(
        "slow-link exclusion: nor is a peer waited for that its link will exclude",
        collector=_ThinAbsenteesAwaited,
    ),
    "waiting_ages_campaign": Mutant(
        "campaign end: a campaign ages when nobody is waited for", collector=_WaitingAgesCampaign
    ),
    "collecting_ages_attempt": Mutant(
        "takeover: an attempt ages when nothing is collected", acceptor=_CollectingAgesAttempt
    ),
    "reforms_at_work": Mutant("F3: a peer at work does not reform", reformer=_ReformsAtWork),
}


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
    def holds(self, peer: PeerId, statement: bytes, signature: messages.Signature) -> bool:
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
        "mean weights: no value weighs much more than the others", rules=under(_AllTokensWeigh)
    ),
    "all_tokens_count": Mutant(
        "claimed work: one member alone moves no schedule", rules=under(_AllTokensCount)
    ),
    "own_clock": Mutant("counted work: pace is by the clock of the run", rules=under(_OwnClock)),
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
        "joiner limits: four trainees of a network", collector=_AnyNumberOfTrainees
    ),
    "votes_are_kept": Mutant(
        "R7: the unvouched stay under a third when vouched members leave",
        rules=under(_VotesAreKept),
    ),
    "any_deal": Mutant("deal sizes: a deal is at most 4 times the median's", rules=under(_AnyDeal)),
}


class _NothingIsShown(Acceptor):
    def proposal_problem(
        self, manifest: Manifest, evidence: messages.Evidence | None
    ) -> str | None:
        return successor_problem(manifest, self.tip, self.rules, due=self.standing.is_due(self.tip))


class _AnybodySigns(Door):
    def let_in(
        self, source: PeerId, header: messages.Header, message: messages.Message
    ) -> messages.Message | None:
        return message


class _AnyProof(Adopter):
    def _lacks_proof(self, commit: messages.Commit) -> bool:
        return False

    def _unproved(self, commit: messages.Commit) -> str | None:
        return None


class _AnyAttempt(Acceptor):
    def attempt_problem(self, source: PeerId, ballot: object) -> str | None:
        return None


class _PrunedByCount(Adopter):
    def _lengthen_chain(
        self, commit: messages.Commit, certificate: messages.Certificate | None
    ) -> tuple[messages.Link, ...]:
        new, links = super()._lengthen_chain(commit, certificate), self.standing.chain.links
        self.standing.chain = Chain((links[0], *links[1:][-RECENT:]))
        return new


class _ReturnsAtOnce(Acceptor):
    def turn_problem(self, source: PeerId, ballot: messages.Ballot) -> str | None:
        return None


_P = cast(LyingMix, LYING["P"])
CALM_LIES = replace(_P, faults=(0, 0), forgeries=(0, 0), loss=0.0, merging=0.0, strangers=0.0)
"""A liar is the only fault. A peer that believes the liar soon breaks an invariant."""

FORGERS = replace(_P, forgeries=(4, 8))

LYING_MUTANTS: Mapping[str, Mutant] = {
    "nothing_is_shown": Mutant(
        "A6: a proposal follows from its evidence", acceptor=_NothingIsShown, mix=CALM_LIES
    ),
    "anybody_signs": Mutant(
        "A6, L1: signatures are those of their peers", door=_AnybodySigns, mix=CALM_LIES
    ),
    "any_proof": Mutant("L1: a tip is believed along certificates", adopter=_AnyProof, mix=FORGERS),
    "any_attempt": Mutant(
        "attempt limit: one message does not use up the ballots",
        acceptor=_AnyAttempt,
        mix=CALM_LIES,
    ),
    "returns_at_once": Mutant(
        "convener turns: a convener that had a vote lets others convene", acceptor=_ReturnsAtOnce
    ),
    "pruned_by_count": Mutant(
        "chain pruning: a chain keeps links that lead on from each head", adopter=_PrunedByCount
    ),
}


# ---------------------------------------------------------------- lost and damaged records


def _abstains_for_two_heights(me: PeerId, shown: Record, _: Sequence[messages.Link]) -> Record:
    return chain_record.rolled_back(shown) if me in shown.tip.members else shown


def _members_alone_abstain(me: PeerId, shown: Record, _: Sequence[messages.Link]) -> Record:
    return chain_record.without_record(me, shown, ())


class _LoneAbstainerVotes(Standing):
    def abstains(self) -> bool:
        return super().abstains() and not self.is_alone


class _ReformEndsAbstention(Standing):
    def abstains(self) -> bool:
        return super().abstains() and self.record.regained is None


class _FailedSyncAwaited(Blobs):
    def on_sync_failed(self, event: SyncFailed) -> None:
        return


class _NewestIsFetched(Adopter):
    def _is_nearly_here(self, pursuit: CatchUp) -> bool:
        return False


# ---------------------------------------------------------------- many peers, clocks


class _FourAreAQuorum(Standing):
    def has_quorum(self, peers: Iterable[PeerId]) -> bool:
        present = self.tip.voters & set(peers)
        return len(present) >= 4 or super().has_quorum(present)


class _HeardByChance(Contacts):
    def ask_unheard(self, limit_s: float, waited_s: float = 0.0) -> None:
        return


class _SilentSourcesAwaited(Averaging):
    def silent_sources(self, roster: ClosedRoster, limit_s: float) -> dict[PeerId, str]:
        return {}


class _LateByThemselves(Collector):
    def _absent(self, campaign: Campaign, peer: PeerId, *, is_behind: bool) -> Absent:
        return replace(super()._absent(campaign, peer, is_behind=is_behind), votes=False)


class _ConvenesMeanwhile(Takeover):
    def _is_busy_catching_up(self) -> bool:
        return False


class _TraineesReform(Reformer):
    def _may_reform(self) -> bool:
        since = self.now - self.timers.reform_s / 2
        return any(self.contacts.heard.get(peer, 0.0) > since for peer in self.tip.voters)


class _UnheardGoesFirst(Takeover):
    def _goes_last(self) -> bool:
        return False


class _LastOnesKeepStep(Takeover):
    def _last_place(self) -> int:
        return len(self.tip.order)


class _FetchingIsWorthNothing(Collector):
    def _absent(self, campaign: Campaign, peer: PeerId, *, is_behind: bool) -> Absent:
        return replace(super()._absent(campaign, peer, is_behind=is_behind), fetched_s=0.0)


class _ThoseBehindAreSilent(Collector):
    def _those_behind(self, campaign: Campaign) -> tuple[PeerId, ...]:
        return ()


class _GoesOnAfterStandStill(Listener):
    def was_paused(self) -> bool:
        return False


# ---------------------------------------------------------------- moments


class _HandOverNotAwaited(Taking):
    def _may_come(self, search: Search, now_s: float) -> bool:
        return False


class _OlderMomentsTaken(Taking):
    def _is_wanted(self, search: Search, moments: Moments) -> bool:
        return moments.expert == search.expert


class _WaitsForMoments(Training):
    has_taken_up = False

    async def adopt(self, newer: Sequence[Applied]) -> None:
        before = self.bases.keys()
        await super().adopt(newer)
        self.has_taken_up = not self.bases.keys() <= before

    async def take_part(self) -> Sequence[Applied]:
        if self.has_taken_up:
            return await self.shell.wait(self.tip, PeerState.CATCHING_UP)
        return await super().take_part()


# ---------------------------------------------------------------- the text and weights


class _WeightsIgnored(Rules):
    def weights(
        self, work: Mapping[PeerId, int], peers: Sequence[PeerId], parent: Manifest
    ) -> tuple[int, ...] | None:
        return None


class _WholeDealsCount(Rules):
    def next_book(self, book: Book, counted: Counts, quotas: Counts) -> Book:
        whole = {peer: num_samples(book.dealt[peer]) for peer in counted}
        return super().next_book(book, whole, quotas)


class _HolesForgotten(Rules):
    def next_book(self, book: Book, counted: Counts, quotas: Counts) -> Book:
        return super().next_book(Book(book.cursor), {}, quotas)


class _DealtAnewAtReform(Rules):
    def reformed_book(self, book: Book, quotas: Counts) -> Book:
        return self.next_book(book, {}, quotas)


class _AllAreKept(Collector):
    def _kept_after(self, peers: Collection[PeerId], setbacks: int) -> Collection[PeerId]:
        return peers


class _VoteAtOnce(Rules):
    def with_voters(
        self, members: Members, contributors: Collection[PeerId], seed: str
    ) -> Electorate:
        return Electorate({peer: replace(m, votes=True) for peer, m in members.items()}, ())


class _AllThatHaveEarnedIt(Rules):
    def with_voters(
        self, members: Members, contributors: Collection[PeerId], seed: str
    ) -> Electorate:
        given = {
            p: replace(m, votes=m.votes or m.counted >= TRIAL_ROUNDS) for p, m in members.items()
        }
        return Electorate(given, ())


class _AnyNumberUnvouched(Rules):
    def with_voters(
        self, members: Members, contributors: Collection[PeerId], seed: str
    ) -> Electorate:
        known = {p: replace(m, vouched=m.votes) for p, m in members.items()}
        given = super().with_voters(known, contributors, seed).members
        return Electorate({p: replace(m, votes=given[p].votes) for p, m in members.items()}, ())


class _TraineesCount(Standing):
    def electorate(self) -> Collection[PeerId]:
        return self.tip.members

    def has_quorum(self, peers: Iterable[PeerId]) -> bool:
        return 2 * len(self.tip.members.keys() & set(peers)) > len(self.tip.members)


_F, _J = EXTENDED["F"], EXTENDED["J"]
BETRAYED_REVOLTS = replace(
    _F,
    peers=(3, 3),
    strangers=0.0,
    haste=(0.2, 1.0),
    kinds={"betrayed_revolt": 1.0},
    restart_s=(0.3,),
    faults=(8, 20),
    window_s=(80.0, 160.0),
    slow=0.0,
    loss=0.0,
    merging=0.0,
    failing_syncs=0.0,
)
"""Two conveners at a time, and a third peer that forgets its vote for one of them."""
FORGETFUL = replace(
    EXTENDED["F"],
    strangers=0.0,
    kinds={"lose_disk": 3.0, "betrayal": 4.0, "split": 2.0, "isolate": 2.0, "cut": 1.0},
)
"""Peers forget their votes, and come back among peers that do not know of these votes."""
VANISHING = replace(cast(KeysMix, KEYS["V"]), keys=(40, 50), window_s=(40.0, 60.0))
"""A key vanishes every second."""
SLOW_LINKS = replace(
    _J,
    peers=(3, 5),
    up_mbytes_per_s=(1.5, 2.0),
    unit_mbytes=(4.0, 7.0),
    local_steps_s=(40.0, 50.0),
    faults=(0, 3),
)
"""Links on which no proposal can be fetched within the model's own T_vote."""


class _AnyRoom(Rules):
    def rooms_of(self, members: Members) -> dict[PeerId, int]:
        return {}


EXTENDED_MUTANTS: Mapping[str, Mutant] = {
    "any_room": Mutant(
        "expert ownership: no peer gets an expert that does not fit", rules=under(_AnyRoom)
    ),
    "rolled_back_votes": Mutant(
        "P5: a rolled-back record casts no vote",
        rolled_back=lambda earlier: earlier,
        mix=BETRAYED_REVOLTS,
    ),
    "lost_record_votes": Mutant(
        "P5: nor does a lost one", without_record=lambda _, shown, __: shown, mix=FORGETFUL
    ),
    "abstains_for_two_heights": Mutant(
        "P5: without a record no height is high enough", without_record=_abstains_for_two_heights
    ),
    "members_alone_abstain": Mutant(
        "P5: a voter of another chain is no newcomer", without_record=_members_alone_abstain
    ),
    "lone_abstainer_votes": Mutant(
        "P5: a lone member without its record reforms", standing=_LoneAbstainerVotes
    ),
    "reform_ends_abstention": Mutant(
        "P5: a peer that may vote in one generation may not yet in earlier ones",
        standing=_ReformEndsAbstention,
    ),
    "failed_sync_awaited": Mutant(
        "A3: a sync that failed is tried again", blobs=_FailedSyncAwaited
    ),
    "newest_is_fetched": Mutant(
        "X1: a manifest that is being made durable is applied first", adopter=_NewestIsFetched
    ),
    "trainees_reform": Mutant("F3: no peer without a vote reforms", reformer=_TraineesReform),
    "four_are_a_quorum": Mutant(
        "C5: a quorum is a majority of all members",
        standing=_FourAreAQuorum,
        mix=replace(EXTENDED["G"], certificates=0.0),
    ),
    "heard_by_chance": Mutant(
        "liveness tracking: voters that are silent are greeted", contacts=_HeardByChance
    ),
    "silent_sources_awaited": Mutant(
        "roster repair: a silent source of missing values is left out",
        averaging=_SilentSourcesAwaited,
    ),
    "late_by_themselves": Mutant(
        "roster deadline: the worth of late voters is counted together", collector=_LateByThemselves
    ),
    "convenes_meanwhile": Mutant(
        "takeover: a peer that fetches a decided manifest does not convene",
        takeover=_ConvenesMeanwhile,
    ),
    "unheard_goes_first": Mutant(
        "takeover: a convener that got no answers goes last", takeover=_UnheardGoesFirst
    ),
    "last_ones_keep_step": Mutant(
        "takeover: two that got no answers do not begin together", takeover=_LastOnesKeepStep
    ),
    "fetching_is_worth_nothing": Mutant(
        "roster deadline: to fetch the tip is work", collector=_FetchingIsWorthNothing
    ),
    "those_behind_are_silent": Mutant(
        "roster deadline: a patient round waits for those that fetch",
        collector=_ThoseBehindAreSilent,
    ),
    "wall_clock": Mutant("the wall clock does not matter", clock=attrgetter("wall_s")),
    "clock_stops_in_sleep": Mutant("B2: time asleep has passed", clock=attrgetter("awake_s")),
    "goes_on_after_stand_still": Mutant(
        "B2: a peer that stood still listens first", listener=_GoesOnAfterStandStill
    ),
    "transfer_limit_fixed": Mutant("a transfer may take as long as its bytes need", waits_on=False),
    "timers_not_adapted": Mutant(
        "adapted timers: they follow sizes and rates", timers=lambda _, base: base, mix=SLOW_LINKS
    ),
    "hand_over_not_awaited": Mutant(
        "N4: the hand-over of a living owner is waited for", taking=_HandOverNotAwaited
    ),
    "older_moments_taken": Mutant(
        "N2: moments are no older than their weights", taking=_OlderMomentsTaken
    ),
    "weights_ignored": Mutant(
        "mean weights: a value weighs its tokens", rules=under(_WeightsIgnored)
    ),
    "whole_deals_count": Mutant(
        "counted work: only used samples count", rules=under(_WholeDealsCount)
    ),
    "holes_forgotten": Mutant(
        "text deals: unused samples are dealt again", rules=under(_HolesForgotten)
    ),
    "dealt_anew_at_reform": Mutant(
        "text deals: survivors keep their deals", rules=under(_DealtAnewAtReform)
    ),
    "all_are_kept": Mutant(
        "roster repair: keys that vanish cost a few rosters", collector=_AllAreKept, mix=VANISHING
    ),
    "vote_at_once": Mutant("R7: a vote is earned", rules=under(_VoteAtOnce)),
    "all_that_have_earned_it": Mutant(
        "R7: few become voters in a round", rules=under(_AllThatHaveEarnedIt)
    ),
    "any_number_unvouched": Mutant(
        "R7: voters without an anchor's word are few", rules=under(_AnyNumberUnvouched)
    ),
    "trainees_count": Mutant("R7: a trainee is in no quorum", standing=_TraineesCount),
    "waits_for_moments": Mutant("N1: nobody waits for moments", training=_WaitsForMoments),
}
ALL_MUTANTS: Mapping[str, Mutant] = {
    **MUTANTS,
    **EXTENDED_MUTANTS,
    **WAITING_MUTANTS,
    **LYING_MUTANTS,
    **DELTA_MUTANTS,
    **SLICE_MUTANTS,
    **OVERLAP_MUTANTS,
    **CLAIMS_MUTANTS,
}
