"""For every announcement or blob of a stranger, the reader gets a typed error or a sound value."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import replace

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer, get_dht_time
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import RunConfig, parse_config
from swarm.errors import BadBlob, BadManifest, BadRecord, RunMismatch
from swarm.network.dht import dht
from swarm.network.dht.signed_records import MAX_SIGNED_BYTES, MAX_TTL_S, SignedRecords
from swarm.network.runs.run_records import (
    MAX_TOKENIZER_BYTES,
    check_announcement,
    check_state,
    decode_config,
    fetch_dated,
    fetch_records,
    publish,
)
from swarm.network.wire.identity import load_or_create_identity
from swarm.protocol.records.records import (
    EVENT_TTL_S,
    MAX_ADDRESSES,
    MergeRecord,
    RunRecord,
    RunState,
    ValidationRecord,
)
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Entry, Founding, Kind, Manifest, Member
from swarm.protocol.values.texts import TokenizerFile
from tests.network.conftest import records_of
from tests.peer_records import peer_record
from tests.scenarios.swarms import EXACT

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
    # A shorter lifetime does not bring the older record back, because expirations only grow.
    assert first.run(first.store(key, b"{}", ttl_s=1), WAIT_S)
    assert records_of(second, key)[first.peer_id].value == b"{}"


def test_a_record_that_no_reader_takes_is_an_error_of_its_writer(pair, key):
    first, _ = pair
    record = peer_record(first.peer_id, addresses=("/ip4/10.0.0.7/tcp/1",) * (MAX_ADDRESSES + 1))
    with pytest.raises(BadRecord, match=r"PeerRecord.*addresses"):
        first.run(publish(first, key, record), WAIT_S)


def test_who_stores_is_not_sent_what_others_have_stored_there(pair, key, monkeypatch):
    """In a run of 256, these would be 16 records from each of five storing peers per heartbeat."""
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
    second.run(publish(second, key, MergeRecord("0", 0, 0, 0, 0.0, {})), WAIT_S)
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


DIGEST = "0" * 64
RUN = parse_config(RunConfig, EXACT, source="test")
RECORD = RunRecord(
    run="exact-1", name="exact", fingerprint=RUN.fingerprint(), founder="QmA", founding=DIGEST,
    founding_bytes=10, config=DIGEST, config_bytes=10, state=RunState.RUNNING, wait_for_peers=1,
)  # fmt: skip


def changed(**fields: object) -> bytes:
    """The configuration with fields of its model section replaced."""
    values = RUN.model_dump(mode="json")
    values["model"] |= fields
    return json.dumps(values).encode()


def test_the_announced_configuration_is_read() -> None:
    assert decode_config(RUN.canonical_json(), RECORD) == RUN


@given(st.binary(max_size=100) | st.text().map(str.encode))
def test_any_bytes_are_a_bad_blob(noise: bytes) -> None:
    with pytest.raises(BadBlob, match="the configuration of exact-1"):
        decode_config(noise, RECORD)


@pytest.mark.parametrize(
    "foreign",
    [
        changed(hidden_size="large"),
        changed(hidden_size=-1),
        changed(surprise=1),
        b"[" * 10_000,
        b'{"run": ' + b"9" * 10_000 + b"}",
    ],
)
def test_what_is_no_configuration_is_a_bad_blob(foreign: bytes) -> None:
    with pytest.raises(BadBlob) as raised:
        decode_config(foreign, RECORD)
    assert raised.value.reason == "config_schema"
    assert len(str(raised.value)) < 500


def test_another_configuration_is_not_the_announced_one() -> None:
    with pytest.raises(RunMismatch):
        decode_config(changed(num_hidden_layers=3), RECORD)


@pytest.mark.parametrize("field", ["config_bytes", "founding_bytes"])
def test_an_announced_size_beyond_the_limit_is_refused(field: str) -> None:
    check_announcement(RECORD)
    with pytest.raises(BadRecord, match="limit"):
        check_announcement(dataclasses.replace(RECORD, **{field: 2**62}))


def manifest(**changes: object) -> Manifest:
    entries = {
        unit.unit: Entry(DIGEST, unit.num_bytes, 0, "QmA", unit.codec)
        for unit in layout_of(RUN).units
    }
    whole = Manifest(
        run="", generation="0", height=0, round=0, kind=Kind.FOUNDING, parent=None,
        founding=Founding("QmA", "n", DIGEST, 10, DIGEST, 400), step=0, tokens=0, merged=0,
        members={"QmA": Member(0, 1.0)}, contributors=("QmA",), sources={}, owners={},
        entries=entries,
    )  # fmt: skip
    return dataclasses.replace(whole, **changes)


def test_a_state_with_other_units_or_sizes_than_the_run_s_is_refused() -> None:
    layout, sound = layout_of(RUN), manifest()
    check_state(sound, layout)
    entry = sound.entries["expert.0"]
    larger = {**sound.entries, "expert.0": dataclasses.replace(entry, num_bytes=2**50)}
    without = {unit: entry for unit, entry in sound.entries.items() if unit != "expert.0"}
    for entries in (larger, without, {**sound.entries, "expert.99": entry}):
        with pytest.raises(BadManifest, match="units are not those of the run"):
            check_state(manifest(entries=entries), layout)
    for held_out_bytes in (2**50, 401):
        founding = dataclasses.replace(sound.founding, validation_bytes=held_out_bytes)
        with pytest.raises(BadManifest, match="impossible size"):
            check_state(manifest(founding=founding), layout)
    for size, is_sound in ((MAX_TOKENIZER_BYTES, True), (MAX_TOKENIZER_BYTES + 1, False)):
        tokenizer = TokenizerFile(DIGEST, size, 0, 1)
        large = manifest(founding=dataclasses.replace(sound.founding, tokenizer=tokenizer))
        if is_sound:
            check_state(large, layout)
            continue
        with pytest.raises(BadManifest, match=r"tokenizer has 67108865 bytes \(limit"):
            check_state(large, layout)
