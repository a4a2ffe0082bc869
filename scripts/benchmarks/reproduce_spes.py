#!/usr/bin/env python
"""Reproduces the orderings of the SPES paper at a small scale, in one process without a network.

Each cell trains a model of 0.26 M parameters on the bytes of Python's standard library, with one
variant of the method and one seed. The same seed means the same initial weights and the same text
in all variants, and all take the same number of tokens and steps. Groups of variants:

main     all on one machine ("centralised": one peer with the batches of all), FedAvg (every peer
         trains all, R = N: DiLoCo with an outer SGD of rate 1), SPES, SPES with expert merging
H        local steps of a round, without merging
N        peers that share the same batch, without merging
alpha    strength of the merging
K        donors of an expert in a merge
lr       learning rates, of the three methods

A finished cell is a line of `--out` and is not computed again, so a killed script resumes. A cell
is valid as long as its run configuration does not change.

    python scripts/benchmarks/reproduce_spes.py --list
    python scripts/benchmarks/reproduce_spes.py --cells 'main/*' 'H/*' --plot out/reproduce_spes.svg
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from cells import Cell, Losses, gaps, parsed, work_off
from conditions import WAITING, Conditions
from plot_run import GRID, INK, LOSS, TRAFFIC, WIDTH, svg, text, ticks

from swarm.config import RunConfig, parse_config

DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.toml"
SEEDS = (1, 2, 3)
PEERS, SEQUENCES = 4, 16
"""N of the base, and the sequences of all peers in a step."""


@dataclass(frozen=True)
class Scale:
    """The size of the cells."""

    steps: int
    local_steps: int
    hidden: int
    length: int
    held_out_bytes: int
    lr: float = 4e-3


FULL = Scale(steps=160, local_steps=4, hidden=64, length=64, held_out_bytes=16_384)
QUICK = Scale(steps=16, local_steps=2, hidden=16, length=16, held_out_bytes=1024)


@dataclass(frozen=True)
class Variant:
    """Differences from the base, which is SPES without merging.

    Attributes:
        label: label in the table and the picture.
        peers: N.
        owners: R. None for all.
        h_times: H as a multiple of the base's.
        alpha: alpha0 of the merging. 0 for none.
        top_k: K of the merging.
        lr: learning rate as a multiple of the base's.
    """

    label: str
    peers: int = PEERS
    owners: int | None = 1
    h_times: int = 1
    alpha: float = 0.0
    top_k: int = 4
    lr: float = 1


MERGING = 0.25
"""alpha0 with which the nine merges of the base have the paper's sum of alphas, 1.1."""
VARIANTS = {
    "centralised": Variant("centralised", peers=1),
    "fedavg": Variant("FedAvg (R = N)", owners=None),
    "spes": Variant("SPES, no merging"),
    "spes-merging": Variant("SPES, merging", alpha=MERGING),
    "double-h": Variant("H = 8", h_times=2),
    "fourfold-h": Variant("H = 16", h_times=4),
    "eightfold-h": Variant("H = 32", h_times=8),
    "two-peers": Variant("N = 2", peers=2),
    "eight-peers": Variant("N = 8", peers=8),
    "weak-merging": Variant("alpha = 0.1", alpha=0.1),
    "strong-merging": Variant("alpha = 0.5", alpha=0.5),
    "one-donor": Variant("K = 1", alpha=MERGING, top_k=1),
    "all-donors": Variant("K = 7", alpha=MERGING, top_k=7),
    "centralised-half-lr": Variant("centralised, half lr", peers=1, lr=0.5),
    "centralised-double-lr": Variant("centralised, double lr", peers=1, lr=2),
    "fedavg-half-lr": Variant("FedAvg, half lr", owners=None, lr=0.5),
    "fedavg-double-lr": Variant("FedAvg, double lr", owners=None, lr=2),
    "spes-half-lr": Variant("SPES, half lr", lr=0.5),
    "spes-double-lr": Variant("SPES, double lr", lr=2),
}
GROUPS = {
    "main": ("centralised", "fedavg", "spes", "spes-merging"),
    "H": ("double-h", "fourfold-h", "eightfold-h"),
    "N": ("two-peers", "eight-peers"),
    "alpha": ("weak-merging", "strong-merging"),
    "K": ("one-donor", "all-donors"),
    "lr": tuple(name for name in VARIANTS if name.endswith("-lr")),
}


def cells() -> Iterator[Cell]:
    """All cells, the most informative first."""
    for group, variants in GROUPS.items():
        for seed in SEEDS:
            yield from (Cell(group, variant, seed) for variant in variants)


def run_of(variant: Variant, seed: int, scale: Scale) -> RunConfig:
    """A cell's run file, which any swarm could train."""
    local_steps = scale.local_steps * variant.h_times
    sequences = SEQUENCES // variant.peers
    overrides = (
        f"run.seed={seed}",
        f"run.peers={variant.peers}",
        f"run.rounds={scale.steps // local_steps}",
        f"model.hidden_size={scale.hidden}",
        f"model.moe_intermediate_size={scale.hidden}",
        "model.num_key_value_heads=4",
        f"data.sequence_length={scale.length}",
        f"data.validation_bytes={scale.held_out_bytes}",
        f"train.batch_tokens={sequences * scale.length}",
        f"train.micro_batch_sequences={min(4, sequences)}",
        'train.frozen="fp32"',
        'optimizer.kind="adamw"',
        f"optimizer.lr={scale.lr * variant.lr}",
        f"optimizer.warmup_steps={scale.steps // 20}",
        f"optimizer.schedule_steps={scale.steps}",
        f"round.local_steps={local_steps}",
        f"ownership.owners_per_expert={variant.owners or variant.peers}",
        f"merging.alpha={variant.alpha}",
        f"merging.top_k={variant.top_k}",
        f"merging.interval_steps={local_steps}",
        f"merging.decay_steps={scale.steps // 4}",
        'wire.experts="fp32"',
    )
    return parse_config(RunConfig, DEMO.read_text(), source=str(DEMO), overrides=overrides)


def of_cell(cell: Cell, scale: Scale) -> tuple[RunConfig, Conditions]:
    """Run file and conditions of a cell."""
    return run_of(VARIANTS[cell.variant], cell.seed, scale), WAITING


def spread(values: Sequence[float]) -> str:
    """The mean, and the smallest and largest."""
    if not values:
        return ""
    return f"{statistics.mean(values):+.2f} [{min(values):+.2f}..{max(values):+.2f}]"


def base_of(group: str) -> str:
    """The variant from which the variants of a group differ in one setting."""
    return "spes-merging" if group in {"alpha", "K"} else "spes"


def table(losses: Losses) -> str:
    """A row per variant that has a finished cell."""
    rows = [
        "| group | variant | n | held-out loss | against centralised, % | against the base, % |",
        "|---|---|---|---|---|---|",
    ]
    for group, variants in GROUPS.items():
        for name in variants:
            found = list(losses.get(name, {}).values())
            if not found:
                continue
            base = base_of(group)
            against = "" if name == base else spread(gaps(losses, name, base))
            alone = "" if name == "centralised" else spread(gaps(losses, name, "centralised"))
            rows.append(
                f"| {group} | {VARIANTS[name].label} | {len(found)} | "
                f"{statistics.mean(found):.4f} | {alone} | {against} |"
            )
    return "\n".join(rows)


LABELS, RIGHT, ROW, TOP, FOOT = 190, 24, 24, 44, 48


def picture(losses: Losses) -> str:
    """Gaps to centralised training: a dot per seed, a line at their mean."""
    shown = [
        (group, name, gaps(losses, name, "centralised"))
        for group, variants in GROUPS.items()
        for name in variants
        if name != "centralised" and gaps(losses, name, "centralised")
    ]
    height = TOP + ROW * len(shown) + FOOT
    marks = ticks(
        min([0, *(gap for *_, found in shown for gap in found)]),
        max([1, *(gap for *_, found in shown for gap in found)]),
        8,
    )
    span = WIDTH - LABELS - RIGHT

    def x(gap: float) -> float:
        return LABELS + (gap - marks[0]) / (marks[-1] - marks[0]) * span

    bottom = TOP + ROW * len(shown)
    drawn = [text(16, 20, "held-out loss above centralised, %", anchor="start", size=14)]
    for mark in marks:
        line = f'x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{TOP - 8}" y2="{bottom}"'
        drawn += [f'<line {line} stroke="{GRID}"/>', text(x(mark), bottom + 18, f"{mark:g}")]
    for index, (group, name, found) in enumerate(shown):
        y, mean = TOP + ROW * (index + 0.5), statistics.mean(found)
        colour = TRAFFIC if group == "main" else LOSS
        drawn.append(text(LABELS - 12, y + 4, VARIANTS[name].label, anchor="end"))
        drawn += [
            f'<circle cx="{x(gap):.1f}" cy="{y:.1f}" r="4" fill="{colour}" opacity="0.6"/>'
            for gap in found
        ]
        line = f'x1="{x(mean):.1f}" x2="{x(mean):.1f}" y1="{y - 9:.1f}" y2="{y + 9:.1f}"'
        drawn.append(f'<line {line} stroke="{INK}" stroke-width="2"/>')
    seeds = max((len(found) for *_, found in shown), default=0)
    words = f"a dot is a seed (at most {seeds}), a line their mean; 0 is centralised training"
    drawn.append(text(WIDTH - RIGHT, height - 10, words, anchor="end"))
    return svg("SPES at a small scale: held-out loss above centralised training", height, drawn)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains the requested cells that do not exist yet, then prints the table."""
    asked = parsed(arguments, __doc__.splitlines()[0], Path("out/reproduce_spes.jsonl"))
    torch.set_num_threads(1)
    scale = QUICK if asked.quick else FULL
    losses = work_off(asked, lambda _: list(cells()), lambda cell: of_cell(cell, scale))
    if not asked.list:
        print(table(losses))
    if asked.plot:
        asked.plot.write_text(picture(losses))


if __name__ == "__main__":
    main()
