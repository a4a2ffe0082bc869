"""Finds, fetches, writes and evaluates the newest agreed model."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

from peers.command_line.options import Options
from swarm.background import supervised
from swarm.config.amounts import size_in_bytes
from swarm.errors import BadBlob, ConfigError, DataError, SwarmError
from swarm.evaluation.measure import HeldOutTokens, evaluate
from swarm.evaluation.scores import Measured, append_scores, newest_scores, score_record
from swarm.evaluation.tasks import (
    TASK_FILE,
    TaskFailed,
    command,
    folder_of_task,
    require_tasks,
    run_task,
    shots_of,
    write_task,
)
from swarm.export.facts import ExportFacts, Form, kept_losses
from swarm.export.hub import open_hub
from swarm.export.manager import (
    BLOBS,
    ExportManager,
    Extra,
    nothing_more,
    take_folder,
    write_export,
    write_facts,
)
from swarm.export.model_fetch import FromPeers
from swarm.export.run_follower import Follower
from swarm.model.huggingface import Dtype
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.runs.observer import Observer
from swarm.network.wire.identity import Identity, load_or_create_identity
from swarm.peer.machine.state_directory import identity_path_of
from swarm.peer.text.agreed_model import held_out_text, held_out_tokens, open_state
from swarm.progress import duration
from swarm.protocol.records.printable import printable

PUBLISH_S = 30.0


def add_task(folder: Path, facts: ExportFacts) -> None:
    """Adds the held-out text to an export, as a task of lm-evaluation-harness."""
    try:
        write_task(folder, held_out_text(facts.model))
    except (DataError, BadBlob) as error:
        click.echo(f"without the held-out text for lm_eval: {error}")


def say_command(folder: Path, facts: ExportFacts) -> None:
    """Prints the command that evaluates an export's held-out text, if the export has one."""
    if (folder_of_task(folder) / TASK_FILE).exists():
        click.echo(command(folder, facts.model.run.data.sequence_length))


@dataclass(frozen=True)
class Evaluator:
    """Measures exports, prints the scores, saves them in a file, and publishes them on request.

    Attributes:
        scores: the file of scores.
        tasks: tasks of lm-evaluation-harness, each with its number of shots.
        signer: signs published scores. None: a new key signs, which is not stored.
        publish: whether scores are published to the run's monitors.
    """

    scores: Path
    tasks: Mapping[str, int | None] = field(default_factory=dict)
    signer: Identity | None = None
    publish: bool = False

    def evaluate(self, folder: Path, facts: ExportFacts, observer: Observer | None) -> None:
        """Measures one export for its card. Reports a failing task, and continues with the others.

        Args:
            folder: folder of the export.
            facts: facts of the exported model.
            observer: publishes the scores.

        Raises:
            SwarmError: the export could not be measured, or scores could not be published.
            OSError: the file of scores cannot be written.
        """
        model, began_s = facts.model, time.monotonic()
        text = HeldOutTokens(*held_out_tokens(model.manifest, model.run, model.store))
        found = evaluate(folder, model.run, text, model.tokenizer())
        click.echo(
            f"round {model.manifest.round}: held-out loss {found.nats_per_token:.4f} nats per "
            f"token, {found.bits_per_byte:.4f} bits per byte of {text.num_bytes} bytes "
            f"({duration(time.monotonic() - began_s)})"
        )
        if found.prompt:
            click.echo(f"sample: {printable(found.prompt)} => {printable(found.sample)}")
        write_facts(folder, facts.measured(found.nats_per_token, found.bits_per_byte))
        told = found.measured()
        self._keep(facts, told, told, observer)
        for name, shots in self.tasks.items():
            try:
                measured = run_task(folder, model.run.data.sequence_length, name, shots)
            except TaskFailed as error:
                click.echo(f"{name}: no score: {printable(str(error))}")
                continue
            for score in measured:
                number = "an unknown number of" if score.samples is None else score.samples
                click.echo(f"{name}: {score.metric} {score.value:.4f} of {number} samples")
            told = [*told, *measured]
            self._keep(facts, measured, told, observer)

    def try_to_evaluate(self, folder: Path, facts: ExportFacts, observer: Observer) -> None:
        """Calls `evaluate`, but only reports errors, because more exports follow."""
        try:
            self.evaluate(folder, facts, observer)
        except (SwarmError, OSError) as error:
            click.echo(
                f"round {facts.model.manifest.round} was not evaluated to the end: "
                f"{printable(str(error))}"
            )

    def repeat_newest(self, run_id: str, observer: Observer) -> None:
        """Publishes scores measured before a restart. Reports errors instead of raising them."""
        try:
            record = newest_scores(self.scores) if self.publish else None
            if record:
                observer.publish_scores(run_id, record, PUBLISH_S)
        except (SwarmError, OSError) as error:
            click.echo(f"the scores of before were not published: {printable(str(error))}")

    def _keep(
        self,
        facts: ExportFacts,
        new: list[Measured],
        told: list[Measured],
        observer: Observer | None,
    ) -> None:
        manifest = facts.model.manifest
        append_scores(self.scores, manifest.digest, manifest.round, time.time(), new)
        record = score_record(manifest.digest, manifest.round, told)
        if self.publish and observer and record:
            observer.publish_scores(facts.run_id, record, PUBLISH_S)


def evaluator_of(
    given: Options, scores: Path, tasks: str | None, *, is_wanted: bool, publish: bool
) -> Evaluator | None:
    """The evaluator that a person asked for. None if nothing is to be measured.

    Scores are signed with the key that the person named, or else with the key in the state
    directory.

    Raises:
        ConfigError: options contradict each other, or the harness lacks a task.
    """
    if not is_wanted:
        if tasks or publish:
            raise ConfigError("--tasks and --publish-scores need --evaluate")
        return None
    if publish and not given.initial_peers:
        raise ConfigError(
            "--publish-scores needs --initial-peers", hint="every peer prints its address"
        )
    shots = shots_of(tasks) if tasks else {}
    if shots:
        require_tasks(list(shots))
    signer = None
    if publish:
        key = identity_path_of(given.state_dir.expanduser(), given.identity_path)
        if given.identity_path or key.exists():
            signer = load_or_create_identity(key)
    return Evaluator(scores, shots, signer, publish)


START_S = 30.0
ENDS_FOLLOWING = (SwarmError, OSError, KeyboardInterrupt, SystemExit)
"""Errors that end the export of a run's rounds. After other errors, such as a brief lack of memory,
the export continues."""
FETCHING = ".fetching"
"""Folder for fetched values within the folder of an export, until the export is complete."""


@dataclass(frozen=True)
class Plan:
    """The choice of a run's rounds to export.

    Attributes:
        folder: folder of the exports.
        every: rounds from one export to the next. The run's last round is always exported.
        keep: number of exports that are kept.
    """

    folder: Path
    every: int
    keep: int


def form_of(dtype: Dtype, max_shard_size: str, license_name: str | None) -> Form:
    """The form in which a person wants an export to be written.

    Raises:
        ConfigError: the size of a shard is not a size, or is 0.
    """
    size = int(size_in_bytes(max_shard_size))
    if size < 1:
        raise ConfigError("--max-shard-size 0 leaves no room", hint="write it as 5GB")
    return Form(dtype, size, license_name)


def pushed_to(repo: str | None) -> Extra:
    """A function that uploads an export to a repository of the hub. Without `repo` it does nothing.

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
        StateError: there is no run in the state directory, or its peer is running.
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
    """Exports a run's rounds as they are agreed, until the last round.

    Raises:
        ConfigError: no address of a peer was given, or the folder holds another run's exports.
        NobodyReachable: no peer answers, or none has answered for too long.
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
    """Writes the model and prints the command that evaluates it."""
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
    """The newest model of the run's peers, and the observer that found it."""
    with _fetched_beside(out) as store, _observing(given, store, evaluator) as observer:
        source = FromPeers(observer, store, run_id)
        manifest = source.newest(0)
        assert manifest is not None, "every round is 0 or later"
        store.collect(manifest.blobs)
        yield source.bring(manifest, form), observer


@contextlib.contextmanager
def _fetched_beside(out: Path) -> Iterator[BlobStore]:
    """A store for fetched values in the folder of the export, since its disk has room for a model.

    Values that arrived before an error or a kill stay for the next try.

    Raises:
        StateLocked: another process exports into this folder.
        StateError: the disk cannot be read or written.
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
    """The newest model on the disk of a peer that is not running. Raises like `open_state`."""
    state, model = open_state(path, run_id)
    try:
        name = run_id or state.last_run
        assert name is not None, "a run was opened"
        yield ExportFacts(model, form, kept_losses(state.run(name).events_path)), None
    finally:
        state.close()
