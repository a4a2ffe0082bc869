"""Agreed models of a toy run, round after round, in a local store."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarm.config import RunConfig, parse_config
from swarm.errors import NobodyReachable
from swarm.export.facts import ExportFacts, Form
from swarm.network.blobs.blob_store import BlobStore, store_content
from swarm.network.runs.run_founding import founding_manifest
from swarm.peer.text.agreed_model import AgreedModel, initial_contents
from swarm.protocol.records.records import Losses
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Founding, Manifest, run_id
from tests.blobs import blob_of
from tests.scenarios.swarms import EXACT


def toy_run(*overrides: str) -> RunConfig:
    """The run of the scenarios."""
    return parse_config(RunConfig, EXACT, source="test", overrides=overrides)


def found(store: BlobStore, run: RunConfig, held_out: bytes = b"held") -> Manifest:
    """Manifest 0, with all of its blobs in the store, and these tokens as its held-out text."""
    layout = layout_of(run)
    initial = {
        unit: (store_content(store, content), content.num_bytes)
        for unit, content in initial_contents(run, layout)
    }
    config = run.canonical_json()
    founding = Founding(
        "QmA", "nonce", store.put(config), len(config), store.put(held_out), len(held_out)
    )
    manifest = founding_manifest(founding, run, layout, initial, {"QmA": 1.0})
    store.put(manifest.encoded)
    return manifest


def after(store: BlobStore, run: RunConfig, manifest: Manifest, rounds: int = 1) -> Manifest:
    """A later manifest: expert 0 is new, everything else is unchanged."""
    layout, number = layout_of(run), manifest.round + rounds
    unit = layout.by_unit["expert.0"]
    values = {s.name: torch.full(layout.shapes[s.name], float(number)) for s in unit.slices}
    digest = store.put(blob_of(unit, values))
    entry = dataclasses.replace(manifest.entries["expert.0"], digest=digest, version=number)
    name = manifest.run or run_id(run.run.name, run.fingerprint(), manifest.blob)
    made = dataclasses.replace(
        manifest, run=name, height=number, round=number, parent=manifest.digest,
        entries={**manifest.entries, "expert.0": entry},
    )  # fmt: skip
    store.put(made.encoded)
    return made


def facts_of(run: RunConfig, manifest: Manifest, store: BlobStore) -> ExportFacts:
    """Facts of a model that is here, with a loss."""
    by_round = {number: 5.0 - number / 10 for number in range(manifest.round + 1)}
    told = Losses(by_round, {manifest.digest: by_round[manifest.round]}, 2.0)
    return ExportFacts(AgreedModel(run, manifest, store), told=told)


@dataclass
class Chain:
    """A `Source` whose swarm agrees on one manifest more at each look.

    Attributes:
        run: of the chain.
        manifests: the agreed ones, in order.
        gone: rounds whose blobs no peer has any more.
        brought: rounds that `bring` was called for.
        fetched: a set of fetched digests for each call of `bring`.
    """

    run: RunConfig
    manifests: Sequence[Manifest]
    remote: BlobStore
    store: BlobStore = field(default_factory=BlobStore)
    gone: frozenset[int] = frozenset()
    brought: list[int] = field(default_factory=list)
    fetched: list[set[str]] = field(default_factory=list)
    looks: int = 0
    pause_s: float = 5.0

    @property
    def run_id(self) -> str:
        return self.manifests[-1].run

    def newest(self, least_round: int) -> Manifest | None:
        at = min(self.looks, len(self.manifests) - 1)
        self.looks += 1
        newest = self.manifests[at]
        return newest if newest.round >= least_round else None

    def bytes_here(self, manifest: Manifest) -> int:
        return sum(self.store.bytes_here(*each) for each in manifest.sizes.items())

    def bring(self, manifest: Manifest, form: Form, within_s: float) -> ExportFacts:
        self.brought.append(manifest.round)
        if manifest.round in self.gone:
            raise NobodyReachable(f"round {manifest.round} is nowhere")
        missing = {digest for digest in manifest.blobs if not self.store.has(digest)}
        for digest in sorted(missing):
            content = self.remote.get(digest)
            assert content is not None
            self.store.put(bytes(content))
        self.store.sync(manifest.blobs)
        self.fetched.append(missing)
        return dataclasses.replace(facts_of(self.run, manifest, self.store), form=form)
