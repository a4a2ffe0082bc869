"""The state of a convener's campaign."""

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
    """One declaration of each peer: that of its offer in the roster, or else its last declaration.

    A peer may make several declarations, by a restart or by messages that overtake each other. Of
    the declarations that name the averaged offer, the last counts.
    """

    last: dict[PeerId, messages.Declared] = field(default_factory=dict)
    offered: dict[PeerId, messages.Declared] = field(default_factory=dict)
    """Declarations of the offers that would be averaged."""
    closed: dict[PeerId, messages.Declared] = field(default_factory=dict)
    """Declarations of the offers in the closed roster."""

    def note(self, peer: PeerId, declared: messages.Declared) -> None:
        """Notes a peer's declaration."""
        self.last[peer] = declared
        offer = declared.declaration.offer
        for known in (self.offered, self.closed):
            if peer in known and known[peer].declaration.offer == offer:
                known[peer] = declared

    def count(self, peer: PeerId) -> None:
        """Makes a peer's last declared offer the offer to average."""
        self.offered[peer] = self.last[peer]

    def close(self, peers: Iterable[PeerId]) -> None:
        """Closes the roster with the offers of these peers."""
        self.closed = {peer: self.offered[peer] for peer in peers}

    def shown(
        self, tip: Manifest, guests: Collection[PeerId] = ()
    ) -> dict[PeerId, messages.Declared]:
        """Declarations for the proposal, of at most as many strangers as a round admits.

        Policy: joiner limits.

        The limit keeps the proposal small, however many strangers ask to join. Guests are chosen
        first, then others by lot.
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

    COLLECT = "collect"  # collects promises and offers, or computes a merge
    REDUCE = "reduce"  # a roster is closed, and its values are averaged
    VOTE = "vote"  # a manifest is proposed
    DECIDED = "decided"  # a quorum has voted; blobs may still be missing here


@dataclass(frozen=True)
class Estimate:
    """A member's estimate of when its local steps will end."""

    due_at: float
    total_s: float
    """Time from the beginning of the steps to their expected end."""
    final_at: float
    """The member may change its estimate until this time, which is half of its first estimate."""


@dataclass(frozen=True)
class Value:
    """The value that a campaign proposes, and the reason."""

    manifest: Manifest
    evidence: messages.Evidence | None
    why: str


@dataclass
class ClosedRoster:
    """A roster that is closed, and the reports of its reducers."""

    plan: Plan
    closed_at: float
    averaged_s: float
    """Seconds that the slowest link of the roster needs for values that others average."""
    results: dict[Unit, messages.ReducedUnit] = field(default_factory=dict)
    reports: dict[PeerId, tuple[messages.Report, ...]] = field(default_factory=dict)
    """Signed results of each reducer, the newest first."""
    reported_at: dict[PeerId, float] = field(default_factory=dict)
    missing: dict[PeerId, dict[PeerId, str]] = field(default_factory=dict)
    """For each reporting reducer, the peers whose values it could not fetch, with the reason
    (roster repair)."""
    missed_at: dict[PeerId, float] = field(default_factory=dict)
    """When a peer's values were first reported missing, unless they were only slow."""
    extensions: int = 0
    """How often T_red was extended."""

    def message(self, ballot: messages.Ballot) -> messages.Roster:
        """The message that assigns the averaging."""
        return messages.Roster(ballot, self.plan.roster_id, self.plan.offers, self.plan.able)

    def heartbeat(self, ballot: messages.Ballot) -> messages.Roster:
        """An empty roster, as a sign of life of the convener."""
        return messages.Roster(ballot, self.plan.roster_id, {}, {})


@dataclass
class Campaign:
    """One attempt to have a manifest decided."""

    ballot: messages.Ballot
    started_at: float
    next_poll: float
    excluded: dict[PeerId, str] = field(default_factory=dict)
    """Contributors that the campaign leaves out, with the reason [C6] (roster repair)."""
    stage: Stage = Stage.COLLECT
    stage_at: float = 0.0
    num_polls: int = 0
    setbacks: int = 0
    """How often a roster was given up because trainees delayed it."""
    relieved: set[PeerId] = field(default_factory=set)
    """Reducers whose units were given to others (roster repair)."""
    # Phase 1 [C2].
    answers: dict[PeerId, messages.Ready] = field(default_factory=dict)
    """READYs for exactly this ballot."""
    answered_at: dict[PeerId, float] = field(default_factory=dict)
    # A roster is open.
    seen: dict[PeerId, float] = field(default_factory=dict)
    """When the last READY of each member arrived, for any ballot (member removal)."""
    silent_since: dict[PeerId, float] = field(default_factory=dict)
    """When each convener that was replaced for its silence was last heard (takeover)."""
    ready_at: dict[PeerId, float] = field(default_factory=dict)
    """When each member expects its local steps to end."""
    stalls_at: dict[PeerId, float | None] = field(default_factory=dict)
    """When each member with an offer runs out of steps, as it last said; None: it waits already."""
    worked: dict[PeerId, tuple[float, float]] = field(default_factory=dict)
    """How long each member had worked on the tip, and when it said so."""
    fetched: dict[PeerId, float] = field(default_factory=dict)
    """How long each member took to fetch the tip."""
    words: dict[PeerId, Estimate] = field(default_factory=dict)
    """Members' estimates of when their local steps will end."""
    awaited_at: float = 0.0
    """When the roster last had a member to wait for."""
    offers: dict[PeerId, messages.Offer] = field(default_factory=dict)
    grounds: Declarations = field(default_factory=Declarations)
    """The declarations of members and joiners."""
    credentials: dict[PeerId, Credential] = field(default_factory=dict)
    """Credentials of joiners, and of members for which no anchor vouches yet."""
    guests: set[PeerId] = field(default_factory=set)
    """Strangers for which an anchor vouches. They are admitted before all others."""
    leaving: dict[PeerId, Wish] = field(default_factory=dict)
    """Members that asked to leave, with their signed wishes."""
    undialable: set[PeerId] = field(default_factory=set)
    """Members that others cannot dial: they reduce only if nobody else can."""
    uplinks: dict[PeerId, int] = field(default_factory=dict)
    """Uplink of each member in Mbit/s, as last reported."""
    quorum_offered_at: float | None = None
    has_told_wait: bool = False
    planned: (
        tuple[tuple[Mapping[PeerId, messages.Offer], Set[PeerId], messages.Uplinks], Loads] | None
    ) = None
    """Inputs of the last plan, and the plan; cached, since planning for 256 peers is slow."""
    # A roster is closed.
    closed: ClosedRoster | None = None
    """The last closed roster. Results for earlier ones are dropped."""
    # A manifest is proposed.
    proposal: Manifest | None = None
    evidence: messages.Evidence | None = None
    """Evidence of the proposal."""
    holders: dict[PeerId, None] = field(default_factory=dict)
    """Peers known to hold every blob of the proposal."""
    accepts: dict[PeerId, messages.Signature] = field(default_factory=dict)

    @property
    def roster(self) -> ClosedRoster:
        """The closed roster, which exists from the stage REDUCE on."""
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
