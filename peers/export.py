"""swarm-export: writes the newest agreed model as files that Transformers loads."""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from torch import Tensor

from peers.options import Options, option, options, program
from peers.state_directory import StateDirectory
from swarm.codecs import allocate, fill
from swarm.config import RunConfig
from swarm.data.tokenise import END_OF_TEXT, save_tokenizer
from swarm.errors import CorruptState, StateError, StateLocked
from swarm.experts import Slice
from swarm.model.huggingface import save_model
from swarm.network.blobs import BlobStore
from swarm.network.observer import Observer
from swarm.network.record_file import RecordFile
from swarm.protocol.layout import Layout, layout_of
from swarm.protocol.manifest import Digest, Manifest

logger = logging.getLogger(__name__)

START_S = 30.0
ASK_S = 30.0
FETCH_S = 24 * 3600.0

Read = Callable[[Digest], memoryview | None]


@dataclass(frozen=True)
class Found:
    """A model to export: its run, its manifest, and what reads its blobs."""

    run: RunConfig
    manifest: Manifest
    read: Read


@program("swarm-export")
@options("initial_peers", "state_dir", "log_format")
@option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write into.")
@option("--run-id", help="Which run, where there are several.")
def main(given: Options, out: Path, run_id: str | None) -> None:
    """Writes the newest agreed model: safetensors, config.json and tokenizer files.

    With --initial-peers it is fetched from the run's peers, else taken from --state-dir, whose
    peer must not be running.
    """
    if not given.initial_peers:
        _from_disk(given.state_dir, run_id, out)
        return
    out.mkdir(parents=True, exist_ok=True)
    # Beside the export, since that is where there is room for a model.
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=out) as folder:
        store = BlobStore(Path(folder))
        observer = Observer.start(given.initial_peers, store, START_S)
        try:
            export(_from_peers(observer, store, run_id), out)
        finally:
            observer.stop()


def export(found: Found, out: Path) -> None:
    """Writes the model and says how to evaluate it."""
    run, manifest = found.run, found.manifest
    named = named_tensors(layout_of(run), manifest, found.read)
    save_model(out, run, named, eos_token_id=END_OF_TEXT)
    save_tokenizer(out, model_max_length=run.data.sequence_length)
    click.echo(f"exported round {manifest.round} (manifest {manifest.digest[:12]}) to {out}")
    click.echo(f"lm_eval --model hf --model_args pretrained={out} --tasks arc_easy,piqa,hellaswag")


def named_tensors(layout: Layout, manifest: Manifest, read: Read) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model in its agreed dtype, each as soon as its last part is read.

    Memory: one expert, or the shared tensors that one part has begun and not finished.

    Raises:
        CorruptState: a blob is missing.
        BadBlob: a blob has not the size of its unit.
    """
    pending: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for unit in layout.units:
        blob = read(manifest.entries[unit.unit].digest)
        if blob is None:
            raise CorruptState(f"the value of {unit.unit} in round {manifest.round} is missing")
        names = {piece.name for piece in unit.slices}
        fresh = allocate([unit], layout.shapes)
        pending |= {name: fresh[name] for name in sorted(names - pending.keys())}
        fill(pending, unit, blob)
        for piece in unit.slices:
            left = missing.get(piece.name, _size(layout, piece)) - (piece.stop - piece.start)
            missing[piece.name] = left
            if left == 0:
                yield piece.name, pending.pop(piece.name)


def _size(layout: Layout, piece: Slice) -> int:
    return math.prod(layout.shapes[piece.name])


def _from_peers(observer: Observer, store: BlobStore, run_id: str | None) -> Found:
    announced = observer.find(run_id, ASK_S)
    run = observer.config(announced, ASK_S)
    seen = observer.look(announced.record.run, ASK_S)
    manifest = observer.tip(announced, seen.peers, ASK_S)
    sources = sorted({*announced.publishers, *seen.peers})
    observer.fetch_model(
        manifest, layout_of(run), sources=sources, on_blob=_progress, deadline_s=FETCH_S
    )
    return Found(run, manifest, store.get)


def _progress(here: int, total: int) -> None:
    if here == total:
        logger.info("fetched %.1f MB", total / 1e6)


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
        export(Found(directory.read_config(), record.tip, store.get), out)
    finally:
        state.close()


if __name__ == "__main__":
    main()
