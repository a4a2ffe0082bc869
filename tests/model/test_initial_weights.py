"""Initial weights depend on the seed and the name, and on nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from blake3 import blake3

from swarm.errors import BadBlob
from swarm.model.initial_weights import initial_tensor, initial_tensors
from tests.model.samples import shapes_of, tiny_run

SHOW_DIGEST = """
from blake3 import blake3
from swarm.model.initial_weights import initial_tensor
from tests.model.samples import tiny_run
print(blake3(initial_tensor("lm_head.weight", (260, 64), tiny_run()).numpy().tobytes()).hexdigest())
"""


def test_order_and_company_change_nothing() -> None:
    run = tiny_run()
    names = list(shapes_of(run))
    there = initial_tensors(run, names)
    back = initial_tensors(run, reversed(names))
    assert {name: tensor.shape for name, tensor in there.items()} == shapes_of(run)
    for name in names:
        alone = initial_tensors(run, [name])[name]
        assert torch.equal(there[name], back[name])
        assert torch.equal(there[name], alone)


def test_another_process_draws_the_same_bits() -> None:
    command = [sys.executable, "-c", SHOW_DIGEST]
    root = Path(__file__).parents[2]
    told = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, cwd=root
    ).stdout
    mine = initial_tensor("lm_head.weight", (260, 64), tiny_run())
    assert told.strip() == blake3(mine.numpy().tobytes()).hexdigest()


def test_names_and_seeds_give_different_values() -> None:
    run = tiny_run()
    other_seed = run.model_copy(update={"run": run.run.model_copy(update={"seed": 8})})
    value = initial_tensor("a.weight", (64, 64), run)
    for other in (
        initial_tensor("b.weight", (64, 64), run),
        initial_tensor("a.weight", (64, 64), other_seed),
    ):
        # Independent: the correlation of 4096 pairs is within 5 / sqrt(4096).
        assert abs(torch.corrcoef(torch.stack([value.flatten(), other.flatten()]))[0, 1]) < 0.08


def test_matrices_are_normal_and_cut_and_norms_are_1() -> None:
    run = tiny_run(initializer_range=0.05)
    value = initial_tensor("lm_head.weight", (2000, 100), run)
    assert value.dtype == torch.float32
    assert value.abs().max() <= 0.15
    # A normal distribution cut at 3 sigma has 0.9866 sigma; 200,000 draws give it within 0.5 %.
    assert value.std().item() == pytest.approx(0.9866 * 0.05, rel=5e-3)
    assert abs(value.mean().item()) < 5 * 0.05 / 200_000**0.5
    assert torch.equal(initial_tensor("model.norm.weight", (64,), run), torch.ones(64))


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.8.up_proj.weight", "lm_head.bias"])
def test_an_unknown_name_is_an_error(name: str) -> None:
    with pytest.raises(BadBlob, match="is not in our model"):
        initial_tensors(tiny_run(), [name])


def test_selection_bias_and_noise_begin_at_zero() -> None:
    run = tiny_run(scoring_func="sigmoid", noisy_top_k=True)
    for kind in ("e_score_correction_bias", "noise_weight"):
        name = f"model.layers.0.mlp.gate.{kind}"
        assert not initial_tensors(run, [name])[name].any()
