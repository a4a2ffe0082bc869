"""The cost of one store call: records are counted before any is checked."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from swarm.network.dht import local_storage
from swarm.network.dht.dht import charging
from swarm.network.dht.local_storage import (
    LEAST_BYTES,
    MAX_HELD_RECORDS,
    STRANGERS_RECORDS,
    LocalStorage,
)
from swarm.network.wire.ledger import LIMITS, Cost, Ledger

KEY = DHTID.generate(source="a key").to_bytes()
MEMBER, STRANGER = (PeerID(b"\x12\x20" + bytes([number]) * 32) for number in range(2))
STORE = getattr(DHTProtocol.rpc_store, "__wrapped__", DHTProtocol.rpc_store)


class Looking(RecordValidatorBase):
    """Counts the records whose signature is checked. All signatures are wrong."""

    looked = 0

    def validate(self, _: DHTRecord) -> bool:
        self.looked += 1
        return False

    def sign_value(self, record: DHTRecord) -> bytes:
        return record.value

    def strip_value(self, record: DHTRecord) -> bytes:
        return record.value


class Called:
    """A node that receives store calls."""

    def __init__(self) -> None:
        self.ledger, self.refused = Ledger(), Counter[str]()
        self.ledger.admit([MEMBER.to_base58()])
        self.protocol = DHTProtocol(_initialized_with_create=True)
        self.protocol.storage = LocalStorage(
            "me", self.ledger, lambda _: None, lambda reason: self.refused.update([reason]), {}
        )
        self.protocol.cache = DHTLocalStorage()
        self.protocol.node_info = dht_pb2.NodeInfo()
        self.protocol.record_validator = self.looking = Looking()

    def store(self, sender: PeerID, *values: tuple[bytes, bytes]) -> int:
        """Sends subkeys and values in one call. Returns the number of checked records."""
        before, number = self.looking.looked, len(values)
        request = dht_pb2.StoreRequest(
            keys=[KEY] * number,
            subkeys=[subkey for subkey, _ in values],
            values=[value for _, value in values],
            expiration_time=[get_dht_time() + 60] * number,
            in_cache=[False] * number,
        )
        context = P2PContext(handle_name="", local_id=MEMBER, remote_id=sender)
        answer = asyncio.run(charging(STORE)(self.protocol, request, context))
        assert list(answer.store_ok) == [False] * number
        return self.looking.looked - before


def small(number: int) -> tuple[bytes, bytes]:
    return MSGPackSerializer.dumps(number.to_bytes(32)), bytes(66)


def whole(num_records: int) -> tuple[bytes, bytes]:
    """A dictionary of a number of records."""
    dictionary = DictionaryDHTValue()
    for number in range(num_records):
        dictionary.store(number.to_bytes(32), bytes(66), get_dht_time() + 60)
    return b"", MSGPackSerializer.dumps(dictionary)


def test_a_stranger_s_call_of_many_small_records_is_not_looked_at() -> None:
    called = Called()
    assert called.store(STRANGER, *map(small, range(5_000))) == 0
    assert called.store(STRANGER, whole(5_000)) == 0
    assert called.store(STRANGER, *[whole(150)] * 2) == 0
    assert called.refused == {"records_of_call": 3}
    assert called.store(STRANGER, *map(small, range(STRANGERS_RECORDS))) == STRANGERS_RECORDS


def test_a_record_costs_2_kib_however_small_it_is_and_so_does_each_entry_of_a_dictionary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An account that refills during the test would allow more.
    monkeypatch.setattr(local_storage, "time", SimpleNamespace(monotonic=lambda: 0.0))
    most = int(LIMITS[Cost.RECORDS].stranger.most) // LEAST_BYTES
    alone, together = Called(), Called()
    assert sum(alone.store(STRANGER, small(number)) for number in range(2 * most)) <= most + 1
    assert alone.refused["records_of_stranger"] >= most - 1
    assert together.store(STRANGER, whole(most)) == 1, "the first wrong one ends it"
    assert together.store(STRANGER, small(0)) == 0
    assert together.refused == {"records_of_stranger": 1}


def test_a_member_gives_a_node_that_it_meets_all_that_it_holds() -> None:
    called = Called()
    shards = [whole(MAX_HELD_RECORDS // 4)] * 4
    assert called.store(MEMBER, *shards) == len(shards) and not called.refused
    assert called.store(MEMBER, *shards, whole(1)) == 0
    assert called.refused == {"records_of_call": 1}


@pytest.mark.parametrize("is_held", [False, True])
def test_a_node_that_enters_counts_too(is_held: bool) -> None:
    called = Called()
    if not is_held:
        called.protocol.storage = DHTLocalStorage()
    assert called.store(MEMBER, *map(small, range(MAX_HELD_RECORDS + 1))) == 0
    assert called.store(MEMBER, small(0)) == 1
