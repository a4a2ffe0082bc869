import pytest
import torch

from swarm.model.frozen import Int8Stack, empty_stack, frozen_bytes

SHAPE = (3, 8, 32)


def stack(seed=0):
    made = empty_stack("int8", SHAPE, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(SHAPE, generator=generator).mul_(0.02).bfloat16()
    for row, matrix in enumerate(matrices):
        made.put(row, matrix)
    assert isinstance(made, Int8Stack)
    return made, matrices


def test_an_int8_element_is_within_half_a_step_of_its_row():
    made, matrices = stack()
    exact = matrices.float()
    step = exact.abs().amax(-1, keepdim=True) / 127
    back = made.dense(slice(0, 3), torch.float32)
    # Half a step, and the effect at the far end of rounding the scale to bf16's eight bits: 127 /
    # 512.
    assert ((back - exact).abs() <= step * (0.5 + 127 / 512)).all()
    # Normally distributed weights are off by some 0.6 %.
    assert (back - exact).norm() < 0.009 * exact.norm()


def test_quantising_again_what_was_read_changes_no_bit():
    made, _ = stack()
    before = made.codes.clone(), made.scale.clone()
    for _ in range(3):
        for row in range(3):
            made.put(row, made.get(row))
    assert torch.equal(made.codes, before[0])
    assert torch.equal(made.scale, before[1])
    assert (made.codes.abs().amax(-1) == 127).all()


def test_rows_of_zeros_and_tiny_rows_stay_finite():
    made, _ = stack()
    matrix = torch.zeros(SHAPE[1:])
    matrix[1, 0] = 1e-44
    made.put(0, matrix)
    assert torch.equal(made.get(0)[0], torch.zeros(32))
    assert made.get(0).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_matrices_are_the_stored_ones_rounded_once(dtype):
    made, _ = stack()
    wanted = torch.stack([made.get(row) for row in (1, 2)]).to(dtype)
    assert torch.equal(made.dense(slice(1, 3), dtype), wanted)


def test_a_frozen_parameter_takes_one_byte_and_a_share_of_its_rows_scale():
    assert frozen_bytes("int8", (2, 16, 1024)) == 2 * 16 * (1024 + 4)
    assert frozen_bytes("bf16", (2, 16, 1024)) == 2 * 2 * 16 * 1024
