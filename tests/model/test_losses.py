"""The terms of the loss, one by one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from swarm.model.losses import (
    LayerTerms,
    balance_loss,
    output_losses,
    router_z_loss,
    slice_tokens,
)
from swarm.model.moe import Routing
from tests.model.samples import Spy


def routing_of(logits_NE: Tensor, top_k: int) -> Routing:
    probabilities_NE = logits_NE.softmax(-1)
    weight_NK, expert_NK = probabilities_NE.topk(top_k, dim=-1)
    return Routing(logits_NE, probabilities_NE, weight_NK, expert_NK)


def random_routings(*, num_layers: int = 3, top_k: int = 2) -> list[Routing]:
    generator = torch.Generator().manual_seed(3)
    return [
        routing_of(torch.randn(50, 8, generator=generator) * 2, top_k) for _ in range(num_layers)
    ]


def even_routing(num_experts: int) -> Routing:
    """One token per expert, with nearly all of its probability on that expert."""
    return routing_of(torch.eye(num_experts) * 100, 1)


def collapsed_routing(num_experts: int) -> Routing:
    return routing_of(torch.eye(num_experts)[:1].repeat(num_experts, 1) * 100, 1)


def balance(routings: list[Routing], kind: str) -> float:
    terms = [LayerTerms.of(routing) for routing in routings]
    return balance_loss(terms, torch.stack([each.tokens_E for each in terms]), kind).item()


@pytest.mark.parametrize("kind", ["per_layer", "global"])
def test_balance_is_1_when_even_and_the_number_of_experts_when_collapsed(kind: str) -> None:
    assert balance([even_routing(8)] * 2, kind) == pytest.approx(1.0)
    assert balance([collapsed_routing(8)] * 2, kind) == pytest.approx(8.0)


def test_balance_of_a_top_2_collapse_is_half_the_number_of_experts() -> None:
    # All tokens split their probability between experts 0 and 1.
    collapsed = routing_of(torch.tensor([[100.0, 100.0] + [0.0] * 6]).repeat(16, 1), 2)
    assert balance([collapsed], "per_layer") == pytest.approx(8 / 2)
    pairs = torch.stack([torch.eye(8)[e] + torch.eye(8)[(e + 1) % 8] for e in range(8)])
    assert balance([routing_of(pairs * 100, 2)], "per_layer") == pytest.approx(1.0)


def test_only_the_per_layer_balance_sees_layers_that_collapse_apart() -> None:
    # Layer e sends all tokens to expert e: each layer has collapsed, but their sum is even.
    routings = [routing_of(torch.eye(4)[e].repeat(6, 1) * 100, 1) for e in range(4)]
    assert balance(routings, "per_layer") == pytest.approx(4.0)
    assert balance(routings, "global") == pytest.approx(1.0)


def test_per_layer_balance_is_the_formula_of_spes() -> None:
    routings = random_routings()
    total = 0.0
    for routing in routings:
        for expert in range(8):
            count = (routing.expert_NK == expert).sum().item()
            total += count * routing.probabilities_NE[:, expert].mean().item()
    num_layers, top_k, num_tokens = 3, 2, 50
    expected = 8 / (num_layers * top_k * num_tokens) * total
    # fp32 sums of 50 probabilities.
    assert balance(routings, "per_layer") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_global_balance_is_transformers_function(top_k: int) -> None:
    routings = random_routings(top_k=top_k)
    expected = load_balancing_loss_func(tuple(r.logits_NE for r in routings), 8, top_k)
    assert balance(routings, "global") == pytest.approx(expected.item(), rel=1e-6)


def test_router_z_is_the_mean_square_of_the_log_sum_exp() -> None:
    routings = random_routings()
    squares = [
        row.exp().sum().log().item() ** 2 for routing in routings for row in routing.logits_NE
    ]
    found = router_z_loss([LayerTerms.of(routing) for routing in routings])
    assert found.item() == pytest.approx(sum(squares) / len(squares), rel=1e-5)


def output_case(num_tokens: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(num_tokens, 32, generator=generator, requires_grad=True)
    head = torch.randn(vocab, 32, generator=generator, requires_grad=True)
    return hidden, head, torch.randint(0, vocab, (num_tokens,), generator=generator)


def test_sliced_output_losses_equal_the_full_ones_with_their_gradients() -> None:
    hidden, head, labels = output_case(301, 77)
    logits = F.linear(hidden, head)
    cross_entropy = F.cross_entropy(logits, labels)
    z = logits.logsumexp(-1).square().mean()
    # A factor before backward, as with micro-batches.
    expected = torch.autograd.grad((cross_entropy + 0.3 * z) * 0.25, (hidden, head))
    total, sliced_cross_entropy, sliced_z = output_losses(hidden, head, labels, 0.3)
    gradients = torch.autograd.grad(total * 0.25, (hidden, head))

    # fp32, summed in other orders.
    assert sliced_cross_entropy.item() == pytest.approx(cross_entropy.item(), rel=1e-6)
    assert sliced_z.item() == pytest.approx(z.item(), rel=1e-6)
    assert not sliced_cross_entropy.requires_grad
    for gradient, full in zip(gradients, expected, strict=True):
        assert (gradient - full).norm() < 2e-6 * full.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_the_whole_batch_never_exist_at_once(dtype: torch.dtype) -> None:
    hidden, head, labels = output_case(2048, 20_000)
    with Spy() as spy:
        total, _, _ = output_losses(hidden.to(dtype), head, labels, 1e-5)
        total.backward()
    rows = [shape[0] for _, shape, _ in spy.seen if shape[1:] == (20_000,)]
    assert max(rows) == slice_tokens(2048, 20_000, "cpu") == 832


@pytest.mark.parametrize(
    ("num_tokens", "vocab", "expected"),
    [(1, 260, 1), (2, 260, 1), (2048, 260, 1024), (2048, 32_000, 512), (4096, 151_665, 128)],
)
def test_slices_are_bounded_and_less_than_all_tokens(
    num_tokens: int, vocab: int, expected: int
) -> None:
    assert slice_tokens(num_tokens, vocab, "cpu") == expected


def test_a_gpu_takes_long_slices_since_each_adds_to_the_whole_head() -> None:
    assert slice_tokens(16_384, 151_665, "cuda") == 1728


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [77, 128])
def test_output_losses_on_a_gpu_are_those_of_doubles(dtype: torch.dtype, vocab: int) -> None:
    hidden, head, labels = output_case(301, vocab)
    rounded = [each.detach().to(dtype).double().requires_grad_() for each in (hidden, head)]
    logits = F.linear(*rounded)
    expected = F.cross_entropy(logits, labels) + 0.3 * logits.logsumexp(-1).square().mean()
    gradients = torch.autograd.grad(expected, rounded)
    mine = [hidden.detach().to("cuda", dtype), head.detach().cuda()]
    for each in mine:
        each.requires_grad_()
    total, _, _ = output_losses(*mine, labels.cuda(), 0.3)
    # bf16 logits have 8 bits, so that one of 8 to 16 is off by up to 0.03, its exponential by 3 %.
    error = 1e-5 if dtype is torch.float32 else 2e-2
    assert total.item() == pytest.approx(expected.item(), rel=error)
    for gradient, exact in zip(torch.autograd.grad(total, mine), gradients, strict=True):
        assert (gradient.cpu().double() - exact).norm() < error * exact.norm()


def test_without_gradients_no_gradient_is_formed() -> None:
    hidden, head, labels = output_case(64, 77)
    with torch.no_grad(), Spy() as spy:
        output_losses(hidden, head, labels, 0.0)
    # The inputs pass through views. A new tensor of their shape would be a gradient.
    made = [name for name, shape, _ in spy.seen if shape in ((77, 32), (64, 32))]
    assert not {"zeros_like", "empty_like", "mm", "addmm_"} & set(made), made
