"""However a fetch ends, it pins no blob that it has not reported."""

from __future__ import annotations

import asyncio
import threading
from unittest.mock import Mock

import pytest

from swarm.errors import StateError
from swarm.experts import UnitLayout, expert_unit
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.rounds.transfers import Transfers
from swarm.network.wire.traffic import Arriving, Traffic
from swarm.protocol.messages.events import BlobWanted, Fetch, Purpose
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.updates import UpdateBound

EXPERT = expert_unit(0)
LAYOUT = Layout((UnitLayout(EXPERT, "bf16", (), 10, 20, "none"),), {})


class Nowhere:
    """A node that reaches nobody."""

    peer_id, traffic = "me", Traffic()

    def is_far(self, peer: str) -> bool:
        return False


def wanted(store: BlobStore, *, is_here: bool) -> Fetch:
    digest = store.put(bytes(20)) if is_here else "00" * 32
    return Fetch(
        Purpose.REDUCE, (BlobWanted(EXPERT, digest, 20, (), UpdateBound("11" * 32, 1.0, 1.0)),)
    )


async def test_a_fetch_that_is_cancelled_before_its_first_step_holds_nothing() -> None:
    store = BlobStore()
    transfers = Transfers(Nowhere(), store, LAYOUT, lambda _: None)
    await transfers.start(wanted(store, is_here=False))
    assert store._holds.held(0.0)
    await transfers.cancel(Purpose.REDUCE)
    assert not store._holds.held(0.0)


async def test_nor_one_that_is_cancelled_while_it_judges_what_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def judge(*_: object) -> None:
        begun.set()
        may_end.wait(10.0)

    monkeypatch.setattr(Transfers, "_check", judge)
    store = BlobStore()
    transfers = Transfers(Nowhere(), store, LAYOUT, lambda _: None)
    await transfers.start(wanted(store, is_here=True))
    while not begun.is_set():
        await asyncio.sleep(0.01)
    await transfers.cancel(Purpose.REDUCE)
    may_end.set()
    assert not store._holds.held(0.0)


async def test_nor_one_for_which_the_disk_fails_then_and_that_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Transfers, "_check", Mock(side_effect=StateError("the disk failed")))
    store = BlobStore()
    transfers = Transfers(Nowhere(), store, LAYOUT, lambda _: None)
    await transfers.start(wanted(store, is_here=True))
    await asyncio.wait(transfers._running.values())
    await asyncio.sleep(0)
    assert not store._holds.held(0.0)
    assert "fetching for reduce failed" in caplog.text


async def test_a_line_that_is_cut_while_blobs_come_does_not_change_the_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor do a source that is not ready and a full disk."""
    now_s, mib = 1000.0, 2**20
    node, store = Nowhere(), BlobStore()
    node.traffic = Traffic(arriving=Arriving(lambda: now_s))
    transfers = Transfers(node, store, LAYOUT, lambda _: None, lambda: now_s)
    pauses = [0.0, 0.0, 0.0, 1200.0]

    async def bring(*_: object, **__: object) -> None:
        nonlocal now_s
        pause_s = pauses.pop(0)
        for number in range(60):
            now_s += 1.0 + (pause_s if number == 30 else 0.0)
            node.traffic.arriving.add(mib)
        now_s += pause_s

    monkeypatch.setattr(Transfers, "_bring", bring)
    while pauses:
        now_s += 500.0  # a round's local steps
        await transfers.start(wanted(store, is_here=False))
        await asyncio.wait(transfers._running.values())
        assert transfers.rate_bytes_per_s == pytest.approx(mib, rel=0.1)
    rates = [each.value for each in transfers.pace._rates.newest]
    assert rates == pytest.approx([mib, mib, mib, mib], rel=0.06), "an outage counts three seconds"
