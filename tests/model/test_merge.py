"""Merging against a naive reference, and influences that must not change it."""

import itertools

import pytest
import torch
from torch import Tensor

from swarm.config import ModelConfig, RunConfig
from swarm.experts import PROJECTIONS, Slice, expert_of, expert_tensor
from swarm.model import merge
from swarm.model.merge import choose_donors, donors_of, merged_part, similarities
from tests.model import plain_merge
from tests.model.samples import random_weights, tiny_run
from tests.train.runs import same

ALPHA, TOP_K = 0.1, 3


def merge_experts(
    named: dict[str, Tensor], model: ModelConfig, *, alpha: float, top_k: int, at_once: int = 2**20
) -> plain_merge.Merged:
    """Merges run by run, each of `at_once` elements."""

    def read(part: Slice) -> Tensor:
        return named[part.name].view(-1)[part.start : part.stop]

    donors = donors_of(read, model, top_k)
    merged = {}
    for name in sorted(name for name in named if expert_of(name) is not None):
        size, shape = named[name].numel(), named[name].shape
        parts = [Slice(name, at, min(at + at_once, size)) for at in range(0, size, at_once)]
        runs = [merged_part(part, read, donors, alpha) for part in parts]
        merged[name] = torch.cat(runs).view(shape)
    return plain_merge.Merged(merged, donors)


def donors(gates: list[Tensor], top_k: int) -> tuple[tuple[int, ...], ...]:
    reads = [lambda start, stop, gate=gate: gate[start:stop] for gate in gates]
    return choose_donors(similarities(reads, len(gates[0])), top_k)


def naive_merge(
    named: dict[str, Tensor], run: RunConfig
) -> tuple[dict[str, Tensor], list[list[tuple[int, ...]]]]:
    """Equations 5 and 6 of SPES, number by number, in Python's doubles."""
    merged, all_donors = {}, []
    experts = range(run.model.num_experts)
    for layer in range(run.model.num_hidden_layers):
        gates = [named[expert_tensor(layer, e, "gate")].flatten().tolist() for e in experts]
        dots = [[sum(a * b for a, b in zip(x, y, strict=True)) for y in gates] for x in gates]
        of_layer = []
        for expert in experts:
            cosine = {
                e: dots[expert][e] / (dots[expert][expert] * dots[e][e]) ** 0.5
                for e in experts
                if e != expert
            }
            chosen = sorted(sorted(cosine), key=lambda e: -cosine[e])[:TOP_K]
            of_layer.append(tuple(sorted(chosen)))
            for kind in PROJECTIONS:
                own = named[expert_tensor(layer, expert, kind)].double()
                steps = [named[expert_tensor(layer, e, kind)].double() - own for e in chosen]
                name = expert_tensor(layer, expert, kind)
                merged[name] = own + ALPHA * torch.stack(steps).mean(0)
        all_donors.append(of_layer)
    return merged, all_donors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_equals_a_naive_reference(dtype: torch.dtype) -> None:
    run = tiny_run()
    named = {name: tensor.to(dtype) for name, tensor in random_weights(run).items()}
    merged = merge_experts(named, run.model, alpha=ALPHA, top_k=TOP_K)
    expected, expected_donors = naive_merge(named, run)
    assert [list(layer) for layer in merged.donors] == expected_donors
    assert merged.named.keys() == expected.keys()
    for name, tensor in merged.named.items():
        assert tensor.dtype == torch.float32
        # fp32 against doubles: a few roundings of 6e-8 of values up to 0.5.
        assert (tensor - expected[name]).abs().max() < 2e-7


def test_only_experts_come_out_and_the_input_stays_as_it_was() -> None:
    run = tiny_run()
    named = random_weights(run)
    before = {name: tensor.clone() for name, tensor in named.items()}
    merged = merge_experts(named, run.model, alpha=ALPHA, top_k=TOP_K)
    assert set(merged.named) == {name for name in named if expert_of(name) is not None}
    assert all(torch.equal(named[name], before[name]) for name in named)


def test_every_expert_reads_the_values_before_the_merge() -> None:
    """With experts 0 and 1 each other's donors at alpha 1 they swap; Gauss-Seidel cannot."""
    run = tiny_run(num_experts=4)
    named = random_weights(run)
    for layer in range(run.model.num_hidden_layers):
        named[expert_tensor(layer, 1, "gate")] = named[expert_tensor(layer, 0, "gate")] * 2
    merged = merge_experts(named, run.model, alpha=1.0, top_k=1)
    assert merged.donors[0][:2] == ((1,), (0,))
    for kind in PROJECTIONS:
        first, second = (expert_tensor(0, expert, kind) for expert in (0, 1))
        # own + (donor - own) is the donor but for one rounding.
        assert torch.allclose(merged.named[first], named[second], atol=1e-7)
        assert torch.allclose(merged.named[second], named[first], atol=1e-7)


def test_of_equally_similar_experts_the_lower_index_is_taken() -> None:
    gates = [torch.eye(5)[k] for k in range(5)]
    assert donors(gates, 2) == ((1, 2), (0, 2), (0, 1), (0, 1), (0, 1))


def test_noise_of_the_sum_does_not_decide_between_equal_experts() -> None:
    """Copies scaled by 3 and 7 have the same direction.

    Their cosines differ only in the last bits.
    """
    gate = torch.randn(70_001, generator=torch.Generator().manual_seed(1)).double()
    gates = [gate, gate * 7, gate * 3, gate / 3, -gate]
    for order in itertools.permutations(range(5)):
        opposite = order.index(4)
        alike = [expert for expert in range(5) if expert != opposite]
        chosen = donors([gates[k] for k in order], 2)
        for expert in alike:
            others = [other for other in alike if other != expert]
            assert chosen[expert] == tuple(others[:2])


def test_a_projection_of_zeros_is_nobodys_donor_of_choice() -> None:
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(100, generator=generator)
    gates = [torch.zeros(100), base, base + 0.1 * torch.randn(100, generator=generator), base]
    assert donors(gates, 1) == ((1,), (3,), (1,), (1,))


def test_alpha_0_changes_no_bit() -> None:
    run = tiny_run()
    named = random_weights(run)
    merged = merge_experts(named, run.model, alpha=0.0, top_k=TOP_K)
    assert all(torch.equal(named[name], tensor) for name, tensor in merged.named.items())


def test_the_number_of_threads_changes_no_bit() -> None:
    run = tiny_run(hidden_size=512, moe_intermediate_size=384, num_hidden_layers=1)
    named = random_weights(run)
    one = merge_experts(named, run.model, alpha=ALPHA, top_k=TOP_K)
    torch.set_num_threads(2)
    try:
        two = merge_experts(named, run.model, alpha=ALPHA, top_k=TOP_K)
    finally:
        torch.set_num_threads(1)
    assert one.donors == two.donors
    assert all(torch.equal(one.named[name], two.named[name]) for name in one.named)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at_once", [1, 7, 1000, 2**20])
def test_merging_by_chunks_gives_the_bits_of_merging_all_at_once(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One element at a time takes half a minute for any model but the smallest.
    width = {"hidden_size": 8, "moe_intermediate_size": 8} if at_once == 1 else {}
    run = tiny_run(num_hidden_layers=2, **width)
    named = {name: tensor.to(dtype) for name, tensor in random_weights(run).items()}
    plain = plain_merge.merge_experts(named, run.model, alpha=ALPHA, top_k=TOP_K)
    monkeypatch.setattr(merge, "COLUMNS", 5)
    parts = merge_experts(named, run.model, alpha=ALPHA, top_k=TOP_K, at_once=at_once)
    assert parts.donors == plain.donors
    assert same(parts.named, plain.named)
