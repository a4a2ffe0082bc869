"""Experts distributed within the stages of a pipeline, and state cut over equal stages.

The tests share one crew of eight: two groups of two stages, whose experts two workers share.
"""

import pytest
import torch

from tests.train.crews import assert_holders_answer, lent_engines
from tests.train.engine.test_engine_routing import EVERYTHING
from tests.train.engine.test_pipeline import BF16, CHUNKS, EMBEDDING, FIVE, ONE_BY_ONE, run_of
from tests.train.runs import all_names, batch, new_engine, same
from tests.train.saving.test_expert_parallel import (
    assert_as_one_process,
    five_steps,
    handed_on,
    tensors,
)
from tests.train.test_masks import MASKED
from tests.train.workers.test_parallel import (
    OWNED,
    THEN,
    assert_a_kill_costs_nothing,
    assert_equal,
    assert_nan_changes_nothing,
    in_blocks,
    train,
)

SLOW = pytest.mark.exhaustive
EVERYTHING_FIVE = {**EVERYTHING, "train": {**EVERYTHING["train"], **FIVE["train"]}}
FOUR = {"workers": 4}
CUT = {"shards": 4}
RUN = run_of(3, **FIVE)


@pytest.fixture
def meshed(crews):
    """Makes engines of two groups of two stages. Two workers share each stage."""
    with lent_engines(crews, workers=8, ep=2, pp=2) as make:
        yield make


@pytest.mark.parametrize(
    "run, options",
    [
        # Five micro-batches over four pipelines: one of the last two accompanies the other.
        pytest.param(RUN, {}, id="one idle"),
        pytest.param(run_of(3, **EVERYTHING_FIVE), {}, id="every influence on routing", marks=SLOW),
        pytest.param(RUN, FOUR, id="one group", marks=SLOW),
        pytest.param(run_of(3, **EVERYTHING_FIVE), FOUR, id="one group, all", marks=SLOW),
        pytest.param(RUN, FOUR | {"schedule": "gpipe"}, id="gpipe", marks=SLOW),
        pytest.param(run_of(**ONE_BY_ONE), FOUR | {"recompute": "layer"}, id="again", marks=SLOW),
        pytest.param(run_of(**MASKED), FOUR, id="documents and padding", marks=SLOW),
        pytest.param(run_of(4, **FIVE), {"pp": 4}, id="four stages", marks=SLOW),
        pytest.param(run_of(5, **FIVE), CHUNKS, id="interleaved", marks=SLOW),
        pytest.param(
            run_of(4, **EVERYTHING_FIVE), FOUR | CHUNKS, id="interleaved, all", marks=SLOW
        ),
        pytest.param(run_of(**FIVE), {"ep": 4}, id="four seats", marks=SLOW),
        pytest.param(run_of(train={"batch_tokens": 32}), {}, id="a group without any", marks=SLOW),
        pytest.param(run_of(tied=True, **ONE_BY_ONE), {}, id="tied", marks=SLOW),
        pytest.param(RUN, CUT, id="state cut"),
        pytest.param(RUN, FOUR | {"shards": 2}, id="state cut, one group", marks=SLOW),
        pytest.param(run_of(tied=True, **ONE_BY_ONE), CUT, id="state cut, tied", marks=SLOW),
        pytest.param(run_of(3, **EVERYTHING_FIVE), CUT, id="state cut, all", marks=SLOW),
    ],
)
def test_in_fp32_five_steps_are_those_of_one_process(meshed, run, options):
    """Within 2 % of the learning rate, for the reason of `saving/test_expert_parallel.py`."""
    assert_as_one_process(run, meshed(run, OWNED, **options))


def test_in_bf16_the_loss_of_five_steps_is_that_of_one_process(meshed):
    run = run_of(3, **BF16)
    found, expected = five_steps(meshed(run, OWNED), run), five_steps(new_engine(run, OWNED), run)
    for mine, other in zip(found, expected, strict=True):
        assert mine.loss == pytest.approx(other.loss, abs=1e-3)


@pytest.mark.parametrize(
    "sections", [BF16, pytest.param(ONE_BY_ONE, marks=SLOW)], ids=["bf16", "fp32"]
)
def test_two_pipelines_of_four_with_cut_state_have_the_bits_of_one_process(meshed, sections):
    """One process that adds up as they do, in blocks."""
    run = run_of(4, **sections)
    assert_equal(run, meshed(run, OWNED, ep=1, pp=4, shards=2), in_blocks(run, 2))


@SLOW
@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_a_state_goes_on_in_one_process_bit_for_bit_and_comes_back(meshed, moments, cut):
    """With biases that a rule moves, and experts that have changed their worker."""
    sigmoid = {"model": {"scoring_func": "sigmoid"}, "routing": {"bias_update_rate": 0.01}}
    run = run_of(3, **sigmoid)
    engine, resident = meshed(run, OWNED, moments=moments, **cut), new_engine(run, moments=moments)
    train(engine, run, range(2))
    engine.own(THEN)
    train(engine, run, [2])
    handed_on(engine, resident, run)
    handed_on(resident, meshed(run, [2], moments=moments, **cut), run)


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_who_holds_a_tensor_reads_and_writes_it(meshed, cut):
    engine = meshed(RUN, OWNED, **cut)
    train(engine, RUN, range(2))
    shared = [EMBEDDING, "lm_head.weight", "model.layers.1.input_layernorm.weight"]
    assert_holders_answer(engine, RUN, shared)


@SLOW
@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_agreed_values_stand_in_for_masters_in_an_evaluation(meshed, cut):
    """With nine micro-batches, the last one smaller, and with none for most pipelines."""
    run = run_of(3)
    engine, straight = meshed(run, OWNED, **cut), new_engine(run, OWNED)
    before = straight.read(all_names(run))
    tokens_BT1 = torch.cat([batch(run, k) for k in range(5)])[:17]
    scored_BT = torch.arange(16).repeat(17, 1) % 3 > 0
    for rows in (17, 2):
        given = {"scored_BT": scored_BT[:rows], "agreed": lambda name: 20 * before[name]}
        expected = straight.evaluate(tokens_BT1[:rows], **given)
        assert engine.evaluate(tokens_BT1[:rows], **given) == pytest.approx(expected, rel=1e-5)
        plain = straight.evaluate(tokens_BT1[:rows], scored_BT=scored_BT[:rows])
        assert plain != pytest.approx(expected, rel=1e-5)
    assert same(engine.read(all_names(run)), before)


@SLOW
@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_a_step_that_is_not_finite_changes_nothing_anywhere(meshed, cut):
    engine = meshed(RUN, OWNED, **cut)
    assert_nan_changes_nothing(engine, RUN, "model.layers.2.mlp.experts.3.up_proj.weight")


@SLOW
def test_a_worker_that_is_killed_in_a_step_costs_no_bit(meshed, caplog):
    """Also after a change of ownership, which the new workers repeat."""
    engine, straight = meshed(RUN, OWNED, **FOUR), meshed(RUN, OWNED, **FOUR)
    for each in (engine, straight):
        train(each, RUN, range(2))
        each.own(THEN)
    assert_a_kill_costs_nothing(engine, straight, RUN, 2, caplog)
    assert same(engine.read(all_names(RUN)), straight.read(all_names(RUN)))
    assert same(tensors(engine), tensors(straight))
