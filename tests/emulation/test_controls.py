"""Traps and controls: files by which a drill controls a peer."""

from pathlib import Path

import pytest

from swarm.emulation.controls import Caught, ControlFolder, Controls, Trap


@pytest.fixture
def folder(tmp_path: Path) -> ControlFolder:
    made = ControlFolder(tmp_path / "emulation")
    made.create()
    return made


def test_a_trap_catches_its_phase_role_and_peer_from_its_round_on() -> None:
    trap = Trap("t", "reduce", round=3, peer=2, role="reducer")
    here = {"phase": "reduce", "number": 3, "peer": 2, "roles": ("owner", "reducer")}
    assert trap.catches(**here)
    assert trap.catches(**{**here, "number": 9})
    for other in ({"phase": "offer"}, {"number": 2}, {"peer": 1}, {"roles": ("owner",)}):
        assert not trap.catches(**{**here, **other})


def test_a_trap_is_taken_by_one_peer_only(folder: ControlFolder) -> None:
    trap = Trap("t", "reduce")
    folder.arm(trap)
    assert folder.armed() == [trap]
    caught = Caught("t", 1, 4, 12.5)
    assert folder.take(trap, caught)
    assert not folder.take(trap, Caught("t", 2, 4, 12.6))
    assert folder.armed() == [] and folder.caught("t") == caught


def test_a_trap_that_is_taken_away_catches_nobody(folder: ControlFolder) -> None:
    folder.arm(Trap("t", "reduce"))
    folder.disarm("t")
    assert not folder.take(Trap("t", "reduce"), Caught("t", 1, 4, 12.5))
    assert folder.caught("t") is None


def test_a_peer_is_told_what_all_are_until_it_is_told_something_else(
    folder: ControlFolder,
) -> None:
    folder.tell_all(Controls(step_s=0.5))
    folder.tell(1, slow=4.0)
    assert folder.controls(0) == Controls(step_s=0.5)
    assert folder.controls(1) == Controls(step_s=0.5, slow=4.0)
    folder.tell(1, slow=1.0)
    assert folder.controls(1) == Controls(step_s=0.5)
