"""Several devices that stream from one host copy: the bits of one process, faults, bytes."""

import gc
import json
import logging
import os
import threading
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from swarm.errors import ConfigError, CorruptState
from swarm.experts import expert_of
from swarm.model.initial_weights import initial_tensors
from swarm.train.engine.engine_options import ActivationCheckpoints, EngineKind, EngineOptions
from swarm.train.engine.host_memory import LiveBytes, SharedMemory
from swarm.train.engine.optimizer_moments import BLOCK
from swarm.train.engine.ranks import Ranks
from swarm.train.parallel.streaming_rank import StreamingRank
from swarm.train.planning.memory import need_of, sizes_of
from swarm.train.saving.checkpoint import load_private
from swarm.train.saving.hashed_file import folder_of
from swarm.train.streaming.host_model import HostUnit, runs_of
from swarm.train.workers.crew import Crew, Place
from swarm.train.workers.exchange import options_message, options_of
from swarm.train.workers.parallel_engine import ParallelEngine
from tests.train.crews import assert_holders_answer, lent_engines, shared_crews
from tests.train.engine.test_engine_routing import EVERYTHING
from tests.train.engine.test_sharded import BF16_ALONE, found
from tests.train.loads import on_threads
from tests.train.planning.test_memory import OWNED as FOUR
from tests.train.planning.test_memory import sized, tokens_of
from tests.train.runs import all_names, batch, new_engine, new_streaming, same, tiny_run
from tests.train.team import together
from tests.train.test_masks import MASKED
from tests.train.workers.test_parallel import (
    BF16,
    BY_UNIT,
    CLIPPED,
    OWNED,
    RUN,
    WIDE,
    allow_no_more,
    assert_a_hang_costs_nothing,
    assert_a_kill_costs_nothing,
    assert_equal,
    assert_nan_changes_nothing,
    is_same,
    save,
    train,
)

SLOW = pytest.mark.exhaustive
STREAMING = {"kind": EngineKind.STREAMING, "host_threads": 1}
ALONE = {"micro_batch_sequences": 1}
HOST = {"activation_checkpoints": ActivationCheckpoints.HOST, "resident_layers": 1}


@pytest.fixture
def streaming(crews):
    """Makes engines of two workers that stream from one host copy."""
    with lent_engines(crews, **STREAMING) as make:
        yield make


@pytest.fixture
def cut_tensors(monkeypatch):
    """Makes updates in pieces smaller than these small tensors."""
    monkeypatch.setattr("swarm.train.engine.optimizer.PIECE", BLOCK)


def engine_of(ranks, run, owned=OWNED, kind=StreamingRank, **options):
    engine = kind(run, replace(EngineOptions.of(run), **{**STREAMING, **options}), ranks)
    engine.write(initial_tensors(run, all_names(run)))
    engine.own(owned)
    return engine


def work_of(run, work=found, **options):
    """The result of a rank, whose threads end afterwards."""

    def on_rank(ranks):
        engine = engine_of(ranks, run, **options)
        try:
            return work(engine, run)
        finally:
            engine.close()

    return on_rank


# ------------------------------------------------ shares


def test_runs_cover_a_buffer_once_begin_with_pieces_and_are_about_equal():
    begins = range(0, 40 * 256, 256)
    for ways in (1, 2, 3, 4, 7):
        runs = runs_of(begins, 40 * 256, ways)
        assert [index for run in runs for index in range(run.start, run.stop)] == [*range(40 * 256)]
        assert all(run.start in begins for run in runs)
        assert max(run.stop - run.start for run in runs) <= 40 * 256 / ways + 256
    # More processes than pieces: some have none.
    few = runs_of([0, 1024], 1280, 4)
    assert sum(run.stop - run.start for run in few) == 1280
    assert any(run.start == run.stop for run in few)


# ------------------------------------------------ the same bits

ONE_RING = {"gradient_buffers": 1}


@pytest.mark.parametrize(
    ("sections", "size", "options"),
    [
        pytest.param(CLIPPED, 2, {}, id="fp32"),
        pytest.param(BF16, 2, {"moments": "bf16"}, id="bf16, bf16 moments"),
        pytest.param(BF16, 2, {"moments": "int8", **HOST}, id="int8 moments, inputs on the host"),
        pytest.param({**BF16, **BY_UNIT}, 2, ONE_RING, id="bf16, clipped by unit"),
        pytest.param(BF16_ALONE, 4, {}, id="four in bf16"),
        pytest.param({**BF16_ALONE, **BY_UNIT}, 4, ONE_RING, id="four by unit", marks=SLOW),
        pytest.param({**CLIPPED, "train": ALONE}, 4, {}, id="four in fp32", marks=SLOW),
        pytest.param(BF16, 4, {"moments": "int8"}, id="four, two of them idle"),
        pytest.param({**EVERYTHING, **CLIPPED}, 2, {}, id="every influence on routing", marks=SLOW),
        pytest.param({**MASKED, **CLIPPED}, 2, {}, id="documents and padding", marks=SLOW),
    ],
)
def test_five_steps_equal_those_of_one_process_in_every_bit(sections, size, options, cut_tensors):
    run = tiny_run(**sections)
    moments = options.get("moments", "fp32")
    stats, loss, values, state = found(new_engine(run, OWNED, moments=moments), run)
    for mine in together(size, work_of(run, **options)):
        assert mine[:2] == (stats, loss)
        assert same(mine[2], values) and same(mine[3], state)


def test_tied_weights_agree_up_to_the_order_of_one_sum(cut_tensors):
    """A rank first adds the gradients of head and embedding of its own micro-batches."""
    run = tiny_run(**CLIPPED, model={"tie_word_embeddings": True})
    alone = new_streaming(run, OWNED)
    stats, _, values, _ = found(alone, run)
    alone.close()
    first, second = together(2, work_of(run))
    assert first[:2] == second[:2] and same(first[3], second[3])
    assert [s.loss for s in first[0]] == pytest.approx([s.loss for s in stats], abs=1e-5)
    for name, value in first[2].items():
        torch.testing.assert_close(value, values[name], rtol=0, atol=0.02 * 1e-2)


def test_several_passes_of_a_rank_are_added_up_on_the_host(cut_tensors):
    """The order differs from one process: 2 % of the learning rate, as everywhere."""
    run = tiny_run(**CLIPPED, train={**ALONE, "batch_tokens": 5 * 16})  # ranks have two and three
    stats, _, values, _ = found(new_engine(run, OWNED), run)
    first, second = together(2, work_of(run, pass_micro_batches=1))
    assert first[0] == second[0] and same(first[3], second[3])
    assert [s.loss for s in first[0]] == pytest.approx([s.loss for s in stats], abs=1e-5)
    for name, value in first[2].items():
        torch.testing.assert_close(value, values[name], rtol=0, atol=0.02 * 1e-2)


class SkipsIdle(StreamingRank):
    """Leaves out the sums of gradients in a step where it has no micro-batch."""

    def _go(self, one, update, *, last):
        place = {"rank": self._ranks.rank, "size": self._ranks.size}
        for each in self._device._accumulators if not one.micro_batches else ():
            each._ranks = SimpleNamespace(**place, add_up_shares=lambda _: None)
        return super()._go(one, update, last=last)


def test_an_idle_rank_that_skips_an_operation_is_noticed():
    with pytest.raises((AssertionError, RuntimeError)):
        together(4, work_of(RUN, lambda engine, run: train(engine, run, [0]), kind=SkipsIdle))


@pytest.mark.parametrize("sections", [BF16, {**BF16, **BY_UNIT}], ids=["global", "unit"])
def test_nobody_fetches_what_another_rank_still_updates(monkeypatch, cut_tensors, sections):
    run, update = tiny_run(**sections), HostUnit.update_piece

    def slow(unit, piece, *rest):
        time.sleep(0.002 * unit._memory.rank)  # the second rank is late with all its updates
        update(unit, piece, *rest)

    expected = train(new_engine(run, OWNED), run, range(3))
    monkeypatch.setattr(HostUnit, "update_piece", slow)
    for stats in together(2, work_of(run, lambda engine, run: train(engine, run, range(3)))):
        assert stats == expected


# ------------------------------------------------ processes


@pytest.mark.parametrize(
    ("sections", "options"),
    [
        pytest.param(BF16, {"moments": "int8"}, id="bf16"),
        pytest.param(BY_UNIT, ONE_RING, id="by unit", marks=SLOW),
    ],
)
def test_two_workers_equal_one_process_in_every_bit(streaming, sections, options):
    run = tiny_run(**sections)
    moments = options.get("moments", "fp32")
    engine = streaming(run, OWNED, **options)
    assert_equal(run, engine, new_engine(run, OWNED, moments=moments))
    assert engine.describe() == "2 workers, each streaming, every layer is streamed" + (
        ", int8 moments" if moments == "int8" else ""
    )


def test_whoever_asks_reads_and_writes_every_tensor(streaming):
    run = tiny_run(train={"compute": "bf16"})
    engine = streaming(run, OWNED)
    train(engine, run, range(2))
    assert_holders_answer(engine, run, ["model.norm.weight", "model.embed_tokens.weight"])
    # All compute with the written values.
    other = new_engine(run)
    other.load_state_dict(engine.state_dict())
    frozen = [n for n in all_names(run) if expert_of(n) in (0, 2)]
    other.write(engine.read(frozen))
    found, expected = (train(each, run, [2])[0] for each in (engine, other))
    assert replace(found, spike=False) == expected  # the usual norm is not part of a state
    assert_nan_changes_nothing(engine, run, "lm_head.weight")


@pytest.mark.parametrize("moments", [pytest.param("bf16", marks=SLOW), "int8"])
def test_a_state_goes_on_in_one_process_and_comes_back(streaming, moments):
    run = tiny_run(**BF16)
    engine, straight = (
        streaming(run, OWNED, moments=moments),
        new_engine(run, OWNED, moments=moments),
    )
    for each in (engine, straight):
        train(each, run, range(2))
    alone, back = new_streaming(run, moments=moments), streaming(run, moments=moments)
    alone.load_state_dict(engine.state_dict())
    frozen = [n for n in all_names(run) if expert_of(n) in (0, 2)]
    alone.write(engine.read(frozen))
    assert is_same(run, alone, straight)
    back.load_state_dict(alone.state_dict())
    back.write(alone.read(frozen))
    for each in (back, alone):
        train(each, run, range(2, 4))
    assert is_same(run, back, alone)
    alone.close()


def test_each_worker_writes_its_part_of_a_private_state(streaming, tmp_path):
    engine = streaming(RUN, OWNED)
    train(engine, RUN, [0])
    save(tmp_path / "private", engine.state_dict(), 1)
    sizes = [file.stat().st_size for file in folder_of(tmp_path / "private").iterdir()]
    assert len(sizes) == 2 and min(sizes) > 0.8 * max(sizes)
    loaded, state = load_private(tmp_path / "private").engine, engine.state_dict()
    assert same(dict(sorted(loaded.tensors.items())), dict(sorted(state.tensors.items())))
    train(engine, RUN, [1])


def test_a_state_of_another_model_is_refused_by_all_ranks():
    state = new_engine(tiny_run(model={"num_hidden_layers": 3}), OWNED).state_dict()

    def load(engine, _):
        with pytest.raises(CorruptState, match="belongs to another model"):
            engine.load_state_dict(state)

    together(2, work_of(RUN, load))


def test_a_state_without_a_moment_is_refused_by_all_ranks():
    state = new_engine(RUN, OWNED).state_dict()
    tensors = {n: t + 1 for n, t in state.tensors.items() if n != "exp_avg.model.norm.weight"}

    def load(engine, _):
        with pytest.raises(CorruptState):
            engine.load_state_dict(replace(state, tensors=tensors))

    together(2, work_of(RUN, load))


def test_a_worker_that_is_killed_in_a_step_costs_no_bit(streaming, caplog):
    run = tiny_run(**{**BF16, **BY_UNIT})
    engine, straight = streaming(run, OWNED), new_engine(run, OWNED)
    assert train(engine, run, range(2)) == train(straight, run, range(2))
    assert_a_kill_costs_nothing(engine, straight, run, 1, caplog)
    assert is_same(run, engine, straight)


@SLOW
def test_a_worker_that_hangs_costs_no_bit(streaming, caplog):
    assert_a_hang_costs_nothing(streaming, caplog)


@SLOW
@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ({}, STREAMING, "every layer is streamed"),
        (STREAMING, {**STREAMING, **HOST}, "1 of 2 layers stay on the device, activation "),
    ],
    ids=["resident", "streaming"],
)
def test_workers_without_memory_go_on_one_level_lower(caplog, first, then, words):
    below = replace(EngineOptions.of(WIDE), **then)
    with shared_crews() as new, lent_engines(new, **first) as make:
        engine, straight = make(WIDE, OWNED, below=[below]), new_engine(WIDE, OWNED)
        engine.rehearse(batch(WIDE, 0)[:1])  # its threads have begun
        allow_no_more(engine.pids[1])
        with caplog.at_level(logging.WARNING):
            assert train(engine, WIDE, range(2)) == train(straight, WIDE, range(2))
    assert f"stepping down to streaming, {words}" in caplog.text and "(worker 1: " in caplog.text


def test_memory_that_cannot_be_shared_is_a_lack_of_memory(monkeypatch):
    fails = Mock(side_effect=RuntimeError("unable to mmap 4096 bytes: Cannot allocate memory (12)"))
    monkeypatch.setattr(torch, "from_file", fails)
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        SharedMemory(Ranks(0, 1, torch.device("cpu"))).take(4096)


def test_workers_of_another_machine_are_refused_with_what_to_do(monkeypatch):
    where = os.readlink
    elsewhere = lambda path: where("/proc/self/fd/0") if is_second() else where(path)  # noqa: E731
    is_second = lambda: threading.current_thread().name == "1"  # noqa: E731
    monkeypatch.setattr("swarm.train.engine.host_memory.os.readlink", elsewhere)

    def take(ranks):
        threading.current_thread().name = str(ranks.rank)
        with pytest.raises(ConfigError, match="one host copy") as refused:
            SharedMemory(ranks).take(4096)
        assert "leave out --remote-workers" in refused.value.hint

    together(2, take)


def test_memory_in_common_is_given_back_and_leaves_no_descriptor():
    def take(ranks):
        memory = SharedMemory(ranks)
        arena = memory.take(2**20)
        arena.buffer[ranks.rank] = 7
        memory.settle()
        assert arena.buffer[:3].tolist() == [7, 7, 0]

    together(2, take)
    gc.collect()
    opened = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not [each for each in opened if "memfd:swarm-" in each]
    assert "memfd:swarm-" not in Path("/proc/self/maps").read_text()


def test_options_of_a_streaming_worker_come_through_json():
    options = replace(EngineOptions(), **STREAMING, **HOST, pass_micro_batches=3)
    assert options_of(json.loads(json.dumps(options_message(options)))) == options


@pytest.mark.gpu
def test_two_workers_of_one_gpu_lose_nothing_on_their_ways_to_the_host(device="cuda"):
    run = tiny_run(model={"num_hidden_layers": 5}, **{**BF16, **BY_UNIT})
    chosen = replace(EngineOptions.of(run, device=device), **STREAMING)
    start = lambda: Crew(Place(2, device, 1, "gloo"))  # noqa: E731
    alone = new_streaming(run, OWNED, device=device)
    with closing(alone), closing(ParallelEngine(run, [chosen], start)) as engine:
        engine.write(initial_tensors(run, all_names(run)))
        engine.own(OWNED)
        for step in range(5):
            left, right = (each.step(batch(run, step), lr=1e-3) for each in (engine, alone))
            # Sums of a GPU's products may have another order each time.
            assert right.loss == pytest.approx(left.loss, rel=1e-3)
        mine, theirs = engine.read(all_names(run)), alone.read(all_names(run))
        for name, value in mine.items():
            # Five updates of at most 1e-3 each. A lost or doubled one would be visible.
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=2.5e-3)


# ------------------------------------------------ bytes


def common_bytes(pid):
    """A process's part of the used memory that workers share."""
    num_bytes, is_common = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        field, *rest = line.split()
        if not field.endswith(":"):
            is_common = "memfd:swarm-" in line
        elif is_common and field == "Pss:":
            num_bytes += 1024 * int(rest[0])
    return num_bytes


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=SLOW)])
def test_the_weights_are_in_host_memory_once_whatever_the_number_of_workers(crews, size):
    run = sized(BF16["train"], hidden=160, vocab=4000)
    need = need_of(run, len(FOUR), replace(EngineOptions.of(run), **STREAMING), 1)
    with lent_engines(crews, workers=size, **STREAMING) as make:
        engine = make(run, FOUR)
        engine.step(tokens_of(run), lr=1e-3)
        engine.read(["model.norm.weight"])
        assert sum(map(common_bytes, engine.pids)) == pytest.approx(need.host, rel=0.05)


@pytest.mark.parametrize(
    ("options", "train_section"),
    [({}, BF16["train"]), pytest.param({"moments": "int8"}, {}, marks=SLOW)],
    ids=["bf16", "fp32, int8 moments"],
)
def test_host_memory_is_that_of_one_process_and_each_device_has_its_own(
    options, train_section, cut_tensors
):
    size = 2
    run = sized({**train_section, "batch_tokens": size * 2 * 2 * 128})
    chosen = replace(EngineOptions.of(run), **STREAMING, **options)

    def work(ranks, *, counts):
        live = LiveBytes()
        with live if counts else nullcontext():
            engine = engine_of(ranks, run, FOUR, **options)
            engine.step(tokens_of(run), lr=1e-3)
            engine.read(["model.norm.weight"])
            gc.collect()
            live.reset()
            before = engine.traffic[1]
            ranks.traffic.take()
            engine.step(tokens_of(run), lr=1e-3)
            sent, traffic = engine.traffic[1] - before, ranks.traffic.take()
            engine.read(["model.norm.weight"])
            engine.close()
            return live.peak, sent, traffic["sums"][1]

    need, alone = need_of(run, len(FOUR), chosen, size), need_of(run, len(FOUR), chosen, 1)
    half = sized({**train_section, "batch_tokens": 2 * 2 * 128})
    assert size * need.host == alone.host
    # The device needs the memory of one process with half of the batch.
    assert need.device_state == need_of(half, len(FOUR), chosen, 1).device_state
    gradients = 4 * sizes_of(run.model, len(FOUR)).trained
    for peak, sent, summed in on_threads(size, work):
        assert need.device + size * need.host == pytest.approx(peak, rel=0.05)
        assert sent == pytest.approx(gradients / size, rel=0.02)
        assert summed == pytest.approx(gradients / size, rel=0.02)
