"""How the newest agreed model is found, fetched and written."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from peers.evaluating import Evaluator, add_task, say_command
from peers.options import Options
from swarm.background import supervised
from swarm.config.amounts import size_in_bytes
from swarm.errors import ConfigError, SwarmError
from swarm.export.facts import ExportFacts, Form
from swarm.export.fetching import FromPeers
from swarm.export.folder import Extra, nothing_more, write_export
from swarm.export.following import Follower
from swarm.export.hub import open_hub
from swarm.export.losses import kept_losses
from swarm.export.manager import BLOBS, ExportManager, take_folder
from swarm.model.huggingface import Dtype
from swarm.network.blobs import BlobStore
from swarm.network.observer import Observer
from swarm.peer.agreed_model import open_state

START_S = 30.0
ENDS_FOLLOWING = (SwarmError, OSError, KeyboardInterrupt, SystemExit)
"""After anything else, such as memory that was short once, an export that follows goes on."""
FETCHING = ".fetching"
"""Beside an export the values that it is made of, until it is whole."""


@dataclass(frozen=True)
class Plan:
    """Which rounds of a run are exported.

    Attributes:
        folder: where the exports stand.
        every: rounds from one to the next; the run's last is always exported.
        keep: how many stay.
    """

    folder: Path
    every: int
    keep: int


def form_of(dtype: Dtype, max_shard_size: str, license_name: str | None) -> Form:
    """How a person wants an export to be written.

    Raises:
        ConfigError: a shard's size is none, or 0.
    """
    size = int(size_in_bytes(max_shard_size))
    if size < 1:
        raise ConfigError("--max-shard-size 0 leaves no room", hint="write it as 5GB")
    return Form(dtype, size, license_name)


def pushed_to(repo: str | None) -> Extra:
    """What uploads an export to a repository of the hub; nothing without one.

    Raises:
        ConfigError: the extra hf is not installed, or there is no token.
    """
    if repo is None:
        return nothing_more
    hub = open_hub(repo)

    def push(folder: Path, facts: ExportFacts) -> None:
        hub.push(folder, facts)
        click.echo(f"pushed round {facts.model.manifest.round} to {repo}")

    return push


def export_newest(
    given: Options,
    out: Path,
    run_id: str | None,
    form: Form,
    *,
    evaluator: Evaluator | None = None,
    published: Extra = nothing_more,
) -> None:
    """Fetches the newest model from the run's peers, or takes it from disk, and writes it.

    Raises:
        NobodyReachable: no peer of the run answers.
        StateError: there is no run in the state directory, or its peer runs.
    """
    found = (
        _from_peers(given, out, run_id, form, evaluator)
        if given.initial_peers
        else _on_disk(given.state_dir, run_id, form)
    )
    with found as (facts, observer):
        export(facts, out)
        if evaluator:
            evaluator.evaluate(out, facts, observer)
    published(out, facts)


def follow(
    given: Options,
    plan: Plan,
    run_id: str | None,
    form: Form,
    *,
    evaluator: Evaluator | None = None,
    published: Extra = nothing_more,
) -> None:
    """Exports a run's rounds as they are agreed, until the last one.

    Raises:
        ConfigError: no address of a peer was given, or the folder holds another run's exports.
        NobodyReachable: no peer answers, or for too long.
        StateError: the folder is in use, or cannot be written to.
    """
    if not given.initial_peers:
        raise ConfigError(
            "--every follows a run: --initial-peers is missing",
            hint="every peer prints its address when it starts",
        )
    with contextlib.closing(ExportManager(plan.folder, plan.keep)) as manager:
        store = BlobStore(plan.folder / BLOBS)
        with _observing(given, store, evaluator) as observer:

            def after(folder: Path, facts: ExportFacts) -> None:
                say_command(folder, facts)
                if evaluator:
                    evaluator.try_to_evaluate(folder, facts, observer)
                published(folder, facts)

            source = FromPeers(observer, store, run_id)
            manager.require_run(source.run_id)
            if evaluator:
                evaluator.repeat_newest(source.run_id, observer)
            follower = Follower(source, manager, plan.every, form, (add_task,), after, click.echo)
            supervised("the export", follower.follow, threading.Event(), ends=ENDS_FOLLOWING)


def export(facts: ExportFacts, out: Path) -> None:
    """Writes the model and says how others evaluate it."""
    manifest = facts.model.manifest
    write_export(out, facts, (add_task,))
    click.echo(f"exported round {manifest.round} (manifest {manifest.digest[:12]}) to {out}")
    say_command(out, facts)


@contextlib.contextmanager
def _observing(given: Options, store: BlobStore, evaluator: Evaluator | None) -> Iterator[Observer]:
    signer = evaluator.signer if evaluator else None
    observer = Observer.start(given.initial_peers, store, START_S, vouched=given.tip, signer=signer)
    try:
        yield observer
    finally:
        observer.stop()


@contextlib.contextmanager
def _from_peers(
    given: Options, out: Path, run_id: str | None, form: Form, evaluator: Evaluator | None
) -> Iterator[tuple[ExportFacts, Observer]]:
    """The newest model of the run's peers, and what it was found with."""
    with _fetched_beside(out) as store, _observing(given, store, evaluator) as observer:
        source = FromPeers(observer, store, run_id)
        manifest = source.newest(0)
        assert manifest is not None, "every round is 0 or later"
        store.collect(manifest.blobs)
        yield source.bring(manifest, form), observer


@contextlib.contextmanager
def _fetched_beside(out: Path) -> Iterator[BlobStore]:
    """Where values are fetched to: beside the export, since there is room for a model.

    What came before an error, or a kill, is there for the next try.

    Raises:
        StateLocked: another process exports into this folder.
        StateError: the disk refused.
    """
    out.mkdir(parents=True, exist_ok=True)
    lock = os.open(out, os.O_RDONLY)
    try:
        take_folder(lock, out, "--out")
        store = BlobStore(out / FETCHING)
        store.verify(store.digests())
        yield store
        shutil.rmtree(out / FETCHING)
    finally:
        os.close(lock)


@contextlib.contextmanager
def _on_disk(path: Path, run_id: str | None, form: Form) -> Iterator[tuple[ExportFacts, None]]:
    """What a peer that is not running has on its disk; raises like `open_state`."""
    state, model = open_state(path, run_id)
    try:
        name = run_id or state.last_run
        assert name is not None, "a run was opened"
        yield ExportFacts(model, form, kept_losses(state.run(name).events_path)), None
    finally:
        state.close()
