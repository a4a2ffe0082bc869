"""Counts what the DHT moves, by standing between hivemind's node and libp2p's daemon."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from hivemind.p2p import P2P, P2PContext, PeerID

from swarm.network.traffic import Traffic


class CountedP2P:
    """A daemon whose calls and answers are counted as the DHT's; for all else the daemon itself."""

    def __init__(self, p2p: P2P, traffic: Traffic) -> None:
        self._p2p, self._traffic = p2p, traffic

    def __getattr__(self, name: str) -> Any:
        return getattr(self._p2p, name)

    async def call_protobuf_handler(
        self, peer_id: PeerID, name: str, question: Any, answer_type: Any
    ) -> Any:
        """Asks, as the daemon does."""
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
        """Answers others, as the daemon does."""

        async def counted(question: Any, context: P2PContext) -> Any:
            self._traffic.dht_bytes += question.ByteSize()
            answer = await handler(question, context)
            self._traffic.dht_bytes += answer.ByteSize()
            return answer

        await self._p2p.add_protobuf_handler(name, counted, *types, **more)
