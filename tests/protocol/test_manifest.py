"""The order of manifests: who is in whose ancestry, by codes alone."""

import pytest

from swarm.protocol.manifest import Code, is_ancestor

REFORM = (3, (2, "62"))
LATER = (5, (1, "7a"))


def at(height: int, *lineage: tuple[int, tuple[int, str]]) -> Code:
    return (*lineage, (height, ()))


@pytest.mark.parametrize(
    ("code", "of", "is_one"),
    [
        (at(2), at(2), True),
        (at(2), at(7), True),
        (at(7), at(2), False),
        (at(3), at(3, REFORM), True),  # a reform repeats the height of its parent
        (at(4), at(9, REFORM), False),  # decided by those that the reform left
        (at(3, REFORM), at(9), False),
        (at(4, REFORM), at(5, REFORM), True),
        (at(5, REFORM), at(8, REFORM, LATER), True),
        (at(6, REFORM), at(8, REFORM, LATER), False),
        (at(3), at(8, REFORM, LATER), True),
        (at(4, (3, (3, "99"))), at(5, REFORM), False),
    ],
)
def test_ancestry(code: Code, of: Code, is_one: bool) -> None:
    assert is_ancestor(code, of) is is_one
