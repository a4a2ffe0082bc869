"""Held-out losses of the streaming engine: the copied data, which changes no bit."""

from collections import Counter

import pytest
import torch

from swarm.experts import expert_shapes
from swarm.model.transformer import DecoderLayer
from swarm.train.streaming.device import Places
from tests.train.runs import batch, new_engine, tiny_run

OWNED = [1, 3]
LAYERS = 4
BF16 = {"compute": "bf16", "frozen": "bf16"}


def run_of(**train):
    """A step is four micro-batches of one sequence."""
    train = {"micro_batch_sequences": 1, **train}
    return tiny_run(model={"num_hidden_layers": LAYERS}, train=train)


@pytest.mark.parametrize(("together", "passes"), [(0, 2), (3, 3), (1, 8)])
def test_a_layer_moves_once_for_all_micro_batches_of_a_pass(engines, monkeypatch, together, passes):
    engine, moved, fill = engines(run_of(), OWNED, pass_micro_batches=together), [], Places._fill

    def noted(self, place, source, **parts):
        moved.append(source.unit.name)
        return fill(self, place, source, **parts)

    monkeypatch.setattr(Places, "_fill", noted)
    asked = Counter()

    def agreed(name):
        asked[name] += 1
        return values[name]

    values = engine.read([name for e in OWNED for name in expert_shapes(engine._run.model, e)])
    tokens = torch.cat([batch(engine._run, 1), batch(engine._run, 2)])
    assert len(tokens) == 8
    engine.evaluate(tokens, agreed=agreed)
    layers = {f"layer.{layer}": passes for layer in range(LAYERS)}
    assert Counter(moved) == {**layers, "head": 1}
    assert asked == dict.fromkeys(values, passes)


def test_the_next_layer_is_on_its_way_while_one_computes(engines, monkeypatch):
    engine, seen = engines(run_of(), OWNED), []
    prefetch, forward = Places.prefetch, DecoderLayer.forward

    def prefetched(self, name):
        seen.append(name)
        return prefetch(self, name)

    def computed(self, *given):
        seen.append("computes")
        return forward(self, *given)

    monkeypatch.setattr(Places, "prefetch", prefetched)
    monkeypatch.setattr(DecoderLayer, "forward", computed)
    engine.evaluate(batch(engine._run, 1)[:1])
    wanted = ["layer.0"]
    for layer in range(LAYERS):
        following = f"layer.{layer + 1}" if layer + 1 < LAYERS else "head"
        wanted += [f"layer.{layer}", following, "computes"]
    assert seen == [*wanted, "head"]


@pytest.mark.parametrize("together", [0, 1, 3])
@pytest.mark.parametrize("train", [{}, BF16, {**BF16, "micro_batch_sequences": 2}])
def test_no_bit_depends_on_the_passes(engines, together, train):
    run = run_of(**train)
    streaming, resident = engines(run, OWNED, pass_micro_batches=together), new_engine(run, OWNED)
    tokens = torch.cat([batch(run, 1), batch(run, 2)])[:7]
    scored = torch.rand(7, tokens.shape[1] - 1, generator=torch.Generator().manual_seed(5)) < 0.5
    scored[:, 0] = True
    values = {
        name: 2 * value
        for name, value in resident.read(
            [name for e in OWNED for name in expert_shapes(run.model, e)]
        ).items()
    }
    for given in ({}, {"scored_BT": scored}, {"scored_BT": scored, "agreed": values.__getitem__}):
        assert streaming.evaluate(tokens, **given) == resident.evaluate(tokens, **given)


@pytest.mark.parametrize("layers", [0, 2, None])
def test_training_goes_on_with_the_same_bits_after_a_held_out_loss(engines, layers):
    """Its weights and gradients leave the device meanwhile, also if the loss fails."""
    run = run_of(**BF16)
    looked, blind = (engines(run, OWNED, resident_layers=layers) for _ in range(2))
    taken = looked.device_bytes
    for step in range(3):
        assert looked.step(batch(run, step), lr=1e-2) == blind.step(batch(run, step), lr=1e-2)
        looked.evaluate(batch(run, 9))
        with pytest.raises(IndexError):
            looked.evaluate(torch.full((2, 17), 9999))
    assert looked.device_bytes == taken
