import functools
import logging
from dataclasses import replace

import pytest
import torch

from swarm.errors import CorruptState, TrainingDiverged
from swarm.experts import expert_shapes, owned_stack, shared_shapes
from swarm.model.initial_weights import initial_tensors
from swarm.train.engine.engine import EngineState
from swarm.train.engine.engine_options import EngineKind
from tests.train.runs import all_names, batch, new_engine, new_streaming, same, tiny_run

RUN = tiny_run()
NAMES_1, NAMES_2 = (list(expert_shapes(RUN.model, expert)) for expert in (1, 2))


@pytest.fixture(
    params=[
        "resident",
        "streaming",
        pytest.param("parallel", marks=pytest.mark.exhaustive),
        pytest.param("expert parallel", marks=pytest.mark.exhaustive),
        pytest.param("streaming from one copy", marks=pytest.mark.exhaustive),
    ]
)
def make_engine(request):
    """Makes engines of one kind, and ends their threads and workers when the test is over."""
    makers = {"resident": new_engine, "streaming": new_streaming}
    maker = makers.get(request.param) or request.getfixturevalue("crews").engine
    if request.param == "expert parallel":
        maker = functools.partial(maker, ep=2)
    if request.param == "streaming from one copy":
        maker = functools.partial(maker, kind=EngineKind.STREAMING)
    made = []

    def make(*args, **options):
        made.append(maker(*args, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def weights(engine):
    return engine.read(all_names(RUN))


def frozen_copy(engine):
    state = engine.state_dict()
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    return EngineState(tensors, state.owned, state.updates, state.skipped, state.skipped_in_a_row)


def train(engine, steps, *, start=0, lr=1e-2):
    return [engine.step(batch(RUN, step), lr=lr) for step in range(start, start + steps)]


def poison(engine, name="model.norm.weight"):
    """Makes every loss NaN. Returns a function that undoes this."""
    before = engine.read([name])
    engine.write({name: torch.full_like(before[name], float("nan"))})
    return before


def test_engines_with_one_seed_start_equal_whatever_they_own(make_engine):
    first, second = make_engine(RUN, [0, 1]), make_engine(RUN, [2])
    assert same(weights(first), weights(second))
    assert same(weights(first), initial_tensors(RUN, all_names(RUN)))


def test_a_foreign_expert_keeps_every_byte_over_a_round(make_engine):
    for frozen in ("fp32", "bf16"):
        run = tiny_run(train={"frozen": frozen})
        engine = make_engine(run, [1, 3])
        names = {expert: list(expert_shapes(run.model, expert)) for expert in range(4)}
        before = {expert: engine.read(of) for expert, of in names.items()}
        train(engine, 6)
        for expert in (0, 2):
            assert same(engine.read(names[expert]), before[expert])
        for expert in (1, 3):
            after = engine.read(names[expert])
            assert not any(torch.equal(after[name], before[expert][name]) for name in after)


def test_no_gradient_and_no_moment_of_a_foreign_expert_is_ever_allocated():
    engine = new_engine(RUN, [1, 3])
    seen = []

    def count(parameter):
        seen.append((parameter.shape, parameter.grad.shape))

    trained = engine._model.trained_parameters()
    hooks = [p.register_post_accumulate_grad_hook(count) for p in trained.values()]
    engine.step(batch(RUN, 0), lr=1e-2)
    for hook in hooks:
        hook.remove()
    # All leaves of the graph are shared tensors and stacks of the two owned experts.
    assert len(seen) == 2 * len(trained)  # two micro-batches
    assert all(of == gradient for of, gradient in seen)
    assert trained[owned_stack(0, "gate")].shape[0] == 2
    assert all(p.numel() == 0 or n in trained for n, p in engine._model.named_parameters())
    assert not any(buffer.requires_grad for buffer in engine._model.buffers())
    owned = {name for expert in (1, 3) for name in expert_shapes(RUN.model, expert)}
    expected = owned | set(shared_shapes(RUN.model))
    kinds = ("master", "exp_avg", "exp_avg_sq")
    state = engine.state_dict()
    assert set(state.tensors) == {f"{kind}.{name}" for kind in kinds for name in expected}


def test_micro_batches_accumulate_the_mean_of_their_losses():
    rows = batch(RUN, 0)
    engine, by_hand = new_engine(RUN, [0, 1]), new_engine(RUN, [0, 1])
    losses = [by_hand._model.losses(micro, RUN.loss) for micro in rows.split(2)]
    (sum(loss.total for loss in losses) / 2).backward()
    norm = torch.cat([p.grad.flatten() for p in by_hand._model.trained_parameters().values()])
    stats = engine.step(rows, lr=1e-2)
    # The same fp32 sums, added up in another order.
    assert stats.loss == pytest.approx(sum(loss.total.item() for loss in losses) / 2, rel=1e-6)
    assert stats.grad_norm == pytest.approx(norm.norm().item(), rel=1e-5)
    assert stats.cross_entropy < stats.loss
    assert stats.tokens == 4 * 16
    assert [sum(layer) for layer in stats.expert_tokens] == [2 * 64, 2 * 64]
    assert not stats.skipped


def test_gradients_are_clipped_to_the_global_norm_of_what_is_trained(make_engine):
    run = tiny_run(optimizer={"clip_norm": 1e-3, "weight_decay": 0.0})
    engine = make_engine(run, [0, 1])
    engine.step(batch(run, 0), lr=1e-2)
    means = [t for n, t in engine.state_dict().tensors.items() if n.startswith("exp_avg.")]
    # After one update the first moment is (1 - 0.9) of the clipped gradient. Clipping divides by
    # norm + 1e-6, and the norm is about 1.
    clipped = torch.cat([mean.flatten() for mean in means]).norm().item() / 0.1
    assert clipped == pytest.approx(1e-3, rel=1e-4)


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(caplog):
    engine = new_engine(RUN, [0, 1])
    train(engine, 2)
    head = poison(engine, "lm_head.weight")
    before = frozen_copy(engine)
    with caplog.at_level(logging.WARNING):
        (stats,) = train(engine, 1)
    assert stats.skipped
    assert "step skipped" in caplog.text
    after = engine.state_dict()
    assert same(before.tensors, after.tensors)
    assert (after.updates, after.skipped, after.skipped_in_a_row) == (2, 1, 1)
    assert all(p.grad is None for p in engine._model.parameters())
    engine.write(head)
    assert not train(engine, 1)[0].skipped
    assert engine.state_dict().skipped_in_a_row == 0
    assert engine.skipped == 1


def test_a_gradient_that_is_not_finite_under_a_finite_loss_is_skipped_too():
    engine = new_engine(RUN, [0, 1])
    before = weights(engine)
    handle = engine._model.trained_parameters()["model.norm.weight"].register_hook(
        lambda gradient: torch.full_like(gradient, float("inf"))
    )
    (stats,) = train(engine, 1)
    handle.remove()
    assert stats.skipped
    assert stats.loss < 100
    assert same(weights(engine), before)


def test_three_skipped_steps_in_a_row_are_divergence(make_engine):
    engine = make_engine(RUN, [0, 1])
    train(engine, 1)
    head = poison(engine, "lm_head.weight")
    train(engine, 2)
    engine.write(head)
    train(engine, 1)
    poison(engine, "lm_head.weight")
    train(engine, 2)
    with pytest.raises(TrainingDiverged, match="3 steps in a row"):
        train(engine, 1)


def test_skips_in_a_row_survive_a_restart(make_engine):
    engine = make_engine(RUN, [0, 1])
    poison(engine, "lm_head.weight")
    train(engine, 2)
    again = make_engine(RUN)
    again.load_state_dict(frozen_copy(engine))
    with pytest.raises(TrainingDiverged):
        train(again, 1)


def test_going_on_from_a_saved_state_gives_the_same_bits(make_engine):
    straight, stopped = make_engine(RUN, [0, 3]), make_engine(RUN, [0, 3])
    train(straight, 8)
    train(stopped, 4)
    state, foreign = frozen_copy(stopped), weights(stopped)
    again = make_engine(RUN)
    again.load_state_dict(state)
    again.write({name: foreign[name] for e in (1, 2) for name in expert_shapes(RUN.model, e)})
    train(again, 4, start=4)
    assert same(weights(again), weights(straight))
    assert same(again.state_dict().tensors, straight.state_dict().tensors)
    assert again.state_dict().updates == 8


def test_moving_experts_keeps_bits_and_moments_of_those_that_stay(make_engine):
    engine = make_engine(RUN, [0, 1])
    train(engine, 3)
    before, state = weights(engine), frozen_copy(engine)
    engine.own([1, 2])
    assert engine.owned == (1, 2)
    assert same(weights(engine), before)
    after = engine.state_dict()
    assert after.updates == 3
    for kind in ("exp_avg", "exp_avg_sq"):
        for name in [*shared_shapes(RUN.model), *expert_shapes(RUN.model, 1)]:
            assert torch.equal(after.tensors[f"{kind}.{name}"], state.tensors[f"{kind}.{name}"])
        for name in NAMES_2:
            assert not after.tensors[f"{kind}.{name}"].any()
        assert not any(f"{kind}.{name}" in after.tensors for name in expert_shapes(RUN.model, 0))


def test_owning_the_same_experts_again_changes_nothing(make_engine):
    engine = make_engine(RUN, [0, 1])
    train(engine, 2)
    before = frozen_copy(engine)
    engine.own([1, 0])
    assert same(before.tensors, engine.state_dict().tensors)


def test_training_goes_on_after_experts_moved(make_engine):
    engine = make_engine(RUN, [0, 1])
    train(engine, 2)
    engine.own([2])
    before = weights(engine)
    train(engine, 2, start=2)
    after = weights(engine)
    changed = {
        e for e in range(4) for n in expert_shapes(RUN.model, e) if (before[n] != after[n]).any()
    }
    assert changed == {2}


def test_masters_stay_fp32_when_computing_in_bf16(make_engine):
    engine = make_engine(tiny_run(train={"compute": "bf16", "frozen": "bf16"}), [0, 1])
    losses = [stats.cross_entropy for stats in train(engine, 3)]
    assert all(2 < loss < 7 for loss in losses)
    assert {t.dtype for t in engine.state_dict().tensors.values()} == {torch.float32}
    master = engine.read(["lm_head.weight"])["lm_head.weight"]
    assert not torch.equal(master, master.bfloat16().float())


def test_evaluation_computes_in_fp32_whatever_training_does(make_engine):
    tokens = batch(RUN, 50)
    found = []
    for compute in ("fp32", "bf16"):
        found.append(make_engine(tiny_run(train={"compute": compute}), [0]).evaluate(tokens))
    assert found[0] == found[1]


def test_training_goes_on_in_bf16_after_an_evaluation(make_engine):
    run = tiny_run(train={"compute": "bf16"})
    looked, blind = make_engine(run, [0]), make_engine(run, [0])
    looked.evaluate(batch(run, 50))
    assert train(looked, 1) == train(blind, 1) != train(new_engine(RUN, [0]), 1)


def test_evaluation_is_the_mean_over_tokens_also_with_a_smaller_last_micro_batch(make_engine):
    tokens = torch.cat([batch(RUN, 50), batch(RUN, 51)])[:5]
    engine = make_engine(RUN, [0])
    rows = [engine.evaluate(row[None]) for row in tokens]
    # fp32 sums over 16 or 32 tokens, added up in another order.
    assert engine.evaluate(tokens) == pytest.approx(sum(rows) / 5, rel=1e-6)


def test_evaluation_counts_only_what_is_scored(make_engine):
    tokens, engine = batch(RUN, 50), make_engine(RUN, [0])
    scored = torch.zeros(tokens.shape[0], tokens.shape[1] - 1, dtype=torch.bool)
    scored[:, :3] = True
    scored[0, 3:7] = True
    heads = [engine.evaluate(tokens[1:, :4]), engine.evaluate(tokens[:1, :8])]
    wanted = (heads[0] * 3 * (len(tokens) - 1) + heads[1] * 7) / (3 * (len(tokens) - 1) + 7)
    assert engine.evaluate(tokens, scored_BT=scored) == pytest.approx(wanted, rel=1e-6)
    assert engine.evaluate(tokens, scored_BT=torch.ones_like(scored)) == engine.evaluate(tokens)


@pytest.mark.parametrize("frozen", ["fp32", "bf16"])
def test_evaluation_uses_replaced_values_and_leaves_every_bit(make_engine, frozen):
    run = tiny_run(train={"frozen": frozen})
    engine, other = make_engine(run, [0, 1]), make_engine(run, [0, 1])
    train(engine, 2)
    names = [*expert_shapes(run.model, 0), *expert_shapes(run.model, 1)]
    stand_ins = {
        name: (tensor * 3).bfloat16().float() for name, tensor in other.read(names).items()
    }
    before, state = weights(engine), frozen_copy(engine)
    tokens = batch(run, 50)
    plain = engine.evaluate(tokens)
    replaced = engine.evaluate(tokens, agreed=stand_ins.__getitem__)
    assert replaced != plain
    assert same(weights(engine), before)
    assert same(engine.state_dict().tensors, state.tensors)
    engine.write(stand_ins)
    assert engine.evaluate(tokens) == replaced


def test_an_evaluation_that_fails_leaves_every_bit_as_well():
    engine = new_engine(tiny_run(train={"compute": "bf16"}), [0, 1])
    before = weights(engine)
    names = list(expert_shapes(RUN.model, 0))
    stand_ins = {name: torch.zeros_like(tensor) for name, tensor in engine.read(names).items()}
    with pytest.raises(IndexError):
        engine.evaluate(torch.full((2, 17), 9999), agreed=stand_ins.__getitem__)
    assert same(weights(engine), before)
    assert engine._model.compute == torch.bfloat16


def test_what_is_read_does_not_change_when_training_goes_on(make_engine):
    engine = make_engine(RUN, [0, 1])
    before = weights(engine)
    copies = {name: tensor.clone() for name, tensor in before.items()}
    train(engine, 1)
    assert same(before, copies)


@pytest.mark.parametrize("hidden_size, owned", [(32, [0]), (16, [0, 1])])
def test_a_state_of_another_model_is_refused_and_nothing_overwritten(
    make_engine, hidden_size, owned
):
    other = make_engine(tiny_run(model={"hidden_size": hidden_size}), owned)
    state = replace(frozen_copy(other), owned=(0,))
    engine = make_engine(RUN, [3])
    before = weights(engine)
    with pytest.raises(CorruptState):
        engine.load_state_dict(state)
    assert same(weights(engine), before)
    assert engine.owned == (3,)


def test_moments_that_are_read_and_written_elsewhere_are_the_same_bits(make_engine):
    giver, taker = make_engine(RUN, [1, 2]), make_engine(RUN, [2])
    train(giver, 3)
    moments = giver.read_moments(NAMES_2)
    assert set(moments) == {
        f"{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in NAMES_2
    }
    assert all(moments[name].any() for name in moments)
    taker.write_moments(moments)
    assert same(taker.read_moments(NAMES_2), moments)
    state = giver.state_dict().tensors
    assert all(torch.equal(moments[name], state[name]) for name in moments)


def test_only_the_written_experts_moments_change(make_engine):
    engine = make_engine(RUN, [1, 2])
    train(engine, 2)
    other, zeros = engine.read_moments(NAMES_1), {}
    for name, tensor in engine.read_moments(NAMES_2).items():
        zeros[name] = torch.zeros_like(tensor)
    engine.write_moments(zeros)
    assert same(engine.read_moments(NAMES_2), zeros) and same(engine.read_moments(NAMES_1), other)


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, id="fp32"),
        pytest.param({"train": {"compute": "bf16"}}, id="bf16"),
        pytest.param({"optimizer": {"clip": "unit"}}, id="clipped by unit"),
        pytest.param(
            {
                "model": {"scoring_func": "sigmoid"},
                "routing": {"bias_update_rate": 0.01},
                "loss": {"balance_weight": 0.0},
            },
            id="moved selection biases",
        ),
        pytest.param({"model": {"noisy_top_k": True, "norm_topk_prob": True}}, id="noisy"),
    ],
)
def test_a_rehearsal_changes_no_bit_of_what_comes_after(make_engine, sections):
    run = tiny_run(**sections)
    rehearsed, plain = make_engine(run, [0, 2]), make_engine(run, [0, 2])
    micro = run.train.micro_batch_sequences
    for step in range(3):
        random_state = torch.get_rng_state()
        before = rehearsed.state_dict()
        tensors = {name: tensor.clone() for name, tensor in before.tensors.items()}
        rehearsed.rehearse(batch(run, 100 + step)[:micro])
        rehearsed.rehearse(batch(run, 100 + step)[:1, :9])
        after = rehearsed.state_dict()
        assert torch.equal(torch.get_rng_state(), random_state)
        assert same(dict(after.tensors), tensors)
        assert replace(after, tensors={}) == replace(before, tensors={})
        assert rehearsed.step(batch(run, step), lr=1e-2) == plain.step(batch(run, step), lr=1e-2)
    assert same(rehearsed.read(all_names(run)), plain.read(all_names(run)))
    assert same(dict(rehearsed.state_dict().tensors), dict(plain.state_dict().tensors))


def test_a_rehearsal_takes_no_more_memory_than_a_step():
    """Gradients of the trained tensors live during both, and after neither."""
    engine = new_engine(RUN, [0, 2])
    parameters = list(engine._model.trained_parameters().values())
    engine.rehearse(batch(RUN, 0)[: RUN.train.micro_batch_sequences])
    assert all(parameter.grad is None for parameter in parameters)
