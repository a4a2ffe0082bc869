import logging

import pytest
import torch

from swarm.errors import OutOfMemory
from swarm.model.initialise import initial_tensors
from swarm.model.transformer import Transformer
from swarm.train.hardware import Machine
from swarm.train.ladder import Wishes, rungs
from swarm.train.options import EngineKind
from swarm.train.stepping import SteppingEngine
from swarm.train.streaming.device import DeviceSide
from swarm.train.streaming.units import HostUnit
from tests.train.runs import all_names, batch, new_engine, same, tiny_run

OWNED = [1, 3]
RUN = tiny_run()
BF16 = tiny_run(train={"compute": "bf16", "frozen": "bf16"})


def stepping(run, **wishes):
    machine = Machine("cpu", 0, 8e9, 1e9, cores=3)
    first, *below = rungs(run, machine, Wishes(moments="fp32", **wishes))
    engine = SteppingEngine(run, first, below)
    engine.write(initial_tensors(run, all_names(run)))
    engine.own(OWNED)
    return engine


def full(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words")


@pytest.mark.parametrize("run", [RUN, BF16], ids=["fp32", "bf16"])
def test_a_step_that_does_not_fit_is_made_by_the_engine_below(monkeypatch, caplog, run):
    engine, straight = stepping(run, recompute="none"), new_engine(run, OWNED)
    for step in range(2):
        engine.step(batch(run, step), lr=1e-2)
        straight.step(batch(run, step), lr=1e-2)
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(Transformer, "losses", full)
        stats = engine.step(batch(run, 2), lr=1e-2)
    assert engine.options.kind is EngineKind.STREAMING
    assert stats == straight.step(batch(run, 2), lr=1e-2)
    assert "stepping down to streaming, every layer is streamed" in caplog.text
    assert "Tried to allocate 2.00 GiB" in caplog.text
    assert "More words" not in caplog.text
    for step in range(3, 6):
        assert engine.step(batch(run, step), lr=1e-2) == straight.step(batch(run, step), lr=1e-2)
    assert same(engine.read(all_names(run)), straight.read(all_names(run)))
    assert engine.state_dict().updates == 6
    engine.close()


def test_an_evaluation_that_does_not_fit_steps_down_too(monkeypatch):
    engine = stepping(RUN, recompute="none")
    wanted = new_engine(RUN, OWNED).evaluate(batch(RUN, 9))
    monkeypatch.setattr(Transformer, "losses", full)
    assert engine.evaluate(batch(RUN, 9)) == wanted
    engine.close()


def test_an_engine_that_cannot_be_made_is_passed_over(monkeypatch):
    monkeypatch.setattr(Transformer, "__init__", full)
    engine = stepping(RUN)
    assert engine.options.kind is EngineKind.STREAMING
    assert engine.owned == tuple(OWNED)
    engine.close()


def test_the_last_rung_has_nothing_below(monkeypatch):
    engine = stepping(RUN)
    monkeypatch.setattr(Transformer, "losses", full)
    monkeypatch.setattr(DeviceSide, "take_layer", full)
    with pytest.raises(OutOfMemory, match="is left: CUDA out of memory") as caught:
        engine.step(batch(RUN, 0), lr=1e-2)
    assert "swarm-plan" in caught.value.hint
    engine.close()  # as the peer does that is ended by this


def test_memory_that_runs_out_within_an_update_ends_the_peer(monkeypatch):
    engine = stepping(RUN, engine="streaming")

    def piece(*_):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(HostUnit, "update_piece", piece)
        with pytest.raises(OutOfMemory, match="in the middle of an update"):
            for step in range(2):
                engine.step(batch(RUN, step), lr=1e-2)
    assert not engine.intact
    engine.close()


def test_other_errors_are_no_reason_to_step_down(monkeypatch):
    engine = stepping(RUN)

    def broken(*_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(Transformer, "losses", broken)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        engine.step(batch(RUN, 0), lr=1e-2)
    assert engine.options.kind is EngineKind.RESIDENT
