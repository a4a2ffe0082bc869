"""Drills and soaks that are ended from outside: their peers run in sessions of their own."""

import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from swarm.emulation.local_swarm import LocalSwarm


@pytest.fixture(params=["drill", "soak"])
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    return __import__(request.param)


def test_a_rehearsal_that_is_ended_ends_its_peers_first(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended: list[LocalSwarm] = []

    def begin(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it was not heard")

    class Links:
        def close(self) -> None: ...

    any_links: Any = Links()
    monkeypatch.setattr(script, script.__name__, begin)
    monkeypatch.setattr(script, "open_links", lambda *_: any_links, raising=False)
    for way in ("stop", "kill"):
        monkeypatch.setattr(LocalSwarm, way, lambda swarm: ended.append(swarm))
    monkeypatch.setattr(sys, "argv", [script.__name__, "--state-dir", str(tmp_path)])
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            script.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(ended) == 1
