"""A peer that is asked to leave while its workers start, or hang."""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from swarm.train.workers.crew import OVERTIME_S
from tests.scenarios.test_workers import Training, corpus_in, settings
from tests.train.workers.test_starting import SLEEPS

pytestmark = [pytest.mark.scenario, pytest.mark.slow]

LEAVE_S = 3


def test_it_ends_within_its_time_to_leave_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLEEPS)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    alone = ("--run", "demo", "--peers", "1", "--rounds", "2", "--gpus", "2")
    text = Path(__file__).parents[2] / "swarm" / "protocol"
    given = ("--corpus", str(text), "--leave-timeout", str(LEAVE_S))
    peer = Training(tmp_path / "alone", *alone, *given)
    try:
        peer.says(r"(workers: 2, 1 threads each)")
        began_s = time.monotonic()
        peer.process.send_signal(signal.SIGTERM)
        assert peer.process.wait(60) == 15
        assert LEAVE_S - 1 < time.monotonic() - began_s < LEAVE_S + 20  # it ends its other parts
    finally:
        peer.process.kill()
        peer.process.wait()
    (line,) = re.findall(r"^.*workers are still starting.*$", peer.log, re.MULTILINE)
    assert "no answer to 'begin' from worker 0 and 1" in line
    assert "Traceback" not in peer.log


@pytest.mark.exhaustive  # test_starting.py tests this without a peer
def test_it_ends_within_its_time_to_leave_also_when_a_worker_hangs(tmp_path: Path) -> None:
    alone = ("--run", "demo", "--peers", "1", "--rounds", "9", "--gpus", "2", *settings())
    given = (*corpus_in(tmp_path), "--leave-timeout", str(LEAVE_S))
    peer = Training(tmp_path / "alone", *alone, *given)
    try:
        victim = int(peer.says(r"workers began within .*processes \d+, (\d+)\)"))
        peer.says(r"(round 1/9)")
        os.kill(victim, signal.SIGSTOP)
        began_s = time.monotonic()
        peer.process.send_signal(signal.SIGTERM)
        assert peer.process.wait(90) == 15
        assert time.monotonic() - began_s < LEAVE_S + OVERTIME_S + 20  # it ends its other parts
    finally:
        peer.process.kill()
        peer.process.wait()
    (line,) = re.findall(r"^.*its workers do not answer.*$", peer.log, re.MULTILINE)
    assert "from worker" in line
    assert "Traceback" not in peer.log
    assert not Path(f"/proc/{victim}").exists()
