"""Our decoder against Transformers' Qwen3-MoE and OLMoE, in fp32, on the same weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from swarm.config import LossConfig, RunConfig
from swarm.experts import expert_tensor
from swarm.model.huggingface import config_dict
from swarm.model.transformer import Transformer
from tests.model.samples import random_tokens, random_weights, tiny_run

VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": "head"},
    "qwen3 tied, renormalised": {"tie_word_embeddings": True, "norm_topk_prob": True},
    "qwen3 wide heads, top 3": {"head_dim": 24, "num_experts_per_tok": 3},
    "mixtral": {"qk_norm": "none", "norm_topk_prob": True},
    "olmoe": {"qk_norm": "projection"},
    "olmoe tied, renormalised": {
        "qk_norm": "projection",
        "tie_word_embeddings": True,
        "norm_topk_prob": True,
    },
}


def fused(weights: dict[str, Tensor], run: RunConfig) -> dict[str, Tensor]:
    """Weights under the names that Transformers uses in memory: experts in one tensor."""
    named = {name: value for name, value in weights.items() if ".experts." not in name}
    for layer in range(run.model.num_hidden_layers):
        stacks = {
            kind: torch.stack(
                [weights[expert_tensor(layer, e, kind)] for e in range(run.model.num_experts)]
            )
            for kind in ("gate", "up", "down")
        }
        prefix = f"model.layers.{layer}.mlp.experts"
        named[f"{prefix}.gate_up_proj"] = torch.cat([stacks["gate"], stacks["up"]], dim=1)
        named[f"{prefix}.down_proj"] = stacks["down"]
    if run.model.tie_word_embeddings:
        named["lm_head.weight"] = named["model.embed_tokens.weight"]
    return named


def theirs(run: RunConfig, weights: dict[str, Tensor]) -> PreTrainedModel:
    settings = config_dict(run)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(fused(weights, run), strict=True)
    return model


def ours(run: RunConfig, weights: dict[str, Tensor], owned: list[int]) -> Transformer:
    model = Transformer(run.model, owned=owned, frozen="fp32", compute="fp32")
    model.write(weights)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str) -> None:
    run = tiny_run(**VARIANTS[variant])
    weights, tokens = random_weights(run), random_tokens(run)
    with torch.no_grad():
        expected = theirs(run, weights)(tokens).logits
        logits = ours(run, weights, [1, 4])(tokens)
    # Both are fp32; sums run in another order. Observed: below 4e-6 on logits of about 4.
    assert (logits - expected).abs().max() < 1e-5
    assert expected.abs().max() > 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_the_whole_loss_are_those_of_transformers(variant: str) -> None:
    run = tiny_run(**VARIANTS[variant])
    weights, tokens = random_weights(run), random_tokens(run)
    # Weights of the terms so large that an error in any of them would be seen.
    loss = LossConfig(
        balance="global", balance_weight=1.0, router_z_weight=0.1, output_z_weight=0.1
    )
    their_model = theirs(run, weights)
    expected = their_loss(their_model, tokens, loss, run)
    expected.backward()
    our_model = ours(run, weights, list(range(run.model.num_experts)))
    losses = our_model.losses(tokens, loss)
    losses.total.backward()

    assert losses.total.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = {name: p.grad for name, p in our_model.named_parameters()}
    for name, parameter in their_model.named_parameters():
        assert parameter.grad is not None
        assert relative_error(gradient_named(name, gradients), parameter.grad) < 5e-6, name


def their_loss(model: PreTrainedModel, tokens: Tensor, loss: LossConfig, run: RunConfig) -> Tensor:
    out = model(tokens[:, :-1], output_router_logits=True)
    cross_entropy = F.cross_entropy(out.logits.flatten(0, 1), tokens[:, 1:].flatten())
    balance = load_balancing_loss_func(
        out.router_logits, run.model.num_experts, run.model.num_experts_per_tok
    )
    router_z = torch.cat(out.router_logits).logsumexp(-1).square().mean()
    output_z = out.logits.logsumexp(-1).square().mean()
    return (
        cross_entropy
        + loss.balance_weight * balance
        + loss.router_z_weight * router_z
        + loss.output_z_weight * output_z
    )


def gradient_named(name: str, ours: dict[str, Tensor | None]) -> Tensor:
    """Our gradient under Transformers' name for it."""
    prefix, _, projection = name.partition(".experts.")
    found = {
        "": [name],
        "gate_up_proj": [f"{prefix}.experts.owned.gate_proj", f"{prefix}.experts.owned.up_proj"],
        "down_proj": [f"{prefix}.experts.owned.down_proj"],
    }[projection]
    gradients = [ours[each] for each in found]
    assert all(gradient is not None for gradient in gradients), name
    return torch.cat(
        [gradient for gradient in gradients if gradient is not None], dim=1 if projection else 0
    )


def relative_error(value: Tensor, expected: Tensor) -> float:
    return ((value - expected).norm() / expected.norm()).item()
