#!/usr/bin/env python
"""Effects of the routing techniques on loss, expert load and dropped tokens, on the demo's text.

Each setting trains the model of configs/runs/demo.toml on the Python standard library. For each
seed all settings have the same weights, batches and learning rates. Groups of settings:

  balance  the balancing loss against loss-free balancing, top-1, 2 and 4, capacity 1.0, 1.25 and
           none, with one peer that owns every expert
  others   each other technique alone, against top-2 without capacity, also with one peer
  peers    techniques of swarms: four peers in this process average the shared tensors and take
           each expert from its owner every H steps (exact mode, nothing is encoded)

The first columns are the held-out loss in nats per byte, mean over the seeds, and its mean
difference from the first row of the group with the same seed. The load is the tokens of a layer's
busiest expert divided by the mean over the experts, in the worst layer, over the last quarter of
the steps together and in the mean step. The last column is the share of dropped choices. Evaluation
never drops and has no noise.

Every finished training is a line of the results file. Trainings with equal settings and text are
not repeated, so a table can be made in several calls. The last line of the output counts trainings
of earlier calls.

    .venv/bin/python scripts/benchmarks/bench_routing.py balance --results out/routing.jsonl
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from cells import Results
from torch import Tensor

from swarm.config import RunConfig, parse_config
from swarm.data.corpus import open_corpus
from swarm.data.held_out import HeldOut, held_out_documents, measured_on
from swarm.data.loader import Loader
from swarm.data.shards import Shards, open_shards
from swarm.data.tokenizer import BYTE
from swarm.experts import expert_shapes, shared_shapes
from swarm.model.initial_weights import initial_tensors
from swarm.train.engine.engine import StepStats
from swarm.train.engine.local_steps import learning_rate, routing_controls_at, routing_stats
from swarm.train.engine.resident import ResidentEngine

TEXT = ((0, 2**40),)
DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.toml"
ADAMW = ("optimizer.kind=adamw", "optimizer.lr=2e-3")
SMALL = (
    "train.batch_tokens=256",
    "train.micro_batch_sequences=4",
    "data.validation_bytes=8192",
)
"""Half of the demo's tokens, so that a table takes minutes."""
LOCAL_STEPS = 20
PEERS = 4
LOSS_FREE = (
    "model.scoring_func=sigmoid",
    "routing.bias_update_rate=0.003",
    "loss.balance_weight=0.0",
)


@dataclass(frozen=True)
class Setting:
    """One row: its name and its changes to the demo's configuration."""

    name: str
    overrides: tuple[str, ...] = ()
    peers: int = 1


@dataclass(frozen=True)
class Result:
    """The result of one seed of a setting."""

    loss: float
    load: float
    load_per_step: float
    dropped: float


def balance_settings() -> list[Setting]:
    combinations = [(None, "loss"), (None, "loss-free"), (1.25, "loss"), (1.0, "loss")]
    combinations += [(1.25, "loss-free"), (1.0, "loss-free")]
    found = []
    for capacity, balance in combinations:
        for top_k in (2, 1, 4):
            limit = () if capacity is None else (f"routing.capacity_factor={capacity}",)
            words = f"top-{top_k}, {balance}, {f'capacity {capacity}' if limit else 'drop-less'}"
            how = LOSS_FREE if balance == "loss-free" else ()
            found.append(Setting(words, (f"model.num_experts_per_tok={top_k}", *how, *limit)))
    return found


def other_settings() -> list[Setting]:
    sigmoid = "model.scoring_func=sigmoid"
    renormalised = "model.norm_topk_prob=true"
    return [
        Setting("top-2, loss 0.01, router z-loss 0.001", ("model.num_experts_per_tok=2",)),
        Setting("no balancing at all", ("loss.balance_weight=0.0",)),
        Setting("loss 0.1", ("loss.balance_weight=0.1",)),
        Setting("no router z-loss", ("loss.router_z_weight=0.0",)),
        Setting("renormalised weights", (renormalised,)),
        Setting("noisy top-k, renormalised", (renormalised, "model.noisy_top_k=true")),
        Setting("similarity loss 0.1", ("loss.similarity_weight=0.1",)),
        Setting("sigmoid, loss 0.01", (sigmoid,)),
        Setting("sigmoid, no balancing", (sigmoid, "loss.balance_weight=0.0")),
        Setting("loss-free, rate 0.01", (*LOSS_FREE, "routing.bias_update_rate=0.01")),
    ]


def peer_settings() -> list[Setting]:
    rows = [
        Setting("SPES, 4 peers"),
        Setting("own-expert bias 3, falling", ("routing.own_expert_bias=3.0",)),
        Setting("balance factor 0.7, rising", ("routing.balance_factor=0.7",)),
        Setting("loss-free, biases averaged", LOSS_FREE),
    ]
    return [Setting(row.name, row.overrides, PEERS) for row in rows]


GROUPS = {"balance": balance_settings, "others": other_settings, "peers": peer_settings}


def run_of(setting: Setting, seed: int, steps: int) -> RunConfig:
    overrides = [
        f"run.seed={seed}",
        *ADAMW,
        f"optimizer.schedule_steps={steps}",
        *setting.overrides,
    ]
    overrides += ['train.frozen="fp32"', 'wire.experts="fp32"', *SMALL]
    return parse_config(RunConfig, DEMO.read_text(), source=str(DEMO), overrides=overrides)


def owned_by(peer: int, peers: int, num_experts: int) -> range:
    """The experts of a peer, in contiguous blocks as in SPES."""
    return range(peer * num_experts // peers, (peer + 1) * num_experts // peers)


def synchronise(engines: Sequence[ResidentEngine], run: RunConfig) -> None:
    """One round in exact mode: means of the shared tensors, experts from their owners."""
    names = list(shared_shapes(run.model))
    shared = [engine.read(names) for engine in engines]
    agreed = {n: torch.stack([values[n] for values in shared]).mean(0) for n in names}
    for peer, engine in enumerate(engines):
        for expert in owned_by(peer, len(engines), run.model.num_experts):
            agreed |= engine.read(expert_shapes(run.model, expert))
    for engine in engines:
        engine.write(agreed)


def initial(run: RunConfig) -> Mapping[str, Tensor]:
    names = list(shared_shapes(run.model))
    for expert in range(run.model.num_experts):
        names += expert_shapes(run.model, expert)
    return initial_tensors(run, names)


def train(setting: Setting, seed: int, steps: int, shards: Shards, held_out: HeldOut) -> Result:
    run = run_of(setting, seed, steps)
    values = initial(run)
    engines = [ResidentEngine(run) for _ in range(setting.peers)]
    for peer, engine in enumerate(engines):
        engine.write(values)
        engine.own(owned_by(peer, setting.peers, run.model.num_experts))
    loader = Loader(shards, run)
    seen: list[StepStats] = []
    for step in range(steps):
        for peer, engine in enumerate(engines):
            place = setting.peers * step + peer
            batch_BT1 = loader.read(TEXT, place, run.train.batch_tokens)
            controls = routing_controls_at(step, run, str(peer), place)
            seen.append(engine.step(batch_BT1, lr=learning_rate(step, run), controls=controls))
        if setting.peers > 1 and (step + 1) % LOCAL_STEPS == 0:
            synchronise(engines, run)
    loader.close()
    last = seen[-len(seen) // 4 :]
    return Result(
        loss=held_out.mean(lambda tokens, scored: engines[0].evaluate(tokens, scored_BT=scored)),
        load=routing_stats(last).max_load,
        load_per_step=statistics.mean(routing_stats([stats]).max_load for stats in last),
        dropped=routing_stats(seen).dropped,
    )


def spread(values: Sequence[float]) -> str:
    mean = statistics.mean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"


def row(setting: Setting, results: Sequence[Result], first: Sequence[Result]) -> str:
    change = [own.loss - other.loss for own, other in zip(results, first, strict=True)]
    load, per_step, dropped = (
        statistics.mean(getattr(result, field) for result in results)
        for field in ("load", "load_per_step", "dropped")
    )
    differs = "" if results is first else f"{statistics.mean(change):+.3f}"
    return (
        f"| {setting.name} | {spread([result.loss for result in results])} | {differs} "
        f"| {load:.2f} | {per_step:.2f} | {100 * dropped:.1f} % |"
    )


def key_of(setting: Setting, run: RunConfig) -> str:
    """The settings that a training depends on, without its text."""
    return f"{run.fingerprint()} at {setting.peers} peers, H = {LOCAL_STEPS}"


def report(settings: Sequence[Setting], args: argparse.Namespace) -> None:
    corpus = open_corpus(None)
    demo = run_of(Setting("demo"), 0, args.steps)
    documents = held_out_documents(corpus.documents(), demo.data.validation_bytes)
    held_out = measured_on(BYTE, documents, demo.data.sequence_length)
    results = Results(args.results, corpus.fingerprint())
    print(f"{args.steps} steps of {demo.train.batch_tokens} tokens a peer, {args.seeds} seeds")
    print("| setting | held-out loss | difference | load | load per step | dropped |")
    print("|---|---|---|---|---|---|")
    first: list[Result] = []
    shards = open_shards(corpus, args.results.parent / "tokens", BYTE)
    for setting in settings:
        found = []
        for seed in range(args.seeds):
            name = f"seed {seed}"  # two groups may share a training
            key = key_of(setting, run_of(setting, seed, args.steps))
            line = results.get(name, key)
            if line is None:
                result = train(setting, seed, args.steps, shards, held_out)
                line = results.add(name, key, {"result": asdict(result)})
            found.append(Result(**line["result"]))
        first = first or found
        print(row(setting, found, first), flush=True)
    print(results.reused())


def main() -> None:
    parser = argparse.ArgumentParser(description="routing techniques side by side")
    parser.add_argument("group", choices=tuple(GROUPS))
    parser.add_argument("--results", type=Path, default=Path("out/routing.jsonl"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report(GROUPS[args.group](), args)


if __name__ == "__main__":
    main()
