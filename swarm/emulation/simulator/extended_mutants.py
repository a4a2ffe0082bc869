"""Rules that only the extended model tries, removed one at a time."""

# A method without its rule has no use for what the rule looked at.
# ruff: noqa: ARG002

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import cast

from swarm.emulation.simulator.claims_mutants import CLAIMS_MUTANTS
from swarm.emulation.simulator.delta_mutants import DELTA_MUTANTS
from swarm.emulation.simulator.extended import EXTENDED
from swarm.emulation.simulator.keys import KEYS, KeysMix
from swarm.emulation.simulator.lying_mutants import LYING_MUTANTS
from swarm.emulation.simulator.mutants import MUTANTS, Mutant
from swarm.emulation.simulator.overlap_mutants import OVERLAP_MUTANTS
from swarm.emulation.simulator.slice_mutants import SLICE_MUTANTS
from swarm.emulation.simulator.taking_part import under
from swarm.emulation.simulator.waiting_mutants import WAITING_MUTANTS
from swarm.protocol import abstaining
from swarm.protocol.dealing import Book, Counts, num_samples
from swarm.protocol.events import Record, SyncFailed
from swarm.protocol.handover import Moments, Search, Taking
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.messages import Link
from swarm.protocol.records import PeerState
from swarm.protocol.rounds import Rules
from swarm.protocol.rounds.adopter import Adopter
from swarm.protocol.rounds.averaging import Averaging
from swarm.protocol.rounds.blobs import Blobs, CatchUp
from swarm.protocol.rounds.campaign import Campaign, ClosedRoster
from swarm.protocol.rounds.closing import Absent
from swarm.protocol.rounds.collector import Collector
from swarm.protocol.rounds.contacts import Contacts
from swarm.protocol.rounds.listener import Listener
from swarm.protocol.rounds.reformer import Reformer
from swarm.protocol.rounds.standing import Standing
from swarm.protocol.rounds.takeover import Takeover
from swarm.protocol.training import Applied, Training
from swarm.protocol.voting import TRIAL_ROUNDS, Electorate, Members

# ---------------------------------------------------------------- lost and damaged records


def _abstains_for_two_heights(me: PeerId, shown: Record, _: Sequence[Link]) -> Record:
    return abstaining.rolled_back(shown) if me in shown.tip.members else shown


def _members_alone_abstain(me: PeerId, shown: Record, _: Sequence[Link]) -> Record:
    return abstaining.without_record(me, shown, ())


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
"""Two conveners at a time, and a third peer that forgets whom it gave its vote."""
FORGETFUL = replace(
    EXTENDED["F"],
    strangers=0.0,
    kinds={"lose_disk": 3.0, "betrayal": 4.0, "split": 2.0, "isolate": 2.0, "cut": 1.0},
)
"""Peers forget what they voted for, and come back where others do not know of it."""
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
    "any_room": Mutant("R4: nobody is given what does not fit", rules=under(_AnyRoom)),
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
        "P5: who may vote in one generation may not yet in those from before",
        standing=_ReformEndsAbstention,
    ),
    "failed_sync_awaited": Mutant(
        "A3: a sync that failed is tried again", blobs=_FailedSyncAwaited
    ),
    "newest_is_fetched": Mutant(
        "X1: what is being made durable is applied first", adopter=_NewestIsFetched
    ),
    "trainees_reform": Mutant("F3: who has no vote does not reform", reformer=_TraineesReform),
    "four_are_a_quorum": Mutant(
        "a quorum is a majority of all members",
        standing=_FourAreAQuorum,
        mix=replace(EXTENDED["G"], certificates=0.0),
    ),
    "heard_by_chance": Mutant("H4: voters that are silent are greeted", contacts=_HeardByChance),
    "silent_sources_awaited": Mutant(
        "C4: who is silent and has what others lack is left out", averaging=_SilentSourcesAwaited
    ),
    "late_by_themselves": Mutant(
        "C3: voters that are late are worth what they are together", collector=_LateByThemselves
    ),
    "convenes_meanwhile": Mutant(
        "K1: who fetches what was decided does not convene", takeover=_ConvenesMeanwhile
    ),
    "unheard_goes_first": Mutant(
        "K1: a convener that got no answers goes last", takeover=_UnheardGoesFirst
    ),
    "last_ones_keep_step": Mutant(
        "K1: two that got no answers do not begin together", takeover=_LastOnesKeepStep
    ),
    "fetching_is_worth_nothing": Mutant(
        "C3: to fetch the tip is work", collector=_FetchingIsWorthNothing
    ),
    "those_behind_are_silent": Mutant(
        "C3: a patient round waits for those that fetch", collector=_ThoseBehindAreSilent
    ),
    "wall_clock": Mutant("the wall clock does not matter", clock=attrgetter("wall_s")),
    "clock_stops_in_sleep": Mutant("B2: time asleep has passed", clock=attrgetter("awake_s")),
    "goes_on_after_stand_still": Mutant(
        "B2: who stood still listens first", listener=_GoesOnAfterStandStill
    ),
    "transfer_limit_fixed": Mutant("a transfer may take as long as its bytes need", waits_on=False),
    "timers_not_adapted": Mutant(
        "timers follow sizes and rates", timers=lambda _, base: base, mix=SLOW_LINKS
    ),
    "hand_over_not_awaited": Mutant(
        "N4: what a living owner hands over is waited for", taking=_HandOverNotAwaited
    ),
    "older_moments_taken": Mutant(
        "N2: moments are no older than their weights", taking=_OlderMomentsTaken
    ),
    "weights_ignored": Mutant("W1: a value weighs its tokens", rules=under(_WeightsIgnored)),
    "whole_deals_count": Mutant("T3: only what was used counts", rules=under(_WholeDealsCount)),
    "holes_forgotten": Mutant("T1: what was not used is dealt again", rules=under(_HolesForgotten)),
    "dealt_anew_at_reform": Mutant("T4: survivors read on", rules=under(_DealtAnewAtReform)),
    "all_are_kept": Mutant(
        "C4: keys that vanish cost a few rosters", collector=_AllAreKept, mix=VANISHING
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
