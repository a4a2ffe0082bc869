"""The outer step: the same bits on every processor, its gain, and what it leaves over."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from blake3 import blake3

from swarm.codecs import bytes_of, values_in
from swarm.deltas.means import reduced
from swarm.deltas.units import RUN_ELEMENTS, Delta, decode_delta
from tests.deltas.hostile_deltas import SIZE, base_bits, delta_bits
from tests.deltas.units import delta_of, unit

ROOT = Path(__file__).parents[2]
GOLDEN = "2bbf5cf4b6122316"
SETTINGS = ((0, 256), (128, 128), (230, 26), (230, 179), (255, 1))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import outer_step  # the folder is on the path in this test alone

    return outer_step


def hostile() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, momenta and moves of all signs and magnitudes, some that take each other away."""
    layout = unit("b2", "fp32", SIZE)
    elements = decode_delta(layout, delta_of(delta_bits("b2")))
    by = torch.cat([elements(0, 2**16), elements(2**16, SIZE)])
    v = torch.from_numpy(values_in(base_bits("fp32"), "fp32").numpy().copy())
    u = values_in(delta_bits("bf16"), "bf16").clone()
    u[::5] = -by[::5].to(torch.bfloat16)
    return v, u, by


def digests(script: ModuleType) -> str:
    """Of all settings, with subnormals flushed and kept."""
    found = set()
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        try:
            made = blake3()
            for momentum, rate in SETTINGS:
                settings = script.Outer(momentum, rate)
                for values in script.outer_step(*hostile(), settings):
                    made.update(bytes_of(values))
            found.add(made.hexdigest())
        finally:
            torch.set_flush_denormal(False)
    (digest,) = found
    return digest


def test_the_bits_are_those_that_they_have_always_been(script: ModuleType) -> None:
    assert digests(script)[:16] == GOLDEN


@pytest.mark.parametrize("kernels", ["default", "avx2"])
def test_all_kernels_of_torch_give_the_same_bits(kernels: str) -> None:
    code = (
        "import json, sys, torch; torch.set_num_threads(2); sys.path.insert(0, 'scripts')\n"
        "import outer_step; from tests.scripts.test_outer_step import digests\n"
        "print(json.dumps([torch.backends.cpu.get_cpu_capability(), digests(outer_step)]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"ATEN_CPU_CAPABILITY": kernels},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    capability, found = json.loads(result.stdout)
    assert found[:16] == GOLDEN
    assert capability == kernels.upper() or kernels != "default"  # a processor may lack AVX2


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_line_rounds_in_its_addition_alone(
    script: ModuleType, setting: tuple[int, int]
) -> None:
    """IEEE arithmetic element by element; a product with mu or eta that rounded would show."""
    v, u, by = (each.float().numpy() for each in hostile())
    mu, eta = (np.float32(each / 256) for each in setting)

    def product(left: np.ndarray, right: np.float32) -> np.ndarray:
        exact = left.astype(np.float64) * np.float64(right)
        assert (exact.astype(np.float32) == exact).all()
        return exact.astype(np.float32)

    def can(values: np.ndarray) -> np.ndarray:
        return np.where(np.abs(values) < 2.0**-100, np.float32(0), values)

    def rb(values: np.ndarray) -> np.ndarray:
        bits = can(values).view(np.uint32)
        return (
            ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        )

    ahead = rb(product(u, mu) + by)
    move = rb(product(ahead, mu) + by)
    value, momentum = script.outer_step(*hostile(), script.Outer(*setting))
    assert bytes_of(momentum.float()) == ahead.tobytes()
    assert bytes_of(value) == can(v + product(move, eta)).tobytes()


@pytest.mark.parametrize(
    ("setting", "gain"), [((128, 128), 1.0), ((224, 32), 1.0), ((128, 192), 1.5), ((0, 256), 1.0)]
)
def test_a_steady_delta_moves_a_value_by_its_gain(
    script: ModuleType, setting: tuple[int, int], gain: float
) -> None:
    outer, steady = script.Outer(*setting), torch.full((4,), 0.03125)
    assert outer.gain == gain
    value, momentum = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
    for _ in range(100):
        before = value
        value, momentum = script.outer_step(value, momentum, steady.clone(), outer)
    assert torch.allclose(value - before, gain * steady, rtol=0.02)


def test_all_of_a_mean_is_in_the_delta_or_left_over(script: ModuleType) -> None:
    """Whatever the value does with it; and mu = 0, eta = 1 is the move without an optimizer."""
    layout = unit("bf16", "fp32", SIZE)
    deltas = [delta_of(delta_bits("bf16"))]
    base = memoryview(base_bits("fp32"))
    assert SIZE < RUN_ELEMENTS

    def read(offset: int, length: int) -> memoryview:
        return base[offset : offset + length]

    plain = list(reduced(layout, read, deltas))
    idle = list(script.stepped(layout, read, None, deltas, script.Outer(0, 256)))
    assert [bytes(run.value) for run in idle] == [bytes(run.value) for run in plain]
    ((run),) = script.stepped(layout, read, None, deltas, script.Outer(230, 26))
    moves = decode_delta(layout, Delta(len(run.delta), delta_of(bytes(run.delta)).read))(0, SIZE)
    mean = decode_delta(layout, deltas[0])(0, SIZE)
    assert torch.equal(moves + values_in(run.left, "fp32"), mean)
    assert bytes(run.value) != bytes(plain[0].value)


@pytest.mark.parametrize("setting", [(256, 1), (-1, 1), (0, 0), (0, 257)])
def test_settings_out_of_range_are_refused(script: ModuleType, setting: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not within"):
        script.Outer(*setting)


def test_a_momentum_beyond_bf16_is_refused(script: ModuleType) -> None:
    most = torch.full((1,), torch.finfo(torch.bfloat16).max)
    with pytest.raises(OverflowError, match="too large"):
        script.outer_step(most, most.bfloat16(), most.clone(), script.Outer(255, 1))
