"""Engines that fail in a real peer: it continues, or ends with a good state directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from swarm.train.saving.checkpoint import load_newest

pytestmark = pytest.mark.scenario

LIMIT_S = 120
RUN = Path(__file__).parents[2] / "configs" / "runs" / "demo.toml"


def peer(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs one peer to its end: three rounds of three steps on this project's own text."""
    command = [sys.executable, "-m", "tests.scenarios.failing_engine", "--run", str(RUN)]
    command += ["--state-dir", str(folder), "--rounds", "3", "--linger", "0.1"]
    command += ["--corpus", "swarm", "--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
    command += ["--set", "round.local_steps=3", "--set", "data.validation_bytes=512"]
    command += ["--set", "merging.alpha=0.0", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_a_peer_that_runs_out_of_memory_steps_down_and_finishes(tmp_path: Path) -> None:
    done = peer(tmp_path, "--fail", "memory@4")
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-3000:]
    assert "engine: resident: the fastest that fits" in log
    assert "out of memory with resident; stepping down to" in log
    assert "round 3/3" in log


def test_an_exception_in_a_helper_thread_ends_the_peer_with_a_good_state(tmp_path: Path) -> None:
    failed = peer(tmp_path, "--engine", "streaming", "--fail", "update@5")
    assert failed.returncode == 1
    assert "ArithmeticError: an update thread fails" in failed.stderr
    assert "Traceback" in failed.stderr
    (private,) = tmp_path.glob("runs/*/private")
    kept = load_newest(private)
    assert kept is not None
    assert (kept.state.round, kept.state.steps) == (1, 3)
    again = peer(tmp_path, "--engine", "streaming")
    log = again.stdout + again.stderr
    assert again.returncode == 0, log[-3000:]
    assert "round 3/3" in log
