"""Ownership of experts: what is stored, what moves, what gets a gradient."""

import pytest
import torch
from torch import Tensor

from swarm.config import LossConfig, RunConfig
from swarm.errors import BadBlob
from swarm.experts import expert_of, expert_tensor
from swarm.model.transformer import Transformer
from tests.model.samples import Spy, random_tokens, random_weights, shapes_of, tiny_run
from tests.train.runs import same


def model_of(run: RunConfig, owned: list[int], **settings: str) -> Transformer:
    model = Transformer(run.model, owned=owned, **settings)
    model.write(random_weights(run))
    return model


def copies(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named.items()}


@pytest.mark.parametrize("owned", [[], [5], [1, 3, 6], list(range(8))])
def test_what_is_written_is_read_in_the_type_of_its_storage(owned: list[int]) -> None:
    run = tiny_run()
    weights = random_weights(run)
    read = model_of(run, owned, frozen="bf16").read(shapes_of(run))
    assert {name: tensor.shape for name, tensor in read.items()} == shapes_of(run)
    for name, tensor in read.items():
        frozen = expert_of(name) not in (None, *owned)
        dtype = torch.bfloat16 if frozen else torch.float32
        assert tensor.dtype == dtype
        assert not tensor.requires_grad
        assert torch.equal(tensor, weights[name].to(dtype)), name


def test_a_wrong_shape_or_name_is_refused_and_nothing_is_written() -> None:
    run = tiny_run()
    model = model_of(run, [0])
    before = copies(model.read(shapes_of(run)))
    good = {"model.norm.weight": torch.zeros(64)}
    with pytest.raises(BadBlob, match=r"gate_proj.weight is \(64, 48\); expected \(48, 64\)"):
        model.write(good | {expert_tensor(1, 2, "gate"): torch.zeros(64, 48)})
    with pytest.raises(BadBlob, match=r"model\.layers\.9\.mlp\.gate\.weight is not in our model"):
        model.write(good | {"model.layers.9.mlp.gate.weight": torch.zeros(8, 64)})
    assert same(before, model.read(shapes_of(run)))


@pytest.mark.parametrize("frozen", ["fp32", "bf16"])
def test_own_moves_rows_and_rounds_only_what_freezes(frozen: str) -> None:
    run = tiny_run()
    model = model_of(run, [1, 3, 6], frozen=frozen)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[frozen]
    before = copies(model.read(shapes_of(run)))
    model.own([7, 3, 1, 0])
    assert model.owned == (0, 1, 3, 7)
    after = model.read(shapes_of(run))
    for name in before:
        expert = expert_of(name)
        if expert in (0, 7):
            expected = before[name].float()
        elif expert == 6:
            expected = before[name].to(dtype)
        else:
            expected = before[name]
        assert same({name: expected}, {name: after[name]})


def test_own_keeps_the_parameters_when_nothing_changes() -> None:
    model = model_of(tiny_run(), [2, 5])
    before = model.trained_parameters()
    model.own([5, 2])
    after = model.trained_parameters()
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


def test_rows_of_a_trained_stack_are_the_owned_experts_in_order() -> None:
    model = model_of(tiny_run(), [6, 2])
    stack = model.trained_parameters()["model.layers.1.mlp.experts.owned.down_proj"]
    assert stack.shape == (2, 64, 48)
    for row, expert in enumerate((2, 6)):
        name = expert_tensor(1, expert, "down")
        assert torch.equal(stack[row], model.read([name])[name])


def test_a_peer_without_experts_trains_the_shared_tensors_only() -> None:
    run = tiny_run()
    model = model_of(run, [])
    trained = model.trained_parameters()
    assert set(trained) == {name for name in shapes_of(run) if expert_of(name) is None}
    model.losses(random_tokens(run), run.loss).total.backward()
    assert all(parameter.grad is not None for parameter in trained.values())


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("frozen", ["fp32", "bf16"])
def test_no_weight_gradient_of_a_frozen_expert_is_ever_computed(frozen: str, compute: str) -> None:
    run = tiny_run(num_experts_per_tok=8)
    owned = [2, 5]
    model = model_of(run, owned, frozen=frozen, compute=compute)
    with Spy() as spy:
        losses = model.losses(random_tokens(run), run.loss)
        losses.total.backward()
    # All 8 experts have tokens. A product of an expert matrix's shape is a weight gradient.
    assert losses.expert_tokens.min() > 0
    products = [s for name, s, _ in spy.seen if name == "mm" and s in ((48, 64), (64, 48))]
    assert len(products) == 3 * len(owned) * run.model.num_hidden_layers
    stacks = {s[0] for _, s, _ in spy.seen if s[1:] in ((48, 64), (64, 48))}
    assert stacks <= {1, len(owned)}
    gradients = {n for n, p in model.named_parameters() if p.grad is not None}
    assert gradients == set(model.trained_parameters())
    assert not any(buffer.requires_grad for buffer in model.buffers())


def test_nothing_of_an_expert_matrix_is_kept_for_backward_but_owned_masters() -> None:
    run = tiny_run()
    model = model_of(run, [2, 5], frozen="bf16", compute="fp32")
    kept: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append((*tensor.shape,))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.losses(random_tokens(run), run.loss)
    matrices = [shape for shape in kept if shape[-2:] in ((48, 64), (64, 48))]
    assert matrices == [(2, 48, 64), (2, 48, 64), (2, 64, 48)] * run.model.num_hidden_layers


def test_training_leaves_every_bit_of_frozen_experts_alone() -> None:
    run = tiny_run()
    model = model_of(run, [0], frozen="bf16")
    before = copies(model.read(shapes_of(run)))
    optimizer = torch.optim.AdamW(model.trained_parameters().values(), lr=0.1, weight_decay=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        model.losses(random_tokens(run, seed=seed), run.loss).total.backward()
        optimizer.step()
    after = model.read(shapes_of(run))
    for name in before:
        frozen = expert_of(name) not in (None, 0)
        assert same({name: before[name]}, {name: after[name]}) == frozen, name


def test_an_owned_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    run = tiny_run()
    model = model_of(run, [0, 7])
    weights = {f"model.layers.{k}.mlp.gate.weight": torch.zeros(8, 64) for k in range(2)}
    # With equal logits, top-k of this torch takes the same two experts for every token.
    model.write(weights)
    losses = model.losses(random_tokens(run), run.loss)
    losses.total.backward()
    idle = [row for row, expert in enumerate((0, 7)) if not losses.expert_tokens[0, expert]]
    assert idle, "both owned experts got tokens, so this test shows nothing"
    for projection in ("gate", "up", "down"):
        name = f"model.layers.0.mlp.experts.owned.{projection}_proj"
        gradient = model.trained_parameters()[name].grad
        assert gradient is not None
        assert torch.count_nonzero(gradient[idle]) == 0
        assert gradient.isfinite().all()


def test_ownership_changes_no_bit_of_the_forward_pass_nor_of_shared_gradients() -> None:
    run = tiny_run(num_experts_per_tok=3)
    tokens = random_tokens(run)
    results = []
    for owned in ([], [1, 3], list(range(8))):
        model = model_of(run, owned, frozen="fp32", compute="fp32")
        losses = model.losses(tokens, run.loss)
        losses.total.backward()
        shared = {
            name: parameter.grad
            for name, parameter in model.trained_parameters().items()
            if ".owned." not in name and parameter.grad is not None
        }
        results.append(shared | {"total": losses.total.detach(), "logits": model(tokens).detach()})
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_bf16_compute_stays_near_fp32() -> None:
    run = tiny_run()
    tokens = random_tokens(run)
    loss = {}
    gradient = {}
    for compute in ("fp32", "bf16"):
        model = model_of(run, [1, 3], frozen="bf16", compute=compute)
        total = model.losses(tokens, run.loss).total
        total.backward()
        loss[compute] = total.item()
        gradient[compute] = torch.cat(
            [p.grad.flatten() for p in model.trained_parameters().values() if p.grad is not None]
        )
        assert gradient[compute].dtype == torch.float32
    # bf16 has 8 bits: 2^-9 per rounding, some tens of roundings deep. Observed: 1e-4 and 3 %.
    assert loss["bf16"] == pytest.approx(loss["fp32"], rel=2e-3)
    error = (gradient["bf16"] - gradient["fp32"]).norm() / gradient["fp32"].norm()
    assert 0 < error < 0.1


def test_frozen_bf16_computes_as_its_fp32_copy_does() -> None:
    run = tiny_run()
    tokens = random_tokens(run)
    rounded = {
        name: tensor.bfloat16().float() if expert_of(name) is not None else tensor
        for name, tensor in random_weights(run).items()
    }
    logits = []
    for frozen in ("fp32", "bf16"):
        model = model_of(run, [], frozen=frozen)
        model.write(rounded)
        logits.append(model(tokens))
    assert torch.equal(*logits)


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_gpu_computes_what_the_cpu_does(compute: str) -> None:
    run = tiny_run()
    tokens = random_tokens(run)
    results = []
    for device in ("cpu", "cuda"):
        model = Transformer(run.model, owned=[1, 3], frozen="bf16", compute=compute, device=device)
        model.write(random_weights(run))
        total = model.losses(tokens.to(device), run.loss).total
        total.backward()
        gradients = [p.grad for p in model.trained_parameters().values() if p.grad is not None]
        results.append((total.item(), torch.cat([g.flatten().cpu() for g in gradients])))
    (loss, gradient), (other_loss, other_gradient) = results
    # fp32 products in another order; bf16 rounds each of them to 8 bits.
    assert other_loss == pytest.approx(loss, rel=1e-5 if compute == "fp32" else 2e-3)
    error = (other_gradient - gradient).norm() / gradient.norm()
    assert error < (1e-4 if compute == "fp32" else 0.1)


def test_losses_are_those_of_the_logits() -> None:
    run = tiny_run()
    tokens = random_tokens(run)
    model = model_of(run, [0])
    with torch.no_grad():
        losses = model.losses(tokens, LossConfig())
        logits = model(tokens[:, :-1]).flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    # The same fp32 numbers, summed in slices.
    assert losses.cross_entropy.item() == pytest.approx(expected.item(), rel=1e-6)
    assert losses.expert_tokens.sum(1).tolist() == [4 * 32 * 2] * 2
