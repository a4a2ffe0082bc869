#!/usr/bin/env python
"""Times that a peer's steps wait for: offers and adoptions, in nanoseconds per element.

The peer is one of four, without a network. Its model has the layout of the run file for home links,
with values that have moved a little. It makes an offer with a peer's code, and adopts a manifest
that counts the offer. Nothing is trained. Figures are medians of some repeats, by wall time and, in
brackets, by processor time:

  shared   an element of a shared tensor, in each round: its delta is made, checked and stored, and
           the live value follows the agreed one
  own      an element of an own expert, once a cycle: the value of the delta is made too
  others   an element of another peer's expert, once a cycle: put into the engine
  7B       their sum in seconds per cycle of five rounds, and its share of the 1,800 s of 50 steps

The engine is resident on the CPU. The store is in memory or, with --folder, on a disk.

    .venv/bin/python scripts/benchmarks/bench_stall.py --threads 1 2 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from swarm.codecs import Content
from swarm.config import RunConfig, parse_config
from swarm.experts import expert_of_unit
from swarm.model.cost import parameters
from swarm.model.link_plan import setting_of
from swarm.network.blobs.blob_store import BlobStore, store_content, write
from swarm.network.runs.run_founding import founding_manifest
from swarm.peer.machine.cpu_threads import UnitThreads
from swarm.peer.status.status import PeerStatus
from swarm.peer.text.agreed_model import Agreed, initial_contents
from swarm.peer.training.live_model import LiveModel
from swarm.peer.training.offering import Offering, Rounds
from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.training.adoption import Action, adopt
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Digest, Founding, Kind, Manifest, Unit
from swarm.train.engine.resident import ResidentEngine

RUN_FILE = Path(__file__).parents[2] / "configs" / "runs" / "spes_7b_home.toml"
SMALLER = (
    "model.vocab_size=16384",
    "model.hidden_size=512",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=8",
    "model.num_key_value_heads=8",
    "model.moe_intermediate_size=768",
    "round.stagger=false",
    "round.experts_every=1",
)
"""Makes all units due in each round, so that one round shows each kind."""
PEERS = ("me", "p1", "p2", "p3")
KINDS = ("shared", "own", "others")
LARGE = parse_config(RunConfig, RUN_FILE.read_text(), source=str(RUN_FILE))
CYCLE_S = 1800.0
Seconds = tuple[float, float]
"""Wall time and processor time."""


class Bench:
    """One peer, its store and its tip."""

    def __init__(self, run: RunConfig, folder: Path | None, threads: int) -> None:
        self.run, self.layout, self.store = run, layout_of(run), BlobStore(folder)
        self.rules = Rules.of("bench", run, self.layout)
        initial = {
            unit: (store_content(self.store, content), content.num_bytes)
            for unit, content in initial_contents(run, self.layout)
        }
        founding = Founding("me", "n", "c" * 64, 1, "d" * 64, 4)
        present = dict.fromkeys(PEERS, 1.0)
        self.tip = founding_manifest(founding, run, self.layout, initial, present)
        self.model = LiveModel(
            "me", run, ResidentEngine(run), Agreed(self.store, self.layout), UnitThreads(threads)
        )
        rounds = SimpleNamespace(rules=self.rules, store_value=self._store)
        self.offering = Offering(self.model, cast(Rounds, rounds), cast(PeerStatus, None))
        decision = adopt("me", self.tip, previous="", bases={}, offers=[], overlaps=True)
        self.model.adopt(self.tip, decision, self.tip)

    def _store(self, value: Content) -> tuple[Digest, int]:
        return write(self.store.draft(value.num_bytes), value), value.num_bytes

    def moved(self) -> None:
        """Values as after local steps."""
        engine = self.model.engine
        for unit in self.due():
            for part in self.layout.by_unit[unit].slices:
                values = engine.read_part(part)
                engine.write_part(part, values + 1e-3 * torch.randn_like(values))
        self.offering.changed()

    def due(self) -> list[Unit]:
        """The units that this peer offers."""
        return list(self.rules.schedule.due_of("me", self.tip))

    def offer(self, units: Sequence[Unit]) -> dict[Unit, OfferedUnit]:
        """Makes an offer as `Trainer.store` does."""
        bases = {unit: self.tip.entries[unit].digest for unit in units}
        return self.offering.offered_all(self.tip, bases, 50 * self.run.train.batch_tokens)

    def next(self, renewed: Sequence[Unit], offered: Mapping[Unit, OfferedUnit]) -> Manifest:
        """A manifest that renews these units, with the offered values or with others."""
        entries = dict(self.tip.entries)
        for unit in renewed:
            before = entries[unit]
            mine = offered.get(unit)
            digest = mine.digest if mine and mine.delta else self._other(unit, before.digest)
            number = self.tip.round + 1
            entries[unit] = replace(before, digest=digest, version=number, base=before.digest)
        return replace(
            self.tip,
            kind=Kind.QUORUM,
            height=self.tip.height + 1,
            round=self.tip.round + 1,
            parent=self.tip.digest,
            contributors=PEERS,
            entries=entries,
        )

    def adopt(self, manifest: Manifest, offered: Mapping[Unit, OfferedUnit]) -> Seconds:
        """Adopts a manifest and returns the times."""
        offers = [Offer(self.tip.digest, 50, 1, dict(offered))] if offered else []
        decision = adopt(
            "me",
            manifest,
            previous=self.tip.digest,
            bases=self.model.bases,
            offers=offers,
            overlaps=True,
        )
        assert decision.shared in (Action.CORRECTED, Action.CARRIED), decision.shared
        taken = timed(lambda: self.model.adopt(manifest, decision, self.tip))
        self.tip = manifest
        return taken

    def _other(self, unit: Unit, digest: Digest) -> Digest:
        """A value that differs from the agreed value."""
        layout = self.layout.by_unit[unit]
        whole = bytearray(self.store.read(digest, 0, layout.num_bytes) or b"")
        whole[0] ^= 1
        return self._store(Content.of(bytes(whole)))[0]


def timed(work: Callable[[], object]) -> Seconds:
    """Wall time and processor time."""
    began_s, worked_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began_s, time.process_time() - worked_s


def measure(bench: Bench, kind: str) -> dict[str, Seconds]:
    """Nanoseconds per element of a kind, for one offer and one adoption."""
    bench.moved()
    due = bench.due()
    kinds = {
        "shared": [unit for unit in due if expert_of_unit(unit) is None],
        "own": [unit for unit in due if expert_of_unit(unit) is not None],
        "others": [unit for unit in bench.layout.by_unit if unit not in due],
    }
    units = kinds[kind]
    offered: dict[Unit, OfferedUnit] = {}
    taken = {"offer": (0.0, 0.0)}
    if kind != "others":
        taken["offer"] = timed(lambda: offered.update(bench.offer(units)))
    taken["adopt"] = bench.adopt(bench.next(units, offered), offered)
    each = 1e9 / sum(bench.layout.by_unit[unit].num_elements for unit in units)
    return {name: (wall_s * each, worked_s * each) for name, (wall_s, worked_s) in taken.items()}


def row_of(bench: Bench, threads: int, repeat: int) -> dict[str, Any]:
    """The figures for a number of threads."""
    row: dict[str, Any] = {"threads": threads}
    measure(bench, "shared")  # allocates its memory for the first time
    for kind in KINDS:
        found = [measure(bench, kind) for _ in range(repeat)]
        for name in ("offer", "adopt"):
            for index, clock in enumerate(("wall", "cpu")):
                ns = statistics.median(each[name][index] for each in found)
                row[f"{kind}_{name}_{clock}_ns"] = round(ns, 2)
    large = parameters(LARGE.model)
    owned = large.experts / len(PEERS)
    times = (
        ("shared", setting_of(LARGE).rounds * large.shared),
        ("own", owned),
        ("others", large.experts - owned),
    )
    both = (row[f"{kind}_offer_wall_ns"] + row[f"{kind}_adopt_wall_ns"] for kind, _ in times)
    seconds = sum(ns * 1e-9 * count for ns, (_, count) in zip(both, times, strict=True))
    return row | {"7b_s": round(seconds, 1), "7b_share": round(seconds / CYCLE_S, 4)}


def main() -> None:
    """Prints a row for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="(default: 1)")
    parser.add_argument("--repeat", type=int, default=5, help="(default: 5)")
    parser.add_argument("--folder", type=Path, help="of the store; in memory if none is named")
    parser.add_argument("--json", action="store_true", help="one JSON object last on stdout")
    asked = parser.parse_args()
    text = RUN_FILE.read_text()
    run = parse_config(RunConfig, text, source=str(RUN_FILE), overrides=SMALLER)
    torch.set_num_threads(1)
    rows = []
    for threads in asked.threads:
        rows.append(row_of(Bench(run, asked.folder, threads), threads, asked.repeat))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()))
    if asked.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
