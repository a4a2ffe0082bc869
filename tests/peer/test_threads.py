"""The engine that measures itself: what it sets, when, and that nothing of the model moves."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peers.peer import PASSIVE
from swarm.config import ComputeSection, RunConfig
from swarm.model.initialise import initial_tensors
from swarm.peer.machine import engine_for
from swarm.peer.threads import ThreadedEngine, is_exact, start_threads, usable_cores
from swarm.train.hardware import Machine
from swarm.train.ladder import plan_engine
from swarm.train.resident import ResidentEngine
from swarm.train.stepping import SteppingEngine
from swarm.train.threads import REST_S, WINDOW
from tests.train.runs import all_names, batch, new_engine, same, tiny_run

RUN = tiny_run(train={"frozen": "bf16"})
MACHINE = Machine("cpu", 0.0, 64e9, 64e9, cores=4)


@pytest.fixture(autouse=True)
def _one_thread_as_before() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


class Clocks:
    """Time passes only while something is computed, as long as `times` says by threads.

    The threads are only counted: real ones would be as slow as this machine is busy.
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
    """Where one thread wins, the engine is the plain one, bit for bit."""
    measuring = Clocks(monkeypatch, {1: 0.001, 2: 0.01, 4: 0.01}).engine()
    plain = new_engine(RUN, [0, 2])
    random_state = torch.get_rng_state()
    for step in range(3):
        found = measuring.step(batch(RUN, step), lr=1e-2)
        assert found == plain.step(batch(RUN, step), lr=1e-2)
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
    clocks.times, clocks.share = {1: 4.0, 2: 5.0, 4: 6.0}, 0.6  # neighbours came
    with caplog.at_level("INFO"):
        for step in range(WINDOW, WINDOW + round(REST_S / 6.0) + 1):
            engine.step(batch(RUN, step), lr=1e-2)
    assert len(clocks.rehearsed) > measured
    assert clocks.threads == 1
    assert "times as long as at the last choice" in caplog.text


@pytest.mark.parametrize("unit_s", [0.001, 0.2, 5.0, 1000.0])
def test_measuring_stays_within_its_time(monkeypatch: pytest.MonkeyPatch, unit_s: float) -> None:
    """A twentieth of a round, or seconds; at most two short sequences where these take longer."""
    clocks = Clocks(monkeypatch, {1: unit_s, 2: 0.5 * unit_s, 4: 0.25 * unit_s})
    engine = clocks.engine()
    engine.step(batch(RUN, 0), lr=1e-2)
    spent_s = sum(clocks.times[threads] for threads in clocks.rehearsed)
    micro_batches = RUN.train.batch_tokens // 16
    most_s = max(3.0, 0.05 * RUN.round.local_steps * micro_batches * unit_s)
    assert spent_s <= most_s or clocks.rehearsed == [4, 1]
    if unit_s == 1000.0:
        assert clocks.threads == 4  # not measured: all there are


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
    assert "threads: 1 (no more cores may be used)" in caplog.text
    torch.set_num_threads(2)
    assert isinstance(made_for(RUN, tmp_path), ThreadedEngine)


def test_threads_that_were_asked_for_are_obeyed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    start_threads(ComputeSection(device="cpu", threads=2))
    engine = made_for(tiny_run(), tmp_path, threads=2)
    engine.write(initial_tensors(RUN, all_names(RUN)))
    engine.own([0])
    engine.step(batch(RUN, 0), lr=1e-2)
    assert torch.get_num_threads() == 2
    assert "threads: 2 (as asked for)" in caplog.text


def test_a_run_that_is_exact_gets_one_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    """OpenMP says itself what it has read."""
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
