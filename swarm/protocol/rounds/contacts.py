"""Tracks when each peer was last heard, and what was last sent to it.

`Gossip` greets peers and sends tips to those that are behind [H1].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Any

from swarm.protocol.messages.events import Discovered
from swarm.protocol.messages.messages import Commit, Header, Hello, Ready
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.values.manifest import Code, Digest, PeerId

MAX_KNOWN_PEERS = 512
MAX_STRANGERS = 512
"""Limit on the non-members whose messages are remembered. The oldest are forgotten first."""

SELDOM_S = 30.0
"""Upper bound of the growing pause between greetings while no quorum is heard."""

Exchanged = dict[tuple[PeerId, Digest], float]
"""When a tip was last sent to a peer, or the peer was last asked for a newer one."""


@dataclass(eq=False)
class Contacts(Role):
    """The state of other peers, as their messages have shown."""

    heard: dict[PeerId, float] = field(init=False, default_factory=dict)
    """When each peer was last heard in this generation (liveness tracking). Holds members and at
    most MAX_STRANGERS others."""
    behind: dict[PeerId, float] = field(init=False, default_factory=dict)
    """Peers whose newest message had an older tip, and when that message came."""
    gone: dict[PeerId, None] = field(init=False, default_factory=dict)
    """Peers whose machine refused a message, until they are heard again. Bounded like `heard`."""
    known: dict[PeerId, None] = field(init=False)
    """Peers to greet now and then, the newest at the end."""
    told: Exchanged = field(init=False, default_factory=dict)
    asked: Exchanged = field(init=False, default_factory=dict)
    _asked_all_at: float = field(init=False, default=-inf)
    readies: dict[PeerId, Ready] = field(init=False, default_factory=dict)
    """READYs of this height that arrived while this peer had no campaign."""
    somebody_is_ahead: bool = field(init=False, default=False)
    """Whether another peer has shown a better tip since this height, or the listening, began."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.known = dict.fromkeys(sorted(self.tip.members))
        parent = self.standing.record.parent
        if parent:
            self.known |= dict.fromkeys(sorted(parent.members))

    def forget_height(self, *, is_new_generation: bool) -> None:
        """Resets the state of the old tip."""
        self.readies = {}
        self.somebody_is_ahead = False
        self.told = {key: at for key, at in self.told.items() if key[1] == self.tip.digest}
        self.asked.clear()
        self.behind = {peer: self.behind[peer] for peer in sorted(self.those_behind())}
        if is_new_generation:
            self.heard.clear()

    def note_header(self, peer: PeerId, header: Header) -> None:
        """Remembers that a peer was heard just now, and whether it is behind."""
        self.gone.pop(peer, None)
        if header.generation == self.tip.generation and peer != self.me:
            self.heard[peer] = self.now
            self.forget_strangers(self.heard)
        if header.code < self.tip.code:
            self.behind[peer] = self.now
            self.forget_strangers(self.behind)
        else:
            self.behind.pop(peer, None)

    def note_gone(self, peer: PeerId) -> None:
        """Remembers that a peer's machine refused a message."""
        self.gone[peer] = None
        self.forget_strangers(self.gone)

    def keep_ready(self, peer: PeerId, ready: Ready) -> None:
        """Keeps a peer's READY for a campaign that may follow at this height."""
        self.readies[peer] = ready
        self.forget_strangers(self.readies)

    def forget_strangers(self, entries: dict[PeerId, Any]) -> None:
        """Drops the oldest strangers: peer ids are free to create, and a height may last weeks."""
        excess = len(entries) - len(self.tip.members) - MAX_STRANGERS
        if excess > 0:
            strangers = [peer for peer in entries if peer not in self.tip.members]
            for peer in strangers[:excess]:
                del entries[peer]

    def those_behind(self) -> set[PeerId]:
        """Live peers whose messages lately showed an older tip."""
        since = self.now - self.timers.silence_s
        return {peer for peer, at in self.behind.items() if at > since}

    def hears_quorum(self, limit_s: float) -> bool:
        """Whether a quorum of the voters was heard within the limit.

        This peer counts itself, unless it abstains and so cannot be part of a deciding quorum.
        """
        since = self.now - limit_s
        heard = [peer for peer, at in self.heard.items() if at > since]
        return self.standing.has_quorum(heard if self.standing.abstains() else [self.me, *heard])

    def ask_unheard(self, limit_s: float, waited_s: float = 0.0) -> None:
        """Greets voters not heard for `limit_s` / 2, unless a quorum was heard in that time.

        Policy: liveness tracking.

        Otherwise chance would decide whether a quorum is heard: of hundreds of healthy voters, only
        a few have a message for this peer within some seconds.

        Args:
            limit_s: time within which a quorum must have been heard.
            waited_s: how long this peer has needed a quorum. The longer, the less often it asks;
                otherwise the survivors of a large swarm would do little else.
        """
        pause_s = max(self.timers.poll_s, limit_s / 4, min(SELDOM_S, waited_s / 8))
        if self.now - self._asked_all_at < pause_s or self.hears_quorum(limit_s / 2):
            return
        self._asked_all_at = self.now
        for peer in sorted(self.standing.electorate()):
            heard_at = self.heard.get(peer, -inf)
            if peer != self.me and heard_at <= self.now - limit_s / 2:
                self.out.post(peer, Hello(ask=True))

    def remember(self, peers: Iterable[PeerId]) -> None:
        """Notes peers to greet occasionally, members or not, so that separate chains meet."""
        for peer in sorted(peers):
            self.known.pop(peer, None)
            self.known[peer] = None
        while len(self.known) > MAX_KNOWN_PEERS:
            self.known.pop(next(iter(self.known)))

    def is_rate_limited(self, last: Exchanged, key: tuple[PeerId, Digest]) -> bool:
        """Whether `key` was used less than `poll_s` ago; if not, marks it as used now."""
        if key in last and self.now - last[key] < self.timers.poll_s:
            return True
        last.pop(key, None)  # the newest are at the end
        last[key] = self.now
        excess = len(last) - len(self.tip.members) - MAX_STRANGERS
        if excess > 0:
            strangers = (known for known in last if known[0] not in self.tip.members)
            for old in list(islice(strangers, excess)):
                del last[old]
        return False


GREETED_PER_HELLO = 2
MAX_GREETED_AT_ONCE = 16


@dataclass(eq=False)
class Gossip(Role):
    """Lets chains meet: the messages between peers on different tips."""

    contacts: Contacts
    next_hello: float = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.next_hello = self.now

    def tell_tip(self, peer: PeerId, code: Code) -> None:
        """Sends COMMIT(tip) to a peer with an older tip, at most once per poll period [H1]."""
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
        """Answers a greeting that asks for an answer, or that shows another tip."""
        if header.code != self.tip.code:
            self.align(source, header)
        elif hello.ask:
            self.out.post(source, Hello(ask=False))

    def align(self, source: PeerId, header: Header) -> None:
        """Sends the tip to a peer that is behind, or asks a peer that is ahead for its tip [H1]."""
        if header.code < self.tip.code:
            self.tell_tip(source, header.code)
        elif header.code > self.tip.code:
            self.ask_tip(source)

    def tick(self) -> None:
        """Greets two voters, and one other peer that may be on another chain.

        Two are voters because each voter must hear a quorum of voters every few seconds.
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
        """Greets new peers at once, and all discovered peers now and then."""
        new = [peer for peer in event.peers if peer not in self.contacts.known and peer != self.me]
        self.contacts.remember(event.peers)
        for peer in new[:MAX_GREETED_AT_ONCE]:
            self.out.post(peer, Hello(ask=True))
