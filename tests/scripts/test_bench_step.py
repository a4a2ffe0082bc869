"""The measurement of a local step: ours is that of the engine that peers have."""

from typing import Any

import pytest
import torch

from swarm.config import RunConfig
from swarm.train.resident import ResidentEngine

STEPS = 3


@pytest.fixture
def run(script: Any) -> RunConfig:
    """The measured one, so small that a step is short."""
    whole: RunConfig = script.run_of("byte")
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
    }
    return whole.model_copy(
        update={
            "model": whole.model.model_copy(update=small),
            "data": whole.data.model_copy(update={"sequence_length": 16}),
        }
    )


def test_all_variants_train_alike_and_ours_is_a_peers_engine(script: Any, run: RunConfig) -> None:
    losses = {}
    for name in script.VARIANTS:
        torch.manual_seed(0)
        measured = script.variant(name, "fp32", run, script.weights_of(run))
        losses[name] = [measured.step(batch) for batch in script.batches(run, STEPS)]
        if name == "ours":
            assert isinstance(measured.engine, ResidentEngine)
            assert measured.engine.owned == script.OWNED
    assert losses["ours"][-1] < losses["ours"][0]
    # Every step updates: from the second on losses agree only where the updates before do.
    assert losses["ours"] == pytest.approx(losses["plist"], rel=1e-5)
    assert losses["ours"][0] == pytest.approx(losses["stock"][0], rel=1e-5)


def test_the_state_of_ours_is_counted_with_its_frozen_experts(
    script: Any, run: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "run_of", lambda _: run)
    weights = script.weights_of(run)
    trained = sum(
        each.nbytes
        for name, each in weights.items()
        if script.expert_of(name) in (None, *script.OWNED)
    )
    whole = sum(each.nbytes for each in weights.values())
    words = ["--dtype", "fp32", "--repeats", "1"]
    found = script.measure_memory("ours", script.parse(words))
    assert found["state"] == pytest.approx(whole + 2 * trained, rel=0.05)
