"""swarm-export: writes the newest agreed model as files that Transformers loads."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

from peers.option_values import require_folder
from peers.options import Options, option, options, program
from swarm.codecs import read_parts
from swarm.config import RunConfig
from swarm.data.tokenise import END_OF_TEXT, save_tokenizer
from swarm.errors import BadBlob, CorruptState, StateError, StateLocked
from swarm.model.huggingface import save_model
from swarm.network.blobs import BlobStore
from swarm.network.observer import Observer
from swarm.network.record_file import RecordFile
from swarm.peer.live_model import Agreed
from swarm.peer.state_directory import StateDirectory
from swarm.progress import Reporter, fetching
from swarm.protocol.layout import Layout, layout_of
from swarm.protocol.manifest import Manifest

logger = logging.getLogger(__name__)

START_S = 30.0
ASK_S = 30.0
FETCH_S = 24 * 3600.0


@dataclass(frozen=True)
class Found:
    """A model to export: its run, its manifest, and where its blobs are."""

    run: RunConfig
    manifest: Manifest
    store: BlobStore


@program("swarm-export")
@options("initial_peers", "tip", "state_dir", "log_format", "log_level")
@option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write into.")
@option("--run-id", help="Which run, where there are several.")
def main(given: Options, out: Path, run_id: str | None) -> None:
    """Writes the newest agreed model: safetensors, config.json and tokenizer files.

    With --initial-peers it is fetched from the run's peers, else taken from --state-dir, whose
    peer must not be running.
    """
    require_folder(out)
    if not given.initial_peers:
        _from_disk(given.state_dir, run_id, out)
        return
    out.mkdir(parents=True, exist_ok=True)
    # Beside the export, since that is where there is room for a model.
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=out) as folder:
        store = BlobStore(Path(folder))
        observer = Observer.start(given.initial_peers, store, START_S, vouched=given.tip)
        try:
            export(_from_peers(observer, store, run_id), out)
        finally:
            observer.stop()


def export(found: Found, out: Path) -> None:
    """Writes the model and says how to evaluate it."""
    run, manifest = found.run, found.manifest
    named = named_tensors(layout_of(run), manifest, found.store)
    save_model(out, run, named, eos_token_id=END_OF_TEXT)
    save_tokenizer(out, model_max_length=run.data.sequence_length)
    click.echo(f"exported round {manifest.round} (manifest {manifest.digest[:12]}) to {out}")
    click.echo(f"lm_eval --model hf --model_args pretrained={out} --tasks arc_easy,piqa,hellaswag")


def named_tensors(
    layout: Layout, manifest: Manifest, store: BlobStore
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model in its agreed dtype, each as soon as its last part is read.

    Memory: one tensor, which may be cut between two parts, and a chunk.

    Raises:
        CorruptState: a blob is missing.
        BadBlob: a blob has not the size of its unit.
    """
    agreed, pending, left = Agreed(store, layout), dict[str, Tensor](), dict[str, int]()
    writing = Reporter("writing the model", "part")
    for unit in writing.each(layout.units, len(layout.units)):
        digest = manifest.entries[unit.unit].digest
        size = store.size(digest)
        if size is None:
            raise CorruptState(f"the value of {unit.unit} in round {manifest.round} is missing")
        if size != unit.num_bytes:
            raise BadBlob("size", f"{unit.unit}: {size} bytes, its layout has {unit.num_bytes}")
        for part, values in read_parts(unit, agreed.read(digest)):
            if part.name not in pending:
                pending[part.name] = torch.empty(layout.shapes[part.name], dtype=values.dtype)
                left[part.name] = pending[part.name].numel()
            pending[part.name].view(-1)[part.start : part.stop] = values
            left[part.name] -= len(values)
            if left[part.name] == 0:
                yield part.name, pending.pop(part.name)


def _from_peers(observer: Observer, store: BlobStore, run_id: str | None) -> Found:
    announced = observer.find(run_id, ASK_S)
    run = observer.config(announced, ASK_S)
    seen = observer.look(announced.record.run, ASK_S)
    manifest = observer.tip(announced, seen.peers, ASK_S)
    sources = sorted({*announced.publishers, *seen.peers})
    observer.fetch_model(
        manifest, layout_of(run), sources=sources, on_blob=fetching(), deadline_s=FETCH_S
    )
    return Found(run, manifest, store)


def _from_disk(path: Path, run_id: str | None, out: Path) -> None:
    """Exports what a peer that is not running has on its disk.

    Raises:
        StateError: there is no run in the directory, or its peer runs.
    """
    if not path.expanduser().is_dir():
        raise StateError(f"{path}: no such state directory", hint="give --initial-peers")
    try:
        state = StateDirectory(path)
    except StateLocked as error:
        raise StateLocked(
            f"{path}: its peer is running", hint="export with --initial-peers ADDRESS"
        ) from error
    try:
        run_id = run_id or state.current_run
        if run_id is None:
            raise StateError(f"{path}: there is no run in it", hint="give --initial-peers")
        directory = state.run(run_id)
        record = RecordFile(directory.record_path).read()
        if record is None:
            raise StateError(f"{path}: no state of {run_id}")
        store = BlobStore(directory.path)
        export(Found(directory.read_config(), record.tip, store), out)
    finally:
        state.close()


if __name__ == "__main__":
    main()
