"""Contributor, joiner and leaver: what a peer reports about itself.

Policies: round offers, joiner limits, member removal.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass, field

from swarm.protocol.membership.membership import Guests, why_no_vote
from swarm.protocol.messages import messages
from swarm.protocol.messages.events import Expected, Left, Topic
from swarm.protocol.rounds.blobs import Blobs
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.policies.rosters import offer_problem
from swarm.protocol.rounds.state import Life, Work
from swarm.protocol.rounds.succession import Succession
from swarm.protocol.values.invitation import Credential
from swarm.protocol.values.manifest import PeerId, Wish, leave_statement


@dataclass(eq=False)
class Contributor(Role):
    """Reports this peer's work, and its wish to join or leave, to the convener."""

    life: Life
    blobs: Blobs
    work: Work
    succession: Succession
    _has_told_outside: bool = field(init=False, default=False)

    def forget_height(self) -> None:
        """Allows the log lines that appear once a height to appear again."""
        self._has_told_outside = False

    def on_offered(self, offer: messages.Offer) -> None:
        """Offers finished local steps, if they started from the tip.

        Policies: round offers, shared progress.
        """
        for unit in offer.units.values():
            self.blobs.have([unit.digest, *([unit.delta] if unit.delta else [])])
        problem = self._why_not_offer(offer)
        if problem:
            text = f"own offer for round {self.tip.round + 1} not sent: {problem}"
            self.out.explain(Topic.ROUND, text)
            return
        work = self.work
        work.offer = offer
        if not offer.is_late:
            work.offered_at = self.now
            # Until the trainer says otherwise, the next steps are expected to take as long.
            work.stalls_at = self.now + offer.seconds if self.rules.overlaps else None
            if work.steps_s is not None:  # writing the offer takes time, too
                work.steps_s = self.now - self.standing.applied_at
        if not self.life.is_listening:
            self.say_ready()

    def on_expected(self, expected: Expected) -> None:
        """Notes when the trainer expects to finish; the next READY carries this to the convener.

        Where rounds overlap, a peer that has offered trains for the next round, and waits once
        those steps have ended (stall deadline). Until the trainer reports on a new tip, the steps
        on that tip are expected to take as long as the steps before.
        """
        if expected.tip != self.tip.digest or self.standing.is_due(self.tip):
            return
        ends_at = self.now + expected.remaining_s
        if self.work.offer is not None and not self.work.offer.is_late:
            self.work.stalls_at = ends_at if self.rules.overlaps else None
            return
        self.work.ready_at = ends_at
        self.work.steps_s = ends_at - self.standing.applied_at

    def _why_not_offer(self, offer: messages.Offer) -> str | None:
        if not self.standing.is_member:
            return "this peer is not yet a member"
        if self.standing.is_due(self.tip):
            return "a merge is due first"
        return self.offer_problem(self.me, offer)

    def offer_problem(self, peer: PeerId, offer: messages.Offer) -> str | None:
        """Why an offer may not enter this round: it must be trained from the tip [S3].

        Policy: shared progress.
        """
        return offer_problem(offer, peer, self.tip, self.rules)

    def say_ready(self) -> None:
        """Sends READY to the convener, unasked."""
        self.out.post(self.succession.convener, self.ready(self.standing.promised()))

    def ready(self, ballot: messages.Ballot) -> messages.Ready:
        """This peer's READY. A refusal is the same message with a higher ballot."""
        work, is_leaving, room = self.work, self.life.is_leaving, self.peer.room_of()
        declaration = messages.declaration_of(work.offer, self.peer.capacity, is_leaving, room)
        return messages.Ready(
            ballot,
            work.offer,
            self.standing.record.accepted,
            self.peer.capacity,
            is_leaving,
            self.peer.is_dialable and self.tip.round >= work.reduces_from,
            None if work.ready_at is None else max(0.0, work.ready_at - self.now),
            self.worked_s(),
            work.fetched_s,
            self._wish() if is_leaving else None,
            self._credential(),
            None if work.stalls_at is None else max(0.0, work.stalls_at - self.now),
            self.peer.uplink_of(),
            room,
            self._signed_declaration(declaration),
        )

    def _signed_declaration(self, declaration: messages.Declaration) -> messages.Signature:
        """The signature over a declaration, made once for each tip [A6]."""
        if declaration not in self.work.signed:
            statement = messages.ready_statement(self.rules.run, self.tip.digest, declaration)
            self.work.signed[declaration] = self.peer.sign(statement)
        return self.work.signed[declaration]

    def _wish(self) -> Wish:
        """The signed wish to leave, so that no convener can invent a wish (member removal)."""
        return b64encode(self.peer.sign(leave_statement(self.rules.run, self.tip.digest))).decode()

    def worked_s(self) -> float:
        """How long this peer has worked on the tip. The wait for other peers does not count.

        Steps that were lost in a restart do not count either.
        """
        until = self.now if self.work.offered_at is None else self.work.offered_at
        return max(0.0, until - self.standing.applied_at)

    def on_leave_asked(self) -> None:
        """Asks the convener to leave this peer out, and leaves once a manifest does so."""
        if self.life.is_leaving:
            return
        self.life.leave_until = self.now + self.timers.leave_s
        if not self.standing.is_member or self.standing.is_alone:
            self._leave("no other member needs to know")
            return
        self.out.explain(
            Topic.MEMBERSHIP,
            f"asked to leave: leaves with the next manifest, or in {self.timers.leave_s:.1f} s",
        )
        if not self.life.is_listening:
            self.say_ready()

    def tick_leaving(self) -> None:
        """Leaves if no manifest without this peer arrived in time."""
        if self.life.leave_until is None or self.life.has_left:
            return
        if self.now >= self.life.leave_until:
            self._leave(f"no manifest came within {self.timers.leave_s:.1f} s")

    def check_left(self) -> None:
        """Leaves once the tip no longer lists this peer."""
        if self.life.is_leaving and not self.life.has_left and not self.standing.is_member:
            self._leave(f"manifest {self.tip.height} lists this peer no longer")

    def _leave(self, reason: str) -> None:
        self.life.has_left = True
        self.succession.campaign = None
        self.out.explain(Topic.MEMBERSHIP, f"left: {reason}")
        self.out.emit(Left(reason))

    def tick_membership(self) -> None:
        """Asks to join, or to leave, every T_hello until a manifest fulfils the wish."""
        wants_in = not self.standing.is_member and not self.life.is_leaving
        wants_out = self.standing.is_member and self.life.is_leaving
        if (wants_in or wants_out) and not self.life.has_left:
            self.say_ready()
            if wants_in:
                self._tell_why_outside()

    def _credential(self) -> Credential | None:
        """The credential, as long as this peer may gain by showing it [R8]."""
        member, shown = self.tip.members.get(self.me), self.peer.credential
        if member and not self.guests(self.me, shown).is_raised(self.me, member):
            return None
        return shown

    def why_no_vote(self) -> str | None:
        """Why this trainee has no vote, and what is wrong with its invitation."""
        lack, shown = why_no_vote(self.tip, self.me), self.peer.credential
        problem = self.guests(self.me, shown).problem(self.me) if lack and shown else None
        return f"{lack}; {problem}" if problem else lack

    def guests(self, peer: PeerId, credential: Credential | None) -> Guests:
        """Decides, by its credential, whether a peer may join or become vouched [R8]."""
        shown = {peer: credential} if credential else {}
        return self.rules.guests(self.tip, shown)

    def _tell_why_outside(self) -> None:
        """Explains once per tip why this peer's invitation fails; no other peer reports it."""
        if self._has_told_outside:
            return
        guests = self.guests(self.me, self.peer.credential)
        problem = guests.problem(self.me)
        if problem is None or (guests.may_come(self.me) and not self.peer.credential):
            return
        self._has_told_outside = True
        if guests.may_come(self.me):
            text = f"this peer joins as a trainee, without a vote: {problem}"
        else:
            text = (
                f"this run admits invited peers only, and this peer is not invited: {problem}; ask "
                "an anchor for the text that swarm-invite prints, and pass it with --invitation"
            )
        self.out.explain(Topic.ADMISSION, text)
