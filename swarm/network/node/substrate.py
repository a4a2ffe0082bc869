"""One run of libp2p's daemon, with a DHT node; a `Node` may have several, one after another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

# "as X" exports these names for the stand-ins for libp2p and the DHT in virtual time.
from hivemind.dht.storage import DHTLocalStorage as DHTLocalStorage
from hivemind.p2p import P2P as P2P
from hivemind.p2p import PeerID as PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError as P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.control import P2PHandlerError as P2PHandlerError
from hivemind.proto import crypto_pb2 as crypto_pb2
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import ValueWithExpiration as ValueWithExpiration

from swarm.config import NetworkSection
from swarm.errors import NetworkDown, NobodyReachable, StateLocked
from swarm.network.dht.dht import Dht, open_dht
from swarm.network.dht.signed_records import SignedRecords
from swarm.network.wire import daemon
from swarm.network.wire.identity import Identity
from swarm.network.wire.ledger import Ledger
from swarm.network.wire.traffic import Traffic
from swarm.network.wire.upload_rate import LineBytes

logger = logging.getLogger(__name__)

ENTRANCES = 16
"""Most reachable addresses through which a start enters the DHT."""
_PROBE_S = 3.0
TRIES = 3
"""Attempts to enter through reachable addresses, where a peer listens and so may answer later."""

Register = Callable[[P2P], Awaitable[None]]


@dataclass(frozen=True)
class Opening:
    """The inputs that all runs of the daemon share.

    Attributes:
        identity: this peer's identity, the same in all runs.
        network: the person's settings.
        traffic: counters.
        register: makes this peer's handlers known to a new daemon, before the DHT is up.
        ledger: limits what others store in the DHT, and knows the members, whose records have
            precedence over those of strangers.
        locate: starts a lookup of a peer's network address.
        signer: owner of the published records.
    """

    identity: Identity
    network: NetworkSection
    traffic: Traffic
    register: Register
    ledger: Ledger
    locate: Callable[[P2P, str], None]
    signer: Identity


@dataclass(frozen=True)
class Substrate:
    """A running daemon, and its DHT node.

    Attributes:
        p2p: the daemon.
        dht: the node.
        addresses: the addresses to announce; empty for a peer that does not listen.
        line: counts the daemon's traffic.
    """

    p2p: P2P
    dht: Dht
    addresses: tuple[str, ...]
    line: LineBytes

    @property
    def neighbours(self) -> frozenset[str]:
        """Peer ids in the routing table."""
        return self.dht.neighbours

    async def ended(self) -> str:
        """Waits until the daemon is dead, or the connection to it is broken; returns which."""
        ended = asyncio.create_task(self.p2p._child.wait())
        try:
            watched = {ended, self.p2p._client.control._read_task}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ended}, timeout=daemon.CLOSE_S)  # the connection ends first
        finally:
            ended.cancel()
        if ended.done() and not ended.cancelled():
            return f"libp2p's daemon ended with status {ended.result()}"
        return "the connection to libp2p's daemon broke"

    async def reach(self, address: daemon.Address) -> bool:
        """Connects to an address and pings the peer there; whether its DHT node answered."""
        peer = PeerID.from_base58(address.peer_id)
        try:
            async with asyncio.timeout(daemon.CONNECT_S):
                await self.p2p._client.connect(peer, [Multiaddr(address.transport)])
                return await self.dht.ping(peer)
        except (TimeoutError, P2PDaemonError, OSError, asyncio.IncompleteReadError) as error:
            logger.debug("%s does not answer: %s", address.text, error)
            return False

    async def close(self, *, is_dead: bool) -> None:
        """Leaves the DHT, if that is still possible, and ends the daemon, within a time limit."""
        if not is_dead:
            with suppress(TimeoutError, P2PDaemonError, OSError):
                async with asyncio.timeout(daemon.CLOSE_S):
                    await self.dht.close()
        await daemon.end_daemon(self.p2p, self.line)


async def open_substrate(
    opening: Opening,
    peers: Sequence[daemon.Address],
    port: int | None,
    *,
    must_reach: bool,
    check_identity: bool,
) -> Substrate:
    """Starts daemon, handlers and DHT node, in this order.

    Args:
        opening: the shared inputs.
        peers: entrances, the best first; some may be unreachable.
        port: the port to listen on, if the configuration leaves it open.
        must_reach: whether it is an error if no entrance answers.
        check_identity: whether to look for a living peer with the same identity.

    Raises:
        NobodyReachable: `must_reach`, and no peer answered.
        NetworkDown: the daemon did not start.
        StateLocked: a living peer of the swarm has this identity.
    """
    entrances = await _answering(opening.identity.peer_id, peers, must_reach)
    if must_reach:
        p2p = await _enter(opening, entrances, port, check_identity=check_identity)
    else:
        try:
            p2p = await _start(opening, entrances, port, check_identity=check_identity)
        except NobodyReachable:  # the node keeps trying once it runs
            entrances = []
            p2p = await _start(opening, entrances, port, check_identity=check_identity)
    enter = partial(
        open_dht, peers=entrances, client_mode=opening.network.client_mode, must_reach=must_reach
    )
    return await begun(opening, p2p, enter)


async def begun(opening: Opening, p2p: P2P, enter: Callable[..., Awaitable[Dht]]) -> Substrate:
    """Adds handlers and a DHT node to a new daemon, which is ended if this fails.

    Args:
        opening: whose daemon it is.
        p2p: the daemon.
        enter: makes the DHT node from the daemon and the other arguments of a `Dht`.
    """
    try:
        await opening.register(p2p)
        dht = await enter(
            p2p,
            SignedRecords(opening.signer, opening.traffic.refuse),
            opening.traffic,
            opening.ledger,
            partial(opening.locate, p2p),
        )
        addresses = () if opening.network.client_mode else await visible_addresses(p2p)
    except BaseException:
        await daemon.end_daemon(p2p, opening.traffic.line)
        raise
    return Substrate(p2p, dht, addresses, opening.traffic.line)


async def visible_addresses(p2p: P2P, *, says: bool = True) -> tuple[str, ...]:
    """The current addresses of a daemon to announce; `says` logs how many are left out."""
    try:
        texts = [str(address) for address in await p2p.get_visible_maddrs(latest=True)]
    except ValueError:  # raised by hivemind for none
        texts = []
    return daemon.dialable(texts, daemon.host_of_default_route(), says=says)


def renewed(before: Sequence[str], now: Sequence[str]) -> tuple[str, ...]:
    """The addresses to announce now: the machine's addresses with the port where this peer listens.

    A machine without an address, for example while its network is down, keeps its old addresses.
    """
    if not before or set(now) == set(before):
        return tuple(before)
    port = daemon.Address.parse(before[0]).port
    found = tuple(text for text in now if daemon.Address.parse(text).port == port)
    is_cut_off = all(map(daemon.is_loopback, found)) and not all(map(daemon.is_loopback, before))
    return tuple(before) if is_cut_off or not found else found


async def _enter(
    opening: Opening, peers: Sequence[daemon.Address], port: int | None, *, check_identity: bool
) -> P2P:
    """`_start` with retries, since the daemon's own time limits are too short for a lossy link."""
    for _ in range(TRIES - 1):
        with suppress(NobodyReachable):
            return await _start(opening, peers, port, check_identity=check_identity)
        logger.info(
            "no entrance answers yet (%s); trying again", ", ".join(peer.text for peer in peers)
        )
    return await _start(opening, peers, port, check_identity=check_identity)


async def _start(
    opening: Opening, peers: Sequence[daemon.Address], port: int | None, *, check_identity: bool
) -> P2P:
    listen, texts = (
        daemon.listen_addresses(opening.network, port),
        [address.text for address in peers],
    )
    me = opening.identity
    try:
        if (
            peers
            and check_identity
            and await daemon.is_identity_taken(me.peer_id, texts, opening.traffic.line)
        ):
            raise StateLocked(
                f"a running peer already has the identity {me.peer_id}",
                hint="end it, or start with another state directory",
            )
        return await daemon.start_daemon(
            opening.network,
            identity_path=me.path,
            listen=listen,
            initial_peers=texts,
            line=opening.traffic.line,
        )
    except P2PDaemonError as error:
        if peers and daemon.is_unanswered(error):
            raise NobodyReachable(f"another peer, or none, is at {', '.join(texts)}") from error
        where = ", ".join(listen)
        raise NetworkDown(f"libp2p's daemon, listening on {where}: {error}") from error


async def _answering(
    me: str, peers: Sequence[daemon.Address], must_reach: bool
) -> list[daemon.Address]:
    """The peers whose libp2p answers, since the daemon would wait long for others."""
    faults = await asyncio.gather(*(daemon.probe(address, _PROBE_S) for address in peers))
    there = [address for address, fault in zip(peers, faults, strict=True) if not fault]
    if peers and must_reach and not there:
        tried = "; ".join(f"{a.text}: {f}" for a, f in zip(peers, faults, strict=True))
        raise NobodyReachable(
            f"no known peer answers: {tried}",
            hint="check the address, and that the other peer still runs",
        )
    return [address for address in there if address.peer_id != me][:ENTRANCES]
