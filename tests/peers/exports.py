"""The demo's run with a small, untrained model, and its state directory."""

from pathlib import Path

import numpy as np
from click.testing import CliRunner

from peers.export import main
from swarm.config import RunConfig, parse_config
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.rounds.record_file import RecordFile
from swarm.peer.machine.state_directory import StateDirectory
from swarm.protocol.messages.events import Record
from swarm.protocol.values.manifest import Manifest
from tests.export.models import found

DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.toml"
SMALL = ["model.hidden_size=32", "model.moe_intermediate_size=16", "wire.part_bytes=4096"]
HELD_OUT = np.array([*b"held out", 256], dtype="<u4").tobytes()


def small_demo() -> RunConfig:
    """The run."""
    return parse_config(RunConfig, DEMO.read_text(), source="demo", overrides=SMALL)


def on_disk(path: Path, run: RunConfig) -> Manifest:
    """Makes the state directory of a peer that has manifest 0."""
    state = StateDirectory(path)
    directory = state.run("demo-0123456789abcdef")
    directory.write_config(run)
    store = BlobStore(directory.path)
    manifest = found(store, run, HELD_OUT)
    store.sync(store.digests())
    RecordFile(directory.record_path).write(Record(manifest, None, None))
    state.current_run = "demo-0123456789abcdef"
    state.close()
    return manifest


def invoke(*args: object) -> tuple[int, str]:
    """Exit code and output of swarm-export."""
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    return result.exit_code, result.output
