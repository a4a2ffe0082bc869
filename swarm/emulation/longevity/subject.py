"""The peer under test, built like a peer of `swarm-peer`, but without engine and agreement.

The classes are the shipped ones: node, direct streams, downloads, transfers and their pace, blob
store on disk, status, record, publisher with presence and clock, line measurements and quota. A
scenario stands in for the agreement: it names blobs to fetch and manifests to apply.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from swarm.config import NetworkSection, RunConfig
from swarm.emulation.longevity.kernel import EPOCH_S
from swarm.emulation.longevity.month import World
from swarm.emulation.longevity.sockets import Line, Machine
from swarm.emulation.longevity.virtual_dht import VirtualP2P
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.node.node import Node
from swarm.network.node.substrate import ValueWithExpiration
from swarm.network.rounds.transfers import Transfers
from swarm.network.runs.run_founding import founding_manifest
from swarm.network.wire.identity import peer_id_of
from swarm.peer.machine.state_directory import StateDirectory
from swarm.peer.start.link_monitor import LinkMonitor
from swarm.peer.start.quota import QuotaWatch
from swarm.peer.status.observing import RoundReport
from swarm.peer.status.publisher import Publisher, RoomsThere, announcement
from swarm.peer.status.status import PeerStatus
from swarm.peer.training.leaving import Stop
from swarm.protocol.messages.events import BlobWanted, Event, Fetch, Purpose, Stored
from swarm.protocol.records.records import PeerRecord, encode_record, peers_key, shard_of
from swarm.protocol.timing.deadlines import Timers, production_timers
from swarm.protocol.values.layout import Layout, layout_of
from swarm.protocol.values.manifest import Entry, Founding, Kind, Manifest, PeerId, run_id
from swarm.train.engine.local_steps import LocalStats

RUN: dict[str, dict[str, Any]] = {
    "run": {"name": "month", "rounds": 1_000_000, "seed": 1},
    "model": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "vocab_size": 4096,
    },
    "data": {"sequence_length": 64, "validation_bytes": 64},
    "train": {"batch_tokens": 256, "micro_batch_sequences": 2, "compute": "fp32", "frozen": "fp32"},
    "optimizer": {"lr": 1e-2, "warmup_steps": 2},
    "round": {"local_steps": 3},
    "wire": {"experts": "fp32"},
}


def run_config() -> RunConfig:
    """A run of about 3 MB, half of it shared tensors."""
    return RunConfig.model_validate_json(json.dumps(RUN))


@dataclass(frozen=True)
class Task:
    """The model that all peers of a month train."""

    run: RunConfig
    layout: Layout

    @classmethod
    def new(cls) -> Task:
        """The run of `run_config`."""
        run = run_config()
        return cls(run, layout_of(run))

    def value(self, unit: str, number: int) -> bytes:
        """A finite value of a unit. Each number gives another value."""
        size = self.layout.by_unit[unit].num_bytes
        content = np.zeros(size // 4, dtype="<f4")
        content[0] = number
        return content.tobytes()

    @cached_property
    def shared(self) -> list[str]:
        """Units of shared tensors."""
        return [u.unit for u in self.layout.units if u.unit.startswith("shared")]

    def founding(self, members: list[PeerId]) -> Manifest:
        """Manifest 0."""
        digest = "0" * 64
        initial = {u.unit: (f"{k:064x}", u.num_bytes) for k, u in enumerate(self.layout.units)}
        founding = Founding(members[0], "nonce", digest, 1, digest, 1)
        return founding_manifest(
            founding, self.run, self.layout, initial, dict.fromkeys(members, 1.0)
        )

    def following(self, tip: Manifest, entries: dict[str, Entry], run: str) -> Manifest:
        """The manifest of the next round."""
        return replace(
            tip,
            run=run,
            height=tip.height + 1,
            round=tip.round + 1,
            kind=Kind.QUORUM,
            parent=tip.digest,
            step=tip.step + self.run.round.local_steps,
            tokens=tip.tokens + 256 * len(tip.members),
            contributors=tuple(sorted(tip.members)),
            entries={**tip.entries, **entries},
            sources={},
        )


class Other:
    """Another peer, which is only a real node with a store in memory."""

    def __init__(self, world: World, machine: Machine, known: list[str], **network: Any) -> None:
        self.world, self.machine, self.store = world, machine, BlobStore()
        self.node = world.node(machine, known_peers=known, store=self.store, **network)
        self.peer_id = self.node.peer_id
        self.held: list[str] = []

    def announce(self, run: str, record: PeerRecord) -> None:
        """Puts the peer's presence into the DHT until the month ends, without publishing it."""
        mine = replace(record, peer_id=self.peer_id, addresses=self.node.addresses)
        _announce(self.world, run, mine, self.node.identity.public_key)

    def give(self, values: dict[str, bytes], *, keep: int = 2) -> dict[str, str]:
        """Stores values and returns their digests. Forgets values of earlier rounds."""
        digests = {unit: self.store.put(value) for unit, value in values.items()}
        self.held = [*self.held, *digests.values()][-keep * len(values) :]
        self.store.collect(self.held)
        return digests


def announced(world: World, run: str, record: PeerRecord, number: int) -> PeerId | None:
    """A peer that exists only as a record. None if the key cannot be a peer's."""
    key = world.rng.randbytes(32)
    peer = peer_id_of(key)
    if peer:
        _announce(world, run, replace(record, peer_id=peer, name=f"other {number}"), key)
    return peer


def _announce(world: World, run: str, record: PeerRecord, subkey: bytes) -> None:
    records = world.net.records.setdefault(peers_key(run, shard_of(record.peer_id)), {})
    records[subkey] = ValueWithExpiration(encode_record(record), EPOCH_S + 1000 * 86_400.0)


class Subject:
    """See the module. Made and called only in virtual threads."""

    def __init__(
        self,
        world: World,
        task: Task,
        line: Line,
        known: list[str],
        *,
        quota_gb: float | None = None,
        **network: Any,
    ) -> None:
        self.world, self.task = world, task
        self.machine = world.machine(line)
        self.network = NetworkSection(data_quota_gb=quota_gb, **network)
        self.tip = Manifest.__new__(Manifest)
        self.starts, self.present = 0, set[PeerId]()
        self.counted_by_month: dict[str, int] = {}
        self._known, self._options = known, network
        self.start()

    def start(self) -> None:
        """Begins a life of the peer on the same machine and disk."""
        world = self.world
        with world.at(self.machine):
            self.starts += 1
            self.state = StateDirectory(world.folder / "state")
            world.at_end(self.state.close)
            self.store = BlobStore(world.folder / "state" / "blobs")
            self.node: Node = world.node(
                self.machine, known_peers=self._known, store=self.store, name="state",
                **self._options,
            )  # fmt: skip
            self.stop_wish = Stop(120.0)
            self.transfers = Transfers(self.node, self.store, self.task.layout, self._event)
            self.arrived: set[str] = set()
            self.quota = QuotaWatch(self.network, self.state, self.node, self.stop_wish)

    def counted_bytes(self) -> int:
        """Bytes that the quota has counted in all months. Each call looks at the present month."""
        assert self.quota._quota, "it has no quota"
        count = self.quota._quota.count
        self.counted_by_month[count.month] = count.num_bytes
        return sum(self.counted_by_month.values())

    def enter(self, tip: Manifest, run: str, *, publishes: bool = True) -> None:
        """Takes part in the run, with a peer's status, publisher and line."""
        with self.world.at(self.machine):
            self.run_id, self.tip = run, tip
            directory = self.state.run(run)
            directory.path.mkdir(parents=True, exist_ok=True)
            self.directory = directory
            self.status = PeerStatus(
                self.node, self.task.run, name="subject", capacity=1.0, directory=directory
            )
            self.status.manifest = tip
            self.status.fetched_of = lambda: self.transfers.rate_bytes_per_s
            host: Any = SimpleNamespace(
                node=self.node, state=self.state, config=SimpleNamespace(network=self.network)
            )
            self.line = LinkMonitor(host, self.status, run)
            self.there = RoomsThere()
            self.publisher = Publisher(
                self.node,
                self.status,
                announcement(run, self.task.run, tip),
                self.state,
                on_present=self._are_present,
                beside=self.line.measure_again,
            )
            if publishes:
                self.publisher.start()

    def _are_present(self, present: Mapping[PeerId, PeerRecord]) -> None:
        self.present.update(present)
        self.there.note(present)

    @property
    def parts(self) -> dict[str, Any]:
        """The objects that live as long as this life."""
        return {
            "node": self.node, "store": self.store, "transfers": self.transfers,
            "quota": self.quota, "status": self.status, "publisher": self.publisher,
            "line": self.line, "there": self.there,
        }  # fmt: skip

    @property
    def daemon(self) -> VirtualP2P:
        """The present libp2p daemon."""
        daemon: Any = self.node._living_p2p()
        assert isinstance(daemon, VirtualP2P)
        return daemon

    def start_again(self) -> None:
        """Ends this life in order, and begins another life in the same run."""
        self.end()
        self.start()
        self.enter(self.tip, self.run_id)

    def end(self) -> None:
        """Ends this life in order."""
        with self.world.at(self.machine):
            self.publisher.stop()
            self.quota.end()
            self.node.end("transfers", self.transfers.stop(), 5.0)
            self.node.stop(5.0)
            self.state.close()

    def _event(self, event: Event) -> None:
        if isinstance(event, Stored):
            self.arrived.add(event.digest)
            self.store.unpin([event.digest])

    def fetch(self, wants: list[BlobWanted], timeout_s: float) -> bool:
        """Fetches through the transfers. Returns whether all blobs came in time."""
        with self.world.at(self.machine):
            self.node.run(self.transfers.start(Fetch(Purpose.CATCH_UP, tuple(wants))), 30.0)
            end_s = self.world.now_s + timeout_s
            wanted = {want.digest for want in wants}
            while not wanted <= self.arrived and self.world.now_s < end_s:
                self.world.threads.sleep(0.5)
            is_here = wanted <= self.arrived
            self.arrived.clear()
            return is_here

    def apply(self, manifest: Manifest, *, counted: bool = True) -> None:
        """Applies the manifest of a round that was decided."""
        with self.world.at(self.machine):
            stats = LocalStats(3, 768, 2.0, 0, 2.5, 2.0, completed=True)
            self.status.end_steps(stats)
            self.status.applied(RoundReport(manifest, stats, counted, 1.0, "decided by all"))
            self.tip = manifest
            self.store.collect([e.digest for e in manifest.entries.values()])
        if self.network.data_quota_gb is not None:
            self.counted_bytes()  # the month may end before the next round

    def timers(self) -> Timers:
        """The timers as the round driver adapts them."""
        due = {unit.unit: unit.num_bytes for unit in self.task.layout.units}
        measured = self.transfers.measured(due)
        return production_timers(measured, roster_after_s=6.0, reform_after_s=None).timers


def name_of(task: Task, tip: Manifest) -> str:
    """The id of the run that begins with this manifest."""
    return run_id("month", task.run.fingerprint(), tip.digest)


__all__ = ["Other", "Subject", "Task", "name_of"]
