#!/usr/bin/env python
"""How long a peer's steps stand still while it offers and adopts: nanoseconds an element.

One of four peers, without a network: a model with the layout of a run file for home links, whose
values have moved a little, is offered as the peer does it, and then adopts a manifest that counts
the offer and renews everybody's experts. Nothing is trained. By number of threads:

  shared offer, adopt   of a shared tensor's element, in each round
  own offer, adopt      of an owned expert's element, once a cycle
  others' adopt         of an expert's element that others train, once a cycle
  7B                    seconds a cycle of these by the 7B's elements, and their share of the
                        1,800 s that its 50 steps take in the last phase

The store is in memory or, with --folder, on a disk; engines are resident, on the CPU.

    .venv/bin/python scripts/bench_stall.py --threads 1 2 --json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch

from swarm.codecs import Content
from swarm.config import RunConfig, parse_config
from swarm.experts import expert_of_unit
from swarm.model.cost import parameters
from swarm.model.link_plan import setting_of
from swarm.network.blobs import BlobStore
from swarm.network.contents import store_content, write
from swarm.network.founding import founding_manifest
from swarm.peer.live_model import Agreed, LiveModel, initial_contents
from swarm.peer.offering import Offering
from swarm.peer.rounds import Rounds
from swarm.peer.status import PeerStatus
from swarm.peer.unit_threads import UnitThreads
from swarm.protocol.adoption import Action, adopt
from swarm.protocol.layout import layout_of
from swarm.protocol.manifest import Digest, Founding, Kind, Manifest, Unit
from swarm.protocol.messages import Offer, OfferedUnit
from swarm.protocol.rounds.rules import Rules
from swarm.train.resident import ResidentEngine

RUN_FILE = Path(__file__).parents[1] / "configs" / "runs" / "spes_7b_home.toml"
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
"""All units are due in each round, so that one round shows each kind."""
PEERS = ("me", "p1", "p2", "p3")
CYCLE_S = 1800.0


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
        """As after local steps."""
        engine = self.model.engine
        for unit in self.due():
            for part in self.layout.by_unit[unit].slices:
                values = engine.read_part(part)
                engine.write_part(part, values + 1e-3 * torch.randn_like(values))
        self.offering.changed()

    def due(self) -> list[Unit]:
        """What this peer offers."""
        return list(self.rules.schedule.due_of("me", self.tip))

    def offer(self, units: Sequence[Unit]) -> dict[Unit, OfferedUnit]:
        """As `Trainer.store`."""
        bases = {unit: self.tip.entries[unit].digest for unit in units}
        return self.offering.offered_all(self.tip, bases, 50 * self.run.train.batch_tokens)

    def next(self, renewed: Sequence[Unit], offered: Mapping[Unit, OfferedUnit]) -> Manifest:
        """A manifest that renews these units, by what was offered or by others."""
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

    def adopt(self, manifest: Manifest, offered: Mapping[Unit, OfferedUnit]) -> float:
        """Seconds that it takes to go there."""
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
        began_s = time.perf_counter()
        self.model.adopt(manifest, decision, self.tip)
        self.tip = manifest
        return time.perf_counter() - began_s

    def _other(self, unit: Unit, digest: Digest) -> Digest:
        """Some value that differs from the agreed one."""
        layout = self.layout.by_unit[unit]
        whole = bytearray(self.store.read(digest, 0, layout.num_bytes) or b"")
        whole[0] ^= 1
        return self._store(Content.of(bytes(whole)))[0]


def measure(bench: Bench, kind: str) -> dict[str, float]:
    """Nanoseconds an element of a kind, offered and adopted."""
    bench.moved()
    due = bench.due()
    kinds = {
        "shared": [unit for unit in due if expert_of_unit(unit) is None],
        "own": [unit for unit in due if expert_of_unit(unit) is not None],
        "others": [unit for unit in bench.layout.by_unit if unit not in due],
    }
    units, found = kinds[kind], {}
    elements = sum(bench.layout.by_unit[unit].num_elements for unit in units)
    offered: Mapping[Unit, OfferedUnit] = {}
    if kind != "others":
        began_s = time.perf_counter()
        offered = bench.offer(units)
        found["offer"] = 1e9 * (time.perf_counter() - began_s) / elements
    manifest = bench.next(units, offered)
    found["adopt"] = 1e9 * bench.adopt(manifest, offered) / elements
    return found


if __name__ == "__main__":
    run = parse_config(RunConfig, RUN_FILE.read_text(), source=str(RUN_FILE), overrides=SMALLER)
    print(parameters(run.model), setting_of(run))
    for threads in (1, 2):
        torch.set_num_threads(1)
        bench = Bench(run, Path(sys.argv[1]) if len(sys.argv) > 1 else None, threads)
        for repeat in range(3):
            print(
                threads,
                {
                    kind: {k: round(v, 2) for k, v in measure(bench, kind).items()}
                    for kind in ("shared", "own", "others")
                },
            )
