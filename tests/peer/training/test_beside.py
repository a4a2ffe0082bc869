"""Work during the steps: its inputs do not change, and its changes wait for their turn."""

import math
import threading
from contextlib import closing
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from swarm.experts import Slice
from swarm.model.initial_weights import initial_tensors
from swarm.model.transformer import Transformer
from swarm.network.blobs.disk_retry import patiently
from swarm.peer.training.offering import BackgroundWork
from swarm.train.engine.hardware import Machine
from swarm.train.engine.resident import ResidentEngine
from swarm.train.fallback_engine import SteppingEngine
from swarm.train.planning.ladder import Wishes, rungs
from swarm.train.streaming.device import DeviceSide
from swarm.train.streaming.host_model import HostUnit
from tests.train.runs import all_names, batch, new_engine, new_streaming, same, tiny_run


def test_its_result_is_waited_for():
    may_end, making = threading.Event(), BackgroundWork[int]()
    making.begin(lambda: may_end.wait(30.0) and 7)
    assert making.is_running
    may_end.set()
    assert making.result() == 7
    assert not making.is_running
    assert making.result() == 7
    making.begin(lambda: 8)
    assert making.result() == 8


def test_its_error_is_raised_where_the_result_is_wanted():
    making = BackgroundWork[int]()
    making.begin(Mock(side_effect=KeyError("lost")))
    making.wait()
    with pytest.raises(KeyError, match="lost"):
        making.result()


def test_what_it_has_to_change_is_done_by_the_thread_that_waits():
    done: list[threading.Thread] = []
    making = BackgroundWork[int]()
    making.in_turn(lambda: done.append(threading.current_thread()))  # nothing runs: at once

    def work() -> int:
        making.in_turn(lambda: done.append(threading.current_thread()))
        with pytest.raises(ZeroDivisionError):
            making.in_turn(lambda: 1 // 0)
        return len(done)

    making.begin(work)
    assert making.result() == 2
    assert done == [threading.current_thread()] * 2


def test_without_a_thread_it_is_done_at_once(monkeypatch):
    cannot = Mock(side_effect=RuntimeError("can't start new thread"))
    making = BackgroundWork[threading.Thread]()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", cannot)
        making.begin(threading.current_thread)
    assert not making.is_running
    assert making.result() is threading.current_thread()
    making.begin(threading.current_thread)
    assert making.result() is not threading.current_thread()


def test_work_that_waits_for_itself_is_told_that_memory_is_short():
    """An engine without memory waits for its readers, then makes room. The reader itself cannot."""
    making = BackgroundWork[int]()

    def work() -> int:
        with pytest.raises(MemoryError, match="at the same time"):
            making.wait()
        making.in_turn(wait_within)
        return 7

    def wait_within() -> None:
        with pytest.raises(MemoryError, match="at the same time"):
            making.wait()

    making.begin(work)
    assert making.result() == 7


def test_a_read_beside_a_step_that_lacks_memory_is_made_when_the_step_waits(monkeypatch):
    run, pauses = tiny_run(), []
    first, *below = rungs(run, Machine("cpu", 0, 8e9, 1e9, cores=3), Wishes(moments="fp32"))
    engine, making = SteppingEngine(run, first, below), BackgroundWork[Tensor]()
    engine.write(initial_tensors(run, all_names(run)))
    engine.own([1])
    name = all_names(run)[0]
    value, part = engine.read([name])[name].view(-1)[:9], Slice(name, 0, 9)
    has_gone, waits = threading.Event(), threading.Event()
    read, losses = ResidentEngine.read_part, Transformer.losses

    def read_part(self: ResidentEngine, part: Slice) -> Tensor:
        if not has_gone.is_set():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read(self, part)

    def products(*arguments, **named):
        assert waits.wait(30.0)
        return losses(*arguments, **named)

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        waits.set()
        assert has_gone.wait(30.0)

    def wait() -> None:
        if making.is_running:
            has_gone.set()
            making.wait()

    monkeypatch.setattr(ResidentEngine, "read_part", read_part)
    monkeypatch.setattr(Transformer, "losses", products)
    assert engine.before_update(wait)
    making.begin(lambda: patiently(lambda: engine.read_part(part), "offered value", pause))
    engine.step(batch(run, 0), lr=1e-2)
    assert not making.is_running, "the step waited for it"
    assert torch.equal(making.result(), value)
    assert engine.options == first, "a mere reader made no room"
    assert len(pauses) == 1


@pytest.mark.parametrize("make", [new_engine, new_streaming])
def test_no_value_changes_before_a_step_was_let_through(make):
    run = tiny_run()
    engine, names, seen = make(run, owned=[0, 1]), all_names(run), []
    engine.step(batch(run, 0), lr=1e-2)
    before = engine.read(names)
    assert engine.before_update(lambda: seen.append(engine.read(names)))
    engine.step(batch(run, 1), lr=1e-2)
    assert len(seen) == 1
    assert same(seen[0], before)
    assert not same(engine.read(names), before)
    engine.close()


@pytest.mark.parametrize("make", [new_engine, new_streaming])
def test_a_skipped_step_waits_too_as_values_may_change_once_it_has_returned(make):
    run, seen = tiny_run(), []
    engine, names = make(run, owned=[0, 1]), all_names(run)
    engine.write({names[0]: engine.read(names[:1])[names[0]] * math.nan})
    before = engine.read(names)
    assert engine.before_update(lambda: seen.append(engine.read(names)))
    assert engine.step(batch(run, 0), lr=1e-2).skipped
    engine.close()
    assert len(seen) == 1
    assert same(seen[0], before)


def test_a_streaming_engine_is_read_while_layers_pass_and_has_finished_its_updates(monkeypatch):
    run = tiny_run()
    engine, names, seen = new_streaming(run, owned=[0, 1]), all_names(run), []
    with closing(new_streaming(run, owned=[0, 1])) as straight:
        straight.step(batch(run, 0), lr=1e-2)
        after_one = straight.read(names)
    may_update, update = threading.Event(), HostUnit.update_piece

    def late(*arguments) -> None:
        assert may_update.wait(30.0)
        update(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(HostUnit, "update_piece", late)
        engine.step(batch(run, 0), lr=1e-2)
        threading.Timer(0.1, may_update.set).start()
        assert engine.before_update(lambda: None)
        assert may_update.is_set(), "it has waited for the update"
    layers, take = [], DeviceSide.take_layer

    def take_layer(self: DeviceSide, layer: int):
        reader = threading.Thread(target=lambda: seen.append(engine.read(names)))
        reader.start()
        reader.join()
        layers.append(layer)
        return take(self, layer)

    monkeypatch.setattr(DeviceSide, "take_layer", take_layer)
    engine.step(batch(run, 1), lr=1e-2)
    assert len(layers) >= 2 * run.model.num_hidden_layers - 1
    assert all(same(each, after_one) for each in seen)
    engine.close()


def test_what_is_changed_while_a_step_waits_is_updated_by_it():
    """As where a refused unit starts again: both engines compute the same values."""
    run, made = tiny_run(), []
    for make in (new_engine, new_streaming):
        engine, names = make(run, owned=[0, 1]), all_names(run)
        anew = initial_tensors(run, names[:3])
        engine.step(batch(run, 0), lr=1e-2)
        assert engine.before_update(lambda engine=engine, anew=anew: engine.write(anew))
        engine.step(batch(run, 1), lr=1e-2)
        engine.before_update(lambda: None)
        stats = engine.step(batch(run, 2), lr=1e-2)
        made.append((stats, engine.read(names)))
        engine.close()
    assert made[0][0] == made[1][0]
    assert same(made[0][1], made[1][1])


def test_an_engine_whose_values_change_within_a_step_is_not_read_beside_it():
    engine = new_streaming(tiny_run(optimizer={"clip": "unit"}))
    assert not engine.before_update(lambda: None)
    engine.close()
