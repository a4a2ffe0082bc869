"""Every machine makes the same value of a delta: other kernels, threads and alignments."""

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
from swarm.deltas.arithmetic import moved
from swarm.deltas.units import decode_delta
from tests.deltas.hostile_deltas import CODECS, SIZE, base_bits, delta_bits, digest, digests
from tests.deltas.units import CODINGS, applied, delta_of, unit

ROOT = Path(__file__).parents[2]
GOLDEN = {
    "bf16 fp32": "726b9a729da41020",
    "bf16 bf16": "5c0230de78633c96",
    "int8 fp32": "133198a00cb27ca5",
    "int8 bf16": "bd2d6c4f84faeefb",
    "int4 fp32": "d6dc14f2318c0797",
    "int4 bf16": "18da45d6a21d7223",
    "b2 fp32": "6ac2e05a3144c863",
    "b2 bf16": "08fd71aa601a6357",
    "b1 fp32": "8ce0e9817cccb923",
    "b1 bf16": "7bceb8fe00871e98",
    "top8 fp32": "8f0eee301c749cb7",
    "top8 bf16": "8367c0ba307b227f",
    "top16 fp32": "b78b2e621abb4f38",
    "top16 bf16": "46e08c404aa1360e",
    "top32 fp32": "60f8ad32ee70dc87",
    "top32 bf16": "6d9a3824b004af04",
}
"""The first 64 bits of each digest."""


def test_the_bits_are_those_that_they_have_always_been() -> None:
    assert {name: value[:16] for name, value in digests().items()} == GOLDEN


@pytest.mark.parametrize("kernels", ["default", "avx2"])
def test_all_kernels_of_torch_give_the_same_bits(kernels: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.deltas.hostile_deltas", "2"],
        env=os.environ | {"ATEN_CPU_CAPABILITY": kernels},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    capability, found = json.loads(result.stdout)
    assert {name: value[:16] for name, value in found.items()} == GOLDEN
    assert capability == kernels.upper() or kernels != "default"  # a processor may lack AVX2


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
    layout = unit("int8", "bf16", SIZE)
    by = decode_delta(layout, delta_of(delta_bits("int8")))(0, 2**16)
    before = values_in(base_bits("bf16"), "bf16")[: 2**16]
    whole = moved(before, by.clone(), "bf16")
    for size in (1, 7, 64, 1001):
        parts = [
            moved(before[i : i + size], by[i : i + size].clone(), "bf16")
            for i in range(0, 2100, size)
        ]
        assert torch.equal(torch.cat(parts)[:2100], whole[:2100])
