from unittest.mock import Mock

import pytest
import torch

from swarm.model import moe
from tests.train.runs import all_names, batch, new_engine, same, tiny_run

BF16 = {"train": {"compute": "bf16", "frozen": "bf16"}}


@pytest.mark.parametrize("recompute", ["layer", "routing"])
@pytest.mark.parametrize("sections", [{}, BF16, {"loss": {"balance": "global"}}])
def test_computing_again_changes_no_bit(recompute, sections):
    run = tiny_run(**sections)
    kept, again = new_engine(run, [1, 3]), new_engine(run, [1, 3], recompute=recompute)
    for step in range(3):
        assert kept.step(batch(run, step), lr=1e-2) == again.step(batch(run, step), lr=1e-2)
    assert same(kept.read(all_names(run)), again.read(all_names(run)))


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("layer", 2), ("routing", 1)])
def test_rows_are_sorted_once_where_the_routing_is_kept(monkeypatch, recompute, times):
    plan_rows = Mock(wraps=moe.plan_rows)
    monkeypatch.setattr(moe, "plan_rows", plan_rows)
    run = tiny_run()
    new_engine(run, [1, 3], recompute=recompute).step(batch(run, 0), lr=1e-2)
    assert plan_rows.call_count == 2 * 2 * times  # layers, micro-batches


def test_a_kept_routing_decides_whatever_the_probabilities_say():
    run = tiny_run()
    router = moe.Router(run.model, torch.device("cpu"))
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    x_ND = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    free = router(x_ND)
    worst_NK = free.probabilities_NE.topk(2, dim=-1, largest=False).indices
    kept = router(x_ND, moe.Recall(worst_NK))
    assert torch.equal(kept.expert_NK, worst_NK)
    assert torch.equal(kept.weight_NK, free.probabilities_NE.gather(1, worst_NK))
    same_again = router(x_ND, moe.Recall(free.expert_NK))
    assert torch.equal(same_again.weight_NK, free.weight_NK)


def bytes_kept(run, recompute):
    """Bytes that the graph of one micro-batch keeps for backward, without parameters."""
    engine = new_engine(run, [1, 3], recompute=recompute)
    model, kept = engine._model, {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        total = model.losses(batch(run, 0), run.loss).total
    assert total.requires_grad
    return sum(kept.values())


def test_recomputed_layers_keep_little_more_than_their_inputs():
    few, many = (tiny_run(model={"num_hidden_layers": layers}) for layers in (2, 12))
    grows = {
        kind: (bytes_kept(many, kind) - bytes_kept(few, kind)) / 10 for kind in ("none", "layer")
    }
    one_input = 4 * 16 * 16 * 4  # sequences, tokens, hidden size, fp32
    # The graph keeps a layer's input, and its routing's logits and probabilities for the losses.
    assert grows["layer"] < 2 * one_input
    assert grows["none"] > 8 * grows["layer"]


def test_frozen_experts_in_int8_train_near_fp32():
    run = tiny_run()
    stats = {}
    for frozen in ("fp32", "bf16", "int8"):
        engine = new_engine(run, [1, 3], frozen=frozen)
        for step in range(5):
            stats[frozen] = engine.step(batch(run, step), lr=1e-2)
    # Half the experts are rounded to 8 bits: 0.6 % of their weights, and far less of the loss.
    assert stats["bf16"].loss == pytest.approx(stats["fp32"].loss, rel=3e-4)
    assert stats["int8"].loss == pytest.approx(stats["fp32"].loss, rel=1e-3)
    assert stats["int8"].grad_norm == pytest.approx(stats["fp32"].grad_norm, rel=3e-2)
