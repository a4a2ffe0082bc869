"""The round machine: one event in, effects out."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.protocol.events import (
    Discovered,
    Effect,
    Event,
    Expected,
    HeadsFound,
    LeaveAsked,
    MergeComputed,
    Offered,
    Received,
    Stored,
    Synced,
    SyncFailed,
    Tick,
    Topic,
    Undeliverable,
    UnitReduced,
    Unobtainable,
)
from swarm.protocol.manifest import PeerId
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
from swarm.protocol.rounds.campaign import Stage
from swarm.protocol.rounds.checks import proposal_problem
from swarm.protocol.rounds.forks import Forks
from swarm.protocol.rounds.rules import Phase
from swarm.protocol.rounds.takeover import Takeover
from swarm.protocol.updates import REFUSALS

MAX_EARLY = 2048


@dataclass(frozen=True)
class CampaignInfo:
    """Who convenes this height, for people."""

    convener: PeerId
    attempt: int
    stage: str
    """Of this peer's own campaign; empty when another convenes."""
    age_s: float


class RoundMachine(Forks, Takeover):
    """One peer's part in agreeing on manifests.

    Hand every event to `handle` and carry the returned effects out in order. It never raises on
    what other peers sent: refused things give `Reason(REFUSED, ...)`. `timers` may be replaced
    between events.
    """

    def start(self, now: float) -> list[Effect]:
        """Boots: listens to the others before it says anything [B1]."""
        self._now = self._event_at = now
        self._applied_at = now
        self._listen()
        return self._finish()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Takes one event in; returns what is to be done, in order."""
        self._now = now
        if self._was_paused():
            self._explain(
                Topic.TAKEOVER,
                f"nothing happened for {now - self._event_at:.1f} s (limit "
                f"{self.timers.patience_s:.1f}): listens before it goes on",
            )
            self._listen()
        self._event_at = now
        self._dispatch(event)
        return self._finish()

    def _finish(self) -> list[Effect]:
        """Delivers what this peer sent to itself, then hands the effects over."""
        while self._inbox:
            source, header, message = self._inbox.popleft()
            self._receive(source, header, message)
        effects, self._effects = self._effects, []
        return effects

    def _dispatch(self, event: Event) -> None:
        if isinstance(event, Received):
            self._receive(event.source, event.header, event.message)
            if self._is_listening and self._have_spoken():
                self._end_listening()
        elif isinstance(event, Tick):
            self._tick()
        elif isinstance(event, Stored):
            self._have([event.digest])
            self._after_blob()
        elif isinstance(event, Synced):
            self._syncing.pop(event.manifest, None)
            self._note_synced(event.manifest)
            self._pursue_proposal()
            self._pursue_catch_up()
        elif isinstance(event, SyncFailed):
            self._on_sync_failed(event)
        elif isinstance(event, Unobtainable):
            self._on_unobtainable(event)
        elif isinstance(event, Undeliverable):
            self._gone.add(event.peer)
        elif isinstance(event, UnitReduced):
            self._on_unit_reduced(event)
        elif isinstance(event, MergeComputed):
            self._on_merge_computed(event)
        elif isinstance(event, Offered):
            self._on_offered(event.offer)
        elif isinstance(event, Expected):
            self._on_expected(event)
        elif isinstance(event, LeaveAsked):
            self._on_leave_asked()
        elif isinstance(event, Discovered):
            self._on_discovered(event)
        elif isinstance(event, HeadsFound):
            self._on_heads_found(event)

    def _tick(self) -> None:
        self._tick_catch_up()
        self._tick_leaving()
        if self._has_left:
            return
        if self._is_listening:
            self._tick_listening()
            return
        if self._now >= self._next_hello:
            self._tick_membership()
        self._tick_hello()
        self._pursue_proposal()
        self._tick_campaign()
        self._tick_takeover()
        self._tick_reform()

    # ------------------------------------------------------------ messages

    def foresee(self, message: Message) -> None:
        """Works out what takes long of a message that is about to be received; changes nothing.

        May be called in another thread; if the tip moves meanwhile, that was in vain.
        """
        shown = message.accepted if isinstance(message, Ready) else message
        tip = self.tip
        if isinstance(shown, Propose | Accepted) and shown.manifest.parent == tip.digest:
            due = self._is_due(tip)
            proposal_problem(shown.manifest, shown.evidence, tip, self.rules, due=due)

    def _receive(self, source: PeerId, header: Header, message: Message) -> None:
        self._gone.discard(source)
        if header.generation == self.tip.generation and source != self.me:
            self._heard[source] = self._now  # [H3]
        if self._has_left and not isinstance(message, Hello):
            return
        if self._may_handle(header, message):
            self._handle_message(source, header, message)
            return
        self._keep_early(source, header, message)
        if header.code < self.tip.code:
            self._tell_tip(source, header.code)
        elif header.code > self.tip.code:
            self._ask_tip(source)

    def _handle_message(self, source: PeerId, header: Header, message: Message) -> None:
        if isinstance(message, Hello):
            self._on_hello(source, header, message)
        elif isinstance(message, Commit):
            self._on_commit(source, message)
        elif isinstance(message, Prepare):
            self._on_prepare(source, message)
        elif isinstance(message, Ready):
            self._on_ready(source, message)
        elif isinstance(message, Roster):
            self._on_roster(source, message)
        elif isinstance(message, Reduced):
            self._on_reduced(source, message)
        elif isinstance(message, Propose):
            self._on_propose(source, message)
        elif isinstance(message, Accept):
            self._on_accept(source, message)

    def _keep_early(self, source: PeerId, header: Header, message: Message) -> None:
        """Keeps what belongs to a tip that this peer is about to have, as the network might [C1].

        The newest of each kind and peer; the rest is repeated anyway.
        """
        if header.code >= self.tip.code and len(self._early) < MAX_EARLY:
            self._early[source, type(message)] = (header, message)

    def _replay_early(self) -> None:
        early, self._early = self._early, {}
        for (source, kind), (header, message) in early.items():
            if header.tip == self.tip.digest:
                self._inbox.append((source, header, message))
            elif header.code > self.tip.code:
                self._early[source, kind] = (header, message)

    # ------------------------------------------------------------ blobs

    def _after_blob(self) -> None:
        if self._proposal and not self._proposal.missing:
            self._pursue_proposal()
        if self._catch_up and not self._catch_up.missing:
            self._pursue_catch_up()
        if self._job and self._job.is_fetching:
            self._reduce_complete_units()

    def _on_unobtainable(self, event: Unobtainable) -> None:
        if event.peer == self.me:
            self._lose(event.digest)
            self._pursue_proposal()
            self._pursue_catch_up()
            return
        if self._job and event.digest not in self._stored:
            self._job.failed.setdefault(event.digest, {})[event.peer] = event.reason
        for pursuit in (self._proposal, self._catch_up):
            if pursuit and event.digest in pursuit.missing:
                pursuit.failed.setdefault(event.digest, set()).add(event.peer)
        self._judge_proposer(event)

    def _judge_proposer(self, event: Unobtainable) -> None:
        """A convener that proposes a value of its own that is refused is not followed [A4, U1]."""
        proposal = self._proposal
        if proposal is None or event.reason not in REFUSALS:
            return
        unit, convener = proposal.missing.get(event.digest), proposal.ballot.convener
        if unit and proposal.manifest.entries[unit].source == convener:
            self._refuse(convener, "PROPOSE", f"its value of {unit}: {event.reason}")
            self._distrusted.add(convener)

    def _on_sync_failed(self, event: SyncFailed) -> None:
        """Whatever still needs this manifest durable tries again with the next tick [A3]."""
        self._syncing.pop(event.manifest, None)
        for pursuit in (self._proposal, self._catch_up):
            if pursuit and pursuit.manifest.digest == event.manifest:
                pursuit.is_syncing = False
                self._explain(
                    Topic.ROUND,
                    f"height {pursuit.manifest.height} is not durable here, {len(pursuit.missing)} "
                    f"blobs missing, so it is neither accepted nor applied yet: {event.reason}",
                )

    # ------------------------------------------------------------ heights

    def _begin_height(self) -> None:
        if self._is_listening or self._has_left:
            return
        self._start_merge()
        self._replay_early()
        if self._is_alone and self._abstains():
            # It may have decided this height already, and others may hold that.
            self._reform("the only member has lost its record and casts no vote")
        elif self._may_vote() and self._may_use_ballot_zero():
            self._start_campaign(Ballot(0, self.me), {})
        elif self._decides_alone and self._may_vote() and self._campaign is None:
            self._take_over("this peer is the only voter")
        elif not self.is_member or self._offer or self.is_leaving:
            self._say_ready()
        self._pursue_catch_up()

    # ------------------------------------------------------------ for people

    @property
    def phase(self) -> Phase:
        """What this peer is doing now."""
        if self._has_left:
            return Phase.LEFT
        if self._is_listening:
            return Phase.LISTENING
        if self._catch_up:
            return Phase.CATCHING_UP
        if self.is_leaving:
            return Phase.LEAVING
        if not self.is_member:
            return Phase.JOINING
        if self._is_due(self.tip):
            return Phase.MERGING
        if self._proposal or self.record.accepted:
            return Phase.ACCEPTING
        if self._job and not self._job.is_done:
            return Phase.REDUCING
        return Phase.OFFERED if self._offer else Phase.TRAINING

    @property
    def campaign(self) -> CampaignInfo:
        """Who convenes this height as far as this peer knows."""
        own = self._campaign
        top = max(self._promised(), self._top or self._promised())
        return CampaignInfo(
            convener=top.convener,
            attempt=top.attempt,
            stage=own.stage.value if own else "",
            age_s=self._now - (own.started_at if own else self._top_since),
        )


__all__ = ["CampaignInfo", "Phase", "RoundMachine", "Stage"]
