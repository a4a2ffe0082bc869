"""Scripts whose swarms are ended from outside. Their peers run in separate sessions."""

import contextlib
import importlib
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from swarm.emulation.local_swarm import LocalSwarm
from swarm.errors import SwarmError

BENCHMARKS = Path(__file__).parents[2] / "scripts" / "benchmarks"
WITH_A_SWARM = sorted(p.stem for p in BENCHMARKS.glob("*.py") if "LocalSwarm(" in p.read_text())
WITH_A_NETWORK = {"bench_join", "bench_link", "bench_utilisation", "bench_wire", "soak"}
WORDS = {
    "bench_threads": ["--load", "1"],
    "bench_utilisation": ["--quick", "--mode", "exact"],
    "bench_watching": ["monitor"],
}
"""Options of a script that needs some, or would take long without."""


class Links:
    """A network that does nothing."""

    closed: ClassVar[list["Links"]] = []

    def __init__(self, *_: object, **__: object) -> None: ...

    def close(self) -> None:
        self.closed.append(self)


@pytest.fixture(params=WITH_A_SWARM)
def script(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> ModuleType:
    """A script in a new folder, without a network and with all cores."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop(request.param, None)
    found = importlib.import_module(request.param)
    monkeypatch.setattr(Links, "closed", [])
    monkeypatch.setattr(found, "NamespaceLinks", Links, raising=False)
    monkeypatch.setattr(found, "open_links", Links, raising=False)
    monkeypatch.setattr(found, "why_not_here", lambda: None, raising=False)
    monkeypatch.setattr(found, "CORES", [0, 1], raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    for name in getattr(found, "OPENMP", ()):  # it takes them away
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [request.param, *WORDS.get(request.param, [])])
    return found


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal that does not end these tests if a script misses it."""
    before = signal.signal(request.param, lambda *_: None)
    yield request.param
    signal.signal(request.param, before)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[LocalSwarm]:
    """The swarms that were stopped or killed."""
    found: list[LocalSwarm] = []
    for way in ("stop", "kill"):
        monkeypatch.setattr(LocalSwarm, way, lambda swarm: found.append(swarm))
    return found


def test_all_scripts_with_a_swarm_are_here() -> None:
    assert {"drill", "soak", "bench_join", "bench_threads", "bench_watching"} < set(WITH_A_SWARM)


def test_a_script_that_is_ended_ends_its_peers_first(
    script: Any,
    number: signal.Signals,
    ended: list[LocalSwarm],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[LocalSwarm] = []

    def start(swarm: LocalSwarm) -> None:
        started.append(swarm)
        signal.raise_signal(number)
        raise AssertionError("it was not heard")

    monkeypatch.setattr(LocalSwarm, "start", start)
    with pytest.raises(KeyboardInterrupt):
        script.main()
    assert ended == started
    assert len(started) == 1
    assert Links.closed == [swarm.links for swarm in started if swarm.links]
    assert multiprocessing.active_children() == []


def test_a_network_is_closed_though_a_peer_of_it_is_not_to_be_killed(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[LocalSwarm] = []

    def start(swarm: LocalSwarm) -> None:
        started.append(swarm)
        raise KeyboardInterrupt

    def kill(_: LocalSwarm) -> None:
        raise SwarmError("peer 1 still runs after 10 s")

    monkeypatch.setattr(LocalSwarm, "start", start)
    monkeypatch.setattr(LocalSwarm, "kill", kill)
    with contextlib.suppress(KeyboardInterrupt, SwarmError):
        script.main()
    assert Links.closed == [swarm.links for swarm in started if swarm.links]
    assert bool(Links.closed) == (script.__name__ in WITH_A_NETWORK)


def passes(_: object) -> bool:
    return True


def fails(_: object) -> bool:
    return False


def is_interrupted(_: object) -> bool:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["drill", "soak"])
@pytest.mark.parametrize("state_dir", [False, True])
@pytest.mark.parametrize("outcome", [passes, fails, is_interrupted])
def test_states_of_a_rehearsal_stay_and_are_named_unless_it_passed_in_a_temporary_folder(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    name: str,
    state_dir: bool,
    outcome: Callable[[object], bool],
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    script = importlib.import_module(name)
    folders: list[Path] = []

    def judged(runner: Any, *_: object) -> dict[str, Any]:
        folders.append(runner.swarm.folder.parent)
        passed = outcome(runner)
        return {"passed": passed, "inconsistent": 0, "hangs": int(not passed), "ended": []}

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(script, "open_links", Links, raising=False)
    monkeypatch.setattr(script, name, lambda *_: None)
    monkeypatch.setattr(script, "verdict_of", judged)
    words = ["--state-dir", str(tmp_path / "mine")] if state_dir else []
    monkeypatch.setattr(sys, "argv", [name, *words])
    is_over = contextlib.nullcontext() if outcome is not is_interrupted else None
    with is_over or pytest.raises(KeyboardInterrupt):
        assert script.main() == int(outcome is not passes)
    (folder,) = folders
    stays = state_dir or outcome is not passes
    assert folder.exists() == stays
    assert (f"states and logs are in {folder}" in capsys.readouterr().err) == stays


BUSY = """
import multiprocessing, signal
import bench_threads
with bench_threads.load(1):
    print(multiprocessing.active_children()[0].pid, flush=True)
    signal.pause()
"""


def test_busy_processes_end_with_a_script_that_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as killed:
        assert killed.stdout
        busy = int(killed.stdout.readline())
        killed.kill()
        try:
            # Both had the pipe open, so it ends with the second.
            assert select.select([killed.stdout], [], [], 30.0)[0], "it still spins"
            assert killed.stdout.read() == b""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(busy, signal.SIGKILL)


@pytest.mark.exhaustive
def test_a_swarm_of_minutes_ends_with_a_verdict_on_what_it_holds(tmp_path: Path) -> None:
    words = ["--hours", "0.01", "--json", "--state-dir", str(tmp_path)]
    found = subprocess.run(
        [sys.executable, BENCHMARKS / "endurance.py", *words], capture_output=True, check=False
    )
    verdict = json.loads(found.stdout)
    assert (verdict["stopped_early"], verdict["divergences"]) == ("", 0)
    assert verdict["rounds"] > 5
