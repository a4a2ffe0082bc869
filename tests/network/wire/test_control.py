"""Control messages: their share of a cap."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from swarm.network.wire.control import Control, peer_of
from swarm.network.wire.identity import load_or_create_identity
from swarm.network.wire.ledger import Ledger
from swarm.network.wire.traffic import BURST_S, Throttle, Traffic

MBIT = 8.0
LARGEST = 900_000


class Daemon:
    """Stores added handlers, and answers every call alike."""

    def __init__(self) -> None:
        self.peer_id = None
        self.handlers: dict[str, Any] = {}

    async def add_protobuf_handler(self, name: str, handler: Any, _: type) -> None:
        self.handlers[name] = handler

    async def call_protobuf_handler(self, *_: Any) -> Any:
        return SimpleNamespace(data=b"")


@pytest.mark.parametrize("is_answer", [True, False])
def test_blobs_wait_for_what_control_messages_and_answers_have_taken(
    tmp_path: Any, is_answer: bool
) -> None:
    traffic = Traffic(up=Throttle(MBIT, clock=lambda: 5.0))
    other = load_or_create_identity(tmp_path / "other.key").peer_id
    daemon: Any = Daemon()

    async def exchange() -> int:
        control = Control(traffic, Ledger(), None, AsyncMock(return_value=bytes(LARGEST)))
        if not is_answer:
            await control.post(daemon, other, bytes(200_000), 1.0)
            return 200_000
        await control.register(daemon)
        (answered,) = daemon.handlers.values()
        control.ledger.admit([other])  # its network need not be looked up
        answer = await answered(
            SimpleNamespace(data=b"heads"), SimpleNamespace(remote_id=peer_of(other))
        )
        return len(answer.data)

    sent = asyncio.run(exchange())
    assert traffic.control_bytes_sent == sent
    assert traffic.up.count(0) == pytest.approx(sent / (MBIT * 1e6 / 8) - BURST_S)
