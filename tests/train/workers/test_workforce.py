"""Asking and restarting workers, without processes: deadlines, and the limit of restarts."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarm.errors import WorkersFailed
from swarm.train.engine.engine import Counts, EngineState
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.tensor_file import JoinedFiles, TensorFile
from swarm.train.workers.command_history import Command, History, Saved, load_commands
from swarm.train.workers.crew import Crew, Place
from swarm.train.workers.exchange import Message
from swarm.train.workers.members import Lost
from swarm.train.workers.workforce import KEPT, TRIES, CommandTimeouts, Workforce
from tests.train.runs import tiny_run

RUN = tiny_run()
BEGIN, FINISH = Command({"do": "begin_step"}), Command({"do": "finish_step"})
Act = Callable[[Message], Message]


class FakeCrew(Crew):
    """Gives the scripted answers, and records its time limits."""

    may_grow = False

    def __init__(self, act: Act) -> None:
        self.place, self.pids, self.is_starting = Place(1), (1,), True
        self.act, self.given_s = act, dict[str, float]()

    def ask(self, message: Message, file: TensorFile | None, within_s: float) -> list[Message]:
        self.given_s[message["do"]] = within_s
        return [self.act(message)]

    def end(self) -> None:
        """Does nothing."""


def force_of(make: Callable[[], Act], **options: Any) -> tuple[Workforce, list[FakeCrew]]:
    """A workforce with crews from `make`, and the list of started crews."""
    started: list[FakeCrew] = []

    def start() -> Crew:
        assert len(started) < 50, "workers are started forever"
        started.append(FakeCrew(make()))
        return started[-1]

    history, below = History(None, Saved.at(None)), replace(EngineOptions.of(RUN), **options)
    return Workforce(
        RUN, [EngineOptions.of(RUN), below], start, history, CommandTimeouts()
    ), started


def test_workers_that_end_in_each_begun_step_end_the_peer() -> None:
    """Although each of them answers once that it is still computing."""

    def make() -> Act:
        asked: list[Message] = []

        def act(message: Message) -> Message:
            if message["do"] == "stands":
                asked.append(message)
                if len(asked) > 1:
                    raise Lost("worker 0 was killed")
            return {"stands": False}

        return act

    force, started = force_of(make)
    force.tell(BEGIN)
    with pytest.raises(WorkersFailed, match="3 times in a row, the last time: worker 0 was killed"):
        force.until_it_stands()
    assert len(started) == TRIES
    assert not force.pids


def test_workers_that_never_come_to_the_end_of_a_begun_step_end_the_peer() -> None:
    class Impatient(CommandTimeouts):
        def within_s(self, *_: Any) -> float:
            return -1.0

    force, started = force_of(lambda: lambda _: {"stands": False})
    force._patience = Impatient()
    force.tell(BEGIN)
    with pytest.raises(WorkersFailed, match="3 times in a row, the last time: no end of a step"):
        force.until_it_stands()
    assert len(started) == TRIES


def test_a_level_that_needs_less_is_no_loss_of_a_begun_step() -> None:
    made: list[int] = []

    def make() -> Act:
        made.append(1)

        def act(message: Message) -> Message:
            if message["do"] == "stands" and len(made) == 1:
                raise Lost("worker 0: no memory", is_memory=True)
            if message["do"] == "stands" and len(made) < TRIES + 1:
                raise Lost("worker 0 was killed")
            return {"stands": True}

        return act

    force, started = force_of(make, recompute="routing")
    force.tell(BEGIN)
    force.until_it_stands()
    assert len(started) == TRIES + 1
    assert force.options.recompute == "routing"


def test_a_state_of_several_files_may_take_as_long_as_all_of_them_take_to_be_read() -> None:
    """Workers read the earlier files with the last one."""
    files = [TensorFile.temporary(None) for _ in range(3)]
    for number, file in enumerate(files):
        file.append(f"master.{number}", torch.zeros(1000 * (3 - number)))
    force, started = force_of(lambda: lambda _: {})
    for command in load_commands(EngineState(JoinedFiles(files), (), 0, 0, 0)):
        force.tell(command)
    patience = CommandTimeouts()
    wanted = patience.least_s + 4 * 6000 / patience.bytes_per_s
    assert started[0].given_s["load"] == pytest.approx(wanted, abs=1e-9)


def test_a_begun_step_says_how_long_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products and its end count, but not the controller's work in between."""
    clock = {"now_s": 100.0}
    monkeypatch.setattr(time, "monotonic", lambda: clock["now_s"])
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    polls: list[Message] = []

    def act(message: Message) -> Message:
        if message["do"] == "stands":
            polls.append(message)
            clock["now_s"] += 4.0
        if message["do"] == "finish_step":
            clock["now_s"] += 2.0
        return {"stands": len(polls) == 3}

    patience = CommandTimeouts()
    force, started = force_of(lambda: act)
    force.tell(BEGIN)
    force.until_it_stands()
    clock["now_s"] += 1000.0
    force.tell(FINISH)
    assert started[0].given_s["stands"] == started[0].given_s["finish_step"] == patience.first_s
    force.tell(BEGIN)
    assert started[0].given_s["begin_step"] == patience.least_s + patience.times * 14.0


def test_a_step_that_a_machine_slept_through_sets_no_deadline_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One step of 8 hours gave hanging workers 160 hours, for weeks."""
    clock = {"now_s": 100.0, "step_s": 8 * 3600.0}
    monkeypatch.setattr(time, "monotonic", lambda: clock["now_s"])

    def act(message: Message) -> Message:
        if message["do"] == "step":
            clock["now_s"] += clock["step_s"]
        return {}

    force, started = force_of(lambda: act)
    force.tell(Command({"do": "step"}))
    clock["step_s"] = 10.0
    for _ in range(KEPT + 1):
        force.tell(Command({"do": "step"}))
    patience = CommandTimeouts()
    assert started[0].given_s["step"] == patience.least_s + patience.times * 10.0


def test_of_what_workers_were_told_only_what_came_since_the_state_on_disk_is_kept() -> None:
    """Over a 7B's home line a cycle's shared values are 18 GB."""
    on_disk: list[tuple[Counts, tuple[int, int]]] = []
    history = History(None, Saved(lambda: on_disk[-1] if on_disk else None, lambda: None))
    cycles = []
    for cycle in (1, 2):
        kept = history.kept({"values": torch.full((4,), float(cycle))})
        history.add(Command({"do": "write_part"}, kept))
        cycles.append(weakref.ref(kept))
        del kept
        counts: Counts = ((1,), cycle, 0, 0)
        history.mark(counts, lambda _: True)
        assert cycles[-1]() is not None, "the state is still being written"
        on_disk.append((counts, (cycle, cycle)))
    history.add(BEGIN)
    assert [cycle() for cycle in cycles] == [None, None]
