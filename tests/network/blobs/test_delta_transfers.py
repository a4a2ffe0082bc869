"""A fetched delta is checked before it is kept: each refusal by name, with real nodes."""

import asyncio
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.codings import coded_bytes
from swarm.config import Coding
from swarm.experts import UnitLayout
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.rounds.transfers import Transfers
from swarm.protocol.messages.events import BlobWanted, Event, Fetch, Purpose, Stored, Unobtainable
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.updates import UpdateBound
from tests.deltas.units import CODINGS, base_of, encoded, gaussian, unit
from tests.network.conftest import Peers

SIZE = 700
UNITS = {coding: unit(coding, "bf16", SIZE) for coding in CODINGS}
LAYOUT = Layout(
    tuple(
        UnitLayout(f"expert.{index}", each.codec, each.slices, SIZE, each.num_bytes, each.coding)
        for index, each in enumerate(UNITS.values())
    ),
    {},
)
NAMES = dict(zip(UNITS, (each.unit for each in LAYOUT.units), strict=True))
BASE = base_of(UNITS["b2"], gaussian(SIZE))


def scaled(coding: Coding, bits: int) -> bytes:
    """A delta whose first scale has these bits."""
    return struct.pack("<H", bits) + good(coding)[2:]


def good(coding: Coding, scale: float = 1e-3) -> bytes:
    return encoded(UNITS[coding], gaussian(SIZE, seed=3, scale=scale))


ATTACKS: list[tuple[Coding, bytes, str]] = [
    *((coding, good(coding, 1e6), "implausible_update") for coding in CODINGS),
    *((coding, scaled(coding, 0x8000), "scale") for coding in CODINGS if coding != "bf16"),
    ("b2", scaled("b2", 0x7F80), "scale"),  # infinity
    ("b2", scaled("b2", 0x7FC0), "scale"),  # not a number
    ("b2", scaled("b2", 0x0001), "scale"),  # subnormal
    ("b1", scaled("b1", (127 + 41) << 7), "scale"),
    ("bf16", struct.pack("<H", 0x8000) + good("bf16")[2:], "not_canonical"),
    ("bf16", struct.pack("<H", 0x7FC0) + good("bf16")[2:], "not_canonical"),
    ("bf16", struct.pack("<H", 1) + good("bf16")[2:], "not_canonical"),
]


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    started = Peers(tmp_path)
    yield started
    started.stop()


def test_what_no_honest_peer_would_send_is_refused_and_the_rest_is_kept(peers: Peers) -> None:
    far, near = BlobStore(), BlobStore()
    server, node = peers.serving(far), peers.node()
    base = near.put(BASE)
    bound = UpdateBound(base, 0.05, 0.0)
    sound = {far.put(good(coding)): coding for coding in CODINGS}
    bad = {far.put(blob): (coding, reason) for coding, blob, reason in ATTACKS}
    of = {**sound, **{digest: coding for digest, (coding, _) in bad.items()}}
    wants = tuple(
        BlobWanted(
            NAMES[coding], digest, coded_bytes(UNITS[coding]), (server.peer_id,), bound, True
        )
        for digest, coding in of.items()
    )
    events: list[Event] = []
    transfers = Transfers(node, near, LAYOUT, events.append)

    async def fetch() -> None:
        await transfers.start(Fetch(Purpose.REDUCE, wants))
        while len({event.digest for event in events}) < len(of):  # type: ignore[union-attr]
            await asyncio.sleep(0.02)
        await transfers.stop()

    asyncio.run_coroutine_threadsafe(fetch(), node.loop).result(60.0)
    assert {event.digest for event in events if isinstance(event, Stored)} == set(sound)
    refused = {e.digest: e.reason for e in events if isinstance(e, Unobtainable)}
    assert refused == {digest: reason for digest, (_, reason) in bad.items()}
    assert not any(near.has(digest) for digest in bad)
