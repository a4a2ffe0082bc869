"""What the tests of scripts share."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
BENCHMARKS = SCRIPTS / "benchmarks"


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that a file is named after; its folder is on the path in this test alone."""
    name = request.module.__name__.rpartition(".test_")[2]
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop(name, None)
    return importlib.import_module(name)
