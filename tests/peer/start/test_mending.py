"""Repairs of a lone peer in its own state directory, and the round that it falls back to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from swarm.config import RunConfig, parse_config
from swarm.errors import CorruptState
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.rounds.record_file import RecordFile
from swarm.peer.machine.state_directory import RunDirectory
from swarm.peer.start.entry import drop_damaged, earlier_record, is_alone, settings_of
from swarm.protocol.messages.events import Record
from swarm.protocol.messages.messages import Ballot, Certificate, Link
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.manifest import Manifest, decode_manifest, run_id
from tests.protocol.round_pump import found, make_rules

DEMO = Path(__file__).parents[3] / "configs" / "runs" / "demo.toml"
RUN = parse_config(RunConfig, DEMO.read_text(), source="demo")
HELD_OUT = bytes(8)


def first_manifest() -> Manifest:
    """Manifest 0 of the demo, with one peer."""
    config = RUN.canonical_json()
    bare = found(make_rules(), ["A"])
    founding = replace(
        bare.founding,
        config=digest_of(config),
        config_bytes=len(config),
        validation=digest_of(HELD_OUT),
        validation_bytes=len(HELD_OUT),
    )
    return decode_manifest(replace(bare, founding=founding).encoded)


FIRST = first_manifest()
NAME = run_id(RUN.run.name, RUN.fingerprint(), FIRST.blob)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / NAME)
    made.write_config(RUN)
    made.write_founding(FIRST)
    return made


@pytest.fixture
def store(directory: RunDirectory) -> BlobStore:
    store = BlobStore(directory.path)
    store.sync([store.put(RUN.canonical_json()), store.put(FIRST.encoded)])
    return store


@pytest.mark.parametrize("name", ["config.json", "founding"])
@pytest.mark.parametrize("content", [b"x", b"", None])
def test_a_damaged_file_that_the_run_id_binds_is_written_anew(
    directory: RunDirectory, store: BlobStore, name: str, content: bytes | None
) -> None:
    path = directory.path / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert settings_of(NAME, directory, Record(FIRST, None, None), store) == (RUN, FIRST)
    assert (directory.read_config(), directory.read_founding()) == (RUN, FIRST)


@pytest.mark.parametrize("name", ["config.json", "founding"])
def test_what_is_not_in_the_store_either_is_an_error_with_a_way_out(
    directory: RunDirectory, name: str
) -> None:
    (directory.path / name).write_bytes(b"x")
    with pytest.raises(CorruptState, match=f"{name}.* not in the store either .*--run FILE"):
        settings_of(NAME, directory, Record(FIRST, None, None), BlobStore(directory.path))


def test_a_configuration_of_another_version_is_a_clear_error(directory: RunDirectory) -> None:
    old = RUN.canonical_json().replace(b'"rounds"', b'"turns"')
    store = BlobStore(directory.path)
    store.sync([store.put(old)])
    directory.config_path.write_bytes(old)
    founding = replace(FIRST.founding, config=digest_of(old), config_bytes=len(old))
    with pytest.raises(CorruptState, match=r"unknown key run\.turns.*version of swarm"):
        settings_of(NAME, directory, Record(replace(FIRST, founding=founding), None, None), store)


def test_a_peer_is_alone_when_nobody_else_is_a_member() -> None:
    assert is_alone("A", Record(FIRST, None, None))
    assert not is_alone("A", Record(found(make_rules(), ["A", "B"]), None, None))


# ---------------------------------------------------------------- damaged values


def value_of(height: int) -> bytes:
    return str(height).encode()


def after(parent: Manifest) -> Manifest:
    """The next manifest, in which all units have one new value."""
    height = parent.height + 1
    digest = digest_of(value_of(height))
    entries = {unit: replace(entry, digest=digest) for unit, entry in parent.entries.items()}
    return replace(parent, height=height, round=height, parent=parent.digest, entries=entries)


SECOND = after(FIRST)
THIRD = after(SECOND)
CERTIFICATE = Certificate(Ballot(0, "A"), {})
NEWEST = Record(THIRD, CERTIFICATE, SECOND)


def with_values(folder: Path, *manifests: Manifest) -> BlobStore:
    store = BlobStore(folder)
    blobs = [RUN.canonical_json(), HELD_OUT]
    blobs += [manifest.encoded for manifest in (FIRST, SECOND, THIRD)]
    blobs += [value_of(manifest.height) for manifest in manifests]
    store.sync([store.put(blob) for blob in blobs])
    return store


def test_damaged_values_that_no_tip_has_yet_are_dropped_too(tmp_path: Path) -> None:
    """Offers of a round in progress, which the next manifest may name."""
    offered, kept = b"offered" * 100, b"kept" * 100
    store = with_values(tmp_path, SECOND, THIRD)
    store.sync([store.put(each) for each in (offered, kept)])
    for pack in (tmp_path / "packs").glob("*.pack"):
        content = pack.read_bytes()
        pack.write_bytes(content.replace(offered, b"0ffered" * 100))
    again = BlobStore(tmp_path)
    assert again.has(digest_of(offered)) and drop_damaged(again, THIRD) == []
    assert not again.has(digest_of(offered)) and again.has(digest_of(kept))


def test_the_round_before_is_taken_though_both_record_files_are_damaged(tmp_path: Path) -> None:
    """A promise or vote for the next round makes a new record with the same tip."""
    file = RecordFile(tmp_path / "record")
    file.write(NEWEST, [Link(FIRST.head), Link(SECOND.head, CERTIFICATE)])
    file.write(replace(NEWEST, promised=Ballot(1, "A")))
    earlier = earlier_record(NEWEST, file, with_values(tmp_path, SECOND))
    assert earlier
    assert (earlier.tip, earlier.certificate) == (SECOND, CERTIFICATE)
    assert earlier.abstain_until_height > THIRD.height, "it may have voted on the lost values"


def test_the_record_before_is_taken_where_it_has_an_earlier_tip(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "record")
    file.write(Record(SECOND, CERTIFICATE, FIRST))
    file.write(NEWEST)
    earlier = earlier_record(NEWEST, file, with_values(tmp_path, SECOND))
    assert earlier and earlier.tip == SECOND


def test_there_is_no_going_back_to_values_that_are_damaged_too(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "record")
    file.write(Record(SECOND, CERTIFICATE, FIRST))
    file.write(NEWEST)
    assert earlier_record(NEWEST, file, with_values(tmp_path, THIRD)) is None
