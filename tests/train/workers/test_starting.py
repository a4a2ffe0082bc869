"""Workers that take long to start: a peer that must end does not wait for them."""

import os
import signal
import time

import pytest

from swarm.errors import WorkersFailed
from swarm.model.initial_weights import initial_tensors
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.workers import crew
from swarm.train.workers.crew import Crew, Place
from swarm.train.workers.parallel_engine import ParallelEngine
from tests.train.runs import all_names, batch, tiny_run

SLEEPS = """
import sys, time
if "swarm.train.workers.worker_process" in sys.orig_argv:
    time.sleep(120)
"""


@pytest.fixture
def sleepy(tmp_path, monkeypatch):
    """Every started worker sleeps before it loads anything."""
    (tmp_path / "sitecustomize.py").write_text(SLEEPS)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)


def test_a_peer_that_has_to_go_waits_for_no_worker_that_starts(sleepy):
    began_s = time.monotonic()

    def remaining_s():
        """Nobody asks this peer to leave before a second has passed."""
        now_s = time.monotonic() - began_s
        return 2.0 - now_s if now_s > 1 else float("inf")

    run = tiny_run()
    with pytest.raises(WorkersFailed, match=r"still starting: .* 'begin' from worker 0 and 1 "):
        ParallelEngine(run, [EngineOptions.of(run)], lambda: Crew(Place(2), None, remaining_s))
    assert 1.5 < time.monotonic() - began_s < 30


def test_workers_that_have_started_go_on_while_a_peer_leaves():
    """For all its remaining commands, such as its private state.

    But lost workers are not replaced.
    """
    run, left_s = tiny_run(), [100.0]
    engine = ParallelEngine(
        run, [EngineOptions.of(run)], lambda: Crew(Place(1), None, lambda: left_s[0])
    )
    try:
        left_s[0] = 0.0
        assert engine.read(["model.norm.weight"]).keys() == {"model.norm.weight"}
        os.kill(engine.pids[0], signal.SIGKILL)
        with pytest.raises(WorkersFailed, match="this peer must end"):
            engine.read(["model.norm.weight"])
    finally:
        engine.close()


def test_a_peer_that_has_to_go_waits_for_no_worker_that_hangs(monkeypatch):
    """Not beyond its time to leave and the limit of an answer then."""
    monkeypatch.setattr(crew, "OVERTIME_S", 1.0)
    run, goes_s = tiny_run(), [float("inf")]
    remaining_s = lambda: max(goes_s[0] - time.monotonic(), 0.0)  # noqa: E731
    engine = ParallelEngine(run, [EngineOptions.of(run)], lambda: Crew(Place(1), None, remaining_s))
    try:
        engine.write(initial_tensors(run, all_names(run)))
        os.kill(engine.pids[0], signal.SIGSTOP)
        began_s = time.monotonic()
        goes_s[0] = began_s + 2.0
        with pytest.raises(WorkersFailed, match="do not answer: no answer to 'step' from worker 0"):
            engine.step(batch(run, 0), lr=1e-3)
        assert 2.0 < time.monotonic() - began_s < 20
        assert not engine.pids
    finally:
        engine.close()
