"""Waits of the stages of a pipeline for each other, with sleeping layers.

So long that a busy machine hardly counts.
"""

import time
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

from swarm.model.initial_weights import initial_tensors
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.rank_figures import RankFigures, folded
from swarm.train.engine.ranks import Ranks
from swarm.train.parallel.pipeline import StageEngine
from tests.train.runs import all_names, batch, tiny_run

pytestmark = [pytest.mark.exhaustive, pytest.mark.alone]

STAGES = MICRO_BATCHES = 4
FORWARD_S, BACKWARD_S = 0.4, 0.8


def sleeping_stage(rank, schedule, chunks, folder):
    """Figures of the fastest of some steps, with a layer in each chunk of each stage."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=STAGES
    )
    layers = STAGES * chunks
    run = tiny_run(model={"num_hidden_layers": layers}, train={"micro_batch_sequences": 1})
    options = EngineOptions(frozen="fp32", pp=STAGES, schedule=schedule, chunks=chunks)
    engine = StageEngine(run, options, Ranks(rank, STAGES, torch.device("cpu")))
    engine.write(initial_tensors(run, all_names(run)))
    engine.step(batch(run, 0), lr=1e-3)
    for index in engine._model.stage.layers:
        layer = engine._model.model.layers[index]
        layer.register_forward_pre_hook(lambda *_: time.sleep(FORWARD_S))
        layer.register_full_backward_hook(lambda *_: time.sleep(BACKWARD_S))
    found = []
    for _ in range(3):
        dist.barrier()
        engine._ranks.traffic.take()
        began_s = time.monotonic()
        engine.step(batch(run, 0), lr=1e-3)
        found.append(engine.figures(MICRO_BATCHES, time.monotonic() - began_s))
    fastest = min(found, key=lambda figures: figures.seconds)
    torch.save(asdict(fastest), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_stages_wait_as_long_as_the_formula_says(tmp_path, schedule, chunks):
    """(p - 1) / (v m + p - 1) of a step, within 10 % of it, also by the figures of the ranks."""
    torch.multiprocessing.spawn(sleeping_stage, (schedule, chunks, tmp_path), nprocs=STAGES)
    ranks = [RankFigures(**torch.load(tmp_path / f"{rank}.pt")) for rank in range(STAGES)]
    busy_s = chunks * MICRO_BATCHES * (FORWARD_S + BACKWARD_S)
    waiting = 1 - busy_s / max(rank.seconds for rank in ranks)
    expected = (STAGES - 1) / (chunks * MICRO_BATCHES + STAGES - 1)
    assert waiting == pytest.approx(expected, rel=0.1)
    found = folded(ranks)
    assert found.expected == expected
    assert found.bubble == pytest.approx(expected, rel=0.1)
    assert found.slowest is None
