"""Masters and moments cut over ranks: the bits of one process.

Bytes held and moved are in `tests/train/planning/test_memory_of_ranks.py`, stages in
`test_pipeline.py`.
"""

import logging
from dataclasses import replace

import pytest
import torch

from swarm.model.initial_weights import initial_tensors
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.guard import norm_of
from swarm.train.engine.optimizer_moments import BLOCK
from swarm.train.parallel.sharded_state import STEP, Cut, ShardedEngine
from tests.train.crews import assert_holders_answer, lent_engines
from tests.train.runs import all_names, batch, new_engine, same, tiny_run
from tests.train.team import together
from tests.train.workers.test_parallel import (
    BF16,
    CLIPPED,
    OWNED,
    RUN,
    THEN,
    WIDE,
    allow_no_more,
    assert_a_hang_costs_nothing,
    assert_a_kill_costs_nothing,
    assert_equal,
    is_same,
    train,
)

MUON = {"optimizer": {"kind": "muon", "clip_norm": 0.1}}
ALONE = {"micro_batch_sequences": 1}
SLOW = pytest.mark.exhaustive
BF16_ALONE = {**CLIPPED, "train": {**BF16["train"], **ALONE}}


@pytest.fixture
def cut(crews):
    """Makes engines whose state is cut over two workers."""
    with lent_engines(crews, shards=2) as make:
        yield make


# ------------------------------------------------ the cut


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("rows, size", [(1, 16), (1, 1000), (3, 256), (5, 300), (8, 4096)])
def test_runs_cover_a_parameter_once_and_begin_where_updates_may(form, rows, size):
    for ways in (1, 2, 3, 8):
        cut = Cut.of(rows, size, ways, form)
        assert (cut.bounds[0], cut.bounds[-1]) == (0, rows * size)
        pieces = [each for rank in range(ways) for each in cut.pieces("x", rank)]
        flat = [index for each in pieces for index in range(rows * size)[each.in_whole]]
        assert flat == list(range(rows * size))
        step = BLOCK if form == "int8" else STEP
        assert all(each.start % step == 0 for each in pieces)
        in_rows = [cut.in_row(rank, 0) for rank in range(ways)]
        assert sum(part.stop - part.start for part in in_rows) == size
        longest = max(b - a for a, b in zip(cut.bounds, cut.bounds[1:], strict=False))
        assert longest <= rows * size / ways + step
        for piece in pieces:
            parts = list(cut.together(piece, 512))
            assert (parts[0][0].start, parts[-1][0].stop) == (piece.start, piece.stop)
            assert all(whole.start % 512 == 0 for _, whole in parts)


# ------------------------------------------------ the same bits


def engine_of(ranks, run, owned=OWNED, kind=ShardedEngine, **options):
    chosen = replace(EngineOptions.of(run), shards=ranks.size, **options)
    engine = kind(run, chosen, ranks)
    engine.write(initial_tensors(run, all_names(run)))
    engine.own(owned)
    return engine


def found(engine, run):
    """Five clipped steps, with other experts after the third, and the engine's final state."""
    stats = train(engine, run, range(3))
    engine.own(THEN)
    stats += train(engine, run, range(3, 5))
    assert all(step.grad_norm > run.optimizer.clip_norm for step in stats)
    names = [name for name in all_names(run) if getattr(engine, "holds", bool)(name)]
    state = {name: each.clone() for name, each in engine.state_dict().tensors.items()}
    return stats, engine.evaluate(batch(run, 9)), engine.read(names), state


TWO, IDLE = (BF16, 2), (BF16, 4)


@pytest.mark.parametrize(
    "sections, size, moments",
    [
        pytest.param(CLIPPED, 2, "fp32", id="fp32", marks=SLOW),  # with processes below
        pytest.param(CLIPPED, 2, "bf16", id="fp32, bf16 moments", marks=SLOW),
        pytest.param(*TWO, "fp32", id="bf16"),
        pytest.param(*TWO, "bf16", id="bf16, bf16 moments"),
        pytest.param(*TWO, "int8", id="bf16, int8 moments"),
        pytest.param(BF16_ALONE, 4, "fp32", id="four in bf16"),
        pytest.param({**CLIPPED, "train": ALONE}, 4, "fp32", id="four in fp32", marks=SLOW),
        pytest.param(*IDLE, "fp32", id="four, two of them idle", marks=SLOW),
        pytest.param(*IDLE, "int8", id="two idle, int8 moments"),
        pytest.param({**BF16, **MUON}, 2, "fp32", id="Muon, bf16"),
        pytest.param({**MUON, "train": ALONE}, 4, "int8", id="Muon, four, int8 moments"),
        pytest.param({**BF16, **MUON}, 2, "bf16", id="Muon, bf16 moments", marks=SLOW),
    ],
)
def test_five_steps_equal_those_of_one_process_in_every_bit(sections, size, moments):
    run = tiny_run(**sections)
    stats, loss, values, state = found(new_engine(run, OWNED, moments=moments), run)

    def work(ranks):
        return found(engine_of(ranks, run, moments=moments), run)

    for mine in together(size, work):
        assert mine[:2] == (stats, loss)
        assert same(mine[2], values) and same(mine[3], state)


@pytest.mark.parametrize(
    "sections", [CLIPPED, pytest.param(BF16, marks=SLOW)], ids=["fp32", "bf16"]
)
def test_two_workers_equal_one_process_in_every_bit(cut, sections):
    run = tiny_run(**sections)
    assert_equal(run, cut(run, OWNED), new_engine(run, OWNED))


def test_two_by_two_with_dealt_experts_are_within_2_percent_of_the_learning_rate():
    """As in tests/train/saving/test_expert_parallel.py, because the order of sums differs."""
    run = tiny_run(**CLIPPED, train=ALONE)
    stats, loss, values, state = found(new_engine(run, OWNED), run)
    union = {}
    for mine in together(4, lambda ranks: found(engine_of(ranks, run, ep=2), run)):
        assert [s.loss for s in mine[0]] == pytest.approx([s.loss for s in stats], abs=1e-5)
        assert mine[1] == pytest.approx(loss, rel=1e-5)
        for name, value in mine[2].items():
            torch.testing.assert_close(value, values[name], rtol=0, atol=0.02 * 1e-2)
        union |= mine[3]
    assert union.keys() == state.keys()


class InFp32(ShardedEngine):
    """Rounds the squares of each share to fp32."""

    def _norms(self, scale):
        own = self._gradients_by_name()
        names = list(own)
        squares = torch.zeros(self._ranks.size, len(names), dtype=torch.float64)
        each = [torch.linalg.vector_norm(own[name]) ** 2 for name in names]
        squares[self._ranks.rank] = torch.stack(each).double()
        return dict(zip(names, norm_of(self._ranks.united(squares).sum(0), scale), strict=True))


def test_norms_of_shares_in_fp32_are_noticed():
    straight = train(new_engine(RUN, OWNED), RUN, range(3))
    right, wrong = (
        together(2, lambda ranks, kind=kind: train(engine_of(ranks, RUN, kind=kind), RUN, range(3)))
        for kind in (ShardedEngine, InFp32)
    )
    assert right[0] == straight and wrong[0] != straight


class SkipsIdle(ShardedEngine):
    """Leaves out the sums if it has no micro-batch."""

    def _add_up(self):
        if self._ranks.block(2):
            super()._add_up()


def test_an_idle_rank_that_skips_an_operation_is_noticed():
    with pytest.raises((AssertionError, RuntimeError)):
        together(4, lambda ranks: train(engine_of(ranks, RUN, kind=SkipsIdle), RUN, [0]))


# ------------------------------------------------ values, states, faults


def test_whoever_asks_reads_and_writes_every_tensor(cut):
    run = tiny_run(train={"compute": "bf16"})
    engine = cut(run, OWNED)
    train(engine, run, range(2))
    names = ["model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"]
    state = engine.state_dict().tensors
    assert all(state[f"master.{name}"].dtype is torch.float32 for name in names)
    for name in names:
        value = torch.randn(state[f"master.{name}"].shape)
        engine.write({name: value})
        assert torch.equal(engine.read([name])[name], value)
    assert_holders_answer(engine, run, ["model.norm.weight"])


@pytest.mark.parametrize("moments", [pytest.param("bf16", marks=SLOW), "int8"])
def test_a_state_goes_on_in_one_process_and_comes_back(cut, moments):
    run = tiny_run(**BF16)
    engine, straight = cut(run, OWNED, moments=moments), new_engine(run, OWNED, moments=moments)
    for each in (engine, straight):
        train(each, run, range(2))
    resident, back = new_engine(run, moments=moments), cut(run, moments=moments)
    resident.load_state_dict(engine.state_dict())
    resident.write(engine.read([n for n in all_names(run) if ".experts.0." in n]))
    resident.write(engine.read([n for n in all_names(run) if ".experts.2." in n]))
    assert is_same(run, resident, straight)
    back.load_state_dict(resident.state_dict())
    for each in (back, resident):
        train(each, run, range(2, 4))
    assert is_same(run, back, resident)


def test_a_worker_that_is_killed_in_a_step_costs_no_bit(cut, caplog):
    run = tiny_run(**BF16)
    engine, straight = cut(run, OWNED), new_engine(run, OWNED)
    assert train(engine, run, range(2)) == train(straight, run, range(2))
    assert_a_kill_costs_nothing(engine, straight, run, 1, caplog)
    assert is_same(run, engine, straight)


@SLOW
def test_a_worker_that_hangs_costs_no_bit(cut, caplog):
    assert_a_hang_costs_nothing(cut, caplog)


@SLOW
def test_workers_without_memory_for_a_whole_state_cut_it(cut, caplog):
    below = replace(EngineOptions.of(WIDE), shards=2)
    engine, straight = cut(WIDE, OWNED, shards=1, below=[below]), new_engine(WIDE, OWNED)
    allow_no_more(engine.pids[1])
    with caplog.at_level(logging.WARNING):
        assert train(engine, WIDE, range(2)) == train(straight, WIDE, range(2))
    assert "stepping down to resident, masters and moments cut over 2" in caplog.text
