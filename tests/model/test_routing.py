"""Every routing technique computes its paper's formula."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.config import LossConfig
from swarm.model.moe import Router, SparseMLP, Storage
from swarm.model.routing import RoutingControls, bias_update, expert_capacity, within_capacity
from swarm.model.transformer import Transformer
from tests.model.samples import random_tokens, random_weights, tiny_run

CPU = torch.device("cpu")
SIGMOID = {"scoring_func": "sigmoid"}


def layer_of(owned: tuple[int, ...] = tuple(range(8)), **settings: Any) -> SparseMLP:
    """Router and experts with weights so large that choices differ and outputs are not small."""
    layer = SparseMLP(tiny_run(**settings).model, Storage("fp32", torch.float32, CPU))
    layer.experts.own(tuple(range(8)))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in sorted(layer.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)
    layer.experts.own(owned)
    return layer


def tokens(count: int = 48, seed: int = 6) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))


def router_with_logits(logits_E: list[float], **settings: Any) -> tuple[Router, Tensor]:
    """A router and an input token for which it has these logits."""
    router = Router(tiny_run(num_experts=len(logits_E), **settings).model, CPU)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.zero_()
        router.weight[:, 0] = torch.tensor(logits_E)
    return router, F.one_hot(torch.tensor([0]), 64).float()


def plain_layer(
    layer: SparseMLP,
    x_ND: Tensor,
    top_k: int,
    *,
    renormalise: bool,
    kept: Callable[[int, int], bool] = lambda token, k: True,
) -> Tensor:
    """Token by token and expert by expert, using only the layer's weights."""
    rows = []
    for token, x_D in enumerate(x_ND):
        probability_E = F.softmax(layer.gate.weight @ x_D, dim=0)
        best = sorted(range(8), key=lambda e: -probability_E[e].item())[:top_k]
        total = sum(probability_E[e] for e in best) if renormalise else 1.0
        row = torch.zeros(64)
        for k, expert in enumerate(best):
            gate, up, down = (layer.experts.owned[f"{p}_proj"] for p in ("gate", "up", "down"))
            inner = F.silu(gate[expert] @ x_D) * (up[expert] @ x_D)
            if kept(token, k):
                row = row + probability_E[expert] / total * (down[expert] @ inner)
        rows.append(row)
    return torch.stack(rows)


# ---------------------------------------------------------------- top-1, top-2, top-k


@pytest.mark.parametrize(
    ("top_k", "renormalise"),
    # Switch: the probability is the weight. GShard: the two weights are scaled to sum to 1.
    [(1, False), (2, True), (2, False), (4, True)],
    ids=["switch", "gshard", "top 2", "top 4"],
)
def test_a_layer_equals_a_plain_loop_over_its_experts(top_k: int, renormalise: bool) -> None:
    layer = layer_of(num_experts_per_tok=top_k, norm_topk_prob=renormalise)
    x_ND = tokens().requires_grad_()
    out, routing = layer(x_ND[None])
    expected = plain_layer(layer, x_ND, top_k, renormalise=renormalise)
    # fp32 products of up to 64 terms in another order.
    assert torch.allclose(out[0], expected, rtol=1e-4, atol=1e-5)
    assert routing.kept_NK is None
    upstream = torch.randn(48, 64, generator=torch.Generator().manual_seed(9))
    inputs = [x_ND, *layer.parameters()]
    gradients = torch.autograd.grad(out[0], inputs, upstream)
    for gradient, plain in zip(
        gradients, torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        assert torch.allclose(gradient, plain, rtol=1e-3, atol=1e-5)


def test_with_top_1_the_router_learns_through_the_weight_of_its_choice() -> None:
    layer = layer_of(num_experts_per_tok=1)
    out, routing = layer(tokens()[None])
    assert torch.equal(routing.expert_NK[:, 0], routing.probabilities_NE.argmax(-1))
    out.square().sum().backward()
    assert layer.gate.weight.grad is not None
    assert layer.gate.weight.grad.norm() > 0


# ---------------------------------------------------------------- capacity


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "factor", "expected"),
    [(64, 1, 1.0, 8), (64, 1, 1.25, 10), (64, 2, 1.25, 20), (60, 1, 1.0, 8), (3, 1, 0.1, 1)],
)
def test_capacity_is_the_even_share_times_the_factor(
    num_tokens: int, top_k: int, factor: float, expected: int
) -> None:
    assert expert_capacity(num_tokens, top_k, 8, factor) == expected


def test_first_choices_find_a_place_before_second_ones_each_in_the_order_of_tokens() -> None:
    expert_NK = torch.tensor([[0, 1], [0, 1], [1, 0], [0, 2]])
    kept_NK = within_capacity(expert_NK, 3, 2)
    # Expert 0: tokens 0 and 1, then no more. Expert 1: token 2, then token 0's second choice.
    assert kept_NK.tolist() == [[True, True], [True, False], [True, False], [False, True]]


@pytest.mark.parametrize("num_owned", [0, 3, 8])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_dropped_choices_count_nothing_and_the_rest_as_before(
    num_owned: int, compute: torch.dtype
) -> None:
    layer, x_ND = layer_of(), tokens().requires_grad_()
    x_ND.data[20:] = x_ND.data[20] + 0.01 * x_ND.data[20:]  # most tokens want the same experts
    controls = RoutingControls(capacity_factor=1.0)
    kept_NK = layer(x_ND[None], controls=controls)[1].kept_NK
    assert kept_NK is not None and 20 < (~kept_NK).sum() < 80
    expected = plain_layer(
        layer, x_ND, 2, renormalise=False, kept=lambda token, k: bool(kept_NK[token, k])
    )
    upstream = torch.randn(48, 64, generator=torch.Generator().manual_seed(9))
    plain = torch.autograd.grad(
        expected, [x_ND, layer.gate.weight, *layer.experts.owned.values()], upstream
    )
    layer.experts.own(tuple(range(num_owned)))
    layer.experts.compute = compute
    out, routing = layer(x_ND[None], controls=controls)
    assert torch.equal(routing.kept_NK, kept_NK)
    inputs = [x_ND, layer.gate.weight, *layer.experts.owned.values()]
    gradients = torch.autograd.grad(out[0], inputs, upstream)
    loose = compute is torch.bfloat16
    assert (out[0] - expected).norm() < (0.02 if loose else 1e-5) * expected.norm()
    for index, (gradient, whole) in enumerate(zip(gradients, plain, strict=True)):
        trained = whole if index < 2 else whole[:num_owned]
        assert (gradient - trained).norm() <= (0.03 if loose else 1e-5) * trained.norm()
    unserved = ~kept_NK.any(-1)
    assert unserved.any()
    # Such a token passes the layer by its residual alone.
    assert (out[0][unserved] == 0).all()
    assert (gradients[0][unserved] == 0).all()


def test_a_capacity_that_suffices_changes_no_bit() -> None:
    layer, x_BTD = layer_of(owned=(1, 2)), tokens()[None]
    plain, _ = layer(x_BTD)
    out, routing = layer(x_BTD, controls=RoutingControls(capacity_factor=4.0))
    assert routing.kept_NK.all()
    assert torch.equal(out, plain)


# ---------------------------------------------------------------- noisy top-k


def test_noise_decides_as_often_as_the_normal_distribution_says() -> None:
    router, token = router_with_logits([0.5, 0.0], noisy_top_k=True, num_experts_per_tok=1)
    for preset, width in ((0.0, math.log(2)), (2.0, math.log(1 + math.exp(2)))):
        router.noise_weight.data[:, 0] = preset
        routing = router(token.expand(20_000, -1), controls=RoutingControls(noise_seed=3))
        # Two independent noises of this width: Shazeer et al., eq. 8-9, for two experts.
        expected = 0.5 * (1 + math.erf(0.5 / (width * math.sqrt(2)) / math.sqrt(2)))
        found = (routing.expert_NK == 0).float().mean().item()
        # The standard deviation of the share is 0.0035.
        assert found == pytest.approx(expected, abs=0.012)


def test_noise_is_a_function_of_its_seed_and_absent_in_evaluation() -> None:
    layer, x_ND = layer_of(noisy_top_k=True, norm_topk_prob=True), tokens()
    first, again, other = (
        layer.gate(x_ND, controls=RoutingControls(noise_seed=seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first.weight_NK, again.weight_NK)
    assert not torch.equal(first.expert_NK, other.expert_NK)
    plain = layer_of(norm_topk_prob=True)
    plain.gate.weight.data.copy_(layer.gate.weight)
    assert torch.equal(layer.gate(x_ND).weight_NK, plain.gate(x_ND).weight_NK)
    # Weights are the softmax over the kept noisy logits, so the width of the noise is learned.
    (gradient,) = torch.autograd.grad(first.weight_NK[:, 0].sum(), layer.gate.noise_weight)
    assert gradient.norm() > 0


def test_layers_and_micro_batches_have_noise_of_their_own() -> None:
    controls = RoutingControls(noise_seed=7)
    seeds = {controls.part(a).part(b).noise_seed for a in range(20) for b in range(20)}
    assert len(seeds) == 400


# ---------------------------------------------------------------- loss-free balancing


def test_the_selection_bias_decides_who_is_chosen_and_never_the_weight() -> None:
    router, token = router_with_logits([2.0, 1.0, 0.0, -1.0], **SIGMOID)
    assert router(token).expert_NK.tolist() == [[0, 1]]
    router.shift(torch.tensor([-1.0, 0.0, 0.0, 1.0]))
    routing = router(token)
    assert routing.expert_NK.tolist() == [[3, 1]]
    expected = torch.tensor([[-1.0, 1.0]]).sigmoid()
    assert torch.allclose(routing.weight_NK, expected)
    # The probabilities in the balancing loss sum to 1 (DeepSeek-V3, eq. 19).
    assert routing.probabilities_NE.sum().item() == pytest.approx(1.0)


def test_the_update_is_the_rate_against_the_sign_of_the_overload() -> None:
    tokens_LE = torch.tensor([[8, 2, 5, 5], [5, 5, 5, 5]])
    expected = torch.tensor([[-0.001, 0.001, 0.0, 0.0], [0.0] * 4])
    assert torch.equal(bias_update(tokens_LE, 0.001), expected)


def test_updates_balance_a_router_that_never_learns() -> None:
    layer, x_ND = layer_of(**SIGMOID), tokens(512)
    layer.gate.e_score_correction_bias.data.zero_()
    layer.gate.weight.data[0] += 0.15 * x_ND.mean(0).sign()
    layer.gate.weight.data[:3] *= 2.0

    def counts_E() -> torch.Tensor:
        return torch.bincount(layer.gate(x_ND).expert_NK.flatten(), minlength=8)

    assert counts_E().max() > 1.3 * 128
    weight = layer.gate.weight.clone()
    for _ in range(300):
        layer.gate.shift(bias_update(counts_E()[None], 0.002)[0])
    # Within one step's jitter of 128 tokens each.
    assert counts_E().max() < 1.06 * 128
    assert torch.equal(layer.gate.weight, weight)


# ---------------------------------------------------------------- own experts


@pytest.mark.parametrize("settings", [{}, SIGMOID], ids=["softmax", "sigmoid"])
def test_own_experts_are_chosen_more_often_at_their_honest_weight(settings: dict[str, Any]) -> None:
    layer, x_ND = layer_of(owned=(2, 5), **settings), tokens()
    plain, weak, strong = (
        layer(x_ND[None], controls=RoutingControls(own_expert_bias=bias))[1]
        for bias in (0.0, 0.5, 50.0)
    )
    own = [torch.isin(r.expert_NK, torch.tensor([2, 5])).sum().item() for r in (plain, weak)]
    assert own[0] < own[1]
    if not settings:  # a sigmoid saturates, the selection bias may still win
        assert torch.equal(strong.expert_NK.sort(-1).values, torch.tensor([[2, 5]]).expand(48, 2))
        assert torch.equal(strong.weight_NK, strong.probabilities_NE.gather(1, strong.expert_NK))
    assert torch.equal(plain.probabilities_NE, strong.probabilities_NE)


def test_the_balance_factor_discounts_the_tokens_of_own_experts() -> None:
    run = tiny_run()
    model = Transformer(run.model, owned=[1, 6], frozen="fp32")
    model.write(random_weights(run))
    batch, loss = random_tokens(run), LossConfig()
    with torch.no_grad():
        full = model.losses(batch, loss)
        found = model.losses(batch, loss, RoutingControls(balance_factor=0.7))
        _, routings = model.model(batch[:, :-1])
    expected = 0.0
    for routing in routings:
        for expert in range(8):
            count = (routing.expert_NK == expert).sum().item()
            factor = 0.7 if expert in (1, 6) else 1.0
            expected += factor * count * routing.probabilities_NE[:, expert].mean().item()
    expected *= 8 / (2 * 2 * 128)
    assert found.balance.item() == pytest.approx(expected, rel=1e-5)
    assert found.balance < full.balance
    assert torch.equal(found.expert_tokens, full.expert_tokens)
    assert torch.equal(found.cross_entropy, full.cross_entropy)


def test_a_step_without_techniques_has_the_bits_of_evaluation() -> None:
    run = tiny_run()
    model = Transformer(run.model, owned=[0, 3], frozen="fp32")
    model.write(random_weights(run))
    batch = random_tokens(run)
    plain = model.losses(batch, run.loss)
    guided = model.losses(batch, run.loss, RoutingControls(noise_seed=5))
    assert torch.equal(plain.total, guided.total)
    assert guided.dropped == 0
    assert guided.similarity is None
