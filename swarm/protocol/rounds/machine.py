"""The round machine: one event in, effects out."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from swarm.protocol.deadlines import Timers
from swarm.protocol.events import (
    Discovered,
    Effect,
    Event,
    Expected,
    HeadsFound,
    LeaveAsked,
    MergeComputed,
    NotMade,
    Offered,
    Received,
    Record,
    Stored,
    Synced,
    SyncFailed,
    Tick,
    Topic,
    Undeliverable,
    UnitReduced,
    Unobtainable,
)
from swarm.protocol.manifest import Digest, Kind, Manifest, PeerId, Unit
from swarm.protocol.messages import (
    Accept,
    Accepted,
    Ballot,
    Commit,
    Header,
    Hello,
    Message,
    Prepare,
    Propose,
    Ready,
    Reduced,
    Roster,
)
from swarm.protocol.rounds.checks import proposal_problem
from swarm.protocol.rounds.parts import Parts
from swarm.protocol.rounds.phases import CampaignInfo, Phase, campaign_info, phase_of
from swarm.protocol.rounds.rules import Rules
from swarm.protocol.rounds.state import Heights, Life, LocalPeer, Work
from swarm.protocol.trust import Chain, Foothold


class RoundMachine:
    """One peer's part in agreeing on manifests.

    Hand every event to `handle` and carry the returned effects out in order. It never raises on
    what other peers sent: refused things give `Reason(REFUSED, ...)`. `timers` may be replaced
    between events.

    What a shell may use besides is public and listed under "for the shell".
    """

    def __init__(
        self,
        peer: LocalPeer,
        record: Record,
        *,
        stored: Iterable[Digest],
        chain: Chain | None = None,
        parts: Parts | None = None,
    ) -> None:
        """Gives each part the records and the parts that it uses.

        Args:
            peer: this peer, its rules and its clock.
            record: what outlasted the last crash.
            stored: blobs that are durable here.
            chain: heads behind the tip; None: those that follow from the record.
            parts: the class of each part; None: with all rules.
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
        forks = self._forks = parts.forks(standing, life, contacts, blobs)
        heights = Heights(self._forget_height, self._begin_height)
        adopter = self._adopter = parts.adopter(
            standing, life, contacts, blobs, work, merger, contributor, gossip, forks, heights
        )
        self._listener = parts.listener(
            standing, life, contacts, blobs, succession, gossip, forks, heights
        )
        self._reformer = parts.reformer(standing, life, contacts, blobs, work, forks, adopter)

    # ------------------------------------------------------------ events

    def start(self, now: float) -> list[Effect]:
        """Boots: listens to the others before it says anything [B1]."""
        self._peer.now = self._life.event_at = self._standing.applied_at = now
        self._listener.listen()
        return self._finish()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Takes one event in; returns what is to be done, in order."""
        self._peer.now = now
        if self._listener.was_paused():
            self._out.explain(
                Topic.TAKEOVER,
                f"nothing happened for {now - self._life.event_at:.1f} s (limit "
                f"{self.timers.pause_s:.1f}): listens before it goes on",
            )
            self._listener.listen()
        self._life.event_at = now
        self._dispatch(event)
        return self._finish()

    def _finish(self) -> list[Effect]:
        """Delivers what this peer sent to itself, then hands the effects over."""
        to_self = self._out.to_self
        while to_self:
            self._receive(*to_self.popleft())
        return self._out.take()

    def _dispatch(self, event: Event) -> None:
        if isinstance(event, Received):
            self._receive(event.source, event.header, event.message)
            if self._life.is_listening and self._listener.have_spoken():
                self._listener.end()
        elif isinstance(event, Tick):
            self._tick()
        elif isinstance(event, Stored):
            self._blobs.have([event.digest])
            self._after_blob()
        elif isinstance(event, Synced):
            self._blobs.note_synced(event.manifest)
            self._pursue()
        elif isinstance(event, SyncFailed):
            self._blobs.on_sync_failed(event)
        elif isinstance(event, Unobtainable):
            self._on_unobtainable(event)
        elif isinstance(event, NotMade):
            self._blobs.note_not_made(event)
        elif isinstance(event, Undeliverable):
            self._contacts.note_gone(event.peer)
        elif isinstance(event, UnitReduced):
            self._reducer.on_unit_reduced(event)
        elif isinstance(event, MergeComputed):
            if self._merger.take(event):
                self._pursue()
                self._convener.advance()
        elif isinstance(event, Offered):
            self._contributor.on_offered(event.offer)
        elif isinstance(event, Expected):
            self._contributor.on_expected(event)
        elif isinstance(event, LeaveAsked):
            self._contributor.on_leave_asked()
        elif isinstance(event, Discovered):
            self._gossip.on_discovered(event)
        elif isinstance(event, HeadsFound):
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

    def _receive(self, source: PeerId, header: Header, message: Message) -> None:
        self._contacts.note_header(source, header)
        if self._life.has_left and not isinstance(message, Hello):
            return
        if self._listener.may_handle(header, message):
            self._handle_message(source, header, message)
            return
        self._listener.keep_early(source, header, message)
        self._gossip.align(source, header)

    def _handle_message(self, source: PeerId, header: Header, message: Message) -> None:
        if isinstance(message, Hello):
            self._gossip.on_hello(source, header, message)
        elif isinstance(message, Commit):
            self._adopter.on_commit(source, message)
        elif isinstance(message, Prepare):
            self._acceptor.on_prepare(source, message)
        elif isinstance(message, Ready):
            self._convener.on_ready(source, message)
        elif isinstance(message, Roster):
            self._reducer.on_roster(source, message)
        elif isinstance(message, Reduced):
            self._convener.on_reduced(source, message)
        elif isinstance(message, Propose):
            self._acceptor.on_propose(source, message)
        elif isinstance(message, Accept):
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

    def _on_unobtainable(self, event: Unobtainable) -> None:
        if event.peer == self.me:
            self._blobs.lose(event.digest)
            self._pursue()
            return
        self._reducer.note_missing(event)
        self._blobs.note_failed(event)
        self._acceptor.judge_proposer(event)

    # ------------------------------------------------------------ heights

    def _forget_height(self, old: Record) -> None:
        """Everybody forgets what referred to the height after the old tip."""
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
        # A reform finds local steps done: a peer that has finished them offers at once.
        steps_s = work.steps_s if self.tip.kind is not Kind.REFORM else None
        work.forget_height(None if steps_s is None else self._peer.now + steps_s)
        self._contacts.forget_height(is_new_generation=self.tip.generation != old.tip.generation)
        self._forks.forget_height()

    def _begin_height(self) -> None:
        """Starts what a new tip, or the end of listening, allows."""
        life, standing = self._life, self._standing
        if life.is_listening or life.has_left:
            return
        self._merger.start()
        self._listener.replay_early()
        if standing.is_alone and standing.abstains():
            # It may have decided this height already, and others may hold that.
            self._reformer.reform("the only member has lost its record and casts no vote")
        elif standing.may_vote() and self._phase1.may_use_ballot_zero():
            self._convener.start(Ballot(0, self.me), {})
        elif standing.decides_alone and standing.may_vote() and self._succession.campaign is None:
            self._takeover.take_over("this peer is the only voter")
        elif not standing.is_member or self._work.offer or life.is_leaving:
            self._contributor.say_ready()
        self._adopter.pursue()

    # ------------------------------------------------------------ for the shell

    def foresee(self, message: Message) -> None:
        """Works out what takes long of a message that is about to be received; changes nothing.

        May be called in another thread; if the tip moves meanwhile, that was in vain.
        """
        shown = message.accepted if isinstance(message, Ready) else message
        tip = self.tip
        if isinstance(shown, Propose | Accepted) and shown.manifest.parent == tip.digest:
            due = self.merge_is_due(tip)
            proposal_problem(shown.manifest, shown.evidence, tip, self.rules, due=due)

    def foothold(self) -> Foothold:
        """From where the shell judges the proofs of strangers, before it fetches what they name."""
        pursued = self.pursued
        return Foothold(self.chain, pursued.blob if pursued else None)

    def merge_is_due(self, manifest: Manifest) -> bool:
        """Whether the successor of this manifest must be a merge [M1]."""
        return self._standing.is_due(manifest)

    @property
    def me(self) -> PeerId:
        """This peer."""
        return self._peer.me

    @property
    def rules(self) -> Rules:
        """Of the run."""
        return self._peer.rules

    @property
    def timers(self) -> Timers:
        """As they are now, in seconds."""
        return self._peer.timers

    @timers.setter
    def timers(self, timers: Timers) -> None:
        self._peer.timers = timers

    @property
    def record(self) -> Record:
        """What outlasts a crash."""
        return self._standing.record

    @property
    def chain(self) -> Chain:
        """Heads behind the tip, to prove it to those that have another one."""
        return self._standing.chain

    @property
    def tip(self) -> Manifest:
        """The newest manifest this peer has applied."""
        return self._standing.record.tip

    @property
    def pursued(self) -> Manifest | None:
        """The decided manifest whose blobs are being brought here, if there is one."""
        pursuit = self._blobs.catch_up
        return pursuit.manifest if pursuit else None

    @property
    def reduced_units(self) -> Collection[Unit]:
        """Units that fall to this peer in the roster that is out."""
        job = self._reducer.job
        return job.inputs.keys() if job else ()

    @property
    def listened_at(self) -> float:
        """When this peer began to listen last, in seconds of the shell's clock [B1, B2]."""
        return self._life.boot_at

    @property
    def is_listening(self) -> bool:
        """Whether it hears what the others have before it says anything [B1]."""
        return self._life.is_listening

    @property
    def is_member(self) -> bool:
        """Whether this peer's work counts."""
        return self._standing.is_member

    @property
    def reason(self) -> str:
        """Last sentence that explained a decision."""
        return self._out.reason

    @property
    def phase(self) -> Phase:
        """What this peer is doing now."""
        return phase_of(self._life, self._standing, self._blobs, self._work, self._reducer.job)

    @property
    def campaign(self) -> CampaignInfo:
        """Who convenes this height as far as this peer knows."""
        return campaign_info(self._succession)
