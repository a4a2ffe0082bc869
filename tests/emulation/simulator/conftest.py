"""What the simulator's tests run under."""

import gc
from collections.abc import Iterator

import pytest

from swarm.emulation.simulator.batch import GARBAGE


@pytest.fixture(autouse=True, scope="module")
def _collects_rarely() -> Iterator[None]:
    """As `scripts/simulate` does: looking for cycles is else a fifth of the time."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(GARBAGE)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
