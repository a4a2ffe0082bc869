"""swarm-peer inside a drill: where it is caught, and its role at that moment."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peers.emulated import NO_ROUND, Emulation
from swarm.emulation.controls import ControlFolder, Controls, Trap
from swarm.network.rounds.record_file import RecordFile
from swarm.peer.machine.state_directory import RunDirectory
from swarm.protocol.messages.events import Effect, Fetch, Persist, Purpose, Record, Send
from swarm.protocol.messages.messages import Ballot, Certificate, Commit, Header
from swarm.protocol.values.manifest import Kind
from tests.protocol.round_pump import found, make_rules


@pytest.fixture
def emulation(tmp_path: Path) -> Iterator[Emulation]:
    folder = ControlFolder(tmp_path)
    folder.create()
    yield Emulation(folder, peer=0)


def tip(**values: Any) -> Any:
    known = {"digest": "d", "round": 4, "members": {"me": 0, "other": 0}, "owners": {0: ["other"]}}
    return SimpleNamespace(**{**known, **values})


def join_run(emulation: Emulation, manifest: Any, convener: str = "other") -> None:
    campaign = SimpleNamespace(convener=convener)
    machine: Any = SimpleNamespace(me="me", tip=manifest, campaign=campaign)
    emulation.machine = machine


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


def test_the_clock_is_skewed_but_not_for_the_history(
    emulation: Emulation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulation.controls = Controls(skew_s=86400.0)
    began_s = time.time()
    monkeypatch.setattr(time, "time", emulation.clock)
    assert time.time() >= began_s + 86400
    history = RunDirectory(tmp_path)
    history.append_event("applied")
    assert began_s - 1 <= json.loads(history.events_path.read_text())["time"] < began_s + 60


def test_a_local_step_takes_as_long_as_it_is_told(emulation: Emulation) -> None:
    emulation.controls = Controls(step_s=0.05, slow=2.0)
    began_s = emulation.step_began_s = time.monotonic()
    emulation.stretch_step()
    assert emulation.step_began_s - began_s >= 0.1


class Trapped(Emulation):
    """Records the places where it would stop."""

    def __init__(self, folder: ControlFolder) -> None:
        super().__init__(folder, peer=0)
        self.stood: list[str] = []

    def at(self, phase: str, spot: Any = None) -> None:
        self.stood.append(phase)


@pytest.fixture
def trapped(tmp_path: Path) -> Trapped:
    folder = ControlFolder(tmp_path)
    folder.create()
    return Trapped(folder)


def carry_out(emulation: Emulation, *effects: Effect) -> list[Effect]:
    """The carried-out effects, in order."""
    done: list[Effect] = []

    async def act(effect: Effect) -> None:
        if isinstance(effect, Persist) and emulation.record_file:
            emulation.record_file.write(effect.record)
        done.append(effect)

    async def all_of_them() -> None:
        for effect in effects:
            await emulation.carry_out(effect, act)

    asyncio.run(all_of_them())
    return done


def test_a_convener_is_caught_between_its_decision_and_its_commit(
    trapped: Trapped, tmp_path: Path
) -> None:
    """Its announcement waits until the record is on its disk, if a trap waits for that phase."""
    founded = found(make_rules(), ["me", "other"])
    file = RecordFile(tmp_path / "record")
    file.write(Record(founded, None, None))
    join_run(trapped, founded, convener="me")
    assert trapped.machine is not None
    trapped.on_rounds(trapped.machine, file)
    news = replace(founded, run="run", kind=Kind.QUORUM, height=1, round=1, parent=founded.digest)
    decided = Certificate(Ballot(0, "me"), {})
    commit = Send(
        "other",
        Header(news.code, news.digest, news.generation),
        Commit(news, decided, founded),
    )
    persist = Persist(Record(news, decided, founded))
    assert carry_out(trapped, commit) == [commit], "nobody is to be caught"
    trapped.folder.arm(Trap("t", "commit", round=1, role="convener"))
    assert carry_out(trapped, commit, persist) == [persist, commit]
    assert trapped.stood == ["commit", "apply"]


def test_only_a_stranger_is_caught_at_its_first_blob(trapped: Trapped) -> None:
    trapped.on_fetched(1, 2)
    assert trapped.stood == []
    trapped.on_joining()
    trapped.on_fetched(1, 2)
    assert trapped.stood == ["fetch"]


def test_a_fetch_is_under_way_when_its_peer_is_caught(trapped: Trapped) -> None:
    fetch = Fetch(Purpose.PROPOSAL, ())
    assert carry_out(trapped, fetch) == [fetch]
    assert trapped.stood == ["fetch"]
