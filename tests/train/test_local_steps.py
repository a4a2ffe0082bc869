import time

import pytest
import torch

from swarm.data.corpus import open_corpus
from swarm.data.loader import Loader, held_out_sequences, held_out_tokens
from swarm.data.shards import open_shards
from swarm.errors import TrainingDiverged
from swarm.train.engine import StepStats
from swarm.train.local_steps import train_local_steps
from swarm.train.schedule import guidance_at, learning_rate
from tests.train.runs import LENGTH, all_names, new_engine, patterned_shards, same, tiny_run

RUN = tiny_run()


class Recorder:
    """Stands where an engine would, notes what it is asked and answers from a list."""

    def __init__(self, losses):
        self.losses, self.asked = iter(losses), []

    def step(self, tokens_BT1, *, lr, guidance):
        self.asked.append((tokens_BT1, lr, guidance))
        loss = next(self.losses)
        tokens = ((32, 96), (64, 64))
        return StepStats(loss, loss - 1, 0.0, 0.0, 0.0, 1.0, 64, tokens, skipped=loss != loss)


def run_steps(engine, *, step=0, local_steps=3, stop=lambda: False, on_step=lambda *_: None):
    with Loader(patterned_shards(), RUN, data_index=2) as loader:
        return train_local_steps(
            engine,
            loader,
            RUN,
            step=step,
            local_steps=local_steps,
            batch_tokens=4 * LENGTH,
            stop=stop,
            on_step=on_step,
        )


def test_batches_and_learning_rates_are_those_of_the_runs_cumulative_steps():
    engine, told = Recorder([5.0, 4.0, 3.0]), []
    stats = run_steps(engine, step=7, on_step=lambda step, _: told.append(step))
    with Loader(patterned_shards(), RUN, data_index=2) as loader:
        for step, (tokens_BT1, lr, guidance) in zip((7, 8, 9), engine.asked, strict=True):
            assert torch.equal(tokens_BT1, loader.read(step, 4 * LENGTH))
            assert lr == learning_rate(step, RUN)
            assert guidance == guidance_at(step, RUN, 2, probe=step == 9)
    assert told == [7, 8, 9]
    assert (stats.steps, stats.tokens, stats.skipped, stats.completed) == (3, 192, 0, True)
    assert (stats.loss, stats.cross_entropy) == (4.0, 3.0)


def test_the_loop_ends_before_the_next_step_when_the_tip_has_moved():
    engine = Recorder([5.0, 4.0, 3.0])
    stats = run_steps(engine, stop=lambda: len(engine.asked) == 2)
    assert (stats.steps, stats.tokens, stats.completed) == (2, 128, False)


def test_a_loop_that_is_stopped_at_once_has_no_loss():
    stats = run_steps(Recorder([]), stop=lambda: True)
    assert (stats.steps, stats.loss, stats.cross_entropy, stats.completed) == (0, None, None, False)


def test_skipped_steps_are_counted_and_left_out_of_the_loss():
    stats = run_steps(Recorder([5.0, float("nan"), 3.0]))
    assert (stats.steps, stats.skipped, stats.loss) == (3, 1, 4.0)


def test_divergence_ends_the_loop_before_anything_could_be_offered():
    engine = new_engine(RUN, [0, 1])
    engine.write({"model.norm.weight": torch.full((16,), float("nan"))})
    with pytest.raises(TrainingDiverged):
        run_steps(engine)


def test_two_halves_give_the_bits_of_the_whole():
    whole, halves = new_engine(RUN, [0, 1]), new_engine(RUN, [0, 1])
    run_steps(whole, local_steps=6)
    run_steps(halves)
    run_steps(halves, step=3)
    assert same(whole.read(all_names(RUN)), halves.read(all_names(RUN)))


def test_peers_with_other_streams_differ_after_a_step():
    engines = [new_engine(RUN, [0, 1]) for _ in range(2)]
    for index, engine in enumerate(engines):
        with Loader(patterned_shards(), RUN, data_index=index) as loader:
            engine.step(loader.batch(0, 4 * LENGTH), lr=1e-2)
    assert not same(*(engine.read(all_names(RUN)) for engine in engines))


def test_the_demo_model_learns_the_standard_library(tmp_path):
    """60 steps of 512 bytes; measured 5.55 -> 2.66 nats per byte, on this Python's text."""
    run = tiny_run(
        model={
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts": 8,
            "moe_intermediate_size": 128,
        },
        data={"sequence_length": 64, "validation_tokens": 8192},
        train={"batch_tokens": 512, "micro_batch_sequences": 8, "frozen": "bf16"},
        optimizer={"lr": 4e-3, "warmup_steps": 20, "schedule_steps": 400},
    )
    corpus = open_corpus(None)
    held_out_BT1 = held_out_sequences(held_out_tokens(corpus.documents(), 8192), 64)
    engine = new_engine(run, range(8))
    before = engine.evaluate(held_out_BT1)
    started_s = time.monotonic()
    with Loader(open_shards(corpus, tmp_path), run, data_index=0) as loader:
        train_local_steps(
            engine,
            loader,
            run,
            step=0,
            local_steps=60,
            batch_tokens=512,
            # A machine that needs a minute for what takes three seconds fails, not hangs.
            stop=lambda: time.monotonic() > started_s + 60,
            on_step=lambda *_: None,
        )
    # ln 260 = 5.56: a model that knows nothing yet.
    assert before == pytest.approx(5.56, abs=0.05)
    assert engine.evaluate(held_out_BT1) < 3.0
