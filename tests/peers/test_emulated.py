"""swarm-peer inside a drill: what it replaces is there, and what a peer is at a moment."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peers.emulated import NO_ROUND, Emulation
from swarm.emulation.controls import ControlFolder, Controls, Trap

ROOT = Path(__file__).parents[2]


@pytest.fixture
def emulation(tmp_path: Path) -> Iterator[Emulation]:
    folder = ControlFolder(tmp_path)
    folder.create()
    yield Emulation(folder, peer=0)


def tip(**values: Any) -> Any:
    known = {"digest": "d", "round": 4, "members": {"me": 0, "other": 0}, "owners": {0: ["other"]}}
    return SimpleNamespace(**{**known, **values})


def join_run(emulation: Emulation, manifest: Any, convener: str = "other") -> None:
    machine = SimpleNamespace(tip=manifest, campaign=SimpleNamespace(convener=convener))
    driver: Any = SimpleNamespace(machine=machine, node=SimpleNamespace(peer_id="me"))
    emulation.driver = driver


def test_everything_that_is_replaced_is_there(tmp_path: Path) -> None:
    """In a process of its own: it changes the program for good."""
    ControlFolder(tmp_path).create()
    code = "import sys; from pathlib import Path; from peers.emulated import emulate; "
    code += "emulate(Path(sys.argv[1]), 0)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, timeout=60, check=True)


def test_a_stranger_is_on_no_round_and_meant_by_traps_of_any(emulation: Emulation) -> None:
    emulation.is_joiner = True
    assert emulation.spot().round == NO_ROUND
    assert emulation.spot().roles == ("bootstrap", "joiner")
    emulation.folder.arm(Trap("t", "fetch", round=5, role="joiner"))
    assert emulation.expects("fetch", emulation.spot())


def test_roles_follow_tip_convener_and_roster(emulation: Emulation) -> None:
    join_run(emulation, tip())
    assert emulation.spot().round == 5
    assert emulation.spot().roles == ("bootstrap", "contributor")
    join_run(emulation, tip(owners={0: ["me"]}))
    assert emulation.spot().roles == ("bootstrap", "contributor", "owner")
    join_run(emulation, tip(), convener="me")
    assert emulation.spot().roles == ("bootstrap", "convener")
    emulation.reduces_on = "d"
    assert "reducer" in emulation.spot().roles
    join_run(emulation, tip(members={"other": 0}))
    assert "contributor" not in emulation.spot().roles


def test_the_clock_is_skewed_but_not_for_the_history(emulation: Emulation) -> None:
    emulation.real_time = lambda: 1000.0
    emulation.controls = Controls(skew_s=60.0)
    assert emulation.clock() == 1060.0
    with emulation.true_time():
        assert emulation.clock() == 1000.0
    assert emulation.clock() == 1060.0


def test_a_local_step_takes_as_long_as_it_is_told(emulation: Emulation) -> None:
    emulation.controls = Controls(step_s=0.05, slow=2.0)
    began_s = emulation.step_began_s = time.monotonic()
    emulation.stretch_step()
    assert emulation.step_began_s - began_s >= 0.1
