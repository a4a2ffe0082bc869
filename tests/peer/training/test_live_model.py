"""Moving a live engine to an agreed state whose blobs may be collected meanwhile."""

import errno
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.codecs import mean_of
from swarm.errors import StateError
from swarm.experts import expert_shapes, expert_unit
from swarm.model.frozen import Int8Stack
from swarm.network.blobs.blob_store import BlobGone, BlobStore, Draft, reader, store_content
from swarm.network.runs.run_founding import founding_manifest
from swarm.peer.text.agreed_model import Agreed, initial_contents
from swarm.peer.training.live_model import LiveModel
from swarm.peer.training.trainer import Trainer
from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.training.adoption import Action, adopt
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Founding, Kind, Manifest
from swarm.train.engine.engine_options import EngineKind, EngineOptions
from swarm.train.engine.resident import ResidentEngine
from swarm.train.fallback_engine import SteppingEngine
from tests.blobs import blob_of
from tests.peer.adopting import adopt_into, founded_in, offered_values
from tests.train.runs import NUM_EXPERTS, all_names, batch, held_out, same, tiny_run

RUN = tiny_run()
LAYOUT = layout_of(RUN)
EXPERT = 1
NAMES = list(expert_shapes(RUN.model, EXPERT))
PEERS = ("me", "you")


@pytest.fixture
def store() -> BlobStore:
    return BlobStore(None)


@pytest.fixture
def founded(store: BlobStore) -> Manifest:
    return founded_in(store, RUN, ["me"])


@pytest.fixture
def model(store: BlobStore, founded: Manifest) -> LiveModel:
    live = LiveModel("me", RUN, ResidentEngine(RUN), Agreed(store, LAYOUT))
    adopt_into(live, founded, previous="")
    return live


def successor(parent: Manifest, store: BlobStore, *, kind: Kind) -> tuple[Manifest, Tensor]:
    """A manifest with another value of one expert, and the value of its first tensor."""
    unit = expert_unit(EXPERT)
    values = {name: torch.full(LAYOUT.shapes[name], 0.25) for name in NAMES}
    before = parent.entries[unit]
    digest = store.put(blob_of(LAYOUT.by_unit[unit], values))
    base = before.digest if kind is Kind.MERGE else None
    entries = {**parent.entries, unit: replace(before, digest=digest, base=base)}
    manifest = replace(
        parent, height=parent.height + 1, kind=kind, parent=parent.digest, entries=entries
    )
    return manifest, values[NAMES[0]]


def add_progress(model: LiveModel, amount: float) -> None:
    masters = model.engine.read(NAMES)
    model.engine.write({name: masters[name] + amount for name in NAMES})


def test_local_progress_moves_with_a_merge(
    model: LiveModel, store: BlobStore, founded: Manifest
) -> None:
    add_progress(model, 0.5)
    merged, value = successor(founded, store, kind=Kind.MERGE)
    adopt_into(model, merged, previous=founded.digest)
    moved = model.engine.read(NAMES)[NAMES[0]]
    # The initial weights (about 0.02) are added and subtracted in fp32.
    assert torch.allclose(moved, value + 0.5, atol=1e-6)


def test_an_expert_restarts_from_its_merged_value_when_its_base_is_gone(
    model: LiveModel, store: BlobStore, founded: Manifest
) -> None:
    add_progress(model, 0.5)
    merged, value = successor(founded, store, kind=Kind.MERGE)
    store.collect({entry.digest for entry in merged.entries.values()})
    adopt_into(model, merged, previous=founded.digest)
    assert torch.equal(model.engine.read(NAMES)[NAMES[0]], value)
    assert model.bases[EXPERT] == merged.entries[expert_unit(EXPERT)].digest


def test_a_manifest_that_was_collected_leaves_the_engine_as_it_was(
    model: LiveModel, store: BlobStore, founded: Manifest
) -> None:
    add_progress(model, 0.5)
    before, bases = model.engine.read(all_names(RUN)), dict(model.bases)
    gone, _ = successor(founded, store, kind=Kind.QUORUM)
    store.collect({entry.digest for entry in founded.entries.values()})
    with pytest.raises(BlobGone):
        adopt_into(model, gone, previous=founded.digest)
    assert same(model.engine.read(all_names(RUN)), before)
    assert model.bases == bases


def test_int8_experts_are_made_from_agreed_values(store: BlobStore, founded: Manifest) -> None:
    """Roundings do not accumulate: after any number of rounds there is only one."""
    options = EngineOptions.of(RUN).but(frozen="int8")
    live = LiveModel("other", RUN, ResidentEngine(RUN, options), Agreed(store, LAYOUT))
    manifest = founded
    once = Int8Stack(torch.zeros(1, 16, 16, dtype=torch.int8), torch.zeros(1, 16, 1))
    for _ in range(3):
        adopt_into(live, manifest, previous=manifest.parent or "")
        unit = expert_unit(EXPERT)
        agreed = dict(live.agreed.tensors(manifest.entries[unit].digest, unit))
        for name, value in agreed.items():
            once.put(0, value)
            assert torch.equal(live.engine.read([name])[name], once.get(0))
        manifest, _ = successor(manifest, store, kind=Kind.QUORUM)


def test_blobs_that_are_being_adopted_are_not_collected(store: BlobStore) -> None:
    digest = store.put(b"agreed")
    with Agreed(store, LAYOUT).held([digest]):
        store.collect(set())
        assert store.has(digest)
    store.collect(set())
    assert not store.has(digest)
    with pytest.raises(BlobGone), Agreed(store, LAYOUT).held([digest_of(b"never")]):
        pass


def test_every_expert_is_owned_by_the_only_member(model: LiveModel) -> None:
    assert sorted(model.bases) == list(range(NUM_EXPERTS))


def test_frozen_experts_on_disk_are_the_agreed_blobs_even_when_collected(tmp_path: Path) -> None:
    """At an odd offset in its pack, without a byte in the engine's own files, and bit for bit."""
    store = BlobStore(tmp_path)
    store.put(b"odd")
    initial = {
        unit: (store_content(store, value), value.num_bytes)
        for unit, value in initial_contents(RUN, LAYOUT)
    }
    founding = Founding("me", "n", "c" * 64, 1, "d" * 64, 4)
    founded = founding_manifest(founding, RUN, LAYOUT, initial, {"me": 1.0, "other": 1.0})
    files = tmp_path / "frozen"
    kinds = {"kind": EngineKind.STREAMING, "frozen_folder": files, "frozen_lent": True}
    options = replace(EngineOptions.of(RUN), **kinds)
    engines = [ResidentEngine(RUN), SteppingEngine(RUN, options)]
    lives = [LiveModel("other", RUN, engine, Agreed(store, LAYOUT)) for engine in engines]
    second, value = successor(founded, store, kind=Kind.QUORUM)
    if "other" in founded.owners[EXPERT]:
        second = replace(second, owners={**founded.owners, EXPERT: ("me",)})
    for live in lives:
        adopt_into(live, founded, previous="")
        adopt_into(live, second, previous=founded.digest)
    store.collect(set())
    assert not list((tmp_path / "packs").iterdir())
    for step in range(2):
        resident, streaming = (engine.step(batch(RUN, step), lr=1e-2) for engine in engines)
        assert resident == streaming
    resident_values, values = (engine.read(all_names(RUN)) for engine in engines)
    assert same(resident_values, values)
    assert torch.equal(values[NAMES[0]], value)
    for file in map(Path.stat, files.iterdir()):
        assert file.st_blocks * 512 <= file.st_blksize  # of its last byte
    engines[1].close()


# ---------------------------------------------------------------- rounds of slices

SLICED = tiny_run(
    round={"experts_every": 4, "shared_every": 4, "stagger": True}, wire={"part_bytes": 4096}
)


@pytest.fixture
def sliced(store: BlobStore) -> tuple[LiveModel, Manifest, Manifest]:
    """A trained model, manifest 0, and a round that renewed one part of four."""
    layout = layout_of(SLICED)
    founded = founded_in(store, SLICED, ["me"])
    live = LiveModel("me", SLICED, ResidentEngine(SLICED), Agreed(store, layout))
    adopt_into(live, founded, previous="")
    live.engine.step(batch(SLICED, 0), lr=1e-2)
    part = layout.by_unit["shared.1"]
    blob = blob_of(part, {n: torch.full(layout.shapes[n], 0.5) for n in layout.shapes})
    entry = replace(founded.entries["shared.1"], digest=store.put(blob), version=1)
    entries = {**founded.entries, "shared.1": entry}
    sources = {"shared.1": (("me", "mine"),)}
    renewed = replace(
        founded, height=1, round=1, kind=Kind.QUORUM, parent=founded.digest,
        entries=entries, sources=sources,
    )  # fmt: skip
    return live, founded, renewed


def adopt_sliced(live: LiveModel, founded: Manifest, renewed: Manifest) -> None:
    shared = [u for u in founded.entries if u.startswith("shared")]
    decision = adopt(
        "me",
        renewed,
        previous=founded.digest,
        bases=live.bases,
        offers=(),
        part_bases={unit: founded.entries[unit].digest for unit in shared},
    )
    live.adopt(renewed, decision)


def values_of(live: LiveModel, unit: str) -> Tensor:
    return torch.cat([live.engine.read_part(s) for s in live.agreed.layout.by_unit[unit].slices])


def test_a_part_that_was_not_due_keeps_its_progress_and_a_renewed_one_restarts(
    sliced: tuple[LiveModel, Manifest, Manifest],
) -> None:
    live, founded, renewed = sliced
    shared = [u for u in founded.entries if u.startswith("shared")]
    before = {unit: values_of(live, unit) for unit in shared}
    adopt_sliced(live, founded, renewed)
    assert live.local_parts == set(shared) - {"shared.1"}
    for unit in live.local_parts:
        assert torch.equal(values_of(live, unit), before[unit])
    assert torch.equal(values_of(live, "shared.1"), torch.full_like(before["shared.1"], 0.5))


def test_the_agreed_state_is_measured_without_local_progress_which_comes_back_in_all_bits(
    sliced: tuple[LiveModel, Manifest, Manifest], store: BlobStore
) -> None:
    live, founded, renewed = sliced
    adopt_sliced(live, founded, renewed)
    before = live.engine.read(all_names(SLICED))
    num_blobs = len(store.digests())
    text = held_out(SLICED)
    found = live.evaluate(renewed, text)
    assert same(live.engine.read(all_names(SLICED)), before)
    store.collect({entry.digest for entry in renewed.entries.values()})
    assert len(store.digests()) < num_blobs  # nobody keeps the values that were put aside
    fresh = LiveModel("me", SLICED, ResidentEngine(SLICED), live.agreed)
    adopt_into(fresh, renewed, previous="")
    assert fresh.evaluate(renewed, text) == found
    live.local_parts = frozenset()
    assert live.evaluate(renewed, text) != found


def test_a_disk_that_is_full_while_the_agreed_state_is_measured_is_waited_for(
    sliced: tuple[LiveModel, Manifest, Manifest],
    store: BlobStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live, founded, renewed = sliced
    adopt_sliced(live, founded, renewed)
    before, text = live.engine.read(all_names(SLICED)), held_out(SLICED)
    undisturbed = live.evaluate(renewed, text)
    draft, measured, paused = store.draft, list[float](), list[float]()

    def draft_once_there_is_room(num_bytes: int) -> Draft:
        if not paused:
            raise StateError("the disk is full") from OSError(errno.ENOSPC, "no space")
        return draft(num_bytes)

    monkeypatch.setattr(store, "draft", draft_once_there_is_room)
    trainer: Any = object.__new__(Trainer)
    trainer.model, trainer.held_out = live, text
    trainer.status = SimpleNamespace(
        phases=SimpleNamespace(within=lambda _: nullcontext()),
        validated=lambda manifest, val_loss, _: measured.append(val_loss),
    )
    trainer._pause = paused.append
    trainer.validate(renewed)
    assert measured == [undisturbed] and len(paused) == 1
    assert same(live.engine.read(all_names(SLICED)), before)


BF16 = tiny_run(wire={"experts": "bf16"})


def test_two_owners_keep_updates_too_small_for_the_wire_over_many_rounds() -> None:
    """Each round moves both masters by an eighth of bf16's resolution."""
    store, layout = BlobStore(None), layout_of(BF16)
    unit, name = expert_unit(EXPERT), NAMES[0]
    initial = {
        u: (store_content(store, content), content.num_bytes)
        for u, content in initial_contents(BF16, layout)
    }
    founding = Founding("me", "n", "c" * 64, 1, "d" * 64, 4)
    tip = founding_manifest(founding, BF16, layout, initial, {"me": 1.0, "you": 1.0})
    ones = {n: torch.ones(layout.shapes[n]) for n in NAMES}
    first = replace(
        tip.entries[unit], digest=store.put(blob_of(layout.by_unit[unit], ones)), version=0
    )
    tip = replace(tip, owners={EXPERT: ("me", "you")}, entries={**tip.entries, unit: first})
    lives = {p: LiveModel(p, BF16, ResidentEngine(BF16), Agreed(store, layout)) for p in PEERS}
    for live in lives.values():
        adopt_into(live, tip, previous="")
    for number in range(1, 17):
        offers = {}
        for peer, live in lives.items():
            masters = live.engine.read(NAMES)
            # Above 1.0 bf16 has steps of 2^-7. The other peers' values diverge, so that the mean is
            # neither the own value nor the previous one.
            other = 0.25 if peer == "me" else 0.5
            moves = {n: 2.0**-11 if n == name else other for n in NAMES}
            live.engine.write({n: masters[n] + moves[n] for n in NAMES})
            _, value, base = next(v for v in offered_values(live, tip) if v[0] == unit)
            offered = OfferedUnit(store_content(store, value), value.num_bytes, base)
            offers[peer] = Offer(tip.digest, 1, 4, {unit: offered})
            live.keep_offered([offered.digest])
        sources = tuple((peer, offers[peer].units[unit].digest) for peer in PEERS)
        reads = [reader(store, digest) for _, digest in sources]
        num_bytes = layout.by_unit[unit].num_bytes
        digest = store_content(store, mean_of(reads, num_bytes, "bf16"))
        entry = replace(tip.entries[unit], digest=digest, version=number)
        after = replace(
            tip,
            height=number,
            round=number,
            kind=Kind.QUORUM,
            parent=tip.digest,
            entries={**tip.entries, unit: entry},
            sources={unit: sources},
        )
        store.collect({e.digest for e in after.entries.values()})
        for peer, live in lives.items():
            adopt_into(live, after, previous=tip.digest, offers=[offers[peer]])
            live.drop_offered()
        tip = after
    agreed = lives["me"].agreed.tensor(tip.entries[unit].digest, unit, name)
    assert torch.equal(agreed, torch.full_like(agreed, 1.0 + 16 * 2.0**-11))
    for live in lives.values():
        assert torch.equal(live.engine.read([name])[name], agreed.float())


def test_where_a_master_lacks_nothing_it_gets_the_agreed_bits_of_a_mean(
    model: LiveModel, store: BlobStore, founded: Manifest
) -> None:
    unit = expert_unit(EXPERT)
    zeros = {name: torch.full(LAYOUT.shapes[name], -0.0) for name in NAMES}
    digest = store.put(blob_of(LAYOUT.by_unit[unit], zeros))
    _, value, base = next(v for v in offered_values(model, founded) if v[0] == unit)
    offered = OfferedUnit(store_content(store, value), value.num_bytes, base)
    after = replace(
        founded,
        height=1,
        kind=Kind.QUORUM,
        parent=founded.digest,
        entries={**founded.entries, unit: replace(founded.entries[unit], digest=digest)},
        sources={unit: (("me", offered.digest), ("you", "0" * 64))},
    )
    late = Offer(founded.digest, 0, 0, {unit: offered})
    adoption = adopt_into(model, after, previous=founded.digest, offers=[late])
    assert adoption.experts[EXPERT].action is Action.AVERAGED
    assert same(model.engine.read(NAMES), zeros)
