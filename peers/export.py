"""swarm-export: writes the newest agreed model as files that Transformers loads."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import click

from peers.option_values import require_folder
from peers.options import Options, option, options, program
from swarm.model.huggingface import save_model
from swarm.network.blobs import BlobStore
from swarm.network.observer import Observer
from swarm.peer.agreed_model import AgreedModel, open_state
from swarm.peer.run_tokenizer import tokenizer_of
from swarm.protocol.layout import layout_of

logger = logging.getLogger(__name__)

START_S = 30.0
ASK_S = 30.0
FETCH_S = 24 * 3600.0


@program("swarm-export")
@options("initial_peers", "tip", "state_dir", "log_format")
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
        manifest, layout_of(run), sources=sources, on_blob=_progress, deadline_s=FETCH_S
    )
    return AgreedModel(run, manifest, store)


def _progress(here: int, total: int) -> None:
    if here == total:
        logger.info("fetched %.1f MB", total / 1e6)


def _from_disk(path: Path, run_id: str | None, out: Path) -> None:
    """Exports what a peer that is not running has on its disk; raises like `open_state`."""
    state, model = open_state(path, run_id)
    try:
        export(model, out)
    finally:
        state.close()


if __name__ == "__main__":
    main()
