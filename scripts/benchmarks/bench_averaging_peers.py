"""The worker processes of bench_averaging.py: members of a run, and owners of averagers."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hivemind
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm.codecs import Content, allocate, cut_from, encoded, fill
from swarm.config import NetworkSection, RunConfig, validate_config
from swarm.experts import UnitLayout, expert_of_unit, expert_unit
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import PROTOCOL
from swarm.network.node.node import Handlers, Node
from swarm.network.rounds.record_file import RecordFile
from swarm.network.rounds.round_driver import RoundDriver
from swarm.network.runs.run_founding import founding_manifest
from swarm.protocol.messages.events import Record
from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.rounds import LocalPeer, RoundMachine, Rules
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.layout import Layout, layout_of
from swarm.protocol.values.manifest import Founding, Manifest, run_id

HIDDEN = 128
DEADLINE_S = 120.0
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
TOLERANCE = 1e-6
"""Tolerance for values of about 1. hivemind adds differences, so its last bit differs."""

Values = NDArray[np.float32]


@dataclass(frozen=True)
class Setting:
    """The tensors to average, and their owners."""

    peers: int
    experts: int
    owners: int
    megabytes: float

    def run(self) -> RunConfig:
        values = {
            "run": {"name": "bench", "rounds": 2**20},
            "model": {
                "hidden_size": HIDDEN,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "num_experts": self.experts,
                "num_experts_per_tok": 1,
                "moe_intermediate_size": max(1, round(self.megabytes * 1e6 / (3 * 4 * HIDDEN))),
            },
            "data": {"sequence_length": 32, "validation_bytes": 64},
            "train": {"batch_tokens": 32, "micro_batch_sequences": 1, "compute": "fp32"},
            "optimizer": {"lr": 1e-3},
            "round": {"local_steps": 1},
            "ownership": {"owners_per_expert": self.owners},
            "wire": {"shared": "fp32", "experts": "fp32", "part_bytes": 2**18},
        }
        return validate_config(RunConfig, values, source="bench_averaging")

    def owners_of(self, expert: int) -> list[int]:
        return sorted((expert + k) % self.peers for k in range(self.owners))


def values_of(round_number: int, peer: int, unit: int, num_elements: int) -> Values:
    """The values that a peer offers.

    They depend on a seed, so every process can check the means.
    """
    generator = np.random.default_rng([round_number, peer, unit])
    return generator.standard_normal(num_elements, dtype=np.float32)


def mean_of(round_number: int, peers: list[int], unit: int, num_elements: int) -> Values:
    total = values_of(round_number, peers[0], unit, num_elements)
    for peer in peers[1:]:
        total = total + values_of(round_number, peer, unit, num_elements)
    return total / np.float32(len(peers))


def is_wrong(result: Values, expected: Values) -> bool:
    return not np.allclose(result, expected, rtol=0, atol=TOLERANCE)


# ---------------------------------------------------------------- ours, in one process


class OurPeer:
    """One member of a run, driven without a trainer."""

    def __init__(self, setting: Setting, index: int, folder: Path, known: list[str]) -> None:
        self.run, self.index, self.folder = setting.run(), index, folder
        self.layout: Layout = layout_of(self.run)
        self.store = BlobStore(folder)
        self.server = BlobServer()
        self.server.attach(self.store)
        self.driver: RoundDriver
        self.node = Node.start(
            identity_path=folder / "identity.key",
            network=NetworkSection(host_maddrs=(LOOPBACK,)),
            known_peers=known,
            handlers=Handlers(on_message=self._take, streams={PROTOCOL: self.server.serve}),
        )

    async def _take(self, source: str, payload: bytes) -> None:
        if hasattr(self, "driver"):  # others may have begun before
            self.driver.inbound.take(source, payload)

    def found(self, peer_ids: list[str]) -> None:
        """Derives manifest 0, the same at all peers, and starts the driver."""
        self.peer_ids = peer_ids
        manifest = self._manifest_zero()
        name = run_id("bench", self.run.fingerprint(), manifest.digest)
        self.store.put(manifest.encoded)
        peer = LocalPeer(
            self.node.peer_id,
            1.0,
            Rules.of(name, self.run, self.layout),
            Timers(),
            now=time.monotonic(),
            random=random.Random(self.index),
            sign=self.node.identity.sign,
        )
        record = Record(manifest, None, None)
        machine = RoundMachine(peer, record, stored=self.store.digests())
        self.driver = RoundDriver(
            self.node,
            self.store,
            machine,
            record_file=RecordFile(self.folder / "record"),
            layout=self.layout,
            settings=self.run.round,
            merger=lambda _: {},
        )
        self.driver.start()
        self.tip = manifest

    def _manifest_zero(self) -> Manifest:
        config, validation = self.run.canonical_json(), b"none"
        founding = Founding(
            founder=self.peer_ids[0],
            nonce="0" * 32,
            config=self.store.put(config),
            config_bytes=len(config),
            validation=self.store.put(validation),
            validation_bytes=len(validation),
        )
        initial = {}
        for number, unit in enumerate(self.layout.units):
            value = values_of(0, 0, number, unit.num_elements).tobytes()
            initial[unit.unit] = (self.store.put(value), len(value))
        present = dict.fromkeys(sorted(self.peer_ids), 1.0)
        return founding_manifest(founding, self.run, self.layout, initial, present)

    def prepare(self, round_number: int) -> None:
        self.tensors: dict[str, Tensor] = allocate(self.layout.units, self.layout.shapes)
        self.sources = {unit.unit: self._sources(unit) for unit in self.layout.units}
        for number, unit in self._mine():
            value = values_of(round_number, self.index, number, unit.num_elements)
            fill(self.tensors, unit, value.data.cast("B"))

    def _sources(self, unit: UnitLayout) -> list[int]:
        expert = expert_of_unit(unit.unit)
        peers = self.peer_ids if expert is None else self.tip.owners[expert]
        return [self.peer_ids.index(peer) for peer in sorted(peers)]

    def _mine(self) -> Iterator[tuple[int, UnitLayout]]:
        for number, unit in enumerate(self.layout.units):
            if self.index in self.sources[unit.unit]:
                yield number, unit

    def _blob(self, unit: UnitLayout) -> Content:
        return encoded(unit, cut_from(self.tensors.__getitem__))

    def average(self, _: int) -> None:
        units = {}
        for _, unit in self._mine():
            digest, size = self.driver.store_value(self._blob(unit))
            units[unit.unit] = OfferedUnit(digest, size, self.tip.entries[unit.unit].digest)
        self.driver.offer(Offer(self.tip.digest, 1, 32, units))
        applied = self.driver.wait_for_tip(self.tip.digest, DEADLINE_S)
        assert len(applied) == 1, f"{len(applied)} manifests: {self.driver.last_reason}"
        self.tip = applied[0].manifest
        for unit in self.layout.units:
            blob = self.store.get(self.tip.entries[unit.unit].digest)
            assert blob is not None
            fill(self.tensors, unit, blob)

    def num_wrong(self, round_number: int) -> int:
        wrong = 0
        for number, unit in enumerate(self.layout.units):
            peers = self.sources[unit.unit]
            expected = mean_of(round_number, peers, number, unit.num_elements)
            result = np.frombuffer(self._blob(unit).whole(), dtype=np.float32)
            wrong += is_wrong(result, expected)
        return wrong

    def close(self) -> None:
        self.node.run(self.driver.stop(), 10)
        self.node.stop(10)


def serve_ours(link: Connection, setting: Setting, index: int, folder: Path) -> None:
    torch.set_num_threads(1)
    peer = OurPeer(setting, index, folder, link.recv())
    link.send((peer.node.peer_id, list(peer.node.addresses)))
    peer.found(link.recv())
    obey(link, peer.prepare, peer.average, peer.num_wrong, peer.close)


# ---------------------------------------------------------------- hivemind, in one process


class HivemindPeer:
    """One process with an averager for each expert group that it is in."""

    def __init__(self, setting: Setting, index: int, known: list[str]) -> None:
        self.setting, self.index = setting, index
        self.dht = hivemind.DHT(initial_peers=known, host_maddrs=[LOOPBACK], start=True)
        layout = layout_of(setting.run()).by_unit
        self.sizes = {e: layout[expert_unit(e)].num_elements for e in range(setting.experts)}
        self.averagers: dict[int, hivemind.DecentralizedAverager] = {}

    def found(self) -> None:
        for expert in range(self.setting.experts):
            if self.index in self.setting.owners_of(expert):
                self.averagers[expert] = hivemind.DecentralizedAverager(
                    [torch.zeros(self.sizes[expert])],
                    self.dht,
                    prefix=f"expert{expert}",
                    target_group_size=self.setting.owners,
                    min_group_size=self.setting.owners,
                    start=True,
                )

    def prepare(self, round_number: int) -> None:
        for expert, averager in self.averagers.items():
            value = values_of(round_number, self.index, expert, self.sizes[expert])
            with averager.get_tensors() as tensors:
                tensors[0][:] = torch.from_numpy(value)

    def average(self, _: int) -> None:
        steps = [a.step(wait=False, timeout=DEADLINE_S) for a in self.averagers.values()]
        for step in steps:
            step.result(DEADLINE_S)

    def num_wrong(self, round_number: int) -> int:
        wrong = 0
        for expert, averager in self.averagers.items():
            peers = self.setting.owners_of(expert)
            expected = mean_of(round_number, peers, expert, self.sizes[expert])
            with averager.get_tensors() as tensors:
                wrong += is_wrong(tensors[0].numpy(), expected)
        return wrong

    def close(self) -> None:
        for averager in self.averagers.values():
            averager.shutdown()
        self.dht.shutdown()


def serve_hivemind(link: Connection, setting: Setting, index: int, _: Path) -> None:
    multiprocessing.set_start_method("fork", force=True)  # hivemind's intended use
    torch.set_num_threads(1)
    peer = HivemindPeer(setting, index, link.recv())
    link.send((str(peer.dht.peer_id), [str(a) for a in peer.dht.get_visible_maddrs()]))
    link.recv()
    peer.found()
    obey(link, peer.prepare, peer.average, peer.num_wrong, peer.close)


def obey(
    link: Connection,
    prepare: Callable[[int], None],
    average: Callable[[int], None],
    num_wrong: Callable[[int], int],
    close: Callable[[], None],
) -> None:
    """Executes the parent's commands one by one, and answers each."""
    link.send(None)
    commands: Mapping[str, Callable[[int], Any]] = {
        "prepare": prepare,
        "average": average,
        "num_wrong": num_wrong,
    }
    try:
        while (command := link.recv()) is not None:
            word, round_number = command
            link.send(commands[word](round_number))
    finally:
        close()
