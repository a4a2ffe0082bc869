#!/usr/bin/env python
"""The effect of codings, slices and overlap on the loss at equal tokens, in one process.

Each cell trains a model of 0.26 M parameters on the bytes of Python's standard library, with one
way to exchange and one seed. The same seed means the same initial weights and the same text. A
cycle is 20 local steps in all cells, and experts are merged after the same cycles. Groups:

main      centralised, exact SPES, and the settings of the run files for home links: about 1/18 and
          1/33 of fp32 DiLoCo's bytes. "late" is for lines with 20 Mbit/s up, where a round takes
          most of the time of the overlapped steps
muon      the same training with Muon for matrices: centralised, exact, at home, with two owners
frontier  the other codings, whole rounds that wait, two owners, and slices without coding

Bytes are those of the 7B of configs/runs with N = 4, as a fraction of fp32 DiLoCo's, by the formula
of `swarm-plan`. The gap is the difference to centralised training. A finished cell is a line of
`--out` and is not computed again, so a killed script resumes where it was.

    python scripts/benchmarks/reproduce_wire_quality.py --list
    python scripts/benchmarks/reproduce_wire_quality.py --cells 'main/*' --plot out/wire_quality.svg
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from cells import Cell, Losses, gaps, interval, parsed, work_off
from plot_run import GRID, INK, LOSS, TRAFFIC, WIDTH, svg, text, ticks

from swarm.config import RunConfig, parse_config
from swarm.model.link_plan import Setting, cycle_bytes, setting_of

RUNS = Path(__file__).parents[2] / "configs" / "runs"
CYCLE = 20
"""H: local steps of a cycle."""
PEERS, SEQUENCES = 4, 16
"""N, and the sequences of all peers in a step."""
DILOCO = Setting("fp32", "fp32", owners=PEERS)


@dataclass(frozen=True)
class Scale:
    """The size of the cells."""

    steps: int
    hidden: int
    length: int
    held_out_bytes: int


FULL = Scale(steps=400, hidden=64, length=64, held_out_bytes=16_384)
QUICK = Scale(steps=20, hidden=16, length=16, held_out_bytes=1024)


@dataclass(frozen=True)
class Variant:
    """A way to exchange.

    Attributes:
        label: label in the table and the picture.
        shared: coding of the shared tensors.
        experts: coding of the experts.
        rounds: rounds of a cycle. Each round averages all shared tensors.
        experts_every: rounds between two exchanges of an expert.
        owners: owners of an expert.
        delay: local steps until a round's result is here. 0: steps wait for the result.
        peers: 1 trains all on one machine, with the batches of all.
        optimizer: "adamw" or "muon".
        lr: learning rate of the optimizer, also for Muon's matrices.
    """

    label: str
    shared: str = "none"
    experts: str = "none"
    rounds: int = 1
    experts_every: int = 1
    owners: int = 1
    delay: int = 0
    peers: int = PEERS
    optimizer: str = "adamw"
    lr: float = 4e-3

    @property
    def overrides(self) -> tuple[str, ...]:
        """Settings of the variant in a run file."""
        value = "fp32" if self.experts == "none" else "bf16"
        return (
            f'wire.shared_coding="{self.shared}"',
            f'wire.experts="{value}"',
            f'wire.experts_coding="{self.experts}"',
            f"round.local_steps={CYCLE // self.rounds}",
            f"round.experts_every={self.experts_every}",
            f"round.stagger={str(self.rounds > 1).lower()}",
            f'round.overlap="{"round" if self.delay else "none"}"',
            f"ownership.owners_per_expert={self.owners}",
            f'optimizer.kind="{self.optimizer}"',
            f"optimizer.lr={self.lr}",
        )


VARIANTS = {
    "centralised": Variant("centralised", peers=1),
    "exact": Variant("exact SPES"),
    "home": Variant("shared b2, experts b1, 5 slices", "b2", "b1", 5, 5, delay=1),
    "home-half": Variant("shared b2, experts b1, 2 slices", "b2", "b1", 2, 2, delay=1),
    "home-late": Variant("shared b2, experts b1, 5 slices, late", "b2", "b1", 5, 5, delay=3),
    "centralised-muon": Variant("centralised, Muon", peers=1, optimizer="muon"),
    "centralised-muon-8e-3": Variant(
        "centralised, Muon at twice the rate", peers=1, optimizer="muon", lr=8e-3
    ),
    "exact-muon": Variant("exact SPES, Muon", optimizer="muon"),
    "home-muon": Variant(
        "shared b2, experts b1, 5 slices, Muon", "b2", "b1", 5, 5, delay=1, optimizer="muon"
    ),
    "home-muon-8e-3": Variant(
        "the same at twice the rate", "b2", "b1", 5, 5, delay=1, optimizer="muon", lr=8e-3
    ),
    "home-muon-16e-3": Variant(
        "at four times the rate", "b2", "b1", 5, 5, delay=1, optimizer="muon", lr=16e-3
    ),
    "two-owners-muon": Variant(
        "two owners, b1, 5 slices, Muon", "b1", "b1", 5, 5, owners=2, delay=1, optimizer="muon"
    ),
    "diloco": Variant("fp32 DiLoCo (R = N)", owners=PEERS),
    "slices": Variant("exact, 5 slices", rounds=5, experts_every=5),
    "b2": Variant("b2", "b2", "b2"),
    "b2-b1": Variant("shared b2, experts b1", "b2", "b1"),
    "b1": Variant("b1", "b1", "b1"),
    "b1-slices": Variant("b1, 4 slices", "b1", "b1", 4, 4, delay=1),
    "two-owners": Variant("two owners, b2, 5 slices", "b2", "b2", 5, 10, owners=2, delay=1),
}
GROUPS = {
    "main": (8, ("centralised", "exact", "home", "home-half", "home-late")),
    "muon": (4, tuple(name for name, each in VARIANTS.items() if each.optimizer == "muon")),
    "frontier": (3, tuple(list(VARIANTS)[12:])),
}
"""The number of seeds, and the variants."""


def cells() -> Iterator[Cell]:
    """All cells, the most informative first."""
    for group, (seeds, variants) in GROUPS.items():
        for seed in range(1, seeds + 1):
            yield from (Cell(group, variant, seed) for variant in variants)


def run_of(variant: Variant, seed: int, scale: Scale) -> RunConfig:
    """A cell's run file, which any swarm could train."""
    sequences = SEQUENCES // variant.peers
    overrides = (
        f"run.seed={seed}",
        f"run.peers={variant.peers}",
        f"run.rounds={scale.steps // (CYCLE // variant.rounds)}",
        f"model.hidden_size={scale.hidden}",
        f"model.moe_intermediate_size={scale.hidden}",
        "model.num_key_value_heads=4",
        f"data.sequence_length={scale.length}",
        f"data.validation_bytes={scale.held_out_bytes}",
        f"train.batch_tokens={sequences * scale.length}",
        f"train.micro_batch_sequences={min(4, sequences)}",
        'train.frozen="fp32"',
        f"optimizer.warmup_steps={scale.steps // 20}",
        f"optimizer.schedule_steps={scale.steps}",
        "merging.alpha=0.5",
        f"merging.interval_steps={CYCLE}",
        f"merging.decay_steps={scale.steps // 4}",
        *variant.overrides,
    )
    source = RUNS / "demo.toml"
    return parse_config(RunConfig, source.read_text(), source=str(source), overrides=overrides)


def share_of_diloco(variant: Variant) -> float:
    """Bytes of a peer in a cycle divided by those of fp32 DiLoCo, for the 7B."""
    source = RUNS / "spes_7b_home.toml"
    large = parse_config(
        RunConfig, source.read_text(), source=str(source), overrides=variant.overrides
    )
    setting = setting_of(large)
    sent = cycle_bytes(large, setting, PEERS) * variant.rounds / setting.rounds
    return sent / cycle_bytes(large, DILOCO, PEERS)


def of_cell(cell: Cell, scale: Scale) -> tuple[RunConfig, int]:
    """Run file and delay of a cell."""
    variant = VARIANTS[cell.variant]
    return run_of(variant, cell.seed, scale), variant.delay


def spread(values: Sequence[float]) -> str:
    """The mean, and for several values its 95 % interval."""
    if len(values) < 2:
        return "".join(f"{value:+.2f}" for value in values)
    low, high = interval(values)
    return f"{statistics.mean(values):+.2f} [{low:+.2f}..{high:+.2f}]"


def table(losses: Losses) -> str:
    """A row per variant that has a finished cell."""
    columns = (
        "exchange",
        "bytes",
        "n",
        "held-out loss",
        "against exact SPES, %",
        "gap, %",
        "to Muon, %",
    )
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, variant in VARIANTS.items():
        found = list(losses.get(name, {}).values())
        if not found:
            continue
        alone = variant.peers == 1
        share = "" if alone else f"1/{1 / share_of_diloco(variant):.1f}"
        against = "" if name == "exact" else spread(gaps(losses, name, "exact"))
        gap = "" if name == "centralised" else spread(gaps(losses, name, "centralised"))
        is_muon = variant.optimizer == "muon" and not alone
        muon = spread(gaps(losses, name, "centralised-muon")) if is_muon else ""
        rows.append(
            f"| {variant.label} | {share} | {len(found)} | {statistics.mean(found):.4f} | "
            f"{against} | {gap} | {muon} |"
        )
    return "\n".join(rows)


HEIGHT, LEFT, RIGHT, TOP, FOOT = 420, 64, 120, 44, 64


def picture(losses: Losses) -> str:
    """Loss against exact SPES over the bytes: a dot per seed, a line at their mean."""
    shown = {
        name: gaps(losses, name, "exact")
        for name, variant in VARIANTS.items()
        if variant.peers > 1 and gaps(losses, name, "exact")
    }
    marks = ticks(
        min([-1, *(gap for found in shown.values() for gap in found)]),
        max([1, *(gap for found in shown.values() for gap in found)]),
        8,
    )
    bottom, most = HEIGHT - FOOT, 7  # 1/128

    def x(share: float) -> float:
        return LEFT - math.log2(share) / most * (WIDTH - LEFT - RIGHT)

    def y(gap: float) -> float:
        return bottom - (gap - marks[0]) / (marks[-1] - marks[0]) * (bottom - TOP)

    title = "held-out loss against exact SPES, %, by bytes of a cycle"
    drawn = [text(16, 20, title, anchor="start", size=14)]
    for mark in marks:
        line = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"'
        drawn += [
            f'<line {line} stroke="{GRID}"/>',
            text(LEFT - 8, y(mark) + 4, f"{mark:g}", anchor="end"),
        ]
    for power in range(most + 1):
        drawn.append(text(x(2.0**-power), bottom + 20, f"1/{2**power}"))
    for name, found in shown.items():
        variant, mean = VARIANTS[name], statistics.mean(found)
        at, colour = x(share_of_diloco(variant)), TRAFFIC if variant.delay else LOSS
        drawn += [
            f'<circle cx="{at:.1f}" cy="{y(gap):.1f}" r="3" fill="{colour}" opacity="0.5"/>'
            for gap in found
        ]
        line = f'x1="{at - 8:.1f}" x2="{at + 8:.1f}" y1="{y(mean):.1f}" y2="{y(mean):.1f}"'
        drawn.append(f'<line {line} stroke="{INK}" stroke-width="2"/>')
        drawn.append(text(at + 10, y(mean) + 4, variant.label, anchor="start", size=10))
    words = "bytes of fp32 DiLoCo's; a dot is a seed, a line their mean; green: overlaps the steps"
    drawn.append(text(LEFT, HEIGHT - 12, words, anchor="start"))
    return svg("What a thin wire does to the loss, at a small scale", HEIGHT, drawn)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains the requested cells that do not exist yet, then prints the table."""
    asked = parsed(arguments, __doc__.splitlines()[0], "wire_quality.jsonl")
    torch.set_num_threads(1)
    scale = QUICK if asked.quick else FULL
    losses = work_off(asked, list(cells()), lambda cell: of_cell(cell, scale))
    if not asked.list:
        print(table(losses))
    if asked.plot:
        asked.plot.write_text(picture(losses))


if __name__ == "__main__":
    main()
