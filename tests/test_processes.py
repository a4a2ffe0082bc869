"""What the tests themselves stand on: processes that they start end."""

import subprocess
import sys

import pytest

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
