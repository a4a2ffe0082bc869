"""Every machine computes the same value from a delta, for all kernels, threads and alignments."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from swarm.codecs import values_in
from swarm.config import Codec, Coding
from swarm.deltas.blocks import moved
from swarm.deltas.unit_deltas import decode_delta
from tests.deltas.hostile_deltas import CODECS, SIZE, base_bits, delta_bits, digest, digests
from tests.deltas.units import CODINGS, applied, delta_of, unit

GOLDEN = {
    "bf16 fp32": "66fdf84d10f08e69",
    "bf16 bf16": "3794bff339ec4741",
    "b2 fp32": "aea4e8ed7f67c4d4",
    "b2 bf16": "73b15357f0ba34af",
    "b1 fp32": "aca92c937af29ad2",
    "b1 bf16": "f3f0e8990c0fe1dd",
}
"""The first 64 bits of each digest."""


def test_the_bits_are_those_that_they_have_always_been() -> None:
    assert {name: value[:16] for name, value in digests().items()} == GOLDEN


@pytest.mark.parametrize("kernels", ["default", "avx2"])
def test_all_kernels_of_torch_give_the_same_bits(kernels: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.deltas.hostile_deltas", "2"],
        env=os.environ | {"ATEN_CPU_CAPABILITY": kernels},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    capability, found = json.loads(result.stdout)
    assert capability == kernels.upper() or kernels != "default"  # a processor may lack AVX2
    assert {name: value[:16] for name, value in found.items()} == GOLDEN


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("coding", CODINGS)
def test_alignment_does_not_matter(coding: Coding, codec: Codec) -> None:
    assert {digest(coding, codec, misaligned) for misaligned in (0, 1, 2, 3)} == {
        digest(coding, codec)
    }


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("coding", CODINGS)
def test_the_value_is_that_of_ieee_arithmetic_element_by_element(
    coding: Coding, codec: Codec
) -> None:
    layout = unit(coding, codec, SIZE)
    elements = decode_delta(layout, delta_of(delta_bits(coding)))
    moves = np.concatenate([elements(0, 2**16).numpy(), elements(2**16, SIZE).numpy()])
    before = values_in(base_bits(codec), codec).float().numpy()
    sums = before + moves
    sums = np.where(np.abs(sums) < 2.0**-100, np.float32(0), sums)
    bits = sums.view(np.uint32)
    if codec == "bf16":
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    kind = "<u4" if codec == "fp32" else "<u2"
    assert applied(layout, base_bits(codec), delta_bits(coding)) == bits.astype(kind).tobytes()


def test_how_many_elements_are_worked_on_at_once_does_not_matter() -> None:
    layout = unit("b2", "bf16", SIZE)
    by = decode_delta(layout, delta_of(delta_bits("b2")))(0, 2**16)
    before = values_in(base_bits("bf16"), "bf16")[: 2**16]
    whole = moved(before, by.clone(), "bf16")
    for size in (1, 7, 64, 1001):
        parts = [
            moved(before[i : i + size], by[i : i + size].clone(), "bf16")
            for i in range(0, 2100, size)
        ]
        assert torch.equal(torch.cat(parts)[:2100], whole[:2100])
