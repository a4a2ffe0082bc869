"""libp2p's daemon and hivemind's DHT in virtual time, as the peer's node calls them.

Replaced are `P2P.call_protobuf_handler`, `add_*_handler`, `list_peers`, `connect`, and
`DHTNode.store`, `get_many`. All code above these calls is the peer's own.
"""

# Stand-ins take the arguments of the originals.
# ruff: noqa: ARG001, ARG002

from __future__ import annotations

import asyncio
import socket as real_socket
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

from swarm.emulation.longevity.kernel import running_world
from swarm.emulation.longevity.sockets import Internet, Machine, here
from swarm.errors import NobodyReachable, NoRoute
from swarm.network.dht.dht import Dht
from swarm.network.dht.signed_records import SignedRecords
from swarm.network.node import substrate
from swarm.network.wire.daemon import Address
from swarm.network.wire.steady_clock import SteadyClock
from swarm.network.wire.upload_rate import LineBytes

PORT = 4001
DIAL_S = 5.0
"""Seconds after which libp2p gives up on a host that does not answer."""
ROUTING_TABLE = 20
CALL_BYTES = 200
"""Bytes of a call beyond its payload."""
_pids = count(1)
_processes: dict[int, VirtualP2P] = {}


@dataclass
class Net:
    """Everything that libp2p connects: the place of each peer, and the content of the DHT.

    Attributes:
        records: signed values by key and subkey, each with its expiration by a correct clock.
        dht_outages: times when no node of the DHT answers, (from, to) in seconds of the month.
        calls: number of calls of control handlers, by name.
    """

    internet: Internet
    daemons: dict[str, VirtualP2P] = field(default_factory=dict)
    records: dict[str, dict[bytes, substrate.ValueWithExpiration[bytes]]] = field(
        default_factory=dict
    )
    dht_outages: list[tuple[float, float]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    stored: dict[tuple[str, bytes], int] = field(default_factory=dict)
    """Number of times that each record was stored, by key and subkey."""

    async def dht_answers(self, machine: Machine) -> None:
        """Waits for a round trip to the DHT, during an outage until the outage is over."""
        loop = running_world()
        wait_s = machine.line.usable_from(loop.now_s) - loop.now_s
        for begin_s, end_s in self.dht_outages:
            if begin_s <= loop.now_s < end_s:
                wait_s = max(wait_s, end_s - loop.now_s)
        await asyncio.sleep(wait_s + 4 * machine.line.latency_s)


class VirtualP2P:
    """One life of a daemon, like hivemind's `P2P`."""

    def __init__(self, net: Net, machine: Machine, peer_id: str) -> None:
        self.net, self.machine, self.name = net, machine, peer_id
        self.peer_id = substrate.PeerID.from_base58(peer_id)
        self.daemon_listen_maddr = {"unix": self}
        self.handlers: dict[str, tuple[Callable[..., Any], Any]] = {}
        self.streams: dict[str, Callable[..., Any]] = {}
        self.ended: asyncio.Future[int] = running_world().create_future()
        self.pid = next(_pids)
        _processes[self.pid] = self
        self._child = SimpleNamespace(wait=self._wait, pid=self.pid)
        self._before = machine.daemon_bytes
        self._client = SimpleNamespace(
            connect=self._connect,
            control=SimpleNamespace(_read_task=asyncio.ensure_future(self._wait())),
        )
        self.context = copy_context()
        self.seen: set[str] = set()
        """Peers to which the daemon has had a connection."""
        net.daemons[peer_id] = self

    async def _wait(self) -> int:
        return await asyncio.shield(self.ended)

    def kill(self, status: int = 9) -> None:
        """Ends the process."""
        if not self.ended.done():
            self.ended.set_result(status)
        if self.net.daemons.get(self.name) is self:
            del self.net.daemons[self.name]

    async def add_protobuf_handler(self, name: str, handler: Any, kind: Any) -> None:
        """As hivemind's."""
        self.handlers[name] = handler, kind

    async def add_binary_stream_handler(self, protocol: str, handler: Any) -> None:
        """As hivemind's."""
        self.streams[protocol] = handler

    async def get_visible_maddrs(self, *, latest: bool = False) -> list[str]:
        """The address where the daemon listens."""
        return [f"/ip4/{self.machine.host}/tcp/{PORT}/p2p/{self.name}"]

    async def list_peers(self) -> list[Any]:
        """The peers to which the daemon is connected."""
        found = [self.net.daemons.get(name) for name in sorted(self.seen)]
        return [
            SimpleNamespace(peer_id=other.peer_id, addrs=(f"/ip4/{other.machine.host}/tcp/{PORT}",))
            for other in found
            if other is not None
        ]

    async def _connect(self, peer: substrate.PeerID, _: Sequence[object]) -> None:
        await self.reached(peer)

    async def reached(self, peer: substrate.PeerID) -> VirtualP2P:
        """The daemon of a peer, once the two daemons are connected.

        Raises:
            P2PDaemonError: the peer cannot be dialled.
        """
        loop, line = running_world(), self.machine.line
        other = self.net.daemons.get(peer.to_base58())
        is_there = other is not None and other.machine.is_up
        is_cut = line.is_cut(loop.now_s) or (is_there and other.machine.line.is_cut(loop.now_s))  # type: ignore[union-attr]
        is_open = is_there and (other.machine.is_reachable or self.machine.is_reachable)  # type: ignore[union-attr]
        if other is None or not is_there or is_cut or not is_open:
            await asyncio.sleep(DIAL_S)
            raise substrate.P2PDaemonError("failed to dial: all dials failed")
        self.seen.add(other.name)
        other.seen.add(self.name)
        return other

    async def call_protobuf_handler(
        self, peer: substrate.PeerID, name: str, payload: Any, kind: Any
    ) -> Any:
        """Like hivemind's. The handler runs on the other machine."""
        other = await self.reached(peer)
        await self._passes(len(payload.data), self.machine, other.machine)
        self.net.calls[name] = self.net.calls.get(name, 0) + 1
        if name not in other.handlers:
            raise substrate.P2PDaemonError("failed to negotiate: protocol not supported")
        handler, _ = other.handlers[name]
        context = SimpleNamespace(remote_id=self.peer_id)
        task = running_world().create_task(handler(payload, context), context=other.context.copy())
        try:
            answer = await task
        except asyncio.CancelledError:
            task.cancel()
            raise
        except Exception as error:
            raise substrate.P2PHandlerError(str(error)) from error
        await self._passes(len(answer.data), other.machine, self.machine)
        return answer

    @property
    def moved_bytes(self) -> int:
        """Bytes that this daemon has carried over the line."""
        return self.machine.daemon_bytes - self._before

    async def _passes(self, num_bytes: int, machine: Machine, to: Machine) -> None:
        loop, num_bytes = running_world(), num_bytes + CALL_BYTES
        left_s = machine.line.takes(num_bytes, loop.now_s)
        machine.daemon_bytes += num_bytes
        to.daemon_bytes += num_bytes
        to.received_bytes += num_bytes
        await asyncio.sleep(left_s - loop.now_s + machine.line.latency_s)

    async def open_stream(self, peer: substrate.PeerID, protocol: str) -> Any:
        """One end of a stream. The handler of the protocol gets the other end."""
        other = await self.reached(peer)
        if protocol not in other.streams:
            raise substrate.P2PDaemonError("failed to negotiate: protocol not supported")
        await asyncio.sleep(2 * self.machine.line.latency_s)
        near, far = self.net.internet.pair(self.machine, other.machine, real_socket.AF_UNIX)

        async def serve() -> None:
            reader, writer = await asyncio.open_connection(sock=far)
            info = SimpleNamespace(
                peer_id=self.peer_id, addr=f"/ip4/{self.machine.host}/tcp/{PORT}"
            )
            await other.streams[protocol](info, reader, writer)

        running_world().create_task(serve(), context=other.context.copy())
        return near


async def open_stream(
    daemon: VirtualP2P, peer: substrate.PeerID, protocol: str, timeout_s: float
) -> Any:
    """Replaces `network.streams.open_stream`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await daemon.open_stream(peer, protocol)
    except (TimeoutError, substrate.P2PDaemonError) as error:
        raise NoRoute(f"{peer}: {error}") from error


async def end_daemon(daemon: VirtualP2P, line: LineBytes) -> None:
    """Replaces `network.daemon.end_daemon`."""
    line.daemon_ends(daemon.pid)
    _processes.pop(daemon.pid, None)
    daemon.kill(0)


def moved_by_process(pid: int) -> int | None:
    """Replaces `upload_rate.moved_by_process`."""
    daemon = _processes.get(pid)
    return daemon.moved_bytes if daemon else None


class VirtualDHTNode:
    """Like hivemind's `DHTNode`, but all living nodes store every record."""

    def __init__(self, p2p: VirtualP2P, validator: SignedRecords) -> None:
        self.net, self.p2p, self.peer_id = p2p.net, p2p, p2p.peer_id
        self._validator = validator
        self.protocol = SimpleNamespace(
            storage=substrate.DHTLocalStorage(),
            cache=None,
            client_mode=False,
            routing_table=SimpleNamespace(uid_to_peer_id={}),
            call_ping=self._ping,
        )

    async def find_nearest_nodes(self, *_: Any, **__: Any) -> Any:
        """Never called, since distance between nodes is not simulated."""
        raise NotImplementedError

    async def _ping(self, peer: substrate.PeerID) -> object:
        other = self.net.daemons.get(peer.to_base58())
        if other is None or not other.machine.is_up:
            return None
        self._meets(other.name)
        return object()

    def _meets(self, name: str) -> None:
        table = self.protocol.routing_table.uid_to_peer_id
        table[name] = substrate.PeerID.from_base58(name)
        for known in [k for k in table if k not in self.net.daemons][:1]:
            del table[known]
        while len(table) > ROUTING_TABLE:
            del table[next(iter(table))]

    async def store(
        self, key: str, value: bytes, expiration: float, *, subkey: bytes, exclude_self: bool
    ) -> bool:
        """Stores a record, unless it has expired by a correct clock."""
        await self.net.dht_answers(self.p2p.machine)
        now = self.p2p.machine.clock.true_wall()
        records = self.net.records.setdefault(key, {})
        before = records.get(subkey)
        if expiration < now or (before and before.expiration_time >= expiration):
            return False
        records[subkey] = substrate.ValueWithExpiration(value, expiration)
        self.net.stored[key, subkey] = self.net.stored.get((key, subkey), 0) + 1
        for name in sorted(self.net.daemons):
            if name != self.p2p.name and self.net.daemons[name].machine.is_up:
                self._meets(name)
        return True

    async def get_many(
        self, keys: Sequence[str], sufficient_expiration_time: float
    ) -> dict[str, substrate.ValueWithExpiration[Any] | None]:
        """Records that have expired neither by a correct clock nor by the reader's clock."""
        await self.net.dht_answers(self.p2p.machine)
        clock, found = self.p2p.machine.clock, {}
        now = max(clock.true_wall(), dht_clock()())
        for key in keys:
            records = self.net.records.get(key, {})
            for subkey in [s for s, r in records.items() if r.expiration_time < clock.true_wall()]:
                del records[subkey]
            alive = {s: r for s, r in records.items() if r.expiration_time >= now}
            found[key] = substrate.ValueWithExpiration(alive, now) if alive else None
            if not records:
                self.net.records.pop(key, None)
        return found

    async def shutdown(self) -> None:
        """Does nothing, since the node's process has ended."""


_clocks: dict[int, SteadyClock] = {}


def dht_clock() -> SteadyClock:
    """Replaces `steady_clock.dht_clock` by the clock of the machine on which the code runs."""
    machine = here.get()
    found = machine.__dict__.get("dht_clock")
    if found is None:
        found = machine.__dict__["dht_clock"] = SteadyClock()
    return found


def opener(net: Net) -> Callable[..., Any]:
    """Replaces `substrate.open_substrate`."""

    async def open_substrate(
        opening: substrate.Opening,
        peers: Sequence[Address],
        port: int | None,
        *,
        must_reach: bool,
        check_identity: bool,
    ) -> substrate.Substrate:
        me = opening.identity.peer_id
        p2p = VirtualP2P(net, here.get(), me)
        opening.traffic.line.daemon_began(p2p.pid)
        there = [a for a in peers if a.peer_id in net.daemons and a.peer_id != me]
        if peers and must_reach and not there:
            raise NobodyReachable("no known peer answers")

        async def enter(_: substrate.P2P, validator: SignedRecords, *rest: Any) -> Dht:
            node: Any = VirtualDHTNode(p2p, validator)
            node.protocol.client_mode = opening.network.client_mode
            for address in there:
                node._meets(address.peer_id)
                p2p.seen.add(address.peer_id)
                net.daemons[address.peer_id].seen.add(me)
            return Dht(node, validator, *rest)

        return await substrate.begun(opening, p2p, enter)

    return open_substrate


def identity_content(private_key: Any) -> bytes:
    """The content of an identity file as libp2p's daemon reads it."""
    data = private_key.private_bytes_raw() + private_key.public_key().public_bytes_raw()
    content = substrate.crypto_pb2.PrivateKey(
        key_type=substrate.crypto_pb2.Ed25519, data=data
    ).SerializeToString()
    return bytes(content)
