"""Listening before speaking, gossip, lost majorities and how chains find together [B1-F3]."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from swarm.protocol.events import Discovered, Purpose, Topic
from swarm.protocol.manifest import Manifest, Member, PeerId
from swarm.protocol.messages import Ballot, Certificate, Commit, Header, Hello, Message
from swarm.protocol.rounds.adopter import Adopter
from swarm.protocol.rounds.composition import compose_reform, new_generation

GREETED_PER_HELLO = 2
MAX_GREETED_AT_ONCE = 16


class Forks(Adopter):
    """Keeps the chains of a run together."""

    # ------------------------------------------------------------ listening

    def _listen(self) -> None:
        """Starts to listen: after booting [B1] and after a pause [B2]."""
        self._boot_at = self._now
        self._listen_until = self._now + self.timers.discover_s
        self._somebody_is_ahead = False
        self._may_listen_on = True
        self._campaign = None
        self._heard.clear()
        if self._catch_up:
            self._catch_up.progress_at = self._now  # it stood still with this process [X2]
        self._next_hello = self._now
        self._tick_listening()

    def _tick_listening(self) -> None:
        assert self._listen_until is not None
        is_over = self._now >= self._listen_until and not self._is_changing_generation()
        if is_over or self._have_spoken():
            self._end_listening()
        elif self._now >= self._next_hello:
            self._next_hello = self._now + self.timers.hello_s
            for peer in dict.fromkeys([*sorted(self.tip.members), *self._known]):
                if peer != self.me:
                    self._post(peer, Hello(ask=True))

    def _is_changing_generation(self) -> bool:
        """Whether survivors' chain, found while listening, is still on its way here [B1].

        It may take longer than T_disc; to act in the old generation meanwhile could roll the
        survivors back. A fetch without progress ends the listening as well [X2].
        """
        return (
            self._may_listen_on
            and self._catch_up is not None
            and self._leaves_my_generation(self._catch_up.manifest)
        )

    def _end_listening(self) -> None:
        self._listen_until = None
        self._top_since = self._convener_at = self._reign.since = self._now
        self._begin_height()

    def _have_spoken(self) -> bool:
        """Whether all other members have shown, since listening began, to be no further."""
        return (
            not self._catch_up
            and not self._somebody_is_ahead
            and all(peer in self._heard for peer in self.tip.members if peer != self.me)
        )

    def _may_handle(self, header: Header, message: Message) -> bool:
        """Whether a message is for now: HELLO and COMMIT always, others on equal tips [H1]."""
        if isinstance(message, (Hello, Commit)):
            return True
        return not self._is_listening and header.tip == self.tip.digest

    def _was_paused(self) -> bool:
        """Whether nothing happened for so long that this process must have stood still [B2]."""
        return self._now - self._event_at > self.timers.patience_s

    # ------------------------------------------------------------ gossip

    def _on_hello(self, source: PeerId, header: Header, hello: Hello) -> None:
        if header.code < self.tip.code:
            self._tell_tip(source, header.code)
        elif header.code > self.tip.code:
            self._ask_tip(source)
        elif hello.ask:
            self._post(source, Hello(ask=False))

    def _tick_hello(self) -> None:
        """Greets two voters, and one of the others, who may be on another chain.

        Voters must hear a quorum of each other every few seconds, however many others there are.
        """
        if self._now < self._next_hello:
            return
        self._next_hello = self._now + self.timers.hello_s
        voters = [peer for peer in sorted(self.tip.voters) if peer != self.me]
        greeted = self._random.sample(voters, min(GREETED_PER_HELLO, len(voters)))
        others = [p for p in self._known if p not in self.tip.voters and p != self.me]
        greeted += self._random.sample(others, min(1, len(others)))
        for peer in greeted:
            self._post(peer, Hello(ask=True))

    def _on_discovered(self, event: Discovered) -> None:
        """Greets newcomers at once, and all of them again now and then."""
        new = [peer for peer in event.peers if peer not in self._known and peer != self.me]
        self._remember_peers(event.peers)
        for peer in new[:MAX_GREETED_AT_ONCE]:
            self._post(peer, Hello(ask=True))

    # ------------------------------------------------------------ fork choice

    def _consider_commit(self, source: PeerId, commit: Commit) -> None:
        """Adopts, unless it is a reform of the generation that still lives here [F2]."""
        manifest = commit.manifest
        self._set_reform_aside()
        if not self._leaves_my_generation(manifest) or self._may_leave_generation():
            self._adopt(source, commit)
        else:
            self._hold_back(source, commit)

    def _hold_back(self, source: PeerId, commit: Commit) -> None:
        """Remembers the best reform, in case this generation stalls."""
        manifest = commit.manifest
        best = self._candidate
        if best and best[1].manifest.code >= manifest.code:
            return
        self._candidate = (source, commit)
        self._explain(
            Topic.FORK,
            f"reform {manifest.generation[:8]} with {len(manifest.members)} members is held back: "
            f"applied {self._now - self._applied_at:.1f} s ago, a quorum counts as alive for "
            f"{self.timers.reform_s:.1f} s",
        )

    def _leaves_my_generation(self, manifest: Manifest) -> bool:
        """Whether a manifest descends from a reform of this peer's own generation [F2]."""
        mine, other = self.tip.lineage, manifest.lineage
        return len(other) > len(mine) and other[: len(mine)] == mine

    def _may_leave_generation(self) -> bool:
        """While listening the best chain is taken as it is [B1], later only when stalled [F2]."""
        return self._is_listening or self._is_stalled(self.timers.reform_s)

    def _pursue_catch_up(self) -> None:
        self._set_reform_aside()
        super()._pursue_catch_up()

    def _set_reform_aside(self) -> None:
        """A quorum that came back while a reform was fetched keeps this peer [F2].

        The fetch ends, for as long as it lasts nothing of the own generation can be adopted.
        """
        pursuit = self._catch_up
        if (
            pursuit is None
            or not self._leaves_my_generation(pursuit.manifest)
            or self._may_leave_generation()
        ):
            return
        self._cancel_fetch(Purpose.CATCH_UP, pursuit)
        self._catch_up = None
        self._hold_back(pursuit.sources[0], pursuit.commit)

    def _is_stalled(self, limit_s: float) -> bool:
        """Whether this generation has given no sign of life for so long [F2]."""
        return self._now - max(
            self._boot_at, self._applied_at
        ) >= limit_s and not self._hears_quorum(limit_s)

    def _tick_reform(self) -> None:
        if self._now - max(self._boot_at, self._applied_at) < self.timers.reform_s:
            return
        if self._candidate and self._may_leave_generation():
            source, commit = self._candidate
            self._candidate = None
            self._explain(
                Topic.FORK, f"stalled for {self.timers.reform_s:.1f} s: a reform is adopted"
            )
            self._adopt(source, commit)
        elif self._reform_due():
            self._reform(
                f"no quorum of {len(self.tip.voters)} voters heard for {self.timers.reform_s:.1f} s"
            )

    def _reform_due(self) -> bool:
        """Whether to give up the lost majority; higher ranks wait a little longer [F3].

        A peer that is still at its local steps loses nothing by waiting: there is nothing to
        average yet. By a reform it would lose them if its majority came back.
        """
        jitter_s = self._rank * self.timers.heartbeat_s
        return (
            self.timers.reform_s < inf
            and not self._catch_up
            and not self.is_leaving
            and not self._is_at_work()
            and self._is_stalled(self.timers.reform_s + jitter_s)
        )

    def _is_at_work(self) -> bool:
        """Whether this peer's local steps are under way, by its own word."""
        ready_at = self._ready_at if self._offered_at is None else None
        return ready_at is not None and self._now < ready_at + self.timers.grace_s

    def _reform(self, why: str) -> None:
        """Goes on with those that still answer, as a generation of its own [F3]."""
        since = self._now - self.timers.reform_s / 2
        heard = [peer for peer, at in self._heard.items() if at > since and self._may_survive(peer)]
        members = {peer: Member(0, self._capacity_of(peer)) for peer in sorted([self.me, *heard])}
        nonce = self._random.getrandbits(128)
        generation = self._new_generation(nonce)
        manifest = compose_reform(self.tip, members, generation, self.rules, reformer=self.me)
        commit = Commit(manifest, Certificate(Ballot(0, self.me), {}), self.tip)
        commit = replace(commit, certificate=self._with_own_signature(commit))
        self._synced.add(manifest.digest)
        # Nobody can have voted in a generation that begins here, so the abstention ends [P5].
        self.record = replace(self.record, abstain_until_height=0)
        self._apply(
            commit,
            f"reformed at height {manifest.height}: {why}, {len(members)} go on; who joins without "
            f"the founder there needs --tip {manifest.height}:{manifest.digest}",
        )
        for peer in members:
            if peer != self.me:
                self._post(peer, commit)

    def _may_survive(self, peer: PeerId) -> bool:
        """Whether a peer that was heard goes on with the survivors."""
        is_known = peer in self.tip.members or peer == self.tip.founding.founder
        return is_known or self.rules.is_open

    def _new_generation(self, nonce: int) -> str:
        return new_generation(self.tip, self.me, nonce)

    def _capacity_of(self, peer: PeerId) -> float:
        if peer == self.me:
            return self.capacity
        if peer in self.tip.members:
            return self.tip.members[peer].capacity
        ready = self._readies.get(peer)
        return ready.capacity if ready else 1.0
