"""The convener of this height, the highest ballot, and the campaign of this peer."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.protocol.messages.events import Topic
from swarm.protocol.messages.messages import MAX_ATTEMPT, Ballot
from swarm.protocol.rounds.blobs import Blobs
from swarm.protocol.rounds.campaign import Campaign, Stage
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.values.manifest import Digest, PeerId


@dataclass
class Reign:
    """Consecutive attempts of one convener at one height (takeover, convener turns)."""

    since: float
    attempt: int
    """The first attempt."""
    last_attempt: int = 0
    """The last attempt with a proposal."""
    proposals: set[Digest] = field(default_factory=set)
    """Digests of the convener's proposals that this peer took up."""


@dataclass(eq=False)
class Succession(Role):
    """Conveners of this height. A new tip resets everything here."""

    blobs: Blobs
    top: Ballot | None = field(init=False)
    """The highest ballot seen."""
    top_since: float = field(init=False)
    convener_at: float = field(init=False)
    """When the convener last gave a sign of life."""
    collected_at: float = field(init=False)
    """When the convener was last heard collecting offers (takeover)."""
    reign: Reign = field(init=False)
    campaign: Campaign | None = field(init=False)
    """This peer's campaign, while it convenes."""
    was_deaf: bool = field(init=False)
    """Whether this peer's last campaign ended because it heard too few answers."""
    distrusted: set[PeerId] = field(init=False)
    """Conveners whose proposals were refused [A4]."""
    claims: dict[PeerId, int] = field(init=False)
    """The highest attempt that each member has named (attempt limit)."""
    passed_over: int = field(init=False)
    """The highest attempt that was refused as out of turn (convener turns)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.forget_height()

    def forget_height(self) -> None:
        """Starts over after a new tip."""
        self.top = self.campaign = None
        self.top_since = self.convener_at = self.collected_at = self.now
        self.reign = Reign(self.now, 0)
        self.was_deaf = False
        self.distrusted = set()
        self.claims = {self.me: self.standing.promised().attempt}
        self.passed_over = 0

    @property
    def highest(self) -> Ballot:
        """The highest ballot seen or promised."""
        promised = self.standing.promised()
        return max(promised, self.top or promised)

    @property
    def convener(self) -> PeerId:
        """The convener of this height, as far as this peer knows."""
        return self.highest.convener

    def note_ballot(self, ballot: Ballot) -> None:
        """Remembers the highest ballot; ends this peer's campaign if overtaken (campaign end)."""
        if self.top is not None and ballot <= self.top:
            return
        if self.top is None or self.top.convener != ballot.convener:
            self.reign = Reign(self.now, ballot.attempt)
        self.top = ballot
        self.top_since = self.convener_at = self.now
        if self.campaign and self.campaign.ballot < ballot:
            reason = self.why_step_down(self.campaign)
            if reason:
                self.step_down(reason)

    def why_step_down(self, campaign: Campaign) -> str | None:
        """Why a campaign cannot succeed; None while it may (campaign end)."""
        attempt = campaign.ballot.attempt
        if self.top and self.top > campaign.ballot:
            return f"overtaken by attempt {self.top.attempt} of {self.top.convener}"
        if campaign.stage is Stage.DECIDED and self.blobs.catch_up is None:
            return "the decided manifest gave way to a better one, which could not be fetched"
        age_s = self.now - max(campaign.started_at, campaign.awaited_at)
        limit_s = self.timers.attempt_limit_s(attempt)
        if age_s > limit_s and not self.standing.decides_alone:
            return f"attempt {attempt} took {age_s:.1f} s (limit {limit_s:.1f})"
        return None

    def step_down(self, reason: str) -> None:
        """Ends the campaign of this peer."""
        self.campaign = None
        self.convener_at = self.now
        self.out.explain(Topic.TAKEOVER, f"stepped down: {reason}")

    def is_out_of_attempts(self) -> bool:
        """Whether other peers would believe no higher ballot at this height (attempt limit)."""
        return self.highest.attempt >= MAX_ATTEMPT

    def next_ballot(self) -> Ballot:
        """A ballot above all ballots seen or promised at this height (takeover)."""
        return Ballot(max(self.highest.attempt, self.passed_over) + 1, self.me)
