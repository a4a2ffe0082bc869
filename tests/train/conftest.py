"""What the tests of engines share."""

from collections.abc import Iterator

import pytest

from tests.train.crews import Crews, shared_crews


@pytest.fixture(scope="session")
def crews() -> Iterator[Crews]:
    """Workers for all tests of a process: each starts in 3 s, most of which torch takes."""
    with shared_crews() as crews:
        yield crews
