import itertools
import logging
import threading
from contextlib import closing
from unittest.mock import Mock

import pytest
import torch

from swarm.errors import OutOfMemory
from swarm.model import moe
from swarm.model.initial_weights import initial_tensors
from swarm.model.moe import ExpertBank
from swarm.model.transformer import Transformer
from swarm.train.engine.engine_options import EngineKind
from swarm.train.engine.hardware import Machine
from swarm.train.engine.host_memory import Arena, HostMemory
from swarm.train.engine.optimizer import OwnedOptimizer
from swarm.train.fallback_engine import SteppingEngine
from swarm.train.planning.ladder import Wishes, rungs
from swarm.train.streaming.device import DeviceSide
from swarm.train.streaming.host_model import FrozenUnit, HostStore, HostUnit
from tests.train.runs import all_names, batch, new_engine, same, tiny_run

OWNED = [1, 3]
MACHINE = Machine("cpu", 0, 8e9, 1e9, cores=3)
RUN = tiny_run()
BF16 = tiny_run(train={"compute": "bf16", "frozen": "bf16"})


def started(run, levels, owned=OWNED, **options):
    """An engine of these levels, with its values and experts."""
    first, *below = levels
    engine = SteppingEngine(run, first, below, **options)
    engine.write(initial_tensors(run, all_names(run)))
    engine.own(owned)
    return engine


def stepping(run, **wishes):
    return started(run, rungs(run, MACHINE, Wishes(moments="fp32", **wishes)))


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


@pytest.mark.parametrize("after", [0, 1], ids=["its own places", "those of training again"])
def test_a_held_out_loss_that_a_streaming_engine_has_no_room_for_steps_down(
    monkeypatch, tmp_path, after
):
    levels = two_streaming(RUN, tmp_path)
    engine, straight = started(RUN, levels), new_engine(RUN, OWNED)
    with monkeypatch.context() as patched:
        once(patched, DeviceSide, "_add_head", after=after)
        assert engine.evaluate(batch(RUN, 9)) == straight.evaluate(batch(RUN, 9))
    assert engine.options == levels[1]
    assert engine.step(batch(RUN, 0), lr=1e-2) == straight.step(batch(RUN, 0), lr=1e-2)
    engine.close()


def cublas(status):
    def failing(*_, **__):
        raise RuntimeError(
            f"CUDA error: CUBLAS_STATUS_{status} when calling `cublasCreate(handle)`"
        )

    return failing


@pytest.mark.parametrize("status", ["ALLOC_FAILED", "NOT_INITIALIZED"])
def test_a_handle_of_cublas_that_does_not_fit_steps_down_too(monkeypatch, status):
    engine, straight = stepping(RUN, recompute="none"), new_engine(RUN, OWNED)
    with monkeypatch.context() as patched:
        patched.setattr(Transformer, "losses", cublas(status))
        stats = engine.step(batch(RUN, 0), lr=1e-2)
    assert engine.options.kind is EngineKind.STREAMING
    assert stats == straight.step(batch(RUN, 0), lr=1e-2)
    engine.close()


def test_an_error_of_cublas_that_is_none_of_memory_is_raised(monkeypatch):
    engine = stepping(RUN, recompute="none")
    monkeypatch.setattr(Transformer, "losses", cublas("EXECUTION_FAILED"))
    with pytest.raises(RuntimeError, match="EXECUTION_FAILED"):
        engine.step(batch(RUN, 0), lr=1e-2)
    engine.close()


def test_an_engine_that_cannot_be_made_is_passed_over(monkeypatch):
    monkeypatch.setattr(Transformer, "__init__", full)
    engine = stepping(RUN)
    assert engine.options.kind is EngineKind.STREAMING
    assert engine.owned == tuple(OWNED)
    engine.close()


def once(monkeypatch, holder, name, *, after=0):
    """Memory runs out in one call of a method, after a number of successful ones."""
    method, calls = getattr(holder, name), itertools.count()

    def sometimes(*args, **named):
        return full() if next(calls) == after else method(*args, **named)

    monkeypatch.setattr(holder, name, sometimes)


def two_streaming(run, folder):
    return rungs(run, MACHINE, Wishes(engine="streaming", moments="fp32", folder=folder))


@pytest.mark.parametrize(
    ("holder", "method", "after", "engine_kind"),
    [
        pytest.param(DeviceSide, "_new_place", 0, "streaming", id="first place"),
        pytest.param(DeviceSide, "_add_head", 0, "streaming", id="head"),
        pytest.param(DeviceSide, "_accumulator", 1, "streaming", id="gradients"),
        pytest.param(ExpertBank, "own", 0, "auto", id="first layer"),
        pytest.param(ExpertBank, "own", 1, "auto", id="second layer"),
        pytest.param(moe, "empty_stack", 4, "auto", id="middle of the second layer"),
    ],
)
@pytest.mark.parametrize(
    ("run", "then"), [(RUN, [1, 3]), (BF16, [0, 2])], ids=["one more", "others, bf16"]
)
def test_experts_that_do_not_fit_are_owned_by_the_engine_below(
    monkeypatch, tmp_path, holder, method, after, engine_kind, run, then
):
    if engine_kind == "streaming":
        levels = two_streaming(run, tmp_path)
    else:
        levels = rungs(run, MACHINE, Wishes(moments="fp32"))
    engine, straight = started(run, levels, [1]), new_engine(run, [1])
    for step in range(2):
        assert engine.step(batch(run, step), lr=1e-2) == straight.step(batch(run, step), lr=1e-2)
    straight.own(then)
    with monkeypatch.context() as patched:
        once(patched, holder, method, after=after)
        engine.own(then)
    assert engine.options == levels[1] and engine.owned == tuple(then)
    assert same(engine.read(all_names(run)), straight.read(all_names(run)))
    for step in range(2, 4):
        assert engine.step(batch(run, step), lr=1e-2) == straight.step(batch(run, step), lr=1e-2)
    assert same(engine.read(all_names(run)), straight.read(all_names(run)))
    engine.close()


@pytest.mark.parametrize(
    ("holder", "method", "after", "kind"),
    [
        pytest.param(HostUnit, "hold", 0, "streaming", id="masters of the first layer"),
        pytest.param(HostUnit, "hold", 1, "streaming", id="masters of the second layer"),
        pytest.param(FrozenUnit, "_new_arena", 0, "streaming", id="frozen experts, first layer"),
        pytest.param(FrozenUnit, "_new_arena", 1, "streaming", id="frozen experts, second layer"),
        pytest.param(OwnedOptimizer, "_new_moments", 0, "auto", id="moments"),
        pytest.param(OwnedOptimizer, "_new_moments", 1, "streaming", id="moments on the host"),
    ],
)
def test_experts_that_have_moved_half_way_end_the_peer(monkeypatch, holder, method, after, kind):
    engine = stepping(RUN, engine=kind)
    once(monkeypatch, holder, method, after=after)
    with pytest.raises(OutOfMemory, match="of a change of experts: CUDA out of memory"):
        engine.own([0, 1, 3])
    assert not engine.intact
    engine.close()


def test_more_experts_than_are_predicted_to_fit_are_owned_by_an_engine_below(caplog):
    """Without a try, which might fail half way. The same number or fewer experts change nothing."""
    asked = []

    def fits(options, num_owned):
        asked.append(num_owned)
        return num_owned < 3 or options.kind is EngineKind.STREAMING

    levels = rungs(RUN, MACHINE, Wishes(moments="fp32"))
    assert levels[1].kind is EngineKind.RESIDENT
    engine, straight = started(RUN, levels, fits=fits), new_engine(RUN, OWNED)
    assert engine.step(batch(RUN, 0), lr=1e-2) == straight.step(batch(RUN, 0), lr=1e-2)
    assert engine.options == levels[0]
    engine.own([0, 1, 3])
    straight.own([0, 1, 3])
    assert engine.options.kind is EngineKind.STREAMING
    assert "(3 owned experts are predicted to need more)" in caplog.text
    assert engine.step(batch(RUN, 1), lr=1e-2) == straight.step(batch(RUN, 1), lr=1e-2)
    assert same(engine.read(all_names(RUN)), straight.read(all_names(RUN)))
    asked.clear()
    engine.own([0, 1, 3])
    engine.own([0])
    assert not asked
    engine.close()


def test_a_state_of_more_experts_than_are_predicted_to_fit_is_taken_by_an_engine_below():
    first, *below = rungs(RUN, MACHINE, Wishes(moments="fp32"))
    never = SteppingEngine(RUN, first, below, fits=lambda *_: False)
    straight = new_engine(RUN, OWNED)
    never.load_state_dict(straight.state_dict())
    assert never.options == below[-1], "the one with the least need"
    never.write(initial_tensors(RUN, all_names(RUN)))
    assert same(never.read(all_names(RUN)), straight.read(all_names(RUN)))
    never.close()


def test_the_last_rung_has_nothing_below(monkeypatch):
    engine = stepping(RUN)
    monkeypatch.setattr(Transformer, "losses", full)
    monkeypatch.setattr(DeviceSide, "take_layer", full)
    with pytest.raises(OutOfMemory, match="is left: CUDA out of memory") as caught:
        engine.step(batch(RUN, 0), lr=1e-2)
    assert "swarm-plan" in caught.value.hint
    engine.close()  # as the peer that this ends


def test_memory_that_runs_out_within_an_update_ends_the_peer(monkeypatch):
    engine = stepping(RUN, engine="streaming")
    with monkeypatch.context() as patched:
        patched.setattr(HostUnit, "update_piece", Mock(side_effect=MemoryError))
        with pytest.raises(OutOfMemory, match="in the middle of an update"):
            for step in range(2):
                engine.step(batch(RUN, step), lr=1e-2)
    assert not engine.intact
    engine.close()


def test_other_errors_are_no_reason_to_step_down(monkeypatch):
    engine = stepping(RUN)
    broken = Mock(side_effect=RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    monkeypatch.setattr(Transformer, "losses", broken)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        engine.step(batch(RUN, 0), lr=1e-2)
    assert engine.options.kind is EngineKind.RESIDENT


class Pages:
    """CUDA's record of host memory: the pinned addresses."""

    def __init__(self):
        self.pinned = set()

    def cudaHostRegister(self, address, _num_bytes, _flags):
        if address in self.pinned:
            return 712
        self.pinned.add(address)
        return 0

    def cudaHostUnregister(self, address):
        self.pinned.remove(address)


@pytest.fixture
def pages(monkeypatch):
    """All host memory of streaming engines is pinned, as for a GPU."""
    pages = Pages()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pages)

    def take(_, num_bytes, *, pinned=False, file=None):
        return Arena(num_bytes, pinned=file is None)

    monkeypatch.setattr(HostMemory, "take", take)
    return pages


def test_an_engine_that_cannot_be_made_pins_no_memory(monkeypatch, pages, tmp_path):
    first, *below = two_streaming(RUN, tmp_path)
    with monkeypatch.context() as patched:
        once(patched, DeviceSide, "__init__")
        engine = SteppingEngine(RUN, first, below)
    assert engine.options == below[0]
    of_one = len(pages.pinned)
    engine.close()
    assert not pages.pinned
    SteppingEngine(RUN, below[0]).close()
    with closing(SteppingEngine(RUN, below[0])):
        assert len(pages.pinned) == of_one
    assert not pages.pinned


def test_an_engine_that_cannot_take_over_a_state_leaves_nothing(monkeypatch, pages, tmp_path):
    def threads():
        return [thread.name for thread in threading.enumerate()].count("swarm-host")

    (first, last), before = two_streaming(RUN, tmp_path), threads()
    engine, straight = started(RUN, [first, last, last]), new_engine(RUN, OWNED)
    with monkeypatch.context() as patched:
        once(patched, HostStore, "load")
        once(patched, DeviceSide, "take_layer")
        assert engine.step(batch(RUN, 0), lr=1e-2) == straight.step(batch(RUN, 0), lr=1e-2)
    assert threads() == before + 1
    engine.close()
    assert not pages.pinned
