"""Figures of each worker: their inputs, and the worker that they name."""

import json
import time
from dataclasses import asdict, replace

import pytest
import torch

from swarm.model.initial_weights import initial_tensors
from swarm.train.engine.engine_options import EngineKind, EngineOptions
from swarm.train.engine.mesh import bubble_of
from swarm.train.engine.rank_figures import RankFigures, folded, together
from swarm.train.engine.ranks import Watch
from swarm.train.parallel.data_parallel import RankEngine
from tests.train import team
from tests.train.crews import lent_engines
from tests.train.parallel.test_dispatch import EXPERT_KINDS
from tests.train.runs import all_names, batch, new_engine, tiny_run

SLEEP_S = 0.4
RANK = RankFigures(
    seconds=2.0,
    micro_batches=2,
    operations={"sums": 2},
    num_bytes={"sums": 800},
    waited_s={"sums": 0.5},
)


def test_shares_are_those_of_the_longest_step():
    found = folded([RANK, replace(RANK, seconds=2.5, waited_s={"sums": 0.75, "numbers": 0.25})])
    assert found.step_s == 2.5
    assert found.shares == {"numbers": 0.05, "sums": 0.25}
    assert (found.number, found.idle, found.slowest, found.bubble) == (2, (), None, None)
    assert found.words() == "2 workers, 2.5 s a step; between them: sums 25%, numbers 5%"
    assert folded([RANK]) is folded([]) is None, "one process waits for nobody"


def test_who_is_slow_is_named_with_what_is_known_of_the_reason():
    slow = replace(RANK, seconds=2.1, waited_s={"sums": 0.0})
    found = folded([RANK, slow, RANK])
    assert found.slowest == 1
    assert found.why == "worker 1 computes 2.1 s a step, others 1.5, with as many micro-batches"
    more = replace(slow, micro_batches=3)
    found = folded([replace(RANK, idle=1), more, replace(RANK, idle=1)])
    assert found.idle == (0, 2)
    assert found.why == "worker 1 computes 2.1 s a step, others 1.5: 3 micro-batches, not 2"
    assert "fewer micro-batches than others: worker 0, 2" in found.words()
    stages = [replace(RANK, stage=k, stages=2, pipeline_s=1.5, stage_s=1.5 - k) for k in (0, 1)]
    found = folded(stages)
    assert (found.slowest, found.why[-12:]) == (0, "stage 1 of 2")


@pytest.mark.parametrize("stages, micro_batches", [(2, 4), (4, 4), (4, 32)])
def test_the_bubble_of_even_stages_is_that_of_the_formula(stages, micro_batches):
    """It includes waits of a rank before and after its own part of the schedule."""
    slots = micro_batches + stages - 1
    ranks = [
        RankFigures(
            steps=3,
            seconds=3 * slots,
            micro_batches=3 * micro_batches,
            stage=stage,
            stages=stages,
            pipeline_s=3 * (slots - stage / 2),
            stage_s=3 * micro_batches,
        )
        for stage in range(stages)
    ]
    found = folded(ranks)
    assert found.bubble == pytest.approx(found.expected)
    assert found.expected == bubble_of(stages, micro_batches) == (stages - 1) / slots
    assert f"bubble {found.bubble:.0%}, {found.bubble:.0%} with even stages" in found.words()


def test_steps_add_up_until_the_workers_are_others():
    other = replace(RANK, waited_s={"values": 0.5})
    found = together([(RANK,) * 3, (RANK, other), (RANK, RANK), (other, RANK)])
    assert len(found) == 2 and found[0].steps == 3
    assert found[0].waited_s == {"sums": 1.0, "values": 0.5}
    assert (found[1].seconds, found[1].operations) == (6.0, {"sums": 6})
    assert together([(RANK, RANK), ()]) == together([]) == ()


@pytest.mark.gpu
def test_seconds_on_a_gpu_are_those_of_its_queue():
    """They exclude the host's time of filling the queue."""
    watch, gpu = Watch(), torch.device("cuda")
    matrix = torch.ones(8192, 8192, device=gpu)
    matrix @ matrix
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(2):
        with watch.timing("products", gpu):
            for _ in range(20):
                matrix @ matrix
    queued_s = time.perf_counter() - began_s
    found = watch.take()
    # Its clock differs from the host's.
    assert queued_s < found["products"] < 1.01 * (time.perf_counter() - began_s)
    assert watch.take() == {}


def ranks_of(run, size, slow=None):
    """Figures of a step by threads. One of them may have a layer that sleeps."""

    def work(ranks):
        engine = RankEngine(run, EngineOptions.of(run), ranks)
        engine.write(initial_tensors(run, all_names(run)))
        if ranks.rank == slow:
            layer = engine._model.model.layers[0]
            layer.register_forward_pre_hook(lambda *_: time.sleep(SLEEP_S))
        ranks.traffic.take()
        began_s = time.perf_counter()
        engine.step(batch(run, 0), lr=1e-3)
        return engine.figures(len(batch(run, 0)), time.perf_counter() - began_s)

    return team.together(size, work)


def test_a_rank_that_is_slow_is_named_and_the_others_wait_for_it():
    found = ranks_of(tiny_run(train={"micro_batch_sequences": 1}), 2, slow=1)
    assert [rank.micro_batches for rank in found] == [2, 2]
    assert found[0].waited_s["sums"] > found[1].waited_s["sums"] + SLEEP_S / 2
    assert found[1].own_s > 2 * SLEEP_S
    folded_ = folded(found)
    assert folded_.slowest == 1 and folded_.why.endswith("with as many micro-batches")


def test_a_rank_with_fewer_micro_batches_is_named():
    run = tiny_run(train={"batch_tokens": 3 * 16, "micro_batch_sequences": 1})
    found = ranks_of(run, 2)
    assert [(rank.micro_batches, rank.idle) for rank in found] == [(1, 1), (2, 0)]
    assert folded(found).idle == (0,)


@pytest.mark.parametrize(
    "options, kinds",
    [
        ({}, {"sums"}),
        ({"shards": 2}, {"sums", "values"}),
        ({"ep": 2}, {"sums", *EXPERT_KINDS}),
        ({"pp": 2}, set()),
        ({"kind": EngineKind.STREAMING}, {"sums"}),
    ],
    ids=["whole", "cut", "dealt out", "stages", "streaming"],
)
def test_each_step_tells_of_all_workers(crews, options, kinds):
    run = tiny_run(train={"micro_batch_sequences": 1})
    with lent_engines(crews, **options) as make:
        engine = make(run, [1, 3])
        engine.step(batch(run, 0), lr=1e-3)
        stats = engine.step(batch(run, 1), lr=1e-3)
    straight = new_engine(run, [1, 3])
    straight.step(batch(run, 0), lr=1e-3)
    alone = straight.step(batch(run, 1), lr=1e-3)
    assert alone.workers == ()
    assert alone == stats or "ep" in options, "figures make no difference between steps"
    ranks = stats.workers
    assert len(ranks) == 2 and ranks[0].moved == engine.traffic
    for rank in ranks:
        assert rank.waited_s.keys() == kinds | {"numbers"}
        assert 0 < sum(rank.waited_s.values()) < rank.seconds
        assert rank.own_s > 0
        assert (rank.stages, rank.idle) == (options.get("pp", 1), 0)
        assert (0 < rank.stage_s < rank.pipeline_s < rank.seconds) == ("pp" in options)
    found = folded(ranks)
    assert found.expected == (1 / 5 if "pp" in options else None)
    assert json.loads(json.dumps(asdict(found)))["number"] == 2
