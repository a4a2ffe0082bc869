"""The work of a step on a GPU, counted on meta tensors. Bounds may only fall."""

from types import ModuleType

import pytest

SEQUENCE = 2048


@pytest.mark.parametrize(
    ("shape", "sequences", "micro", "launches", "bytes_per_token"),
    [("2b", 16, 16, 209, 890e3), ("2b", 2, 2, 209, 1070e3), ("7b", 8, 4, 229, 2370e3)],
)
def test_a_layer_costs_at_most_so_much_of_each_micro_batch(
    script: ModuleType,
    shape: str,
    sequences: int,
    micro: int,
    launches: int,
    bytes_per_token: float,
) -> None:
    """Forward, backward and update of a layer, with one wait of the host."""
    two, three = (script.traced(shape, sequences, micro, SEQUENCE, layers) for layers in (2, 3))
    micro_batches = sequences // micro
    assert len(three.kernels) - len(two.kernels) <= launches * micro_batches
    assert (three.waits - two.waits) == {"plan_rows": micro_batches}
    moved = three.elementwise_bytes - two.elementwise_bytes
    assert moved <= bytes_per_token * sequences * SEQUENCE


def test_the_rest_of_a_step_costs_at_most_so_much(script: ModuleType) -> None:
    """Embedding, head, losses and the norms of all gradients."""
    two, three = (script.traced("2b", 2, 2, SEQUENCE, layers) for layers in (2, 3))
    assert 3 * len(two.kernels) - 2 * len(three.kernels) <= 164
    assert two.waits.total() <= 4 + 2


def test_products_are_those_of_the_formula(script: ModuleType) -> None:
    """The kernels' operations are those that MFU counts, but for the head's extra rows."""
    trace = script.traced("2b", 2, 2, SEQUENCE, 2)
    run = script.run_of(
        script.replace(script.SHAPES["2b"], layers=2), 2, SEQUENCE, clip="global", micro=2
    )
    useful = script.step_flops_with(run, 1) * run.train.batch_tokens
    assert sum(kernel.flops for kernel in trace.kernels) == pytest.approx(useful, rel=0.06)


def test_the_time_of_a_kernel_is_that_of_its_slower_half(script: ModuleType) -> None:
    card = script.replace(
        script.CARD, flops=100, products=0.5, bytes_per_s=10, passes=0.5, launch_s=1
    )

    def kernel(flops: float, num_bytes: float, kind: str) -> float:
        return script.Kernel("", "", flops, num_bytes, kind).seconds(card)

    assert kernel(200, 5, "products") == 1 + 4
    assert kernel(50, 25, "products") == 1 + 5
    assert kernel(0, 25, "passes") == 1 + 5
