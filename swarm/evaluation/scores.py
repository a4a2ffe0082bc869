"""Scores of exported models, as lines of a file and as published records."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm import durable
from swarm.protocol.records.records import MAX_REAL, MAX_SCORES, Score, ScoreRecord
from swarm.protocol.values.manifest import Digest

FILE = "scores.jsonl"
_NO_NAME = re.compile(r"[^A-Za-z0-9_.,-]+")


@dataclass(frozen=True)
class Measured:
    """One figure of one model.

    Attributes:
        task: the task, such as `swarm_held_out` or `arc_easy`.
        metric: the metric, such as `bits_per_byte` or `acc`.
        value: the finite value.
        samples: number of documents or questions. None: not known.
    """

    task: str
    metric: str
    value: float
    samples: int | None


def append_scores(
    path: Path, digest: Digest, round_: int, at: float, measured: Sequence[Measured]
) -> None:
    """Adds a line for each score to a file.

    A crash may cut the file's last line. This line is ended before lines are added.

    Args:
        path: the file, made if missing.
        digest: digest of the manifest whose model was measured.
        round_: round of this manifest.
        at: time of the measurement, seconds since 1970.
        measured: the figures.

    Raises:
        OSError: the disk refused.
    """
    head = {"manifest_digest": digest, "round": round_, "at": round(at, 3)}
    lines = [json.dumps(head | asdict(figure)) + "\n" for figure in measured]
    durable.append_lines(path, "".join(lines).encode())


def score_record(digest: Digest, round_: int, measured: Sequence[Measured]) -> ScoreRecord | None:
    """The figures that can be published: as many as a record takes, with names that it may contain.

    Values that are not finite or exceed `MAX_REAL`, as a perplexity may, are left out, because
    readers would refuse the whole record. Values with no samples, or an unknown number, are left
    out too.
    """
    scores = [
        Score(digest, round_, _name(figure.task), _name(figure.metric), figure.value, count)
        for figure in measured
        if abs(figure.value) <= MAX_REAL and (count := figure.samples)
    ]
    return ScoreRecord(tuple(scores[:MAX_SCORES])) if scores else None


def newest_scores(path: Path) -> ScoreRecord | None:
    """The last scores of a file: those of the model in the last whole line. None without a line."""
    found: list[tuple[Digest, int, Measured]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
            head = str(values.pop("manifest_digest")), int(values.pop("round"))
            del values["at"]
            found.append((*head, Measured(**values)))
        except (ValueError, LookupError, TypeError, AttributeError):
            continue  # cut by a crash
    if not found:
        return None
    digest, round_, _ = found[-1]
    newest = {(f.task, f.metric): f for of, _, f in found if of == digest}
    return score_record(digest, round_, list(newest.values()))


def _name(text: str) -> str:
    return _NO_NAME.sub("-", text).lstrip("_.,-")[:64] or "unnamed"
