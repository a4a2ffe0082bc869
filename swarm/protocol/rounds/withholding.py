"""Peers that offer values but serve nobody. A convener leaves them out of its rounds.

Policy: withholding exclusion.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from swarm.protocol.messages.messages import Hello
from swarm.protocol.rounds.contacts import Contacts
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.values.manifest import Manifest, PeerId

LEFT_OUT_ROUNDS = 8
"""A peer is tried again after this many rounds, so at most one round in nine is delayed."""


def left_out_after(
    known: Mapping[PeerId, int], withheld: Collection[PeerId], tip: Manifest
) -> dict[PeerId, int]:
    """Peers to leave out of the rounds after `tip`, each with the last of these rounds. Pure.

    Policy: withholding exclusion.

    A peer that the tip counts has served others, so its entry is removed. Entries of peers that are
    no members are removed too. At most the members that withheld most recently are left out, fewer
    than half of all.

    Args:
        known: result of this function for the tip's parent.
        withheld: peers that served nothing in the round of the tip, though they were heard.
        tip: the manifest that was decided.
    """
    until = {**known, **dict.fromkeys(withheld, tip.round + LEFT_OUT_ROUNDS)}
    outside = [
        peer
        for peer, last in until.items()
        if last > tip.round and peer in tip.members and not tip.counts(peer)
    ]
    outside.sort(key=lambda peer: (-until[peer], peer))
    return {peer: until[peer] for peer in outside[: (len(tip.members) - 1) // 2]}


@dataclass(eq=False)
class Withholding(Role):
    """This peer's own observations of peers that withhold their values."""

    contacts: Contacts
    until: dict[PeerId, int] = field(init=False, default_factory=dict)
    """For each withholding peer, the last round from which this peer, as convener, leaves it
    out."""
    suspects: dict[PeerId, float] = field(init=False, default_factory=dict)
    """Peers whose values did not arrive, with the time since when this height continues without
    them."""

    def greet(self, peers: Collection[PeerId]) -> None:
        """Greets peers whose values are missing, unless they were just heard."""
        heard, since = self.contacts.heard, self.now - self.timers.poll_s
        for peer in sorted(peers):
            if heard.get(peer, since) <= since:
                self.out.post(peer, Hello(ask=True))

    def suspect(self, peers: Collection[PeerId], asked: Collection[PeerId]) -> None:
        """Notes peers without which the round continues, because their values did not arrive.

        If most of the asked peers sent nothing, none is noted, since this peer's own link may be
        the cause. A silent peer is not noted either: it has died or is cut off, and may return in
        order.
        """
        if 2 * len(peers) > len(asked):
            return
        for peer in sorted(peers):
            if peer not in self.suspects and self._lives(peer):
                self.suspects[peer] = self.now
                self.out.post(peer, Hello(ask=True))

    def _lives(self, peer: PeerId) -> bool:
        """Whether a peer has answered lately. After `silence_s`, a silent peer is left out anyway.

        Policy: roster repair.
        """
        heard_at = self.contacts.heard.get(peer)
        lately_s = self.timers.silence_s * 2 / 3
        is_heard = heard_at is not None and self.now - heard_at < lately_s
        return is_heard and peer not in self.contacts.gone

    def forget_height(self) -> None:
        """Judges the round of the new tip: suspects that answered since have withheld values."""
        heard = self.contacts.heard
        withheld = [peer for peer, at in self.suspects.items() if heard.get(peer, at) > at]
        self.until = left_out_after(self.until, withheld, self.tip)
        self.suspects = {}

    def left_out(self) -> dict[PeerId, str]:
        """Peers that are left out of the next round from its start, with the reason."""
        return {
            peer: f"it offered values and served none: tried again after round {last}"
            for peer, last in self.until.items()
        }
