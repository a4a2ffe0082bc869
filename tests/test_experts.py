"""Names of tensors and units: built and parsed in one place."""

import math
from pathlib import Path

import pytest

from swarm import experts
from swarm.config import ModelConfig, RunConfig, parse_config

RUNS = Path(__file__).parents[1] / "configs" / "runs"


def model_of(name: str) -> ModelConfig:
    path = RUNS / f"{name}.toml"
    return parse_config(RunConfig, path.read_text(), source=str(path)).model


@pytest.mark.parametrize("projection", experts.PROJECTIONS)
def test_an_experts_tensor_is_parsed_as_it_was_built(projection: str) -> None:
    for layer, expert in ((0, 0), (3, 17), (11, 120)):
        assert experts.expert_of(experts.expert_tensor(layer, expert, projection)) == expert


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.experts.weight",
        "model.layers.0.mlp.experts.x.gate_proj.weight",
        "model.layers.0.mlp.experts.1.gate_proj.bias",
        "amodel.layers.0.mlp.experts.1.gate_proj.weight",
        "model.layers.0.mlp.experts.1.gate_proj.weight.x",
    ],
)
def test_what_is_no_expert_is_shared(name: str) -> None:
    assert experts.expert_of(name) is None


def test_unit_names_say_what_they_hold() -> None:
    assert experts.expert_unit(7) == "expert.7" and experts.shared_unit(2) == "shared.2"
    assert experts.expert_of_unit("expert.7") == 7
    assert experts.expert_of_unit("shared.2") is None


def test_shared_and_expert_names_never_meet() -> None:
    model = model_of("demo")
    shared = experts.shared_shapes(model)
    assert all(experts.expert_of(name) is None for name in shared)
    for expert in range(model.num_experts):
        shapes = experts.expert_shapes(model, expert)
        assert {experts.expert_of(name) for name in shapes} == {expert}
        assert len(shapes) == 3 * model.num_hidden_layers
        assert list(shapes) == sorted(shapes)
    assert list(shared) == sorted(shared)


# Source: SPES.md, section "Sizes": total, shared and one expert, in millions.
SIZES = {
    "spes_1b": (1167, 261, 56.6),
    "spes_2b": (2127, 617, 94.4),
    "spes_7b": (7333, 891, 201.3),
    "spes_9b": (9431, 975, 1057),
}


@pytest.mark.parametrize("name", sorted(SIZES))
def test_shapes_add_up_to_the_papers_sizes(name: str) -> None:
    model = model_of(name)
    shared = sum(math.prod(shape) for shape in experts.shared_shapes(model).values())
    expert = sum(math.prod(shape) for shape in experts.expert_shapes(model, 0).values())
    total_m, shared_m, expert_m = SIZES[name]
    # The paper's digits, so half a unit of the last one.
    assert shared / 1e6 == pytest.approx(shared_m, abs=0.5)
    assert expert / 1e6 == pytest.approx(expert_m, abs=0.05 if expert_m < 1000 else 0.5)
    assert (shared + model.num_experts * expert) / 1e6 == pytest.approx(total_m, abs=0.5)


def test_tied_embeddings_have_no_head() -> None:
    tied = model_of("demo").model_copy(update={"tie_word_embeddings": True})
    assert "lm_head.weight" not in experts.shared_shapes(tied)
    assert "lm_head.weight" in experts.shared_shapes(model_of("demo"))
