"""What a convener goes by: what each peer has declared, signed, to be shown to all others [A6]."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from swarm.protocol.manifest import Manifest, PeerId, turn
from swarm.protocol.messages import Declared


@dataclass
class Grounds:
    """One declaration of each peer: that of its offer in the roster, or else the last it made.

    A peer that restarts, or whose messages overtake each other, says now this, now that. Of those
    that name the very offer which is averaged, the last counts.
    """

    last: dict[PeerId, Declared] = field(default_factory=dict)
    offered: dict[PeerId, Declared] = field(default_factory=dict)
    """With the offer that would be averaged."""
    closed: dict[PeerId, Declared] = field(default_factory=dict)
    """With the offer that is in the roster which is out."""

    def note(self, peer: PeerId, declared: Declared) -> None:
        """A peer has declared something."""
        self.last[peer] = declared
        offer = declared.declaration.offer
        for known in (self.offered, self.closed):
            if peer in known and known[peer].declaration.offer == offer:
                known[peer] = declared

    def count(self, peer: PeerId) -> None:
        """The offer that a peer declared last is the one to be averaged."""
        self.offered[peer] = self.last[peer]

    def close(self, peers: Iterable[PeerId]) -> None:
        """The roster is closed with the offers of these peers."""
        self.closed = {peer: self.offered[peer] for peer in peers}

    def shown(self, tip: Manifest, guests: Collection[PeerId] = ()) -> dict[PeerId, Declared]:
        """What goes with the proposal: of strangers no more than may come in one round [R2].

        However many ask, that keeps it small. Guests are shown first, the others by lot.
        """
        strangers = sorted(
            self.last.keys() - tip.members.keys(),
            key=lambda peer: (peer not in guests, turn(tip.digest, peer), peer),
        )
        left_out = strangers[max(1, len(tip.members)) :]
        chosen = {**self.last, **self.closed}
        return {peer: chosen[peer] for peer in sorted(chosen.keys() - set(left_out))}
