"""Scores of exported models: as lines of a file, and as what is published."""

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
        task: what was measured, such as `swarm_held_out` or `arc_easy`.
        metric: how, such as `bits_per_byte` or `acc`.
        value: finite.
        samples: documents or questions behind it; None: not known.
    """

    task: str
    metric: str
    value: float
    samples: int | None


def append_scores(
    path: Path, digest: Digest, round_: int, at: float, measured: Sequence[Measured]
) -> None:
    """Adds a line for each score to a file.

    A line that a crash has cut is the last one, and is ended before others are added.

    Args:
        path: made when missing.
        digest: of the manifest whose model was measured.
        round_: of that manifest.
        at: seconds since 1970.
        measured: the figures.

    Raises:
        OSError: the disk refused.
    """
    head = {"manifest_digest": digest, "round": round_, "at": round(at, 3)}
    lines = [json.dumps(head | asdict(figure)) + "\n" for figure in measured]
    durable.append_lines(path, "".join(lines).encode())


def score_record(digest: Digest, round_: int, measured: Sequence[Measured]) -> ScoreRecord | None:
    """What can be published of the figures: the first ones, under names that records may have.

    A value that is not finite or beyond `MAX_REAL`, as a perplexity may be, is left out: readers
    would refuse the whole record for it. So is one of an unknown number of samples, and of none.
    """
    scores = [
        Score(digest, round_, _name(figure.task), _name(figure.metric), figure.value, count)
        for figure in measured
        if abs(figure.value) <= MAX_REAL and (count := figure.samples)
    ]
    return ScoreRecord(tuple(scores[:MAX_SCORES])) if scores else None


def newest_scores(path: Path) -> ScoreRecord | None:
    """What a file says last: the scores of the model in its last whole line; None without one."""
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
