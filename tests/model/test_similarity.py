"""Similarity of experts that get the same tokens, and the loss that reduces it."""

import pytest
import torch
from torch import Tensor

from swarm.config import LossConfig
from swarm.model.losses import LayerTerms, similarity_loss
from swarm.model.routing import RoutingControls
from swarm.model.similarity import MIN_TOKENS, cka, shared_tokens
from tests.model.test_routing import layer_of, tokens


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_equal_turned_scaled_and_shifted_outputs_are_wholly_similar() -> None:
    x = normal(40, 24)
    turn, _ = torch.linalg.qr(normal(24, 24, seed=1))
    for y in (x, 3 * x + 5, x @ turn, -0.1 * x @ turn - 2):
        assert cka(x, y).item() == pytest.approx(1.0, abs=1e-5)


def test_independent_outputs_are_dissimilar_even_with_fewer_tokens_than_dimensions() -> None:
    found = [cka(normal(32, 128, seed=s), normal(32, 128, seed=100 + s)).item() for s in range(20)]
    # The biased estimate would read 128 / (128 + 32) = 0.8 here.
    assert abs(sum(found) / 20) < 0.03
    assert max(map(abs, found)) < 0.25


def test_with_many_tokens_it_is_the_cka_of_the_released_code() -> None:
    x = normal(800, 6)
    y = x @ normal(6, 6, seed=1) + 0.5 * normal(800, 6, seed=2)
    centre = torch.eye(800) - 1 / 800

    def biased_hsic(left: Tensor, right: Tensor) -> Tensor:
        return torch.trace(left @ left.t() @ centre @ right @ right.t() @ centre)

    expected = biased_hsic(x, y) / (biased_hsic(x, x) * biased_hsic(y, y)).sqrt()
    # Biased and unbiased estimates differ by about D / n.
    assert cka(x, y).item() == pytest.approx(expected.item(), abs=0.02)


def test_pairs_that_share_most_tokens_are_compared_on_just_these() -> None:
    chosen = [[0, 1]] * 30 + [[2, 1]] * 20 + [[0, 3]] * (MIN_TOKENS - 1) + [[1, 0]] * 5
    pairs = shared_tokens(torch.tensor(chosen), 5)
    assert [pair.experts for pair in pairs] == [(0, 1), (1, 2)]
    last = 50 + MIN_TOKENS - 1
    assert pairs[0].tokens.tolist() == [*range(30), *range(last, last + 5)]
    assert pairs[1].tokens.tolist() == list(range(30, 50))


def test_copied_experts_are_found() -> None:
    layer, x_BTD = layer_of(), tokens(768)[None]
    before = layer(x_BTD, controls=RoutingControls(probe=True))[1].similarity
    for stack in layer.experts.owned.values():
        stack.data[1:] = stack.data[:1]
    after = layer(x_BTD, controls=RoutingControls(probe=True))[1].similarity
    assert not after.requires_grad
    assert before.max() < 0.6
    assert torch.allclose(after, torch.ones(4), atol=1e-4)


def test_the_loss_counts_pairs_above_the_threshold_and_reaches_own_experts_alone() -> None:
    layer, x_ND = layer_of(owned=(0, 1, 2, 3)), tokens(768).requires_grad_()
    _, routing = layer(x_ND[None], controls=RoutingControls(draw_apart=True))
    values = sorted(routing.similarity.tolist())
    threshold = (values[1] + values[2]) / 2
    found = similarity_loss([LayerTerms.of(routing)], threshold)
    assert found is not None
    assert found[0].item() == pytest.approx(sum(values) / 4)
    assert found[1].item() == pytest.approx(sum(values[2:]) / 4)
    inputs = [x_ND, layer.gate.weight, *layer.experts.owned.values()]
    gradients = torch.autograd.grad(found[1], inputs, allow_unused=True)
    assert gradients[0] is None and gradients[1] is None
    assert any(gradient is not None and gradient.norm() > 0 for gradient in gradients[2:])


def test_descending_the_loss_draws_copied_experts_apart() -> None:
    layer, x_BTD = layer_of(), tokens(768)[None]
    for stack in layer.experts.owned.values():
        noise = 0.02 * normal(*stack.shape, seed=3)
        stack.data.copy_(stack.data[:1] + noise)
    optimizer = torch.optim.Adam(layer.experts.owned.values(), lr=5e-3)
    seen = []
    for _ in range(40):
        found = similarity_loss(
            [LayerTerms.of(layer(x_BTD, controls=RoutingControls(draw_apart=True))[1])],
            LossConfig().similarity_threshold,
        )
        assert found is not None
        seen.append(found[0].item())
        if not found[1].requires_grad or seen[-1] < 0.5:
            break
        optimizer.zero_grad()
        found[1].backward()
        optimizer.step()
    assert seen[0] > 0.9
    assert seen[-1] < 0.6


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-7])
def test_outputs_that_are_alike_for_all_tokens_have_a_similarity_of_none_and_no_gradient(
    scale: float,
) -> None:
    """Only rounding is left of them. Their ratio was 10^18 in a real log."""
    for seed in range(10):
        constant = torch.ones(32, 16) + scale * 1e-6 * normal(32, 16, seed=seed)
        constant[:, 0] += 1e-7 * normal(32, seed=seed + 50)
        constant = constant.requires_grad_()
        found = cka(constant, torch.full((32, 16), 0.1))
        assert -1 <= found.item() <= 1
        found.backward()
        assert constant.grad is not None and constant.grad.isfinite().all()


def test_a_side_without_any_variance_is_like_nothing() -> None:
    assert cka(torch.zeros(20, 8), normal(20, 8)).item() == 0.0
    assert cka(normal(20, 8), torch.full((20, 8), 3.0)).item() == 0.0
