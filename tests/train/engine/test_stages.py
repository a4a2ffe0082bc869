"""Cutting the layers of a model into the stages of a pipeline."""

from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.config import RunConfig
from swarm.experts import expert_shapes, shared_shapes
from swarm.model.cost import head_step_flops, layer_step_flops, step_flops_with
from swarm.model.stage import Stage
from swarm.train.engine.mesh import bubble_of, cut_evenly, cut_of, flows_of
from tests.train.runs import tiny_run


def run_of(layers: int, vocab: int = 258, *, tied: bool = False) -> RunConfig:
    return tiny_run(
        model={"num_hidden_layers": layers, "vocab_size": vocab, "tie_word_embeddings": tied}
    )


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_no_other_cut_has_a_smaller_largest_part(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.floats(0.01, 100), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(costs)))
    parts = cut_evenly(costs, stages)
    assert [item for part in parts for item in part] == list(range(len(costs)))
    assert len(parts) == stages and all(parts)

    def sums(ends: tuple[int, ...]) -> list[float]:
        return [sum(costs[start:stop]) for start, stop in pairwise(ends)]

    found = sums((0, *(part.stop for part in parts)))
    every = [
        sums((0, *ends, len(costs))) for ends in combinations(range(1, len(costs)), stages - 1)
    ]
    assert max(found) <= min(max(each) for each in every) * (1 + 1e-9)
    even = [each for each in every if max(each) <= max(found)]
    least = min(sum(part**2 for part in each) for each in even)
    assert sum(part**2 for part in found) <= least * (1 + 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.data())
def test_equal_layers_are_dealt_evenly(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    sizes = [len(part) for part in cut_evenly([1.0] * layers, stages)]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(2, 5000), st.booleans(), st.integers(0, 4), st.data())
def test_stages_hold_every_tensor_and_only_a_tied_embedding_twice(
    layers: int, vocab: int, tied: bool, owned: int, data: st.DataObject
) -> None:
    run = run_of(layers, max(vocab, 258), tied=tied)
    stages = data.draw(st.integers(1, layers))
    chunks = data.draw(st.integers(1, layers // stages if stages > 1 else 1))
    cut = cut_of(run, owned, stages, chunks)
    assert sum(cut.shares) == pytest.approx(1) and len(cut.stages) == len(cut.shares) == stages
    assert {len(stage.chunks) for stage in cut.stages} == {chunks}
    assert cut.slot == pytest.approx(max(cut.shares)) or chunks > 1
    assert cut.stages[0].is_first and cut.stages[-1].is_last
    for name in [*shared_shapes(run.model), *expert_shapes(run.model, 2)]:
        holders = [stage for stage in cut.stages if stage.holds(name, tied=tied)]
        both_ends = tied and stages > 1 and name == "model.embed_tokens.weight"
        assert len(holders) == 1 + both_ends, name


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 10), st.integers(258, 5000), st.booleans(), st.integers(0, 4))
def test_layers_and_head_are_all_operations_of_a_step(
    layers: int, vocab: int, tied: bool, owned: int
) -> None:
    run = run_of(layers, vocab, tied=tied)
    found = layers * layer_step_flops(run, owned) + head_step_flops(run.model)
    assert found == pytest.approx(step_flops_with(run, owned))
    assert layer_step_flops(run, owned) == pytest.approx(layer_step_flops(run_of(1), owned))


def test_chunks_go_round_the_stages() -> None:
    cut = cut_of(run_of(12), 0, 2, 3)
    chunks = [[list(chunk.layers) for chunk in stage.chunks] for stage in cut.stages]
    found = [layer for pair in zip(*chunks, strict=True) for own in pair for layer in own]
    assert found == list(range(12))
    assert [stage.is_first for stage in cut.stages] == [True, False]
    assert [chunk.is_last for chunk in cut.stages[1].chunks] == [False, False, True]
    assert "in the last chunk; the slowest one computes" in cut.reason
    assert cut.slot < min(cut.shares)


def test_any_number_of_micro_batches_flows_in_goes_that_torch_takes() -> None:
    for stages, number in product(range(2, 9), range(1, 65)):
        goes = flows_of(number, stages)
        assert sum(goes) == number and min(goes) > 0 and len(goes) <= 2
        assert all(each % max(1, each // stages) == 0 for each in goes)
    assert (flows_of(8, 4), flows_of(10, 4), flows_of(5, 2)) == ((8,), (10,), (4, 1))


def test_more_chunks_and_more_micro_batches_wait_less() -> None:
    assert bubble_of(4, 4) == 3 / 7
    assert bubble_of(4, 4, 2) == 3 / 11
    assert bubble_of(4, 32, 2) == 3 / 67
    assert bubble_of(1, 8) == 0


def test_a_large_head_takes_layers_from_the_last_stage() -> None:
    small, large = cut_of(run_of(8), 2, 2), cut_of(run_of(8, 2000), 2, 2)
    assert len(large.stages[1].layers) < len(small.stages[1].layers)
    assert large.reason.startswith(f"layers 0-{large.stages[0].layers.stop - 1} | ")
    assert "with the head, which counts as" in large.reason
    # One layer is left for it, however large it is.
    assert cut_of(run_of(8, 100_000), 2, 2).stages[1] == Stage(range(7, 8), 8)
