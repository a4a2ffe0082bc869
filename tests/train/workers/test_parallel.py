"""Several processes as one engine have the bits of one process, whatever happens to them."""

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from swarm.data.masks import masks_of
from swarm.errors import OutOfMemory, WorkersFailed
from swarm.experts import expert_shapes
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.local_steps import routing_controls_at
from swarm.train.engine.ranks import Ranks
from swarm.train.engine.resident import ResidentEngine
from swarm.train.saving.checkpoint import PrivateState, load_newest, save_private
from swarm.train.workers.command_history import History, Saved
from swarm.train.workers.crew import Crew, Place
from swarm.train.workers.members import Lost
from swarm.train.workers.parallel_engine import ParallelEngine
from swarm.train.workers.workforce import TRIES, CommandTimeouts
from tests.processes import running
from tests.train.crews import lent_engines
from tests.train.engine.test_engine_routing import EVERYTHING
from tests.train.runs import all_names, batch, bits, new_engine, same, tiny_run
from tests.train.test_masks import END, MASKED, text

OWNED, THEN = [1, 3], [0, 1]
CLIPPED = {"optimizer": {"clip_norm": 0.1}}
RUN = tiny_run(**CLIPPED)
BF16 = {"train": {"compute": "bf16", "frozen": "bf16"}, **CLIPPED}
ONE_SEQUENCE = {"train": {"micro_batch_sequences": 1}, **CLIPPED}


class InBlocks(ResidentEngine):
    """One process that adds gradients up as several ranks do, with one block of them each."""

    size = 1

    def _gradients(self, parts, controls):
        found, sums = [], {}
        for rank in range(self.size):
            for index in Ranks(rank, self.size, torch.device("cpu")).block(len(parts)):
                found.append(self._backward(parts, index, controls))
            for parameter in self._optimizer.parameters:
                before = sums.get(parameter)
                sums[parameter] = parameter.grad if before is None else before + parameter.grad
                parameter.grad = None
        for parameter, total in sums.items():
            parameter.grad = total
        return found


@pytest.fixture
def parallel(crews):
    with lent_engines(crews) as make:
        yield make


def in_blocks(run, size):
    engine = InBlocks(run)
    engine.size = size
    engine.write(new_engine(run).read(all_names(run)))
    engine.own(OWNED)
    return engine


def train(engine, run, steps):
    stats = []
    for k in steps:
        tokens_BT1 = text(k) if run.data.attention == "document" else batch(run, k)
        controls = routing_controls_at(k, run, "me", k, probe=True)
        masks = masks_of(tokens_BT1, run, END)
        stats.append(engine.step(tokens_BT1, lr=1e-2, controls=controls, masks=masks))
    return stats


def is_same(run, left, right):
    states = [dict(engine.state_dict().tensors) for engine in (left, right)]
    return same(left.read(all_names(run)), right.read(all_names(run))) and same(*states)


def assert_equal(run, left, right):
    """Five clipped steps, with other experts after the third."""
    stats = train(left, run, range(3))
    assert stats == train(right, run, range(3))
    assert all(step.grad_norm > run.optimizer.clip_norm for step in stats)
    for engine in (left, right):
        engine.own(THEN)
    assert train(left, run, range(3, 5)) == train(right, run, range(3, 5))
    assert is_same(run, left, right)
    assert left.evaluate(batch(run, 9)) == right.evaluate(batch(run, 9))


# ------------------------------------------------ the same bits

BY_UNIT = {"optimizer": {"clip": "unit", "clip_norm": 0.1}}
GLOBAL = {**CLIPPED, "loss": {"balance": "global"}}


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param(CLIPPED, id="fp32"),
        pytest.param(BF16, id="bf16"),
        pytest.param(BY_UNIT, id="clipped by unit", marks=pytest.mark.exhaustive),
        pytest.param(GLOBAL, id="loss over all layers", marks=pytest.mark.exhaustive),
        pytest.param({**EVERYTHING, **CLIPPED}, id="every influence on routing"),
        pytest.param({**MASKED, **CLIPPED}, id="documents and padding"),
    ],
)
def test_two_workers_equal_one_process_in_every_bit(parallel, sections):
    run = tiny_run(**sections)
    assert_equal(run, parallel(run, OWNED), new_engine(run, OWNED))


@pytest.mark.exhaustive
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_four_workers_with_a_micro_batch_each_equal_one_process(parallel, compute):
    run = tiny_run(**CLIPPED, train={"micro_batch_sequences": 1, "compute": compute})
    assert_equal(run, parallel(run, OWNED, workers=4), new_engine(run, OWNED))


@pytest.mark.exhaustive
def test_workers_without_a_micro_batch_take_part_in_the_step_all_the_same(parallel):
    assert_equal(RUN, parallel(RUN, OWNED, workers=4), new_engine(RUN, OWNED))


@pytest.mark.parametrize("sections", [CLIPPED, BF16], ids=["fp32", "bf16"])
def test_several_micro_batches_are_added_up_in_blocks_of_the_workers(parallel, sections):
    train_section = {**sections.get("train", {}), "batch_tokens": 6 * 16}
    run = tiny_run(**{**sections, "train": {**train_section, "micro_batch_sequences": 1}})
    assert_equal(run, parallel(run, OWNED), in_blocks(run, 2))


@pytest.mark.exhaustive
def test_a_batch_that_the_workers_share_unevenly_is_added_up_in_blocks_too(parallel):
    run = tiny_run(**CLIPPED, train={"micro_batch_sequences": 1, "batch_tokens": 5 * 16})
    assert_equal(run, parallel(run, OWNED), in_blocks(run, 2))


def test_micro_batches_are_dealt_in_blocks_that_differ_by_one_at_most():
    for count in range(9):
        blocks = [Ranks(rank, 4, torch.device("cpu")).block(count) for rank in range(4)]
        assert [index for block in blocks for index in block] == list(range(count))
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


# ------------------------------------------------ workers that end


def stopped(engine, rank):
    """Stops a worker, so that the next step lasts until the test acts."""
    os.kill(engine.pids[rank], signal.SIGSTOP)


def soon(act):
    """Calls a function while the caller waits for a step."""
    timer = threading.Timer(0.3, act)
    timer.start()
    return timer


def assert_a_kill_costs_nothing(engine, straight, run, rank, caplog):
    """A worker is killed in the third of four steps.

    All workers are new then, with the same figures.
    """
    before, victim = engine.pids, engine.pids[rank]
    stopped(engine, rank)
    timer = soon(lambda: os.kill(victim, signal.SIGKILL))
    with caplog.at_level(logging.INFO):
        found = train(engine, run, range(2, 4))
    timer.join()
    assert found == train(straight, run, range(2, 4))
    assert f"worker {rank} was killed" in caplog.text
    assert not set(before) & set(engine.pids) and all(is_gone(pid) for pid in before)


def assert_nan_changes_nothing(engine, run, name):
    """A step with a NaN in a tensor is skipped on every worker."""
    poisoned = engine.read([name])[name]
    poisoned[0, 0] = float("nan")
    engine.write({name: poisoned})
    before = engine.read(all_names(run))
    (stats,) = train(engine, run, [0])
    assert stats.skipped and engine.skipped == 1
    after = engine.read(all_names(run))
    assert all(torch.equal(bits(after[name]), bits(before[name])) for name in before)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_worker_that_is_killed_in_a_step_costs_no_bit(parallel, caplog, rank):
    engine, straight = parallel(RUN, OWNED), new_engine(RUN, OWNED)
    assert train(engine, RUN, range(2)) == train(straight, RUN, range(2))
    assert_a_kill_costs_nothing(engine, straight, RUN, rank, caplog)
    assert is_same(RUN, engine, straight)


class OnceImpatient(CommandTimeouts):
    """Waits two seconds for one step, and as long as usual for all else."""

    def within_s(self, message, longest_s, num_bytes):
        if message["do"] == "step" and self.is_armed:
            self.is_armed = False
            return 2.0
        return super().within_s(message, longest_s, num_bytes)

    is_armed = False


def assert_a_hang_costs_nothing(make, caplog):
    """A worker hangs in the second of two steps, which still has the figures of one process."""
    patience = OnceImpatient()
    engine, straight = make(RUN, OWNED, given={"patience": patience}), new_engine(RUN, OWNED)
    assert train(engine, RUN, [0]) == train(straight, RUN, [0])
    object.__setattr__(patience, "is_armed", True)
    stopped(engine, 1)
    with caplog.at_level(logging.WARNING):
        assert train(engine, RUN, [1]) == train(straight, RUN, [1])
    assert "no answer to 'step' from worker 0 and 1 within 2 s" in caplog.text
    assert is_same(RUN, engine, straight)


@pytest.mark.exhaustive
def test_a_worker_that_hangs_is_ended_with_one_line(parallel, caplog):
    assert_a_hang_costs_nothing(parallel, caplog)
    assert [record.getMessage() for record in caplog.records] == [
        "no answer to 'step' from worker 0 and 1 within 2 s; all workers are started again"
    ]


# So many activations that a step must request memory from the system.
WIDE = tiny_run(
    model={"hidden_size": 256, "moe_intermediate_size": 512},
    train={"micro_batch_sequences": 16, "batch_tokens": 32 * 16},
)


def allow_no_more(pid):
    """A process gets no more memory than it has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    used = pages * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(pid, resource.RLIMIT_AS, (used, used))


@pytest.mark.exhaustive
def test_workers_without_memory_are_started_again_one_level_lower(parallel, caplog):
    below = replace(EngineOptions.of(WIDE), recompute="routing")
    engine, straight = parallel(WIDE, OWNED, below=[below]), new_engine(WIDE, OWNED)
    allow_no_more(engine.pids[1])
    with caplog.at_level(logging.WARNING):
        assert train(engine, WIDE, range(2)) == train(straight, WIDE, range(2))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "stepping down to resident, layers computed again for backward (worker 1: " in line
    assert "layers computed again" in engine.describe()
    assert is_same(WIDE, engine, straight)


def test_workers_that_end_again_and_again_end_the_peer():
    start = Mock(side_effect=Lost("worker 0 ended with status 1"))
    with pytest.raises(WorkersFailed, match="3 times in a row, the last time: worker 0 ended"):
        ParallelEngine(RUN, [EngineOptions.of(RUN)], start)
    assert start.call_count == TRIES


def test_a_process_that_cannot_be_started_is_a_loss_and_no_error_of_ours(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(Lost, match="no process can be started"):
        Crew(Place(2))


def test_without_a_level_below_no_memory_ends_the_peer():
    levels = [EngineOptions.of(RUN), replace(EngineOptions.of(RUN), recompute="routing")]
    start = Mock(side_effect=Lost("worker 0: no memory", is_memory=True))
    with pytest.raises(OutOfMemory, match=r"no engine below .* is left: worker 0: no memory"):
        ParallelEngine(RUN, levels, start)
    assert start.call_count == 2


@pytest.mark.exhaustive
def test_new_workers_go_on_from_the_private_state_on_disk(parallel, tmp_path):
    """They repeat the later commands: other experts, written or lent values, and steps. A state
    that was read but not saved before the end is no beginning.
    """
    path = tmp_path / "private"
    given = {"folder": tmp_path, "saved": Saved.at(path)}
    engine, straight = parallel(RUN, OWNED, given=given), new_engine(RUN, OWNED)
    lent = {name: torch.randn(16, 16) for e in (0, 2) for name in expert_shapes(RUN.model, e)}
    written = {name: torch.randn(16, 16) for name in expert_shapes(RUN.model, 1)}
    for each in (engine, straight):
        train(each, RUN, range(2))
        each.lend(lent)
        train(each, RUN, range(2, 4))
    for step in range(2):
        save(path, engine.state_dict(), step)
        for each in (engine, straight):
            each.own([[0, 1], [1, 2]][step])  # expert 3 is given away
            each.write(written)
            train(each, RUN, range(4 + step, 6 + step))
    commands = engine._history.commands()
    assert [c.message["do"] for c in commands[:3]] == ["part", "part", "load"]
    assert len([c for c in commands if c.message["do"] == "step"]) == 2
    state = engine.state_dict()
    os.kill(engine.pids[1], signal.SIGKILL)  # while it is being saved
    assert same(dict(state.tensors), dict(straight.state_dict().tensors))
    assert train(engine, RUN, [7]) == train(straight, RUN, [7])
    assert is_same(RUN, engine, straight)


@pytest.mark.exhaustive
def test_a_disk_without_room_does_not_stop_a_step(parallel, tmp_path, caplog):
    engine, straight = parallel(RUN, OWNED), new_engine(RUN, OWNED)
    engine._history = engine._force._history = History(tmp_path / "missing", Saved.at(None))
    with caplog.at_level(logging.WARNING):
        assert train(engine, RUN, [0]) == train(straight, RUN, [0])
    assert "held in memory instead" in caplog.text


def save(path, state, step):
    private = PrivateState(state, "run", f"tip {step}", step, 1, 1, 1.0, 0, {}, {}, {})
    save_private(path, private)


# ------------------------------------------------ a controller that ends

GONE_S = 10.0
"""Limit for workers that outlive it."""

CONTROLLER = """
import sys
from pathlib import Path
import torch
from swarm.train.workers.command_history import Saved
from tests.train.crews import Crews
from tests.train.workers.test_parallel import OWNED, RUN, save, train
torch.set_num_threads(1)
path = Path(sys.argv[1])
engine = Crews().engine(RUN, OWNED, given={"folder": path.parent, "saved": Saved.at(path)})
print(*engine.pids, flush=True)
for step in range(10**6):
    train(engine, RUN, [step])
    save(path, engine.state_dict(), step + 1)
    print(step, flush=True)
"""


def is_gone(pid):
    """Whether a process has ended, even if nobody has collected its status yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


@pytest.mark.exhaustive
def test_workers_end_with_a_killed_controller_and_others_resume_bit_for_bit(parallel, tmp_path):
    """They end within 10 s, whatever they compute. The state on disk is whole, and resumes."""
    path = tmp_path / "private"
    command = [sys.executable, "-c", CONTROLLER, str(path)]
    with running(command, stdout=subprocess.PIPE) as controller:
        pids = [int(word) for word in controller.stdout.readline().split()]
        assert len(pids) == 2 and not any(map(is_gone, pids))
        for _ in range(3):
            controller.stdout.readline()
        controller.kill()
        end_s = time.monotonic() + GONE_S
    while not all(map(is_gone, pids)):
        assert time.monotonic() < end_s, "workers run on without a controller"
        time.sleep(0.05)
    state = load_newest(path).state
    assert state.round >= 3
    engine, straight = parallel(RUN), new_engine(RUN, OWNED)
    engine.load_state_dict(state.engine)
    train(straight, RUN, range(state.round))
    steps = range(state.round, state.round + 2)
    assert train(engine, RUN, steps) == train(straight, RUN, steps)
    assert is_same(RUN, engine, straight)
