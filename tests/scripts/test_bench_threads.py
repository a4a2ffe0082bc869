"""The measurement of peers started by hand: what it makes of swarms that finish and that hang."""

import json
import os
import sys
from types import ModuleType
from typing import Any

import pytest

from swarm.errors import SwarmError


@pytest.fixture
def script(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    for name in script.OPENMP:  # it takes them away
        monkeypatch.setenv(name, "1")
    return script


class Peer:
    """A founder that says when its rounds ended."""

    def __init__(self, ends: list[float]) -> None:
        self._ends = ends

    def events(self) -> list[dict[str, Any]]:
        return [{"event": "applied", "kind": "quorum", "time": end} for end in self._ends]

    def output(self) -> str:
        return "threads: 2 (measured)\n"


class Swarm:
    """Peers started by hand need twice as long as others, or stand still after two rounds."""

    hangs = False

    def __init__(self, *_: object, environment: dict[str, str] | None = None, **__: object) -> None:
        self.environment = environment

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self) -> None: ...

    def finished(self) -> bool:
        return True

    @property
    def is_by_hand(self) -> bool:
        return self.environment is not None

    def wait_until(self, *_: object, **__: object) -> None:
        if self.hangs and self.is_by_hand:
            raise SwarmError("the run: not within 600 s; logs in nowhere")

    @property
    def peers(self) -> list[Peer]:
        if not self.is_by_hand:
            return [Peer([8.0, 16.0, 24.0, 32.0, 40.0])]
        return [Peer([8.0, 16.0, 24.0] if self.hangs else [9.0, 18.0, 27.0, 36.0, 45.0])]


@pytest.mark.parametrize(("hangs", "status"), [(False, 0), (True, 1)])
def test_a_swarm_that_hangs_is_not_fast(
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    hangs: bool,
    status: int,
) -> None:
    monkeypatch.setattr(Swarm, "hangs", hangs)
    monkeypatch.setattr(script, "LocalSwarm", Swarm)
    words = ["--load", "0", "--turns", "1", "--json"]
    monkeypatch.setattr(sys, "argv", ["bench_threads", *words])
    assert script.main() == status
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["local_rounds_s"] == [8.0] * 4
    assert found["hand_rounds_s"] == ([8.0, 8.0, 600.0] if hangs else [9.0] * 4)
    assert found["unfinished"] == int(hangs)
    assert found["ratio"] < script.LIMIT  # which alone would have passed both


def test_one_round_has_no_length(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_threads", "--rounds", "1"])
    with pytest.raises(SystemExit) as ended:
        script.parse()
    assert ended.value.code == 2
