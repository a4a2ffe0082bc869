"""What a convener remembers of its campaign."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum

from swarm.protocol.messages import messages
from swarm.protocol.rounds.policies.rosters import Plan
from swarm.protocol.rounds.policies.slow_links import Loads
from swarm.protocol.values.invitation import Credential
from swarm.protocol.values.manifest import Manifest, PeerId, Unit, Wish, turn


@dataclass
class Declarations:
    """One declaration of each peer: that of its offer in the roster, or else the last it made.

    A peer that restarts, or whose messages overtake each other, says now this, now that. Of those
    that name the very offer which is averaged, the last counts.
    """

    last: dict[PeerId, messages.Declared] = field(default_factory=dict)
    offered: dict[PeerId, messages.Declared] = field(default_factory=dict)
    """With the offer that would be averaged."""
    closed: dict[PeerId, messages.Declared] = field(default_factory=dict)
    """With the offer that is in the roster which is out."""

    def note(self, peer: PeerId, declared: messages.Declared) -> None:
        """A peer has declared something."""
        self.last[peer] = declared
        offer = declared.declaration.offer
        for known in (self.offered, self.closed):
            if peer in known and known[peer].declaration.offer == offer:
                known[peer] = declared

    def count(self, peer: PeerId) -> None:
        """The offer that a peer declared last is the one to be averaged."""
        self.offered[peer] = self.last[peer]

    def close(self, peers: Iterable[PeerId]) -> None:
        """The roster is closed with the offers of these peers."""
        self.closed = {peer: self.offered[peer] for peer in peers}

    def shown(
        self, tip: Manifest, guests: Collection[PeerId] = ()
    ) -> dict[PeerId, messages.Declared]:
        """What goes with the proposal: of strangers no more than may come in one round [R2].

        However many ask, that keeps it small. Guests are shown first, the others by lot.
        """
        strangers = sorted(
            self.last.keys() - tip.members.keys(),
            key=lambda peer: (peer not in guests, turn(tip.digest, peer), peer),
        )
        left_out = strangers[max(1, len(tip.members)) :]
        chosen = {**self.last, **self.closed}
        return {peer: chosen[peer] for peer in sorted(chosen.keys() - set(left_out))}


class Stage(Enum):
    """How far a campaign has come."""

    COLLECT = "collect"  # phase 1 and offers, or the own computation of a merge
    REDUCE = "reduce"  # a roster is out
    VOTE = "vote"  # a manifest is proposed
    DECIDED = "decided"  # chosen; the own blobs may still be missing


@dataclass(frozen=True)
class Estimate:
    """When a member said that its local steps will end."""

    due_at: float
    total_s: float
    """How long they will have taken then."""
    final_at: float
    """Until then it may say something else: half of the time that it said first."""


@dataclass(frozen=True)
class Value:
    """What a campaign has found to propose, and why."""

    manifest: Manifest
    evidence: messages.Evidence | None
    why: str


@dataclass
class ClosedRoster:
    """A roster that is out, and what its reducers have said."""

    plan: Plan
    closed_at: float
    averaged_s: float
    """What the slowest line of the roster takes for values that others average."""
    results: dict[Unit, messages.ReducedUnit] = field(default_factory=dict)
    reports: dict[PeerId, tuple[messages.Report, ...]] = field(default_factory=dict)
    """Signed results of each reducer, the newest first."""
    reported_at: dict[PeerId, float] = field(default_factory=dict)
    missing: dict[PeerId, dict[PeerId, str]] = field(default_factory=dict)
    """Reporter -> peers whose values it could not get, with the reason [C4]."""
    missed_at: dict[PeerId, float] = field(default_factory=dict)
    """When such a peer was named first, but for those whose values are only slow."""
    extensions: int = 0
    """How often T_red was granted once more."""

    def message(self, ballot: messages.Ballot) -> messages.Roster:
        """What says who averages what."""
        return messages.Roster(ballot, self.plan.roster_id, self.plan.offers, self.plan.able)

    def heartbeat(self, ballot: messages.Ballot) -> messages.Roster:
        """What says only that the convener is there."""
        return messages.Roster(ballot, self.plan.roster_id, {}, {})


@dataclass
class Campaign:
    """One attempt to have a manifest decided."""

    ballot: messages.Ballot
    started_at: float
    next_poll: float
    excluded: dict[PeerId, str] = field(default_factory=dict)
    """Contributors that are not waited for or averaged any more, with the reason [C4, C6]."""
    stage: Stage = Stage.COLLECT
    stage_at: float = 0.0
    num_polls: int = 0
    setbacks: int = 0
    """How often a roster was given up because trainees were missed."""
    relieved: set[PeerId] = field(default_factory=set)
    """Reducers whose units were given to others [C4]."""
    # Phase 1 [C2].
    answers: dict[PeerId, messages.Ready] = field(default_factory=dict)
    """READYs of this very ballot."""
    answered_at: dict[PeerId, float] = field(default_factory=dict)
    # A roster is open.
    seen: dict[PeerId, float] = field(default_factory=dict)
    """When the last READY of a member came, for whatever ballot [R1]."""
    silent_since: dict[PeerId, float] = field(default_factory=dict)
    """Of a convener that was replaced for its silence: when it was heard last [K1]."""
    ready_at: dict[PeerId, float] = field(default_factory=dict)
    """When a member expects to have finished its local steps."""
    stalls_at: dict[PeerId, float | None] = field(default_factory=dict)
    """When a member that has offered would wait, as it said last; None: it does."""
    worked: dict[PeerId, tuple[float, float]] = field(default_factory=dict)
    """How long a member has worked on the tip, and when it said so."""
    fetched: dict[PeerId, float] = field(default_factory=dict)
    """How long a member has fetched the tip."""
    words: dict[PeerId, Estimate] = field(default_factory=dict)
    """When members said that they will have finished their local steps."""
    awaited_at: float = 0.0
    """When there was somebody to wait for."""
    offers: dict[PeerId, messages.Offer] = field(default_factory=dict)
    grounds: Declarations = field(default_factory=Declarations)
    """What members and joiners have declared."""
    credentials: dict[PeerId, Credential] = field(default_factory=dict)
    """What joiners, and members without an anchor's word, have shown."""
    guests: set[PeerId] = field(default_factory=set)
    """Strangers that an anchor vouches for: no number of others takes their places."""
    leaving: dict[PeerId, Wish] = field(default_factory=dict)
    """Members that asked to leave, with what they signed."""
    undialable: set[PeerId] = field(default_factory=set)
    """Members that others cannot dial: they reduce only if nobody else can."""
    uplinks: dict[PeerId, int] = field(default_factory=dict)
    """Mbit/s, as members said last."""
    quorum_offered_at: float | None = None
    has_told_wait: bool = False
    planned: (
        tuple[tuple[Mapping[PeerId, messages.Offer], Set[PeerId], messages.Uplinks], Loads] | None
    ) = None
    """The inputs of the last plan, then that plan: planning takes long for 256 peers."""
    # A roster is out.
    closed: ClosedRoster | None = None
    """The last one; what came in for those before is forgotten."""
    # A manifest is proposed.
    proposal: Manifest | None = None
    evidence: messages.Evidence | None = None
    """Of the proposal."""
    holders: dict[PeerId, None] = field(default_factory=dict)
    """Peers known to hold every blob of the proposal."""
    accepts: dict[PeerId, messages.Signature] = field(default_factory=dict)

    @property
    def roster(self) -> ClosedRoster:
        """The one that is out, from the stage REDUCE on."""
        assert self.closed is not None
        return self.closed

    @property
    def in_time(self) -> set[PeerId]:
        """Peers that have offered their shared tensors."""
        return {peer for peer, offer in self.offers.items() if not offer.is_late}

    def enter(self, stage: Stage, now: float) -> None:
        """Enters a stage."""
        self.stage = stage
        self.stage_at = now
