"""How long the stages of a pipeline wait for each other, with layers that sleep.

So long that a busy machine hardly counts.
"""

import time
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist

from swarm.model.initialise import initial_tensors
from swarm.train.options import EngineOptions
from swarm.train.parallel.figures import RankFigures, folded
from swarm.train.parallel.ranks import Ranks
from swarm.train.parallel.staged import StageEngine
from tests.train.runs import all_names, batch, tiny_run

pytestmark = [pytest.mark.exhaustive, pytest.mark.alone]

STAGES = MICRO_BATCHES = 4
FORWARD_S, BACKWARD_S = 0.4, 0.8


def sleeping_stage(rank, schedule, folder):
    """Seconds of the fastest of some steps, with a layer in each stage."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=STAGES
    )
    run = tiny_run(model={"num_hidden_layers": STAGES}, train={"micro_batch_sequences": 1})
    options = EngineOptions(frozen="fp32", pp=STAGES, schedule=schedule)
    engine = StageEngine(run, options, Ranks(rank, STAGES, torch.device("cpu")))
    engine.write(initial_tensors(run, all_names(run)))
    engine.step(batch(run, 0), lr=1e-3)
    layer = engine._model.model.layers[rank]
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


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_wait_as_long_as_the_formula_says(tmp_path, schedule):
    """(p - 1) / (m + p - 1) of a step, within 10 % of it; the figures of the ranks say so too."""
    torch.multiprocessing.spawn(sleeping_stage, (schedule, tmp_path), nprocs=STAGES)
    ranks = [RankFigures(**torch.load(tmp_path / f"{rank}.pt")) for rank in range(STAGES)]
    waiting = 1 - MICRO_BATCHES * (FORWARD_S + BACKWARD_S) / max(rank.seconds for rank in ranks)
    expected = (STAGES - 1) / (MICRO_BATCHES + STAGES - 1)
    assert waiting == pytest.approx(expected, rel=0.1)
    found = folded(ranks)
    assert found.expected == expected
    assert found.bubble == pytest.approx(expected, rel=0.1)
    assert found.slowest is None
