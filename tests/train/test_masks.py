"""Steps with masks: both engines agree, and means are over scored predictions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from swarm.data.masks import Masks, masks_of
from tests.train.runs import LENGTH, all_names, batch, new_engine, new_streaming, same, tiny_run

OWNED = [1, 3]
END = 256
MASKED = {"data": {"attention": "document", "mask_repetition": True}}
BF16 = {"train": {"compute": "bf16", "frozen": "bf16"}}


def text(step: int) -> Tensor:
    """A batch with documents of all lengths: within rows, from row to row, of one row."""
    tokens_BT1 = batch(tiny_run(), step)
    tokens_BT1[0, [3, 4, 11]] = END
    tokens_BT1[1, 0] = END
    tokens_BT1[3, LENGTH] = END
    return tokens_BT1


def masks(tokens_BT1: Tensor, *rows: int) -> Masks:
    """Documents, and these rows left out of the loss."""
    found = masks_of(tokens_BT1, tiny_run(data={"attention": "document"}), END)
    assert found is not None
    scored_BT = torch.ones_like(tokens_BT1[:, 1:], dtype=torch.bool)
    scored_BT[list(rows)] = False
    return replace(found, scored_BT=scored_BT)


@pytest.mark.parametrize(
    ("sections", "options"),
    [
        ({}, {}),
        (BF16, {}),
        ({"train": {"micro_batch_sequences": 1}}, {"pass_micro_batches": 2}),
    ],
    ids=["fp32", "bf16", "two passes"],
)
def test_streaming_equals_resident_and_recomputing_changes_no_bit(
    sections: dict[str, Any], options: dict[str, Any]
) -> None:
    run = tiny_run(**sections)
    kept = [new_engine(run, OWNED, recompute=r) for r in ("none", "layer", "routing")]
    streaming = new_streaming(run, OWNED, **options)
    try:
        for step in range(2):
            tokens = text(step)
            given = {"lr": 1e-2, "masks": masks(tokens, step)}
            first, *others = [engine.step(tokens, **given) for engine in (*kept, streaming)]
            assert others == [first] * 3
            assert (first.masked, first.tokens) == (LENGTH, 4 * LENGTH)
        wanted = kept[0].read(all_names(run))
        assert all(same(engine.read(all_names(run)), wanted) for engine in (*kept[1:], streaming))
    finally:
        streaming.close()


@pytest.mark.parametrize("left_out", [(1,), (0, 1, 3)])
def test_the_loss_is_the_mean_of_what_is_scored(
    left_out: tuple[int, ...],
) -> None:
    # The router's terms are over all tokens, so they are off here.
    only = {"balance_weight": 0.0, "router_z_weight": 0.0}
    tokens = batch(tiny_run(), 0)
    engine = new_engine(tiny_run(loss=only), OWNED)
    found = engine.step(tokens, lr=1e-2, masks=Masks(None, masks(tokens, *left_out).scored_BT))
    kept = [row for row in range(4) if row not in left_out]
    fewer = {"batch_tokens": len(kept) * LENGTH, "micro_batch_sequences": 1}
    alone = new_engine(tiny_run(loss=only, train=fewer), OWNED)
    wanted = alone.step(tokens[kept], lr=1e-2)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert found.cross_entropy == pytest.approx(wanted.cross_entropy, rel=1e-6)
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    assert found.masked == len(left_out) * LENGTH
    assert sum(found.expert_tokens[0]) == 2 * 4 * LENGTH, "all are routed"


def test_a_batch_of_which_nothing_is_scored_changes_nothing_that_is_not_the_routers() -> None:
    tokens = batch(tiny_run(), 0)
    for make in (new_engine, new_streaming):
        engine = make(tiny_run(loss={"balance_weight": 0.0, "router_z_weight": 0.0}), OWNED)
        stats = engine.step(tokens, lr=1e-2, masks=masks(tokens, 0, 1, 2, 3))
        assert (stats.loss, stats.grad_norm, stats.skipped) == (0.0, 0.0, False)
        assert stats.masked == stats.tokens
        engine.close()


def test_masks_of_which_nothing_is_masked_change_no_bit() -> None:
    run, tokens = tiny_run(), batch(tiny_run(), 0)
    plain, masked = new_engine(run, OWNED), new_engine(run, OWNED)
    assert plain.step(tokens, lr=1e-2) == masked.step(tokens, lr=1e-2, masks=masks(tokens))
    assert same(plain.read(all_names(run)), masked.read(all_names(run)))
