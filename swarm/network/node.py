"""A peer's place in the network: one libp2p daemon, one DHT node, one thread.

Everything that waits here has a deadline, because nothing in the substrate says that a peer is
gone: calls to it hang, stores succeed locally, and a dead daemon raises nothing at all.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from swarm.config import NetworkSection
from swarm.errors import NetworkDown, NobodyReachable, StateLocked
from swarm.errors import Unreachable as Unreachable
from swarm.network.address_book import AddressBook, Moment, Remembered
from swarm.network.control import Control, peer_of
from swarm.network.daemon import (
    Address,
    dialable,
    listen_addresses,
    probe,
    start_daemon,
)
from swarm.network.dht import Dht, Record, open_dht
from swarm.network.identity import Identity, load_or_create_identity
from swarm.network.loop_thread import LoopThread
from swarm.network.signed_records import SignedRecords
from swarm.network.streams import Serve, open_stream
from swarm.network.traffic import Traffic

logger = logging.getLogger(__name__)

HEAL_LOOK_EVERY_S = 2.0
HEAL_ADDRESSES = 16
REMEMBERED_TRIED = 64
"""Addresses from the disk that are probed at a start; all in parallel."""
_PROBE_S = 3.0
_CONNECT_S = 5.0
_CLOSE_S = 2.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class Handlers:
    """What the node calls for others, always in its own loop; so none of them may block.

    Attributes:
        on_message: gets the sender's peer id, as libp2p proved it, and the payload.
        on_request: the same, and returns the answer, at most 1 MB.
        streams: who serves which bulk protocol.
        on_death: told why, when the daemon has died.
    """

    on_message: Callable[[str, bytes], Awaitable[None]] | None = None
    on_request: Callable[[str, bytes], Awaitable[bytes]] | None = None
    streams: Mapping[str, Serve] = field(default_factory=dict)
    on_death: Callable[[str], None] | None = None


class Node:
    """A running node; see `start`. Its coroutines run in its loop, from outside through `run`.

    Attributes:
        peer_id: base58, derived from the identity file.
        identity: signs certificates and records.
        addresses: to be handed out; loopback only if there is nothing else. Empty for a node that
            does not listen.
        traffic: counters.
        failure: why the daemon is dead, if it is.
    """

    def __init__(
        self, identity: Identity, network: NetworkSection, handlers: Handlers, *, forgotten: bool
    ) -> None:
        self.identity = identity
        self.peer_id = identity.peer_id
        self.addresses: tuple[str, ...] = ()
        self.traffic = Traffic()
        self.failure: str | None = None
        self._network = network
        self._handlers = handlers
        self._control = Control(self.traffic, handlers.on_message, handlers.on_request)
        self._book = AddressBook(identity.peer_id)
        self._thread = LoopThread("swarm-network")
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._forgotten = forgotten
        """Whether the identity is kept nowhere and so cannot be another peer's."""
        self._p2p: P2P | None = None
        self._dht: Dht | None = None

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
    ) -> Node:
        """Starts daemon, handlers and DHT node, in this order, and returns when all are up.

        Args:
            identity_path: made if missing; None takes a new identity that is forgotten at once.
            network: what the person decided.
            known_peers: addresses that a person gave to enter the swarm by; some may be dead.
            remembered: addresses from earlier runs, the freshest first; all may be dead.
            port: replaces port 0 in `network.host_maddrs`; if it is taken, a free one is used.
            handlers: may be called before this returns.
            deadline_s: for all of it.
            must_reach: whether it is an error that no address answers; otherwise the node starts
                alone and goes on trying.

        Raises:
            NobodyReachable: no address answered.
            NetworkDown: the daemon did not start.
            StateLocked: a living peer of the swarm has this identity.
            ConfigError: one of `known_peers` is malformed.
        """
        use_hivemind_log_handler("nowhere")
        logging.getLogger("hivemind").setLevel(logging.WARNING)  # its INFO tells of each start
        peers = [Address.parse(text) for text in known_peers]
        with tempfile.TemporaryDirectory(prefix="swarm-") as forgotten:
            identity = load_or_create_identity(identity_path or Path(forgotten) / "identity.key")
            node = cls(identity, network, handlers or Handlers(), forgotten=not identity_path)
            node._book.add((address.text for address in peers), are_given=True)
            node._book.recall(remembered[:REMEMBERED_TRIED])
            peers += [a for a in node._book.addresses() if a not in peers]
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
        """The loop in which everything of this node happens."""
        return self._thread.loop

    @property
    def alive(self) -> bool:
        """Whether the daemon runs."""
        return self.failure is None and not self._stopping

    @property
    def port(self) -> int | None:
        """The TCP port it listens on, to be remembered for the next start."""
        return Address.parse(self.addresses[0]).port if self.addresses else None

    @property
    def num_neighbours(self) -> int:
        """Size of the DHT's routing table: the honest sign of being connected."""
        return self._dht.num_neighbours if self._dht else 0

    @property
    def known_addresses(self) -> tuple[Remembered, ...]:
        """Addresses of others, the most reliable first, for the caller to keep on disk."""
        return self._book.known()

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        """Runs a coroutine in the node's loop, from another thread; raises TimeoutError."""
        return self._thread.run(coroutine, timeout_s)

    def stop(self, timeout_s: float) -> None:
        """Leaves the DHT, ends the daemon and the thread; safe to call twice."""
        if self.loop.is_closed():
            return
        self._stopping = True
        try:
            self.run(self._close(), timeout_s)
        except TimeoutError:
            logger.warning("the network did not close within %g s", timeout_s)
        self._thread.stop(timeout_s)

    async def post(self, peer_id: str, payload: bytes, timeout_s: float = 5.0) -> None:
        """Delivers one control message (at most 256 KB); returns when it has been handled.

        Raises:
            Unreachable: no answer in time, or the other side refused it.
            NetworkDown: the daemon is dead.
        """
        await self._control.post(self._living_p2p(), peer_id, payload, timeout_s)

    async def request(self, peer_id: str, payload: bytes, timeout_s: float) -> bytes:
        """Asks a small question (at most 256 KB) and returns the answer (at most 1 MB).

        Raises:
            Unreachable: no answer in time, or the other side refused it.
            NetworkDown: the daemon is dead.
        """
        return await self._control.request(self._living_p2p(), peer_id, payload, timeout_s)

    async def open_stream(self, peer_id: str, protocol: str, timeout_s: float) -> socket.socket:
        """A non-blocking socket to a peer's handler of a bulk protocol.

        Raises:
            Unreachable: no connection in time.
            NetworkDown: the daemon is dead.
        """
        path = self._living_p2p().daemon_listen_maddr["unix"]
        return await open_stream(path, peer_of(peer_id), protocol, timeout_s)

    async def store(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Publishes one's own record (at most 20 KB) under a key, in place of the one before.

        Returns:
            Whether any holder took it. The DHT says True also when the network is gone and only
            this node holds it: judge by seeing one's own record through others.
        """
        return await self._living_dht().store(key, value, ttl_s)

    async def get(self, key: str) -> dict[str, Record]:
        """All records of a key, by the peer id of the owner who signed them."""
        return (await self.get_many([key]))[key]

    async def get_many(self, keys: Sequence[str]) -> dict[str, dict[str, Record]]:
        """`get` for several keys at once; at most 256 records a key, those that live longest.

        Raises:
            TimeoutError: the DHT did not answer within 15 s.
        """
        return await self._living_dht().get_many(keys)

    def remember(self, addresses: Sequence[str]) -> None:
        """Adds addresses that `heal` tries; to be called in the loop, with those from records."""
        self._book.add(addresses)

    async def heal(self) -> int:
        """Connects to and pings the addresses that are due, at most 16; returns how many answered.

        Looks by itself every 2 s; `address_book.introductions` says what is due. Without it a
        network that was cut stays cut after the link is back (measured: 4 of 5 runs).
        """
        now = Moment(asyncio.get_running_loop().time(), time.time())
        neighbours = self._dht.neighbours if self._dht else frozenset()
        chosen = [i.address for i in self._book.next(neighbours, now, HEAL_ADDRESSES)]
        answered = await asyncio.gather(*(self._reach(address) for address in chosen))
        for address, one_answered in zip(chosen, answered, strict=True):
            self._book.tried(address, one_answered, time.time())
        return sum(answered)

    async def _reach(self, address: Address) -> bool:
        peer = PeerID.from_base58(address.peer_id)
        try:
            async with asyncio.timeout(_CONNECT_S):
                client = self._living_p2p()._client
                await client.connect(peer, [Multiaddr(address.transport)])
                return await self._living_dht().ping(peer)
        except (TimeoutError, P2PDaemonError, OSError, asyncio.IncompleteReadError) as error:
            logger.debug("%s does not answer: %s", address.text, error)
            return False

    async def _heal_for_ever(self) -> None:
        while True:
            await asyncio.sleep(HEAL_LOOK_EVERY_S)
            with suppress(NetworkDown):  # told by _watch already
                await self.heal()

    async def _watch(self, p2p: P2P) -> None:
        """Notices when the daemon is dead, or can no longer be heard."""
        ended = asyncio.create_task(p2p._child.wait())
        try:
            watched = {ended, p2p._client.control._read_task}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ended}, timeout=_CLOSE_S)  # the connection ends first
        finally:
            ended.cancel()
        if self._stopping:
            return
        self.failure = (
            f"libp2p's daemon ended with status {ended.result()}"
            if ended.done() and not ended.cancelled()
            else "the connection to libp2p's daemon broke"
        )
        logger.error("%s; nothing can be sent or received any more", self.failure)
        if self._handlers.on_death:
            self._handlers.on_death(self.failure)

    def _living_p2p(self) -> P2P:
        if self.failure or self._p2p is None:
            raise NetworkDown(self.failure or "the network has not started")
        return self._p2p

    def _living_dht(self) -> Dht:
        if self.failure or self._dht is None:
            raise NetworkDown(self.failure or "the network has not started")
        return self._dht

    async def _open(self, peers: Sequence[Address], port: int | None, *, must_reach: bool) -> None:
        peers = await self._answering(peers, must_reach)
        try:
            p2p = await self._start_daemon(peers, port)
        except NobodyReachable:
            if must_reach:
                raise
            peers = []
            p2p = await self._start_daemon(peers, port)
        self._p2p = p2p
        self._tasks.append(asyncio.create_task(self._watch(p2p)))
        await self._control.register(p2p)
        for protocol, serve in sorted(self._handlers.streams.items()):
            await p2p.add_binary_stream_handler(protocol, self._stream_handler(serve))
        self._dht = await open_dht(
            p2p,
            SignedRecords(self.identity, self.traffic.refuse),
            self.traffic,
            peers=peers,
            client_mode=self._network.client_mode,
            must_reach=must_reach,
        )
        if not self._network.client_mode:
            visible = await p2p.get_visible_maddrs(latest=True)
            self.addresses = dialable([str(address) for address in visible])
        self._tasks.append(asyncio.create_task(self._heal_for_ever()))

    async def _start_daemon(self, peers: Sequence[Address], port: int | None) -> P2P:
        listen = listen_addresses(self._network, port)
        try:
            return await start_daemon(
                self._network,
                identity_path=self.identity.path,
                listen=listen,
                initial_peers=[address.text for address in peers],
                check_identity=not self._forgotten,
            )
        except P2PDaemonError as error:
            if "already taken" in str(error):
                raise StateLocked(f"a living peer already is {self.peer_id}") from error
            if "bootstrap peers" in str(error):
                texts = ", ".join(address.text for address in peers)
                raise NobodyReachable(f"another peer, or none, is at {texts}") from error
            where = ", ".join(listen)
            raise NetworkDown(f"libp2p's daemon, listening on {where}: {error}") from error

    async def _answering(self, peers: Sequence[Address], must_reach: bool) -> list[Address]:
        """The peers whose port is open: the daemon would wait long for the others."""
        faults = await asyncio.gather(*(probe(address, _PROBE_S) for address in peers))
        open_ones = [address for address, fault in zip(peers, faults, strict=True) if not fault]
        if peers and must_reach and not open_ones:
            tried = "; ".join(f"{a.text}: {f}" for a, f in zip(peers, faults, strict=True))
            raise NobodyReachable(
                f"no known peer answers: {tried}",
                hint="check the address, and that the other peer still runs",
            )
        return [address for address in open_ones if address.peer_id != self.peer_id]

    def _stream_handler(self, serve: Serve) -> Callable[..., Awaitable[None]]:
        async def handle(
            info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            try:
                await serve(self.traffic, info.peer_id.to_base58(), reader, writer)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                logger.debug("stream of %s ended: %s", info.peer_id, error)
            finally:
                writer.close()

        return handle

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._dht and not self.failure:
            with suppress(TimeoutError, P2PDaemonError, OSError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._dht.close()
        if self._p2p:
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await self._p2p.shutdown()
            except TimeoutError:
                self._p2p._child.kill()
