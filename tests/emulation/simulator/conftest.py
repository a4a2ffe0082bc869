"""What the simulator's tests run under."""

from collections.abc import Iterator

import pytest

from swarm.emulation.simulator.batch import collecting_rarely


@pytest.fixture(autouse=True, scope="module")
def _collects_rarely() -> Iterator[None]:
    with collecting_rarely():
        yield
