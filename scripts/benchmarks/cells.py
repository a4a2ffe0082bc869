"""Trainings that run once each: their results on disk, and comparisons.

A *cell* is one training of an `InProcessSwarm`: a variant of the method, and a seed. The same seed
means the same initial weights and the same text in all variants, so variants are compared in pairs.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from in_process import InProcessSwarm

from swarm.config import RunConfig
from swarm.data.corpus import open_corpus
from swarm.data.held_out import HeldOut, held_out_documents, measured_on
from swarm.data.loader import Loader
from swarm.data.shards import Shards, open_shards
from swarm.data.tokenizer import BYTE

MEASURED = 2
"""Number of measurements of the held-out loss, the last of them at the end."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
"""97.5 % quantiles of Student's distribution, with 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Cell:
    """One training."""

    group: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        """The name that `--cells` matches."""
        return f"{self.group}/{self.variant}/{self.seed}"


class Text:
    """The corpus as training and held-out tokens, read when the first cell needs them."""

    def __init__(self, corpus: str | None, cache: Path) -> None:
        self._corpus, self._cache = open_corpus(corpus), cache
        self._shards: Shards | None = None
        self._documents: list[bytes] = []

    def fingerprint(self) -> str:
        """Fingerprint of the files, without reading their content."""
        return self._corpus.fingerprint()

    def shards(self) -> Shards:
        """The training text."""
        if self._shards is None:
            self._shards = open_shards(self._corpus, self._cache, BYTE)
        return self._shards

    def held_out(self, run: RunConfig) -> HeldOut:
        """The held-out text of a run."""
        if not self._documents:
            limit = run.data.validation_bytes
            self._documents = held_out_documents(self._corpus.documents(), limit)
        return measured_on(BYTE, self._documents, run.data.sequence_length)


def train(run: RunConfig, read: Text, *, delay: int = 0) -> dict[str, Any]:
    """Trains a cell. Returns its line of the results. `delay` is as in `InProcessSwarm`."""
    began_s, worked_s = time.monotonic(), time.process_time()
    held_out, losses = read.held_out(run), {}
    with Loader(read.shards(), run) as loader:
        swarm = InProcessSwarm(run, loader, delay=delay)
        for number in range(run.run.rounds):
            swarm.round()
            if MEASURED * (number + 1) // run.run.rounds > MEASURED * number // run.run.rounds:
                losses[swarm.steps] = round(swarm.loss(held_out), 6)
    return {
        "losses": losses,
        "tokens": swarm.tokens,
        "merges": swarm.merges,
        "seconds": round(time.monotonic() - began_s, 1),
        "cpu_seconds": round(time.process_time() - worked_s, 1),
    }


def key_of(run: RunConfig, delay: int = 0) -> str:
    """The configuration of a cell."""
    return run.fingerprint() + (f" after {delay}" if delay else "")


@functools.cache
def commit() -> str:
    """The program's commit, with a + if files were changed since. Empty outside a clone."""
    command = ["git", "describe", "--always", "--abbrev=7", "--exclude=*", "--dirty=+"]
    folder = Path(__file__).parent
    try:
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return said.stdout.strip()


class Results:
    """The file of finished trainings. A line that a kill has cut short is removed.

    A line is found by its name, its configuration and its text, whatever the program's version.
    Each line has the commit of its training.
    """

    def __init__(self, path: Path, corpus: str) -> None:
        """Reads the lines of a text, by its fingerprint."""
        self._path, self._corpus = path, corpus
        whole = path.read_bytes() if path.exists() else b""
        kept = whole[: whole.rfind(b"\n") + 1]
        if kept != whole:
            path.write_bytes(kept)
        lines = [json.loads(line) for line in kept.splitlines()]
        # A line without a text is older than the field.
        ours = [line for line in lines if line.get("corpus") == corpus]
        self._found = {(line["cell"], line["run"]): line for line in ours}
        self._asked, self._added = set[tuple[str, str]](), set[tuple[str, str]]()

    def get(self, name: str, key: str) -> dict[str, Any] | None:
        """The line of a training with this configuration and text, if there is one."""
        self._asked.add((name, key))
        return self._found.get((name, key))

    def add(self, name: str, key: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Stores the result of a training. Returns its line."""
        line = {"cell": name, "run": key, "corpus": self._corpus, "commit": commit(), **values}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._found[name, key] = line
        self._added.add((name, key))
        return line

    def reused(self) -> str:
        """The number of requested trainings that existed already, by their commits."""
        there = self._asked & self._found.keys()
        commits = Counter(self._found[each]["commit"] for each in there - self._added)
        shown = [f"{count} of {made or 'no commit'}" for made, count in sorted(commits.items())]
        said = f"{commits.total()} of {len(there)} trainings are of earlier calls"
        return f"{said}: {', '.join(shown)}" if shown else said


Losses = Mapping[str, Mapping[int, float]]
"""The last held-out loss by variant and seed."""


def gaps(losses: Losses, variant: str, base: str) -> list[float]:
    """Percent above the loss of another variant with the same seed."""
    pairs = [
        (loss, losses[base][seed])
        for seed, loss in losses.get(variant, {}).items()
        if seed in losses.get(base, {})
    ]
    return [100 * (loss / other - 1) for loss, other in pairs]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of a mean of 2 to 12 values with normal errors."""
    middle = statistics.mean(values)
    half = T_95[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return middle - half, middle + half


def parsed(arguments: Sequence[str] | None, description: str, out: str) -> argparse.Namespace:
    """The options of a script. `out` is the default file of its results."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--list", action="store_true", help="of cells and whether they are done")
    parser.add_argument(
        "--cells", nargs="*", default=["*"], metavar="PATTERN", help="which; none: the table alone"
    )
    parser.add_argument("--plot", type=Path, metavar="SVG", help="writes the picture")
    parser.add_argument("--quick", action="store_true", help="cells of a second: says nothing")
    parser.add_argument("--corpus", help="folder of text; by default Python's standard library")
    parser.add_argument("--out", type=Path, default=Path("out") / out)
    return parser.parse_args(arguments)


def work_off(
    asked: argparse.Namespace,
    cells: Sequence[Cell],
    run_of: Callable[[Cell], tuple[RunConfig, int]],
) -> Losses:
    """Trains the requested cells that do not exist yet, or lists them.

    Args:
        asked: the result of `parsed`.
        cells: all cells, in order.
        run_of: gives the run file and the delay of a cell.

    Returns:
        The lines of all finished cells.
    """
    read = Text(asked.corpus, asked.out.parent / "tokens")
    results = Results(asked.out, read.fingerprint())
    for cell in cells:
        if not any(fnmatch(cell.name, pattern) for pattern in asked.cells):
            continue
        run, delay = run_of(cell)
        line = results.get(cell.name, key_of(run, delay))
        if asked.list:
            print(f"{cell.name}{'  done' if line else ''}")
        elif line is None:
            line = results.add(cell.name, key_of(run, delay), train(run, read, delay=delay))
            print(json.dumps(line), flush=True)
    found: dict[str, dict[int, float]] = {}
    for cell in cells:
        run, delay = run_of(cell)
        line = results.get(cell.name, key_of(run, delay))
        if line:
            found.setdefault(cell.variant, {})[cell.seed] = list(line["losses"].values())[-1]
    if not asked.list:
        print(results.reused())
    return found
