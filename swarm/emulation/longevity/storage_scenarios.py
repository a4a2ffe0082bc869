"""Scenarios of data on a disk: blobs, private states, exports, a monitor's history, text."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from swarm.data.loader import Loader
from swarm.emulation.longevity.audit import HOUR_S, Allowed, Audit, Scale, sampler
from swarm.emulation.longevity.month import DAY_S, World
from swarm.emulation.longevity.subject import Task, name_of
from swarm.errors import DataError, NobodyReachable, StateError
from swarm.export import run_follower
from swarm.export.facts import Form
from swarm.export.manager import FACTS_FILE, ExportManager
from swarm.export.run_follower import Follower
from swarm.monitor.history import encode_kept, kept_of, with_history
from swarm.monitor.server import Feed
from swarm.monitor.snapshot import Sighting, snapshot_of
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.blobs.disk_retry import patiently
from swarm.network.rounds.record_file import ChainFile
from swarm.network.wire.identity import peer_id_of
from swarm.peer.machine.state_directory import StateDirectory
from swarm.protocol.chain.trust import RECENT, Chain, proof_problem
from swarm.protocol.messages.messages import Ballot, Certificate, Link
from swarm.protocol.records.records import PeerRecord, PeerState
from swarm.protocol.values.manifest import Head, Kind, Manifest
from swarm.train.engine.engine import EngineState
from swarm.train.saving.checkpoint import PrivateState, load_private, save_private

RESTART_EVERY, EXPORT_EVERY = 40, 50
"""Numbers of rounds between two restarts, and between two exports."""


def store(world: World, scale: Scale) -> Audit:
    """Stores each round's values and a private state, with restarts and a full or hanging disk."""
    task, folder = Task.new(), world.folder / "state"
    units = [unit.unit for unit in task.layout.units if unit.unit.startswith("expert")]
    world.disk.full = [(0.3 * scale.seconds, 0.3 * scale.seconds + 600.0)]
    world.disk.hanging = [(0.55 * scale.seconds, 0.55 * scale.seconds + 1200.0)]
    directory = StateDirectory(folder)
    world.at_end(lambda: directory.close())
    run = directory.run(name_of(task, task.founding(["founder"])))
    run.path.mkdir(parents=True)
    blobs, roots = BlobStore(folder / "blobs"), dict[str, Any]()
    roots["store"] = blobs
    audit = Audit(world, roots, {"state": folder})
    sample, kept = sampler(world, scale, audit), list[str]()
    descriptors = [0, 0]
    for number in range(scale.rounds):
        world.threads.sleep(max((number + 1) * scale.round_s - world.now_s, 0.1))
        if number % RESTART_EVERY == RESTART_EVERY - 1:
            directory.close()
            directory = StateDirectory(folder)
            blobs = patiently(partial(BlobStore, folder / "blobs"), "a start")
            roots["store"] = blobs
            audit.demand(all(map(blobs.has, kept)), f"round {number}: a synced blob is missing")
            audit.demand(
                load_private(run.private_path).round == number - 1,
                f"round {number}: the private state is not the newest",
            )
        kept = patiently(partial(_put, blobs, task, units, number), "values")
        state = _private(number, dict(zip(units, kept, strict=True)))
        patiently(partial(save_private, run.private_path, state), "a private state")
        blobs.forget(kept)
        patiently(blobs.shrink, "garbage")
        directory.port = 4000 + number % 100
        descriptors[number >= scale.rounds // 2] = max(
            descriptors[number >= scale.rounds // 2], len(os.listdir("/proc/self/fd"))
        )
        sample()
    audit.demand(
        descriptors[1] <= descriptors[0] + 4,
        f"descriptors grow: {descriptors[0]} in the first half, {descriptors[1]} in the second",
    )
    audit.demand(world.disk.refused.total() > 0, "the disk was never full")
    directory.close()
    return audit


def _put(blobs: BlobStore, task: Task, units: list[str], number: int) -> list[str]:
    digests = [blobs.put(task.value(unit, 10 * number + k)) for k, unit in enumerate(units)]
    blobs.sync(digests)
    return digests


def _private(number: int, offered: Mapping[str, str]) -> PrivateState:
    tensors = {"master.w": torch.full((1000,), float(number)), "exp_avg.w": torch.zeros(1000)}
    return PrivateState(
        engine=EngineState(tensors, (0, 1), 6, 2, 1),
        run_id="month-1234",
        base_tip="ab" * 32,
        round=number,
        steps=3,
        tokens=768,
        seconds=1.0,
        data_position=number,
        offered=offered,
        expert_bases={},
        rng={},
    )


class Swarm:
    """A run as an exporter sees it: a manifest each round, with values that are lost after a while.

    Attributes:
        tries: how often each round's model was fetched.
    """

    def __init__(self, world: World, task: Task, scale: Scale) -> None:
        self.world, self.scale, self.run = world, scale, task.run
        self.first = replace(task.founding(["founder"]), run="month-0123456789abcdef")
        self.run_id = self.first.run
        sections = task.run.model_dump()
        sections["run"]["rounds"] = scale.rounds
        self.run = type(task.run).model_validate_json(json.dumps(sections, default=str))
        self.store = BlobStore()
        self.tries: dict[int, int] = {}
        self.pause_s = 30.0

    @property
    def round(self) -> int:
        """The newest round."""
        return min(int(self.world.now_s / self.scale.round_s), self.last)

    @property
    def last(self) -> int:
        """The last agreed round whose export is due."""
        return int(0.6 * self.scale.rounds) // EXPORT_EVERY * EXPORT_EVERY

    def newest(self, least_round: int) -> Manifest | None:
        """See `run_follower.Source`."""
        self.world.threads.sleep(0.1)
        if self.round < max(least_round, 1):
            return None
        number = self.round
        return replace(self.first, round=number, height=number, step=3 * number)

    def is_lost(self, number: int) -> bool:
        """Whether all peers have lost a round's values. The last round's are lost at once."""
        return number == self.last or self.round - number > 5

    def bring(self, manifest: Manifest, form: object, within_s: float = 60.0) -> Any:
        """See `run_follower.Source`. A fetch of a lost model fails after five turns of a minute."""
        self.tries[manifest.round] = self.tries.get(manifest.round, 0) + 1
        if self.is_lost(manifest.round):
            self.world.threads.sleep(300.0)
            raise NobodyReachable("the model: no answer within 60 s")
        self.world.threads.sleep(min(20.0, within_s))
        model = SimpleNamespace(manifest=manifest)
        return SimpleNamespace(model=model, form=form)

    def bytes_here(self, _: Manifest) -> int:
        """See `run_follower.Source`."""
        return 0


def exports(world: World, scale: Scale) -> Audit:
    """Exports a run whose peers stop before the last round, and whose last model is lost."""
    swarm, folder = Swarm(world, Task.new(), scale), world.folder / "exports"
    manager = ExportManager(folder, keep=3)
    follower = Follower(swarm, manager, EXPORT_EVERY, Form(), published=lambda *_: None)
    ended: list[float] = []
    audit = Audit(world, {"follower": follower, "manager": manager}, {"exports": folder})

    def written(path: Path, facts: Any, _: object = ()) -> None:
        (path / FACTS_FILE).write_text(
            json.dumps({"run_id": swarm.run_id, "manifest": facts.model.manifest.digest})
        )
        (path / "weights").write_bytes(bytes(50_000))

    def follow() -> None:
        try:
            follower.follow()
        except NobodyReachable:
            ended.append(world.now_s)

    world.set(run_follower, "write_export", written)
    world.threads.spawn(follow)
    sample = sampler(world, scale, audit)
    while world.now_s < scale.seconds:
        world.threads.sleep(scale.round_s)
        sample()
    exported = [each.round for each in manager.exports]
    audit.demand(len(exported) == 3, f"of the newest exports {len(exported)} are there, not 3")
    audit.demand(
        bool(exported) and exported[-1] >= swarm.last - EXPORT_EVERY - 1,
        f"the newest export is of round {exported[-1:]}",
    )
    most = max(swarm.tries.values(), default=0)
    audit.demand(most <= 400, f"a model that is lost was fetched {most} times")
    audit.demand(bool(ended), "the export never gives the run up")
    manager.close()
    return audit


def monitor(world: World, scale: Scale) -> Audit:
    """Looks at a run every round while peers come and go. Shows and keeps the run's history."""
    task, feed = Task.new(), Feed(4)
    tip = task.founding(["peer00", "peer01"])
    run, roots = name_of(task, tip), dict[str, Any](feed=feed)
    folder = world.folder / "monitor"
    folder.mkdir()
    a_day = scale.rounds / scale.days
    audit = Audit(
        world, roots, {"monitor": folder},
        allowed=[Allowed("Snapshot.", 40 * a_day, "2,000 points of the last rounds", 60_000),
                 Allowed("Feed._older", 8 * a_day, "four versions of 300 events", 1_300),
                 Allowed("file", 4000 * a_day, "the same on disk", 2e6)],
    )  # fmt: skip
    sample, before = sampler(world, scale, audit), None
    record = _record("peer00", scale.rounds)
    for number in range(scale.rounds):
        world.threads.sleep(max((number + 1) * scale.round_s - world.now_s, 0.1))
        tip = task.following(tip, {}, run)
        names = [f"peer{world.rng.randrange(100):02}" for _ in range(6)]
        peers = {
            name: replace(record, peer_id=name, round=tip.round, height=tip.height,
                          manifest_digest=tip.digest, tokens=tip.tokens)
            for name in names
        }  # fmt: skip
        seen = Sighting(
            run, "month", peers, {}, {}, tip, dict.fromkeys(peers, world.now_s), world.now_s
        )
        found = snapshot_of(seen)
        assert found is not None
        before = roots["snapshot"] = with_history(found, before)
        texts = [event.text for event in before.events]
        feed.show({"round": tip.round, "events": texts})  # type: ignore[typeddict-item]
        feed.since(None)
        if number % 10 == 0:
            (folder / "kept").write_bytes(encode_kept(kept_of(before)))
        sample()
    audit.demand(before is not None and before.round == scale.rounds, "rounds are missing")
    return audit


def _record(name: str, rounds: int) -> PeerRecord:
    return PeerRecord(
        peer_id=name, name=name, addresses=(), state=PeerState.TRAINING, capacity=1.0,
        generation="0", height=0, round=0, rounds_total=rounds, manifest_digest="0" * 64,
        owned_experts=(0,), room=4, step=0, tokens=0, loss=2.0, val_loss=None, tokens_per_s=100.0,
        blob_bytes_sent=0, blob_bytes_received=0, round_blob_bytes_sent=0,
        round_blob_bytes_received=0, control_bytes_sent=0, control_bytes_received=0,
        steps_skipped=0, refused={}, reason="", version="0", moments_bytes_sent=0,
        moments_bytes_received=0, zero_moments=0, moments_reason="", routing=None, grad_norm=None,
        grad_spikes=0, last_round=None, tokens_lost=0, engine="", trouble="", link=None,
        workers=None, possession="",
    )  # fmt: skip


class _Text:
    """Token ids on a disk that may hang."""

    def __init__(self, world: World, length: int) -> None:
        self.world, self.ids = world, np.arange(length) % 200

    def __getitem__(self, at: slice) -> Any:
        self.world.disk.passes("open", os.O_RDONLY)
        return self.ids[at]


def reading(world: World, scale: Scale) -> Audit:
    """Reads batches ahead in a thread. The disk hangs for two hours, in which the peer leaves."""
    task, length = Task.new(), 64 * 4096 + 1
    text = _Text(world, length)
    shards: Any = SimpleNamespace(
        arrays=[text], num_tokens=length, windows=lambda size: [(length - 1) // size]
    )
    world.disk.hanging = [(0.5 * scale.seconds, 0.5 * scale.seconds + 2 * HOUR_S)]
    roots: dict[str, Any] = {}
    audit = Audit(world, roots)
    sample, loader, step, refused = sampler(world, scale, audit), Loader(shards, task.run), 0, 0
    roots["loader"], dealt = loader, ((0, 4000),)
    for number in range(scale.rounds):
        world.threads.sleep(max((number + 1) * scale.round_s - world.now_s, 0.1))
        began_s = world.now_s
        try:
            batch = loader.batch(dealt, step % 900, task.run.train.batch_tokens)
            audit.demand(batch.shape == (4, 65), "a batch has another shape")
            step += 1
        except (DataError, StateError):
            refused += 1
            audit.demand(world.now_s - began_s < 200.0, "a batch waits longer than its deadline")
            began_s = world.now_s
            loader.close()
            audit.demand(
                world.now_s - began_s < 60.0,
                f"leaving waits {world.now_s - began_s:.0f} s for a thread that a disk holds",
            )
            roots["loader"] = loader = Loader(shards, task.run)
        sample()
    audit.demand(refused > 0, "the disk never hung")
    return audit


VOTERS = 32
CHANGES_A_DAY = 10
LINK_BYTES = 4_500
"""Size in memory of a link of 32 voters: its head, and a certificate of 17 signatures."""


def chain(world: World, scale: Scale) -> Audit:
    """A chain of heads whose electorate changes ten times a day, in memory and on disk.

    The agreement is imitated: each manifest follows from the previous manifest with a quorum's
    signatures, and the file is written when `rounds.adopter` would write it. Restarts read the file
    again. Newcomers, and peers that were away for a day, get a proof of the tip.
    """
    (folder := world.folder / "chain").mkdir()
    names = [name for name in (peer_id_of(world.rng.randbytes(32)) for _ in range(400)) if name]
    voters, file = sorted(names[:VOTERS]), ChainFile(folder / "chain")
    first = _head(voters, 0, None)
    links, appended = Chain((Link(first),)), 0
    file.append(links.links)
    roots: dict[str, Any] = {"chain": links}
    audit = Audit(
        world, roots, {"chain": folder},
        allowed=[Allowed("Chain", 2 * CHANGES_A_DAY, "links by turnover"),
                 Allowed("Head", 1e6, "as many as links"), Allowed("Link", 1e6, "likewise"),
                 Allowed("Certificate", 1e6, "likewise"),
                 Allowed("memory", LINK_BYTES * 2 * CHANGES_A_DAY, "links by turnover"),
                 Allowed("file", 40_000 * CHANGES_A_DAY, "links by turnover")],
    )  # fmt: skip
    sample, next_change_s = sampler(world, scale, audit), DAY_S / CHANGES_A_DAY
    away = [links]
    for number in range(1, scale.rounds + 1):
        world.threads.sleep(max(number * scale.round_s - world.now_s, 0.1))
        before = links.tip
        if world.now_s >= next_change_s:
            next_change_s += DAY_S / CHANGES_A_DAY
            gone = world.rng.choice(voters)
            come = world.rng.choice([name for name in names if name not in voters])
            voters = sorted({*voters, come} - {gone})
        head = _head(voters, number, before)
        signers = sorted(world.rng.sample(before.voters, len(before.voters) // 2 + 1))
        certificate = Certificate(Ballot(0, before.order[0]), dict.fromkeys(signers, bytes(64)))
        grown = links.grown((Link(head, certificate, before),))
        new = grown.beyond(links)
        links = roots["chain"] = grown
        file.append(new)
        appended += len(new)
        if appended >= max(RECENT, len(links.links)):
            appended = 0
            file.rewrite(lambda now=links.links: now)  # type: ignore[misc]
        if number % max(scale.rounds // 10, 1) == 0:
            record: Any = SimpleNamespace(
                tip=SimpleNamespace(head=head), parent=SimpleNamespace(head=before),
                certificate=certificate,
            )  # fmt: skip
            links = roots["chain"] = Chain.of(record, file.read())
            for old in away:
                proof = links.proof(old.tip.code)
                problem = proof_problem(old.rooted(proof), head, old.trusted)
                audit.demand(problem is None, f"height {number} from {old.tip.height}: {problem}")
            away = [away[0], links, *away[1:3]]
        sample()
    most = RECENT + 2 * CHANGES_A_DAY * scale.days + 8
    audit.demand(
        len(links.links) <= most, f"the chain has {len(links.links)} links, more than {most:.0f}"
    )
    return audit


def _head(voters: list[str], height: int, parent: Head | None) -> Head:
    bits = "0" * -(-len(voters) // 4)
    return Head(
        run="month-1234" if parent else "", generation="0", height=height,
        kind=Kind.QUORUM if parent else Kind.FOUNDING, parent=parent.digest if parent else None,
        lineage=(), founder=parent.founder if parent else voters[0], voters=tuple(voters),
        anchors=bits, contributed=bits, seed=None, body=f"{height:064x}",
    )  # fmt: skip
