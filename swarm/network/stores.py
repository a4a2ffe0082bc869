"""Charges those who have this peer store records in the DHT, before anything is looked at.

Keys and so owners of records cost nothing; libp2p knows who sends them, and from where.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import P2PContext
from hivemind.proto import dht_pb2

from swarm.network.bounded_msgpack import num_elements
from swarm.network.holder import LEAST_BYTES, MAX_HELD_RECORDS, OVERHEAD_BYTES, HeldRecords

Handler = Callable[[DHTProtocol, dht_pb2.StoreRequest, P2PContext], Awaitable[Any]]

_OF_DICTIONARY, _OF_ENTRY = 5, 4
"""Values of msgpack in a dictionary without entries, and in each of its entries."""


def cost_of(request: dht_pb2.StoreRequest, most: int) -> tuple[int, int]:
    """How many records a call brings, and as how many bytes they count.

    Nothing is counted any more once there are more than `most`. Entries of dictionaries are
    counted without being decoded.
    """
    records = num_bytes = 0
    for subkey, value in zip(request.subkeys, request.values, strict=False):
        entries = 1
        if subkey == DHTProtocol.IS_DICTIONARY:
            entries = max(1, (num_elements(value) - _OF_DICTIONARY) // _OF_ENTRY)
        records += entries
        num_bytes += max(len(value) + OVERHEAD_BYTES, entries * LEAST_BYTES)
        if records > most:
            break
    return records, num_bytes


def charging(store: Handler) -> Handler:
    """Hivemind's handler of stores, which refuses what its sender cannot pay for."""

    # hivemind reads the types of a handler's arguments.
    @wraps(store)
    async def charged(self: DHTProtocol, request: dht_pb2.StoreRequest, context: P2PContext) -> Any:
        sender, held = context.remote_id.to_base58(), self.storage
        if not isinstance(held, HeldRecords):  # it is entering the DHT
            if cost_of(request, MAX_HELD_RECORDS)[0] <= MAX_HELD_RECORDS:
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
    """Has every DHT node of this process charge those that store."""
    if not hasattr(DHTProtocol.rpc_store, "__wrapped__"):
        DHTProtocol.rpc_store = charging(DHTProtocol.rpc_store)
