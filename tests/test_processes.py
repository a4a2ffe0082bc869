"""The basis of the tests: processes end, and each test runs once."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from tests.processes import running

ENDLESS = [sys.executable, "-c", "import time; time.sleep(3600)"]


def test_a_process_ends_with_its_block_though_an_assert_fails() -> None:
    with pytest.raises(AssertionError, match="this one"), running(ENDLESS) as process:
        raise AssertionError("this one")
    assert process.returncode < 0


def test_a_process_that_says_nothing_ends_after_its_limit() -> None:
    with running(ENDLESS, limit_s=0.1, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b""
        assert process.wait(60) < 0


def test_each_test_is_in_one_group_of_the_script_that_runs_all() -> None:
    script = Path(__file__).parents[1] / "scripts" / "test"
    groups = [
        Expression.compile(words)
        for words in re.findall(r'^run_group "(.+?)"', script.read_text(), re.M)
    ]
    for markers in ((), ("scenario",), ("alone",), ("scenario", "alone")):
        chosen = [group.evaluate(lambda name, of=markers: name in of) for group in groups]
        assert chosen.count(True) == 1, markers
