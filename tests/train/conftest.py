"""What the tests of engines share."""

from collections.abc import Iterator

import pytest

from tests.train.crews import Crews, shared_crews


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    """Workers for the tests of a file."""
    with shared_crews() as crews:
        yield crews
