from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, get_dht_time

from swarm.errors import BadRecord
from swarm.network import dht
from swarm.network.identity import load_or_create_identity
from swarm.network.records import fetch_dated, fetch_records, publish
from swarm.network.signed_records import MAX_SIGNED_BYTES, MAX_TTL_S, SignedRecords
from swarm.protocol.records import EVENT_TTL_S, MAX_ADDRESSES, MergeRecord, ValidationRecord
from tests.network.conftest import records_of
from tests.peer_records import peer_record

WAIT_S = 60.0


def validation(number: int) -> ValidationRecord:
    return ValidationRecord(
        round=number, manifest_digest="0" * 64, val_loss=2.5, tokens=64, text_bytes=64
    )


@pytest.fixture(scope="module")
def nodes(lasting_peers):
    return lasting_peers.node(), lasting_peers.node()


@pytest.fixture
def pair(nodes):
    for node in nodes:
        node.traffic.refused.clear()
    return nodes


@pytest.fixture
def key(request) -> str:
    return request.node.nodeid


def hostile_store(node, target, key: str, value: bytes, *, life_s=60.0, **changes) -> list[bool]:
    """Sends a record straight to `target`, past the sender's own checks."""
    inner = node._substrate.dht._node
    fields = {
        "subkey": inner.protocol.record_validator.subkey,
        "expiration": get_dht_time() + life_s,
        "sign": True,
        "in_cache": False,
    } | changes
    key_id = DHTID.generate(source=key)
    record = dht_record(key_id, fields["subkey"], value, fields["expiration"])
    signed = inner.protocol.record_validator.sign_value(record) if fields["sign"] else value
    call = inner.protocol.call_store(
        target._substrate.p2p.peer_id,
        keys=[key_id],
        values=[signed],
        expiration_time=[fields["expiration"]],
        subkeys=[fields["subkey"]],
        in_cache=fields["in_cache"],
    )
    return node.run(call, WAIT_S)


def dht_record(key_id, subkey, value, expiration):
    return DHTRecord(key_id.to_bytes(), MSGPackSerializer.dumps(subkey), value, expiration)


def packed(content: bytes) -> bytes:
    return MSGPackSerializer.dumps(content)


def test_both_see_both_and_the_newer_record_replaces_the_older(pair, key):
    first, second = pair
    for number, node in enumerate(pair):
        assert node.run(publish(node, key, validation(number)), WAIT_S)
    expected = {first.peer_id: validation(0), second.peer_id: validation(1)}
    for node in pair:
        assert node.run(fetch_records(node, ValidationRecord, [key]), WAIT_S) == expected
    # A shorter life does not bring the older record back: expirations only grow.
    assert first.run(first.store(key, b"{}", ttl_s=1), WAIT_S)
    records = records_of(second, key)
    assert records[first.peer_id].value == b"{}"


def test_a_record_that_no_reader_takes_is_an_error_of_its_writer(pair, key):
    first, _ = pair
    record = peer_record(first.peer_id, addresses=("/ip4/10.0.0.7/tcp/1",) * (MAX_ADDRESSES + 1))
    with pytest.raises(BadRecord, match=r"PeerRecord.*addresses"):
        first.run(publish(first, key, record), WAIT_S)


def test_who_stores_is_not_sent_what_others_have_stored_there(pair, key, monkeypatch):
    """In a run of 256 that would be 16 records from each of five holders, at every heartbeat."""
    first, second = pair
    assert second.run(second.store(key, b"of the holder", 60), WAIT_S)
    storage, asked = second._substrate.dht._node.protocol.storage, []
    held = storage.get
    monkeypatch.setattr(storage, "get", lambda place: (asked.append(place), held(place))[1])
    assert first.run(first.store(key, b"mine", 60), WAIT_S)
    assert asked and DHTID.generate(source=key) not in asked
    values = {peer: stored.value for peer, stored in records_of(second, key).items()}
    assert values == {first.peer_id: b"mine", second.peer_id: b"of the holder"}


def test_what_the_dht_moves_is_counted_on_both_sides(pair, key):
    first, second = pair

    def moved(act) -> list[int]:
        before = [node.traffic.dht_bytes for node in pair]
        act()
        return [node.traffic.dht_bytes - b for node, b in zip(pair, before, strict=True)]

    stored = moved(lambda: second.run(second.store(key, bytes(10_000), 60), WAIT_S))
    assert all(10_000 < num_bytes < 13_000 for num_bytes in stored), stored
    read = moved(lambda: records_of(first, key))
    assert all(10_000 < num_bytes < 13_000 for num_bytes in read), read


def test_records_are_gone_when_they_expire(pair, key):
    first, second = pair
    for ttl_s in (0.5, 2.0, 8.0, 32.0):  # a busy machine may look too late
        first.run(first.store(key, b"x", ttl_s=ttl_s), WAIT_S)
        if found := records_of(second, key):
            break
    expiration = found[first.peer_id].expiration
    time.sleep(max(0.0, expiration - get_dht_time()) + 0.05)
    assert records_of(second, key) == {}


def test_several_keys_are_read_at_once_and_the_longest_lived_record_counts(pair):
    first, second = pair
    keys = [f"run.peers.{shard}" for shard in range(16)]
    first.run(publish(first, keys[3], validation(1)), WAIT_S)
    first.run(publish(first, keys[7], validation(2)), WAIT_S)
    second.run(publish(second, keys[7], validation(3)), WAIT_S)
    found = second.run(fetch_records(second, ValidationRecord, keys), WAIT_S)
    assert found == {first.peer_id: validation(2), second.peer_id: validation(3)}
    dated = second.run(fetch_dated(second, ValidationRecord, keys), WAIT_S)
    assert {peer: record for peer, (_, record) in dated.items()} == found
    left_s = dated[first.peer_id][0] - get_dht_time()
    assert EVENT_TTL_S - WAIT_S < left_s <= EVENT_TTL_S, "whence follows when it was published"


def test_a_record_of_another_kind_or_not_of_its_schema_is_counted(pair, key):
    first, second = pair
    first.run(first.store(key, b"{", 60), WAIT_S)
    merge = MergeRecord("0", 0, 0, 0, 0.0, {})
    second.run(publish(second, key, merge), WAIT_S)
    assert first.run(fetch_records(first, ValidationRecord, [key]), WAIT_S) == {}
    assert first.traffic.refused == {"record_schema": 2}


def test_a_record_under_the_key_of_another_is_ignored(pair, key):
    victim, liar = pair
    victim.run(publish(victim, key, validation(1)), WAIT_S)
    subkey = victim._substrate.dht._validator.subkey
    assert hostile_store(liar, victim, key, packed(b"forged"), subkey=subkey) == [False]
    found = liar.run(fetch_records(liar, ValidationRecord, [key]), WAIT_S)
    assert found == {victim.peer_id: validation(1)}
    assert victim.traffic.refused == {"record_signature": 1}


@pytest.mark.parametrize("expiration", [float("-inf"), float("nan"), -1.0, float("inf")])
def test_an_expiration_that_is_no_time_is_refused_though_its_owner_signed_it(tmp_path, expiration):
    refused = []
    signer = SignedRecords(load_or_create_identity(tmp_path / "key"), refused.append)
    record = dht_record(DHTID.generate(source="key"), signer.subkey, packed(b"x"), expiration)
    assert not signer.validate(replace(record, value=signer.sign_value(record)))
    assert refused == ["record_expiration"]


@pytest.mark.parametrize(
    ("value", "changes", "reason"),
    [
        (packed(bytes(MAX_SIGNED_BYTES)), {}, "record_size"),
        (packed(b"x"), {"sign": False}, "record_signature"),
        (packed(b"x") + bytes(64), {"sign": False}, "record_signature"),
        (packed(b"x"), {"expiration": 1e12}, "record_expiration"),
        (packed(b"x"), {"expiration": float("inf")}, "record_expiration"),
        (packed(b"x"), {"life_s": MAX_TTL_S - 60}, "record_expiration"),
        (packed(b"x"), {"subkey": b"nobody"}, "record_owner"),
        (packed(b"x"), {"subkey": bytes(32)}, "record_owner"),
        (packed(b"x"), {"subkey": 7}, "record_owner"),
    ],
)
def test_what_is_too_large_too_long_or_unsigned_is_refused_and_counted(
    pair, key, value, changes, reason
):
    holder, liar = pair
    assert hostile_store(liar, holder, key, value, **changes) == [False]
    assert holder.traffic.refused == {reason: 1}
    assert records_of(holder, key) == {}


def test_nothing_is_kept_in_the_cache_that_would_hide_all_other_records(pair, key):
    holder, liar = pair
    holder.run(publish(holder, key, validation(1)), WAIT_S)
    assert hostile_store(liar, holder, key, packed(b"x"), in_cache=True) == [False]
    found = liar.run(fetch_records(liar, ValidationRecord, [key]), WAIT_S)
    assert found == {holder.peer_id: validation(1)}


def test_one_owner_has_one_record_per_key(pair, key):
    holder, liar = pair
    own = liar._substrate.dht._validator.subkey
    assert hostile_store(liar, holder, key, packed(b"x")) == [True]
    assert hostile_store(liar, holder, key, packed(b"x"), subkey=b"2" + own[1:] + b"2") == [False]
    assert hostile_store(liar, holder, key, packed(b"x"), subkey=own + own) == [False]
    assert holder.traffic.refused == {"record_owner": 2}


def test_the_number_of_records_read_is_bounded(pair, key, monkeypatch):
    first, second = pair
    first.run(publish(first, key, validation(0)), WAIT_S)
    monkeypatch.setattr(dht, "MAX_RECORDS_PER_KEY", 1)
    second.run(second.store(key, b"lives longer", 900), WAIT_S)
    assert set(records_of(first, key)) == {first.peer_id}, "known before long-lived"
    assert first.traffic.refused == {"record_count": 1}


def test_a_record_that_could_not_be_read_is_never_published(pair, key):
    node, _ = pair
    with pytest.raises(AssertionError, match="20001 bytes"):
        node.run(node.store(key, bytes(20_001), 60), WAIT_S)
