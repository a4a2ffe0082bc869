"""The held-out text in an export, as lm-evaluation-harness measures it."""

import json
import os
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from swarm.data.held_out import HeldOut, held_out_windows, measured_on
from swarm.data.tokenizer import Tokenizer
from swarm.evaluation.measure import StreamedModel
from swarm.evaluation.tasks import command, write_task
from tests.evaluation.exports import DOCUMENTS, TOKENIZERS, make_export

HARNESS_S = 900


def held_out(tokenizer: Tokenizer, length: int) -> HeldOut:
    return measured_on(tokenizer, [document.encode() for document in DOCUMENTS], length)


def test_the_task_names_its_text_from_the_export_on_and_runs_nothing(tmp_path: Path) -> None:
    write_task(tmp_path, DOCUMENTS)
    lines = (tmp_path / "lm_eval" / "swarm_held_out.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"text": document} for document in DOCUMENTS]
    task = (tmp_path / "lm_eval" / "swarm_held_out.yaml").read_text()
    assert task.splitlines() == [
        "task: swarm_held_out",
        "dataset_path: json",
        "dataset_kwargs:",
        "  data_files:",
        "    test: lm_eval/swarm_held_out.jsonl",
        "output_type: loglikelihood_rolling",
        "test_split: test",
        'doc_to_text: ""',
        "doc_to_target: text",
        "metric_list:",
        "  - metric: word_perplexity",
        "  - metric: byte_perplexity",
        "  - metric: bits_per_byte",
        "metadata:",
        "  version: 1.0",
    ]


def test_the_command_survives_a_shell_and_has_the_windows_of_the_run() -> None:
    line = command(Path("/tmp/it's here"), 32)
    assert "max_length=32,dtype=float32" in line
    said = subprocess.run(
        ["sh", "-c", line.partition(" && ")[0].replace("cd ", "printf '%s\\n' ", 1)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "/tmp/it's here\n"


def pairs(found: HeldOut) -> Iterator[tuple[list[int], list[int]]]:
    """The context of each window, and the tokens that the window predicts."""
    for tokens_BT1, scored_BT in found.windows:
        for tokens, scored in zip(tokens_BT1.tolist(), scored_BT.tolist(), strict=True):
            first, after = scored.index(True), len(scored) - scored[::-1].index(True)
            assert all(scored[first:after])
            yield tokens[: first + 1], tokens[first + 1 : after + 1]


@pytest.mark.parametrize("size", [1, 2, 7, 32])
def test_our_windows_are_those_of_the_harness(size: int) -> None:
    utils = pytest.importorskip("lm_eval.utils", reason="needs the extra eval")
    for num_tokens in (1, 2, 6, 7, 8, 13, 14, 31, 32, 33, 64, 65, 97):
        tokens = list(range(num_tokens))
        windows = utils.get_rolling_token_windows(
            tokens, prefix_token=999, max_seq_len=size, context_len=1
        )
        theirs = [utils.make_disjoint_window(window) for window in windows]
        found = held_out_windows(np.array([*tokens, 999]), 999, size, num_bytes=1)
        assert sorted(pairs(found)) == sorted((list(a), list(b)) for a, b in theirs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_the_printed_command_gives_our_bits_per_byte(tmp_path: Path, kind: str) -> None:
    # A minute each: the harness loads datasets, transformers and its 14,000 tasks.
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    tokenizer = TOKENIZERS[kind]
    run = make_export(tmp_path / "first", tokenizer)
    (tmp_path / "first").rename(tmp_path / "moved")
    length = run.data.sequence_length
    text = held_out(tokenizer, length)
    ours = text.bits_per_byte(StreamedModel(tmp_path / "moved", run).nats_per_token(text))
    line = f"{command(tmp_path / 'moved', length)} --output_path {tmp_path / 'scores'}"
    folder = Path(sysconfig.get_path("scripts"))
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    subprocess.run(line, shell=True, check=True, timeout=HARNESS_S, env=environment)
    (results,) = (tmp_path / "scores").rglob("results_*.json")
    theirs = json.loads(results.read_text())["results"]["swarm_held_out"]
    assert theirs["bits_per_byte,none"] == pytest.approx(ours, abs=1e-4)
    assert theirs["byte_perplexity,none"] == pytest.approx(2**ours, rel=1e-4)
