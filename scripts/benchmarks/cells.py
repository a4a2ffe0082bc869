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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from conditions import WAITING, Conditions
from in_process import InProcessSwarm

from swarm.config import RunConfig
from swarm.data.corpus import Corpus, open_corpus, size_of
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
        self._shards: dict[tuple[int, int], Shards] = {}
        self._documents: list[bytes] = []

    def fingerprint(self) -> str:
        """Fingerprint of the files and their contents."""
        return self._corpus.fingerprint()[:16]

    def shards(self, part: int = 0, parts: int = 1) -> Shards:
        """One of several parts of the training text with nearly equal sizes, in file order."""
        if (part, parts) not in self._shards:
            corpus = _part_of(self._corpus, part, parts)
            cache = self._cache / f"{part}-of-{parts}"
            self._shards[part, parts] = open_shards(corpus, cache, BYTE)
        return self._shards[part, parts]

    def held_out(self, run: RunConfig) -> HeldOut:
        """The held-out text of a run."""
        if not self._documents:
            limit = run.data.validation_bytes
            self._documents = held_out_documents(self._corpus.documents(), limit)
        return measured_on(BYTE, self._documents, run.data.sequence_length)


def _part_of(corpus: Corpus, part: int, parts: int) -> Corpus:
    if parts == 1:
        return corpus
    ends, whole = [0.0], size_of(corpus.root, corpus.files)
    for file in corpus.files:
        ends.append(ends[-1] + size_of(corpus.root, (file,)) / whole)
    files = tuple(
        file
        for file, end in zip(corpus.files, ends, strict=False)
        if part <= end * parts < part + 1
    )
    return replace(corpus, files=files)


def train(run: RunConfig, read: Text, conditions: Conditions) -> dict[str, Any]:
    """Trains a cell. Returns its line of the results."""
    began_s, worked_s = time.monotonic(), time.process_time()
    held_out, losses = read.held_out(run), {}
    parts = run.run.peers if conditions.own_texts else 1
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(Loader(read.shards(part, parts), run)) for part in range(parts)
        ]
        swarm = InProcessSwarm(run, loaders if parts > 1 else loaders[0], conditions)
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


def key_of(run: RunConfig, conditions: Conditions = WAITING) -> str:
    """The configuration of a cell."""
    usual = asdict(WAITING)
    other = [f"{k}={v}" for k, v in asdict(conditions).items() if v != usual[k]]
    return " ".join([run.fingerprint()[:16], *other])


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


Losses = Mapping[str, Mapping[int, float]]
"""The last held-out loss by variant and seed."""
CellOf = Callable[[Cell], tuple[RunConfig, Conditions]]
"""Gives the run file and the conditions of a cell."""


class Results:
    """The file of finished trainings. A line that a kill has cut short is removed.

    A line is found by its name, its configuration and its text, whatever the program's version.
    Each line has the commit of its training.
    """

    def __init__(self, path: Path, corpus: str | None) -> None:
        """Reads the lines of a text, by its fingerprint.

        None is for tables alone: reads the lines of any text, configuration and version.
        """
        self._path, self._corpus = path, corpus
        whole = path.read_bytes() if path.exists() else b""
        kept = whole[: whole.rfind(b"\n") + 1]
        if kept != whole:
            path.write_bytes(kept)
        lines = [json.loads(line) for line in kept.splitlines()]
        # A line without a text is older than this field.
        ours = [line for line in lines if corpus is None or line.get("corpus") == corpus]
        self._found = {self._key(line["cell"], line["run"]): line for line in ours}
        self._asked, self._added = set[tuple[str, str]](), set[tuple[str, str]]()

    def get(self, name: str, key: str) -> dict[str, Any] | None:
        """The line of a training with this configuration and text, if there is one."""
        self._asked.add(self._key(name, key))
        return self._found.get(self._key(name, key))

    def _key(self, name: str, key: str) -> tuple[str, str]:
        return name, "" if self._corpus is None else key

    def add(self, name: str, key: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Stores the result of a training. Returns its line."""
        line = {"cell": name, "run": key, "corpus": self._corpus, "commit": commit(), **values}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._found[self._key(name, key)] = line
        self._added.add(self._key(name, key))
        return line

    def losses(self, plan: Callable[[Losses], Sequence[Cell]], cell_of: CellOf) -> Losses:
        """The last held-out loss of each finished cell of a plan."""
        found: dict[str, dict[int, float]] = {}
        while True:
            size = sum(map(len, found.values()))
            for cell in plan(found):
                line = self.get(cell.name, key_of(*cell_of(cell)))
                if line:
                    loss = list(line["losses"].values())[-1]
                    found.setdefault(cell.variant, {})[cell.seed] = loss
            if sum(map(len, found.values())) == size:
                return found

    def reused(self) -> str:
        """The number of requested trainings that existed already, by their commits."""
        there = self._asked & self._found.keys()
        commits = Counter(self._found[each]["commit"] for each in there - self._added)
        shown = [f"{count} of {made or 'no commit'}" for made, count in sorted(commits.items())]
        said = f"{commits.total()} of {len(there)} trainings are of earlier calls"
        return f"{said}: {', '.join(shown)}" if shown else said


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


def parsed(arguments: Sequence[str] | None, description: str, out: Path) -> argparse.Namespace:
    """The options of a script. `out` is the default file of its results."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--list", action="store_true", help="of cells and whether they are done")
    parser.add_argument(
        "--cells", nargs="*", default=["*"], metavar="PATTERN", help="which; none: the table alone"
    )
    parser.add_argument("--plot", type=Path, metavar="SVG", help="writes the picture")
    parser.add_argument("--quick", action="store_true", help="cells of a second: says nothing")
    parser.add_argument("--corpus", help="folder of text; by default Python's standard library")
    parser.add_argument("--out", type=Path, default=out, help="finished cells")
    parser.add_argument("--cache", type=Path, default=Path("out/tokens"), help="of the tokens")
    parser.add_argument("--processes", type=int, default=1, help="cells trained at a time")
    asked = parser.parse_args(arguments)
    if asked.quick and asked.out == out:
        asked.out = Path("out") / f"quick_{out.name}"
    return asked


def work_off(
    asked: argparse.Namespace, plan: Callable[[Losses], Sequence[Cell]], cell_of: CellOf
) -> Losses:
    """Trains the requested cells that do not exist yet, or lists them.

    Args:
        asked: the result of `parsed`.
        plan: all cells that are wanted when these losses are known, in order. More losses may add
            cells, such as those with the best learning rate.
        cell_of: gives the run file and the conditions of a cell.

    Returns:
        The losses of all finished cells.
    """
    text = (asked.corpus, asked.cache)
    results = Results(asked.out, Text(*text).fingerprint() if asked.cells else None)
    while True:
        found = results.losses(plan, cell_of)
        wanted = [
            cell
            for cell in plan(found)
            if any(fnmatch(cell.name, pattern) for pattern in asked.cells)
        ]
        missing = [
            cell for cell in wanted if results.get(cell.name, key_of(*cell_of(cell))) is None
        ]
        if asked.list:
            for cell in wanted:
                print(f"{cell.name}{'' if cell in missing else '  done'}")
            return found
        if not missing:
            print(results.reused())
            return found
        for cell, values in _trained(missing, cell_of, text, asked.processes):
            line = results.add(cell.name, key_of(*cell_of(cell)), values)
            print(json.dumps(line), flush=True)


def _trained(
    cells: Sequence[Cell], cell_of: CellOf, text: tuple[str | None, Path], processes: int
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Cells with their results, as they finish."""
    if processes == 1:
        yield from ((cell, _trained_one(*cell_of(cell), text)) for cell in cells)
        return
    with ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        jobs = {pool.submit(_trained_one, *cell_of(cell), text): cell for cell in cells}
        for job in as_completed(jobs):
            yield jobs[job], job.result()


def _trained_one(
    run: RunConfig, conditions: Conditions, text: tuple[str | None, Path]
) -> dict[str, Any]:
    return train(run, _text_of(*text), conditions)


_text_of = functools.cache(Text)
