import pytest
import torch
from torch import nn

from swarm.config import OptimizerConfig
from swarm.errors import CorruptState
from swarm.experts import ADAMW_MOMENTS, owned_stack
from swarm.train.engine.optimizer import OwnedOptimizer
from swarm.train.engine.optimizer_moments import (
    BLOCK,
    MOMENT_BYTES,
    Moments,
    Update,
    round_up_or_down,
)
from tests.train.runs import batch, new_engine, same, tiny_run

SETTINGS = OptimizerConfig(lr=0.1)
FORMS = ["fp32", "bf16", "int8"]


def optimizer_of(form, *, size=1000, owned=(1, 2), seed=0):
    generator = torch.Generator().manual_seed(seed)
    named = {
        "model.norm.weight": nn.Parameter(torch.randn(size, generator=generator)),
        owned_stack(0, "gate"): nn.Parameter(torch.randn(2, 30, 11, generator=generator)),
    }
    optimizer = OwnedOptimizer(SETTINGS, form)
    optimizer.follow(named, owned)
    return optimizer, named


def give_gradients(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in optimizer.parameters:
        # Values over four orders of magnitude within a block, as with gradients.
        scale = 10 ** (-4 * torch.rand(parameter.shape, generator=generator))
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale


def test_pieces_give_the_bits_of_a_whole_update(monkeypatch):
    monkeypatch.setattr("swarm.train.engine.optimizer.PIECE", 256)
    whole, named = optimizer_of("fp32")
    pieces, cut = optimizer_of("fp32")
    for seed in range(3):
        give_gradients(whole, seed)
        gradients = {name: p.grad.clone() for name, p in named.items()}
        whole.update(0.1)
        for piece in reversed(pieces.pieces()):
            part = gradients[piece.name].view(-1)[piece.in_whole]
            pieces.update_piece(piece, part, Update(SETTINGS, 0.1, seed + 1))
    assert len(pieces.pieces()) == 4 + 3
    assert all(torch.equal(named[name], cut[name]) for name in named)
    assert same(whole.state(), pieces.state())


@pytest.mark.parametrize("form", FORMS)
def test_moments_take_the_bytes_that_plans_count_on(form):
    optimizer, _ = optimizer_of(form, size=256 * BLOCK)
    moments = optimizer._moments["model.norm.weight"]
    num_bytes = sum(part.nbytes for part in moments.parts.values())
    assert num_bytes == 2 * MOMENT_BYTES[form] * 256 * BLOCK


def test_stochastic_rounding_keeps_the_mean_where_nearest_loses_it():
    step = 2.0**-10  # an eighth of half a unit in the last place of a bf16 near 1
    value = torch.full((200_000,), 1 + step)
    assert (value.bfloat16() == 1).all()
    rounded = round_up_or_down(value, torch.Generator().manual_seed(0)).float()
    assert set(rounded.unique().tolist()) == {1.0, 1 + 2.0**-7}
    # The mean of 200,000 draws with p = 1/8 lies within 4 standard errors.
    assert (rounded.mean() - 1).item() == pytest.approx(step, abs=4 * 2**-7 * 0.33 / 447)


def test_stochastic_rounding_leaves_what_is_not_finite_and_what_is_exact():
    value = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -1.5, 3.0])
    rounded = round_up_or_down(value, torch.Generator().manual_seed(1)).float()
    assert torch.equal(rounded.nan_to_num(nan=7.0), value.nan_to_num(nan=7.0))


def test_an_update_below_half_a_bf16_ulp_survives_in_the_master():
    run = tiny_run(train={"compute": "bf16", "frozen": "bf16"}, optimizer={"weight_decay": 0.0})
    engine = new_engine(run, [0, 1])
    name = "model.layers.0.self_attn.q_proj.weight"
    engine.write({name: torch.full((16, 16), 1.0)})
    before = engine.read([name])[name]
    engine.step(batch(run, 0), lr=1e-5)
    after = engine.read([name])[name]
    assert not torch.equal(after, before)
    assert torch.equal(after.bfloat16(), before.bfloat16())


def test_int8_squares_are_never_below_what_they_were():
    """A square that is too small, or 0, would make its update enormous."""
    generator = torch.Generator().manual_seed(0)
    square = 10 ** (-12 * torch.rand(4 * BLOCK + 7, generator=generator))
    moments = Moments.zeros("int8", 1, len(square), torch.device("cpu"))
    part = slice(0, len(square))
    moments.store(0, part, (torch.zeros_like(square), square), seed=0)
    _, back = moments.load(0, part)
    # 1e-3 of a code is lost so that decoded codes stay the same: (c + 0.001)^4 / c^4.
    assert (back >= square * (1 - 4e-3)).all()
    large = square > 1e-4
    # One code up at most: (c + 1)^4 / c^4 with c = 255 * 0.1.
    assert (back[large] <= square[large] * (1 + 1 / 25) ** 4).all()


def test_int8_means_are_near_and_keep_their_signs():
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(8 * BLOCK, generator=generator)
    moments = Moments.zeros("int8", 1, len(mean), torch.device("cpu"))
    moments.store(0, slice(0, len(mean)), (mean, mean.abs()), seed=0)
    back, _ = moments.load(0, slice(0, len(mean)))
    assert (back * mean >= 0).all()
    # Half a code of 127 on a square-root curve: 2 * 0.5 / 127 of the block's largest at most.
    largest = mean.view(-1, BLOCK).abs().amax(-1, keepdim=True)
    assert ((back - mean).view(-1, BLOCK).abs() <= largest / 127 * 1.01).all()


def test_storing_what_was_loaded_changes_no_int8_code():
    optimizer, _ = optimizer_of("int8")
    give_gradients(optimizer, 0)
    optimizer.update(0.1)
    moments = optimizer._moments["model.norm.weight"]
    before = {name: part.clone() for name, part in moments.parts.items()}
    for _ in range(3):
        moments.store(0, slice(0, 1000), moments.load(0, slice(0, 1000)), seed=0)
    assert all(torch.equal(before[kind], moments.parts[kind]) for kind in ADAMW_MOMENTS)


@pytest.mark.parametrize(("form", "tolerance"), [("bf16", 0.02), ("int8", 0.12)])
def test_small_moments_move_a_parameter_as_fp32_does(form, tolerance):
    exact, left = optimizer_of("fp32")
    small, right = optimizer_of(form)
    start = {name: p.detach().clone() for name, p in left.items()}
    for seed in range(20):
        give_gradients(exact, seed)
        for name, parameter in right.items():
            parameter.grad = left[name].grad.clone()
        exact.update(0.01)
        small.update(0.01)
    for name in left:
        moved = left[name].detach() - start[name]
        apart = right[name].detach() - left[name].detach()
        # bf16 keeps 8 bits. int8 squares are rounded up to the next of 255 codes on a fourth root,
        # so that updates are smaller, by at most 2 / c for a code c.
        assert apart.norm() < tolerance * moved.norm()


@pytest.mark.parametrize("form", FORMS)
def test_moments_of_experts_that_stay_keep_every_bit_in_every_format(form):
    optimizer, named = optimizer_of(form)
    for seed in range(3):
        give_gradients(optimizer, seed)
        optimizer.update(0.1)
    before = {name: part.clone() for name, part in optimizer.state().items()}
    stack = nn.Parameter(torch.zeros(2, 30, 11))
    kept = {"model.norm.weight": named["model.norm.weight"], owned_stack(0, "gate"): stack}
    optimizer.follow(kept, (2, 5))
    after = optimizer.state()
    for name, part in after.items():
        if not name.startswith("master.") and ".experts.5." not in name:
            assert torch.equal(part, before[name])
        elif ".experts.5." in name:
            assert not part.any()


@pytest.mark.parametrize("left", FORMS)
@pytest.mark.parametrize("right", FORMS)
def test_a_state_is_loaded_into_any_format(left, right):
    source, _ = optimizer_of(left)
    for seed in range(3):
        give_gradients(source, seed)
        source.update(0.1)
    target, _ = optimizer_of(right, seed=1)
    target.load(source.state())
    assert same(target.masters(), source.masters())
    if left == right:
        assert same(target.state(), source.state())
    for name in target._moments:
        wanted, found = (o._moments[name].load(0, slice(0, 256)) for o in (source, target))
        for was, now in zip(wanted, found, strict=True):
            assert (now - was).norm() <= 0.1 * was.norm()


def test_a_state_without_scales_is_corrupt():
    source, _ = optimizer_of("int8")
    state = {name: part for name, part in source.state().items() if "scale" not in name}
    with pytest.raises(CorruptState, match="another model"):
        source.load(state)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("form", "tolerance"), [("bf16", 0.02), ("int8", 0.05)])
def test_small_moments_train_to_a_loss_near_that_of_fp32(form, tolerance):
    run = tiny_run()
    losses = {}
    for kind in ("fp32", form):
        engine = new_engine(run, [0, 1], moments=kind)
        for step in range(40):
            stats = engine.step(batch(run, step % 4), lr=3e-3)
        losses[kind] = stats.loss
    # Four batches learned by heart: from 5.6 to below 4 nats.
    assert losses["fp32"] < 4.6
    assert losses[form] == pytest.approx(losses["fp32"], abs=tolerance)
