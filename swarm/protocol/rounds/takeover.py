"""Takeover: which voter replaces a convener, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.protocol.messages.events import Topic
from swarm.protocol.messages.messages import Hello
from swarm.protocol.rounds.blobs import Blobs
from swarm.protocol.rounds.contacts import Contacts
from swarm.protocol.rounds.convener import Convener
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.state import Life
from swarm.protocol.rounds.succession import Succession
from swarm.protocol.values.manifest import PeerId


@dataclass(eq=False)
class Takeover(Role):
    """Watches the convener and takes its place when it fails."""

    life: Life
    contacts: Contacts
    blobs: Blobs
    succession: Succession
    convener: Convener
    _probed_at: float = field(init=False)
    _has_told_wait: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._probed_at = self.now

    def forget_height(self) -> None:
        """Resets the messages that are logged once a height."""
        self._has_told_wait = False

    def tick(self) -> None:
        """Convenes if it is this peer's turn."""
        self._probe_convener()
        reason = self._why_take_over()
        if reason:
            self.take_over(reason)

    def _probe_convener(self) -> None:
        """Greets a convener that sends no polls; a dead process's machine refuses the message."""
        poll_s = self.timers.poll_s
        is_silent = self.now - self.succession.convener_at >= 2 * poll_s
        if is_silent and self.now - self._probed_at >= poll_s and not self.succession.campaign:
            self._probed_at = self.now
            self.out.post(self.succession.convener, Hello(ask=False))

    def take_over(self, reason: str) -> None:
        """Begins an attempt of this peer."""
        if self.succession.is_out_of_attempts():
            return
        replaced, heard_at = self.succession.convener, self.succession.convener_at
        ballot = self.succession.next_ballot()
        self.out.explain(Topic.TAKEOVER, f"attempt {ballot.attempt} begins: {reason}")
        self.convener.start(ballot, {})
        if self.succession.campaign and replaced != self.me:
            self.succession.campaign.silent_since[replaced] = heard_at

    def _why_take_over(self) -> str | None:
        """Why this peer should convene now; None when it should not (takeover).

        Each voter waits longer than the voter before it, in the cyclic order of members. Only a
        peer that hears a quorum replaces a convener. A peer that is cut off hears no campaign: if
        it raised its ballot while it was cut off, its return would end the campaign of the others.
        """
        if self.succession.campaign or not self.standing.may_vote() or self.life.has_left:
            return None
        timers, succession = self.timers, self.succession
        silent_s = self.now - succession.convener_at
        age_s = self.now - max(succession.top_since, succession.collected_at)
        attempt = succession.top.attempt if succession.top else 0
        convener = succession.convener
        is_quiet = silent_s <= self._silence_limit_s(convener)
        if is_quiet and age_s <= timers.attempt_limit_s(attempt) and self.blobs.proposal is None:
            return None  # not even the first successor would take over
        place = self._place_after_convener()
        silence_limit_s = self._silence_limit_s(convener) * (1 + place)
        age_limit_s = timers.attempt_limit_s(attempt) + timers.heartbeat_s * place
        vain = self._why_in_vain(place)
        if silent_s <= silence_limit_s and age_s <= age_limit_s and not vain:
            return None
        if self._is_busy_catching_up():
            return None
        if not self.contacts.hears_quorum(timers.heartbeat_s):
            self.contacts.ask_unheard(timers.heartbeat_s, silent_s)
            self._tell_wait(convener, silent_s)
            return None
        if silent_s > silence_limit_s:
            return f"convener {convener} silent for {silent_s:.1f} s (limit {silence_limit_s:.1f})"
        if age_s > age_limit_s:
            return f"attempt {attempt} of {convener} is {age_s:.1f} s old (limit {age_limit_s:.1f})"
        return vain

    def _silence_limit_s(self, convener: PeerId) -> float:
        """Silence after which a convener is replaced by the member after it."""
        return self.timers.poll_s if convener in self.contacts.gone else self.timers.heartbeat_s

    def _why_in_vain(self, place: int) -> str | None:
        """Why the present proposal will not be decided: some blobs cannot be fetched (takeover).

        Its convener may have blobs that nobody else can fetch, or that all others refuse. The limit
        of an attempt would end the campaign late, since it allows for the longest wait for offers.
        """
        proposal = self.blobs.proposal
        if proposal is None or not proposal.missing:
            return None
        # A new convener gets the full time; otherwise two conveners would replace each other. A
        # further attempt of the same convener does not; otherwise it could convene for ever.
        stuck_s = self.now - max(proposal.progress_at, self.succession.reign.since)
        limit_s = self.timers.proposal_limit_s(self.succession.reign.attempt)
        limit_s += self.timers.heartbeat_s * place
        if stuck_s <= limit_s:
            return None
        return (
            f"{len(proposal.missing)} blobs of the proposal cannot be had: nothing new for "
            f"{stuck_s:.1f} s (limit {limit_s:.1f})"
        )

    def _place_after_convener(self) -> int:
        """The number of places from the present convener to this voter, in cyclic order.

        0 for the convener itself, unless it has to let all others go first. The count starts at the
        present convener, so that a replaced convener is not the first to replace others.
        """
        order, convener = self.tip.order, self.succession.convener
        if convener == self.me and self._goes_last():
            return self._last_place()
        start = order.index(convener) if convener in order else 0
        return (self.standing.rank - start) % len(order)

    def _goes_last(self) -> bool:
        """Whether this peer lets all others go first before it convenes again (takeover).

        A convener that got no answers may hear all members, while only one member hears it. If it
        convened again before its successors have finished, this member would always refuse the
        successors.
        """
        return self.succession.was_deaf

    def _last_place(self) -> int:
        """A place behind all others; peers that go last are ordered by their ranks.

        Two conveners without answers may each have refused the other while convening (convener
        turns). With equal waits, the two would always begin at the same moment.
        """
        return len(self.tip.order) + self.standing.rank

    def _tell_wait(self, convener: PeerId, silent_s: float) -> None:
        """Explains once per height why this peer waits."""
        if not self._has_told_wait:
            self._has_told_wait = True
            self.out.explain(
                Topic.TAKEOVER,
                f"waits: convener {convener} silent for {silent_s:.1f} s, and no quorum of the "
                f"{len(self.tip.voters)} voters was heard for {self.timers.heartbeat_s:.1f} s",
            )

    def _is_busy_catching_up(self) -> bool:
        """Whether a decided manifest is arriving, so that this height will end anyway.

        Arrivals count when a unit is complete; a unit of a large model takes half a minute on a
        slow link.
        """
        pursuit = self.blobs.catch_up
        limit_s = max(2 * self.timers.heartbeat_s, self.timers.vote_s / 2)
        return pursuit is not None and self.now - pursuit.progress_at <= limit_s
