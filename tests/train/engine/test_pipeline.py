"""An engine whose layers are cut over its workers: the bits of one process."""

import logging
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from swarm.experts import expert_shapes
from swarm.train.engine.engine_options import EngineOptions
from tests.train.crews import assert_holders_answer, lent_engines
from tests.train.engine.test_engine_routing import EVERYTHING, SIGMOID
from tests.train.runs import all_names, batch, new_engine, same, tiny_run
from tests.train.test_masks import MASKED
from tests.train.workers.test_parallel import (
    CLIPPED,
    GLOBAL,
    OWNED,
    THEN,
    allow_no_more,
    assert_a_kill_costs_nothing,
    assert_equal,
    assert_nan_changes_nothing,
    in_blocks,
    is_same,
    train,
)

LR = 1e-2  # of `train`
SLOW = pytest.mark.exhaustive
ONE_BY_ONE = {"train": {"micro_batch_sequences": 1}}
BF16 = {"train": {"compute": "bf16", "frozen": "bf16", "micro_batch_sequences": 1}}
EVERYTHING_BF16 = {
    **EVERYTHING,
    "train": {**EVERYTHING["train"], "compute": "bf16", "frozen": "bf16"},
}
BY_UNIT = {"optimizer": {"clip": "unit", "clip_norm": 0.1}}
EMBEDDING = "model.embed_tokens.weight"


def run_of(layers=2, tied=False, **sections):
    merged = {**CLIPPED, **sections}
    sizes = {"num_hidden_layers": layers, "tie_word_embeddings": tied}
    return tiny_run(**{**merged, "model": {**merged.get("model", {}), **sizes}})


RUN = run_of(**ONE_BY_ONE)


@pytest.fixture
def piped(crews):
    """Makes engines of two stages."""
    with lent_engines(crews, pp=2) as make:
        yield make


FOUR = {"workers": 4, "pp": 4}
GPIPE = {"schedule": "gpipe"}
CHUNKS = {"schedule": "interleaved", "chunks": 2}
FIVE = {"train": {"micro_batch_sequences": 1, "batch_tokens": 5 * 16}}


@pytest.mark.parametrize(
    "run, options",
    [
        pytest.param(RUN, {}, id="fp32"),
        pytest.param(run_of(**BF16, loss={"balance": "global"}), GPIPE, id="bf16, gpipe, global"),
        pytest.param(run_of(**EVERYTHING), {}, id="every influence on routing"),
        # Five micro-batches are no even rounds of two, so the last one forms a second pass.
        pytest.param(run_of(5, **FIVE), CHUNKS, id="interleaved"),
        pytest.param(run_of(4, **EVERYTHING), CHUNKS, id="interleaved, all", marks=SLOW),
        pytest.param(run_of(4, **MASKED), CHUNKS, id="interleaved, documents", marks=SLOW),
        pytest.param(
            run_of(6, **ONE_BY_ONE), CHUNKS | {"chunks": 3}, id="three chunks", marks=SLOW
        ),
        pytest.param(run_of(8, **FIVE), FOUR | CHUNKS, id="four, interleaved", marks=SLOW),
        pytest.param(
            run_of(8, **GLOBAL, **ONE_BY_ONE),
            FOUR | CHUNKS | {"recompute": "routing"},
            id="four, interleaved, global",
            marks=SLOW,
        ),
        pytest.param(
            run_of(8, **EVERYTHING_BF16), FOUR | CHUNKS, id="four, interleaved, few", marks=SLOW
        ),
        pytest.param(run_of(**GLOBAL), {}, id="global", marks=SLOW),
        pytest.param(run_of(**EVERYTHING_BF16), {}, id="all, bf16", marks=SLOW),
        pytest.param(run_of(**MASKED), {}, id="documents and padding", marks=SLOW),
        pytest.param(run_of(**BY_UNIT), {}, id="clipped by unit", marks=SLOW),
        pytest.param(run_of(3, **ONE_BY_ONE), {"recompute": "layer"}, id="again", marks=SLOW),
        pytest.param(RUN, {"recompute": "routing"}, id="again, routing kept", marks=SLOW),
        pytest.param(RUN, {"moments": "bf16", "frozen": "int8"}, id="smaller", marks=SLOW),
        pytest.param(run_of(5, **EVERYTHING), FOUR, id="four, fewer micro-batches", marks=SLOW),
    ],
)
def test_five_steps_have_the_bits_of_one_process(piped, run, options):
    engine = piped(run, OWNED, **options)
    kept = {name: options[name] for name in ("moments", "frozen") if name in options}
    assert_equal(run, engine, new_engine(run, OWNED, **kept))


@SLOW
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("balance", ["per_layer", "global"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", [{}, GPIPE, CHUNKS], ids=["1f1b", "gpipe", "interleaved"])
def test_each_schedule_has_the_bits_of_one_process_with_each_loss(
    piped, schedule, stages, balance, compute
):
    sections = BF16 if compute == "bf16" else ONE_BY_ONE
    run = run_of(stages * schedule.get("chunks", 1), **sections, loss={"balance": balance})
    assert_equal(
        run, piped(run, OWNED, workers=stages, pp=stages, **schedule), new_engine(run, OWNED)
    )


@SLOW
@pytest.mark.parametrize("sections", [{}, {"train": {"batch_tokens": 32}}], ids=["two", "one idle"])
def test_two_pipelines_have_the_bits_of_one_process_that_adds_up_as_they_do(piped, sections):
    run = run_of(**(sections or ONE_BY_ONE))
    assert_equal(run, piped(run, OWNED, workers=4), in_blocks(run, 2))


CUT = {"workers": 4, "shards": 2}
UNEVEN = {"train": {"micro_batch_sequences": 1, "batch_tokens": 5 * 16}}


@SLOW
@pytest.mark.parametrize(
    "sections",
    [ONE_BY_ONE, BF16, {"train": {"batch_tokens": 32}}, UNEVEN],
    ids=["fp32", "bf16", "one idle", "uneven"],
)
def test_two_pipelines_with_cut_state_have_these_bits_too(piped, sections):
    run = run_of(**sections)
    assert_equal(run, piped(run, OWNED, **CUT), in_blocks(run, 2))


@SLOW
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_two_pipelines_with_cut_state_round_moments_as_with_whole_state(piped, moments):
    run = run_of(**BF16)
    whole, cut = (piped(run, OWNED, moments=moments, **each) for each in ({"workers": 4}, CUT))
    assert_equal(run, cut, whole)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"workers": 4, "pp": 4}, marks=SLOW),
        pytest.param(CUT, marks=SLOW),
        pytest.param(CHUNKS, marks=SLOW),
    ],
    ids=["two", "four", "two by two, state cut", "interleaved"],
)
def test_a_tied_embedding_is_one_tensor_that_is_held_twice(piped, options):
    """Within 2 % of the learning rate. One process adds the contributions of embedding and head for
    each micro-batch. A pipeline adds their totals over all micro-batches. The order of fp32 sums
    differs.
    """
    run = run_of(4, tied=True, **ONE_BY_ONE)
    engine, straight = piped(run, OWNED, **options), new_engine(run, OWNED)
    found, expected = train(engine, run, range(5)), train(straight, run, range(5))
    for mine, other in zip(found, expected, strict=True):
        assert mine.loss == pytest.approx(other.loss, abs=1e-5)
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    values, others = engine.read(all_names(run)), straight.read(all_names(run))
    for name, value in values.items():
        torch.testing.assert_close(value, others[name], rtol=0, atol=0.02 * LR)
    # The last stage evaluates with its own copy.
    resident = new_engine(run)
    resident.load_state_dict(engine.state_dict())
    resident.write(frozen_of(engine, run))
    assert engine.evaluate(batch(run, 9)) == resident.evaluate(batch(run, 9))


def frozen_of(engine, run):
    others = [e for e in range(run.model.num_experts) if e not in engine.owned]
    return engine.read([name for e in others for name in expert_shapes(run.model, e)])


def handed_on(engine, other, run):
    """The saved state of one engine equals the other engine's, and both continue alike."""
    other.load_state_dict(engine.state_dict())
    other.write(frozen_of(engine, run))
    assert is_same(run, engine, other)
    assert train(engine, run, [7]) == train(other, run, [7])
    assert is_same(run, engine, other)


@pytest.mark.parametrize("moments", ["fp32", pytest.param("int8", marks=SLOW)])
def test_a_state_goes_on_in_every_engine_and_comes_back(piped, moments):
    """With biases that a rule moves."""
    run = run_of(model={"scoring_func": "sigmoid"}, routing={"bias_update_rate": 0.01})
    assert run.model.scoring_func == SIGMOID.model.scoring_func
    engine, resident = piped(run, OWNED, moments=moments), new_engine(run, moments=moments)
    train(engine, run, range(2))
    engine.own(THEN)
    train(engine, run, [2])
    handed_on(engine, resident, run)
    handed_on(resident, piped(run, [0, 1, 2, 3], moments=moments), run)


@SLOW
def test_a_state_goes_on_with_other_numbers_of_stages(piped, crews):
    run = run_of(4, **ONE_BY_ONE)
    engine = piped(run, OWNED)
    train(engine, run, range(2))
    chunks = piped(run, **CHUNKS)
    handed_on(engine, chunks, run)
    handed_on(chunks, piped(run, workers=4, pp=4), run)
    with closing(crews.engine(run, workers=2)) as whole:
        whole.load_state_dict(engine.state_dict())
        whole.write(frozen_of(engine, run))
        assert is_same(run, engine, whole)


def test_who_holds_a_tensor_reads_and_writes_it(piped):
    engine = piped(RUN, OWNED)
    train(engine, RUN, range(2))
    shared = [EMBEDDING, "lm_head.weight", "model.layers.1.input_layernorm.weight"]
    assert_holders_answer(engine, RUN, shared)


def test_agreed_values_stand_in_for_masters_in_an_evaluation(piped):
    engine, straight = piped(RUN, OWNED), new_engine(RUN, OWNED)
    before = engine.read(all_names(RUN))
    values = [
        each.evaluate(batch(RUN, 1), agreed=lambda n: 2 * before[n]) for each in (engine, straight)
    ]
    assert values[0] == values[1] != engine.evaluate(batch(RUN, 1))
    assert same(engine.read(all_names(RUN)), before)
    # Nine micro-batches, the last one smaller, and predictions that do not count.
    tokens_BT1 = torch.cat([batch(RUN, k) for k in range(5)])[:17]
    scored_BT = torch.arange(16).repeat(17, 1) % 3 > 0
    for run, options in ((run_of(), {}), (run_of(4), CHUNKS)):
        engine, straight = piped(run, OWNED, **options), new_engine(run, OWNED)
        expected = straight.evaluate(tokens_BT1, scored_BT=scored_BT)
        assert engine.evaluate(tokens_BT1, scored_BT=scored_BT) == expected


def test_bytes_between_stages_are_those_of_the_formula(piped):
    """Per micro-batch the residual stream, and 2 E + 3 numbers of each layer above."""
    engine = piped(RUN, OWNED)
    engine.step(batch(RUN, 0), lr=LR)
    tokens, hidden, experts = 16, 16, 4
    each = 4 * (tokens * hidden + 2 * experts + 3)
    assert engine.traffic["stage outputs"] == (4, 4 * each)
    assert "stage gradients" not in engine.traffic  # of the first stage
    run = run_of(4, **ONE_BY_ONE)
    engine = piped(run, OWNED, **CHUNKS)
    first, second = engine.step(batch(run, 0), lr=LR).workers
    rows = {layers: 4 * (tokens * hidden + layers * (2 * experts + 3)) for layers in (1, 2, 3)}
    assert first.moved["stage outputs"] == (8, 4 * (rows[1] + rows[3]))
    assert first.moved["stage gradients"] == (4, 4 * rows[2])
    assert second.moved["stage outputs"] == (4, 4 * rows[2])
    assert (first.chunks, first.stages, first.micro_batches) == (2, 2, 4)


@SLOW
@pytest.mark.parametrize(
    ("run", "options"),
    [(RUN, {}), (RUN, CUT), (run_of(4, **ONE_BY_ONE), CHUNKS)],
    ids=["one pipeline", "two, state cut", "interleaved"],
)
def test_a_worker_that_is_killed_in_a_step_costs_no_bit(piped, caplog, run, options):
    engine = piped(run, OWNED, **options)
    straight = in_blocks(run, 2) if options == CUT else new_engine(run, OWNED)
    for each in (engine, straight):
        train(each, run, range(2))
        each.own(THEN)
    assert_a_kill_costs_nothing(engine, straight, run, 1, caplog)
    assert is_same(run, engine, straight)


@SLOW
@pytest.mark.parametrize("layers, options", [(2, {}), (4, CHUNKS)], ids=["1f1b", "interleaved"])
def test_a_stage_without_memory_steps_all_workers_down(piped, caplog, layers, options):
    """Also if torch's schedule raises it with its own text."""
    wide = run_of(
        layers,
        model={"hidden_size": 256, "moe_intermediate_size": 512},
        train={"micro_batch_sequences": 16, "batch_tokens": 32 * 16},
    )
    below = replace(EngineOptions.of(wide), pp=2, recompute="routing", **options)
    engine = piped(wide, OWNED, below=[below], **options)
    straight = new_engine(wide, OWNED)
    allow_no_more(engine.pids[1])
    with caplog.at_level(logging.WARNING):
        assert train(engine, wide, range(2)) == train(straight, wide, range(2))
    assert "stepping down to resident, layers computed again for backward, a pipeline of 2" in (
        caplog.text
    )
    assert is_same(wide, engine, straight)


def test_a_step_that_is_not_finite_changes_nothing_in_any_stage(piped):
    assert_nan_changes_nothing(piped(RUN, OWNED), RUN, "model.layers.1.mlp.gate.weight")
