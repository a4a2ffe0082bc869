"""Greetings, and tips for those that are behind [H1]."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.protocol.events import Discovered
from swarm.protocol.manifest import Code, PeerId
from swarm.protocol.messages import Commit, Header, Hello
from swarm.protocol.rounds.contacts import Contacts
from swarm.protocol.rounds.standing import Role

GREETED_PER_HELLO = 2
MAX_GREETED_AT_ONCE = 16


@dataclass(eq=False)
class Gossip(Role):
    """Lets chains meet: all that peers on different tips say to each other."""

    contacts: Contacts
    next_hello: float = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.next_hello = self.now

    def tell_tip(self, peer: PeerId, code: Code) -> None:
        """Sends COMMIT(tip) to a peer with a lesser tip, at most once per poll period [H1]."""
        if not self.contacts.is_rate_limited(self.contacts.told, (peer, self.tip.digest)):
            record = self.standing.record
            path = self.standing.chain.proof(code)
            self.out.post(peer, Commit(self.tip, record.certificate, record.parent, path))

    def ask_tip(self, peer: PeerId) -> None:
        """Asks a peer that is ahead for its tip, at most once per poll period [H1]."""
        self.contacts.somebody_is_ahead = True
        if not self.contacts.is_rate_limited(self.contacts.asked, (peer, self.tip.digest)):
            self.out.post(peer, Hello(ask=True))

    def on_hello(self, source: PeerId, header: Header, hello: Hello) -> None:
        """Answers a greeting, if it was asked for or tips differ."""
        if header.code != self.tip.code:
            self.align(source, header)
        elif hello.ask:
            self.out.post(source, Hello(ask=False))

    def align(self, source: PeerId, header: Header) -> None:
        """Tells whoever is behind the tip, or asks whoever is ahead for it [H1]."""
        if header.code < self.tip.code:
            self.tell_tip(source, header.code)
        elif header.code > self.tip.code:
            self.ask_tip(source)

    def tick(self) -> None:
        """Greets two voters, and one of the others, who may be on another chain.

        Voters must hear a quorum of each other every few seconds, however many others there are.
        """
        if self.now < self.next_hello:
            return
        self.next_hello = self.now + self.timers.hello_s
        voters = [peer for peer in sorted(self.tip.voters) if peer != self.me]
        greeted = self.peer.random.sample(voters, min(GREETED_PER_HELLO, len(voters)))
        others = [p for p in self.contacts.known if p not in self.tip.voters and p != self.me]
        greeted += self.peer.random.sample(others, min(1, len(others)))
        for peer in greeted:
            self.out.post(peer, Hello(ask=True))

    def on_discovered(self, event: Discovered) -> None:
        """Greets newcomers at once, and all of them again now and then."""
        new = [peer for peer in event.peers if peer not in self.contacts.known and peer != self.me]
        self.contacts.remember(event.peers)
        for peer in new[:MAX_GREETED_AT_ONCE]:
            self.out.post(peer, Hello(ask=True))
