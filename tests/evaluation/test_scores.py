"""Scores: lines of a file that a crash may cut, and values that fit into a record."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from swarm.errors import ConfigError
from swarm.evaluation import tasks
from swarm.evaluation.scores import FILE, Measured, append_scores, newest_scores, score_record
from swarm.evaluation.tasks import SPES, TaskFailed, measured_of, run_task, shots_of
from swarm.protocol.records.records import MAX_SCORES, ScoreRecord, decode_record, encode_record

DIGEST = "ab" * 32


def test_each_score_is_a_line_and_a_line_that_a_crash_has_cut_spoils_no_other(
    tmp_path: Path,
) -> None:
    path = tmp_path / "scores.jsonl"
    append_scores(path, DIGEST, 3, 12.0004, [Measured("sciq", "acc", 0.5, 10)] * 2)
    line = {
        "manifest_digest": DIGEST, "round": 3, "at": 12.0,
        "task": "sciq", "metric": "acc", "value": 0.5, "samples": 10,
    }  # fmt: skip
    assert [json.loads(text) for text in path.read_text().splitlines()] == [line, line]
    path.write_bytes(path.read_bytes()[:-9])
    append_scores(path, DIGEST, 4, 13.0, [Measured("piqa", "acc", 0.25, 10)])
    first, cut, last = path.read_text().splitlines()
    assert json.loads(first) == line and json.loads(last)["round"] == 4
    with pytest.raises(ValueError, match=r"delimiter|Unterminated|Expecting"):
        json.loads(cut)


def test_the_newest_scores_of_a_file_are_those_of_its_last_model(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    assert newest_scores(path) is None
    older, newer = Measured("sciq", "acc", 0.5, 10), Measured("sciq", "acc", 0.75, 10)
    append_scores(path, "cd" * 32, 2, 9.0, [older])
    append_scores(path, DIGEST, 3, 12.0, [older])
    append_scores(path, DIGEST, 3, 12.5, [newer])  # measured again
    append_scores(path, DIGEST, 3, 13.0, [Measured("piqa", "acc", 0.25, 10)])
    record = newest_scores(path)
    assert record is not None
    assert [(score.round, score.task, score.value) for score in record.scores] == [
        (3, "sciq", 0.75), (3, "piqa", 0.25),
    ]  # fmt: skip
    path.write_bytes(path.read_bytes()[:-9])
    record = newest_scores(path)
    assert record is not None and [score.task for score in record.scores] == ["sciq"]


def test_what_is_published_is_what_a_record_may_have() -> None:
    odd = [
        Measured("a task/with (signs)", "acc,strict-match", 0.5, 3),
        Measured("_x" * 99, "m", math.nan, 3),
        Measured("y" * 99, "m", 0.25, 3),
        Measured("none", "m", 0.25, 0),
        Measured("lost", "word_perplexity", 1e101, 3),
    ]
    record = score_record(DIGEST, 3, odd + [Measured("z", "m", 1.0, 1)] * 99)
    assert record is not None
    assert [score.task for score in record.scores[:3]] == ["a-task-with-signs-", "y" * 64, "z"]
    assert len(record.scores) == MAX_SCORES
    assert decode_record(ScoreRecord, encode_record(record)) == record
    assert score_record(DIGEST, 3, odd[1:2]) is None


def test_the_papers_tasks_have_its_shots_and_stand_beside_others() -> None:
    found = shots_of("lambada_openai, spes")
    assert next(iter(found)) == "lambada_openai" and found["arc_challenge"] == 25
    assert found["hellaswag"] == 10 and found["boolq"] == 0 and found["mmlu"] is None
    with pytest.raises(ConfigError, match="names no task"):
        shots_of(" ,")


@pytest.mark.exhaustive
def test_the_installed_harness_has_the_papers_tasks() -> None:
    # Half a minute: the harness reads the headers of its 14,000 tasks.
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    tasks.require_tasks(list(SPES))
    with pytest.raises(ConfigError, match="no task arc_simple, siqa"):
        tasks.require_tasks(["arc_simple", "sciq", "siqa"])


def test_without_the_harness_tasks_are_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'moe-swarm\[eval\]'"):
        tasks.require_tasks(["sciq"])


def test_figures_come_from_what_the_harness_writes() -> None:
    found = {
        "results": {
            "mmlu_law": {"acc,none": 0.2},
            "mmlu": {"alias": "mmlu", "acc,none": 0.3, "acc_stderr,none": 0.01},
            "gsm8k": {"exact_match,strict-match": 0.1, "exact_match_stderr,strict-match": "N/A"},
        },
        "groups": {"mmlu": {"acc,none": 0.3}},
        "group_subtasks": {"mmlu": ["mmlu_law", "mmlu_art"]},
        "n-samples": {
            "mmlu_law": {"effective": 7}, "mmlu_art": {"effective": 5}, "gsm8k": {"effective": 9},
        },
    }  # fmt: skip
    assert measured_of("mmlu", found) == [Measured("mmlu", "acc", 0.3, 12)]
    assert measured_of("gsm8k", found) == [Measured("gsm8k", "exact_match,strict-match", 0.1, 9)]
    with pytest.raises(TaskFailed, match="no figure"):
        measured_of("sciq", found)


def test_a_group_of_groups_has_the_samples_of_all_of_its_tasks() -> None:
    """MMLU is one, and was published with one sample. A task may be in two of its groups."""
    found: dict[str, Any] = {
        "results": {"mmlu": {"acc,none": 0.3}},
        "group_subtasks": {
            "mmlu": ["stem", "humanities"], "stem": ["maths", "physics"],
            "humanities": ["law", "maths"], "law": [],
        },
        "n-samples": {n: {"effective": k} for n, k in (("maths", 4), ("physics", 2), ("law", 1))},
    }  # fmt: skip
    assert measured_of("mmlu", found) == [Measured("mmlu", "acc", 0.3, 7)]
    del found["n-samples"]["physics"]
    assert measured_of("mmlu", found) == [Measured("mmlu", "acc", 0.3, None)]


def test_a_score_of_an_unknown_number_of_samples_is_kept_and_not_published(tmp_path: Path) -> None:
    figures = [Measured("mmlu", "acc", 0.3, None), Measured("sciq", "acc", 0.5, 10)]
    append_scores(tmp_path / FILE, DIGEST, 3, 5.0, figures)
    record = newest_scores(tmp_path / FILE)
    assert record and [score.task for score in record.scores] == ["sciq"]
    assert record == score_record(DIGEST, 3, figures)


def test_a_task_that_fails_says_the_harness_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lm_eval.py").write_text(
        "import sys\nprint('Traceback', file=sys.stderr)\nsys.exit('OfflineModeIsEnabled: no hub')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(TaskFailed, match="exit code 1: OfflineModeIsEnabled: no hub"):
        run_task(tmp_path, 32, "sciq", 0)
    (tmp_path / "lm_eval.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(tasks, "TASK_S", 0.3)
    with pytest.raises(TaskFailed, match="it took more than 0 s"):
        run_task(tmp_path, 32, "sciq", 0)
