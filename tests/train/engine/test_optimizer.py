from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch import nn

from swarm.config import OptimizerConfig
from swarm.errors import CorruptState
from swarm.experts import expert_tensor, owned_stack
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.optimizer import OwnedOptimizer
from swarm.train.engine.ranks import Ranks
from swarm.train.engine.tensor_file import JoinedFiles, TensorFile
from swarm.train.parallel.sharded_state import ShardedEngine
from tests.train.runs import batch, new_engine, new_streaming, tiny_run

SETTINGS = OptimizerConfig(lr=0.1)
NORM, STACK = "model.norm.weight", owned_stack(0, "gate")


def parameters(owned, *, norm=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    stack = torch.stack([torch.full((3, 2), float(expert)) for expert in owned])
    norm = norm if norm is not None else nn.Parameter(torch.rand(4, generator=generator))
    return {NORM: norm, STACK: nn.Parameter(stack)}


def give_gradients(optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in optimizer.parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def trained(owned, updates=3):
    optimizer = OwnedOptimizer(SETTINGS)
    named = parameters(owned)
    optimizer.follow(named, owned)
    for seed in range(updates):
        give_gradients(optimizer, seed)
        optimizer.update(0.1)
    return optimizer, named


def copies(optimizer):
    """First and second moments, by tensor."""
    moments = optimizer.read_moments(optimizer.masters())
    kinds = ("exp_avg.", "exp_avg_sq.")
    return [{n[len(k) :]: t for n, t in moments.items() if n.startswith(k)} for k in kinds]


def gate(expert):
    return expert_tensor(0, expert, "gate")


def test_an_update_is_adamw_as_published():
    optimizer, named = OwnedOptimizer(SETTINGS), parameters((1, 2))
    optimizer.follow(named, (1, 2))
    value = named[NORM].detach().double().clone()
    mean = square = torch.zeros(4, dtype=torch.float64)
    for step in range(1, 4):
        give_gradients(optimizer, step)
        gradient = named[NORM].grad.double().clone()
        optimizer.update(0.1 * step)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.95 * square + 0.05 * gradient**2
        root = (square / (1 - 0.95**step)).sqrt() + 1e-8
        value = value * (1 - 0.1 * step * 0.1) - 0.1 * step * mean / (1 - 0.9**step) / root
    # fp32 against fp64 over three updates of size 0.1 to 0.3.
    torch.testing.assert_close(named[NORM].detach().double(), value, rtol=1e-5, atol=1e-6)


def test_gradients_are_freed_after_an_update():
    optimizer, _ = trained((1, 2))
    assert all(parameter.grad is None for parameter in optimizer.parameters)


def test_a_missing_gradient_is_our_bug():
    optimizer, named = trained((1, 2))
    named[NORM].grad = torch.zeros(4)
    with pytest.raises(AssertionError):
        optimizer.update(0.1)


def test_decay_reaches_norms_and_experts_without_gradient():
    optimizer, named = OwnedOptimizer(SETTINGS), parameters((1, 2))
    optimizer.follow(named, (1, 2))
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.update(0.5)
    for name, parameter in named.items():
        torch.testing.assert_close(parameter.detach(), before[name] * (1 - 0.5 * 0.1))


def test_experts_that_stay_keep_every_bit_of_their_moments():
    optimizer, named = trained((1, 2, 5))
    before = copies(optimizer)
    optimizer.follow(parameters((0, 2, 5, 6), norm=named[NORM]), (0, 2, 5, 6))
    for old, new in zip(before, copies(optimizer), strict=True):
        assert sorted(new) == sorted([NORM, *(gate(expert) for expert in (0, 2, 5, 6))])
        for name in (NORM, gate(2), gate(5)):
            assert old[name].any()
            assert torch.equal(old[name], new[name])
        assert not new[gate(0)].any()
        assert not new[gate(6)].any()


def test_an_expert_that_goes_and_comes_back_starts_anew():
    optimizer, named = trained((1, 2))
    optimizer.follow(parameters((1,), norm=named[NORM]), (1,))
    optimizer.follow(parameters((1, 2), norm=named[NORM]), (1, 2))
    means, _ = copies(optimizer)
    assert means[gate(1)].any()
    assert not means[gate(2)].any()


def test_owning_nothing_leaves_the_shared_tensors():
    optimizer, named = trained((1, 2))
    before = copies(optimizer)
    optimizer.follow({NORM: named[NORM]}, ())
    assert list(optimizer.masters()) == [NORM]
    assert torch.equal(copies(optimizer)[0][NORM], before[0][NORM])
    give_gradients(optimizer, 9)
    optimizer.update(0.1)


def test_moments_continue_over_a_move_as_if_nothing_had_moved():
    moved, named = trained((1, 2))
    stayed, still = trained((1, 2))
    kept = nn.Parameter(torch.cat([torch.zeros(1, 3, 2), named[STACK].detach()]))
    moved.follow({NORM: named[NORM], STACK: kept}, (0, 1, 2))
    for seed in range(3):
        give_gradients(stayed, seed)
        named[NORM].grad = still[NORM].grad.clone()
        kept.grad = torch.cat([torch.zeros(1, 3, 2), still[STACK].grad])
        stayed.update(0.1)
        moved.update(0.1)
    assert torch.equal(kept[1:], still[STACK])
    assert torch.equal(named[NORM], still[NORM])


def test_the_first_update_of_a_new_expert_is_about_half_of_lr():
    optimizer, named = trained((1,), updates=200)
    named = parameters((1, 4), norm=named[NORM])
    optimizer.follow(named, (1, 4))
    before = named[STACK][1].detach().clone()
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.update(0.1)
    change = named[STACK][1].detach() - before * (1 - 0.1 * 0.1)
    # 0.1 / sqrt(0.05) of lr, because bias correction is that of update 201.
    torch.testing.assert_close(change, torch.full((3, 2), -0.1 * 0.1 / 0.05**0.5))


def test_a_joiner_counts_from_the_runs_step():
    optimizer, named = OwnedOptimizer(SETTINGS), parameters((1,))
    optimizer.follow(named, (1,))
    optimizer.count_from(10_000)
    before = named[NORM].detach().clone()
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.update(0.1)
    assert optimizer.updates == 10_001
    change = named[NORM].detach() - before * (1 - 0.1 * 0.1)
    torch.testing.assert_close(change, torch.full((4,), -0.1 * 0.1 / 0.05**0.5))


def sharded_engine(run, **options):
    """The only rank of an engine whose state is cut."""
    return ShardedEngine(
        run, replace(EngineOptions.of(run), **options), Ranks(0, 1, torch.device("cpu"))
    )


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("make", [new_engine, new_streaming, sharded_engine])
def test_each_tensor_of_a_state_is_read_from_its_file_once(monkeypatch, make, form):
    """The look-up of a tensor's existence and form counts as well."""
    run = tiny_run()
    source = new_engine(run, [1, 3], moments=form)
    source.step(batch(run, 0), lr=1e-2)
    state, files = source.state_dict(), [TensorFile.temporary(None) for _ in range(3)]
    for number, name in enumerate(state.tensors):
        files[number % 3].append(name, state.tensors[name])
    read, look_up = [], TensorFile.__getitem__

    def watched(file, name):
        read.append(name)
        return look_up(file, name)

    monkeypatch.setattr(TensorFile, "__getitem__", watched)
    stored = JoinedFiles(files)
    assert "master.model.norm.weight" in stored and "master.nothing" not in stored
    assert all("master.nothing" not in file for file in files)
    with closing(make(run, moments=form)) as target:
        target.load_state_dict(replace(state, tensors=stored))
        assert sorted(read) == sorted(state.tensors)
        found = target.state_dict().tensors
        assert all(torch.equal(found[name], state.tensors[name]) for name in state.tensors)


@pytest.mark.parametrize("kind", ["master", "exp_avg", "exp_avg_sq"])
def test_a_state_of_another_shape_changes_nothing(kind):
    optimizer, _ = trained((1, 2))
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    wrong = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    name = f"{kind}.{gate(2)}"
    for other in (wrong | {name: torch.ones(2, 3)}, {n: t for n, t in wrong.items() if n != name}):
        with pytest.raises(CorruptState, match=f"another model: {gate(2)}"):
            optimizer.load(other)
        assert all(torch.equal(state[name], each) for name, each in optimizer.state().items())
