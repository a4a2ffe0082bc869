"""The parts of attention whose gradients or products are written by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from swarm.model.attention import (
    BLOCK_TOKENS,
    SHORT_TOKENS,
    RMSNorm,
    attend,
    rotary_tables,
    rotate,
)
from tests.model.samples import OnGpu, Spy


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_and_its_gradients_are_those_of_the_formula(dtype: torch.dtype) -> None:
    norm = RMSNorm(48, 1e-3, torch.device("cpu"))
    with torch.no_grad():
        norm.weight.copy_(normal(48, seed=1))
    # Transposed, as the gradients of heads come.
    x, upstream = normal(5, 7, 48, dtype=dtype), normal(7, 5, 48, seed=2).transpose(0, 1)
    floats = x.float()
    expected = norm.weight * floats / (floats.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    expected_gradients = torch.autograd.grad(expected, (x, norm.weight), upstream)
    out = norm(x)
    gradients = torch.autograd.grad(out, (x, norm.weight), upstream)
    assert out.dtype == torch.float32
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-6)
    for gradient, full in zip(gradients, expected_gradients, strict=True):
        assert gradient.dtype == full.dtype
        # fp32 sums in another order, so the results differ by at most one rounding to the input's
        # type.
        tolerance = 1e-6 if dtype == torch.float32 else 2**-9
        assert (gradient - full).norm() < tolerance * full.norm()


def test_rotation_turns_pairs_and_its_gradient_turns_them_back() -> None:
    x = normal(2, 3, 9, 8)
    cos, sin, _ = rotary_tables(9, 8, 100.0, torch.device("cpu"))
    out = rotate(x, cos, sin)
    for position in range(9):
        for pair in range(4):
            angle = position / 100.0 ** (2 * pair / 8)
            turn = torch.tensor(complex(0, angle)).exp()
            value = torch.complex(x[..., position, pair], x[..., position, pair + 4]) * turn
            assert torch.allclose(out[..., position, pair], value.real, atol=1e-5)
            assert torch.allclose(out[..., position, pair + 4], value.imag, atol=1e-5)
    # A rotation's transpose is its inverse.
    (gradient,) = torch.autograd.grad(out, x, out.detach())
    assert torch.allclose(gradient, x, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [40, BLOCK_TOKENS, 2 * BLOCK_TOKENS + 9])
def test_short_attention_in_bf16_equals_the_fused_kernel(num_tokens: int) -> None:
    q, k, v = (normal(2, heads, num_tokens, 16, seed=heads + 1) for heads in (4, 2, 2))
    k, v = k * 2, v * 0.5
    upstream = normal(2, 4, num_tokens, 16, seed=9)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    expected_gradients = torch.autograd.grad(expected, (q, k, v), upstream)
    with Spy() as spy:
        out = attend(q.bfloat16(), k.bfloat16(), v.bfloat16())
    gradients = torch.autograd.grad(out.float(), (q, k, v), upstream)
    assert not [name for name, _, _ in spy.seen if name.startswith("_scaled_dot_product")]
    for value, full in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        # bf16 inputs and scores, 2^-9 each; observed 0.6 %.
        assert (value - full).norm() < 0.02 * full.norm()


@pytest.mark.parametrize(
    ("dtype", "capability", "keys"),
    [
        pytest.param(torch.float32, (8, 0), 4, id="fp32"),
        pytest.param(torch.bfloat16, (8, 0), 2, id="bf16"),
        pytest.param(torch.float16, (8, 0), 2, id="fp16"),
        pytest.param(torch.float16, (7, 5), 4, id="fp16 before Ampere"),
    ],
)
def test_keys_that_a_gpu_cannot_share_are_repeated(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    capability: tuple[int, int],
    keys: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    tokens = SHORT_TOKENS + 1
    q, k, v = (normal(1, heads, tokens, 8, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    with Given() as given:
        out = attend(*(x.as_subclass(OnGpu) for x in (q, k, v)))
    assert given.seen == [(keys, keys < 4)]
    wanted, upstream = attend(q, k, v), normal(1, 4, tokens, 8, seed=9, dtype=dtype)
    assert torch.equal(out, wanted)
    found, full = (torch.autograd.grad(x, (q, k, v), upstream) for x in (out, wanted))
    for gradient, full_gradient in zip(found, full, strict=True):
        # A key's gradients are sums over its queries, in another order, of values rounded to 16
        # bits.
        tolerance = 1e-6 if dtype is torch.float32 else 2**-9
        assert (gradient - full_gradient).norm() <= tolerance * full_gradient.norm()


class Given(TorchFunctionMode):
    """Records the number of keys in calls of torch's attention, and whether queries share them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool]] = []

    def __torch_function__(
        self, function: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            self.seen.append((args[1].shape[1], (kwargs or {})["enable_gqa"]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [SHORT_TOKENS, SHORT_TOKENS + 1])
def test_no_position_sees_a_later_one(num_tokens: int, dtype: torch.dtype) -> None:
    q, k, v = (normal(1, heads, num_tokens, 8, dtype=dtype) for heads in (2, 1, 1))
    before = attend(q, k, v)
    with torch.no_grad():
        k[:, :, -1] += 100
        v[:, :, -1] += 100
    after = attend(q, k, v)
    assert torch.equal(before[:, :, :-1], after[:, :, :-1])
    assert not torch.equal(before[:, :, -1], after[:, :, -1])


def test_long_sequences_never_hold_all_scores() -> None:
    q, k, v = (normal(1, heads, 1024, 8, dtype=torch.bfloat16) for heads in (2, 1, 1))
    with Spy() as spy:
        attend(q, k, v)
    assert not [shape for _, shape, _ in spy.seen if shape[-2:] == (1024, 1024)]
