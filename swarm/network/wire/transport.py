"""Sends messages, questions and streams to a peer, directly or through a peer that both dialed."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from blake3 import blake3
from hivemind.p2p import P2P

from swarm.config import NetworkSection
from swarm.errors import NetworkDown, NoRoute, Refused, Unreachable
from swarm.network.wire.bounded_tables import recalled
from swarm.network.wire.control import Control, peer_of
from swarm.network.wire.daemon import hosts_of
from swarm.network.wire.identity import Identity
from swarm.network.wire.relay import Relay
from swarm.network.wire.relayed_messages import EnvelopeKind
from swarm.network.wire.streams import Serve, open_stream
from swarm.network.wire.tcp_dialer import TcpDialer
from swarm.network.wire.tcp_listener import TcpListener, port_beside
from swarm.protocol.timing.backoff import backoff_s

logger = logging.getLogger(__name__)


MAX_PEERS = 1024
RELAYS_PER_TRY = 3
DIRECT_AGAIN_S = 30.0
"""A peer that was reached through relays is dialed again after this long, then less and less often,
since a dial to a closed port, or a message over a cut link, takes seconds to fail."""
LONGEST_AGAIN_S = 900.0
REST_S = 10.0
LONGEST_REST_S = 120.0


@dataclass(frozen=True)
class Route:
    """The current route to a peer.

    Attributes:
        straight: whether the first try is without a relay.
        relays: peers to ask after that, one by one.
        reason: reason for this choice.
    """

    straight: bool
    relays: tuple[str, ...]
    reason: str


@dataclass
class _Known:
    failed_s: float | None = None
    """Time of the last failed dial; None once a dial worked."""
    failures: int = 0
    """Failures in a row; those within `DIRECT_AGAIN_S` count once."""
    mute_s: float | None = None
    """Time of the peer's last missing answer; None once it has answered without a relay."""
    relay: str | None = None
    """The relay that last reached the peer."""
    rests: dict[str, tuple[float, int]] = field(default_factory=dict)
    """For each relay that could not reach the peer: when to try it again, and its failures in a
    row."""


class Routes:
    """The routes to other peers, as learned from earlier tries."""

    def __init__(self) -> None:
        self._peers: dict[str, _Known] = {}

    def plan(
        self, peer: str, relays: Iterable[str], now_s: float, *, is_stream: bool = False
    ) -> Route:
        """The route to try.

        Args:
            peer: the peer to reach.
            relays: peers that listen and answered lately, in any order.
            now_s: the time.
            is_stream: whether to open a stream. libp2p opens streams without asking the other side,
                so a cut line shows only later. Relays therefore come first for a mute peer.
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
        """Whether the peer can be reached only through others, as far as known."""
        known = self._peers.get(peer)
        if known is None or known.failed_s is None or known.relay is None:
            return False
        again_s = backoff_s(known.failures, DIRECT_AGAIN_S, LONGEST_AGAIN_S)
        return now_s - known.failed_s < again_s

    def is_doubtful(self, peer: str, now_s: float) -> bool:
        """Whether the link to the peer may be cut, since it answered nothing a short while ago."""
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
            peer: that did not answer.
            now_s: the time.
            is_slow: whether it timed out, instead of refusing.
        """
        known = self._note(peer)
        if known.failed_s is None or now_s - known.failed_s >= DIRECT_AGAIN_S:
            known.failures += 1
            known.failed_s = now_s
        if is_slow:
            known.mute_s = now_s

    def relayed(self, peer: str, relay: str, answered: bool, now_s: float) -> None:
        """Notes the outcome of a try through a relay."""
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
    """A sort key that orders the relays differently for each peer, so that they share the load."""
    return blake3(f"{peer}/{relay}".encode()).digest()


Result = TypeVar("Result")


class Transport:
    """Sends on all routes to other peers; follows the plans of `Routes`, and reports outcomes.

    The coroutines raise the same errors as the methods of `Node` with the same names.

    Attributes:
        relay: messages and streams through others.
        direct: streams outside the daemon; None for none.
    """

    def __init__(
        self,
        control: Control,
        relay: Relay,
        p2p: Callable[[], P2P],
        relays: Callable[[], frozenset[str]],
        direct: TcpDialer | None = None,
    ) -> None:
        """Knows no route yet.

        Args:
            control: direct messages.
            relay: messages and streams through others.
            p2p: the living daemon; raises NetworkDown when there is none.
            relays: peers that listen and answered lately.
            direct: streams outside the daemon; None for none.
        """
        self._control, self._p2p, self._relays = control, p2p, relays
        self.relay, self.direct = relay, direct
        self._routes = Routes()

    @classmethod
    def of(
        cls,
        identity: Identity,
        network: NetworkSection,
        control: Control,
        streams: Mapping[str, Serve],
        *,
        p2p: Callable[[], P2P],
        relays: Callable[[], frozenset[str]],
    ) -> Transport:
        """All routes of a peer that serves these bulk protocols."""
        is_willing = network.relay and not network.client_mode
        relay = Relay(identity, control, streams, is_willing=is_willing, p2p=p2p)
        door = TcpListener(identity, control.traffic, control.ledger, streams)
        direct = TcpDialer(identity, control, p2p, door) if network.direct else None
        return cls(control, relay, p2p, relays, direct)

    def open(self, network: NetworkSection) -> None:
        """Starts accepting direct connections, if this peer listens at all.

        Raises:
            NetworkDown: another program has the configured port.
        """
        if not self.direct or not self.direct.door.streams or network.client_mode:
            return
        door, hosts = self.direct.door, hosts_of(network)
        try:
            door.open(hosts, network.direct_port or port_beside(network))
        except NetworkDown as error:
            if network.direct_port:
                raise
            logger.warning("%s; taking a free port, which a firewall may keep closed", error)
            door.open(hosts, 0)

    async def register(self, p2p: P2P) -> None:
        """Registers handlers for direct and relayed requests with the daemon."""
        await self._control.register(p2p)
        await self.relay.register(p2p)
        if self.direct:
            await self.direct.register(p2p)

    async def close(self) -> None:
        """Ends direct connections."""
        if self.direct:
            await self.direct.close()

    def is_far(self, peer_id: str) -> bool:
        """Whether a peer is reached only through others, so that bytes to it are sent twice."""
        return self._routes.needs_relay(peer_id, time.monotonic())

    async def post(self, peer_id: str, payload: bytes, timeout_s: float) -> None:
        """See `Node.post`."""
        await self._take(
            peer_id,
            lambda: self._control.post(self._p2p(), peer_id, payload, timeout_s),
            lambda relay: self.relay.send(
                relay, peer_id, payload, kind=EnvelopeKind.MESSAGE, timeout_s=timeout_s
            ),
            timeout_s,
        )

    async def request(self, peer_id: str, payload: bytes, timeout_s: float) -> bytes:
        """See `Node.request`."""
        return await self._take(
            peer_id,
            lambda: self._control.request(self._p2p(), peer_id, payload, timeout_s),
            lambda relay: self.relay.send(
                relay, peer_id, payload, kind=EnvelopeKind.REQUEST, timeout_s=timeout_s
            ),
            timeout_s,
        )

    async def open_stream(self, peer_id: str, protocol: str, timeout_s: float) -> socket.socket:
        """See `Node.open_stream`. Does not wait for a direct route to a peer that was silent."""
        if self.direct:
            began_s = time.monotonic()
            is_doubtful = self._routes.is_doubtful(peer_id, began_s)
            is_looked_for = is_doubtful and not self.direct.is_known(peer_id)
            with suppress(NoRoute):
                limit_s = 0.0 if is_looked_for else timeout_s
                return await self.direct.open_stream(peer_id, protocol, limit_s)
            timeout_s -= time.monotonic() - began_s
        path = self._p2p().daemon_listen_maddr["unix"]
        return await self._take(
            peer_id,
            lambda: open_stream(path, peer_of(peer_id), protocol, timeout_s),
            lambda relay: self.relay.open_stream(relay, peer_id, protocol, timeout_s),
            timeout_s,
            is_stream=True,
        )

    def give_back(self, peer_id: str, protocol: str, connection: socket.socket) -> None:
        """See `Node.give_back`."""
        if self.direct and connection.family != socket.AF_UNIX:  # libp2p opens streams at no cost
            self.direct.kept.keep(peer_id, protocol, connection)
        else:
            connection.close()

    def distrust(self, peer_id: str, *, for_good: bool) -> bool:
        """See `Node.distrust`."""
        return self.direct is not None and self.direct.distrust(peer_id, for_good=for_good)

    def unanswered(self, peer_id: str) -> None:
        """See `Node.unanswered`."""
        self._failed(peer_id, is_slow=True)

    async def _take(
        self,
        peer_id: str,
        straight: Callable[[], Awaitable[Result]],
        through: Callable[[str], Awaitable[Result]],
        timeout_s: float,
        *,
        is_stream: bool = False,
    ) -> Result:
        peer_of(peer_id)  # raises for an invalid peer id
        now_s, relays = time.monotonic(), self._relays()
        route = self._routes.plan(peer_id, relays, now_s, is_stream=is_stream)
        failure: Unreachable = NoRoute(f"{peer_id}: {route.reason}")
        if route.straight:
            try:
                result = await straight()
            except Refused:
                self._routes.dialled(peer_id)
                raise
            except Unreachable as error:
                failure = error
                self._failed(peer_id, is_slow=not isinstance(error, NoRoute))
            else:
                if not is_stream:  # an open stream proves nothing
                    self._routes.dialled(peer_id)
                return result
        try:
            async with asyncio.timeout(timeout_s):  # for all relays together
                return await self._ask_relays(peer_id, route.relays, through)
        except (TimeoutError, NoRoute) as error:
            logger.debug("%s through others: %s", peer_id, error)
        raise failure

    def _failed(self, peer_id: str, *, is_slow: bool) -> None:
        self._routes.failed(peer_id, time.monotonic(), is_slow=is_slow)
        if is_slow and self.direct:
            self.direct.doubt(peer_id)

    async def _ask_relays(
        self, peer_id: str, relays: Sequence[str], through: Callable[[str], Awaitable[Result]]
    ) -> Result:
        for relay in relays:
            is_reached = False
            try:
                result = await through(relay)
                is_reached = True
                return result
            except NoRoute as error:
                logger.debug("%s", error)
            finally:
                self._routes.relayed(peer_id, relay, is_reached, time.monotonic())
        raise NoRoute("no relay reaches it")
