"""Whatever a stranger announces or serves, the reader gets a typed error or a sound value."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import RunConfig, parse_config
from swarm.errors import BadBlob, BadManifest, BadRecord, RunMismatch
from swarm.network.foreign import (
    MAX_TOKENIZER_BYTES,
    check_announcement,
    check_state,
    decode_config,
)
from swarm.protocol.layout import layout_of
from swarm.protocol.manifest import Entry, Founding, Kind, Manifest, Member
from swarm.protocol.records import RunRecord, RunState
from swarm.protocol.texts import TokenizerFile
from tests.scenarios.swarms import EXACT

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
