"""Which way a message goes to a peer: straight, or through others. Decisions only, no clock.

A peer that only dials out can be reached over connections that it opened, so by the peers it
dialled, and by nobody else. Two such peers reach each other through a third that both dialled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from blake3 import blake3

from swarm.network.recent import recalled
from swarm.protocol.backoff import backoff_s

MAX_PEERS = 1024
RELAYS_PER_TRY = 3
DIRECT_AGAIN_S = 30.0
"""A peer that was reached through others is dialled again after this, and then ever more rarely:
a dial to a closed port, or a message over a line that is cut, takes seconds to fail."""
LONGEST_AGAIN_S = 900.0
REST_S = 10.0
LONGEST_REST_S = 120.0


@dataclass(frozen=True)
class Route:
    """How to reach a peer now.

    Attributes:
        straight: whether to try without a relay first.
        relays: whom to ask then, one after another.
        reason: why.
    """

    straight: bool
    relays: tuple[str, ...]
    reason: str


@dataclass
class _Known:
    failed_s: float | None = None
    """When it last could not be dialled; None once it could."""
    failures: int = 0
    """Failures in a row, those within `DIRECT_AGAIN_S` counted once."""
    mute_s: float | None = None
    """When it last left something unanswered; None once it answered without a relay."""
    relay: str | None = None
    """Who reached it last."""
    rests: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Relays that could not reach it: until when they are left alone, and failures in a row."""


class Routes:
    """What one peer has learnt about the ways to the others."""

    def __init__(self) -> None:
        self._peers: dict[str, _Known] = {}

    def plan(
        self, peer: str, relays: Iterable[str], now_s: float, *, is_stream: bool = False
    ) -> Route:
        """The way to try.

        Args:
            peer: whom to reach.
            relays: peers that listen and answered lately, in any order.
            now_s: the time.
            is_stream: whether it is a stream. libp2p opens one without asking the other side, so
                that a line that is cut shows only later: to a mute peer relays come first.
        """
        known = self._peers.get(peer) or _Known()
        rested = [r for r in relays if r != peer and known.rests.get(r, (now_s, 0))[0] <= now_s]
        rested.sort(key=lambda relay: (relay != known.relay, _turn(peer, relay)))
        chosen = tuple(rested[:RELAYS_PER_TRY])
        if self.needs_relay(peer, now_s) and chosen:
            return Route(False, chosen, f"did not answer, {chosen[0][-6:]} reached it")
        if is_stream and self.is_doubtful(peer, now_s) and chosen:
            return Route(False, chosen, "answered nothing, only relays prove that they reach it")
        return Route(True, chosen, "straight first")

    def needs_relay(self, peer: str, now_s: float) -> bool:
        """Whether the peer is reached only through others, as far as is known."""
        known = self._peers.get(peer)
        if known is None or known.failed_s is None or known.relay is None:
            return False
        again_s = backoff_s(known.failures, DIRECT_AGAIN_S, LONGEST_AGAIN_S)
        return now_s - known.failed_s < again_s

    def is_doubtful(self, peer: str, now_s: float) -> bool:
        """Whether the line to the peer may be cut: it answered nothing a short while ago."""
        known = self._peers.get(peer)
        is_mute = known and known.mute_s is not None and now_s - known.mute_s < DIRECT_AGAIN_S
        return bool(is_mute) or self.needs_relay(peer, now_s)

    def dialled(self, peer: str) -> None:
        """The peer answered without a relay."""
        known = self._note(peer)
        known.failed_s, known.failures, known.mute_s = None, 0, None

    def failed(self, peer: str, now_s: float, *, is_slow: bool) -> None:
        """The peer did not answer without a relay.

        Args:
            peer: whom.
            now_s: the time.
            is_slow: it did not answer in time, instead of being refused.
        """
        known = self._note(peer)
        if known.failed_s is None or now_s - known.failed_s >= DIRECT_AGAIN_S:
            known.failures += 1
            known.failed_s = now_s
        if is_slow:
            known.mute_s = now_s

    def relayed(self, peer: str, relay: str, answered: bool, now_s: float) -> None:
        """Notes what came of a try through a relay."""
        known = self._note(peer)
        if answered:
            known.relay = relay
            known.rests.pop(relay, None)
            return
        if known.relay == relay:
            known.relay = None
        failures = known.rests.get(relay, (0.0, 0))[1] + 1
        known.rests[relay] = (now_s + backoff_s(failures, REST_S, LONGEST_REST_S), failures)

    def _note(self, peer: str) -> _Known:
        return recalled(self._peers, peer, _Known, MAX_PEERS)


def _turn(peer: str, relay: str) -> bytes:
    """Another order for each peer, so that relays share the load."""
    return blake3(f"{peer}/{relay}".encode()).digest()
