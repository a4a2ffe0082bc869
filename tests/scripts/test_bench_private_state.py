"""The measurement of private states: what it saves and reads, as small as it goes."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from swarm.model.cost import PRIVATE_BYTES


def test_a_state_has_the_bytes_that_are_asked_for(script: ModuleType) -> None:
    tensors = script.make_state(1e-4).engine.tensors
    assert sum(each.nbytes for each in tensors.values()) == pytest.approx(1e5, rel=0.01)
    assert len(tensors) == 3 * script.NUM_UNITS
    assert PRIVATE_BYTES == 12  # a master and two moments, fp32


def test_every_action_is_timed_and_the_7b_is_extrapolated(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "sync", lambda: None)  # what others write takes its time
    words = ["--gigabytes", "1e-4", "--turns", "1", "--folder", str(tmp_path), "--json"]
    monkeypatch.setattr(sys, "argv", ["bench_private_state", *words])
    assert script.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"save_before_s", "save_now_s", "load_before_s", "load_now_s"} < found.keys()
    assert found["seven_b_gigabytes"] == pytest.approx(30.0, rel=0.01)
    assert list(tmp_path.iterdir()) == []
