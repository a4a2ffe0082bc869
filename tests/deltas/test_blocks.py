"""The codings of blocks: meaning of the bits, errors, refusals."""

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.codings import BLOCK, CODE_BYTES
from swarm.config import Coding
from swarm.deltas.blocks import decode_blocks, encode_blocks, pack, unpack
from swarm.errors import BadBlob
from tests.deltas.units import BLOCKED, gaussian

SQUARED_ERROR = {"b2": 0.118, "b1": 0.362}


def decoded(values: torch.Tensor, coding: Coding) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales fp32 [n, 1] and decoded values [n, 256] of blocks."""
    scales, codes = encode_blocks(values, coding)
    assert codes.shape == (len(values), CODE_BYTES[coding])
    products = decode_blocks(scales, codes, values.numel(), coding)
    return scales.float().unsqueeze(1), products.view(-1, BLOCK)


def one(coding: Coding, scale: float, codes: list[int]) -> torch.Tensor:
    """The decoded values of one block of these bytes."""
    packed = torch.tensor([codes], dtype=torch.uint8)
    return decode_blocks(torch.tensor([scale], dtype=torch.bfloat16), packed, BLOCK, coding)


# ------------------------------------------------ meaning of the bits


@pytest.mark.parametrize("bits", [1, 2])
def test_codes_lie_in_planes_over_the_bytes_of_a_block(bits):
    codes = torch.randint(0, 2**bits, (3, BLOCK), dtype=torch.uint8)
    packed = pack(codes, bits)
    width = BLOCK * bits // 8
    for row in range(3):
        for j in (0, 1, width - 1):
            planes = [int(codes[row, j + width * i]) for i in range(8 // bits)]
            assert int(packed[row, j]) == sum(c << (bits * i) for i, c in enumerate(planes))
    assert torch.equal(unpack(packed, bits), codes)


def test_each_code_has_its_multiple_of_the_scale():
    two = one("b2", 0.5, [0b11100100] + [0] * 63)
    assert two[[0, 64, 128, 192, 1]].tolist() == [-1.5, -0.5, 0.5, 1.5, -1.5]
    bit = one("b1", 0.5, [0b10000010] + [255] * 31)
    assert bit[[0, 32, 64, 224, 1]].tolist() == [-0.5, 0.5, -0.5, 0.5, 0.5]


def test_bytes_are_scales_then_codes_as_the_page_says():
    values = -torch.ones(1, BLOCK)
    values[0, ::8] = 1.0
    scales, codes = encode_blocks(values, "b1")
    assert scales.view(torch.int16).numpy().tobytes() == struct.pack("<f", 1.0)[2:]
    assert codes[0, :9].tolist() == [255, *[0] * 7, 255]


# ------------------------------------------------ errors of values


EXPONENTS = st.integers(-110, 60)
BLOCK_KINDS = st.sampled_from(["gaussian", "sparse", "equal", "spread"])


def block_of(kind: str, seed: int, exponent: int) -> torch.Tensor:
    values = gaussian(4 * BLOCK, seed).view(4, BLOCK)
    if kind == "sparse":
        values = values * (torch.arange(BLOCK) % 101 == seed % 101)
    elif kind == "equal":
        values = values.sign()
    elif kind == "spread":
        values = values * torch.exp2(gaussian(4 * BLOCK, seed + 1).view(4, BLOCK) * 6)
    return values * 2.0**exponent


@pytest.mark.parametrize("coding", BLOCKED)
@settings(max_examples=25, deadline=None)
@given(kind=BLOCK_KINDS, seed=st.integers(0, 2**16), exponent=EXPONENTS)
def test_no_element_is_off_by_more_than_its_bound(coding, kind, seed, exponent):
    values = block_of(kind, seed, exponent)
    scales, products = decoded(values, coding)
    values, scales, products = values.double(), scales.double(), products.double()
    size, error = values.abs(), (values - products).abs()
    if coding == "b2":
        bound = torch.where(size <= 4 * scales, scales, size - 3 * scales)
    else:
        bound = torch.maximum(scales.expand_as(size), size - scales)
    bound = torch.where(scales == 0, size, bound * (1 + 1e-6))
    assert (error <= bound).all()


@pytest.mark.parametrize("coding", BLOCKED)
@settings(max_examples=15, deadline=None)
@given(kind=BLOCK_KINDS, seed=st.integers(0, 2**16))
def test_no_error_is_longer_than_its_block_but_a_little_with_two_bits(coding, kind, seed):
    values = block_of(kind, seed, 0)
    _, products = decoded(values, coding)
    lengths = values.norm(dim=1)
    longest = 1.04 if coding == "b2" else 1.0
    assert ((values - products).norm(dim=1) <= lengths * longest + 1e-6).all()


@pytest.mark.parametrize(("coding", "expected"), SQUARED_ERROR.items())
def test_the_error_on_gaussian_blocks_is_the_one_that_the_page_names(coding, expected):
    values = gaussian(2**17).view(-1, BLOCK)
    _, products = decoded(values, coding)
    share = ((values - products).square().sum() / values.square().sum()).item()
    assert abs(share - expected) <= 0.02 * expected + 0.00005


@pytest.mark.parametrize("coding", BLOCKED)
def test_what_is_too_small_for_a_scale_is_not_sent_and_what_is_too_large_is_cut(coding):
    values = torch.full((3, BLOCK), 2.0**-110)
    values[1] = 2.0**65
    values[2] = 0.0
    scales, products = decoded(values, coding)
    assert scales.view(-1).tolist()[0] == 0 and scales.view(-1).tolist()[2] == 0
    assert not products[0].any() and not products[2].any()
    assert scales[1] == 2.0**40 and products[1].max() > 2.0**39


@pytest.mark.parametrize("coding", BLOCKED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_difference_that_is_not_finite_is_refused(coding, bad):
    values = gaussian(2 * BLOCK).view(2, BLOCK)
    values[1, 77] = bad
    with pytest.raises(BadBlob, check=lambda error: error.reason == "non_finite"):
        encode_blocks(values, coding)


# ------------------------------------------------ refusals


def raw(bits: int) -> torch.Tensor:
    return torch.tensor([bits - 2**16 if bits >= 2**15 else bits], dtype=torch.int16).view(
        torch.bfloat16
    )


LOWEST, HIGHEST = (127 - 96) << 7, (127 + 40) << 7


@pytest.mark.parametrize(
    ("bits", "is_good"),
    [
        (0, True),
        (LOWEST, True),
        (HIGHEST, True),
        (LOWEST - 1, False),
        (HIGHEST + 1, False),
        (1, False),  # subnormal
        (0x8000, False),  # -0
        (0x8000 | LOWEST, False),
        (0x7F80, False),  # infinity
        (0xFF80, False),
        (0x7FC0, False),  # NaN
    ],
)
@pytest.mark.parametrize("coding", BLOCKED)
def test_a_scale_is_zero_or_within_its_bounds(coding, bits, is_good):
    _, codes = encode_blocks(gaussian(BLOCK).view(1, -1), coding)
    if is_good:
        decode_blocks(raw(bits), codes, BLOCK, coding)
        return
    with pytest.raises(BadBlob, check=lambda error: error.reason == "scale"):
        decode_blocks(raw(bits), codes, BLOCK, coding)


def test_codes_that_fill_up_the_last_block_say_nothing():
    scale = torch.ones(2, dtype=torch.bfloat16)
    codes = torch.full((2, BLOCK // 8), 255, dtype=torch.uint8)
    filled = codes.clone()
    filled[1, 4:] = 0x55
    found = [decode_blocks(scale, each, BLOCK + 4, "b1") for each in (codes, filled)]
    assert found[0].tolist() == found[1].tolist() == [1.0] * (BLOCK + 4)
