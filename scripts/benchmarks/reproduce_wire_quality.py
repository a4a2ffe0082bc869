#!/usr/bin/env python
"""Held-out loss of ways to exchange and of optimizers at equal tokens, in one process.

Each cell trains a small model on the bytes of Python's standard library, with 20 tokens per
parameter, with one method, learning rate and seed. The same seed means the same initial weights and
the same text. All peers together read the same batches in all cells of a size. Groups:

headline   centralised training, and the settings of the run files for home links, with AdamW and
           with Muon. 4 peers
exchanges  exact SPES, averaging of everything (R = N), and fewer slices
recipes    the home setting with Muon, with one change each
residents  peers with a part of the experts in memory
eight      8 peers
sizes      the price of experts that see their owner's tokens alone, by the size of the model

A method with learning rates of its own is trained with half, one and two times the base rate, and
further while the best is at an end, with seeds that no result uses. Its other cells have the best
rate. A recipe has the rate of the method that it changes.

Bytes are those of the 7B of configs/runs, as a fraction of fp32 DiLoCo's, by the formula of
`swarm-plan`. A finished cell is a line of `--out` and is not computed again, so a killed script
resumes where it was. Tables and pictures are made of the finished cells:

    python scripts/benchmarks/reproduce_wire_quality.py --list
    python scripts/benchmarks/reproduce_wire_quality.py --cells 'headline/*' --processes 2
    python scripts/benchmarks/reproduce_wire_quality.py --cells --plot scripts/pictures/quality.svg
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from cells import Cell, Losses, interval, parsed, work_off
from conditions import WAITING, Conditions
from plot_run import GRID, INK, LOSS, TRAFFIC, WIDTH, svg, text, ticks

from swarm.config import RunConfig, parse_config
from swarm.model.cost import parameters
from swarm.model.link_plan import Setting, cycle_bytes, setting_of

RUNS = Path(__file__).parents[2] / "configs" / "runs"
CELLS = Path(__file__).with_name("wire_quality.jsonl")
"""The finished cells that the repository keeps."""
PEERS = 4
"""N."""
CYCLE = 20
"""H: local steps of a cycle, in which each expert is exchanged once."""
BASE_LR = 4e-3
RATES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Learning rates in units of the base's. The middle three come first."""
TUNING_SEEDS = (101, 102)
TOKENS_PER_PARAMETER = 20


@dataclass(frozen=True)
class Scale:
    """The size of the cells.

    Attributes:
        hidden: width of the model and of its experts.
        sequences: of a step of all peers together.
        length: predicted tokens of a sequence.
        steps: of a peer. None: as many as `TOKENS_PER_PARAMETER` takes.
        held_out_bytes: of the text that the loss is measured on.
    """

    hidden: int
    sequences: int
    length: int = 40
    steps: int | None = None
    held_out_bytes: int = 65_536


FULL = Scale(hidden=32, sequences=16)
QUICK = Scale(hidden=16, sequences=16, length=16, steps=20, held_out_bytes=1024)
SIZES = {
    hidden: Scale(hidden, sequences)
    for hidden, sequences in {16: 4, 32: 16, 48: 32, 64: 56, 96: 120}.items()
}
"""Scales of 0.02 to 0.57 M parameters by their width, with about 2,400 steps each."""


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        label: in tables and pictures.
        settings: of the run file, by key.
        rounds: of a cycle. Each averages all shared tensors.
        peers: 1 trains all on one machine, with the batches of all.
        cycle: H.
        conditions: settings that no run file has.
        batch: size of a step, in units of the scale's. The number of steps is divided by it.
        warmup: of the learning rate, as a share of the steps.
        vectors: learning rate of the tensors that Muon leaves to AdamW, in units of the matrices'.
        rate_of: the method whose learning rate this one has. Empty: it has its own.
        hidden: width of the model, where that is not the usual one.
    """

    label: str
    settings: Mapping[str, str | int | float] = field(default_factory=dict)
    rounds: int = 1
    peers: int = PEERS
    cycle: int = CYCLE
    conditions: Conditions = WAITING
    batch: int = 1
    warmup: float = 0.05
    vectors: float = 1
    rate_of: str = ""
    hidden: int | None = None

    @property
    def optimizer(self) -> str:
        """Kind of the optimizer."""
        return str(self.settings.get("optimizer.kind", "adamw"))


MUON: Mapping[str, str] = {"optimizer.kind": "muon"}
ALL_OWN = {"ownership.owners_per_expert": PEERS}
THIN = {
    "wire.shared_coding": "b2",
    "wire.experts": "bf16",
    "wire.experts_coding": "b1",
    "round.overlap": "round",
}
"""The exchange of the run files for home links."""
SLICES = 5
QUARTER_LATE = Conditions(delay=CYCLE // SLICES // 4)


def home(label: str, settings: Mapping[str, str | int | float] = MUON, **other: object) -> Method:
    """The home setting with some changes."""
    base = Method(label, {**THIN, **settings}, rounds=SLICES, conditions=QUARTER_LATE)
    return replace(base, **other)  # type: ignore[arg-type]


def _recipe(label: str, settings: Mapping[str, str | int | float] = {}, **other: object) -> Method:
    return home(label, {**MUON, **settings}, rate_of="home-muon", **other)


TWO_OWNERS = {"ownership.owners_per_expert": 2}
HEADLINE = {
    "centralised": Method("centralised", peers=1),
    "centralised-muon": Method("centralised, Muon", MUON, peers=1),
    "home": home("home: b2, experts b1, 5 slices", {}),
    "home-muon": home("home, Muon"),
    "home-two-muon": home("home, two owners, Muon", {**MUON, **TWO_OWNERS}),
}
EXCHANGES = {
    "exact": Method("exact SPES"),
    "exact-muon": Method("exact SPES, Muon", MUON),
    "all-own": Method("fp32 means of everything (R = N)", ALL_OWN),
    "all-own-muon": Method("fp32 means of everything (R = N), Muon", {**ALL_OWN, **MUON}),
    "home-half-muon": home(
        "home, 2 slices, Muon", rounds=2, conditions=Conditions(delay=CYCLE // 2 // 4)
    ),
}
EIGHT = {
    "eight-exact-muon": Method("N = 8: exact SPES, Muon", MUON, peers=8),
    "eight-home": home("N = 8: home", {}, peers=8),
    "eight-home-muon": home("N = 8: home, Muon", peers=8),
    "eight-two-muon": home("N = 8: home, two owners, Muon", {**MUON, **TWO_OWNERS}, peers=8),
}
RECIPES = {
    "two-owners-b1": _recipe("two owners, all b1", {**TWO_OWNERS, "wire.shared_coding": "b1"}),
    "two-owners-often": _recipe(
        "two owners, all b1, experts each 3 of 5 slices",
        {**TWO_OWNERS, "wire.shared_coding": "b1", "round.experts_every": 3},
    ),
    "four-owners": _recipe("four owners", ALL_OWN),
    "four-owners-b1": _recipe("four owners, all b1", {**ALL_OWN, "wire.shared_coding": "b1"}),
    "vectors-half": _recipe("AdamW's tensors at half the rate", vectors=0.5),
    "vectors-double": _recipe("AdamW's tensors at twice the rate", vectors=2),
    "expert-momentum": _recipe(
        "momentum of experts 0.98", conditions=replace(QUARTER_LATE, expert_decay=0.98)
    ),
    "experts-half": _recipe(
        "experts at half the rate", conditions=replace(QUARTER_LATE, expert_lr=0.5)
    ),
    "experts-double": _recipe(
        "experts at twice the rate", conditions=replace(QUARTER_LATE, expert_lr=2)
    ),
    "long-warmup": _recipe("warm-up of a fifth", warmup=0.2),
    "no-warmup": _recipe("no warm-up", warmup=0),
    "to-zero": _recipe("decay to zero", {"optimizer.final_share": 0.0}),
    "no-merging": _recipe("no merging", {"merging.alpha": 0.0}),
    "paper-merging": _recipe("the paper's merging, alpha 0.1", {"merging.alpha": 0.1}),
    "large-batch": _recipe("batches 4 times larger", batch=4),
    "large-batch-double": home("batches 4 times larger, own rate", batch=4),
    "own-texts": _recipe(
        "each peer with a text of its own", conditions=replace(QUARTER_LATE, own_texts=True)
    ),
    "h-10": _recipe("H = 10", cycle=10),
    "h-50": _recipe("H = 50", cycle=50, conditions=Conditions(delay=2)),
    "h-100": _recipe("H = 100", cycle=100, conditions=Conditions(delay=5)),
    "late": _recipe("rounds late by 3/4 of a slice", conditions=Conditions(delay=3)),
    "no-remainder": _recipe(
        "no remainder at the reducer", conditions=replace(QUARTER_LATE, keeps_remainder=False)
    ),
}
RESIDENTS = {
    f"{name}-{held}": _recipe(
        f"{held} of 8 experts in memory: {label}",
        conditions=replace(QUARTER_LATE, held=held, absent=absent, rotates=rotates),
    )
    for name, label, absent, rotates, amounts in (
        ("skip", "others skipped", "skip", False, (2, 4, 6)),
        ("mask", "others masked", "mask", False, (2, 4, 6)),
        ("balance", "others masked, loads of those held balanced", "balance", False, (4,)),
        ("rotate", "others skipped, others in each cycle", "skip", True, (4,)),
    )
    for held in amounts
}
KINDS: Mapping[str, Mapping[str, str]] = {"adamw": {}, "muon": MUON}
CURVE = {
    f"{name}-{kind}-{hidden}": Method(
        f"{label}, {kind}, width {hidden}",
        settings,
        peers=1,
        conditions=Conditions(readers=readers),
        hidden=hidden,
    )
    for hidden in SIZES
    for kind, settings in KINDS.items()
    for name, label, readers in (("all", "all tokens", 1), ("own", "owner's tokens", PEERS))
}
METHODS = HEADLINE | EXCHANGES | RECIPES | RESIDENTS | EIGHT | CURVE
GROUPS: Mapping[str, tuple[int, Mapping[str, Method]]] = {
    "headline": (8, HEADLINE),
    "exchanges": (4, EXCHANGES),
    "recipes": (4, RECIPES),
    "residents": (3, RESIDENTS),
    "eight": (4, EIGHT),
    "sizes": (3, CURVE),
}
"""The number of seeds, and the methods."""


# ---------------------------------------------------------------- learning rates


def variant_of(method: str, rate: float) -> str:
    """The name of a method with a learning rate."""
    return f"{method}@{rate:g}"


def tuned(losses: Losses, method: str) -> tuple[tuple[float, ...], float | None]:
    """The learning rates to try for a method, and the best one once all of them were tried."""
    found: dict[float, float] = {}
    for rate in RATES:
        tried = losses.get(variant_of(method, rate), {})
        if all(seed in tried for seed in TUNING_SEEDS):
            found[rate] = statistics.mean(tried[seed] for seed in TUNING_SEEDS)
    wanted: tuple[float, ...] = RATES[1:4]
    while wanted and all(rate in found for rate in wanted):
        best = min(wanted, key=lambda rate: found[rate])
        at = RATES.index(best)
        beyond = tuple(RATES[max(0, at - 1) : at + 2])
        if set(beyond) <= set(wanted):
            return wanted, best
        wanted = tuple(sorted({*wanted, *beyond}))
    return wanted, None


def best_variant(losses: Losses, method: str) -> str | None:
    """The method with its best learning rate, or None if that is not known yet."""
    best = tuned(losses, METHODS[method].rate_of or method)[1]
    return None if best is None else variant_of(method, best)


def plan(losses: Losses) -> Iterator[Cell]:
    """The cells that are wanted when these losses are known, the most informative first."""
    for group, (seeds, methods) in GROUPS.items():
        own_rates = [name for name, method in methods.items() if not method.rate_of]
        searched = [variant_of(name, rate) for name in own_rates for rate in tuned(losses, name)[0]]
        best = [variant for name in methods if (variant := best_variant(losses, name))]
        for variants, chosen in ((searched, TUNING_SEEDS), (best, range(1, seeds + 1))):
            yield from (Cell(group, variant, seed) for seed in chosen for variant in variants)


# ---------------------------------------------------------------- run files


def run_of(method: Method, rate: float, seed: int, scale: Scale) -> RunConfig:
    """A cell as a run file: any swarm could train it."""
    if method.hidden and scale.steps is None:
        scale = SIZES[method.hidden]
    sequences = scale.sequences * method.batch // method.peers
    rounds = method.rounds
    base = {
        "run.seed": seed,
        "run.peers": method.peers,
        "model.hidden_size": scale.hidden,
        "model.moe_intermediate_size": scale.hidden,
        "model.num_attention_heads": scale.hidden // 16,
        "model.num_key_value_heads": scale.hidden // 16,
        "data.sequence_length": scale.length,
        "data.validation_bytes": scale.held_out_bytes,
        "train.batch_tokens": sequences * scale.length,
        "train.micro_batch_sequences": max(1, min(sequences, scale.sequences // PEERS)),
        "train.frozen": "fp32",
        "optimizer.kind": "adamw",
        "optimizer.warmup_steps": 0,
        "round.local_steps": method.cycle // rounds,
        "round.experts_every": rounds,
        "round.stagger": str(rounds > 1).lower(),
        "merging.alpha": 0.5,
        "merging.interval_steps": method.cycle,
        "wire.experts": "fp32",
        **method.settings,
    }
    steps = scale.steps or _num_steps(_parsed(base), scale) // method.batch
    steps += -steps % method.cycle
    lengths = {
        "run.rounds": steps // (method.cycle // rounds),
        "optimizer.schedule_steps": steps,
        "optimizer.warmup_steps": round(steps * method.warmup),
        "optimizer.lr": BASE_LR * rate * method.vectors,
        "merging.decay_steps": steps // 4,
    }
    if method.vectors != 1:
        lengths["optimizer.matrix_lr"] = BASE_LR * rate
    return _parsed({**base, **lengths})


def _num_steps(run: RunConfig, scale: Scale) -> int:
    tokens = TOKENS_PER_PARAMETER * parameters(run.model).total
    return round(tokens / (scale.sequences * scale.length))


def _parsed(settings: Mapping[str, str | int | float], name: str = "demo.toml") -> RunConfig:
    source = RUNS / name
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return parse_config(RunConfig, source.read_text(), source=str(source), overrides=overrides)


@functools.cache
def of_cell(cell: Cell, scale: Scale) -> tuple[RunConfig, Conditions]:
    """Run file and conditions of a cell."""
    name, _, rate = cell.variant.partition("@")
    method = METHODS[name]
    return run_of(method, float(rate), cell.seed, scale), method.conditions


@functools.cache
def share_of_diloco(name: str) -> float:
    """Bytes of a peer in the local steps of a cycle divided by those of fp32 DiLoCo, for the 7B."""
    method = METHODS[name]
    wire = {key: value for key, value in method.settings.items() if "optimizer" not in key}
    large = _parsed(
        {
            "wire.shared_coding": "none",
            "wire.experts_coding": "none",
            "wire.experts": "fp32",
            "round.overlap": "none",
            "round.local_steps": method.cycle // method.rounds,
            "round.experts_every": method.rounds,
            "round.stagger": str(method.rounds > 1).lower(),
            **wire,
        },
        "spes_7b_home.toml",
    )
    setting, peers = setting_of(large), method.peers
    sent = cycle_bytes(large, setting, peers) * method.rounds / setting.rounds
    return sent * CYCLE / method.cycle / cycle_bytes(large, _diloco(peers), peers)


def _diloco(peers: int) -> Setting:
    return Setting("fp32", "fp32", owners=peers)


# ---------------------------------------------------------------- tables and pictures


def spread(values: Sequence[float]) -> str:
    """The mean, and for several values its 95 % interval."""
    if len(values) < 2:
        return "".join(f"{value:+.1f}" for value in values)
    low, high = interval(values)
    return f"{statistics.mean(values):+.1f} [{low:+.1f}..{high:+.1f}]"


def results(losses: Losses, method: str) -> dict[int, float]:
    """The losses of a method with its best learning rate, by seed, without those of the search."""
    found = losses.get(best_variant(losses, method) or "", {})
    return {seed: loss for seed, loss in found.items() if seed not in TUNING_SEEDS}


def against(losses: Losses, method: str, base: str) -> list[float]:
    """Percent above another method, both with their best learning rates, of each common seed."""
    ours, theirs = results(losses, method), results(losses, base)
    return [100 * (loss / theirs[seed] - 1) for seed, loss in ours.items() if seed in theirs]


BASES = ("centralised", "centralised-muon", "home-muon")


def table(losses: Losses) -> str:
    """A row per method at the usual width that has a finished cell."""
    columns = ("training", "learning rate", "bytes", "n", "loss")
    named = tuple(f"above {METHODS[base].label}, %" for base in BASES)
    rows = [f"| {' | '.join(columns + named)} |", "|---" * len(columns + named) + "|"]
    for name, method in (HEADLINE | EXCHANGES | RECIPES | RESIDENTS | EIGHT).items():
        variant = best_variant(losses, name)
        found = results(losses, name)
        if not variant or not found:
            continue
        share = "" if method.peers == 1 else f"1/{1 / share_of_diloco(name):.1f}"
        rate = BASE_LR * float(variant.partition("@")[2])
        compared = " | ".join(
            "" if name == base else spread(against(losses, name, base)) for base in BASES
        )
        loss = f"{statistics.mean(found.values()):.4f}"
        rows.append(f"| {method.label} | {rate:g} | {share} | {len(found)} | {loss} | {compared} |")
    return "\n".join(rows)


def curve(losses: Losses) -> dict[str, dict[int, list[float]]]:
    """Percent that a model loses if its experts see their owner's tokens alone.

    Returns:
        By kind of optimizer and width of the model: the loss of each seed.
    """
    found = {
        kind: {
            hidden: against(losses, f"own-{kind}-{hidden}", f"all-{kind}-{hidden}")
            for hidden in SIZES
        }
        for kind in KINDS
    }
    return {kind: {h: gaps for h, gaps in each.items() if gaps} for kind, each in found.items()}


def num_parameters(hidden: int) -> int:
    """Parameters of the model of a width."""
    method = METHODS[f"all-adamw-{hidden}"]
    return parameters(run_of(method, 1, 1, FULL).model).total


def curve_table(losses: Losses) -> str:
    """A row per size, and the change of the price with each doubling of the parameters."""
    found = curve(losses)
    rows = ["| parameters | AdamW, % | Muon, % |", "|---|---|---|"]
    for hidden in SIZES:
        prices = [spread(found[kind].get(hidden, [])) for kind in KINDS]
        if any(prices):
            rows.append(f"| {num_parameters(hidden):,} | {prices[0]} | {prices[1]} |")
    slopes = [spread(_slopes(found[kind])) for kind in KINDS]
    if any(slopes):
        rows.append(f"| each doubling, points | {slopes[0]} | {slopes[1]} |")
    return "\n".join(rows)


def _slopes(prices: Mapping[int, Sequence[float]]) -> list[float]:
    """For each seed: the slope of the price over the binary logarithm of the parameters."""
    if len(prices) < 2:
        return []
    sizes = [math.log2(num_parameters(hidden)) for hidden in prices]
    seeds = min(len(gaps) for gaps in prices.values())
    return [
        statistics.linear_regression(sizes, [gaps[index] for gaps in prices.values()]).slope
        for index in range(seeds)
    ]


PANEL, LEFT, RIGHT, TOP, FOOT = 420, 64, 150, 44, 64
SCALE_OF_BYTES = 7
"""The picture ends at 1/128 of DiLoCo's bytes."""


@dataclass(frozen=True)
class Series:
    """Points of one colour with a label: a position to the right, and values upward."""

    label: str
    at: float
    values: Sequence[float]
    colour: str


def _panel(
    title: str, foot: str, top: float, marks_x: Mapping[float, str], series: Sequence[Series]
) -> Iterator[str]:
    """One diagram. Positions are between 0 and 1."""
    values = [value for each in series for value in each.values]
    marks = ticks(min([-1, *values]), max([1, *values]), 8)
    bottom, span = top + PANEL - FOOT, WIDTH - LEFT - RIGHT

    def y(value: float) -> float:
        height = PANEL - FOOT - TOP
        return bottom - (value - marks[0]) / (marks[-1] - marks[0]) * height

    yield text(16, top + 20, title, anchor="start", size=14)
    for mark in marks:
        line = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"'
        yield f'<line {line} stroke="{INK if mark == 0 else GRID}"/>'
        yield text(LEFT - 8, y(mark) + 4, f"{mark:g}", anchor="end")
    for at, label in marks_x.items():
        yield text(LEFT + at * span, bottom + 20, label)
    for each in series:
        x, mean = LEFT + each.at * span, statistics.mean(each.values)
        for value in each.values:
            dot = f'cx="{x:.1f}" cy="{y(value):.1f}" r="3" fill="{each.colour}"'
            yield f'<circle {dot} opacity="0.5"/>'
        line = f'x1="{x - 8:.1f}" x2="{x + 8:.1f}" y1="{y(mean):.1f}" y2="{y(mean):.1f}"'
        yield f'<line {line} stroke="{INK}" stroke-width="2"/>'
        yield text(x + 10, y(mean) + 4, each.label, anchor="start", size=10)
    yield text(LEFT, bottom + 48, foot, anchor="start")


def picture(losses: Losses) -> str:
    """The loss by bytes, and below it the price of owner's tokens by the size of the model."""
    by_bytes = [
        Series(
            method.label,
            0 if method.peers == 1 else -math.log2(share_of_diloco(name)) / SCALE_OF_BYTES,
            found,
            TRAFFIC if method.optimizer == "muon" else LOSS,
        )
        for name, method in (HEADLINE | EXCHANGES).items()
        if (found := against(losses, name, "centralised")) and name != "centralised"
    ]
    bytes_marks = {p / SCALE_OF_BYTES: f"1/{2**p}" for p in range(SCALE_OF_BYTES + 1)}
    sizes = {hidden: index / (len(SIZES) - 1) for index, hidden in enumerate(SIZES)}
    by_size = [
        Series("" if hidden != max(prices) else kind, sizes[hidden], gaps,
               TRAFFIC if kind == "muon" else LOSS)
        for kind, prices in curve(losses).items()
        for hidden, gaps in prices.items()
    ]  # fmt: skip
    size_marks = {at: f"{num_parameters(hidden) / 1e6:.2f} M" for hidden, at in sizes.items()}
    drawn = [
        *_panel(
            "held-out loss above centralised AdamW, %, by bytes of a cycle",
            "bytes of fp32 DiLoCo's; a dot is a seed, a line their mean; green: Muon",
            0,
            bytes_marks,
            by_bytes,
        ),
        *_panel(
            "price of experts that see their owner's tokens alone, %, by parameters",
            f"exact gradients of all other tensors; {PEERS} owners; 20 tokens a parameter",
            PANEL,
            size_marks,
            by_size,
        ),
    ]
    return svg("The loss of methods at a small scale", 2 * PANEL, drawn)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains the requested cells that do not exist yet, then prints the tables."""
    asked = parsed(arguments, __doc__.splitlines()[0], CELLS)
    torch.set_num_threads(1)
    scale = QUICK if asked.quick else FULL
    losses = work_off(asked, lambda found: list(plan(found)), lambda cell: of_cell(cell, scale))
    if not asked.list:
        print(table(losses), curve_table(losses), sep="\n\n")
    if asked.plot:
        asked.plot.write_text(picture(losses))


if __name__ == "__main__":
    main()
