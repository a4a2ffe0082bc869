import logging
import math

import pytest
import torch

from swarm.config import OptimizerConfig
from swarm.errors import TrainingDiverged
from swarm.model.routing import RoutingControls
from swarm.train.engine.guard import (
    Guard,
    LossScale,
    clip_factors,
    norm_of,
    square_sums,
    total_norm,
)
from tests.model.samples import OnGpu
from tests.train.runs import all_names, batch, new_engine, same, tiny_run

FP16 = {"compute": "fp16"}


def overflowing(engine, name="model.norm.weight"):
    """Makes one gradient infinite with a finite loss. Returns a function that undoes this."""
    parameter = engine._model.trained_parameters()[name]
    return parameter.register_hook(lambda gradient: torch.full_like(gradient, math.inf))


def test_the_scale_halves_on_overflow_and_grows_back():
    scale = LossScale(1024.0)
    assert scale.after(overflow=True) == LossScale(512.0)
    assert LossScale(1.0).after(overflow=True).value == 1.0
    scale = LossScale(512.0)
    for _ in range(LossScale.GROW_AFTER - 1):
        scale = scale.after(overflow=False)
    assert scale.value == 512.0
    assert scale.after(overflow=False) == LossScale(1024.0)
    assert LossScale(512.0, good_steps=1999).after(overflow=True) == LossScale(256.0, good_steps=0)


def test_an_fp16_overflow_is_skipped_and_is_no_divergence(caplog):
    run = tiny_run()
    engine = new_engine(run, [0, 1], **FP16)
    before = engine.read(all_names(run))
    hook = overflowing(engine)
    for step in range(5):
        assert engine.step(batch(run, step), lr=1e-2).skipped
    assert same(engine.read(all_names(run)), before)
    assert engine.state_dict().scale == LossScale(2.0**11)
    hook.remove()
    assert not engine.step(batch(run, 5), lr=1e-2).skipped
    assert not same(engine.read(all_names(run)), before)


def test_an_overflow_that_no_scale_cures_is_divergence():
    guard = Guard("fp16")
    for _ in range(16):
        assert not guard.finite(2.0, math.inf)
    assert guard.scale.value == 1.0
    guard.finite(2.0, math.inf)
    guard.finite(2.0, math.inf)
    with pytest.raises(TrainingDiverged):
        guard.finite(2.0, math.inf)


def test_the_scale_changes_no_update():
    """A power of two: fp16's gradients equal those of a smaller scale if none vanishes."""
    run = tiny_run()
    engines = [new_engine(run, [0, 1], **FP16) for _ in range(2)]
    engines[1]._guard.scale = LossScale(2.0**15)
    for engine in engines:
        engine.stats = engine.step(batch(run, 0), lr=1e-2)
    left, right = engines
    assert left.stats.loss == right.stats.loss
    # Gradients that are subnormal in fp16 at one scale have more bits at the other.
    assert left.stats.grad_norm == pytest.approx(right.stats.grad_norm, rel=1e-4)


def test_small_gradients_survive_in_fp16_through_the_scale():
    run = tiny_run(loss={"balance_weight": 0.0, "router_z_weight": 0.0, "output_z_weight": 0.0})
    name = "model.layers.0.self_attn.q_proj.weight"
    found = {}
    for scale in (2.0**-12, 2.0**16):
        engine = new_engine(run, [0, 1], **FP16)
        engine._guard.scale = LossScale(scale)
        engine._accumulate(batch(run, 0), RoutingControls())
        found[scale] = engine._model.trained_parameters()[name].grad / scale
    exact = new_engine(run, [0, 1])
    exact._accumulate(batch(run, 0), RoutingControls())
    wanted = exact._model.trained_parameters()[name].grad
    # fp16 keeps 11 bits of activations and gradients, and none below 6e-8.
    assert (found[2.0**16] - wanted).norm() < 0.01 * wanted.norm()
    assert (found[2.0**-12] - wanted).norm() > 0.1 * wanted.norm()


@pytest.mark.parametrize(("compute", "tolerance"), [("bf16", 0.05), ("fp16", 0.007)])
def test_low_precision_gradients_are_near_those_of_fp32(compute, tolerance):
    run = tiny_run()
    norms = []
    for kind in ("fp32", compute):
        norms.append(new_engine(run, [0, 1, 2, 3], compute=kind).step(batch(run, 0), lr=1e-2))
    # 8 and 11 bits. A token whose two best experts are close may be routed differently.
    assert norms[1].loss == pytest.approx(norms[0].loss, rel=tolerance / 10)
    assert norms[1].grad_norm == pytest.approx(norms[0].grad_norm, rel=tolerance)


def test_a_saved_scale_is_taken_up():
    run = tiny_run()
    engine = new_engine(run, [0, 1], **FP16)
    overflowing(engine)
    engine.step(batch(run, 0), lr=1e-2)
    again = new_engine(run, **FP16)
    again.load_state_dict(engine.state_dict())
    assert again.state_dict().scale == LossScale(2.0**15)
    other = new_engine(run)
    other.load_state_dict(engine.state_dict())
    assert other.state_dict().scale == LossScale(1.0)


def test_spikes_of_the_gradient_norm_are_counted(caplog):
    guard = Guard("fp32")
    with caplog.at_level(logging.WARNING):
        for norm in (1.0, 1.1, 0.9, 3.9, 1.0, 4.9, 1.0):
            assert guard.finite(2.0, norm)
    assert guard.spikes == 1
    assert "times its mean" in caplog.text


def test_clipping_by_unit_never_exceeds_the_global_limit():
    settings = OptimizerConfig(lr=0.1, clip="unit", clip_norm=2.0)
    norms = {
        "model.embed_tokens.weight": torch.tensor(30.0),
        "model.layers.0.mlp.gate.weight": torch.tensor(3.0),
        "model.layers.0.input_layernorm.weight": torch.tensor(4.0),
        "model.layers.1.mlp.gate.weight": torch.tensor(0.25),
        "lm_head.weight": torch.tensor(8.0),
        "model.norm.weight": torch.tensor(6.0),
    }
    factors = clip_factors(norms, settings)
    clipped = {name: norms[name] * factors[name] for name in norms}
    # Four units: each within 2 / sqrt(4) = 1, whole units by one factor, small ones untouched.
    assert clipped["model.embed_tokens.weight"].item() == pytest.approx(1.0, rel=1e-5)
    assert clipped["model.layers.0.mlp.gate.weight"].item() == pytest.approx(0.6, rel=1e-5)
    assert clipped["model.layers.0.input_layernorm.weight"].item() == pytest.approx(0.8, rel=1e-5)
    assert clipped["lm_head.weight"].item() == pytest.approx(0.8, rel=1e-5)
    assert factors["model.layers.1.mlp.gate.weight"] == 1
    assert total_norm(clipped) <= 2.0
    unclipped = clip_factors(norms, OptimizerConfig(lr=0.1, clip_norm=100.0))
    assert all(factor == 1 for factor in unclipped.values())


def test_a_norm_does_not_depend_on_how_its_gradient_is_cut():
    gradient = torch.randn(2**20 + 77, generator=torch.Generator().manual_seed(0))
    whole = norm_of(square_sums([gradient])[0], 4.0)
    assert torch.equal(whole, (gradient.double().norm() / 4).float())
    for size in (64, 1000, 2**16, 2**19):
        parts = square_sums(gradient.split(size))
        assert torch.equal(norm_of(parts.sum(), 4.0), whole)
    in_fp32 = torch.stack([part.norm() for part in gradient.split(64)]).norm() / 4
    assert not torch.equal(in_fp32, whole)
    assert norm_of(square_sums([torch.tensor([1.0, math.inf])])[0], 1.0) == math.inf


def test_a_gpu_adds_up_the_squares_of_all_gradients_at_once():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=generator) for size in (2**12 + 77, 3)]
    on_gpu = square_sums([each.as_subclass(OnGpu) for each in gradients])
    torch.testing.assert_close(on_gpu, square_sums(gradients), rtol=1e-14, atol=0)
