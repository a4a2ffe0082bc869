"""Memory of a round's phases above the engine: living tensors, counted when they are made.

Chunks are small here, in the same proportion to the experts as in a 7B model, where all experts are
12.9 GB and a chunk of `CHUNK_ELEMENTS` is 2 to 4 MB.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from swarm import codecs
from swarm.codecs import mean_of
from swarm.data.held_out import HeldOut, Windows
from swarm.experts import expert_unit
from swarm.model import merge
from swarm.network.blobs.blob_store import BlobStore, reader, store_content
from swarm.network.runs.run_founding import founding_manifest
from swarm.peer.text.agreed_model import Agreed, initial_contents, named_tensors
from swarm.peer.training.live_model import LiveModel, merge_blobs
from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Founding, Kind, Manifest
from swarm.train.engine.engine import Engine
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.host_memory import LiveBytes
from swarm.train.engine.resident import ResidentEngine
from swarm.train.fallback_engine import SteppingEngine
from swarm.train.planning.memory import moving_bytes
from tests.model import plain_merge
from tests.peer.adopting import adopt_into, offered_values
from tests.train.runs import new_engine, new_streaming, tiny_run

EXPERTS, LAYERS, WIDTH = 8, 6, 128
RUN = tiny_run(
    model={
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_experts": EXPERTS,
        "moe_intermediate_size": WIDTH,
    },
    train={"frozen": "bf16"},
    wire={"experts": "bf16", "part_bytes": 2**16},
    merging={"top_k": 3, "interval_steps": 3},
)
LAYOUT = layout_of(RUN)
MATRIX = WIDTH * WIDTH
ALL_EXPERTS = EXPERTS * LAYERS * 3 * MATRIX * 2
CHUNK = 2**10
LARGEST = 4 * max(torch.Size(shape).numel() for shape in LAYOUT.shapes.values())


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "CHUNK_ELEMENTS", CHUNK)
    monkeypatch.setattr(merge, "COLUMNS", CHUNK)


@pytest.fixture(autouse=True)
def live() -> Iterator[LiveBytes]:
    """Counts from before the engine exists, so that the engine's memory is known."""
    with LiveBytes() as live:
        yield live


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path)


@pytest.fixture
def founded(store: BlobStore) -> Manifest:
    initial = {u: (store_content(store, c), c.num_bytes) for u, c in initial_contents(RUN, LAYOUT)}
    founding = Founding("me", "n", "c" * 64, 1, "d" * 64, 4)
    return founding_manifest(founding, RUN, LAYOUT, initial, {"me": 1.0, "you": 1.0})


@pytest.fixture
def model(store: BlobStore, founded: Manifest) -> LiveModel:
    live = LiveModel("me", RUN, ResidentEngine(RUN), Agreed(store, LAYOUT))
    adopt_into(live, founded, previous="")
    return live


def peak_of(live: LiveBytes, phase: Callable[[], object]) -> int:
    """The peak bytes of living tensors, above those before."""
    gc.collect()
    live.reset()
    before = live.now
    phase()
    return live.peak - before


def consume(contents: Iterator[codecs.Content]) -> None:
    for content in contents:
        assert sum(len(piece) for piece in content) == content.num_bytes


def test_a_merge_holds_a_few_percent_of_the_experts(
    live: LiveBytes, store: BlobStore, founded: Manifest
) -> None:
    agreed = Agreed(store, LAYOUT)
    peak = peak_of(live, lambda: consume(iter(merge_blobs(founded, RUN, agreed)[0].values())))
    # Chunks of all experts, as received and twice in fp64, and the cosines.
    assert peak <= EXPERTS * CHUNK * (2 + 8 + 8) + 8 * EXPERTS**2 * 8, peak / CHUNK / EXPERTS
    assert peak < 0.1 * ALL_EXPERTS

    def at_once() -> None:
        named = {}
        for expert in range(EXPERTS):
            unit = expert_unit(expert)
            named |= dict(agreed.tensors(founded.entries[unit].digest, unit))
        plain_merge.merge_experts(named, RUN.model, alpha=0.1, top_k=3)

    assert peak_of(live, at_once) > 2.9 * ALL_EXPERTS


def test_an_offer_holds_chunks(live: LiveBytes, model: LiveModel, founded: Manifest) -> None:
    peak = peak_of(live, lambda: consume(value for _, value, _ in offered_values(model, founded)))
    assert peak <= 3 * 4 * CHUNK


def test_a_mean_holds_a_chunk_of_each_source(
    live: LiveBytes, store: BlobStore, founded: Manifest
) -> None:
    digest, num_bytes = (founded.entries[expert_unit(0)].digest, 2 * LAYERS * 3 * MATRIX)
    value = mean_of([reader(store, digest)] * 4, num_bytes, "bf16")
    assert peak_of(live, lambda: consume(iter([value]))) <= CHUNK * (4 * 2 + 4 + 2)


def test_the_initial_model_is_made_with_one_tensor_at_a_time(live: LiveBytes) -> None:
    peak = peak_of(live, lambda: consume(value for _, value in initial_contents(RUN, LAYOUT)))
    assert peak <= LARGEST + 3 * 4 * CHUNK


def test_an_export_holds_one_tensor(live: LiveBytes, store: BlobStore, founded: Manifest) -> None:
    def export() -> None:
        for _name, _tensor in named_tensors(LAYOUT, founded, store):
            del _tensor

    assert peak_of(live, export) <= LARGEST + 3 * 4 * CHUNK


def averaged(founded: Manifest, store: BlobStore, model: LiveModel) -> tuple[Manifest, Offer]:
    """A successor in which every value differs, and the offer that its means include."""
    units, entries, sources = {}, {}, {}
    for unit, value, base in offered_values(model, founded):
        offered = store_content(store, value)
        zeros = codecs.Content.of(bytes(value.num_bytes))
        before = founded.entries[unit]
        entries[unit] = replace(before, digest=store_content(store, zeros), version=1)
        units[unit] = OfferedUnit(offered, value.num_bytes, base)
        sources[unit] = (("me", offered), ("you", "0" * 64))
    manifest = replace(
        founded,
        height=1,
        round=1,
        kind=Kind.QUORUM,
        parent=founded.digest,
        entries={**founded.entries, **entries},
        sources=sources,
    )
    return manifest, Offer(founded.digest, 3, 12, units)


@pytest.mark.parametrize("in_the_mean", [True, False])
def test_adopting_and_rebasing_hold_a_matrix(
    live: LiveBytes, model: LiveModel, store: BlobStore, founded: Manifest, *, in_the_mean: bool
) -> None:
    manifest, offer = averaged(founded, store, model)
    offers = [offer] if in_the_mean else []
    peak = peak_of(
        live, lambda: adopt_into(model, manifest, previous=founded.digest, offers=offers)
    )
    assert peak <= 4 * MATRIX + 6 * 4 * CHUNK


def test_experts_that_are_exchanged_hold_their_masters_twice(live: LiveBytes) -> None:
    engine = new_engine(RUN, [0, 1, 2, 3], frozen="bf16")
    planned = moving_bytes(RUN, 4, replace(EngineOptions.of(RUN), frozen="bf16"))
    for others in ([4, 5, 6, 7], [4, 5, 6, 1]):
        assert peak_of(live, partial(engine.own, others)) <= planned
    assert peak_of(live, partial(engine.own, [4, 5])) <= planned
    assert planned < 1.1 * LAYERS * 4 * 3 * MATRIX * 4


@pytest.mark.parametrize("make", [new_engine, new_streaming])
def test_a_validation_holds_one_layers_owned_experts_more(
    live: LiveBytes, make: Callable[..., Engine], store: BlobStore, founded: Manifest
) -> None:
    engine = make(RUN, [0, 1, 2, 3], frozen="bf16")
    model = LiveModel("me", RUN, engine, Agreed(store, LAYOUT))
    model.bases = {e: founded.entries[expert_unit(e)].digest for e in engine.owned}
    tokens = torch.zeros(2, 9, dtype=torch.long)
    plain = peak_of(live, lambda: engine.evaluate(tokens))
    everything = Windows(tokens, torch.ones(2, 8, dtype=torch.bool))
    held_out = HeldOut((everything,), 16, 16)
    peak = peak_of(live, lambda: model.evaluate(founded, held_out))
    assert peak - plain <= len(engine.owned) * 3 * MATRIX * 4 + 2 * MATRIX * 4
    engine.close()


def test_a_step_down_never_holds_two_engines(live: LiveBytes, tmp_path: Path) -> None:
    options, run = EngineOptions.of(RUN), RUN
    below = [replace(options, recompute="layer")]
    engine = SteppingEngine(run, options, below, tmp_path)
    engine.own([0, 1, 2, 3])
    gc.collect()
    before = live.now
    live.reset()
    engine._step_down("a test")
    gc.collect()
    assert engine.options == below[0]
    assert live.now == pytest.approx(before, rel=0.01)
    # One more tensor, and the stack of one layer while experts change owners.
    assert live.peak <= before + LARGEST + 3 * EXPERTS * MATRIX * 8
    assert list(tmp_path.iterdir()) == []
