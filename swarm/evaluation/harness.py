"""The run's held-out text as a task of lm-evaluation-harness, inside of an export.

The harness measures it as `swarm.data.held_out` does: document by document, in windows that predict
each token once, with the end-of-text token before a document. So its bits per byte are ours.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from swarm import durable

TASK = "swarm_held_out"
FOLDER = "lm_eval"
TEXT_FILE = f"{TASK}.jsonl"
TASK_FILE = f"{TASK}.yaml"
# The harness looks for data files from the folder in which it is started, so it is started in the
# export: then this is true wherever the export is moved to.
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
        folder: of the export; it must exist.
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
    """Where an export has the task, if it has it."""
    return folder / FOLDER


def model_arguments(folder: str, sequence_length: int) -> str:
    """What the harness is told of an exported model: where it is, windows and number format.

    Args:
        folder: of the export.
        sequence_length: tokens that a window predicts.
    """
    return f"pretrained={folder},max_length={sequence_length},dtype=float32"


def command(folder: Path, sequence_length: int) -> str:
    """The line that measures the held-out text with lm-evaluation-harness, for a shell."""
    return (
        f"cd {shlex.quote(str(folder))} && HF_HUB_OFFLINE=1 lm_eval --model hf --model_args "
        f"{model_arguments('.', sequence_length)} --tasks {TASK} --include_path {FOLDER}"
    )
