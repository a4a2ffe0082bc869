#!/usr/bin/env python
"""The effect of an adopted expert's Adam moments on the loss.

Two peers of a model of 21 M parameters (`--large`: 104 M) in one process, fp32 throughout, in the
plain arithmetic of SPES: local steps, a mean of the shared tensors, each expert from its owner.
After `BEFORE` rounds one peer leaves, and the other trains all experts further. In every variant
the other peer adopts the newest agreed values, and reads the same data with the same seed. Only the
moments differ:

handed    the newest, as a leaving owner hands them over
old 1     from one round before, as a backup of every round would have at best
old 5     from five rounds before
zero      none

Each variant of a seed appends a JSON line to `--out`. Existing results of equal settings and text
are not computed again. `--table` makes a table from these lines.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from cells import Results
from torch import Tensor

from swarm.config import RunConfig, parse_config
from swarm.data.corpus import Corpus, open_corpus
from swarm.data.held_out import HeldOut, held_out_documents, measured_on
from swarm.data.loader import Loader
from swarm.data.shards import open_shards
from swarm.data.tokenizer import BYTE
from swarm.experts import expert_shapes, shared_shapes
from swarm.model.cost import parameters
from swarm.model.initial_weights import initial_tensors
from swarm.train.engine.local_steps import learning_rate
from swarm.train.engine.resident import ResidentEngine

DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.toml"
TEXT = ((0, 2**40),)
BEFORE, STEPS = 16, 10
"""Rounds until one of the two peers leaves, and local steps of a round."""
MEASURED = (5, 10, 20, 40, 60)
"""Steps after the adoption at which the held-out loss is measured."""
AGES = {"handed": 0, "old 1": 1, "old 5": 5}
SETTINGS = (
    "model.hidden_size=256", "model.num_hidden_layers=4", "model.num_attention_heads=8",
    "model.num_key_value_heads=4", "model.num_experts=16", "model.moe_intermediate_size=416",
    f"run.rounds={BEFORE + MEASURED[-1] // STEPS}", f"round.local_steps={STEPS}",
    "optimizer.kind=adamw", "optimizer.lr=1e-3", "merging.alpha=0.0",
    "wire.experts='fp32'", "train.frozen='fp32'",
    "data.sequence_length=128", "data.validation_bytes=8192", "train.micro_batch_sequences=4",
)  # fmt: skip
LARGE = ("model.hidden_size=512", "model.moe_intermediate_size=1024")
Named = dict[str, Tensor]


class Pair:
    """Two peers that share the experts until the second peer leaves."""

    def __init__(self, run: RunConfig, loader: Loader) -> None:
        """Starts both peers with the initial model and their halves of the experts."""
        self.run, self.loader = run, loader
        experts = range(run.model.num_experts)
        self.halves = [[e for e in experts if e % 2 == peer] for peer in (0, 1)]
        self.agreed = initial_tensors(run, [*shared_shapes(run.model), *self.names(experts)])
        self.engines = [ResidentEngine(run), ResidentEngine(run)]
        for engine, half in zip(self.engines, self.halves, strict=True):
            engine.write(self.agreed)
            engine.own(half)
        self.moments: list[Named] = []
        """Moments of the second peer's experts after each round. Index -1 is the newest."""

    def names(self, experts: range | list[int]) -> list[str]:
        """The tensors of experts."""
        return [name for expert in experts for name in expert_shapes(self.run.model, expert)]

    def step(self, engine: ResidentEngine, number: int, peer: int) -> None:
        """The local step `number` of a peer, from 0."""
        tokens_BT1 = self.loader.read(TEXT, 2 * number + peer, self.run.train.batch_tokens)
        engine.step(tokens_BT1, lr=learning_rate(number, self.run))

    def train(self, number: int) -> None:
        """The round `number`, from 0: local steps of both, then the agreement."""
        for peer, engine in enumerate(self.engines):
            for step in range(number * STEPS, (number + 1) * STEPS):
                self.step(engine, step, peer)
        shared = list(shared_shapes(self.run.model))
        first, second = (engine.read(shared) for engine in self.engines)
        self.agreed |= {name: (first[name] + second[name]) / 2 for name in shared}
        for engine, half in zip(self.engines, self.halves, strict=True):
            self.agreed |= engine.read(self.names(half))
        for engine in self.engines:
            engine.write(self.agreed)
        self.moments.append(self.engines[1].read_moments(self.names(self.halves[1])))
        del self.moments[: -1 - max(AGES.values())]

    def losses(self, variant: str, held_out: HeldOut) -> Iterator[float]:
        """Held-out loss of the peer that stays after `MEASURED` steps with all experts."""
        engine = copy.deepcopy(self.engines[0])
        engine.own(range(self.run.model.num_experts))
        if variant in AGES:
            engine.write_moments(self.moments[-1 - AGES[variant]])
        for done in range(MEASURED[-1]):
            self.step(engine, BEFORE * STEPS + done, 0)
            if done + 1 in MEASURED:
                yield held_out.mean(
                    lambda tokens, scored: engine.evaluate(tokens, scored_BT=scored)
                )


def run_of(seed: int, *, large: bool) -> RunConfig:
    """The run of a seed."""
    overrides = [*SETTINGS, *(LARGE if large else ()), f"run.seed={seed}"]
    return parse_config(RunConfig, DEMO.read_text(), source=str(DEMO), overrides=overrides)


def losses_of(run: RunConfig, variants: Sequence[str], results: Results) -> dict[str, list[float]]:
    """The known losses of a seed, by variant."""
    key, seed = key_of(run), run.run.seed
    found = {variant: results.get(f"{variant}/{seed}", key) for variant in variants}
    return {variant: line["losses"] for variant, line in found.items() if line}


def key_of(run: RunConfig) -> str:
    """The settings on which a training depends, except its text."""
    return f"{run.fingerprint()}, {BEFORE} rounds, measured at {MEASURED}"


def measure(run: RunConfig, variants: Sequence[str], corpus: Corpus, results: Results) -> None:
    """Measures the missing variants of a seed."""
    there = losses_of(run, variants, results)
    left = [variant for variant in variants if variant not in there]
    if not left:
        return
    documents = held_out_documents(corpus.documents(), run.data.validation_bytes)
    held_out = measured_on(BYTE, documents, run.data.sequence_length)
    with Loader(open_shards(corpus, Path("out") / "bench_adoption", BYTE), run) as loader:
        pair = Pair(run, loader)
        for number in range(BEFORE):
            pair.train(number)
        for variant in left:
            losses = [round(loss, 6) for loss in pair.losses(variant, held_out)]
            found = {"losses": losses, "parameters": parameters(run.model).total}
            results.add(f"{variant}/{run.run.seed}", key_of(run), found)


def table(by_seed: Iterable[Mapping[str, Sequence[float]]], variants: Sequence[str]) -> str:
    """Held-out loss minus that of "zero" with the same seed: mean and standard error over seeds."""
    whole = [runs for runs in by_seed if len(runs) == len(variants)]
    head = " | ".join(f"{steps} steps" for steps in MEASURED)
    rows = [f"| moments (n = {len(whole)}) | {head} |", "|---" * (len(MEASURED) + 1) + "|"]
    if not whole:
        return "\n".join(rows)
    zero = [statistics.mean(runs["zero"][at] for runs in whole) for at in range(len(MEASURED))]
    rows.append("| zero: loss | " + " | ".join(f"{loss:.4f}" for loss in zero) + " |")
    for variant in (each for each in variants if each in AGES):
        cells = []
        for at in range(len(MEASURED)):
            gaps = [runs[variant][at] - runs["zero"][at] for runs in whole]
            error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
            cells.append(f"{statistics.mean(gaps):+.4f} ± {error:.4f}")
        rows.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    """Measures some seeds, or makes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--large", action="store_true", help="the model of 104 M parameters")
    parser.add_argument("--variants", nargs="+", choices=AGES, default=list(AGES), help="and zero")
    parser.add_argument("--out", type=Path, default=Path("out") / "bench_adoption.jsonl")
    parser.add_argument("--table", action="store_true", help="from the existing results")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    corpus = open_corpus(None)
    results = Results(asked.out, corpus.fingerprint())
    runs = [run_of(seed, large=asked.large) for seed in asked.seeds]
    variants = [*asked.variants, "zero"]
    if not asked.table:
        for run in runs:
            measure(run, variants, corpus, results)
    print(table((losses_of(run, variants, results) for run in runs), variants))
    print(results.reused())


if __name__ == "__main__":
    main()
