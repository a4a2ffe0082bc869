"""A peer's place in the network: libp2p's daemon, one DHT node, one thread.

Every wait here has a deadline, because libp2p and the DHT do not report that a peer has left. Calls
to such a peer hang, stores succeed locally, and a dead daemon raises no error. A dead daemon is
restarted with the same identity.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.utils.logging import use_hivemind_log_handler

from swarm.background import Tasks
from swarm.config import NetworkSection
from swarm.errors import NetworkDown, SwarmError
from swarm.network.dht.dht import StoredValue
from swarm.network.node.substrate import (
    Opening,
    Substrate,
    open_substrate,
    renewed,
    visible_addresses,
)
from swarm.network.wire.address_book import AddressBook, Moment, Remembered
from swarm.network.wire.control import Control, seen_at
from swarm.network.wire.daemon import Address
from swarm.network.wire.identity import Identity, load_or_create_identity
from swarm.network.wire.link_health import LinkHealth
from swarm.network.wire.loop_thread import LoopThread
from swarm.network.wire.steady_clock import dht_clock
from swarm.network.wire.streams import Handlers as Handlers
from swarm.network.wire.traffic import Traffic
from swarm.network.wire.transport import Transport

logger = logging.getLogger(__name__)

HEAL_LOOK_EVERY_S = 2.0
HEAL_ADDRESSES = 16
RENEW_ADDRESSES_S = 60.0
"""Interval at which this machine looks up its own addresses."""
REMEMBERED_TRIED = 64
"""Addresses from the disk that are probed at a start, all in parallel."""
RESTART_AFTER_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 60.0, 60.0)
"""Pauses before successive restarts of a daemon whose starts fail, or that dies at once."""
STEADY_S = 60.0
BACK_S = 10.0
"""How long calls wait for a daemon that is being restarted."""
_CLOSE_S = 2.0

Result = TypeVar("Result")


class Node:
    """A running node; see `start`. Its coroutines run in its loop; other threads use `run`.

    Attributes:
        peer_id: id in base58, derived from the identity file.
        identity: signs certificates and records.
        entrances: peer ids at the addresses that a person gave.
        addresses: addresses to announce; loopback addresses only if there are no others. Empty for
            a node that does not listen.
        traffic: counters.
        ledger: limits the cost of other peers.
        lines: records which messages to others succeed.
        failure: why the daemon is dead; None while it lives.
    """

    def __init__(
        self,
        identity: Identity,
        network: NetworkSection,
        handlers: Handlers,
        forgotten: tempfile.TemporaryDirectory[str] | None,
        signer: Identity | None = None,
    ) -> None:
        self.identity, self.peer_id = identity, identity.peer_id
        self.entrances: tuple[str, ...] = ()
        self.addresses: tuple[str, ...] = ()
        self.traffic, self.ledger, self.lines = Traffic.of(network), handlers.ledger, LinkHealth()
        self.failure: str | None = None
        on_message = self.lines.hearing(handlers.on_message)
        self._control = Control(self.traffic, self.ledger, on_message, handlers.on_request)
        self._book = AddressBook(identity.peer_id)
        self._ways = Transport.of(
            identity,
            network,
            self._control,
            handlers.streams,
            p2p=self._living_p2p,
            relays=lambda: self.neighbours,
        )
        self._opening = Opening(
            identity,
            network,
            self.traffic,
            self._ways.register,
            self.ledger,
            self._control.locate,
            signer or identity,
        )
        self._thread = LoopThread("swarm-network")
        self._tasks = Tasks("the node")
        self._attempt, self._began_s = 0, time.monotonic()
        self._stopping = False
        self._given_up = False
        self._forgotten = forgotten
        """Folder of a temporary identity, which is stored nowhere else."""
        self._substrate: Substrate | None = None

    @classmethod
    def start(
        cls,
        *,
        identity_path: Path | None,
        network: NetworkSection,
        known_peers: Sequence[str] = (),
        remembered: Sequence[Remembered] = (),
        port: int | None = None,
        handlers: Handlers | None = None,
        deadline_s: float = 30.0,
        must_reach: bool = True,
        signer: Identity | None = None,
    ) -> Node:
        """Starts daemon, handlers and DHT node, in this order, and returns once all run.

        Args:
            identity_path: the identity file, made if missing; None makes a temporary identity.
            network: the person's settings.
            known_peers: addresses that a person gave to enter the swarm; some may be unreachable.
            remembered: addresses from earlier runs, the freshest first; all may be unreachable.
            port: replaces port 0 in `network.host_maddrs`; if it is taken, a free one is used.
            handlers: may be called before this method returns.
            deadline_s: time limit for the whole start.
            must_reach: whether it is an error that no address answers; otherwise the node starts
                alone and keeps trying.
            signer: owner of the records that the node publishes, if not the node itself.

        Raises:
            NobodyReachable: no address answered.
            NetworkDown: the daemon did not start.
            StateLocked: a living peer of the swarm has this identity.
            ConfigError: one of `known_peers` is malformed.
        """
        dht_clock()
        use_hivemind_log_handler("nowhere")
        logging.getLogger("hivemind").setLevel(logging.WARNING)  # INFO reports each start
        peers = [Address.parse(text) for text in known_peers]
        # A restarted daemon reads the identity again.
        folder = None if identity_path else tempfile.TemporaryDirectory(prefix="swarm-")
        path = identity_path or Path(folder.name if folder else "") / "identity.key"
        identity = load_or_create_identity(path)
        node = cls(identity, network, handlers or Handlers(), folder, signer)
        node._book.add((address.text for address in peers), are_given=True)
        node._book.recall(remembered[:REMEMBERED_TRIED])
        node.entrances = tuple(dict.fromkeys(address.peer_id for address in peers))
        peers += [address for address in node._book.addresses() if address not in peers]
        try:
            node.run(node._open(peers, port, must_reach=must_reach), deadline_s)
        except BaseException as error:
            node.stop(_CLOSE_S)
            if isinstance(error, TimeoutError):
                raise NetworkDown(f"the network did not start: {error}") from error
            raise
        return node

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of this node."""
        return self._thread.loop

    @property
    def alive(self) -> bool:
        """Whether the daemon runs or is being restarted; False once restarts were given up."""
        return not (self._given_up or self._stopping)

    @property
    def port(self) -> int | None:
        """The TCP port on which the node listens, saved for the next start."""
        return Address.parse(self.addresses[0]).port if self.addresses else None

    @property
    def num_neighbours(self) -> int:
        """Size of the DHT's routing table, the only reliable sign of a connection."""
        return len(self.neighbours)

    @property
    def neighbours(self) -> frozenset[str]:
        """Peer ids in the DHT's routing table."""
        return self._substrate.neighbours if self._substrate else frozenset()

    @property
    def known_addresses(self) -> tuple[Remembered, ...]:
        """Addresses of other peers, the best first, which the caller keeps on disk."""
        return self._book.known()

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float | None) -> Result:
        """Runs a coroutine in the node's loop, from another thread; raises TimeoutError."""
        return self._thread.run(coroutine, timeout_s)

    def end(self, what: str, stopping: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """Stops an activity in the node's loop; after the time limit it ends with the thread."""
        try:
            self.run(stopping, timeout_s)
        except TimeoutError:
            logger.warning("%s did not end within %g s", what, timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Leaves the DHT, ends the daemon and the thread; safe to call twice."""
        if self.loop.is_closed():
            return
        self._stopping = True
        self.end("the network", self._close(), timeout_s)
        self._thread.stop(timeout_s)

    # ------------------------------------------------ talking to one peer

    async def post(self, peer_id: str, payload: bytes, timeout_s: float = 5.0) -> None:
        """Delivers one control message (at most 256 KiB); returns when it has been handled.

        A peer that cannot be dialed is reached through a peer that both have dialed.

        Raises:
            Unreachable: no answer in time, or the other side refused it.
            NetworkDown: the daemon is dead.
        """
        with self.lines.post(peer_id):
            await self._ways.post(peer_id, payload, timeout_s)

    async def request(self, peer_id: str, payload: bytes, timeout_s: float) -> bytes:
        """Asks a small question (at most 256 KiB) and returns the answer (at most 1 MB).

        Raises:
            Unreachable: no answer in time, or the other side refused it.
            NetworkDown: the daemon is dead.
        """
        await self._back()
        return await self._ways.request(peer_id, payload, timeout_s)

    async def open_stream(self, peer_id: str, protocol: str, timeout_s: float) -> socket.socket:
        """A non-blocking socket to a handler of a bulk protocol; raises the errors of `request`."""
        return await self._ways.open_stream(peer_id, protocol, timeout_s)

    def give_back(self, peer_id: str, protocol: str, connection: socket.socket) -> None:
        """Returns a stream on which every answer has arrived, for the next caller."""
        self._ways.give_back(peer_id, protocol, connection)

    async def seen_at(self, peer_id: str) -> str:
        """Transport address at which this peer sees a connected peer; "" if not connected."""
        return await seen_at(self._living_p2p(), peer_id)

    def distrust(self, peer_id: str, *, for_good: bool) -> bool:
        """Notes wrong bytes; True if a direct link may be at fault: libp2p is used from now on."""
        return self._ways.distrust(peer_id, for_good=for_good)

    def unanswered(self, peer_id: str) -> None:
        """Notes that a peer did not answer on an open stream, because the link may be cut."""
        self._ways.unanswered(peer_id)

    def is_far(self, peer_id: str) -> bool:
        """Whether a peer is reached only through others, so that bytes to it are sent twice."""
        return self._ways.is_far(peer_id)

    # ------------------------------------------------ the DHT

    async def store(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Publishes a record of this peer (at most 20 KB) under a key, in place of the last one.

        Returns:
            Whether any holder took the record. The DHT also says True without a network, when only
            this node holds the record. To be sure, read the record through other peers.

        Raises:
            NobodyReachable: the DHT did not answer within 15 s.
            NetworkDown: the daemon is dead.
        """
        await self._back()
        return await self._living().dht.store(key, value, ttl_s)

    async def get_many(self, keys: Sequence[str]) -> dict[str, dict[str, StoredValue]]:
        """The records of each key, by the peer id of the owner that signed them.

        Returns:
            At most 1,024 records a key, those of members first.

        Raises:
            NobodyReachable: the DHT did not answer within 15 s.
            NetworkDown: the daemon is dead.
        """
        await self._back()
        return await self._living().dht.get_many(keys)

    def remember(self, addresses: Sequence[str]) -> None:
        """Adds addresses from records for `heal` to try; must be called in the loop."""
        self._book.add(addresses)

    async def heal(self) -> int:
        """Connects to and pings the addresses that are due, at most 16; returns how many answered.

        A loop calls this every 2 s; `address_book.introductions` says which addresses are due.
        Without these calls, a network that was cut stays cut after the link is back (measured: 4 of
        5 runs).
        """
        now = Moment(time.monotonic(), time.time())
        chosen = [i.address for i in self._book.next(self.neighbours, now, HEAL_ADDRESSES)]
        substrate = self._living()
        found = await asyncio.gather(*map(substrate.reach, chosen), return_exceptions=True)
        answered = [each is True for each in found]
        for address, each in zip(chosen, found, strict=True):
            if isinstance(each, BaseException):  # a fault with one address does not affect others
                logger.error(
                    "%s was not tried because of a fault here", address.text, exc_info=each
                )
            self._book.tried(address, each is True, time.time())
        return sum(answered)

    async def _heal_for_ever(self) -> None:
        renewed_s = time.monotonic()
        while True:
            await asyncio.sleep(HEAL_LOOK_EVERY_S)
            dht_clock().look()
            with suppress(NetworkDown):  # _supervise has logged it already
                await self.heal()
                if time.monotonic() - renewed_s >= RENEW_ADDRESSES_S:
                    renewed_s = time.monotonic()
                    await self.renew_addresses()

    async def renew_addresses(self) -> None:
        """Looks up this machine's addresses, since many routers assign a new address each day."""
        if not self.addresses:  # client mode: it listens nowhere; libp2p cannot tell
            return
        try:
            async with asyncio.timeout(BACK_S):
                visible = await visible_addresses(self._living_p2p(), says=False)
                found = renewed(self.addresses, visible)
        except (TimeoutError, P2PDaemonError, OSError, asyncio.IncompleteReadError) as error:
            logger.debug("this machine's addresses are not known now: %s", error)
            return
        if set(found) != set(self.addresses):
            logger.warning("this machine's addresses changed: %s", ", ".join(found))
            self.addresses = found

    # ------------------------------------------------ the daemon's lives

    def _living(self) -> Substrate:
        if self.failure or self._substrate is None:
            raise NetworkDown(self.failure or "the network has not started")
        return self._substrate

    def _living_p2p(self) -> P2P:
        return self._living().p2p

    async def _back(self) -> None:
        """Waits a short time for a daemon that is being restarted."""
        end_s = time.monotonic() + BACK_S
        while self.failure and self.alive and time.monotonic() < end_s:
            await asyncio.sleep(0.1)

    async def _open(self, peers: Sequence[Address], port: int | None, *, must_reach: bool) -> None:
        check, opening = not self.identity.is_new, self._opening
        self._ways.open(opening.network)
        self._use(
            await open_substrate(opening, peers, port, must_reach=must_reach, check_identity=check)
        )
        self._tasks.supervise(self._supervise)
        self._tasks.supervise(self._heal_for_ever)

    def _use(self, substrate: Substrate) -> None:
        self._substrate = substrate
        self.addresses = substrate.addresses
        self.failure, self._began_s = None, time.monotonic()

    async def _supervise(self) -> None:
        """Restarts a dead daemon, until restarts fail too often in a row.

        May be called again at any time; a daemon that is dead by then is restarted at once.
        """
        while not self._given_up:
            if self.failure is None:
                why = await self._living().ended()
                if self._stopping:
                    return
                if time.monotonic() - self._began_s > STEADY_S:
                    self._attempt = 0
                self.failure = why
                logger.error("%s; nothing can be sent or received until it runs again", why)
            await self._restart()

    async def _restart(self) -> None:
        """Restarts the daemon, with a longer pause before each attempt; gives up in the end."""
        assert self._substrate is not None
        port, first = self.port, self._attempt
        try:
            await self._substrate.close(is_dead=True)
        except Exception:
            logger.exception("the dead daemon could not be cleaned up")
        while self._attempt < len(RESTART_AFTER_S):
            pause_s = RESTART_AFTER_S[self._attempt]
            self._attempt += 1
            await asyncio.sleep(pause_s)
            try:
                peers = self._book.addresses()[:HEAL_ADDRESSES]
                # Other peers may still mistake the old daemon's connection for that of a second
                # living peer.
                substrate = await open_substrate(
                    self._opening, peers, port, must_reach=False, check_identity=False
                )
            except (SwarmError, P2PDaemonError, OSError, TimeoutError) as error:
                logger.error("libp2p's daemon did not start again: %s", error)
                continue
            self._use(substrate)
            logger.warning("libp2p's daemon runs again after %d attempts", self._attempt - first)
            return
        self._given_up = True
        logger.error("libp2p's daemon is not started again: it died or failed too often")

    async def _close(self) -> None:
        await self._tasks.stop()
        await self._ways.close()
        if self._substrate:
            await self._substrate.close(is_dead=self.failure is not None)
        if self._forgotten:
            self._forgotten.cleanup()
