"""The protocol with one rule removed at a time. The simulator must notice each removal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from swarm.emulation.simulator.faults.faults import CLASSES, Mix
from swarm.emulation.simulator.peers.participant import UnderTest
from swarm.emulation.simulator.peers.symbol_trainer import Trainer
from swarm.emulation.simulator.symbols.trained_symbols import Model
from swarm.emulation.simulator.symbols.values import Merged
from swarm.experts import expert_unit
from swarm.protocol.messages.events import Apply, Record
from swarm.protocol.messages.messages import Accepted, Ballot, Evidence, Header, Offer, Reduced
from swarm.protocol.rounds.acceptor import Acceptor
from swarm.protocol.rounds.adopter import Adopter
from swarm.protocol.rounds.averaging import Averaging
from swarm.protocol.rounds.blobs import Blobs, CatchUp, Proposal
from swarm.protocol.rounds.campaign import Campaign
from swarm.protocol.rounds.durable_state import Standing
from swarm.protocol.rounds.listener import Listener
from swarm.protocol.rounds.phase1 import Phase1
from swarm.protocol.rounds.reform_choice import ReformChoice
from swarm.protocol.rounds.reformer import Reformer
from swarm.protocol.rounds.takeover import Takeover
from swarm.protocol.training import Training
from swarm.protocol.training.adoption import Action, Adoption
from swarm.protocol.values.manifest import Digest, Kind, Manifest, PeerId, Unit
from swarm.protocol.values.schedule import merge_due
from swarm.protocol.values.updates import UpdateBound

# Each method here does what the rule's method would do without the rule.
# ruff: disable[undocumented-public-method]


class NoBaseCheck(Training):
    """Keeps progress, whatever base it was trained from (expert progress)."""

    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        adoption = super().decide(manifest, previous)
        experts = {
            expert: replace(choice, action=Action.KEEP)
            if choice.action is Action.RESTART
            else choice
            for expert, choice in adoption.experts.items()
        }
        return replace(adoption, experts=experts)


class OfferedBeforeSaved(Training):
    """Offers work that the peer would forget in a crash [P6]."""

    async def offer(self) -> None:
        assert self.work is not None
        work, units = self.work, self.shell.store(self.tip, self._bases_of_due(), self.work.tokens)
        offer = Offer(self.tip.digest, work.steps, work.tokens, units, work.seconds)
        self.shell.submit(self.tip, offer)


class NoBaseCheckAtMerge(Training):
    """Moves progress with a merge, whatever base it was trained from (merge rebase)."""

    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        adoption = super().decide(manifest, previous)
        experts = {
            expert: replace(choice, action=Action.REBASE, rebase_from=before)
            if choice.action is Action.RESTART
            and (before := manifest.entries[expert_unit(expert)].base) is not None
            else choice
            for expert, choice in adoption.experts.items()
        }
        return replace(adoption, experts=experts)


class MergingModel(Model):
    """Reads merged experts from a manifest whose merge is only due."""

    def _agreed(self, manifest: Manifest, expert: int) -> Digest:
        if not merge_due(manifest, self.task.rules.merging):
            return super()._agreed(manifest, expert)
        units = (expert_unit(each) for each in range(self.task.rules.num_experts))
        inputs = tuple(manifest.entries[unit].digest for unit in units)
        return self.task.values.digest_of(Merged(inputs, expert, 0))


class MergesOnApply(Trainer):
    """Merges by itself as soon as a merge is due (merge schedule)."""

    model_type = MergingModel


# ruff: enable[undocumented-public-method]

# A method without its rule ignores the rule's inputs.
# ruff: disable[unused-method-argument]


@dataclass(frozen=True)
class Mutant(UnderTest):
    """Code without one rule, and faults that soon show the removal."""

    rule: str
    """The removed rule."""
    mix: Mix | None = field(default=None, kw_only=True)
    """The mutant's own faults. None: the faults of the class that is run."""


# ---------------------------------------------------------------- promises and votes


class _AcceptBeforeFetch(Acceptor):
    def _may_accept(self, proposal: Proposal) -> bool:
        return self.standing.may_vote() and self._may_follow(proposal.ballot)


class _AcceptedNotPersisted(Standing):
    def persist_accepted(self, vote: Accepted) -> None:
        self.record = replace(self.record, promised=vote.ballot, accepted=vote)


class _AcceptSentBeforeWrite(Acceptor):
    def _vote(self, proposal: Proposal) -> None:
        ballot, manifest = proposal.ballot, proposal.manifest
        self.blobs.proposal = None
        self.out.post(ballot.convener, self.standing.signed_accept(ballot, manifest.digest))
        self.standing.persist_accepted(Accepted(ballot, manifest, proposal.evidence))


class _PromiseOnlyInMemory(Standing):
    def persist_promise(self, ballot: Ballot) -> None:
        if ballot.convener == self.me:
            super().persist_promise(ballot)  # its own ballot is still burnt [P3]
        else:
            self.record = replace(self.record, promised=ballot)


class _PromiseNotRecorded(Standing):
    def persist_promise(self, ballot: Ballot) -> None:
        if ballot.convener == self.me:
            super().persist_promise(ballot)


class _NoPhase1(Phase1):
    def _is_required(self, ballot: Ballot) -> bool:
        return False


class _LowestAccepted(Phase1):
    def _choose_accepted(self, accepted: list[Accepted]) -> Accepted:
        return min(accepted, key=lambda vote: vote.ballot)


class _BallotZeroReused(Phase1):
    def may_use_ballot_zero(self) -> bool:
        return self.tip.order[0] == self.me and self.succession.top is None


class _AnyHalf(Standing):
    def has_quorum(self, peers: Iterable[PeerId]) -> bool:
        return 2 * len(self.tip.voters & set(peers)) >= len(self.tip.voters)


class _AnyProposal(Acceptor):
    def proposal_problem(self, manifest: Manifest, evidence: Evidence | None) -> str | None:
        return None


class _LiarConvenesOn(Acceptor):
    def _is_distrusted(self, convener: PeerId) -> bool:
        return False


class _AnyUpdate(Blobs):
    def bound(
        self, unit: Unit, peers: Iterable[PeerId], work: Mapping[PeerId, int]
    ) -> UpdateBound | None:
        return None


class _Everybody(frozenset[PeerId]):
    def __contains__(self, peer: object) -> bool:
        return True


class _JoinersVote(Standing):
    def electorate(self) -> Collection[PeerId]:
        return _Everybody(self.tip.members)


class _OlderRoster(Averaging):
    def _is_result_of_roster(self, campaign: Campaign, reduced: Reduced) -> bool:
        return campaign.closed is not None and reduced.ballot == campaign.ballot


# ---------------------------------------------------------------- applying


class _ApplyBeforeBlobs(Adopter):
    def _may_apply(self, pursuit: CatchUp) -> bool:
        return True


class _DuplicateCommitRestarts(Adopter):
    def _is_being_fetched(self, manifest: Manifest) -> bool:
        return False


class _FetchNeverDropped(Adopter):
    def _fetch_is_stuck(self) -> bool:
        return False


class _VotesCrossTips(Listener):
    def may_handle(self, header: Header, message: object) -> bool:
        return not self.life.is_listening


class _TipBeforeCollected(Adopter):
    def _collect_garbage(self, old: Record) -> None:
        super()._collect_garbage(replace(old, tip=self.tip))
        # Placed before the `Apply`, after which the live model has all values that it needs.
        at = next(i for i, effect in enumerate(self.out.effects) if isinstance(effect, Apply))
        self.out.effects.insert(at, self.out.effects.pop())


# ---------------------------------------------------------------- takeover and forks


class _NoTakeover(Takeover):
    def _why_take_over(self) -> str | None:
        return None


class _NoReform(Reformer):
    def _reform_due(self) -> bool:
        return False


class _GenerationCounted(Reformer):
    def _new_generation(self, nonce: int) -> str:
        return f"{len(self.tip.lineage) + 1}"


class _ReformAlthoughQuorum(ReformChoice):
    def is_stalled(self, limit_s: float) -> bool:
        return self.now - max(self.life.boot_at, self.standing.applied_at) >= limit_s


class _MostTokensWin(Standing):
    def is_better(self, manifest: Manifest) -> bool:
        return (manifest.tokens, manifest.code) > (self.tip.tokens, self.tip.code)


# ---------------------------------------------------------------- merges


class _NeverDue(Standing):
    def is_due(self, manifest: Manifest) -> bool:
        return False


class _DueByOwnCount(Standing):
    def is_due(self, manifest: Manifest) -> bool:
        seen = self.__dict__.setdefault("seen_rounds", set())
        seen.add(manifest.round)
        steps = self.rules.local_steps_at(0) * len(seen - {0})
        return merge_due(replace(manifest, step=steps), self.rules.merging)


class _DueByKind(Standing):
    def is_due(self, manifest: Manifest) -> bool:
        return manifest.kind is Kind.QUORUM and super().is_due(manifest)


class _DueByRise(Standing):
    def is_due(self, manifest: Manifest) -> bool:
        interval = self.rules.merging.interval_steps
        before = self.record.parent.step // interval if self.record.parent else 0
        return merge_due(replace(manifest, merged=before), self.rules.merging)


class _NoPhase1AtMerge(Phase1):
    def _is_required(self, ballot: Ballot) -> bool:
        return not self.standing.is_due(self.tip) and super()._is_required(ballot)


class _AcceptedMergeNotPersisted(Standing):
    def persist_accepted(self, vote: Accepted) -> None:
        if vote.manifest.kind is not Kind.MERGE:
            super().persist_accepted(vote)
        else:
            self.record = replace(self.record, promised=vote.ballot, accepted=vote)


class _AcceptMergeBeforeBlobs(Acceptor):
    def _may_accept(self, proposal: Proposal) -> bool:
        if proposal.manifest.kind is not Kind.MERGE:
            return super()._may_accept(proposal)
        return self.standing.may_vote() and self._may_follow(proposal.ballot)


class _AcceptOnlyOwnMerge(Acceptor):
    def proposal_problem(self, manifest: Manifest, evidence: Evidence | None) -> str | None:
        problem = super().proposal_problem(manifest, evidence)
        if problem or manifest.kind is not Kind.MERGE:
            return problem
        own = self.merger.merged or {}
        same = all(
            unit in own and manifest.entries[unit].digest == own[unit].digest
            for unit in self.rules.expert_units
        )
        return None if same else "it is not what was computed here"


DUELS = Mix(
    peers=(3, 4),
    strangers=0.0,
    haste=(0.4, 1.0),
    kinds={"trap": 8.0, "duel": 3.0, "isolate": 1.0},
    traps={"promise": 3.0, "apply": 1.0, "commit": 2.0, "vote_written": 1.0},
    ambush=0.5,
    restart_s=(0.3, 0.3, 3.0),
    faults=(15, 40),
    window_s=(80.0, 160.0),
    slow=0.6,
    sync_s=(1.0, 3.0, 5.0),
    merging=0.2,
    small=0.0,
)
"""Conveners depose each other all the time while peers crash around their votes."""
REVOLTS = Mix(
    peers=(3, 3),
    strangers=0.0,
    haste=(0.2, 1.0),
    kinds={"revolt": 1.0},
    restart_s=(0.3,),
    faults=(8, 20),
    window_s=(80.0, 160.0),
    slow=0.0,
    loss=0.0,
    merging=0.0,
    small=0.0,
)
"""Two conveners at a time, and a third peer that crashes between their ballots."""
SHATTERED = Mix(kinds={"shatter": 1.0}, faults=(1, 3), window_s=(120.0, 200.0))
"""Several survivors reform, each separately."""
LAST_HOLDERS_DIE = replace(CLASSES["C"], strangers=0.4, faults=(6, 16), small=0.0)
"""Peers learn of manifests whose last holders have died."""
MERGE_DUELS = replace(DUELS, merging=1.0)
UNPROVED = replace(CLASSES["A"], certificates=0.0)
"""Commits are believed without certificates."""


MUTANTS: Mapping[str, Mutant] = {
    "accept_before_fetch": Mutant("A2: ACCEPT only with all blobs", acceptor=_AcceptBeforeFetch),
    "accepted_not_persisted": Mutant("P2: the vote is durable", standing=_AcceptedNotPersisted),
    "accept_before_write": Mutant("P2: write, then send", acceptor=_AcceptSentBeforeWrite),
    "promise_in_memory": Mutant(
        "P1: the promise is durable", standing=_PromiseOnlyInMemory, mix=REVOLTS
    ),
    "promise_not_recorded": Mutant(
        "P1: a promise binds", standing=_PromiseNotRecorded, mix=REVOLTS
    ),
    "no_phase_1": Mutant("C2: attempt >= 1 needs a quorum's promises", phase1=_NoPhase1),
    "lowest_accepted": Mutant(
        "C2: the highest vote is proposed", phase1=_LowestAccepted, mix=REVOLTS
    ),
    "ballot_zero_reused": Mutant(
        "P3, C1: ballot 0 is used once", phase1=_BallotZeroReused, mix=DUELS
    ),
    "any_half": Mutant("C5: half decides only with the tie-breaker", standing=_AnyHalf),
    "any_proposal": Mutant("A4: a proposal must follow from the tip", acceptor=_AnyProposal),
    "liar_convenes_on": Mutant("A4: a refused convener is not followed", acceptor=_LiarConvenesOn),
    "any_update": Mutant("update bounds: updates are bounded", blobs=_AnyUpdate),
    "joiners_vote": Mutant("A2: only members(tip) vote", standing=_JoinersVote, mix=UNPROVED),
    "older_roster": Mutant("A6: results of one roster only", averaging=_OlderRoster),
    "apply_before_blobs": Mutant("X1: apply only complete manifests", adopter=_ApplyBeforeBlobs),
    "duplicate_commit_restarts": Mutant(
        "X1: a duplicate starts no fetch", adopter=_DuplicateCommitRestarts
    ),
    "fetch_never_dropped": Mutant(
        "stuck fetches: a stuck fetch is dropped", adopter=_FetchNeverDropped, mix=LAST_HOLDERS_DIE
    ),
    "votes_cross_tips": Mutant("H1: votes never cross tips", listener=_VotesCrossTips),
    "no_base_check": Mutant("S3: compare and swap on the base", training=NoBaseCheck),
    "offered_before_saved": Mutant(
        "P6: the private state is durable before the offer", training=OfferedBeforeSaved
    ),
    "no_takeover": Mutant("takeover: a failed convener is replaced", takeover=_NoTakeover),
    "no_reform": Mutant("F3: a lost majority is given up", reformer=_NoReform),
    "generation_counted": Mutant("F3: an id is unique", reformer=_GenerationCounted, mix=SHATTERED),
    "reform_although_quorum": Mutant(
        "F2: no reform while a quorum lives", reform_choice=_ReformAlthoughQuorum
    ),
    "most_tokens_win": Mutant("F1: the total order of manifests", standing=_MostTokensWin),
    "merge_on_apply": Mutant(
        "merge schedule: a merge is a manifest", standing=_NeverDue, trainer=MergesOnApply
    ),
    "due_by_own_count": Mutant(
        "merge schedule: due by the manifest alone", standing=_DueByOwnCount
    ),
    "round_while_due": Mutant("merge manifests: no round while a merge is due", standing=_NeverDue),
    "due_by_kind": Mutant("merge schedule: the kind of the tip plays no part", standing=_DueByKind),
    "due_by_rise": Mutant("merge schedule: due by step and merged", standing=_DueByRise),
    "no_phase_1_at_merge": Mutant(
        "C2: phase 1 for merges", phase1=_NoPhase1AtMerge, mix=MERGE_DUELS
    ),
    "accepted_merge_not_persisted": Mutant(
        "P2: a merge's vote is durable", standing=_AcceptedMergeNotPersisted
    ),
    "accept_merge_before_blobs": Mutant(
        "A2: ACCEPT a merge only with its blobs", acceptor=_AcceptMergeBeforeBlobs
    ),
    "accept_only_own_merge": Mutant(
        "merge manifests: never compare with one's own result", acceptor=_AcceptOnlyOwnMerge
    ),
    "no_base_check_at_merge": Mutant(
        "S3: rebase only from the own base", training=NoBaseCheckAtMerge
    ),
    "tip_before_collected": Mutant(
        "GC: the blobs of the tip before are kept", adopter=_TipBeforeCollected
    ),
}

# ruff: enable[unused-method-argument]
