"""What a step does with routing apart from gradients: moving biases, noise, drops, statistics."""

import pytest
import torch

from swarm.codecs import allocate, fill, mean_of
from swarm.experts import expert_of_unit, shared_shapes
from swarm.model.routing import RoutingControls
from swarm.protocol.values.layout import layout_of
from swarm.train.engine.local_steps import routing_controls_at
from tests.blobs import blob_of
from tests.train.engine.test_engine import frozen_copy, poison
from tests.train.runs import all_names, batch, new_engine, new_streaming, same, tiny_run

SIGMOID = tiny_run(model={"scoring_func": "sigmoid"}, routing={"bias_update_rate": 0.01})
BIASES = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (0, 1)]


def test_each_step_moves_the_selection_biases_against_the_loads_it_saw():
    engine = new_engine(SIGMOID, [0, 1])
    expected = torch.zeros(2, 4)
    for step in range(3):
        stats = engine.step(batch(SIGMOID, step), lr=1e-2)
        loads = torch.tensor(stats.expert_tokens).float()
        expected += 0.01 * torch.sign(loads.mean(-1, keepdim=True) - loads)
    found = torch.stack([engine.read([name])[name] for name in BIASES])
    assert torch.allclose(found, expected)
    assert found.abs().max() > 0
    # Neither weight decay nor a gradient: without a rate they do not change.
    still = tiny_run(model={"scoring_func": "sigmoid"})
    engine = new_engine(still, [0, 1])
    engine.write({name: torch.tensor([0.1, 0.2, 0.3, 0.4]) for name in BIASES})
    engine.step(batch(still, 0), lr=1e-2)
    assert torch.equal(engine.read(BIASES)[BIASES[0]], torch.tensor([0.1, 0.2, 0.3, 0.4]))


def test_a_round_averages_the_biases_of_all_peers():
    layout = layout_of(SIGMOID)
    engines = [new_engine(SIGMOID, [0, 1]), new_engine(SIGMOID, [2, 3])]
    for index, engine in enumerate(engines):
        for step in range(3):
            engine.step(batch(SIGMOID, 10 * index + step), lr=1e-2)
    before = [engine.read(BIASES) for engine in engines]
    shared = [unit for unit in layout.units if expert_of_unit(unit.unit) is None]
    values = [engine.read(list(shared_shapes(SIGMOID.model))) for engine in engines]
    agreed = allocate(shared, layout.shapes)
    for unit in shared:
        blobs = [blob_of(unit, value) for value in values]
        reads = [lambda at, length, blob=blob: blob[at : at + length] for blob in blobs]
        fill(agreed, unit, mean_of(reads, unit.num_bytes, unit.codec).whole())
    for engine in engines:
        engine.write(agreed)
        for name in BIASES:
            expected = (before[0][name] + before[1][name]) / 2
            assert torch.equal(engine.read([name])[name], expected)
    assert not torch.equal(before[0][BIASES[0]], before[1][BIASES[0]])


def test_a_skipped_step_moves_no_bias():
    engine = new_engine(SIGMOID, [0, 1])
    poison(engine, "lm_head.weight")
    assert engine.step(batch(SIGMOID, 0), lr=1e-2).skipped
    assert not torch.stack(list(engine.read(BIASES).values())).any()


def test_an_engine_with_biases_and_noise_goes_on_from_its_saved_state():
    run = tiny_run(
        model={"scoring_func": "sigmoid", "noisy_top_k": True},
        routing={"bias_update_rate": 0.01, "capacity_factor": 1.0},
    )
    names = all_names(run)

    def on(engine, steps):
        for step in steps:
            engine.step(
                batch(run, step), lr=1e-2, controls=routing_controls_at(step, run, "peer", step)
            )

    straight, stopped = new_engine(run, [0, 2]), new_engine(run, [0, 2])
    on(straight, range(4))
    on(stopped, range(2))
    resumed = new_engine(run)
    resumed.load_state_dict(frozen_copy(stopped))
    on(resumed, range(2, 4))
    assert same(straight.read(names), resumed.read(names))
    moments = {n for n in resumed.state_dict().tensors if n.endswith("e_score_correction_bias")}
    assert moments == {f"master.{name}" for name in BIASES}


def test_what_guides_a_step_is_seen_in_its_statistics():
    run = tiny_run(model={"num_experts_per_tok": 2})
    plain, guided = new_engine(run, [0, 1]), new_engine(run, [0, 1])
    stats = plain.step(batch(run, 0), lr=1e-2)
    assert (stats.dropped, stats.similarity) == (0, None)
    controls = RoutingControls(capacity_factor=0.5, own_expert_bias=5.0, probe=True)
    stats = guided.step(batch(run, 0), lr=1e-2, controls=controls)
    # Nearly all tokens choose the two own experts. Each of these takes a quarter of the choices.
    assert [layer[:2] for layer in stats.expert_tokens] == [(64, 64), (64, 64)]
    assert stats.dropped == 2 * 2 * (2 * 32 - 2 * 8)  # layers, micro-batches, choices less places
    assert stats.similarity is not None and abs(stats.similarity) <= 1.01
    assert stats.pairs and all(first < second for first, second, _ in stats.pairs)
    assert list(stats.pairs) == sorted(stats.pairs, key=lambda pair: (-pair[2], pair))


def test_noise_spreads_over_micro_batches_apart():
    run = tiny_run(model={"noisy_top_k": True})
    engine = new_engine(run, [0, 1])
    rows = batch(run, 0)[:2].repeat(2, 1)  # two equal micro-batches
    seen = []
    losses = engine._model.losses
    engine._model.losses = lambda *given: seen.append(losses(*given)) or seen[-1]
    engine.step(rows, lr=1e-2, controls=RoutingControls(noise_seed=4))
    assert not torch.equal(seen[0].expert_tokens, seen[1].expert_tokens)


EVERYTHING = {
    "model": {"scoring_func": "sigmoid", "noisy_top_k": True, "norm_topk_prob": True},
    "routing": {
        "bias_update_rate": 0.01,
        "capacity_factor": 1.0,
        "own_expert_bias": 0.5,
        "balance_factor": 0.7,
    },
    # Of the 64 tokens of a micro-batch, some pairs share enough to be compared.
    "train": {"micro_batch_sequences": 4, "batch_tokens": 128},
    "loss": {"similarity_weight": 0.5, "similarity_threshold": 0.0},
}


def guided(engine, run, steps):
    return [
        engine.step(
            batch(run, step), lr=1e-2, controls=routing_controls_at(step, run, "peer", step)
        )
        for step in range(steps)
    ]


@pytest.mark.parametrize(("clip", "together"), [("global", 1), ("unit", 0)])
def test_with_every_technique_streaming_equals_resident_in_every_bit(clip, together):
    run = tiny_run(**EVERYTHING, optimizer={"clip": clip, "schedule_steps": 10})
    resident = new_engine(run, [1, 3])
    streaming = new_streaming(run, [1, 3], pass_micro_batches=together)
    try:
        stats = guided(resident, run, 4)
        assert stats == guided(streaming, run, 4)
        assert all(step.dropped for step in stats)
        assert any(step.similarity is not None for step in stats)
        assert same(resident.read(all_names(run)), streaming.read(all_names(run)))
        assert same(
            dict(sorted(resident.state_dict().tensors.items())),
            dict(sorted(streaming.state_dict().tensors.items())),
        )
        assert resident.evaluate(batch(run, 9)) == streaming.evaluate(batch(run, 9))
        fresh = new_engine(run)
        fresh.load_state_dict(streaming.state_dict())
        assert same(resident.read(BIASES), fresh.read(BIASES))
    finally:
        streaming.close()


@pytest.mark.parametrize("recompute", ["layer", "routing"])
def test_with_every_technique_checkpointing_changes_no_bit(recompute):
    run = tiny_run(**EVERYTHING, optimizer={"schedule_steps": 10})
    plain, again = new_engine(run, [1, 3]), new_engine(run, [1, 3], recompute=recompute)
    assert guided(plain, run, 3) == guided(again, run, 3)
    assert same(plain.read(all_names(run)), again.read(all_names(run)))
