"""Tokens that travel to the ranks of their experts: the values of one process; what moves."""

import pytest
import torch

from swarm.model.initialise import initial_tensors
from swarm.model.moe import SparseMLP
from swarm.model.routing import RoutingControls
from swarm.train.parallel.dispatch import DealtBank
from tests.train.runs import all_names, tiny_run
from tests.train.team import together

SIZES = {"num_experts": 7, "moe_intermediate_size": 24, "num_experts_per_tok": 3}
RUN = tiny_run(model={**SIZES, "num_hidden_layers": 1})
OWNED = (0, 2, 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def whole_layer(owned=OWNED, compute="fp32", frozen="fp32"):
    layer = SparseMLP(RUN.model, frozen, DTYPES[compute], torch.device("cpu"))
    return filled(layer, owned)


def dealt_layer(ranks, owned=OWNED, compute="fp32", frozen="fp32"):
    def bank(*given):
        return DealtBank(*given, group=ranks)

    layer = SparseMLP(RUN.model, frozen, DTYPES[compute], torch.device("cpu"), bank=bank)
    return filled(layer, owned)


def filled(layer, owned):
    """With the run's initial weights; those that change their rank come along."""
    weights = initial_tensors(RUN, all_names(RUN))
    with torch.no_grad():
        layer.gate.weight.copy_(weights["model.layers.0.mlp.gate.weight"] * 20)
        for expert in layer.experts.row_of:
            for kind in ("gate", "up", "down"):
                name = f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight"
                stack, row = layer.experts.place(expert, f"{kind}_proj")
                stack.put(row, weights[name] * 10)
    layer.experts.own(owned)
    return layer


def tokens(rank, number=50):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(1, number, RUN.model.hidden_size, generator=generator)


def passed(layer, x_BTD, controls=None, recall=None):
    """Output, routing and gradient of the input of one pass; parameters have theirs."""
    x_BTD = x_BTD.requires_grad_()
    out_BTD, routing = layer(x_BTD, recall, controls)
    weight = torch.linspace(-1, 1, out_BTD.numel()).view_as(out_BTD)
    loss = (out_BTD * weight).sum() + routing.probabilities_NE.square().sum()
    if controls and controls.draw_apart and len(routing.similarity):
        loss = loss + routing.similarity.sum()
    loss.backward()
    return out_BTD.detach(), routing, x_BTD.grad


def masters(layer):
    """Expert -> gradients of its matrices."""
    bank = layer.experts
    return {
        expert: [matrix.grad[row] for matrix in bank.masters()]
        for row, expert in enumerate(bank.owned_here)
    }


def assert_as_whole(size, numbers, tolerance, controls=None, **form):
    """Against one process that computes the tokens of one rank after the other."""
    whole, expected = whole_layer(**form), []
    for rank, number in enumerate(numbers):
        expected.append(passed(whole, tokens(rank, number), controls))

    def work(ranks):
        layer = dealt_layer(ranks, **form)
        return passed(layer, tokens(ranks.rank, numbers[ranks.rank]), controls), layer

    found = together(size, work)
    gradients, router = masters(whole), whole.gate.weight.grad
    held = {}
    for (out, routing, dx), (expected_out, expected_routing, expected_dx) in zip(
        [each for each, _ in found], expected, strict=True
    ):
        torch.testing.assert_close(out, expected_out, **tolerance)
        torch.testing.assert_close(dx, expected_dx, **tolerance)
        assert torch.equal(routing.expert_NK, expected_routing.expert_NK)
        if controls and controls.probe:
            torch.testing.assert_close(
                routing.similarity, expected_routing.similarity, rtol=1e-3, atol=1e-3
            )
    for _, layer in found:
        held |= masters(layer)
    assert held.keys() == gradients.keys()
    for expert, each in gradients.items():
        torch.testing.assert_close(held[expert], each, **tolerance)
    torch.testing.assert_close(
        sum(layer.gate.weight.grad for _, layer in found), router, **tolerance
    )


CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # fp32 sums of some hundred terms in another order
CLOSE_BF16 = {"rtol": 3e-2, "atol": 3e-2}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "form, tolerance",
    [({}, CLOSE), ({"frozen": "int8"}, CLOSE), ({"compute": "bf16", "frozen": "bf16"}, CLOSE_BF16)],
)
def test_outputs_and_gradients_are_those_of_one_process(size, form, tolerance):
    assert_as_whole(size, [50, 20, 33][:size], tolerance, **form)


def test_experts_are_frozen_on_ranks_that_own_none():
    assert_as_whole(3, [50, 20, 33], CLOSE, owned=(4,))


def test_a_rank_without_tokens_computes_for_the_others():
    assert_as_whole(2, [40, 0], CLOSE)


def test_capacity_is_that_of_the_tokens_of_one_rank():
    assert_as_whole(2, [50, 20], CLOSE, RoutingControls(capacity_factor=0.8))
