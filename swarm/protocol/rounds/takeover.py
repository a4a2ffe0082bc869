"""Takeover: who replaces a convener, and when [K1, C7]."""

from __future__ import annotations

from swarm.protocol.events import Topic
from swarm.protocol.manifest import PeerId
from swarm.protocol.messages import Ballot, Hello
from swarm.protocol.rounds.convener import Convener
from swarm.protocol.rounds.state import Reign


class Takeover(Convener):
    """Watches the convener and takes its place when it fails."""

    def _note_ballot(self, ballot: Ballot) -> None:
        """Remembers the highest ballot; a convener that was overtaken steps down [C7]."""
        if self._top is not None and ballot <= self._top:
            return
        if self._top is None or self._top.convener != ballot.convener:
            self._reign = Reign(self._now, ballot.attempt)
        self._top = ballot
        self._top_since = self._convener_at = self._now
        if self._campaign and self._campaign.ballot < ballot:
            reason = self._why_step_down(self._campaign)
            if reason:
                self._step_down(reason)

    def _tick_takeover(self) -> None:
        self._probe_convener()
        reason = self._why_take_over()
        if reason:
            self._take_over(reason)

    def _probe_convener(self) -> None:
        """Greets a convener whose polls stay away: if it is gone, its machine says so at once."""
        poll_s = self.timers.poll_s
        is_silent = self._now - self._convener_at >= 2 * poll_s
        if is_silent and self._now - self._probed_at >= poll_s and not self._campaign:
            self._probed_at = self._now
            self._post(self._convener(), Hello(ask=False))

    def _take_over(self, reason: str) -> None:
        if self._is_out_of_attempts():
            return
        replaced, heard_at = self._convener(), self._convener_at
        ballot = self._next_ballot()
        self._explain(Topic.TAKEOVER, f"attempt {ballot.attempt} begins: {reason}")
        self._start_campaign(ballot, {})
        if self._campaign and replaced != self.me:
            self._campaign.silent_since[replaced] = heard_at

    def _why_take_over(self) -> str | None:
        """Why this peer should convene now; None when it should not [K1].

        In the order of members, going round, each waits longer than the one before. Only a peer
        that hears a quorum deposes a convener: one that was cut off hears no campaign, and with a
        higher ballot of its own it would end the one that goes on without it when it comes back.
        """
        if self._campaign or not self._may_vote() or self._has_left:
            return None
        timers = self.timers
        silent_s = self._now - self._convener_at
        age_s = self._now - max(self._top_since, self._collected_at)
        attempt = self._top.attempt if self._top else 0
        convener = self._convener()
        is_quiet = silent_s <= self._silence_limit_s(convener)
        if is_quiet and age_s <= timers.attempt_limit_s(attempt) and self._proposal is None:
            return None  # not even the first in turn would
        place = self._place_after_convener()
        silence_limit_s = self._silence_limit_s(convener) * (1 + place)
        age_limit_s = timers.attempt_limit_s(attempt) + timers.heartbeat_s * place
        vain = self._why_in_vain(place)
        if silent_s <= silence_limit_s and age_s <= age_limit_s and not vain:
            return None
        if self._is_busy_catching_up():
            return None
        if not self._hears_quorum(timers.heartbeat_s):
            self._tell_wait(convener, silent_s)
            return None
        if silent_s > silence_limit_s:
            return f"convener {convener} silent for {silent_s:.1f} s (limit {silence_limit_s:.1f})"
        if age_s > age_limit_s:
            return f"attempt {attempt} of {convener} is {age_s:.1f} s old (limit {age_limit_s:.1f})"
        return vain

    def _silence_limit_s(self, convener: PeerId) -> float:
        """Silence after which a convener is replaced by the member after it."""
        return self.timers.poll_s if convener in self._gone else self.timers.heartbeat_s

    def _why_in_vain(self, place: int) -> str | None:
        """Why the present proposal will not be decided: a part of it cannot be had [K1].

        Its convener may have what nobody else can fetch, or what all others refuse, and an attempt
        may last as long as a roster may wait.
        """
        proposal = self._proposal
        if proposal is None or not proposal.missing:
            return None
        # Another convener gets the time anew, else two would depose each other; the same one does
        # not, or it could go on for ever.
        stuck_s = self._now - max(proposal.progress_at, self._reign.since)
        limit_s = self.timers.proposal_limit_s(self._reign.attempt)
        limit_s += self.timers.heartbeat_s * place
        if stuck_s <= limit_s:
            return None
        return (
            f"{len(proposal.missing)} blobs of the proposal cannot be had: nothing new for "
            f"{stuck_s:.1f} s (limit {limit_s:.1f})"
        )

    def _place_after_convener(self) -> int:
        """How many voters come between the convener and this one, it included.

        0 for the convener itself, unless it has to let all others go first. Counted from the
        present convener: who was deposed once is not the first to depose others.
        """
        order, convener = self.tip.order, self._convener()
        if convener == self.me and self._goes_last():
            return len(order)
        start = order.index(convener) if convener in order else 0
        return (self._rank - start) % len(order)

    def _goes_last(self) -> bool:
        """Whether this peer waits behind all others before it convenes once more [K1].

        Who got no answers may hear everybody and be heard by one member alone. If it were back
        before its successors are done, that one would refuse them all, for ever.
        """
        return self._was_deaf

    def _tell_wait(self, convener: PeerId, silent_s: float) -> None:
        """Says once a height why nothing happens."""
        if not self._has_told_wait:
            self._has_told_wait = True
            self._explain(
                Topic.TAKEOVER,
                f"waits: convener {convener} silent for {silent_s:.1f} s, and no quorum of the "
                f"{len(self.tip.voters)} voters was heard for {self.timers.heartbeat_s:.1f} s",
            )

    def _is_busy_catching_up(self) -> bool:
        """Whether a decided manifest is arriving, so that this height is over anyway."""
        pursuit = self._catch_up
        return (
            pursuit is not None and self._now - pursuit.progress_at <= 2 * self.timers.heartbeat_s
        )
