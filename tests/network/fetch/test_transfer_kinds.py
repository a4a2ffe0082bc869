"""Inputs of reducers and attachments do not wait behind pending experts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from swarm.experts import UnitLayout, expert_unit, shared_unit
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch import blob_server
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import PROTOCOL
from swarm.network.fetch.fetcher import Want
from swarm.network.node.node import Handlers
from swarm.network.rounds.outbound import Outbound
from swarm.network.rounds.transfers import Transfers
from swarm.network.wire.ledger import Ledger
from swarm.protocol.messages.events import BlobWanted, Event, Fetch, Purpose, Stored
from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.values.layout import Layout
from tests.network.conftest import Peers

WAIT_S = 60.0
NUM_ELEMENTS = 200_000
EXPERT, SHARED = expert_unit(0), shared_unit(0)
LAYOUT = Layout(
    tuple(
        UnitLayout(unit, "bf16", (), NUM_ELEMENTS, 2 * NUM_ELEMENTS, "none")
        for unit in (EXPERT, SHARED)
    ),
    {},
)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    started = Peers(tmp_path)
    yield started
    started.stop()


def value(seed: int) -> bytes:
    """Small finite numbers in bf16."""
    draw = random.Random(seed)
    return b"".join(bytes([draw.randrange(256), 0x3D]) for _ in range(NUM_ELEMENTS))


def offer_of(expert: str, shared: str) -> Offer:
    offered = {EXPERT: expert, SHARED: shared}
    units = {
        unit: OfferedUnit(digest, 2 * NUM_ELEMENTS, "base") for unit, digest in offered.items()
    }
    return Offer("tip", 1, 1, units)


def test_an_own_expert_may_wait_and_nothing_else() -> None:
    outbound = Outbound(BlobStore())
    assert not outbound.may_wait("expert")
    outbound.offered(offer_of("expert", "shared"))
    assert outbound.may_wait("expert")
    assert not outbound.may_wait("shared")
    outbound.offered(offer_of("newer", "shared"))
    assert not outbound.may_wait("expert")


def test_inputs_and_attachments_come_while_experts_that_were_asked_for_first_stand_still(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a slow uplink, where an expert takes minutes. Here it waits for another member."""
    monkeypatch.setattr(blob_server, "YIELD_S", 3600.0)
    monkeypatch.setattr(blob_server, "PER_MEMBER_BYTE", 0.0)
    far, near, ledger = BlobStore(), BlobStore(), Ledger()
    expert, shared, attached = far.put(value(1)), far.put(value(2)), far.put(b"a manifest")
    outbound = Outbound(far)
    outbound.offered(offer_of(expert, shared))
    asked: set[str] = set()
    far_server = BlobServer(
        on_ask=lambda _, digest: asked.add(digest), ledger=ledger, may_wait=outbound.may_wait
    )
    far_server.attach(far)
    server = peers.node(Handlers(streams={PROTOCOL: far_server.serve}, ledger=ledger))
    node = peers.node()
    ledger.admit([node.peer_id, "other"])
    events: asyncio.Queue[Event] = asyncio.Queue()
    transfers = Transfers(node, near, LAYOUT, events.put_nowait)

    def wanted(unit: str, digest: str) -> tuple[BlobWanted, ...]:
        return (BlobWanted(unit, digest, 2 * NUM_ELEMENTS, (server.peer_id,)),)

    async def next_stored() -> Event:
        async with asyncio.timeout(WAIT_S):
            return await events.get()

    async def fetch() -> list[Event]:
        await transfers.start(Fetch(Purpose.AHEAD, wanted(EXPERT, expert)))
        while expert not in asked:
            await asyncio.sleep(0.01)
        await transfers.start(Fetch(Purpose.REDUCE, wanted(SHARED, shared)))
        found = [await next_stored()]
        await transfers.attached.fetch_one(Want(attached, 10, (server.peer_id,)), timeout_s=WAIT_S)
        assert not near.has(expert)
        server.loop.call_soon_threadsafe(others_answer.close)
        found.append(await next_stored())
        await transfers.stop()
        return found

    async def hold() -> None:
        others_answer.enter_context(far_server._queue.serving("other"))

    others_answer = ExitStack()
    server.run(hold(), WAIT_S)
    assert node.run(fetch(), 4 * WAIT_S) == [Stored(shared), Stored(expert)]
