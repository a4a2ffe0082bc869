"""What one peer knows, and the few things every role does with it: say, write down, fetch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from swarm.protocol.deadlines import Timers
from swarm.protocol.events import (
    CancelFetch,
    Effect,
    Persist,
    Purpose,
    Reason,
    Record,
    Send,
    Sync,
    Topic,
)
from swarm.protocol.invitation import Invitation
from swarm.protocol.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.merging import merge_due
from swarm.protocol.messages import (
    UNSIGNED,
    Accept,
    Accepted,
    Ballot,
    Commit,
    Declaration,
    Evidence,
    Header,
    Link,
    Message,
    Offer,
    Ready,
    ReducedUnit,
    Signature,
    accept_statement,
)
from swarm.protocol.rounds.campaign import Campaign
from swarm.protocol.rounds.reduction import Job
from swarm.protocol.rounds.rules import Randomness, Rules
from swarm.protocol.trust import Chain

Exchanged = dict[tuple[PeerId, Digest], float]
"""When a peer was last told this tip, or asked for a newer one than this."""
Sign = Callable[[bytes], Signature]
"""Signs a statement with this peer's key."""
NO_GENERATION = "00"
"""In the header of a peer that abstains; generations are "0" or have 32 digits."""


def unsigned(_: bytes) -> Signature:
    """For peers that trust each other, as in a simulation."""
    return UNSIGNED


@dataclass
class Pursuit:
    """A manifest whose blobs are being brought here, to be accepted or applied."""

    manifest: Manifest
    missing: dict[Digest, Unit]
    """Blobs that are not here yet, in the order of their units."""
    sources: tuple[PeerId, ...]
    """Peers that said they have everything, best first."""
    since: float
    progress_at: float
    is_fetching: bool = False
    is_syncing: bool = False
    failed: dict[Digest, set[PeerId]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Proposal(Pursuit):
    """A proposal on its way to being accepted [A2]."""

    ballot: Ballot
    evidence: Evidence | None


@dataclass(kw_only=True)
class CatchUp(Pursuit):
    """A decided manifest on its way to being applied [X1]."""

    commit: Commit


@dataclass
class Reign:
    """The attempts that one convener has begun at one height, one after the other [K1, A7]."""

    since: float
    attempt: int
    """The first."""
    last_attempt: int = 0
    """With a proposal."""
    proposals: set[Digest] = field(default_factory=set)
    """What this peer has taken up of them."""


class MachineState(ABC):
    """State of one peer; the roles are subclasses that together make the `RoundMachine`.

    Persistent is `record` alone; everything else is lost in a crash, by design.
    """

    def __init__(
        self,
        me: PeerId,
        capacity: float,
        rules: Rules,
        timers: Timers,
        record: Record,
        *,
        stored: Iterable[Digest],
        now: float,
        random: Randomness,
        sign: Sign = unsigned,
        is_dialable: bool = True,
        chain: Chain | None = None,
        invitation: Invitation | None = None,
    ) -> None:
        self.me = me
        self.capacity = capacity
        self.is_dialable = is_dialable
        self.invitation = invitation
        """With what this peer asks to join [R8]."""
        self.rules = rules
        self.timers = timers
        self.record = record
        self.chain = chain or Chain.of(record)
        """Heads behind the tip, to prove it to those that have another one."""
        self.reason = ""
        """Last sentence that explained a decision."""
        self._random = random
        self._sign = sign
        self._now = now
        self._begin_life(stored)
        self._forget_height()
        self._header = self._bind_header()

    def _begin_life(self, stored: Iterable[Digest]) -> None:
        """Begins anew with everything that outlasts a height, but not a crash."""
        self._effects: list[Effect] = []
        self._inbox: deque[tuple[PeerId, Header, Message]] = deque()
        # Blobs that are here; and manifests all of whose blobs are durable.
        self._stored = set(stored)
        self._synced = {self.record.tip.digest}
        if self.record.accepted:
            self._synced.add(self.record.accepted.manifest.digest)
        self._syncing: dict[Digest, Manifest] = {}
        # Who was heard when, and whom we told or asked what when (rate limits).
        self._heard: dict[PeerId, float] = {}
        self._gone: set[PeerId] = set()
        """Peers whose machine refused a message, until they are heard again."""
        self._known: dict[PeerId, None] = dict.fromkeys(sorted(self.record.tip.members))
        if self.record.parent:
            self._known |= dict.fromkeys(sorted(self.record.parent.members))
        self._told: Exchanged = {}
        self._asked: Exchanged = {}
        self._early: dict[tuple[PeerId, type], tuple[Header, Message]] = {}
        # Times.
        self._boot_at = self._event_at = self._next_hello = self._probed_at = self._now
        self._listen_until: float | None = self._now
        self._may_listen_on = False
        # This peer's own steps and duties.
        self._ready_at: float | None = None
        """When this peer expects to have finished its local steps."""
        self._steps_s: float | None = None
        """From a new tip to the end of its local steps, as expected last."""
        self._merge_asked: Digest | None = None
        self._reduces_from = 0
        """Round from which this peer is a reducer like others, after it failed as one."""
        # Other chains.
        self._catch_up: CatchUp | None = None
        self._candidate: tuple[PeerId, Commit] | None = None
        self._lingering: tuple[Manifest, ...] = ()
        self._leave_until: float | None = None
        self._has_left = False

    def _forget_height(self) -> None:
        """Begins anew with everything that refers to the height after the tip."""
        self._applied_at = self._top_since = self._convener_at = self._now
        self._collected_at = self._now  # when the convener was heard collecting [K1]
        self._somebody_is_ahead = False
        self._was_deaf = False  # in the last campaign that it gave up [C7]
        self._top: Ballot | None = None
        self._reign = Reign(self._now, 0)
        self._offer: Offer | None = None
        self._offered_at: float | None = None  # with shared tensors
        self._merged: dict[Unit, ReducedUnit] | None = None
        self._readies: dict[PeerId, Ready] = {}
        self._signed: dict[Declaration, Signature] = {}  # by this peer, for the tip
        self._campaign: Campaign | None = None
        self._has_told_wait = self._has_told_outside = False
        self._distrusted: set[PeerId] = set()  # conveners whose proposals were refused [A4]
        self._job: Job | None = None
        self._proposal: Proposal | None = None

    # ------------------------------------------------------------ what follows from the state

    @property
    def tip(self) -> Manifest:
        """The newest manifest this peer has applied."""
        return self.record.tip

    @property
    def is_member(self) -> bool:
        """Whether this peer's work counts."""
        return self.me in self.record.tip.members

    @property
    def is_leaving(self) -> bool:
        """Whether this peer was asked to leave."""
        return self._leave_until is not None

    @property
    def _is_listening(self) -> bool:
        return self._listen_until is not None

    @property
    def _is_alone(self) -> bool:
        """Whether this peer is the only member."""
        return self.is_member and len(self.tip.members) == 1

    @property
    def _decides_alone(self) -> bool:
        """Whether this peer is the only voter; there may be trainees."""
        return self.tip.voters == {self.me}

    @property
    def _rank(self) -> int:
        """Place in the order of conveners; trainees and strangers come after all voters."""
        order = self.tip.order
        return order.index(self.me) if self.me in self.tip.voters else len(order)

    def _electorate(self) -> Collection[PeerId]:
        """Peers whose promises and votes count; trainees and joiners are not among them [R7]."""
        return self.tip.voters

    def _has_quorum(self, peers: Iterable[PeerId]) -> bool:
        """Whether these peers decide the next height: a majority, or half with rank 0 [C5]."""
        electorate = self._electorate()
        return self.tip.is_quorum([peer for peer in peers if peer in electorate])

    def _hears_quorum(self, limit_s: float) -> bool:
        """Whether a quorum of the voters was heard within the limit.

        This peer counts itself among them, unless it abstains: a quorum that cannot vote is dead.
        """
        since = self._now - limit_s
        heard = [peer for peer, at in self._heard.items() if at > since]
        return self._has_quorum(heard if self._abstains() else [self.me, *heard])

    def _may_vote(self) -> bool:
        """Whether this peer may promise, accept and campaign at this height [P5]."""
        return self.me in self._electorate() and not self._abstains()

    def _abstains(self) -> bool:
        """Whether an unknown vote of this peer may be out: its record was rolled back [P5]."""
        return self.tip.height + 1 <= self.record.abstain_until_height

    def _is_due(self, manifest: Manifest) -> bool:
        """Whether the successor of this manifest must be a merge, by the manifest alone [M1]."""
        return merge_due(manifest, self.rules.merging)

    def _promised(self) -> Ballot:
        """The ballot that a READY may carry: the durable promise, else attempt 0, which is none."""
        return self.record.promised or Ballot(0, self.tip.order[0])

    def _convener(self) -> PeerId:
        """Who convenes this height, as far as this peer knows."""
        return max(self._promised(), self._top or self._promised()).convener

    # ------------------------------------------------------------ saying and writing down

    def _bind_header(self) -> Header:
        """The header of all messages under this tip [H2].

        Who casts no vote names no generation: others must not take it for part of a living quorum
        [H3, F2], or two peers of which one abstains would wait for each other for ever.
        """
        generation = NO_GENERATION if self._abstains() else self.tip.generation
        return Header(self.tip.code, self.tip.digest, generation)

    def _post(self, destination: PeerId, message: Message) -> None:
        """Sends under the header of the present tip [H2]; to oneself by way of the inbox."""
        if destination == self.me:
            self._inbox.append((self.me, self._header, message))
        else:
            self._effects.append(Send(destination, self._header, message))

    def _explain(self, topic: Topic, text: str) -> None:
        self.reason = text
        self._effects.append(Reason(topic, text))

    def _refuse(self, source: PeerId, message: str, problem: str) -> None:
        self.reason = f"{message} from {source} refused: {problem}"
        self._effects.append(Reason(Topic.REFUSED, self.reason, message))

    def _signed_accept(self, ballot: Ballot, digest: Digest) -> Accept:
        return Accept(ballot, digest, self._sign(accept_statement(self.rules.run, ballot, digest)))

    def _persist(self, record: Record, links: tuple[Link, ...] = ()) -> None:
        self.record = record
        self._effects.append(Persist(record, links))

    def _persist_promise(self, ballot: Ballot) -> None:
        """Makes a promise durable before the READY that carries it [P1]."""
        self._persist(replace(self.record, promised=ballot))

    def _persist_accepted(self, vote: Accepted) -> None:
        """The vote is durable before the ACCEPT [P2]."""
        self._persist(replace(self.record, promised=vote.ballot, accepted=vote))

    # ------------------------------------------------------------ bringing blobs here

    def _missing(self, manifest: Manifest) -> dict[Digest, Unit]:
        return {
            entry.digest: unit
            for unit, entry in manifest.entries.items()
            if entry.digest not in self._stored
        }

    def _have(self, digests: Iterable[Digest]) -> None:
        """These blobs are here now."""
        for digest in digests:
            self._stored.add(digest)
            for pursuit in (self._proposal, self._catch_up):
                if pursuit and pursuit.missing.pop(digest, None) is not None:
                    pursuit.progress_at = self._now
                    pursuit.is_fetching &= bool(pursuit.missing)

    def _lose(self, digest: Digest) -> None:
        """The shell found that a blob is not here after all."""
        self._stored.discard(digest)
        for pursuit in (self._proposal, self._catch_up):
            if pursuit is None:
                continue
            for unit, entry in pursuit.manifest.entries.items():
                if entry.digest == digest:
                    pursuit.missing[digest] = unit
                    pursuit.is_syncing = pursuit.is_fetching = False
                    self._synced.discard(pursuit.manifest.digest)

    def _note_synced(self, digest: Digest) -> None:
        """All blobs of a manifest are durable, unless one was lost since."""
        for pursuit in (self._proposal, self._catch_up):
            if pursuit and pursuit.manifest.digest == digest and pursuit.missing:
                return
        self._synced.add(digest)

    def _is_complete(self, pursuit: Pursuit) -> bool:
        """Whether all blobs of a manifest are here: never accept or apply a part [A2, X1]."""
        return not pursuit.missing

    def _start_sync(self, pursuit: Pursuit) -> None:
        if not pursuit.is_syncing:
            pursuit.is_syncing = True
            self._syncing[pursuit.manifest.digest] = pursuit.manifest
            self._effects.append(Sync(pursuit.manifest))

    def _cancel_fetch(self, purpose: Purpose, pursuit: Pursuit | None) -> None:
        if pursuit and pursuit.is_fetching:
            pursuit.is_fetching = False
            self._effects.append(CancelFetch(purpose))

    # ------------------------------------------------------------ what roles ask of each other

    @abstractmethod
    def _begin_height(self) -> None:
        """Starts what a new tip, or the end of listening, allows."""

    @abstractmethod
    def _note_ballot(self, ballot: Ballot) -> None:
        """Remembers the highest ballot seen at this height [C7, K1]."""

    @abstractmethod
    def _advance_campaign(self) -> None:
        """Takes the campaign, if there is one, as far as it goes."""

    @abstractmethod
    def _awaits_own_merge(self, pursuit: Pursuit) -> bool:
        """Whether to wait for the own computation of a merge before fetching it [M6]."""

    @abstractmethod
    def _consider_commit(self, source: PeerId, commit: Commit) -> None:
        """Adopts a decided manifest if it is better than the tip [X1]."""
