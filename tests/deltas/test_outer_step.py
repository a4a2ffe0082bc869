"""The outer step: the same bits on every processor, its gain, and what it leaves over."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from blake3 import blake3

from swarm.codecs import Content, bytes_of, check_finite, check_update, read_parts, values_in
from swarm.config import Coding, OuterConfig
from swarm.deltas.arithmetic import outer_step
from swarm.deltas.means import mean_of_deltas, reduced
from swarm.deltas.units import RUN_ELEMENTS, apply_delta, decode_delta, decode_run
from swarm.errors import BadBlob
from swarm.experts import UnitLayout
from tests.deltas.hostile_deltas import SIZE, base_bits, delta_bits
from tests.deltas.kernels import KERNELS, found_under
from tests.deltas.units import base_of, delta_of, encoded, gaussian, reading, unit

GOLDEN = "2bbf5cf4b6122316"
SETTINGS = ((0, 256), (128, 128), (230, 26), (230, 179), (255, 1))


def outer_of(momentum: int, rate: int) -> OuterConfig:
    return OuterConfig(momentum=momentum, rate=rate)


def with_momentum(coding: Coding, size: int, momentum: int = 128, rate: int = 192) -> UnitLayout:
    layout = unit(coding, "fp32", size)
    return replace(layout, num_bytes=6 * size, outer=outer_of(momentum, rate))


def hostile() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, momenta and moves of all signs and magnitudes, some that take each other away."""
    layout = unit("b2", "fp32", SIZE)
    elements = decode_delta(layout, delta_of(delta_bits("b2")))
    by = torch.cat([elements(0, 2**16), elements(2**16, SIZE)])
    v = torch.from_numpy(values_in(base_bits("fp32"), "fp32").numpy().copy())
    u = values_in(delta_bits("bf16"), "bf16").clone()
    u[::5] = -by[::5].to(torch.bfloat16)
    return v, u, by


def digests() -> str:
    """Of all settings, with subnormals flushed and kept."""
    found = set()
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        try:
            made = blake3()
            for momentum, rate in SETTINGS:
                settings = outer_of(momentum, rate)
                for values in outer_step(*hostile(), settings):
                    made.update(bytes_of(values))
            found.add(made.hexdigest())
        finally:
            torch.set_flush_denormal(False)
    (digest,) = found
    return digest


def test_the_bits_are_those_that_they_have_always_been() -> None:
    assert digests()[:16] == GOLDEN


@pytest.mark.parametrize("kernels", KERNELS)
def test_all_kernels_of_torch_give_the_same_bits(kernels: str) -> None:
    code = (
        "import json, torch; torch.set_num_threads(2)\n"
        "from tests.deltas.test_outer_step import digests\n"
        "print(json.dumps([torch.backends.cpu.get_cpu_capability(), digests()]))"
    )
    found = found_under(kernels, "-c", code)
    assert found[:16] == GOLDEN


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_line_rounds_in_its_addition_alone(setting: tuple[int, int]) -> None:
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
    value, momentum = outer_step(*hostile(), outer_of(*setting))
    assert bytes_of(momentum.float()) == ahead.tobytes()
    assert bytes_of(value) == can(v + product(move, eta)).tobytes()


@pytest.mark.parametrize(
    ("setting", "gain"), [((128, 128), 1.0), ((224, 32), 1.0), ((128, 192), 1.5), ((0, 256), 1.0)]
)
def test_a_steady_delta_moves_a_value_by_its_gain(setting: tuple[int, int], gain: float) -> None:
    outer, steady = outer_of(*setting), torch.full((4,), 0.03125)
    assert outer.gain == gain
    value, momentum = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
    for _ in range(100):
        before = value
        value, momentum = outer_step(value, momentum, steady.clone(), outer)
    assert torch.allclose(value - before, gain * steady, rtol=0.02)


@pytest.mark.parametrize("coding", ["b2", "b1", "bf16"])
def test_reducer_and_acceptors_make_the_same_blob_of_values_and_momenta(coding: Coding) -> None:
    """Over several runs of elements and rounds; what the coding lost of a mean is left over."""
    size = RUN_ELEMENTS + 1000
    layout, plain = with_momentum(coding, size), unit(coding, "fp32", size)
    values = base_of(plain, gaussian(size, 9))
    state, left = values + bytes(2 * size), None
    for number in range(3):
        given = [encoded(plain, gaussian(size, 10 * number + i, 0.1)) for i in range(3)]
        deltas = [delta_of(each) for each in given]
        made = list(reduced(layout, reading(state), deltas, left, [3, 1, 2]))
        after = b"".join([run.value for run in made] + [run.momentum for run in made])
        mean = mean_of_deltas(layout, deltas, left, [3, 1, 2])(0, RUN_ELEMENTS)
        by = decode_run(made[0].delta, RUN_ELEMENTS, coding)
        assert torch.equal(values_in(made[0].left, "fp32"), mean - by)
        delta = b"".join(run.delta for run in made)
        assert apply_delta(layout, reading(state), delta_of(delta)).whole() == after
        check_finite(layout, Content.of(after))
        u = values_in(state[4 * size :], "bf16")[:RUN_ELEMENTS]
        v = values_in(state[: 4 * size], "fp32")[:RUN_ELEMENTS]
        assert layout.outer
        value, momentum = outer_step(v, u, by, layout.outer)
        assert after[: 4 * RUN_ELEMENTS] == bytes_of(value)
        assert after[4 * size :][: 2 * RUN_ELEMENTS] == bytes_of(momentum)
        state, left = after, reading(b"".join(run.left for run in made))
    shown = torch.cat([part for _, part in read_parts(layout, reading(state))])
    assert bytes_of(shown) == state[: 4 * size]  # who reads the values sees no momentum


def test_pieces_of_any_size_are_judged_alike() -> None:
    """A blob that comes in pieces which hold values and momenta; each has its type and bounds."""
    size = 1000
    layout = with_momentum("b2", size, 128, 192)
    before = base_of(unit("b2", "fp32", size), gaussian(size, 1)) + bytes(2 * size)
    after = bytearray(before)
    after[4 * size :] = bytes_of(torch.full((size,), 0.25).bfloat16())

    def judged(blob: bytes, piece: int, absolute: float) -> None:
        pieces = Content(
            len(blob), lambda: (blob[i : i + piece] for i in range(0, 6 * size, piece))
        )
        check_finite(layout, pieces)
        check_update(layout, pieces, reading(before), absolute=absolute, relative=0.0)

    bad = bytes(after[:-2]) + b"\x80\x7f"  # infinity as bf16
    for piece in (8, 1004, 4 * size + 4, 6 * size):
        judged(bytes(after), piece, 0.25)
        with pytest.raises(BadBlob, match="cannot have moved"):
            judged(bytes(after), piece, 0.2)
        with pytest.raises(BadBlob, match="finite"):
            judged(bad, piece, 0.25)


def test_a_value_may_move_by_its_gain_and_a_momentum_grow_by_a_move() -> None:
    size = 8
    layout = with_momentum("b2", size, 128, 192)  # a gain of 1.5
    before = base_of(unit("b2", "fp32", size), torch.zeros(size)) + bytes_of(
        torch.full((size,), 2.0).bfloat16()
    )

    def moved(value: float, momentum: float) -> Content:
        parts = torch.full((size,), value), torch.full((size,), momentum).bfloat16()
        return Content.of(b"".join(bytes_of(part) for part in parts))

    limits = {"absolute": 1.0, "relative": 0.0}
    check_update(layout, moved(1.5, 5.0), reading(before), **limits)
    for value, momentum in ((1.6, 2.0), (0.0, 5.1)):
        with pytest.raises(BadBlob):
            check_update(layout, moved(value, momentum), reading(before), **limits)


def test_a_momentum_beyond_bf16_is_refused() -> None:
    most = torch.full((1,), torch.finfo(torch.bfloat16).max)
    with pytest.raises(BadBlob, match="not finite"):
        outer_step(most, most.bfloat16(), most.clone(), outer_of(255, 1))
