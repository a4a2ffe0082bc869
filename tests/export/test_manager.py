"""A folder of exports: existing ones stay whole, whatever happens during a write."""

import contextlib
import dataclasses
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from swarm import durable
from swarm.errors import ConfigError, StateError, StateLocked
from swarm.export.card import card
from swarm.export.manager import FACTS_FILE, LATEST, PARTIAL, REMOVED, ExportManager
from swarm.model.pretrained import open_checkpoint
from swarm.network.blobs.blob_store import BlobStore
from tests.export.models import facts_of, found, toy_run

RUN = toy_run()
ROOT = Path(__file__).parents[2]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def small(round_number: int) -> Callable[[Path], None]:
    """Stands for an export: a file of weights, and the facts."""

    def write(folder: Path) -> None:
        (folder / "weights").write_text(f"round {round_number}")
        facts = {"run_id": "a", "manifest": "d", "round": round_number}
        (folder / FACTS_FILE).write_text(json.dumps(facts))

    return write


def is_whole(path: Path) -> bool:
    return (path / "weights").read_text() == f"round {int(path.name[6:])}"


def filled(folder: Path, *rounds: int, keep: int = 3) -> None:
    manager = ExportManager(folder, keep)
    for number in rounds:
        manager.add(number, small(number))
    manager.close()


def test_the_newest_are_kept_and_latest_leads_to_the_last(tmp_path: Path) -> None:
    filled(tmp_path, 2, 4, 6, 8, keep=2)
    assert names(tmp_path) == {"round-000006", "round-000008", LATEST}
    assert os.readlink(tmp_path / LATEST) == "round-000008", "relative: the folder may be moved"
    assert is_whole(tmp_path / LATEST / ".." / "round-000006")


def test_the_link_never_points_at_nothing(tmp_path: Path) -> None:
    filled(tmp_path, 2, 4)
    (tmp_path / LATEST).unlink()
    (tmp_path / LATEST).symlink_to("round-000002")  # as after a kill between the two renames
    manager = ExportManager(tmp_path, 1)
    assert os.readlink(tmp_path / LATEST) == "round-000004"
    assert [one.round for one in manager.exports] == [4]
    manager.close()


def test_what_a_kill_left_is_cleared_and_what_others_put_there_is_not(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    for name in (".partial-round-000004", ".removed-round-000000", "round-000009", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("half")
    (tmp_path / ".latest.new").symlink_to("round-000004")
    ExportManager(tmp_path, 1).close()
    assert names(tmp_path) == {"round-000002", "round-000009", "mine", LATEST}


def test_a_folder_has_one_writer_and_one_run(tmp_path: Path) -> None:
    filled(tmp_path, 2)
    manager = ExportManager(tmp_path, 1)
    with pytest.raises(StateLocked, match="another swarm-export"):
        ExportManager(tmp_path, 1)
    manager.require_run("a")
    with pytest.raises(ConfigError, match="of the run a, not of b"):
        manager.require_run("b")
    manager.close()
    (tmp_path / "other" / LATEST).mkdir(parents=True)
    with pytest.raises(ConfigError, match="no link"):
        ExportManager(tmp_path / "other", 1)


def test_what_has_an_exports_name_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "round-000004").mkdir(parents=True)
    manager = ExportManager(tmp_path, 1)
    with pytest.raises(StateError, match=r"round-000004 already exists \(move it away"):
        manager.add(4, small(4))
    manager.close()
    assert list((tmp_path / "round-000004").iterdir()) == []


class Breaking:
    """The disk fails at the n-th call that changes it or makes it durable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.left = at
        for owner, name in (
            (durable, "sync_file"),
            (durable, "sync_folder"),
            (Path, "mkdir"),
            (Path, "rename"),
            (Path, "replace"),
            (Path, "symlink_to"),
            (Path, "write_text"),
            (shutil, "rmtree"),
        ):
            monkeypatch.setattr(owner, name, self.broken(getattr(owner, name)))

    def broken(self, work: Callable[..., object]) -> Callable[..., object]:
        def done(*args: object, **more: object) -> object:
            self.left -= 1
            if self.left == -1:
                raise OSError(errno.ENOSPC, "no space left on device")
            return work(*args, **more)

        return done


def test_an_error_at_any_step_leaves_whole_exports_and_the_next_goes_on(tmp_path: Path) -> None:
    steps = 0
    while True:
        folder = tmp_path / str(steps)
        filled(folder, 2, 4, keep=2)
        manager = ExportManager(folder, 2)
        with pytest.MonkeyPatch.context() as patch:
            disk = Breaking(patch, steps)
            with contextlib.suppress(OSError):
                manager.add(6, small(6))
        manager.close()
        linked = folder / os.readlink(folder / LATEST)
        assert linked.name in ("round-000004", "round-000006") and is_whole(linked)
        assert all(map(is_whole, folder.glob("round-*"))), steps
        filled(folder, *([] if (folder / "round-000006").exists() else [6]), keep=2)
        assert names(folder) == {"round-000004", "round-000006", LATEST}, steps
        assert all(map(is_whole, folder.glob("round-*"))), steps
        if disk.left >= 0:
            break
        steps += 1
    assert steps > 10


def check_whole(path: Path) -> None:
    """Every tensor is there, and those of expert 0 are the round's."""
    weights = open_checkpoint(path, RUN)
    number = json.loads((path / FACTS_FILE).read_text())["round"]
    assert path.name == f"round-{number:06d}"
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    assert torch.equal(weights[name], torch.full_like(weights[name], float(number)))
    for file in ("README.md", "tokenizer.json", "config.json", "loss.svg"):
        assert (path / file).stat().st_size > 0


class Writers:
    """Starts processes that export endlessly, one after the other, and kills them."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "tests.export.endless", str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, bufsize=1, **pipes)

    def say(self, word: str) -> None:
        self.process.stdin.write(word + "\n")

    def heard(self) -> int:
        return int(self.process.stdout.readline())

    def start(self) -> int:
        self.say("start")
        return self.heard()

    def kill(self, child: int) -> None:
        os.kill(child, signal.SIGKILL)
        assert self.heard() == signal.SIGKILL, "the writer ended by itself"


@pytest.fixture
def writers(tmp_path: Path) -> Iterator[Writers]:
    server = Writers(tmp_path / "out")
    yield server
    server.process.kill()
    server.process.wait(60)
    server.process.stdin.close()
    server.process.stdout.close()


def test_kill_9_at_any_time_leaves_the_last_export_whole(tmp_path: Path, writers: Writers) -> None:
    folder, chance, newest, left_over = tmp_path / "out", random.Random(0), 0, 0
    for _ in range(6):
        child = writers.start()
        begin_s = time.monotonic()
        while not (folder / f"round-{newest + 1:06d}").exists():
            assert time.monotonic() - begin_s < 60, "the child writes nothing"
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.15))
        writers.kill(child)
        for path in folder.glob("round-*"):
            check_whole(path)
        if (folder / LATEST).is_symlink():  # the very first may have no link yet
            check_whole(folder / os.readlink(folder / LATEST))
        left_over += any(name.startswith(PARTIAL) for name in names(folder))
        manager = ExportManager(folder, 2)
        rounds = [one.round for one in manager.exports]
        manager.close()
        assert rounds[-1] > newest and len(rounds) <= 2
        newest = rounds[-1]
        assert os.readlink(folder / LATEST) == f"round-{newest:06d}"
        assert not any(name.startswith((PARTIAL, REMOVED)) for name in names(folder))
    assert left_over, "no kill fell into the writing of an export"


def test_a_card_says_which_experts_nobody_trains() -> None:
    store = BlobStore(None)
    manifest = found(store, RUN)
    assert "without an owner" not in card(facts_of(RUN, manifest, store))
    some = dataclasses.replace(manifest, owners={**manifest.owners, 1: (), 2: ()})
    said = card(facts_of(RUN, some, store))
    assert "| experts without an owner | 1-2, frozen since round 0 at the earliest |" in said
