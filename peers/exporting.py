"""How the newest agreed model is found, fetched and written."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from peers.options import Options
from swarm.errors import ConfigError
from swarm.export.facts import ExportFacts, Form
from swarm.export.folder import Extra, write_export
from swarm.export.losses import kept_losses, told_losses
from swarm.model.huggingface import Dtype
from swarm.network.blobs import BlobStore
from swarm.network.observer import Observer
from swarm.peer.agreed_model import AgreedModel, open_state
from swarm.peer.machine import size_in_bytes
from swarm.progress import fetching
from swarm.protocol.layout import layout_of

START_S = 30.0
ASK_S = 30.0
FETCH_S = 24 * 3600.0


def form_of(dtype: Dtype, max_shard_size: str, license_name: str | None) -> Form:
    """How a person wants an export to be written.

    Raises:
        ConfigError: a shard's size is none, or 0.
    """
    size = int(size_in_bytes(max_shard_size))
    if size < 1:
        raise ConfigError("--max-shard-size 0 leaves no room", hint="write it as 5GB")
    return Form(dtype, size, license_name)


def export_newest(
    given: Options, out: Path, run_id: str | None, form: Form, extras: Sequence[Extra] = ()
) -> None:
    """Fetches the newest model from the run's peers, or takes it from disk, and writes it.

    Raises:
        NobodyReachable: no peer of the run answers.
        StateError: there is no run in the state directory, or its peer runs.
    """
    if not given.initial_peers:
        _from_disk(given.state_dir, run_id, out, form, extras)
        return
    out.mkdir(parents=True, exist_ok=True)
    # Beside the export, since that is where there is room for a model.
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=out) as folder:
        store = BlobStore(Path(folder))
        observer = Observer.start(given.initial_peers, store, START_S, vouched=given.tip)
        try:
            export(_from_peers(observer, store, run_id, form), out, extras)
        finally:
            observer.stop()


def export(facts: ExportFacts, out: Path, extras: Sequence[Extra] = ()) -> None:
    """Writes the model and says how to evaluate it."""
    manifest = facts.model.manifest
    write_export(out, facts, extras)
    click.echo(f"exported round {manifest.round} (manifest {manifest.digest[:12]}) to {out}")
    click.echo(f"lm_eval --model hf --model_args pretrained={out} --tasks arc_easy,piqa,hellaswag")


def _from_peers(
    observer: Observer, store: BlobStore, run_id: str | None, form: Form
) -> ExportFacts:
    announced = observer.find(run_id, ASK_S)
    run = observer.config(announced, ASK_S)
    seen = observer.look(announced.record.run, ASK_S)
    manifest = observer.tip(announced, seen.peers, ASK_S)
    sources = sorted({*announced.publishers, *seen.peers})
    observer.fetch_model(
        manifest, layout_of(run), sources=sources, on_blob=fetching(), deadline_s=FETCH_S
    )
    return ExportFacts(
        AgreedModel(run, manifest, store),
        form,
        told_losses(seen.validations, manifest.members),
        {peer: record.name for peer, record in seen.peers.items()},
    )


def _from_disk(
    path: Path, run_id: str | None, out: Path, form: Form, extras: Sequence[Extra]
) -> None:
    """Exports what a peer that is not running has on its disk; raises like `open_state`."""
    state, model = open_state(path, run_id)
    try:
        name = run_id or state.current_run
        assert name is not None, "a run was opened"
        facts = ExportFacts(model, form, kept_losses(state.run(name).events_path))
        export(facts, out, extras)
    finally:
        state.close()
