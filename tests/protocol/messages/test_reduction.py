"""Peers that a reducer waits for much longer than for others."""

import pytest

from swarm.protocol.messages.messages import Ballot
from swarm.protocol.rounds.reducer import Job


@pytest.mark.parametrize(
    ("out", "slow"),
    [
        ({"B": 0, "C": 0, "D": 30}, {"D"}),
        ({"B": 3, "C": 4, "D": 30}, {"D"}),
        ({"B": 20, "C": 20, "D": 30}, set()),  # the phase is still young
        ({"B": 0, "C": 30, "D": 30}, set()),  # its own line may be the slow one
        ({"B": 0, "C": 0, "D": 0}, set()),
        ({"D": 30}, set()),  # with two peers it is unknown which
        ({}, set()),
    ],
)
def test_who_is_slow_is_slower_than_most(out: dict[str, int], slow: set[str]) -> None:
    """Missing values of each peer, out of 40. The reducer's own are always there."""
    values = {f"shared.{part}": [("A", f"A{part}")] for part in range(40)}
    for part, of_unit in enumerate(values.values()):
        of_unit += [(peer, f"{peer}{part}") for peer in out]
    inputs = {unit: tuple(of_unit) for unit, of_unit in values.items()}
    job = Job("A", Ballot(0, "A"), "roster", inputs, {})
    missing = {f"{peer}{part}" for peer, num in out.items() for part in range(num)}
    stored = {digest for of_unit in values.values() for _, digest in of_unit} - missing
    assert job.slow(stored) == slow
