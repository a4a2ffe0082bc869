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

from swarm.network.holder import OVERHEAD_BYTES, HeldRecords

Handler = Callable[[DHTProtocol, dht_pb2.StoreRequest, P2PContext], Awaitable[Any]]


def charging(store: Handler) -> Handler:
    """Hivemind's handler of stores, which refuses what its sender cannot pay for."""

    # hivemind reads the types of a handler's arguments.
    @wraps(store)
    async def charged(self: DHTProtocol, request: dht_pb2.StoreRequest, context: P2PContext) -> Any:
        if not isinstance(self.storage, HeldRecords):
            return await store(self, request, context)  # it is entering the DHT
        sender = context.remote_id.to_base58()
        num_bytes = sum(len(value) + OVERHEAD_BYTES for value in request.values)
        with self.storage.stored_by(sender, num_bytes) as may_store:
            if may_store:
                return await store(self, request, context)
        refused = [False] * len(request.keys)
        return dht_pb2.StoreResponse(store_ok=refused, peer=self.node_info)

    return charged


def guard_stores() -> None:
    """Has every DHT node of this process charge those that store."""
    if not hasattr(DHTProtocol.rpc_store, "__wrapped__"):
        DHTProtocol.rpc_store = charging(DHTProtocol.rpc_store)
