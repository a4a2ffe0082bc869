#!/usr/bin/env python
"""Bytes that a peer sends and receives in a cycle, counted in real swarms, against the formulas.

Peers in separate network namespaces train a model with the 7B's shares of shared tensors, experts,
norms and routers. So ratios of bytes are the 7B's, but the model learns almost nothing. A cycle is
the H local steps between two rounds of exact SPES, and has one round or several slices.

  blobs      bytes of values and deltas that a peer sent, mean of the peers. It received as many
  formula    by swarm/model/link_plan.py. plan: output of swarm-plan, times the rounds of a cycle
  off        difference of blobs from formula or plan, whichever is larger
  ratio      fp32 DiLoCo's bytes (R = N, by the formula) divided by blobs
  up, down   IP packets on the peer's interface: blobs, headers, acknowledgements, control and DHT.
             All but blobs is a large share for such a small model. Needs root
  control    bytes of sent messages, including those with records and offers

The exit status is 1 if a figure is more than 3 % off, if the recommended mode is above a sixteenth
of fp32 DiLoCo or the thin one above a thirty-second. It is also 1 if a round excluded a peer,
because the figures are then meaningless.

    .venv/bin/python scripts/benchmarks/bench_wire.py --json
    .venv/bin/python scripts/benchmarks/bench_wire.py --full --layers 6
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rehearsal import RUN_FILE, add_common, folder_of, killing, settings, teller

from peers.command_line.command import ending_as_ctrl_c
from swarm.config import RunConfig, parse_config
from swarm.emulation.links import Link
from swarm.emulation.local_peer import Event
from swarm.emulation.local_swarm import LocalSwarm, applied
from swarm.emulation.networks import NamespaceLinks, why_not_here
from swarm.errors import SwarmError
from swarm.model.cost import bytes_sent_per_peer_per_round, parameters
from swarm.model.link_plan import Setting, cycle_bytes

LIKE = RUN_FILE.with_name("spes_7b.toml")
EVERYBODY = 2**16
"""Owners of an expert in DiLoCo: all peers."""
TYPES = ("fp32", "bf16")
MOST_OFF = 0.03
LINK = Link(up_mbit=200, down_mbit=200, rtt_ms=1)
"""A link at whose rate packets of 1,500 bytes can be passed on here. Bytes do not depend on it."""
HIDDEN, INTERMEDIATE, EXPERTS, HEADS = 16, 2048, 32, 4
LEAST_ROUNDS = 6
ROUND_S, START_S = 120.0, 300.0


@dataclass(frozen=True)
class Mode:
    """A row of the table.

    Attributes:
        name: name of the mode.
        setting: setting of its run's exchange. Rounds block, because overlap changes no bytes.
        is_main: whether it is measured without `--full`.
    """

    name: str
    setting: Setting
    is_main: bool = True


DILOCO = Setting("fp32", "fp32", owners=EVERYBODY)
RECOMMENDED, THIN = "b2, experts b1, 5 slices", "b2, experts b1, 2 slices"
LEAST_RATIOS = {RECOMMENDED: 16.0, THIN: 32.0}
MODES = (
    Mode("DiLoCo fp32 (R = N)", DILOCO),
    Mode("SPES fp32", Setting("fp32", "fp32"), is_main=False),
    Mode("SPES, experts bf16", Setting("fp32", "bf16")),
    Mode("bf16", Setting("bf16", "bf16"), is_main=False),
    Mode("b2", Setting("b2", "b2")),
    Mode("b1", Setting("b1", "b1"), is_main=False),
    Mode("b2, 5 slices, all once", Setting("b2", "b2", 5, 5, 5), is_main=False),
    Mode("b2, 5 slices", Setting("b2", "b2", 5, 1, 5), is_main=False),
    Mode("b1, 5 slices", Setting("b1", "b1", 5, 1, 5), is_main=False),
    Mode(RECOMMENDED, Setting("b2", "b1", 5, 1, 5)),
    Mode(THIN, Setting("b2", "b1", 2, 1, 2)),
    Mode("b2, 5 slices, R = 2, experts each 2nd", Setting("b2", "b2", 5, 1, 10, owners=2), False),
)


@dataclass(frozen=True)
class Measured:
    """Bytes of a peer in a cycle, mean of peers and cycles; see the head of this file."""

    blobs: float
    control: float
    up: float | None
    down: float | None


@dataclass(frozen=True)
class Row:
    """A row of the table: measured and expected bytes of a mode, and their ratios."""

    mode: str
    peers: int
    blobs: float
    formula: float
    plan: float
    off: float
    ratio: float
    control: float
    up: float | None
    down: float | None
    interface_ratio: float | None


# ---------------------------------------------------------------- the run, pure


def model_like(like: RunConfig, layers: int, hidden: int = HIDDEN) -> list[str]:
    """Settings of a model with another model's ratio of shared elements to expert elements.

    The matrices have few rows and long columns. So a router is as small in relation to its experts
    as the 7B's, and the vocabulary supplies the missing shared elements. Values that do not change
    are not sent. So every token goes through all experts, and the embedding is also the output
    layer, whose rows all change in each step.

    Args:
        like: the run whose shares are wanted.
        layers: layers of the model. With a hidden size of 16, each has 3.1 million elements of
            experts.
        hidden: hidden size, a multiple of 8.
    """
    counted = parameters(like.model)
    experts = 3 * layers * EXPERTS * hidden * INTERMEDIATE
    attention = layers * (4 * hidden**2 + EXPERTS * hidden)
    rows = (experts * counted.shared / counted.experts - attention) / hidden
    return [
        f"model.hidden_size={hidden}", f"model.moe_intermediate_size={INTERMEDIATE}",
        f"model.num_experts={EXPERTS}", f"model.num_hidden_layers={layers}",
        f"model.num_attention_heads={HEADS}", f"model.num_key_value_heads={HEADS}",
        f"model.vocab_size={round(rows)}", "model.tie_word_embeddings=true",
        f"model.num_experts_per_tok={EXPERTS}",
    ]  # fmt: skip


def exchanging(setting: Setting, num_peers: int) -> list[str]:
    """A run's settings for this exchange."""
    wire = [
        f"wire.{kind}={value}" if value in TYPES else f"wire.{kind}_coding={value}"
        for kind, value in (("shared", setting.shared), ("experts", setting.experts))
    ]
    if setting.shared not in TYPES:
        wire.append("wire.shared=fp32")
    slices = "true" if setting.rounds > 1 else "false"
    return [
        *wire,
        f"round.shared_every={setting.shared_every}",
        f"round.experts_every={setting.experts_every}",
        f"round.stagger={slices}",
        f"ownership.owners_per_expert={min(setting.owners, num_peers)}",
        f"run.peers={num_peers}",
    ]


def overrides_of(setting: Setting, num_peers: int, layers: int, least: int) -> list[str]:
    """The rehearsed run's settings for this exchange and a sufficient length."""
    return [
        *model_like(parse_config(RunConfig, LIKE.read_text(), source=str(LIKE)), layers),
        *exchanging(setting, num_peers),
        "wire.part_bytes=131072",
        f"run.rounds={counted_rounds(setting, least) + 3}",
        "round.local_steps=2",
        "round.roster_after_s=120.0",  # rounds wait for all peers
        "merging.alpha=0.0",
        "data.validation_bytes=64",
        "train.batch_tokens=32",
        "train.micro_batch_sequences=1",
    ]


def counted_rounds(setting: Setting, least: int) -> int:
    """A number of rounds, rounded up to whole periods of the schedule."""
    period = math.lcm(setting.rounds, setting.shared_every, setting.experts_every)
    return -(-least // period) * period


def run_of(overrides: Iterable[str]) -> RunConfig:
    """The rehearsed run with these settings."""
    source = str(RUN_FILE)
    return parse_config(RunConfig, RUN_FILE.read_text(), source=source, overrides=list(overrides))


# ---------------------------------------------------------------- figures, pure


def window_of(history: Sequence[Event], num_rounds: int, num_peers: int) -> Sequence[Event]:
    """The counted rounds of a peer: all but the first, in which it fetches a joiner's blobs.

    Raises:
        SwarmError: a round excluded a peer, so others had less to send.
    """
    window = history[1 : num_rounds + 1]
    for event in window:
        if len(event["contributors"]) < num_peers:
            raise SwarmError(
                f"round {event['round']} went without {num_peers - len(event['contributors'])} of "
                f"{num_peers} peers",
                hint="run it again on a less busy machine",
            )
    return window


def interface_bytes(table: str) -> tuple[int, int]:
    """Bytes sent and received by all interfaces of a /proc/net/dev but the loopback."""
    sent = received = 0
    for line in table.splitlines()[2:]:
        name, _, figures = line.partition(":")
        if name.strip() != "lo":
            fields = figures.split()
            received, sent = received + int(fields[0]), sent + int(fields[8])
    return sent, received


def row_of(mode: Mode, run: RunConfig, num_peers: int, measured: Measured) -> Row:
    """The row of a mode: measured bytes, and the formulas' bytes."""
    setting, blobs = mode.setting, measured.blobs
    formula = cycle_bytes(run, setting, num_peers)
    plan = bytes_sent_per_peer_per_round(run, num_peers) * setting.rounds
    diloco = cycle_bytes(run, DILOCO, num_peers)
    off = max((blobs / expected - 1 for expected in (formula, plan)), key=abs)
    busier = max(measured.up or 0, measured.down or 0)
    return Row(
        mode.name, num_peers, blobs, formula, plan, off, diloco / blobs, measured.control,
        measured.up, measured.down, diloco / busier if busier else None,
    )  # fmt: skip


def problems(rows: Iterable[Row]) -> list[str]:
    """The figures that violate a limit."""
    found = []
    for row in rows:
        name = f"{row.mode}, N = {row.peers}"
        if abs(row.off) > MOST_OFF:
            found.append(f"{name}: {100 * row.off:+.1f} % off the formula")
        least = LEAST_RATIOS.get(row.mode, 0.0)
        if row.ratio < least:
            found.append(f"{name}: 1/{row.ratio:.1f} of fp32 DiLoCo, above 1/{least:.0f}")
    return found


def table(rows: Iterable[Row]) -> str:
    """The rows as Markdown, in MB."""
    lines = [
        "| mode | N | blobs | formula | plan | off | ratio | up | down | control |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [_mb(row.blobs), _mb(row.formula), _mb(row.plan), f"{100 * row.off:+.1f} %"]
        figures += [f"1/{row.ratio:.1f}", _mb(row.up), _mb(row.down), _mb(row.control)]
        lines.append(f"| {row.mode} | {row.peers} | {' | '.join(figures)} |")
    return "\n".join(lines)


def _mb(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e6:.3f}"


# ---------------------------------------------------------------- measuring


def measure(mode: Mode, overrides: list[str], num_peers: int, least: int, folder: Path) -> Measured:
    """Trains a swarm for the counted rounds, and ends it.

    Raises:
        SwarmError: the swarm was too slow, or a round excluded a peer.
    """
    num_rounds = counted_rounds(mode.setting, least)
    links = None if why_not_here() else NamespaceLinks(LINK)
    options = settings(*overrides)
    swarm = LocalSwarm(folder, RUN_FILE, num_peers, founder_options=options, links=links)

    def histories() -> list[list[Event]]:
        return [applied(peer.events(), "quorum") for peer in swarm.peers]

    def after(rounds: int, timeout_s: float) -> list[tuple[int, int]]:
        """Counters of all interfaces when every peer has applied a number of rounds."""
        swarm.wait_until(
            lambda _: all(len(history) >= rounds for history in histories()),
            what=f"{mode.name}: {rounds} rounds of {num_peers} peers",
            timeout_s=timeout_s,
        )
        if links is None:
            return []
        return [_counters(peer.prefix) for peer in swarm.peers]

    with killing(swarm):
        swarm.start()
        before, then = after(1, START_S), after(num_rounds + 1, num_rounds * ROUND_S)
        found = histories()
    counted = [event for each in found for event in window_of(each, num_rounds, num_peers)]
    cycles = num_rounds / mode.setting.rounds
    moved = [
        mean(end[way] - begin[way] for begin, end in zip(before, then, strict=True)) / cycles
        for way in (0, 1)
        if before
    ]
    return Measured(
        mean(event["blob_bytes_sent"] for event in counted) * mode.setting.rounds,
        mean(event["control_bytes_sent"] for event in counted) * mode.setting.rounds,
        *(moved or (None, None)),
    )


def _counters(prefix: Sequence[str]) -> tuple[int, int]:
    """Counters of the namespace of a command."""
    command = [*prefix, "cat", "/proc/net/dev"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return interface_bytes(shown.stdout)


def chosen(arguments: argparse.Namespace) -> list[tuple[Mode, int]]:
    """The requested modes and numbers of peers."""
    numbers = arguments.peers or ([2, 4, 8] if arguments.full else [4])
    modes = [
        mode
        for mode in MODES
        if (mode.name in arguments.modes if arguments.modes else mode.is_main or arguments.full)
    ]
    return [(mode, number) for number in numbers for mode in modes]


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="all modes, with N = 2, 4, 8")
    parser.add_argument("--peers", type=int, nargs="+", metavar="N", help="other numbers of peers")
    names = [mode.name for mode in MODES]
    parser.add_argument("--modes", nargs="+", choices=names, metavar="MODE", help="these alone")
    parser.add_argument("--layers", type=int, default=1, help="3.6 million parameters each")
    parser.add_argument("--rounds", type=int, default=LEAST_ROUNDS, help="counted, at least")
    add_common(parser)
    return parser.parse_args(words)


def described(rows: Sequence[Row], run: RunConfig) -> Mapping[str, Any]:
    """The JSON output."""
    return {
        "parameters": parameters(run.model).total,
        "shared_share": round(parameters(run.model).shared / parameters(run.model).total, 4),
        "rows": [asdict(row) for row in rows],
        "problems": problems(rows),
    }


def main(
    words: Sequence[str] | None = None, *, with_swarm: Callable[..., Measured] = measure
) -> int:
    arguments = parsed(words)
    folder, say = folder_of(arguments, "wire"), teller()
    if why := why_not_here():
        say(f"bytes of interfaces are left out: {why}")
    rows: list[Row] = []
    failed: list[str] = []
    for count, (mode, num_peers) in enumerate(chosen(arguments)):
        overrides = overrides_of(mode.setting, num_peers, arguments.layers, arguments.rounds)
        run = run_of(overrides)
        home = folder / f"swarm-{count}"
        try:
            with ending_as_ctrl_c():
                measured = with_swarm(mode, overrides, num_peers, arguments.rounds, home)
        except SwarmError as error:
            failed.append(f"{mode.name}, N = {num_peers}: {error}")
            say(failed[-1])
            continue
        if arguments.state_dir is None:
            shutil.rmtree(home, ignore_errors=True)
        rows.append(row_of(mode, run, num_peers, measured))
        say(f"{mode.name}, N = {num_peers}: {measured.blobs / 1e6:.3f} MB a cycle")
    verdict = {**described(rows, run), "failed": failed}
    out = sys.stderr if arguments.json else sys.stdout
    print(table(rows), *problems(rows), *failed, sep="\n", file=out)
    if arguments.json:
        print(json.dumps(verdict))
    return 1 if problems(rows) or failed else 0


if __name__ == "__main__":
    sys.exit(main())
