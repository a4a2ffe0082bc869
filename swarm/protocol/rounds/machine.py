"""The round machine: one event in, effects out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from swarm.protocol.chain.trust import Chain, Foothold
from swarm.protocol.messages import events, messages
from swarm.protocol.rounds.acceptor import Acceptor
from swarm.protocol.rounds.adopter import Adopter
from swarm.protocol.rounds.averaging import Averaging
from swarm.protocol.rounds.blobs import Blobs
from swarm.protocol.rounds.collector import Collector
from swarm.protocol.rounds.contacts import Contacts, Gossip
from swarm.protocol.rounds.contributor import Contributor
from swarm.protocol.rounds.convener import Convener
from swarm.protocol.rounds.durable_state import Standing
from swarm.protocol.rounds.listener import Listener
from swarm.protocol.rounds.merger import Merger
from swarm.protocol.rounds.phase1 import Phase1
from swarm.protocol.rounds.policies.checks import proposal_problem
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.rounds.proposer import Proposer
from swarm.protocol.rounds.reducer import Job, Reducer
from swarm.protocol.rounds.reform_choice import ReformChoice
from swarm.protocol.rounds.reformer import Reformer
from swarm.protocol.rounds.state import Heights, Life, LocalPeer, Work
from swarm.protocol.rounds.succession import Succession
from swarm.protocol.rounds.takeover import Takeover
from swarm.protocol.rounds.withholding import Withholding
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import Digest, Kind, Manifest, PeerId, Unit


class Phase(Enum):
    """The activity of a machine, as shown to users."""

    LISTENING = "listening"  # just started: learns the others' tips before it takes part
    TRAINING = "training"  # a member without an offer yet
    OFFERED = "offered"  # waits for the roster
    REDUCING = "reducing"  # averages units for the others
    MERGING = "merging"  # a merge is due or being agreed on
    ACCEPTING = "accepting"  # fetches a proposal, or has accepted it
    CATCHING_UP = "catching_up"  # fetches a decided manifest
    JOINING = "joining"  # has the tip and asks to become a member
    LEAVING = "leaving"  # asked to be left out
    LEFT = "left"  # no longer a member, and done


@dataclass(frozen=True)
class CampaignInfo:
    """The convener of this height, as shown to users."""

    convener: PeerId
    attempt: int
    stage: str
    """Stage of this peer's campaign; empty if another peer convenes."""
    age_s: float


def phase_of(life: Life, standing: Standing, blobs: Blobs, work: Work, job: Job | None) -> Phase:
    """The most important of the phases that are under way at the same time."""
    if life.has_left:
        return Phase.LEFT
    if life.is_listening:
        return Phase.LISTENING
    if blobs.catch_up:
        return Phase.CATCHING_UP
    if life.is_leaving:
        return Phase.LEAVING
    if not standing.is_member:
        return Phase.JOINING
    if standing.is_due(standing.tip):
        return Phase.MERGING
    if blobs.proposal or standing.record.accepted:
        return Phase.ACCEPTING
    if job and not job.is_done:
        return Phase.REDUCING
    return Phase.OFFERED if work.offer else Phase.TRAINING


def campaign_info(succession: Succession) -> CampaignInfo:
    """The convener of this height as far as this peer knows."""
    own, top = succession.campaign, succession.highest
    return CampaignInfo(
        convener=top.convener,
        attempt=top.attempt,
        stage=own.stage.value if own else "",
        age_s=succession.now - (own.started_at if own else succession.top_since),
    )


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The class of each part. A test may replace a class by a subclass without its rule."""

    standing: type[Standing] = Standing
    contacts: type[Contacts] = Contacts
    succession: type[Succession] = Succession
    blobs: type[Blobs] = Blobs
    withholding: type[Withholding] = Withholding
    acceptor: type[Acceptor] = Acceptor
    reducer: type[Reducer] = Reducer
    merger: type[Merger] = Merger
    gossip: type[Gossip] = Gossip
    reform_choice: type[ReformChoice] = ReformChoice
    adopter: type[Adopter] = Adopter
    listener: type[Listener] = Listener
    contributor: type[Contributor] = Contributor
    phase1: type[Phase1] = Phase1
    collector: type[Collector] = Collector
    averaging: type[Averaging] = Averaging
    proposer: type[Proposer] = Proposer
    convener: type[Convener] = Convener
    takeover: type[Takeover] = Takeover
    reformer: type[Reformer] = Reformer


class RoundMachine:
    """One peer's part in the agreement on manifests.

    The shell hands each event to `handle`, and carries out the returned effects in order. Input
    from other peers never makes `handle` raise: a refused message gives `Reason(REFUSED, ...)`. The
    shell may replace `timers` between events.

    The section "for the shell" has the rest of the interface.
    """

    def __init__(
        self,
        peer: LocalPeer,
        record: events.Record,
        *,
        stored: Iterable[Digest],
        chain: Chain | None = None,
        parts: Parts | None = None,
    ) -> None:
        """Makes the parts, each with the records and other parts that it uses.

        Args:
            peer: this peer, its rules and its clock.
            record: the durable record, as the previous process left it.
            stored: blobs that are durable here.
            chain: the tip's head and earlier heads; None: those in the record.
            parts: the class of each part; None: the classes with all rules.
        """
        parts, now = parts or Parts(), peer.now
        self._peer = peer
        life = self._life = Life(now, now, now)
        work = self._work = Work()
        standing = self._standing = parts.standing(peer, record, chain)
        self._out = standing.out
        contacts = self._contacts = parts.contacts(standing)
        blobs = self._blobs = parts.blobs(standing, set(stored))
        succession = self._succession = parts.succession(standing, blobs)
        withholding = self._withholding = parts.withholding(standing, contacts)
        merger = self._merger = parts.merger(standing, blobs)
        contributor = self._contributor = parts.contributor(standing, life, blobs, work, succession)
        acceptor = self._acceptor = parts.acceptor(standing, blobs, succession, contributor, merger)
        self._reducer = parts.reducer(standing, blobs, work, contributor, acceptor, withholding)
        phase1 = self._phase1 = parts.phase1(standing, succession, acceptor)
        collector = parts.collector(standing, contacts, work, contributor)
        averaging = parts.averaging(standing, contacts)
        proposer = self._proposer = parts.proposer(standing, contacts, blobs, succession)
        convener = self._convener = parts.convener(
            standing,
            contacts,
            succession,
            contributor,
            acceptor,
            merger,
            phase1,
            collector,
            averaging,
            proposer,
            withholding,
        )
        self._takeover = parts.takeover(standing, life, contacts, blobs, succession, convener)
        gossip = self._gossip = parts.gossip(standing, contacts)
        choice = self._reform_choice = parts.reform_choice(standing, life, contacts, blobs)
        heights = Heights(self._forget_height, self._begin_height)
        adopter = self._adopter = parts.adopter(
            standing, life, contacts, blobs, work, merger, contributor, gossip, choice, heights
        )
        self._listener = parts.listener(
            standing, life, contacts, blobs, succession, gossip, choice, heights
        )
        self._reformer = parts.reformer(standing, life, contacts, blobs, work, choice, adopter)

    # ------------------------------------------------------------ events

    def start(self, now: float) -> list[events.Effect]:
        """Boots: listens to the other peers before it takes part [B1]."""
        self._peer.now = self._life.event_at = self._standing.applied_at = now
        self._listener.listen()
        return self._finish()

    def handle(self, event: events.Event, now: float) -> list[events.Effect]:
        """Handles one event; returns the effects to carry out, in order."""
        self._peer.now = now
        if self._listener.was_paused():
            self._out.explain(
                events.Topic.TAKEOVER,
                f"nothing happened for {now - self._life.event_at:.1f} s (limit "
                f"{self.timers.pause_s:.1f}): listens before it continues",
            )
            self._listener.listen()
        self._life.event_at = now
        self._dispatch(event)
        return self._finish()

    def _finish(self) -> list[events.Effect]:
        """Delivers this peer's messages to itself, then returns the effects."""
        to_self = self._out.to_self
        while to_self:
            self._receive(*to_self.popleft())
        return self._out.take()

    def _dispatch(self, event: events.Event) -> None:
        if isinstance(event, events.Received):
            self._receive(event.source, event.header, event.message)
            if self._life.is_listening and self._listener.have_spoken():
                self._listener.end()
        elif isinstance(event, events.Tick):
            self._tick()
        elif isinstance(event, events.Stored):
            self._blobs.have([event.digest])
            self._after_blob()
        elif isinstance(event, events.Synced):
            self._blobs.note_synced(event.manifest)
            self._pursue()
        elif isinstance(event, events.SyncFailed):
            self._blobs.on_sync_failed(event)
        elif isinstance(event, events.Unobtainable):
            self._on_unobtainable(event)
        elif isinstance(event, events.NotMade):
            self._blobs.note_not_made(event)
        elif isinstance(event, events.Undeliverable):
            self._contacts.note_gone(event.peer)
        elif isinstance(event, events.UnitReduced):
            self._reducer.on_unit_reduced(event)
        elif isinstance(event, events.MergeComputed):
            if self._merger.take(event):
                self._pursue()
                self._convener.advance()
        elif isinstance(event, events.Offered):
            self._contributor.on_offered(event.offer)
        elif isinstance(event, events.Expected):
            self._contributor.on_expected(event)
        elif isinstance(event, events.LeaveAsked):
            self._contributor.on_leave_asked()
        elif isinstance(event, events.Discovered):
            self._gossip.on_discovered(event)
        elif isinstance(event, events.HeadsFound):
            self._adopter.on_heads_found(event)

    def _tick(self) -> None:
        self._adopter.tick()
        self._contributor.tick_leaving()
        if self._life.has_left:
            return
        if self._life.is_listening:
            self._listener.tick()
            return
        if self._peer.now >= self._gossip.next_hello:
            self._contributor.tick_membership()
        self._gossip.tick()
        self._acceptor.pursue()
        self._convener.tick()
        self._takeover.tick()
        self._reformer.tick()

    def _receive(self, source: PeerId, header: messages.Header, message: messages.Message) -> None:
        self._contacts.note_header(source, header)
        if self._life.has_left and not isinstance(message, messages.Hello):
            return
        if self._listener.may_handle(header, message):
            self._handle_message(source, header, message)
            return
        self._listener.keep_early(source, header, message)
        self._gossip.align(source, header)

    def _handle_message(
        self, source: PeerId, header: messages.Header, message: messages.Message
    ) -> None:
        if isinstance(message, messages.Hello):
            self._gossip.on_hello(source, header, message)
        elif isinstance(message, messages.Commit):
            self._adopter.on_commit(source, message)
        elif isinstance(message, messages.Prepare):
            self._acceptor.on_prepare(source, message)
        elif isinstance(message, messages.Ready):
            self._convener.on_ready(source, message)
        elif isinstance(message, messages.Roster):
            self._reducer.on_roster(source, message)
        elif isinstance(message, messages.Reduced):
            self._convener.on_reduced(source, message)
        elif isinstance(message, messages.Propose):
            self._acceptor.on_propose(source, message)
        elif isinstance(message, messages.Accept):
            self._convener.on_accept(source, message)

    # ------------------------------------------------------------ blobs

    def _pursue(self) -> None:
        self._acceptor.pursue()
        self._adopter.pursue()

    def _after_blob(self) -> None:
        blobs = self._blobs
        if blobs.proposal and not blobs.proposal.missing:
            self._acceptor.pursue()
        if blobs.catch_up and not blobs.catch_up.missing:
            self._adopter.pursue()
        self._reducer.after_blob()

    def _on_unobtainable(self, event: events.Unobtainable) -> None:
        if event.peer == self.me:
            self._blobs.lose(event.digest)
            self._pursue()
            return
        self._reducer.note_missing(event)
        self._blobs.note_failed(event)
        self._acceptor.judge_proposer(event)

    # ------------------------------------------------------------ heights

    def _forget_height(self, old: events.Record) -> None:
        """Has every part drop its state for the height after the old tip."""
        standing, work = self._standing, self._work
        self._out.header = standing.header()
        standing.applied_at = self._peer.now
        self._blobs.drop_proposal()
        self._reducer.forget_height()
        self._withholding.forget_height()
        self._contributor.forget_height()
        self._merger.forget_height()
        self._succession.forget_height()
        self._takeover.forget_height()
        # A reform is made after the local steps, so a peer offers them at once on the reform.
        steps_s = work.steps_s if self.tip.kind is not Kind.REFORM else None
        work.forget_height(None if steps_s is None else self._peer.now + steps_s)
        self._contacts.forget_height(is_new_generation=self.tip.generation != old.tip.generation)
        self._reform_choice.forget_height()

    def _begin_height(self) -> None:
        """Starts the work of a height, after a new tip or after the listening."""
        life, standing = self._life, self._standing
        if life.is_listening or life.has_left:
            return
        self._merger.start()
        self._listener.replay_early()
        if standing.is_alone and standing.abstains():
            # This peer may have decided this height before its loss, and others may have that
            # decision.
            self._reformer.reform("the only member has lost its record and casts no vote")
        elif standing.may_vote() and self._phase1.may_use_ballot_zero():
            self._convener.start(messages.Ballot(0, self.me), {})
        elif standing.decides_alone and standing.may_vote() and self._succession.campaign is None:
            self._takeover.take_over("this peer is the only voter")
        elif not standing.is_member or self._work.offer or life.is_leaving:
            self._contributor.say_ready()
        self._adopter.pursue()

    # ------------------------------------------------------------ for the shell

    def foresee(self, message: messages.Message) -> None:
        """Runs, in advance, the slow checks of a message about to be handled; changes no state.

        May run in another thread. If the tip changes before the end, the result is not used.
        """
        shown = message.accepted if isinstance(message, messages.Ready) else message
        tip = self.tip
        if (
            isinstance(shown, messages.Propose | messages.Accepted)
            and shown.manifest.parent == tip.digest
        ):
            due = self.merge_is_due(tip)
            proposal_problem(shown.manifest, shown.evidence, tip, self.rules, due=due)

    def foothold(self) -> Foothold:
        """What the shell needs to judge strangers' proofs before it fetches their blobs."""
        pursued = self.pursued
        return Foothold(self.chain, pursued.blob if pursued else None)

    def merge_is_due(self, manifest: Manifest) -> bool:
        """Whether the successor of this manifest must be a merge (merge schedule)."""
        return self._standing.is_due(manifest)

    @property
    def me(self) -> PeerId:
        """This peer."""
        return self._peer.me

    @property
    def rules(self) -> Rules:
        """The rules of the run."""
        return self._peer.rules

    @property
    def timers(self) -> Timers:
        """The present timers, in seconds."""
        return self._peer.timers

    @timers.setter
    def timers(self, timers: Timers) -> None:
        self._peer.timers = timers

    @property
    def record(self) -> events.Record:
        """The durable record, which survives a crash."""
        return self._standing.record

    @property
    def chain(self) -> Chain:
        """The tip's head and earlier ones, which prove the tip to peers with another tip."""
        return self._standing.chain

    @property
    def tip(self) -> Manifest:
        """The newest manifest this peer has applied."""
        return self._standing.record.tip

    @property
    def pursued(self) -> Manifest | None:
        """The decided manifest whose blobs are being fetched, if there is one."""
        pursuit = self._blobs.catch_up
        return pursuit.manifest if pursuit else None

    @property
    def reduced_units(self) -> Collection[Unit]:
        """Units that the current roster assigns to this peer."""
        job = self._reducer.job
        return job.inputs.keys() if job else ()

    @property
    def listened_at(self) -> float:
        """When this peer last began to listen, in seconds of the shell's clock [B1, B2]."""
        return self._life.boot_at

    @property
    def is_listening(self) -> bool:
        """Whether this peer still listens, before it takes part [B1]."""
        return self._life.is_listening

    @property
    def is_member(self) -> bool:
        """Whether this peer's work counts."""
        return self._standing.is_member

    @property
    def reason(self) -> str:
        """The last sentence that explained a decision."""
        return self._out.reason

    @property
    def phase(self) -> Phase:
        """What this peer is doing now."""
        return phase_of(self._life, self._standing, self._blobs, self._work, self._reducer.job)

    @property
    def campaign(self) -> CampaignInfo:
        """The convener of this height, as far as this peer knows."""
        return campaign_info(self._succession)
