"""Routing, sorting and the products of the experts, against plain loops."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.model import swiglu
from swarm.model.moe import DenseStack, Router
from swarm.model.swiglu import Setting, blocks, mix_experts, plan_rows, times, write_outer
from tests.model.samples import OnGpu, tiny_run

CPU = torch.device("cpu")


def router_of(**settings: object) -> Router:
    router = Router(tiny_run(**settings).model, CPU)
    with torch.no_grad():
        router.weight.copy_(torch.randn(8, 64, generator=torch.Generator().manual_seed(2)))
    return router


@pytest.mark.parametrize("renormalise", [False, True])
def test_the_router_takes_the_most_probable_experts(renormalise: bool) -> None:
    router = router_of(num_experts_per_tok=3, norm_topk_prob=renormalise)
    x_ND = torch.randn(20, 64, generator=torch.Generator().manual_seed(3))
    routing = router(x_ND)
    for token in range(20):
        probabilities = F.softmax(router.weight @ x_ND[token], dim=0)
        best = sorted(range(8), key=lambda e: -probabilities[e].item())[:3]
        weights = probabilities[best]
        weights = weights / weights.sum() if renormalise else weights
        assert routing.expert_NK[token].tolist() == best
        # A product with one row and one with twenty round differently.
        assert torch.allclose(routing.weight_NK[token], weights, rtol=1e-5)


def test_the_router_stays_fp32_for_bf16_inputs() -> None:
    routing = router_of()(torch.randn(4, 64).bfloat16())
    assert routing.logits_NE.dtype == routing.weight_NK.dtype == torch.float32


@pytest.mark.parametrize("multiple", [1, 4, 64])
def test_rows_lie_by_group_and_padding_belongs_to_nobody(multiple: int) -> None:
    group_NK = torch.tensor([[3, 0], [3, 1], [0, 3], [1, 3], [3, 1]])
    plan = plan_rows(group_NK, 5, 2, multiple)
    sizes = [stop - start for start, stop in zip(plan.starts, plan.starts[1:], strict=False)]
    assert sizes == [-(-count // multiple) * multiple for count in (2, 3, 0, 5, 0)]
    for token, row_K in enumerate(plan.row_NK.tolist()):
        for k, row in enumerate(row_K):
            group = int(group_NK[token, k])
            assert plan.starts[group] <= row < plan.starts[group + 1]
            assert plan.token_M[row] == token
            assert plan.pair_M[row] == token * 2 + k
    assert (plan.pair_M == 10).sum() == plan.num_rows - 10
    assert plan.idle_owned() == []
    assert plan_rows(group_NK, 5, 3, multiple).idle_owned() == [2]


def mixture(seed: int = 0, *, num_tokens: int = 40, top_k: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    choices = torch.rand(num_tokens, 6, generator=generator).argsort(-1)[:, :top_k]
    return {
        "x": normal(num_tokens, 32).requires_grad_(),
        "weight": torch.rand(num_tokens, top_k, generator=generator).requires_grad_(),
        "gate": (normal(6, 24, 32) / 6).requires_grad_(),
        "up": (normal(6, 24, 32) / 6).requires_grad_(),
        "down": (normal(6, 32, 24) / 5).requires_grad_(),
        # Expert 4 gets no token.
        "expert": torch.where(choices == 4, 5, choices),
    }


def plain_loop(case: dict[str, Tensor]) -> Tensor:
    rows = []
    for token, x_D in enumerate(case["x"]):
        row = torch.zeros(32)
        for weight, expert in zip(case["weight"][token], case["expert"][token], strict=True):
            inner = F.silu(case["gate"][expert] @ x_D) * (case["up"][expert] @ x_D)
            row = row + weight * (case["down"][expert] @ inner)
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("num_owned", [0, 2, 5, 6])
def test_mixed_experts_and_gradients_equal_a_plain_loop(num_owned: int, multiple: int) -> None:
    case = mixture()
    inputs = [case[name] for name in ("x", "weight", "gate", "up", "down")]
    upstream = torch.randn(40, 32, generator=torch.Generator().manual_seed(9))
    expected_out = plain_loop(case)
    expected = torch.autograd.grad(expected_out, inputs, upstream)

    stacks = [case[name].detach() for name in ("gate", "up", "down")]
    owned = [stack[:num_owned].clone().requires_grad_() for stack in stacks]
    gate, up, down = (DenseStack(stack[num_owned:]) for stack in stacks)
    plan = plan_rows(case["expert"], 6, num_owned, multiple)
    setting = Setting(plan, (gate, up, down), torch.float32)
    out = mix_experts(case["x"], case["weight"], owned, setting)
    gradients = torch.autograd.grad(out, [case["x"], case["weight"], *owned], upstream)

    # fp32 products of up to 32 terms in another order.
    assert torch.allclose(out, expected_out, rtol=1e-4, atol=1e-5)
    for gradient, full in zip(gradients, expected, strict=True):
        trained = full if full.dim() == 2 else full[:num_owned]
        assert torch.allclose(gradient, trained, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "capability", "is_whole"),
    [
        (torch.bfloat16, None, False),
        (torch.float32, (9, 0), False),
        (torch.float16, (9, 0), False),
        (torch.bfloat16, (8, 6), False),
        (torch.bfloat16, (12, 0), False),
        (torch.bfloat16, (9, 0), True),
        (torch.bfloat16, (10, 3), True),
    ],
    ids=str,
)
def test_a_stack_is_dense_as_a_whole_only_where_a_kernel_takes_it(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    is_whole: bool,
) -> None:
    """On a CPU, and on GPUs of several generations."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    case, asked = mixture(num_tokens=40), []

    class Asked(DenseStack):
        def dense(self, rows: slice, dtype: torch.dtype) -> Tensor:
            asked.append(rows.stop - rows.start)
            return super().dense(rows, dtype)

    gate, up, down = (Asked(case[name].detach()) for name in ("gate", "up", "down"))
    setting = Setting(plan_rows(case["expert"], 6, 0, 1), (gate, up, down), dtype)
    x, owned = case["x"].detach(), [case[name].detach()[:0] for name in ("gate", "up", "down")]
    mix_experts(x.as_subclass(OnGpu) if capability else x, case["weight"], owned, setting)
    assert set(asked) == {6 if is_whole else 1}


@pytest.mark.parametrize(("most_rows", "num_blocks"), [(2**17, 2), (200, 4), (1, 5)])
def test_grouped_products_equal_the_loop_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, most_rows: int, num_blocks: int
) -> None:
    """Runs a GPU's path on a CPU, where torch's `grouped_mm` is a loop as well."""
    monkeypatch.setattr(swiglu, "GROUPED_ROWS", most_rows)
    case = mixture(num_tokens=200)
    plan = plan_rows(case["expert"], 6, 2, 1)
    rows_MD = case["x"].detach()[plan.token_M]
    matrices = {True: case["gate"].detach()[:2], False: case["gate"].detach()[2:]}
    outs, gradients = [], []
    for grouped in (False, True):
        out_MI = torch.zeros(plan.num_rows, 24)
        # Expert 4, row 2 of the frozen ones, is idle: a loop never writes its gradient.
        gradient = {owned: torch.zeros_like(stack) for owned, stack in matrices.items()}
        for block in blocks(plan, grouped=grouped):
            stack = matrices[block.owned][block.matrices]
            out_MI[block.rows] = times(rows_MD[block.rows], stack.mT, block)
            write_outer(out_MI[block.rows], rows_MD[block.rows], block, gradient[block.owned])
        outs.append(out_MI)
        gradients.append(torch.cat([gradient[True], gradient[False]]))
    assert sum(1 for _ in blocks(plan, grouped=True)) == num_blocks
    assert torch.equal(*outs)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("num_owned", [0, 2, 6])
def test_a_grouped_layer_computes_what_the_loop_does(
    num_owned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = mixture()
    stacks = [case[name].detach() for name in ("gate", "up", "down")]
    plan = plan_rows(case["expert"], 6, num_owned, 1)
    gate, up, down = (DenseStack(stack[num_owned:].bfloat16()) for stack in stacks)
    setting = Setting(plan, (gate, up, down), torch.float32)
    results = []
    for grouped in (False, True):
        monkeypatch.setattr(Setting, "grouped", lambda *_, grouped=grouped: grouped)
        owned = [stack[:num_owned].clone().requires_grad_() for stack in stacks]
        out = mix_experts(case["x"], case["weight"], owned, setting)
        inputs = [case["x"], case["weight"], *owned]
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for loop, grouped_layer in zip(*results, strict=True):
        # Sums over gate and up are added in another order, which differs by one rounding.
        assert torch.allclose(loop, grouped_layer, rtol=1e-5, atol=1e-5)


def test_padded_rows_in_bf16_change_no_gradient() -> None:
    case = mixture()
    stacks = [case[name].detach() for name in ("gate", "up", "down")]
    gate, up, down = (DenseStack(stack[:0]) for stack in stacks)
    results = []
    for multiple in (1, 64):
        owned = [stack.clone().requires_grad_() for stack in stacks]
        plan = plan_rows(case["expert"], 6, 6, multiple)
        setting = Setting(plan, (gate, up, down), torch.bfloat16)
        out = mix_experts(case["x"], case["weight"], owned, setting)
        results.append(torch.autograd.grad(out.square().sum(), [case["x"], *owned]))
    for plain, padded in zip(*results, strict=True):
        # bf16 products of other shapes may round the last of 8 bits differently.
        assert (plain - padded).norm() < 0.01 * plain.norm()
