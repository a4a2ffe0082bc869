"""How the newest agreed model is found, fetched and written."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from peers.options import Options
from swarm.model.huggingface import save_model
from swarm.network.blobs import BlobStore
from swarm.network.observer import Observer
from swarm.peer.agreed_model import AgreedModel, open_state
from swarm.peer.run_tokenizer import tokenizer_of
from swarm.progress import fetching
from swarm.protocol.layout import layout_of

START_S = 30.0
ASK_S = 30.0
FETCH_S = 24 * 3600.0


def export_newest(given: Options, out: Path, run_id: str | None) -> None:
    """Fetches the newest model from the run's peers, or takes it from disk, and writes it.

    Raises:
        NobodyReachable: no peer of the run answers.
        StateError: there is no run in the state directory, or its peer runs.
    """
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


def export(found: AgreedModel, out: Path) -> None:
    """Writes the model and says how to evaluate it."""
    run, manifest = found.run, found.manifest
    tokenizer = tokenizer_of(manifest, found.store)
    save_model(out, run, found.tensors(), eos_token_id=tokenizer.end_of_text)
    tokenizer.save(out, model_max_length=run.data.sequence_length)
    click.echo(f"exported round {manifest.round} (manifest {manifest.digest[:12]}) to {out}")
    click.echo(f"lm_eval --model hf --model_args pretrained={out} --tasks arc_easy,piqa,hellaswag")


def _from_peers(observer: Observer, store: BlobStore, run_id: str | None) -> AgreedModel:
    announced = observer.find(run_id, ASK_S)
    run = observer.config(announced, ASK_S)
    seen = observer.look(announced.record.run, ASK_S)
    manifest = observer.tip(announced, seen.peers, ASK_S)
    sources = sorted({*announced.publishers, *seen.peers})
    observer.fetch_model(
        manifest, layout_of(run), sources=sources, on_blob=fetching(), deadline_s=FETCH_S
    )
    return AgreedModel(run, manifest, store)


def _from_disk(path: Path, run_id: str | None, out: Path) -> None:
    """Exports what a peer that is not running has on its disk; raises like `open_state`."""
    state, model = open_state(path, run_id)
    try:
        export(model, out)
    finally:
        state.close()
