#!/usr/bin/env python
"""What the loss of an expert's owner costs, and how much of it its Adam moments are.

Four peers of the demo model in one process, fp32 throughout, in the plain arithmetic of SPES: local
steps, a mean of the shared tensors, each expert from its owner. In every fifth round one of them is
lost. What it held is gone; nobody renews its experts until they are adopted, two rounds later, by
the swarm's own rules (silent owners, `assign`), and it comes back then without experts. Beside the
run without loss there are, on the same data and seed:

backup    a copy of the moments from every second round, and hand-over where an owner lives
zero      moments of an expert that changes hands are zero
warmup    the same, and the new owner's first steps on it are scaled from 1/N to 1

Each prints one JSON line; `--table FILE...` makes the table from such lines.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from swarm.config import RunConfig, parse_config
from swarm.data.corpus import open_corpus
from swarm.data.held_out import HeldOut, held_out_documents, measured_on
from swarm.data.loader import Loader
from swarm.data.shards import Shards, open_shards
from swarm.data.tokenise import BYTE
from swarm.experts import expert_shapes, shared_shapes
from swarm.model.initialise import initial_tensors
from swarm.protocol.ownership import assign
from swarm.train.resident import ResidentEngine
from swarm.train.schedule import learning_rate

TEXT = ((0, 2**40),)
NUM_PEERS = 4
LOST_EVERY, LOST_ROUNDS, BACKUP_EVERY = 5, 2, 2
WARMUP_STEPS = 10
VARIANTS = ("none", "backup", "zero", "warmup")
Named = dict[str, Tensor]


@dataclass
class Swarm:
    """Four peers, their agreed model, and who owns what."""

    run: RunConfig
    variant: str
    engines: list[ResidentEngine]
    agreed: Named
    owners: dict[int, tuple[str, ...]]
    backups: dict[int, Named] = field(default_factory=dict)
    warming: dict[int, int] = field(default_factory=dict)
    """Expert -> steps since it was taken up, while its steps are scaled."""

    @classmethod
    def found(cls, run: RunConfig, variant: str) -> Swarm:
        """Everybody with the initial model and its share of the experts."""
        experts = range(run.model.num_experts)
        names = [*shared_shapes(run.model), *(n for e in experts for n in names_of(run, e))]
        swarm = cls(run, variant, [], initial_tensors(run, names), {})
        swarm.engines = [ResidentEngine(run) for _ in range(NUM_PEERS)]
        for engine in swarm.engines:
            engine.write(swarm.agreed)
        swarm.assign_owners(set(range(NUM_PEERS)), lost=[])
        return swarm

    def owned_by(self, peer: int) -> list[int]:
        """The experts of a peer."""
        return [e for e, owners in sorted(self.owners.items()) if owners == (str(peer),)]

    def assign_owners(self, present: set[int], lost: list[int]) -> None:
        """Ownership by the swarm's rules, and what becomes of the moments of what moves."""
        before = self.owners
        self.owners = assign(
            before,
            {str(peer): 1.0 for peer in range(NUM_PEERS)},
            [str(peer) for peer in sorted(present)],
            stale=lost,
            owners_per_expert=1,
            num_experts=self.run.model.num_experts,
            seed="bench",
        ).owners
        moved = {e: before.get(e) for e in self.owners if before.get(e) != self.owners[e]}
        moments = {e: self._moments(e, owner, lost) for e, owner in moved.items() if owner}
        for peer, engine in enumerate(self.engines):
            engine.own(self.owned_by(peer))
        for expert, given in moments.items():
            self.engines[int(self.owners[expert][0])].write_moments(given)
            self.warming |= {expert: 0} if self.variant == "warmup" else {}

    def _moments(self, expert: int, owner: tuple[str, ...], lost: list[int]) -> Named:
        living = self.engines[int(owner[0])].read_moments(names_of(self.run, expert))
        if self.variant == "backup":
            return self.backups[expert] if expert in lost else living
        return {name: torch.zeros_like(tensor) for name, tensor in living.items()}

    def train(self, peer: int, loader: Loader, step: int) -> None:
        """A peer's local steps of a round."""
        engine, warming = self.engines[peer], set(self.warming) & set(self.owned_by(peer))
        for now in range(step, step + self.run.round.local_steps):
            before = {e: engine.read(names_of(self.run, e)) for e in sorted(warming)}
            tokens_BT1 = loader.read(TEXT, NUM_PEERS * now + peer, self.run.train.batch_tokens)
            engine.step(tokens_BT1, lr=learning_rate(now, self.run))
            for expert, values in before.items():
                self._scale(engine, expert, values)
            warming &= set(self.warming)

    def _scale(self, engine: ResidentEngine, expert: int, before: Named) -> None:
        self.warming[expert] += 1
        share = self.warming[expert] / WARMUP_STEPS
        after = engine.read(before)
        engine.write({n: before[n] + share * (after[n] - before[n]) for n in before})
        if share >= 1:
            del self.warming[expert]

    def agree(self, present: set[int]) -> None:
        """The round: means of shared tensors, experts from owners that are there."""
        shared = list(shared_shapes(self.run.model))
        values = [self.engines[peer].read(shared) for peer in sorted(present)]
        for name in shared:
            total = values[0][name]
            for value in values[1:]:
                total = total + value[name]
            self.agreed[name] = total / len(values)
        for expert, (owner,) in self.owners.items():
            if int(owner) in present:
                self.agreed |= self.engines[int(owner)].read(names_of(self.run, expert))
        for engine in self.engines:
            engine.write(self.agreed)

    def back_up(self) -> None:
        """Copies of all moments, as their holders would have them."""
        for expert, (owner,) in self.owners.items():
            names = names_of(self.run, expert)
            self.backups[expert] = self.engines[int(owner)].read_moments(names)


def names_of(run: RunConfig, expert: int) -> list[str]:
    """The tensors of an expert."""
    return list(expert_shapes(run.model, expert))


def losses_of(run: RunConfig, variant: str, shards: Shards, held_out: HeldOut) -> Iterator[float]:
    """Held-out loss of the agreed state after each round."""
    swarm = Swarm.found(run, variant)
    loader = Loader(shards, run)
    lost, lost_since = -1, 0
    for number in range(1, run.run.rounds + 1):
        present = set(range(NUM_PEERS))
        if variant != "none" and number >= LOST_EVERY:
            if number % LOST_EVERY == 0:
                lost, lost_since = (number // LOST_EVERY) % NUM_PEERS, number
            if number - lost_since < LOST_ROUNDS:
                present -= {lost}
        step = (number - 1) * run.round.local_steps
        for peer in sorted(present):
            swarm.train(peer, loader, step)
        swarm.agree(present)
        if number % BACKUP_EVERY == 0 and len(present) == NUM_PEERS:
            swarm.back_up()
        is_adopted = lost >= 0 and number - lost_since == LOST_ROUNDS - 1
        swarm.assign_owners(present, lost=swarm.owned_by(lost) if is_adopted else [])
        yield held_out.mean(
            lambda tokens, scored: swarm.engines[0].evaluate(
                tokens, scored_BT=scored, agreed=swarm.agreed.__getitem__
            )
        )
    loader.close()


def table(paths: list[Path]) -> str:
    """Per variant: held-out loss at the end and its distance from no loss, over paired seeds."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    by_variant: dict[str, dict[int, list[float]]] = {}
    for line in lines:
        by_variant.setdefault(line["variant"], {})[line["seed"]] = line["losses"]
    base = by_variant["none"]
    rows = ["| moments | final | worse than no loss, final | mean of last half | worst round |"]
    rows += ["|---|---|---|---|---|"]
    for variant in VARIANTS:
        runs: Mapping[int, list[float]] = by_variant[variant]
        seeds = sorted(runs)
        gaps = [[x - y for x, y in zip(runs[s], base[s], strict=True)] for s in seeds]
        half = len(gaps[0]) // 2
        final = statistics.mean(runs[s][-1] for s in seeds)
        ends = [gap[-1] for gap in gaps]
        halves = [statistics.mean(gap[half:]) for gap in gaps]
        worst = max(max(gap) for gap in gaps)
        rows.append(
            f"| {variant} | {final:.4f} | {statistics.mean(ends):+.4f} "
            f"[{min(ends):+.4f}..{max(ends):+.4f}] | {statistics.mean(halves):+.4f} "
            f"[{min(halves):+.4f}..{max(halves):+.4f}] | {worst:+.4f} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Runs one seed of some variants, or makes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--local-steps", type=int, default=8)
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE")
    asked = parser.parse_args()
    if asked.table:
        print(table(asked.table))
        return
    torch.set_num_threads(1)
    overrides = [
        f"run.seed={asked.seed}", f"run.rounds={asked.rounds}",
        f"round.local_steps={asked.local_steps}", "merging.alpha=0.0", "wire.experts='fp32'",
        "train.frozen='fp32'", "data.validation_bytes=8192",
    ]  # fmt: skip
    file = Path(__file__).parent.parent / "configs" / "runs" / "demo.toml"
    run = parse_config(RunConfig, file.read_text(), source=str(file), overrides=overrides)
    corpus = open_corpus(None)
    documents = held_out_documents(corpus.documents(), run.data.validation_bytes)
    held_out = measured_on(BYTE, documents, run.data.sequence_length)
    shards = open_shards(corpus, Path("out") / "bench_adoption", BYTE)
    for variant in asked.variants:
        losses = [round(x, 6) for x in losses_of(run, variant, shards, held_out)]
        print(json.dumps({"variant": variant, "seed": asked.seed, "losses": losses}))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
