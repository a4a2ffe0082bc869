"""Gives up a lost majority: survivors continue as a new generation [F2, F3]."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

from swarm.protocol.chain.trust import reform_electors
from swarm.protocol.membership.membership import come_back
from swarm.protocol.messages.events import Regained, Topic
from swarm.protocol.messages.messages import Ballot, Certificate, Commit
from swarm.protocol.rounds.adopter import Adopter
from swarm.protocol.rounds.blobs import Blobs
from swarm.protocol.rounds.contacts import Contacts
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.policies.composition import compose_reform, new_generation
from swarm.protocol.rounds.reform_choice import ReformChoice
from swarm.protocol.rounds.state import Life, Work
from swarm.protocol.values.manifest import Digest, Member, PeerId


@dataclass(eq=False)
class Reformer(Role):
    """Reforms, or follows a reform of other peers, once this peer's generation has stalled."""

    life: Life
    contacts: Contacts
    blobs: Blobs
    work: Work
    reform_choice: ReformChoice
    adopter: Adopter
    _told: Digest | None = field(init=False, default=None)
    """The tip for which this peer has logged that it waits for others."""

    def tick(self) -> None:
        """Leaves the generation once it shows no sign of life any more."""
        reform_choice = self.reform_choice
        if reform_choice.quiet_s >= self.timers.reform_s / 2:
            # Only peers that are heard in the second half of T_reform survive, so unheard voters
            # are asked.
            self.contacts.ask_unheard(self.timers.reform_s / 2)
        if reform_choice.quiet_s < self.timers.reform_s:
            return
        if reform_choice.candidate and reform_choice.may_leave_generation():
            source, commit = reform_choice.candidate
            reform_choice.candidate = None
            self.out.explain(
                Topic.FORK, f"stalled for {self.timers.reform_s:.1f} s: a reform is adopted"
            )
            self.adopter.adopt(source, commit)
        elif not self._may_reform():
            if reform_choice.is_stalled(self.timers.reform_s):
                self._tell_wait()
        elif self._reform_due():
            self.reform(
                f"no quorum of {len(self.tip.voters)} voters heard for {self.timers.reform_s:.1f} s"
            )

    def _may_reform(self) -> bool:
        """Whether others would believe a reform by this peer [L2].

        A reform that nobody believes would leave this peer alone for good. The reform would have a
        larger code than the tip of a returning voter, so this peer would not follow this voter
        [F1]. While this peer waits, a returning voter can adopt the newest tip from this peer.
        """
        return self.me in reform_electors(self.tip.head)

    def _tell_wait(self) -> None:
        """Explains once per tip why this peer waits, and what a person can do."""
        if self._told != self.tip.digest:
            self._told = self.tip.digest
            self.out.explain(
                Topic.FORK,
                f"no quorum of {len(self.tip.voters)} voters heard for {self.timers.reform_s:.1f} "
                "s: this peer has no vote, so it waits until one of them, or the founder, is back; "
                "if none of them will return, start a new run with this model: swarm-export "
                "--state-dir, then swarm-peer --initialise-from",
            )

    def _reform_due(self) -> bool:
        """Whether to give up the lost majority now; higher ranks wait a little longer [F3].

        A peer in its local steps loses nothing by waiting, since there is nothing to average yet.
        If it reformed and the majority came back, it would lose these steps.
        """
        jitter_s = self.standing.rank * self.timers.heartbeat_s
        return (
            self.timers.reform_s < inf
            and not self.blobs.catch_up
            and not self.life.is_leaving
            and not self._is_at_work()
            and self.reform_choice.is_stalled(self.timers.reform_s + jitter_s)
        )

    def _is_at_work(self) -> bool:
        """Whether this peer's local steps are under way, by its own estimate."""
        ready_at = self.work.ready_at if self.work.offered_at is None else None
        return ready_at is not None and self.now < ready_at + self.timers.grace_s

    def reform(self, why: str) -> None:
        """Continues with the peers that still answer, as a new generation [F3]."""
        since = self.now - self.timers.reform_s / 2
        heard = [peer for peer, at in self.contacts.heard.items() if at > since]
        heard = [peer for peer in heard if self._may_survive(peer)]
        members = {peer: self._as_it_is(peer) for peer in sorted([self.me, *heard])}
        nonce = self.peer.random.getrandbits(128)
        generation = self._new_generation(nonce)
        manifest = compose_reform(self.tip, members, generation, self.rules)
        commit = Commit(manifest, Certificate(Ballot(0, self.me), {}), self.tip)
        commit = replace(commit, certificate=self.adopter.with_own_signature(commit))
        self.blobs.synced.add(manifest.digest)
        # This generation begins now, so this peer can have lost no vote in it [P5].
        begun = Regained(generation, manifest.height)
        self.standing.record = replace(self.standing.record, regained=begun)
        self.adopter.apply(
            commit,
            f"reformed at height {manifest.height}: {why}, {len(members)} continue; a peer that "
            f"joins without the founder needs --tip {manifest.height}:{manifest.digest}",
        )
        for peer in members:
            if peer != self.me:
                self.out.post(peer, commit)

    def _may_survive(self, peer: PeerId) -> bool:
        """Whether a peer that was heard becomes one of the survivors."""
        is_known = peer in self.tip.members or come_back(self.tip, peer, 1.0) is not None
        return is_known or self.rules.is_open

    def _new_generation(self, nonce: int) -> str:
        return new_generation(self.tip, self.me, nonce)

    def _as_it_is(self, peer: PeerId) -> Member:
        """A survivor with its capacity and room, as far as these are known."""
        if peer == self.me:
            return Member(0, self.peer.capacity, room=self.peer.room_of())
        if peer in self.tip.members:
            known = self.tip.members[peer]
            return Member(0, known.capacity, room=known.room)
        ready = self.contacts.readies.get(peer)
        return Member(0, ready.capacity, room=ready.room) if ready else Member(0, 1.0)
