"""Contributor, joiner and leaver: what a peer says about itself [O1, R2, R6]."""

from __future__ import annotations

from base64 import b64encode

from swarm.protocol.events import Expected, Topic
from swarm.protocol.invitation import Invitation
from swarm.protocol.manifest import PeerId, Wish, leave_statement
from swarm.protocol.membership import Guests
from swarm.protocol.messages import (
    Ballot,
    Declaration,
    Offer,
    Ready,
    Signature,
    declaration_of,
    ready_statement,
)
from swarm.protocol.rounds.adopter import Adopter
from swarm.protocol.rounds.rosters import offer_problem


class Contributor(Adopter):
    """Puts this peer's work, and its wish to come or go, before the convener."""

    def _on_offered(self, offer: Offer) -> None:
        """Local steps are done: offer them, if they started from the tip [O1, S1]."""
        self._have(unit.digest for unit in offer.units.values())
        problem = self._why_not_offer(offer)
        if problem:
            self._explain(Topic.ROUND, f"own offer for round {self.tip.round + 1} kept: {problem}")
            return
        self._offer = offer
        if not offer.is_late:
            self._offered_at = self._now
            if self._steps_s is not None:
                self._steps_s = self._now - self._applied_at  # writing the offer takes time, too
        if not self._is_listening:
            self._say_ready()

    def _on_expected(self, expected: Expected) -> None:
        """The trainer says how far it is: the convener is told with the next answer.

        As long as nothing is said on a new tip, its steps are taken to last as long as before.
        """
        if expected.tip == self.tip.digest:
            self._ready_at = self._now + expected.remaining_s
            self._steps_s = self._ready_at - self._applied_at

    def _why_not_offer(self, offer: Offer) -> str | None:
        if not self.is_member:
            return "this peer is not yet a member"
        if self._is_due(self.tip):
            return "a merge is due first"
        return self._offer_problem(self.me, offer)

    def _offer_problem(self, peer: PeerId, offer: Offer) -> str | None:
        """Why an offer may not enter this round: it must be trained from the tip [S1, S3]."""
        return offer_problem(offer, peer, self.tip, self.rules)

    def _say_ready(self) -> None:
        """READY to the convener, unasked."""
        self._post(self._convener(), self._ready(self._promised()))

    def _ready(self, ballot: Ballot) -> Ready:
        """This peer's answer; a refusal (higher ballot) has the same content."""
        declaration = declaration_of(self._offer, self.capacity, self.is_leaving)
        return Ready(
            ballot,
            self._offer,
            self.record.accepted,
            self.capacity,
            self.is_leaving,
            self.is_dialable and self.tip.round >= self._reduces_from,
            None if self._ready_at is None else max(0.0, self._ready_at - self._now),
            self._worked_s(),
            self._wish() if self.is_leaving else None,
            None if self.is_member else self.invitation,
            self._signed_declaration(declaration),
        )

    def _signed_declaration(self, declaration: Declaration) -> Signature:
        """Signed once, however often it is repeated; forgotten with the tip that it names [A6]."""
        if declaration not in self._signed:
            statement = ready_statement(self.rules.run, self.tip.digest, declaration)
            self._signed[declaration] = self._sign(statement)
        return self._signed[declaration]

    def _wish(self) -> Wish:
        """Proves to all that this peer asked to leave: no convener can say so of another [R1]."""
        return b64encode(self._sign(leave_statement(self.rules.run, self.tip.digest))).decode()

    def _worked_s(self) -> float:
        """How long this peer has worked on the tip; the wait for others does not count.

        Steps that a restart has destroyed do not count, either.
        """
        until = self._now if self._offered_at is None else self._offered_at
        return max(0.0, until - self._applied_at)

    def _on_leave_asked(self) -> None:
        """Tells the convener and goes when a manifest lists this peer no longer."""
        if self.is_leaving:
            return
        self._leave_until = self._now + self.timers.leave_s
        if not self.is_member or self._is_alone:
            self._leave("nobody has to be told")
            return
        self._explain(
            Topic.MEMBERSHIP,
            f"asked to leave: goes with the next manifest, or in {self.timers.leave_s:.1f} s",
        )
        if not self._is_listening:
            self._say_ready()

    def _tick_leaving(self) -> None:
        if self._leave_until is None or self._has_left:
            return
        if self._now >= self._leave_until:
            self._leave(f"no manifest came within {self.timers.leave_s:.1f} s")

    def _tick_membership(self) -> None:
        """A stranger asks to join, a leaver to be left out, each T_hello until it is heard."""
        wants_in = not self.is_member and not self.is_leaving
        wants_out = self.is_member and self.is_leaving
        if (wants_in or wants_out) and not self._has_left:
            self._say_ready()
            if wants_in:
                self._tell_why_outside()

    def _guests(self, peer: PeerId, invitation: Invitation | None) -> Guests:
        """Who may come after the tip, as far as this one peer is concerned [R8]."""
        shown = {peer: invitation} if invitation else {}
        return Guests.of(self.tip, shown, run=self.rules.run, is_open=self.rules.is_open)

    def _tell_why_outside(self) -> None:
        """Says once a tip what is wrong with its invitation; no other peer will."""
        if self._has_told_outside:
            return
        guests = self._guests(self.me, self.invitation)
        problem = guests.problem(self.me)
        if problem is None or (guests.may_come(self.me) and not self.invitation):
            return
        self._has_told_outside = True
        if guests.may_come(self.me):
            text = f"this peer comes as a trainee, without a vote: {problem}"
        else:
            text = (
                f"this run takes in peers that were invited, and this one is not: {problem}; ask "
                "an anchor for what swarm-invite prints, and pass it on with --invitation"
            )
        self._explain(Topic.ADMISSION, text)
