"""Listens before it takes part: after a start, and after a standstill [B1, B2, H1]."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.protocol.messages.messages import Commit, Header, Hello, Message
from swarm.protocol.rounds.blobs import Blobs
from swarm.protocol.rounds.contacts import Contacts, Gossip
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.reform_choice import ReformChoice
from swarm.protocol.rounds.state import Heights, Life
from swarm.protocol.rounds.succession import Succession
from swarm.protocol.values.manifest import PeerId

MAX_EARLY = 2048


@dataclass(eq=False)
class Listener(Role):
    """Decides when this peer only listens, and which messages it may handle now."""

    life: Life
    contacts: Contacts
    blobs: Blobs
    succession: Succession
    gossip: Gossip
    reform_choice: ReformChoice
    heights: Heights
    _early: dict[tuple[PeerId, type], tuple[Header, Message]] = field(
        init=False, default_factory=dict
    )

    def listen(self) -> None:
        """Starts to listen: after booting [B1] and after a pause [B2]."""
        self.life.boot_at = self.now
        self.life.listen_until = self.now + self.timers.discover_s
        self.life.may_listen_on = True
        self.contacts.somebody_is_ahead = False
        self.succession.campaign = None
        self.contacts.heard.clear()
        if self.blobs.catch_up:
            self.blobs.catch_up.progress_at = self.now  # the fetch stood still too
        self.gossip.next_hello = self.now
        self.tick()

    def tick(self) -> None:
        """Asks all known peers for their tips until the listening ends."""
        until = self.life.listen_until
        assert until is not None
        is_over = self.now >= until and not self._is_changing_generation()
        if is_over or self.have_spoken():
            self.end()
        elif self.now >= self.gossip.next_hello:
            self.gossip.next_hello = self.now + self.timers.hello_s
            for peer in dict.fromkeys([*sorted(self.tip.members), *self.contacts.known]):
                if peer != self.me:
                    self.out.post(peer, Hello(ask=True))

    def _is_changing_generation(self) -> bool:
        """Whether a chain of survivors, found while listening, is still being fetched [B1].

        The fetch may take longer than T_disc. Votes in the old generation during the fetch could
        roll the survivors back. A fetch without progress also ends the listening (stuck fetches).
        """
        return (
            self.life.may_listen_on
            and self.blobs.catch_up is not None
            and self.reform_choice.leaves_my_generation(self.blobs.catch_up.manifest)
        )

    def end(self) -> None:
        """Ends the listening. From now on other peers have the full time for a sign of life."""
        self.life.listen_until = None
        succession = self.succession
        succession.top_since = succession.convener_at = succession.reign.since = self.now
        self.heights.begin()

    def have_spoken(self) -> bool:
        """Whether all other members were heard since listening began, and none is ahead."""
        return (
            not self.blobs.catch_up
            and not self.contacts.somebody_is_ahead
            and all(peer in self.contacts.heard for peer in self.tip.members if peer != self.me)
        )

    def may_handle(self, header: Header, message: Message) -> bool:
        """Whether to handle a message now: HELLO and COMMIT always, others on equal tips [H1]."""
        if isinstance(message, (Hello, Commit)):
            return True
        return not self.life.is_listening and header.tip == self.tip.digest

    def keep_early(self, source: PeerId, header: Header, message: Message) -> None:
        """Keeps messages of a tip that this peer may soon have [C1].

        Only the newest message of each peer and kind is kept, since senders repeat messages.
        """
        if header.code >= self.tip.code and len(self._early) < MAX_EARLY:
            self._early[source, type(message)] = (header, message)

    def replay_early(self) -> None:
        """Delivers the messages kept for the new tip, before the event is over."""
        early, self._early = self._early, {}
        for (source, kind), (header, message) in early.items():
            if header.tip == self.tip.digest:
                self.out.to_self.append((source, header, message))
            elif header.code > self.tip.code:
                self._early[source, kind] = (header, message)

    def was_paused(self) -> bool:
        """Whether nothing happened for so long that this process must have stood still [B2]."""
        return self.now - self.life.event_at > self.timers.pause_s
