"""Workers that are killed in the middle of any task lose no bit, and soon train again."""

import logging
import os
import re
from contextlib import closing

import pytest
import torch

from swarm.experts import expert_shapes
from swarm.train.saving.checkpoint import load_newest
from swarm.train.workers.command_history import Saved
from swarm.train.workers.crew import Crew, Place
from tests.train.crews import Crews
from tests.train.dying_worker import COMPUTING, TASKS
from tests.train.runs import all_names, batch, same, tiny_run
from tests.train.workers.test_parallel import CLIPPED, OWNED, THEN, save, train

pytestmark = pytest.mark.exhaustive

AGAIN_S = 30.0
"""Limit until a peer trains again."""
ARMED = """
import os, sys
from pathlib import Path
if "swarm.train.workers.worker_process" in sys.orig_argv:
    from tests.train.dying_worker import arm
    arm(Path({folder!r}))
"""
RUN = tiny_run(**CLIPPED, train={"micro_batch_sequences": 1})
NORM = "model.norm.weight"


class FreshCrews(Crews):
    """Workers for one test only."""

    def new(self, size):
        return Crew(Place(size))


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder whose files ask for workers to be killed."""
    folder = tmp_path / "tasks"
    (tmp_path / "site").mkdir()
    folder.mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(ARMED.format(folder=str(folder)))
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    return folder


def values(names, number):
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(16, 16, generator=generator) for name in names}


def all_of(engine, path, number):
    """A step and a round of a peer: all calls of an engine. Returns the engine's answers."""
    given = [train(engine, RUN, [number])]
    given.append(engine.read(all_names(RUN)))
    save(path, engine.state_dict(), number)
    given.append(dict(sorted(load_newest(path).state.engine.tensors.items())))
    engine.own(THEN if number % 2 else OWNED)
    engine.write(values(expert_shapes(RUN.model, 1), number))
    engine.lend(values(expert_shapes(RUN.model, 2), number))
    engine.write_moments({name: 2 * each for name, each in engine.read_moments([NORM]).items()})
    given.append(engine.evaluate(batch(RUN, 9)))
    return given


def assert_alike(mine, other):
    for found, expected in zip(mine, other, strict=True):
        assert same(found, expected) if isinstance(found, dict) else found == expected


def engine_in(folder, options):
    folder.mkdir()
    saved = Saved.at(folder / "private")
    return FreshCrews().engine(RUN, OWNED, given={"folder": folder, "saved": saved}, **options)


STAGES = {"pp": 2}


@pytest.mark.parametrize(
    "options", [{}, {"ep": 2}, STAGES], ids=["whole", "experts dealt out", "in two stages"]
)
def test_a_worker_may_be_killed_in_the_middle_of_any_task(tasks, tmp_path, caplog, options):
    """Compared with unkilled workers, the results of each task have the same bits."""
    mine, other = tmp_path / "mine", tmp_path / "other"
    with (
        closing(engine_in(mine, options)) as engine,
        closing(engine_in(other, options)) as straight,
    ):
        for number, task in enumerate((None, *COMPUTING, *TASKS)):
            if task == "sum of gradients" and options == STAGES:
                continue  # each gradient is one stage's
            expected = all_of(straight, other / "private", number)
            # A worker restarts only because another task has killed one.
            asked = {"forward", task} if task == "return" else {task} - {None}
            for each in asked:
                (tasks / each).touch()
            caplog.clear()
            with caplog.at_level(logging.INFO):
                found = all_of(engine, mine / "private", number)
            assert_alike(found, expected)
            assert not list(tasks.iterdir()), f"no worker came to {task}"
            assert len(re.findall("worker [01] was killed", caplog.text)) == len(asked), task
            away_s = re.findall(r"workers began within ([\d.]+) s", caplog.text)
            assert all(float(seconds) < AGAIN_S for seconds in away_s), task
            again = re.findall(r"steps made again: (\d+)", caplog.text)
            assert all(int(steps) == 1 for steps in again), "since the newest private state"
