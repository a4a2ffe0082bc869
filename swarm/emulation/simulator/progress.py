"""Whether peers that are spared from faults have rounds, all of them [I3]."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf

from swarm.emulation.simulator.violation import Violation
from swarm.protocol.manifest import Kind, Manifest, PeerId


class Progress:
    """Hears of every tip of the spared peers; what anybody else has is no progress."""

    def __init__(
        self,
        spared: Collection[PeerId],
        founding: Manifest,
        limit_s: float,
        excused_s: Callable[[float, float], float],
    ) -> None:
        """Everybody begins with manifest 0.

        Args:
            spared: peers that must have rounds; empty: nothing is judged.
            founding: manifest 0.
            limit_s: longest time between two rounds of more than half of them, and longest time
                in which one of them lacks what more than half have.
            excused_s: seconds between two moments that do not count.
        """
        self._limit_s, self._excused_s = limit_s, excused_s
        self._tips = dict.fromkeys(spared, founding)
        self._rounds = dict.fromkeys(spared, founding.code)
        """Of the newest tip of each that brought it a round."""
        self._level = founding.code
        """What more than half of them have reached by rounds."""
        self._risen_s = 0.0
        self._behind_s: dict[PeerId, float] = {}
        """Since when a peer lacks the level."""
        self._due_s = limit_s if spared else inf

    def applied(self, peer: PeerId, tip: Manifest, now_s: float) -> None:
        """A peer has a new tip.

        Raises:
            Violation: I3, if it came too late.
        """
        before = self._tips.get(peer)
        if before is None:
            return
        self.require(now_s)
        self._tips[peer] = tip
        if tip.kind is Kind.QUORUM or tip.round != before.round:
            self._rounds[peer] = tip.code
        level = sorted(self._rounds.values(), reverse=True)[len(self._rounds) // 2]
        if level > self._level:
            self._level, self._risen_s = level, now_s
        behind = (peer for peer, tip in self._tips.items() if tip.code < self._level)
        self._behind_s = {peer: self._behind_s.get(peer, now_s) for peer in behind}
        self._due_s = min([self._risen_s, *self._behind_s.values()]) + self._limit_s

    def require(self, now_s: float) -> None:
        """Judges how long the last round is ago.

        Raises:
            Violation: I3.
        """
        if now_s <= self._due_s:
            return
        since = {f"most of {sorted(self._tips)}": self._risen_s, **self._behind_s}
        for who, since_s in since.items():
            waited_s = now_s - since_s
            if waited_s > self._limit_s < waited_s - self._excused_s(since_s, now_s):
                raise Violation("I3", f"no round for {waited_s:.1f} s at {who}, spared from faults")
