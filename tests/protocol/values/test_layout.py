"""The layout of units: every element exactly once, the same everywhere, with separate codecs."""

import itertools
import math

import pytest

from swarm.config import RunConfig, validate_config
from swarm.experts import ELEMENT_BYTES, expert_of_unit
from swarm.protocol.values.layout import Layout, layout_of
from tests.layout_places import places_of


def run_of(**wire: object) -> RunConfig:
    values = {
        "run": {"name": "test", "rounds": 2},
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 11,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_experts": 12,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
        },
        "data": {"sequence_length": 16, "validation_bytes": 64},
        "train": {"batch_tokens": 32, "micro_batch_sequences": 2},
        "optimizer": {"lr": 1e-3},
        "round": {"local_steps": 2},
        "wire": {"part_bytes": 4096} | wire,
    }
    return validate_config(RunConfig, values, source="test")


WIRES = [
    {"shared": shared, "experts": experts, "part_bytes": part_bytes}
    for shared in ("fp32", "bf16")
    for experts in ("fp32", "bf16")
    for part_bytes in (4099, 10_000, 16 * 2**20)
]


@pytest.fixture(params=WIRES, ids=str)
def run(request: pytest.FixtureRequest) -> RunConfig:
    return run_of(**request.param)


@pytest.fixture
def layout(run: RunConfig) -> Layout:
    return layout_of(run)


def test_every_element_of_every_tensor_is_in_exactly_one_unit(layout: Layout) -> None:
    for name, places in places_of(layout).items():
        cuts = [0, *itertools.chain.from_iterable((s.start, s.stop) for _, s in places)]
        cuts.append(math.prod(layout.shapes[name]))
        assert cuts[0::2] == cuts[1::2], name
        assert all(piece.name == name and piece.start < piece.stop for _, piece in places)


def test_units_are_named_in_order_and_say_their_size(layout: Layout, run: RunConfig) -> None:
    experts = [expert_of_unit(u.unit) for u in layout.units]
    num_parts = experts.count(None)
    assert experts == [None] * num_parts + list(range(run.model.num_experts))
    names = [u.unit for u in layout.units[:num_parts]]
    assert names == [f"shared.{part}" for part in range(num_parts)]
    for unit in layout.units:
        assert unit.num_elements == sum(piece.stop - piece.start for piece in unit.slices)
        assert unit.num_bytes == unit.num_elements * ELEMENT_BYTES[unit.codec]
        assert layout.by_unit[unit.unit] is unit
    assert layout.num_bytes == sum(unit.num_bytes for unit in layout.units)


def test_parts_fit_the_limit_and_are_of_equal_size(layout: Layout, run: RunConfig) -> None:
    for codec in ELEMENT_BYTES:
        sizes = [
            unit.num_elements
            for unit in layout.units
            if unit.codec == codec and expert_of_unit(unit.unit) is None
        ]
        if sizes:
            assert max(sizes) * ELEMENT_BYTES[codec] <= run.wire.part_bytes
            assert max(sizes) - min(sizes) <= 1


def test_norms_and_routers_always_travel_as_fp32(layout: Layout, run: RunConfig) -> None:
    for name, places in places_of(layout).items():
        codecs = {layout.by_unit[unit].codec for unit, _ in places}
        exact = name.endswith(("norm.weight", "mlp.gate.weight"))
        in_expert = ".experts." in name
        wanted = "fp32" if exact else run.wire.experts if in_expert else run.wire.shared
        assert codecs == {wanted}, name


def test_tensors_follow_each_other_in_the_order_of_their_names(layout: Layout) -> None:
    for unit in layout.units:
        places = [(piece.name, piece.start) for piece in unit.slices]
        assert places == sorted(places)
    # Names sort as text, so layer 10 comes before layer 2. This order must never change.
    names = [piece.name for piece in layout.by_unit["expert.3"].slices]
    assert names[3].startswith("model.layers.1.") and names[6].startswith("model.layers.10.")


def test_the_layout_depends_on_nothing_but_model_and_wire(run: RunConfig) -> None:
    other = run.model_copy(update={"run": run.run.model_copy(update={"seed": 7, "peers": 9})})
    assert layout_of(other) == layout_of(run)


def test_a_norm_and_its_neighbours_are_cut_where_this_table_says() -> None:
    # A golden value: two releases that cut differently cannot be in one run.
    layout = layout_of(run_of(shared="bf16", part_bytes=4096))
    # fp32: 11 layers of 2 norms of 16, 2 of 8, a router of 12 x 16, and the last norm: 2656.
    # bf16: 2 x 260 x 16 embeddings and 11 x (2 x 256 + 2 x 128) attention: 16768 in 9 parts.
    assert [unit.num_elements for unit in layout.units[:4]] == [885, 885, 886, 1863]
    assert [unit.codec for unit in layout.units[:4]] == ["fp32", "fp32", "fp32", "bf16"]
    first = layout.units[0].slices
    assert [(s.name, s.start, s.stop) for s in first[:2]] == [
        ("model.layers.0.input_layernorm.weight", 0, 16),
        ("model.layers.0.mlp.gate.weight", 0, 192),
    ]
    assert layout.units[3].slices[0].name == "lm_head.weight"


@pytest.mark.parametrize("shared", ["fp32", "bf16"])
def test_norms_and_routers_are_in_parts_of_their_own_where_others_are_coded(shared: str) -> None:
    wire = {"shared": shared, "shared_coding": "b2", "experts_coding": "b1", "part_bytes": 4096}
    layout = layout_of(run_of(**wire))
    for unit in layout.units:
        exact = {p.name.endswith("norm.weight") or ".mlp.gate." in p.name for p in unit.slices}
        is_expert = expert_of_unit(unit.unit) is not None
        assert len(exact) == 1
        assert unit.coding == ("b1" if is_expert else "none" if exact == {True} else "b2")
        assert unit.codec == ("bf16" if is_expert else "fp32" if exact == {True} else shared)
    # Compared with a run without codings, only the contents of parts differ, and only with fp32.
    plain = layout_of(run_of(shared=shared, part_bytes=4096))
    if shared == "bf16":
        assert [unit.slices for unit in plain.units] == [unit.slices for unit in layout.units]
    assert plain.num_bytes == layout.num_bytes


def test_a_selection_bias_travels_exactly_among_the_shared_tensors() -> None:
    run = run_of(shared="bf16")
    assert not any("e_score" in name or "noise" in name for name in layout_of(run).shapes)
    changed = {"scoring_func": "sigmoid", "noisy_top_k": True}
    run = run.model_copy(update={"model": run.model.model_copy(update=changed)})
    layout = layout_of(run)
    for kind, shape in (("e_score_correction_bias", (12,)), ("noise_weight", (12, 16))):
        name = f"model.layers.3.mlp.gate.{kind}"
        assert layout.shapes[name] == shape
        for unit, _ in places_of(layout)[name]:
            assert layout.by_unit[unit].codec == "fp32" and expert_of_unit(unit) is None
