"""Muon: the published update of each single matrix, and AdamW's of everything else."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from swarm.config import OptimizerConfig, RunConfig
from swarm.config.parse import validate_config
from swarm.errors import ConfigError, CorruptState, TrainingDiverged
from swarm.experts import (
    EMBEDDING,
    expert_tensor,
    is_matrix,
    moments_of,
    owned_stack,
    shared_shapes,
)
from swarm.protocol.values.updates import LARGEST_SINGULAR_VALUE, largest_matrix_move
from swarm.train.engine.guard import clip_factors
from swarm.train.engine.muon import (
    MOMENTUM_DECAY,
    newton_schulz_flops,
    orthogonalised,
    update_matrix,
)
from swarm.train.engine.optimizer import OwnedOptimizer
from tests.train.runs import batch, new_engine, same, tiny_run

MUON = OptimizerConfig(kind="muon", lr=0.1, matrix_lr=0.03)
ADAMW = OptimizerConfig(lr=0.1)
QUERY, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
ROUTER, STACK = "model.layers.0.mlp.gate.weight", owned_stack(0, "gate")
OWNED = (1, 3)
SECTIONS = {"optimizer": {"kind": "muon", "clip_norm": 0.1}}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained(settings, form="fp32", *, owned=OWNED, updates=3):
    """Some tensors of a peer after updates by gradients that follow from tensor and step."""
    shapes = {EMBEDDING: (9, 6), QUERY: (8, 6), NORM: (6,), ROUTER: (4, 6)}
    named = {name: nn.Parameter(random(*shape)) for name, shape in shapes.items()}
    named[STACK] = nn.Parameter(torch.stack([random(5, 6, seed=expert) for expert in owned]))
    optimizer = OwnedOptimizer(settings, form)
    optimizer.follow(named, owned)
    for step in range(updates):
        give_gradients(named, owned, step)
        optimizer.update(settings.lr)
    return optimizer


def give_gradients(named, owned, step):
    for name, parameter in named.items():
        parameter.grad = random(*parameter.shape, seed=100 + step)
        if name == STACK:
            rows = [random(5, 6, seed=100 * expert + step) for expert in owned]
            parameter.grad = torch.stack(rows)


def published(value, gradients, lr, *, steps=5):
    """Muon in fp64, as in its description."""
    value, momentum = value.double(), torch.zeros_like(value, dtype=torch.float64)
    for gradient in gradients:
        gradient = gradient.double()
        momentum = 0.95 * momentum + 0.05 * gradient
        x = 0.95 * momentum + 0.05 * gradient
        x = x / x.norm()
        for _ in range(steps):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        value = value * (1 - lr * 0.1) - lr * 0.2 * math.sqrt(max(value.shape)) * x
    return value


# ------------------------------------------------ the update


@pytest.mark.parametrize("shape", [(8, 6), (6, 8), (5, 5), (1, 7)])
def test_an_update_is_muon_as_published(shape):
    value, momentum = random(*shape), torch.zeros(shape)
    gradients = [random(*shape, seed=seed) for seed in range(1, 6)]
    expected = published(value, gradients, 0.03)
    for gradient in gradients:
        update_matrix(value, gradient, momentum, lr=0.03, weight_decay=0.1, name=QUERY)
    torch.testing.assert_close(value.double(), expected, rtol=0, atol=1e-6)


def test_an_update_is_that_of_torch_up_to_its_products_in_bf16():
    value, momentum = random(16, 12), torch.zeros(16, 12)
    theirs = nn.Parameter(value.clone())
    reference = torch.optim.Muon([theirs], lr=0.03, adjust_lr_fn="match_rms_adamw")
    for seed in range(1, 6):
        theirs.grad = random(16, 12, seed=seed)
        update_matrix(value, theirs.grad.clone(), momentum, lr=0.03, weight_decay=0.1, name=QUERY)
        reference.step()
    moved = (value - random(16, 12)).norm()
    assert (value - theirs.detach()).norm() < 0.01 * moved
    theirs_momentum = reference.state[theirs]["momentum_buffer"]
    torch.testing.assert_close(momentum, theirs_momentum, rtol=1e-5, atol=1e-7)


def test_matrices_have_muon_and_all_else_adamw():
    names = [*shared_shapes(tiny_run().model), expert_tensor(0, 1, "up"), owned_stack(1, "down")]
    muons = {name for name in names if moments_of(name, "muon") == ("momentum",)}
    assert muons == {name for name in names if is_matrix(name)}
    kinds = {name.split(".")[-2] for name in muons if "self_attn" in name}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert muons.isdisjoint({EMBEDDING, "lm_head.weight", NORM, ROUTER})
    assert all(moments_of(name, "adamw") == ("exp_avg", "exp_avg_sq") for name in names)
    both, adamw = trained(MUON).masters(), trained(ADAMW).masters()
    same_bits = {name for name in both if torch.equal(both[name], adamw[name])}
    assert same_bits == {EMBEDDING, NORM, ROUTER}


def test_each_expert_is_a_matrix_of_its_own_whoever_else_is_owned():
    alone, among = trained(MUON, owned=(3,)).masters(), trained(MUON, owned=(0, 1, 3)).masters()
    assert torch.equal(alone[expert_tensor(0, 3, "gate")], among[expert_tensor(0, 3, "gate")])


def test_all_singular_values_but_zero_end_near_one():
    left, _ = torch.linalg.qr(random(32, 32))
    right, _ = torch.linalg.qr(random(32, 32, seed=1))
    values = torch.logspace(-2.5, 0, 32)
    found = torch.linalg.svdvals(orthogonalised(left @ values.diag() @ right))
    assert found.min() > 0.65 and found.max() < LARGEST_SINGULAR_VALUE
    worst = [torch.linalg.svdvals(orthogonalised(torch.tensor([[s]]))) for s in torch.rand(500)]
    assert max(worst) < LARGEST_SINGULAR_VALUE
    assert newton_schulz_flops(3, 2) == 5 * (2 * 2 * 2 * 3 + 2 * 2**3 + 2 * 2 * 2 * 3)


@pytest.mark.parametrize("shape", [(2, 2), (64, 3), (1, 50), (40, 40)])
def test_no_update_moves_an_element_further_than_the_bound(shape):
    value, momentum = torch.zeros(shape), torch.zeros(shape)
    spike = torch.zeros(shape)
    spike[0, 0] = 1e6
    for gradient in (spike, random(*shape), -spike, torch.ones(shape)):
        before = value.clone()
        update_matrix(value, gradient, momentum, lr=1.0, weight_decay=0.0, name=QUERY)
        assert (value - before).abs().max() <= largest_matrix_move(max(shape))


def test_a_matrix_without_gradient_only_decays():
    value, momentum = random(4, 3), torch.zeros(4, 3)
    update_matrix(value, torch.zeros(4, 3), momentum, lr=0.5, weight_decay=0.1, name=QUERY)
    torch.testing.assert_close(value, random(4, 3) * 0.95)
    one = torch.outer(random(4), random(3))  # rank 1
    update_matrix(value, one, momentum, lr=0.5, weight_decay=0.1, name=QUERY)
    assert value.isfinite().all()


def test_a_momentum_that_is_not_finite_is_named_and_its_matrix_stays():
    optimizer = trained(MUON)
    optimizer.write_moments({f"momentum.{QUERY}": torch.full((8, 6), math.nan)})
    before = {name: each.clone() for name, each in optimizer.masters().items() if name == QUERY}
    give_gradients(optimizer._parameters, OWNED, 9)
    with pytest.raises(TrainingDiverged, match=f"momentum of {QUERY} is not finite"):
        optimizer.update(0.1)
    assert torch.equal(optimizer.masters()[QUERY], before[QUERY])


def test_gradients_of_matrices_are_not_clipped_and_do_not_clip_others():
    norms = {QUERY: torch.tensor(1e9), NORM: torch.tensor(3.0), EMBEDDING: torch.tensor(4.0)}
    for clip in ("global", "unit"):
        settings = MUON.model_copy(update={"clip": clip, "clip_norm": 1.0})
        factors = clip_factors(norms, settings)
        assert QUERY not in factors
        assert clip_factors(norms, settings, 4.0)[QUERY] == 0.25
        limit = 1 / 5 if clip == "global" else 1 / 3 / 3**0.5
        assert factors[NORM] == pytest.approx(limit, rel=1e-5)
    assert clip_factors(norms, ADAMW)[NORM] < 1e-8


def test_the_rate_of_matrices_follows_the_schedule():
    both = trained(MUON, updates=0)
    assert both.next_update(0.1).matrix_lr == pytest.approx(0.03)
    assert both.next_update(0.05).matrix_lr == pytest.approx(0.015)
    assert OwnedOptimizer(ADAMW).next_update(0.05).matrix_lr == 0.05
    rest = tiny_run().model_dump(exclude={"optimizer"})
    values = {**rest, "optimizer": {"lr": 0.1, "matrix_lr": 0.1}}
    with pytest.raises(ConfigError, match=r"matrix_lr: needs optimizer\.kind"):
        validate_config(RunConfig, values, source="x")


# ------------------------------------------------ its state


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
def test_a_state_goes_on_with_the_same_bits(form):
    run = tiny_run(**SECTIONS)
    straight = new_engine(run, OWNED, moments=form)
    for step in range(3):
        straight.step(batch(run, step), lr=1e-2)
    state = straight.state_dict()
    copied = replace(state, tensors={name: each.clone() for name, each in state.tensors.items()})
    resumed = new_engine(run, (0,), moments=form)
    resumed.load_state_dict(copied)
    for step in range(3, 5):
        assert resumed.step(batch(run, step), lr=1e-2) == straight.step(batch(run, step), lr=1e-2)
    assert same(dict(resumed.state_dict().tensors), dict(straight.state_dict().tensors))
    halves = [name for name in state.tensors if name.startswith("momentum.")]
    assert {name.partition(".")[2] for name in halves} == {
        name for name in straight._optimizer.masters() if is_matrix(name)
    }


@pytest.mark.parametrize("kind, other", [("muon", "AdamW"), ("adamw", "Muon")])
def test_the_state_of_another_optimizer_is_refused_with_both_names(kind, other):
    mine = {"muon": "Muon", "adamw": "AdamW"}[kind]
    saved = "muon" if kind == "adamw" else "adamw"
    state = new_engine(tiny_run(optimizer={"kind": saved}), OWNED).state_dict()
    engine = new_engine(tiny_run(optimizer={"kind": kind}), OWNED)
    with pytest.raises(CorruptState, match=f"has {other}'s moments of .* trains it with {mine}"):
        engine.load_state_dict(state)


def test_moments_follow_their_experts():
    optimizer = trained(MUON, owned=(1, 3))
    kept = optimizer.read_moments([expert_tensor(0, 3, "gate")])
    assert kept.keys() == {f"momentum.{expert_tensor(0, 3, 'gate')}"}
    named = dict(optimizer._parameters)
    named[STACK] = nn.Parameter(torch.zeros(2, 5, 6))
    optimizer.follow(named, (2, 3))
    now = optimizer.read_moments([expert_tensor(0, e, "gate") for e in (2, 3)])
    assert torch.equal(now[f"momentum.{expert_tensor(0, 3, 'gate')}"], *kept.values())
    assert not now[f"momentum.{expert_tensor(0, 2, 'gate')}"].any()
    assert 0 < MOMENTUM_DECAY < 1
