"""What swarm-export adds to an export so that it can be evaluated, and how it evaluates it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import click

from peers.options import Options
from swarm.errors import BadBlob, ConfigError, DataError, SwarmError
from swarm.evaluation.harness import TASK_FILE, command, folder_of_task, write_task
from swarm.evaluation.measure import HeldOutTokens, evaluate
from swarm.evaluation.scores import Measured, append_scores, newest_scores, score_record
from swarm.evaluation.tasks import TaskFailed, require_tasks, run_task, shots_of
from swarm.export.facts import ExportFacts
from swarm.export.folder import write_facts
from swarm.network.identity import Identity, load_or_create_identity
from swarm.network.observer import Observer
from swarm.peer.held_out_text import held_out_text, held_out_tokens
from swarm.peer.kept_settings import identity_path_of
from swarm.progress import duration
from swarm.protocol.printable import printable

PUBLISH_S = 30.0


def add_task(folder: Path, facts: ExportFacts) -> None:
    """Adds the held-out text to an export, as a task of lm-evaluation-harness."""
    try:
        write_task(folder, held_out_text(facts.model))
    except (DataError, BadBlob) as error:
        click.echo(f"without the held-out text for lm_eval: {error}")


def say_command(folder: Path, facts: ExportFacts) -> None:
    """Says how lm-evaluation-harness measures the held-out text, where an export has it."""
    if (folder_of_task(folder) / TASK_FILE).exists():
        click.echo(command(folder, facts.model.run.data.sequence_length))


@dataclass(frozen=True)
class Evaluator:
    """Measures exports, says the scores, keeps them in a file, and publishes them if asked to.

    Attributes:
        scores: the file.
        tasks: of lm-evaluation-harness, with their shots.
        signer: whose scores they are; None publishes under a key that is forgotten.
        publish: whether the run's monitors are told.
    """

    scores: Path
    tasks: Mapping[str, int | None] = field(default_factory=dict)
    signer: Identity | None = None
    publish: bool = False

    def evaluate(self, folder: Path, facts: ExportFacts, observer: Observer | None) -> None:
        """Measures one export, whose card says so; a task that fails is told, the rest goes on.

        Args:
            folder: of the export.
            facts: what is exported.
            observer: through which scores are published.

        Raises:
            SwarmError: it could not be measured, or the scores could not be published.
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
        """The same where others follow: what goes wrong is told."""
        try:
            self.evaluate(folder, facts, observer)
        except (SwarmError, OSError) as error:
            click.echo(
                f"round {facts.model.manifest.round} was not evaluated to the end: "
                f"{printable(str(error))}"
            )

    def repeat_newest(self, run_id: str, observer: Observer) -> None:
        """Publishes what was measured before a restart; what goes wrong is told."""
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
    """What a person asked to be measured; None for nothing.

    Scores are signed by the key that was named, else by that of the peer in the state directory.

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
