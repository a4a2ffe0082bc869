#!/usr/bin/env python
"""Durations and bottlenecks of rounds of 16 to 1,024 peers with real-world internet lines.

Nothing is sent. Lines are drawn from quantiles whose sources `internet_rounds.py` names. Bytes are
those of the real run's units, and of manifests and offers made by the real functions (see
bench_scale.py). The functions of peers decide which peer averages which unit (balanced uploads),
which units are due and whose steps count. The run is the 7B with max(32, N) experts, 36 s a step:

- exact: values in fp32 and bf16, blocking rounds of 50 steps (configs/runs/spes_7b.toml).
- slices: shared tensors in 2 bits in each of five rounds of 10 steps, experts in 1 bit in one of
  these rounds (spes_7b_home.toml). Rounds block.
- overlapped: the same, but rounds overlap the next steps.

Each of `--seeds` drawings gives N rounds, one with each peer as the convener. `round_s` is without
relays: every value comes from its origin, and the manifest from the convener. In `relayed_s`,
relays pass on experts and manifests, as peers do (blob relays). `flow_s` is the least time of the
values if every peer passed on the values that it has. A round is over when a majority has
everything and all uplinks have sent. `sent` is of relayed rounds where the name says so. If a
manifest exceeds 8 MiB, the parts of the shared tensors are made larger. CPU times are of single
calls.

    python scripts/benchmarks/bench_internet.py [--peers 16,64,256,1024] [--seeds 5] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

from bench_scale import RUN, Swarm, evidence_bytes, once_ms, print_rows, run_of
from internet_rounds import (
    DOWN,
    UP,
    Constants,
    Outcome,
    Round,
    counted,
    draw_lines,
    moved,
    offers_of,
    utilisation,
)

from swarm.config import RunConfig
from swarm.model.link_plan import ASSUMED, exchange_s, setting_of
from swarm.network.wire.identity import Identity, load_or_create_identity
from swarm.protocol.rounds import Rules
from swarm.protocol.rounds.policies.checks import successor_problem
from swarm.protocol.rounds.policies.rosters import offer_problem, plan_roster
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import MAX_MANIFEST_BYTES

HOME = RUN.with_name("spes_7b_home.toml")
MODES = {
    "exact": (RUN, ()),
    "slices": (HOME, ("round.overlap=none",)),
    "overlapped": (HOME, ()),
}
STEP_S = 36.0
"""Seconds of a step of the 7B on eight GPUs, as in bench_utilisation.py."""
PART_BYTES = 2**24
"""Bytes of a part of the shared tensors, doubled until a manifest fits its limit."""
STAGES = ("offers", "lists", "values", "body", "means", "experts", "rest")


@dataclass(frozen=True)
class Sized:
    """A swarm of some size: its tip and the bytes of its control messages."""

    swarm: Swarm
    part_bytes: int
    offer_bytes: int
    body_bytes: int
    cpu_s: float


def sized(num_peers: int, identity: Identity) -> Sized:
    """A swarm whose manifests fit their limit."""
    part_bytes = PART_BYTES
    while True:
        run = run_of(num_peers, others=[f"wire.part_bytes={part_bytes}"])
        swarm = Swarm(num_peers, identity, run)
        body_bytes = len(swarm.manifest.encoded)
        if body_bytes <= MAX_MANIFEST_BYTES:
            break
        part_bytes *= 2
    offer_bytes = max(len(offer.encoded) for offer in swarm.offers.values())
    return Sized(swarm, part_bytes, offer_bytes, body_bytes, cpu_of(swarm) / 1e3)


def cpu_of(swarm: Swarm) -> float:
    """Milliseconds of a convener's decisions, one after the other."""
    rules, tip, offers = swarm.rules, swarm.tip, swarm.offers
    return (
        once_ms(lambda: [offer_problem(offer, p, tip, rules) for p, offer in offers.items()])
        + once_ms(lambda: plan_roster(tip, offers, rules))
        + once_ms(lambda: swarm.compose(tip, swarm.plan).digest)
        + once_ms(lambda: successor_problem(swarm.manifest, tip, rules, due=False))
    )


def constants_of(of: Sized, run: RunConfig, num_units: int) -> Constants:
    """Costs of a round other than its transfers."""
    num_peers, setting = of.swarm.num_peers, setting_of(run)
    return Constants(
        offer_bytes=of.offer_bytes,
        body_bytes=of.body_bytes,
        evidence_bytes=evidence_bytes(num_peers, num_units),
        cpu_s=of.cpu_s,
        control_s=ASSUMED.control_s,
        compute_s=run.round.local_steps * STEP_S,
        exchange_s=exchange_s(run, setting, num_peers),
        link_share=ASSUMED.link_share,
        overlap=setting.overlap,
    )


def drawn(of: Sized, mode: str, seeds: int, least_up: float) -> tuple[list[Round], Constants]:
    """Rounds of a mode, one for each seed."""
    path, others = MODES[mode]
    run = run_of(of.swarm.num_peers, path, [*others, f"wire.part_bytes={of.part_bytes}"])
    rules = Rules.of(of.swarm.rules.run, run, layout_of(run))
    offers = offers_of(of.swarm.tip, rules)
    constants = constants_of(of, run, len(rules.shared_units))
    rounds = []
    for seed in range(seeds):
        lines = draw_lines(of.swarm.peers, seed, least_up)
        rounds.append(Round(lines, moved(offers, lines, rules), constants))
    return rounds, constants


def row_of(of: Sized, mode: str, seeds: int, least_up: float) -> dict[str, Any]:
    """A line of the table: medians over conveners and drawings, unless the name differs."""
    rounds, constants = drawn(of, mode, seeds, least_up)
    outcomes: list[Outcome] = []
    shares, waited, used, used_relayed = [], [], [], []
    for each in rounds:
        data, flow_s = each.data(), each.flow_s()
        these = [each.outcome(convener, data, flow_s) for convener in each.lines]
        typical = sorted(these, key=lambda one: sum(one.relayed.values()))[len(these) // 2]
        num, waited_s = counted(each, typical.relayed)
        shares.append(1 - num / len(each.lines))
        waited.append(waited_s)
        used += [utilisation(one.stages, constants, waited_s) for one in these]
        used_relayed += [utilisation(one.relayed, constants, waited_s) for one in these]
        outcomes += these
    straight = [sum(one.stages.values()) for one in outcomes]
    relayed = [sum(one.relayed.values()) for one in outcomes]
    sent, sent_relayed = (
        [
            each.moved.values[peer] + each.moved.means[peer] + experts[peer]
            for each, experts in zip(rounds, kind, strict=True)
            for peer in each.lines
        ]
        for kind in ([r.moved.experts for r in rounds], [r.moved.passed for r in rounds])
    )
    ((cause, times),) = Counter(one.bottleneck for one in outcomes).most_common(1)
    ((then, then_times),) = Counter(one.bottleneck_relayed for one in outcomes).most_common(1)
    return {
        "peers": of.swarm.num_peers,
        "mode": mode,
        "least_up_mbit": least_up,
        "compute_s": constants.compute_s,
        "round_s": median(straight),
        "round_p90_s": p90(straight),
        "relayed_s": median(relayed),
        "relayed_p90_s": p90(relayed),
        **{f"{name}_s": median(one.stages[name] for one in outcomes) for name in STAGES},
        "body_p90_s": p90([one.stages["body"] for one in outcomes]),
        "experts_relayed_s": median(one.relayed["experts"] for one in outcomes),
        "body_relayed_s": median(one.relayed["body"] for one in outcomes),
        "flow_s": median(one.flow_s for one in outcomes),
        "waited_s": median(waited),
        "computed": median(used),
        "computed_relayed": median(used_relayed),
        "not_counted": mean(shares),
        "longest": cause,
        "longest_share": times / len(outcomes),
        "longest_relayed": then,
        "longest_relayed_share": then_times / len(outcomes),
        "sent_mb": mean(sent) / 1e6,
        "sent_most_mb": max(sent) / 1e6,
        "sent_most_relayed_mb": max(sent_relayed) / 1e6,
        "body_mb": constants.body_bytes / 1e6,
        "convener_mb": (constants.body_bytes + constants.evidence_bytes)
        * (of.swarm.num_peers - 1)
        / 1e6,
    }


def p90(values: Sequence[float]) -> float:
    """The 90th percentile."""
    return quantiles(values, n=10)[-1]


def line_rows() -> list[dict[str, Any]]:
    """The quantiles of the lines, with their sources."""
    return [
        {"direction": name, "share": each.share, "mbit": each.mbit, "source": each.source}
        for name, many in (("up", UP), ("down", DOWN))
        for each in many
    ]


def main() -> None:
    """Prints the tables, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default="16,64,256,1024", help="sizes, with commas between")
    parser.add_argument("--modes", default=",".join(MODES), help="with commas between")
    parser.add_argument("--seeds", type=int, default=5, help="drawings of all lines")
    parser.add_argument("--least-up", default="0,10", help="Mbit/s that each sends, with commas")
    parser.add_argument("--json", action="store_true", help="one JSON object last on stdout")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    leasts, began = [float(each) for each in args.least_up.split(",")], time.monotonic()
    gc.disable()
    with TemporaryDirectory() as folder:
        identity = load_or_create_identity(Path(folder) / "identity")
        for num_peers in map(int, args.peers.split(",")):
            of = sized(num_peers, identity)
            for mode in args.modes.split(","):
                rows += [row_of(of, mode, args.seeds, least) for least in leasts]
    print_rows(line_rows())
    print_rows(rows)
    print(f"{time.monotonic() - began:.0f} s")
    if args.json:
        print(json.dumps({"lines": line_rows(), "rows": rows}))


if __name__ == "__main__":
    main()
