"""Several units at once give the results of one after the other, in less time."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from peers.peer import PASSIVE
from swarm.config import ComputeSection, RunConfig
from swarm.model.initial_weights import initial_tensors
from swarm.peer.machine.cpu_threads import (
    REST_S,
    WINDOW,
    WORTH_ELEMENTS,
    StepWatch,
    ThreadedEngine,
    Trial,
    UnitThreads,
    budget_s,
    candidates,
    choose,
    is_exact,
    start_threads,
    usable_cores,
)
from swarm.peer.machine.machine_survey import engine_for
from swarm.train.engine.hardware import Machine
from swarm.train.engine.resident import ResidentEngine
from swarm.train.fallback_engine import SteppingEngine
from swarm.train.planning.ladder import plan_engine
from tests.train.runs import all_names, batch, new_engine, same, tiny_run

RUN = tiny_run(train={"frozen": "bf16"})
MACHINE = Machine("cpu", 0.0, 64e9, 64e9, cores=4)


@pytest.fixture(autouse=True)
def _one_thread_as_before() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


class Clocks:
    """Time passes only during computing, by `times` for each number of threads.

    Threads are only counted, because real ones would depend on this machine's load.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[int, float]) -> None:
        self.now_s, self.times, self.share = 0.0, times, 1.0
        self.rehearsed: list[int] = []
        self.threads = 4
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch, "set_num_threads", self._set)
        step, rehearse = ResidentEngine.step, ResidentEngine.rehearse

        def timed_step(engine: ResidentEngine, *args: object, **named: object) -> object:
            self.now_s += self.times[self.threads]
            return step(engine, *args, **named)  # type: ignore[arg-type]

        def timed_rehearse(engine: ResidentEngine, tokens_BT1: Tensor) -> None:
            self.rehearsed.append(self.threads)
            self.now_s += self.times[self.threads]
            rehearse(engine, tokens_BT1)

        monkeypatch.setattr(ResidentEngine, "step", timed_step)
        monkeypatch.setattr(ResidentEngine, "rehearse", timed_rehearse)

    def _set(self, threads: int) -> None:
        self.threads = threads

    def engine(self, cores: int = 4) -> ThreadedEngine:
        made = ThreadedEngine(
            RUN,
            plan_engine(RUN, 2, MACHINE),
            cores=cores,
            clock=lambda: self.now_s,
            cpu_clock=lambda: self.share * self.now_s,
        )
        made.write(initial_tensors(RUN, all_names(RUN)))
        made.own([0, 2])
        return made


def test_the_fastest_number_is_set_before_the_first_step_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clocks = Clocks(monkeypatch, {1: 0.010, 2: 0.006, 4: 0.0059})
    with caplog.at_level("INFO"):
        engine = clocks.engine()
        engine.step(batch(RUN, 0), lr=1e-2)
    assert clocks.threads == 2
    assert "threads: 2 (the fewest that are about as fast as any" in caplog.text
    assert {1, 2, 4} == set(clocks.rehearsed)
    before = len(clocks.rehearsed)
    engine.step(batch(RUN, 1), lr=1e-2)
    assert len(clocks.rehearsed) == before


def test_beside_other_load_one_thread_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch, {1: 0.010, 2: 0.004, 4: 0.003})
    clocks.share = 0.5
    clocks.engine().step(batch(RUN, 0), lr=1e-2)
    assert clocks.threads == 1


def test_what_is_measured_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """If one thread wins, the engine is the plain one, bit for bit."""
    measuring = Clocks(monkeypatch, {1: 0.001, 2: 0.01, 4: 0.01}).engine()
    plain = new_engine(RUN, [0, 2])
    random_state = torch.get_rng_state()
    for step in range(3):
        assert measuring.step(batch(RUN, step), lr=1e-2) == plain.step(batch(RUN, step), lr=1e-2)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert same(measuring.read(all_names(RUN)), plain.read(all_names(RUN)))
    assert same(dict(measuring.state_dict().tensors), dict(plain.state_dict().tensors))


def test_slow_steps_are_measured_again_and_the_choice_follows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clocks = Clocks(monkeypatch, {1: 0.25, 2: 0.15, 4: 0.1})
    engine = clocks.engine()
    for step in range(WINDOW):
        engine.step(batch(RUN, step), lr=1e-2)
    assert clocks.threads == 4
    measured = len(clocks.rehearsed)
    clocks.times, clocks.share = {1: 4.0, 2: 5.0, 4: 6.0}, 0.6  # neighbors came
    with caplog.at_level("INFO"):
        for step in range(WINDOW, WINDOW + round(REST_S / 6.0) + 1):
            engine.step(batch(RUN, step), lr=1e-2)
    assert len(clocks.rehearsed) > measured
    assert clocks.threads == 1
    assert "times as long as at the last choice" in caplog.text


@pytest.mark.parametrize("unit_s", [0.001, 0.2, 5.0, 1000.0])
def test_measuring_stays_within_its_time(monkeypatch: pytest.MonkeyPatch, unit_s: float) -> None:
    """A twentieth of a round, or seconds. At most two short sequences if these take longer."""
    clocks = Clocks(monkeypatch, {1: unit_s, 2: 0.5 * unit_s, 4: 0.25 * unit_s})
    engine = clocks.engine()
    engine.step(batch(RUN, 0), lr=1e-2)
    spent_s = sum(clocks.times[threads] for threads in clocks.rehearsed)
    micro_batches = RUN.train.batch_tokens // 16
    most_s = max(3.0, 0.05 * RUN.round.local_steps * micro_batches * unit_s)
    assert spent_s <= most_s or clocks.rehearsed == [4, 1]
    if unit_s == 1000.0:
        assert clocks.threads == 4  # not measured: all threads


def test_long_steps_beside_other_load_get_one_thread_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch, {1: 1000.0, 2: 500.0, 4: 250.0})
    clocks.share = 0.4
    clocks.engine().step(batch(RUN, 0), lr=1e-2)
    assert clocks.rehearsed == [4, 1]
    assert clocks.threads == 1


def made_for(run: RunConfig, folder: Path, threads: int = 0) -> SteppingEngine:
    return engine_for(run, ComputeSection(device="cpu", threads=threads), folder)


def test_threads_are_measured_only_where_there_is_a_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert not isinstance(made_for(RUN, tmp_path), ThreadedEngine)
    assert "threads: 1 (only one core may be used)" in caplog.text
    torch.set_num_threads(2)
    assert isinstance(made_for(RUN, tmp_path), ThreadedEngine)


def test_threads_asked_for_are_obeyed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    start_threads(ComputeSection(device="cpu", threads=2))
    engine = made_for(tiny_run(), tmp_path, threads=2)
    engine.write(initial_tensors(RUN, all_names(RUN)))
    engine.own([0])
    engine.step(batch(RUN, 0), lr=1e-2)
    assert torch.get_num_threads() == 2
    assert "threads: 2 (as asked for)" in caplog.text


def test_an_exact_run_gets_one_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    exact = tiny_run()
    assert is_exact(exact)
    assert not is_exact(RUN)
    assert not is_exact(tiny_run(wire={"experts": "bf16"}))
    assert not is_exact(tiny_run(wire={"shared_coding": "b2"}))
    torch.set_num_threads(2)
    assert not isinstance(made_for(exact, tmp_path), ThreadedEngine)
    assert torch.get_num_threads() == 1
    assert "the run is exact" in caplog.text


@pytest.mark.parametrize(
    ("text", "most"), [("max 100000\n", None), ("50000 100000\n", 1), ("100000 100000\n", 1)]
)
def test_a_containers_quota_bounds_the_cores(tmp_path: Path, text: str, most: int | None) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    available = len(os.sched_getaffinity(0))
    assert usable_cores(quota) == (min(most, available) if most else available)
    assert usable_cores(tmp_path / "none") == available


def test_the_program_lets_threads_wait_passively_before_torch_is_there() -> None:
    """OpenMP itself prints the settings that it has read."""
    environment = {name: value for name, value in os.environ.items() if name not in PASSIVE}
    script = "import sys; from peers.peer import launch; assert 'torch' not in sys.modules\n"
    script += "try:\n    launch()\nfinally:\n    import torch"  # which --help does not load
    result = subprocess.run(
        [sys.executable, "-c", script, "--help"],
        env={**environment, "OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in result.stderr
    assert "GOMP_SPINCOUNT = '0'" in result.stderr
    assert "swarm-peer" in result.stdout or "Trains one peer" in result.stdout


def trials(times: dict[int, float], share: float = 1.0) -> list[Trial]:
    """One trial of each number of threads. The calling thread had a core for `share` of it."""
    return [Trial(threads, seconds, share * seconds) for threads, seconds in times.items()]


@pytest.mark.parametrize(
    ("cores", "numbers"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))],
)
def test_powers_of_two_and_all_cores_are_tried(cores: int, numbers: tuple[int, ...]) -> None:
    assert candidates(cores) == numbers


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({1: 1.0, 2: 0.55, 4: 0.3}, 4),
        ({1: 1.0, 2: 0.95, 4: 0.92}, 1),
        ({1: 1.0, 2: 0.6, 4: 0.56}, 2),
        ({1: 1.0, 2: 0.95, 4: 0.5}, 4),
        ({1: 1.0, 2: 3.0}, 1),
        ({2: 1.0}, 2),
    ],
)
def test_more_threads_are_taken_only_if_they_are_clearly_faster(
    times: dict[int, float], chosen: int
) -> None:
    choice = choose(trials(times))
    assert choice.threads == chosen
    assert f"{chosen}: {times[chosen] * 1e3:.1f} ms" in choice.reason


def test_where_a_core_is_shared_already_more_threads_only_take_from_others() -> None:
    faster_at_the_cost_of_others = trials({1: 1.0, 2: 0.5}, share=0.6)
    choice = choose(faster_at_the_cost_of_others)
    assert choice.threads == 1
    assert "only 60% of a core" in choice.reason
    assert choose(trials({1: 1.0, 2: 0.5}, share=0.9)).threads == 2


def test_the_median_of_several_trials_counts() -> None:
    odd = [*trials({1: 1.0, 2: 9.0}), *trials({1: 1.0, 2: 0.5}), *trials({1: 5.0, 2: 0.5})]
    assert choose(odd).threads == 2


def test_a_choice_that_is_in_use_is_kept_for_less() -> None:
    between = trials({1: 1.0, 2: 0.93})
    assert choose(between).threads == 1
    assert choose(between, current=2).threads == 2
    assert choose(between, current=1).threads == 1
    assert choose(trials({1: 1.0, 2: 0.97}), current=2).threads == 1


def test_measuring_takes_three_seconds_or_a_twentieth_of_a_round() -> None:
    assert budget_s(50, 0.01) == 3.0
    assert budget_s(50, 20.0) == 50.0


def test_steps_that_become_half_as_slow_again_are_measured_again_after_a_rest() -> None:
    watch = StepWatch(measured_s=0.0)
    now, answers = 0.0, []
    for seconds in [1.0] * 20 + [1.6] * 400:
        now += seconds
        answers.append((now, watch.saw(seconds, now)))
    first = next(now for now, answer in answers if answer)
    assert first >= REST_S
    assert all(answer is None for now, answer in answers if now < REST_S)
    assert "1.60 times" in next(answer for _, answer in answers if answer)


@pytest.mark.parametrize(
    "later",
    [[1.0] * 1000, [1.4] * 1000, [0.7] * 1000, [1.0, 1.0, 30.0] * 100],
    ids=["as fast", "slower", "faster", "single slow ones"],
)
def test_steps_that_stay_about_as_fast_are_never_measured_again(later: list[float]) -> None:
    watch = StepWatch(measured_s=0.0)
    times = [1.0] * WINDOW + later
    assert not any(watch.saw(seconds, 1e6 + k) for k, seconds in enumerate(times))


def test_steps_that_become_much_faster_are_measured_again_too() -> None:
    watch = StepWatch(measured_s=0.0)
    times = [1.0] * WINDOW + [0.5] * WINDOW
    answers = [watch.saw(seconds, 1e6 + k) for k, seconds in enumerate(times)]
    assert answers[-1] is not None
    assert not any(answers[:-1])


def test_results_come_in_the_order_of_the_items_from_as_many_threads():
    together = threading.Barrier(3, timeout=30.0)

    def work(item: int) -> tuple[int, int]:
        together.wait()  # waits until three are at work
        return 10 * item, torch.get_num_threads()

    usual = torch.get_num_threads()
    assert UnitThreads(3).each(work, [3, 1, 2], WORTH_ELEMENTS) == [(30, 1), (10, 1), (20, 1)]
    assert torch.get_num_threads() == usual


@pytest.mark.parametrize(("threads", "elements"), [(1, WORTH_ELEMENTS), (4, WORTH_ELEMENTS - 1)])
def test_little_work_or_one_thread_is_the_callers(threads, elements):
    found = UnitThreads(threads).each(lambda _: threading.current_thread(), range(5), elements)
    assert set(found) == {threading.current_thread()}


def test_an_error_is_raised_when_all_have_ended_and_nothing_new_is_begun():
    begun, ended = [], []
    failed = threading.Event()

    def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            failed.set()
            raise KeyError(item)
        failed.wait(30.0)
        ended.append(item)

    with pytest.raises(KeyError):
        UnitThreads(2).each(work, range(1000), WORTH_ELEMENTS)
    assert len(begun) < 1000
    assert sorted([0, *ended]) == sorted(begun)
    assert not [each for each in threading.enumerate() if each.name == "swarm-units"]


def test_threads_that_cannot_be_started_are_done_without(monkeypatch):
    cannot = Mock(side_effect=RuntimeError("can't start new thread"))
    monkeypatch.setattr(threading.Thread, "start", cannot)
    assert UnitThreads(4).each(str, range(3), WORTH_ELEMENTS) == ["0", "1", "2"]
