"""Tasks of lm-evaluation-harness, each in its own process, so that a failure ends only one task.

The run's held-out text is one of the tasks.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm import durable
from swarm.errors import ConfigError, SwarmError
from swarm.evaluation.scores import Measured

TASK = "swarm_held_out"
FOLDER = "lm_eval"
TEXT_FILE = f"{TASK}.jsonl"
TASK_FILE = f"{TASK}.yaml"
# The harness resolves data files from its working directory. It is started in the export, so this
# path stays right when the export is moved.
_TASK = f"""\
task: {TASK}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {FOLDER}/{TEXT_FILE}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: text
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
metadata:
  version: 1.0
"""


def write_task(folder: Path, documents: Sequence[str]) -> None:
    """Adds the task and its text to an export.

    Args:
        folder: existing folder of the export.
        documents: the held-out text.

    Raises:
        OSError: the disk refused.
    """
    place = folder_of_task(folder)
    durable.make_folder(place)
    lines = [json.dumps({"text": document}) + "\n" for document in documents]
    durable.write_file(place / TEXT_FILE, "".join(lines).encode())
    durable.write_file(place / TASK_FILE, _TASK.encode())


def folder_of_task(folder: Path) -> Path:
    """The folder of the task in an export, if the export has it."""
    return folder / FOLDER


def model_arguments(folder: str, sequence_length: int) -> str:
    """The harness's arguments for an exported model: its folder, windows and number format.

    Args:
        folder: folder of the export.
        sequence_length: tokens that a window predicts.
    """
    return f"pretrained={folder},max_length={sequence_length},dtype=float32"


def command(folder: Path, sequence_length: int) -> str:
    """The shell command that measures the held-out text with lm-evaluation-harness."""
    return (
        f"cd {shlex.quote(str(folder))} && HF_HUB_OFFLINE=1 lm_eval --model hf --model_args "
        f"{model_arguments('.', sequence_length)} --tasks {TASK} --include_path {FOLDER}"
    )


SPES = {
    "sciq": 0,
    "piqa": 0,
    "winogrande": 0,
    "arc_easy": 0,
    "social_iqa": 0,
    "openbookqa": 0,
    "boolq": 0,
    "arc_challenge": 25,
    "hellaswag": 10,
    "ceval-valid": None,
    "cmmlu": None,
    "mmlu": None,
}
"""The tasks of arXiv 2602.11543, by their names in the harness, with the shots of the paper's code.
None: that code sets no shots, so the harness's own number is used.
"""
CHECK_S = 600.0
TASK_S = 24 * 3600.0
_MAX_SAID = 300
_LIST = "from lm_eval.tasks import TaskManager; print('\\n'.join(['', *TaskManager().all_tasks]))"


class TaskFailed(SwarmError):
    """A task of lm-evaluation-harness gave no score."""


def shots_of(names: str) -> dict[str, int | None]:
    """The shots of each task of a list with commas, in which `spes` stands for the paper's tasks.

    Raises:
        ConfigError: the list has no name.
    """
    found: dict[str, int | None] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        found |= SPES if name == "spes" else {name: None}
    if not found:
        raise ConfigError("--tasks names no task", hint="--tasks arc_easy,piqa or --tasks spes")
    return found


def require_tasks(names: Sequence[str]) -> None:
    """Refuses tasks that the installed harness does not have. Takes half a minute.

    Raises:
        ConfigError: the harness lacks a task, or is not installed.
        TaskFailed: the harness cannot be run.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "--tasks needs lm-evaluation-harness", hint="pip install 'moe-swarm[eval]'"
        )
    known = set(_run([sys.executable, "-c", _LIST], CHECK_S).splitlines())
    missing = [name for name in names if name not in known]
    if missing:
        raise ConfigError(
            f"lm-evaluation-harness has no task {', '.join(missing)}",
            hint="lm_eval ls tasks prints those it has",
        )


def run_task(folder: Path, sequence_length: int, name: str, shots: int | None) -> list[Measured]:
    """Runs the harness for an export and one task.

    Memory: the whole model in fp32, in another process.

    Args:
        folder: folder of the export.
        sequence_length: sequence length of the run.
        name: name of the task.
        shots: answered questions before each question. None for the task's own number.

    Raises:
        TaskFailed: the harness gave no score. Without a network most tasks have no data.
    """
    with tempfile.TemporaryDirectory(prefix="swarm-scores-") as results:
        line = [sys.executable, "-m", "lm_eval", "run", "--model", "hf"]
        line += ["--model_args", model_arguments(str(folder.absolute()), sequence_length)]
        line += ["--tasks", name, "--output_path", results]
        line += [] if shots is None else ["--num_fewshot", str(shots)]
        _run(line, TASK_S)
        for path in sorted(Path(results).rglob("results_*.json")):
            return measured_of(name, json.loads(path.read_text(encoding="utf-8")))
    raise TaskFailed(f"{name}: the harness wrote no results")


def measured_of(name: str, results: Mapping[str, Any]) -> list[Measured]:
    """The figures of one task, or group of tasks, from the harness's results.

    Raises:
        TaskFailed: there are no figures.
    """
    samples = _samples_of(name, results)
    figures = results.get("results", {}).get(name, {}) | results.get("groups", {}).get(name, {})
    found = []
    for key, value in figures.items():
        metric, _, chosen = key.partition(",")
        if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        metric = metric if chosen == "none" else key
        found.append(Measured(name, metric, float(value), samples))
    if not found:
        raise TaskFailed(f"{name}: the harness gave no figure")
    return found


def _samples_of(name: str, results: Mapping[str, Any]) -> int | None:
    """Questions of a task, or of a group of tasks and groups. None if some were not counted."""
    groups, counts = results.get("group_subtasks", {}), results.get("n-samples", {})
    tasks, seen, ahead = set[str](), set[str](), [name]
    while ahead:
        part = ahead.pop()
        if part not in seen:
            seen.add(part)
            ahead += groups.get(part, ())
            tasks |= set() if groups.get(part) else {part}
    return sum(int(counts[task]["effective"]) for task in tasks) if tasks <= counts.keys() else None


def _run(line: Sequence[str], deadline_s: float) -> str:
    """The output of a command. The reason of a failure is the last line on its error output."""
    try:
        done = subprocess.run(
            line, capture_output=True, text=True, errors="replace", timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise TaskFailed(f"it took more than {deadline_s:.0f} s") from error
    if done.returncode:
        said = [text.strip() for text in done.stderr.splitlines() if text.strip()]
        why = said[-1][:_MAX_SAID] if said else "it said nothing"
        raise TaskFailed(f"exit code {done.returncode}: {why}")
    return done.stdout
