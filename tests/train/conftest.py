"""Shared fixtures of the tests of engines."""

from collections.abc import Iterator

import pytest

from tests.train.crews import Crews, shared_crews
from tests.train.runs import new_streaming


@pytest.fixture(scope="session")
def crews() -> Iterator[Crews]:
    """Workers for all tests of a process. Each starts in 3 s, most of them for torch."""
    with shared_crews() as crews:
        yield crews


@pytest.fixture
def engines():
    """Makes streaming engines and ends their threads."""
    made = []

    def make(*args, **options):
        made.append(new_streaming(*args, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
