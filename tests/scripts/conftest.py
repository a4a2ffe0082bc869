"""Shared fixtures of the tests of scripts."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
BENCHMARKS = SCRIPTS / "benchmarks"


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script of the test file's name. Its folder is on the path only in this test."""
    name = request.module.__name__.rpartition(".test_")[2]
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop(name, None)
    return importlib.import_module(name)
