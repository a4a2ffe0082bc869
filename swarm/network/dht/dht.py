"""The DHT: signed values under keys; only its owner can replace a value.

A store is charged to the peer that asks for it, and all bytes of the DHT are counted.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any, NamedTuple

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2

from swarm.errors import NobodyReachable
from swarm.network.dht import local_storage
from swarm.network.dht.bounded_msgpack import BoundedSerializer, guard_hivemind, num_elements
from swarm.network.dht.signed_records import SignedRecords, owner_of
from swarm.network.wire.daemon import Address
from swarm.network.wire.ledger import Ledger
from swarm.network.wire.steady_clock import LIMIT_S, dht_clock
from swarm.network.wire.traffic import Traffic
from swarm.protocol.records.records import MAX_RUN_RECORD_BYTES, runs_keys


class CountedP2P:
    """Wraps a daemon, and counts the bytes of its calls and answers as the DHT's."""

    def __init__(self, p2p: P2P, traffic: Traffic) -> None:
        self._p2p, self._traffic = p2p, traffic

    def __getattr__(self, name: str) -> Any:
        return getattr(self._p2p, name)

    async def call_protobuf_handler(
        self, peer_id: PeerID, name: str, question: Any, answer_type: Any
    ) -> Any:
        """Calls another peer, as the daemon does."""
        self._traffic.dht_bytes += question.ByteSize()
        answer = await self._p2p.call_protobuf_handler(peer_id, name, question, answer_type)
        self._traffic.dht_bytes += answer.ByteSize()
        return answer

    async def add_protobuf_handler(
        self,
        name: str,
        handler: Callable[[Any, P2PContext], Awaitable[Any]],
        *types: Any,
        **more: Any,
    ) -> None:
        """Lets a handler answer others, as the daemon does."""

        async def counted(question: Any, context: P2PContext) -> Any:
            self._traffic.dht_bytes += question.ByteSize()
            answer = await handler(question, context)
            self._traffic.dht_bytes += answer.ByteSize()
            return answer

        await self._p2p.add_protobuf_handler(name, counted, *types, **more)


Handler = Callable[[DHTProtocol, dht_pb2.StoreRequest, P2PContext], Awaitable[Any]]

_OF_DICTIONARY, _OF_ENTRY = 5, 4
"""Number of msgpack values in an empty dictionary, and in each entry."""


def cost_of(request: dht_pb2.StoreRequest, most: int) -> tuple[int, int]:
    """The number of records in a call, and the bytes that are charged for them.

    Counting stops once there are more than `most` records. Entries of dictionaries are counted
    without being decoded.
    """
    records = num_bytes = 0
    for subkey, value in zip(request.subkeys, request.values, strict=False):
        entries = 1
        if subkey == DHTProtocol.IS_DICTIONARY:
            entries = max(1, (num_elements(value) - _OF_DICTIONARY) // _OF_ENTRY)
        records += entries
        num_bytes += max(
            len(value) + local_storage.OVERHEAD_BYTES, entries * local_storage.LEAST_BYTES
        )
        if records > most:
            break
    return records, num_bytes


def charging(store: Handler) -> Handler:
    """Hivemind's handler of stores, changed to refuse calls over the sender's limits."""

    # hivemind reads the types of a handler's arguments.
    @wraps(store)
    async def charged(self: DHTProtocol, request: dht_pb2.StoreRequest, context: P2PContext) -> Any:
        sender, held = context.remote_id.to_base58(), self.storage
        if not isinstance(held, local_storage.LocalStorage):  # before the node has entered the DHT
            if (
                cost_of(request, local_storage.MAX_HELD_RECORDS)[0]
                <= local_storage.MAX_HELD_RECORDS
            ):
                return await store(self, request, context)
        else:
            records, num_bytes = cost_of(request, held.most_records(sender))
            with held.stored_by(sender, num_bytes, records) as may_store:
                if may_store:
                    return await store(self, request, context)
        refused = [False] * len(request.keys)
        return dht_pb2.StoreResponse(store_ok=refused, peer=self.node_info)

    return charged


def guard_stores() -> None:
    """Makes every DHT node of this process charge the senders of stores."""
    if not hasattr(DHTProtocol.rpc_store, "__wrapped__"):
        DHTProtocol.rpc_store = charging(DHTProtocol.rpc_store)


MAX_VALUE_BYTES = 20_000
MAX_RECORDS_PER_KEY = local_storage.MAX_OF_KEY
"""Limit of the records of a key that all holders together send."""
ROOM_BYTES = 256
"""Size of a stored record without its value: the owner's key, the signature and the rest."""
_CALL_S = 15.0
_LOW_BITS = 2**32 - 1
"""The low 32 of an id's 160 bits. It is nearly impossible that the ids of two nodes differ only
there."""
_CLOCKS = re.compile(r"local: ([\d.]+), peer: ([\d.]+)")
"""Matches hivemind's refusal of a peer whose clock differs."""


class StoredValue(NamedTuple):
    """A value signed by its owner, and the time (seconds since 1970) at which it expires."""

    value: bytes
    expiration: float


class Dht:
    """A DHT node; see `open_dht`."""

    def __init__(
        self,
        node: DHTNode,
        validator: SignedRecords,
        traffic: Traffic,
        ledger: Ledger,
        locate: Callable[[str], None],
    ) -> None:
        self._node = node
        self._validator = validator
        self._traffic = traffic
        me: str = node.peer_id.to_base58()
        self._is_member: Callable[[str], bool] = lambda peer: peer == me or ledger.is_member(peer)
        limits = {
            DHTID.generate(source=key): MAX_RUN_RECORD_BYTES + ROOM_BYTES for key in runs_keys()
        }
        held = local_storage.LocalStorage(me, ledger, locate, traffic.refuse, limits)
        held.take_over(node.protocol.storage)  # records stored since the node was reachable
        node.protocol.storage, node.protocol.cache = held, local_storage.NoCache()
        node.find_nearest_nodes = _beside(node.find_nearest_nodes)
        self._expirations: dict[str, float] = {}

    @property
    def neighbours(self) -> frozenset[str]:
        """Peer ids in the routing table."""
        peers = self._node.protocol.routing_table.uid_to_peer_id.values()
        return frozenset(peer.to_base58() for peer in peers)

    async def store(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Publishes this peer's value. Holders keep the old value unless the expiration grows.

        Raises:
            NobodyReachable: the DHT did not answer in time.
        """
        assert len(value) <= MAX_VALUE_BYTES, f"record of {len(value)} bytes"
        expiration = max(dht_clock()() + ttl_s, self._expirations.get(key, 0.0) + 0.001)
        self._expirations[key] = expiration
        async with _answered():
            stored = await self._node.store(
                key,
                value,
                expiration,
                subkey=self._validator.subkey,
                exclude_self=self._node.protocol.client_mode,
            )
        return bool(stored)

    async def get_many(self, keys: Sequence[str]) -> dict[str, dict[str, StoredValue]]:
        """The records of each key, by the peer id of their owner; see `Node.get_many`."""
        async with _answered():
            found = await self._node.get_many(keys, sufficient_expiration_time=float("inf"))
        return {key: self._owned(found[key].value if found[key] else None) for key in keys}

    def _owned(self, entries: object) -> dict[str, StoredValue]:
        if not isinstance(entries, dict):
            return {}
        owned = {owner: entry for subkey, entry in entries.items() if (owner := owner_of(subkey))}
        chosen = list(owned)
        if len(owned) > MAX_RECORDS_PER_KEY:
            self._traffic.refuse("record_count")
            # Neither a long life nor a peer id gives a record precedence.
            random.shuffle(chosen)
            chosen.sort(key=lambda owner: not self._is_member(owner))
        records: dict[str, StoredValue] = {}
        for owner in chosen[:MAX_RECORDS_PER_KEY]:
            entry = owned[owner]
            if isinstance(entry.value, bytes):
                records[owner] = StoredValue(entry.value, entry.expiration_time)
        return records

    async def ping(self, peer: PeerID) -> bool:
        """Whether the peer's DHT node answers; after an answer the two nodes know each other."""
        return await self._node.protocol.call_ping(peer) is not None

    async def close(self) -> None:
        """Ends the node; waits for the daemon."""
        await self._node.shutdown()


def _beside(find: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Hivemind's search for nodes that can store, changed to search at a place near the key.

    A node that is asked for the key itself also sends all records of the key, which is hundreds of
    kB from all holders at each heartbeat. The same nodes are nearest to a place that differs from
    the key in low bits only. The place is random, so that nobody can have filled it.
    """

    async def search(
        queries: Collection[DHTID],
        *,
        found_callback: Callable[..., Awaitable[Any]] | None = None,
        **more: Any,
    ) -> Any:
        if found_callback is None:  # not a search for a store
            return await find(queries, **more)
        tell, keys = found_callback, {DHTID(q ^ random.randint(1, _LOW_BITS)): q for q in queries}

        async def found(place: DHTID, nearest: list[DHTID], visited: set[DHTID]) -> None:
            await tell(keys[place], nearest, visited)

        return await find(list(keys), found_callback=found, **more)

    return search


@asynccontextmanager
async def _answered() -> AsyncIterator[None]:
    """Limits the time of a call to the DHT, since nodes near a key may answer nothing but pings."""
    try:
        async with asyncio.timeout(_CALL_S):
            yield
    except TimeoutError as error:
        raise NobodyReachable(f"the DHT did not answer within {_CALL_S:g} s") from error


def refusal(text: str) -> NobodyReachable:
    """The error, with its remedy, when hivemind's node cannot enter through a peer that answers.

    Args:
        text: hivemind's message; hivemind checks only the clock and the dial back.
    """
    if told := _CLOCKS.search(text):
        ahead_s = float(told[1]) - float(told[2])
        where = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'}"
        return NobodyReachable(
            f"this machine's clock is {where} the clock of the peer at --initial-peers; "
            f"{LIMIT_S:.0f} s are allowed",
            hint="set the clock that is wrong: timedatectl set-ntp true",
        )
    return NobodyReachable(
        "the peer at --initial-peers cannot dial this machine back",
        hint="open the port of --port in the firewall; behind a router or in a cloud, name the "
        "address by --public-ip; if nobody can dial this machine, use --client-mode",
    )


async def open_dht(
    p2p: P2P,
    validator: SignedRecords,
    traffic: Traffic,
    ledger: Ledger,
    locate: Callable[[str], None],
    *,
    peers: Sequence[Address],
    client_mode: bool,
    must_reach: bool,
) -> Dht:
    """A DHT node on this daemon that has met its `peers`; records of members have precedence.

    Raises:
        NobodyReachable: `must_reach`, and none of the peers answered, this machine's clock differs
            too much from theirs, or they cannot dial it.
    """
    guard_hivemind()
    guard_stores()
    try:
        node = await DHTNode.create(
            p2p=CountedP2P(p2p, traffic),
            initial_peers=[address.text for address in peers] or None,
            record_validator=validator,
            client_mode=client_mode,
            ensure_bootstrap_success=must_reach,
            strict=must_reach,
            # `latest` bypasses a cache, which would only make nodes send whole keys to each other.
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
        )
    except ValidationError as error:
        raise refusal(str(error)) from error
    except RuntimeError as error:
        texts = ", ".join(address.text for address in peers)
        raise NobodyReachable(f"none of {texts} answers as a peer") from error
    node.protocol.serializer = BoundedSerializer(traffic.refuse)
    return Dht(node, validator, traffic, ledger, locate)
