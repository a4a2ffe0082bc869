"""An engine with experts distributed over its workers has the values of one with all of them."""

import logging
import os
import resource
import signal
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from swarm.errors import StateError
from swarm.experts import expert_shapes
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.mesh import deal
from swarm.train.saving.checkpoint import load_newest, load_private
from swarm.train.saving.hashed_file import folder_of
from swarm.train.workers import worker_tensors
from swarm.train.workers.command_history import Saved, deal_out
from tests.train.crews import assert_holders_answer, lent_engines
from tests.train.engine.test_engine_routing import EVERYTHING
from tests.train.runs import all_names, batch, new_engine, new_streaming, same, tiny_run
from tests.train.test_masks import MASKED
from tests.train.workers.test_parallel import (
    BF16,
    CLIPPED,
    OWNED,
    RUN,
    THEN,
    WIDE,
    allow_no_more,
    assert_a_kill_costs_nothing,
    save,
    train,
)

LR = 1e-2  # of `train`


@pytest.fixture
def dealt(crews):
    """Makes engines whose experts are distributed over two workers."""
    with lent_engines(crews, ep=2) as make:
        yield make


def tensors(engine):
    return dict(sorted(engine.state_dict().tensors.items()))


def five_steps(engine, run):
    """Five clipped steps, with other experts after the third."""
    stats = train(engine, run, range(3))
    engine.own(THEN)
    stats += train(engine, run, range(3, 5))
    assert all(step.grad_norm > run.optimizer.clip_norm for step in stats)
    return stats


SLOW = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "sections, workers, ep",
    [
        pytest.param(CLIPPED, 2, 2, id="two"),
        pytest.param({**EVERYTHING, **CLIPPED}, 2, 2, id="two, every influence on routing"),
        pytest.param({"optimizer": {"kind": "muon", "clip_norm": 0.1}}, 2, 2, id="two, Muon"),
        pytest.param({**MASKED, **CLIPPED}, 2, 2, id="two, documents and padding", marks=SLOW),
        pytest.param(CLIPPED, 4, 4, id="four, two of them idle", marks=SLOW),
        pytest.param({**EVERYTHING, **CLIPPED}, 4, 2, id="two by two, two idle", marks=SLOW),
        pytest.param(
            {**CLIPPED, "train": {"micro_batch_sequences": 1}}, 4, 4, id="four", marks=SLOW
        ),
        pytest.param(
            {**CLIPPED, "train": {"micro_batch_sequences": 1, "batch_tokens": 112}},
            4,
            2,
            id="two by two",
            marks=SLOW,
        ),
    ],
)
def test_in_fp32_five_steps_are_those_of_one_process(dealt, sections, workers, ep):
    """Within 2 % of the learning rate.

    A gradient of an expert is one product over the rows of all ranks of a group, while one process
    adds up those of its micro-batches. So the order of fp32 sums differs. AdamW divides by the
    gradient's own size, so a relative difference becomes the same share of its step.
    """
    run = tiny_run(**sections)
    engine = dealt(run, OWNED, workers=workers, ep=ep)
    assert_as_one_process(run, engine)
    assert engine.traffic["tokens"][0] >= run.model.num_hidden_layers


def assert_as_one_process(run, engine, straight=None):
    """Five steps, to 2 % of the learning rate, and an evaluation."""
    straight = straight or new_engine(run, OWNED)
    found, expected = five_steps(engine, run), five_steps(straight, run)
    for mine, other in zip(found, expected, strict=True):
        assert mine.loss == pytest.approx(other.loss, abs=1e-5)
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert (mine.expert_tokens, mine.dropped) == (other.expert_tokens, other.dropped)
        assert mine.similarity == pytest.approx(other.similarity, abs=1e-4)
    values, others = engine.read(all_names(run)), straight.read(all_names(run))
    assert values.keys() == others.keys()
    for name, value in values.items():
        torch.testing.assert_close(value, others[name], rtol=0, atol=0.02 * LR)
    assert tensors(engine).keys() == tensors(straight).keys()
    assert engine.evaluate(batch(run, 9)) == pytest.approx(straight.evaluate(batch(run, 9)), 1e-5)


def test_in_bf16_the_loss_of_five_steps_is_that_of_one_process(dealt):
    run = tiny_run(**BF16)
    engine, straight = dealt(run, OWNED), new_engine(run, OWNED)
    for mine, other in zip(five_steps(engine, run), five_steps(straight, run), strict=True):
        assert mine.loss == pytest.approx(other.loss, abs=1e-3)


# tests/train/workers/test_parallel.py tests it with replicas. The restart is the same.
@pytest.mark.exhaustive
def test_a_worker_that_is_killed_in_a_step_costs_no_bit(dealt, crews, caplog):
    """Also after a change of ownership, which the new workers repeat."""
    engine, straight = dealt(RUN, OWNED), dealt(RUN, OWNED)
    for each in (engine, straight):
        train(each, RUN, range(2))
        each.own(THEN)
    assert_a_kill_costs_nothing(engine, straight, RUN, 1, caplog)
    assert same(engine.read(all_names(RUN)), straight.read(all_names(RUN)))
    assert same(tensors(engine), tensors(straight))


@pytest.mark.exhaustive
def test_workers_without_memory_for_all_experts_share_them(dealt, caplog):
    below = replace(EngineOptions.of(WIDE), ep=2)
    engine, straight = dealt(WIDE, OWNED, ep=1, below=[below]), new_engine(WIDE, OWNED)
    assert "dealt out" not in engine.describe()
    allow_no_more(engine.pids[1])
    with caplog.at_level(logging.WARNING):
        found, expected = train(engine, WIDE, range(2)), train(straight, WIDE, range(2))
    assert "stepping down to resident, experts dealt out over 2" in caplog.text
    assert engine.describe() == "2 workers, each resident, experts dealt out over 2"
    assert [step.loss for step in found] == pytest.approx([step.loss for step in expected])


def frozen_of(engine, run):
    others = [e for e in range(run.model.num_experts) if e not in engine.owned]
    return engine.read([name for e in others for name in expert_shapes(run.model, e)])


def handed_on(engine, other, run):
    """The saved state of one engine equals the other engine's, and both continue alike."""
    other.load_state_dict(engine.state_dict())
    other.write(frozen_of(engine, run))
    assert same(other.read(all_names(run)), engine.read(all_names(run)))
    assert same(tensors(other), tensors(engine))
    (mine,), (theirs,) = train(engine, run, [7]), train(other, run, [7])
    assert mine.loss == pytest.approx(theirs.loss, abs=1e-5)


def test_bits_do_not_depend_on_who_holds_which_expert(dealt):
    """A new engine distributes differently: after a change of ownership most experts had stayed."""
    engine, fresh = dealt(RUN, OWNED), dealt(RUN)
    train(engine, RUN, range(2))
    engine.own(THEN)
    former = deal(OWNED, 4, 2, deal([], 4, 2))
    assert deal(THEN, 4, 2, former).owned != deal(THEN, 4, 2, deal([], 4, 2)).owned
    fresh.load_state_dict(engine.state_dict())
    fresh.write(frozen_of(engine, RUN))
    assert train(engine, RUN, range(2, 4)) == train(fresh, RUN, range(2, 4))
    assert same(fresh.read(all_names(RUN)), engine.read(all_names(RUN)))
    assert same(tensors(fresh), tensors(engine))


@pytest.mark.parametrize("moments", ["fp32", pytest.param("int8", marks=SLOW)])
def test_a_state_goes_on_in_every_engine_and_comes_back(dealt, crews, moments):
    engine = dealt(RUN, OWNED, moments=moments)
    train(engine, RUN, range(2))
    engine.own(THEN)
    train(engine, RUN, [2])
    with closing(crews.engine(RUN, moments=moments)) as whole:
        handed_on(engine, whole, RUN)
        handed_on(whole, dealt(RUN, [2], moments=moments), RUN)
    resident = new_engine(RUN, moments=moments)
    handed_on(engine, resident, RUN)
    handed_on(resident, dealt(RUN, moments=moments), RUN)
    with closing(new_streaming(RUN, moments=moments)) as streaming:
        handed_on(engine, streaming, RUN)
        handed_on(streaming, dealt(RUN, [0, 1, 2, 3], moments=moments), RUN)


def saved_and_resumed(engine, path, others, run):
    """The files hold the bits of the state, and each engine resumes from them as from memory."""
    save(path, engine.state_dict(), 1)
    assert len(list(folder_of(path).iterdir())) == len(engine.pids)
    assert same(dict(sorted(load_private(path).engine.tensors.items())), tensors(engine))
    for other in others:
        other.load_state_dict(load_private(path).engine)
        other.write(frozen_of(engine, run))
        assert same(tensors(other), tensors(engine))
        assert same(other.read(all_names(run)), engine.read(all_names(run)))


@pytest.mark.parametrize("workers, resumed_by", [(2, (2,)), pytest.param(4, (2, 1), marks=SLOW)])
def test_a_state_in_parts_goes_on_in_every_engine(dealt, crews, tmp_path, workers, resumed_by):
    run = tiny_run(**CLIPPED)
    engine = dealt(run, OWNED, workers=workers)
    train(engine, run, range(2))
    engine.own(THEN)
    train(engine, run, [2])
    others = [crews.engine(run, workers=size) for size in resumed_by]
    others += [new_engine(run), new_streaming(run)]
    try:
        saved_and_resumed(engine, tmp_path / "private", others, run)
        expected = [train(other, run, [7])[0].loss for other in others]
        assert train(engine, run, [7])[0].loss == pytest.approx(expected[0], abs=1e-5)
        assert expected == pytest.approx([expected[0]] * len(expected), abs=1e-5)
    finally:
        for other in others:
            other.close()


def test_workers_that_are_killed_while_they_save_begin_again(dealt, tmp_path, monkeypatch):
    """With the same bits, and from the state in parts that was saved before."""
    path = tmp_path / "private"
    engine = dealt(RUN, OWNED, given={"folder": tmp_path, "saved": Saved.at(path)})
    straight = new_engine(RUN, OWNED)
    train(engine, RUN, range(2))
    save(path, engine.state_dict(), 1)
    train(engine, RUN, [2])
    expected = {name: each.clone() for name, each in tensors(engine).items()}
    state = engine.state_dict()
    begin, killed = state.tensors.begin, []

    def begin_and_die(*args):
        left = begin(*args)
        if not killed:
            killed.append(engine.pids[1])
            os.kill(killed[0], signal.SIGKILL)
        return left

    monkeypatch.setattr(state.tensors, "begin", begin_and_die)
    save(path, state, 2)
    assert killed and killed[0] not in engine.pids
    assert engine._history.commands()[0].message["do"] == "part"
    assert load_newest(path).state.round == 2
    assert same(dict(sorted(load_private(path).engine.tensors.items())), expected)
    straight.load_state_dict(load_private(path).engine)
    assert same(tensors(straight), expected)


def test_workers_that_are_killed_before_they_save_may_have_other_experts(
    dealt, tmp_path, monkeypatch
):
    """Their replacements deal the experts out again, and are asked again who has which."""
    path = tmp_path / "private"
    engine = dealt(RUN, OWNED, given={"folder": tmp_path, "saved": Saved.at(path)})
    train(engine, RUN, [0])
    engine.own(THEN)
    former = deal(THEN, 4, 2, deal(OWNED, 4, 2))
    assert former.owned != deal(THEN, 4, 2).owned
    expected = {name: each.clone() for name, each in tensors(engine).items()}
    killed = []

    def deal_out_and_die(*given):
        if not killed:
            killed.append(engine.pids[1])
            os.kill(killed[0], signal.SIGKILL)
        return deal_out(*given)

    save(path, engine.state_dict(), 1)
    monkeypatch.setattr(worker_tensors, "deal_out", deal_out_and_die)
    save(path, engine.state_dict(), 2)
    assert killed and killed[0] not in engine.pids
    assert load_newest(path).state.round == 2
    assert same(dict(sorted(load_private(path).engine.tensors.items())), expected)


def test_a_disk_that_takes_no_more_of_a_worker_is_a_state_error(dealt, tmp_path):
    path = tmp_path / "private"
    engine = dealt(RUN, OWNED)
    save(path, engine.state_dict(), 1)
    train(engine, RUN, [0])
    limit = resource.prlimit(engine.pids[1], resource.RLIMIT_FSIZE)
    resource.prlimit(engine.pids[1], resource.RLIMIT_FSIZE, (4096, limit[1]))
    with pytest.raises(StateError, match="cannot be written"):
        save(path, engine.state_dict(), 2)
    resource.prlimit(engine.pids[1], resource.RLIMIT_FSIZE, limit)
    assert load_private(path).round == 1
    save(path, engine.state_dict(), 3)
    assert same(dict(sorted(load_private(path).engine.tensors.items())), tensors(engine))


def test_who_holds_an_expert_reads_and_writes_it(dealt):
    engine = dealt(RUN, OWNED)
    train(engine, RUN, range(2))
    assert_holders_answer(engine, RUN, ["model.norm.weight"])
