"""Fixtures of the simulator's tests."""

from collections.abc import Iterator

import pytest

from swarm.emulation.simulator.batch import collecting_rarely


@pytest.fixture(autouse=True, scope="module")
def _collects_rarely() -> Iterator[None]:
    with collecting_rarely():
        yield
