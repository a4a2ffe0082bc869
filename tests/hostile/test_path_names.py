"""The name of a run in a stranger's record makes a joiner write outside its state directory.

A peer that waits for a gathering run takes the first record that announces it as running, and makes
the folder of that run. A run id contains the name, so a false name gives a matching false id.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.config import RunConfig, parse_config
from swarm.errors import BadManifest, BadRecord, ConfigError, StateError
from swarm.network.runs.run_search import announced_runs, check_run_id
from swarm.peer.machine.state_directory import StateDirectory
from swarm.protocol.messages.message_bytes import foreign_manifest
from swarm.protocol.records.records import (
    RunRecord,
    RunState,
    decode_record,
    encode_record,
    runs_key,
)
from swarm.protocol.values.manifest import run_id
from tests.protocol.round_pump import found, make_rules
from tests.scenarios.swarms import EXACT

WAIT_S = 60.0
DIGEST = "0" * 64
PATHS = ["../../../pwn/x", "..", ".", "/etc/x", "a/b", "a\\b", ".hidden", "", "a\n", "a\0", "é" * 4]


def record_named(name: str) -> RunRecord:
    """A record whose id is the right one for its false name."""
    return RunRecord(
        run=run_id(name, DIGEST, DIGEST), name=name, fingerprint=DIGEST, founder="QmA",
        founding=DIGEST, founding_bytes=10, config=DIGEST, config_bytes=10,
        state=RunState.RUNNING, wait_for_peers=1,
    )  # fmt: skip


def test_the_id_of_a_false_name_is_in_order_by_itself() -> None:
    check_run_id(record_named("../../../pwn/x"))


@pytest.mark.parametrize("name", PATHS)
def test_a_record_whose_name_could_be_a_path_is_refused(name: str) -> None:
    with pytest.raises(BadRecord):
        decode_record(RunRecord, encode_record(record_named(name)))
    false_id = replace(record_named("demo"), run=f"{name}-0123456789abcdef")
    with pytest.raises(BadRecord):
        decode_record(RunRecord, encode_record(false_id))


@pytest.mark.parametrize("name", PATHS)
def test_no_folder_is_made_of_what_is_no_run_id(tmp_path: Path, name: str) -> None:
    state = StateDirectory(tmp_path / "state")
    for text in (name, f"{name}-0123456789abcdef", f"x-0123456789abcdef/{name}"):
        with pytest.raises(StateError, match="is no run id"):
            state.run(text)
    state.close()
    assert state.run("demo-0123456789abcdef").path == state.path / "runs/demo-0123456789abcdef"


@pytest.mark.parametrize("name", PATHS)
def test_no_manifest_and_no_configuration_has_such_a_name(name: str) -> None:
    manifest = replace(found(make_rules(), ["QmA"]), run=f"{name}-0123456789abcdef")
    with pytest.raises(BadManifest):
        foreign_manifest(manifest.encoded)
    with pytest.raises(ConfigError, match=r"run\.name"):
        override = f"run.name={json.dumps(name)}"
        parse_config(RunConfig, EXACT, source="file", overrides=[override])


def test_a_real_node_that_reads_the_announcement_refuses_and_counts_it(peers) -> None:
    reader, liar = peers.node(), peers.node()
    honest = record_named("demo")
    reader.run(reader.store(runs_key(reader.peer_id), encode_record(honest), 60), WAIT_S)
    liar.run(
        liar.store(runs_key(liar.peer_id), encode_record(record_named("../../../pwn/x")), 60),
        WAIT_S,
    )
    found_runs = reader.run(announced_runs(reader), WAIT_S)
    assert [announced.record for announced in found_runs] == [honest]
    assert reader.traffic.refused == {"record_schema": 1}
