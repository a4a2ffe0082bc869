"""A private state of several writers: whole or refused, whatever happens to its files."""

import errno
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from swarm.errors import CorruptState, StateError
from swarm.train.engine.engine import EngineState
from swarm.train.engine.tensor_file import forms_of
from swarm.train.saving import checkpoint
from swarm.train.saving.checkpoint import (
    load_newest,
    load_private,
    previous_path,
    resume_newest,
    save_private,
)
from swarm.train.saving.hashed_file import Part, PartedTensors, Parts, folder_of
from swarm.train.workers.command_history import (
    PartSaving,
    deal_out,
    flagged,
    flags_of,
    held,
    part_name,
)
from tests.train.runs import same
from tests.train.saving.test_checkpoint import Killed, assert_equal, killed_after, state_of

ALONE = "master.d"
"""A tensor that no writer of parts holds."""


class Writers(PartedTensors):
    """Tensors of three writers, each with its own threads. `ALONE` comes one by one."""

    def __init__(self, tensors):
        self.tensors = tensors

    def forms(self):
        return forms_of(self.tensors)

    def __getitem__(self, name):
        return self.tensors[name]

    def __iter__(self):
        return iter(self.tensors)

    def __len__(self):
        return len(self.tensors)

    def begin_parts(self, folder, stem):
        return Begun(self, folder, stem)


class Begun(Parts):
    def __init__(self, writers, folder, stem):
        names = writers.tensors.keys() - {ALONE}
        dealt = deal_out(writers.forms(), [names] * 3)
        self.savings = [
            PartSaving(stem, folder / part_name(stem, rank), {n: writers[n] for n in mine})
            for rank, mine in enumerate(dealt)
        ]
        own = {name for mine in dealt for name in mine}
        self.rest = {name: each for name, each in writers.items() if name not in own}

    def finish(self):
        answers = []
        for saving in self.savings:
            saving._done.exception(60)
            answers.append(saving.answer())
        for answer in answers:
            if answer["is"] == "refused":
                raise OSError(answer["errno"], answer["text"])
        return [Part(*answer["part"]) for answer in answers if answer["part"]]


def parted(number=1):
    tensors = {
        f"{kind}.{name}": torch.full((2, 3), float(number)) + k
        for k, name in enumerate("abcd")
        for kind in ("master", "exp_avg")
    }
    tensors[ALONE] = torch.tensor([-0.0, 1e-40, number])
    state = state_of(EngineState(Writers(tensors), (1, 10), 6, 2, 1), number)
    return replace(state, rng={"cpu": torch.arange(4, dtype=torch.uint8)})


def by_one(state):
    """The same state in one process."""
    return replace(state, engine=replace(state.engine, tensors=dict(state.engine.tensors)))


def files_of(path):
    return {file.name: file for file in folder_of(path).iterdir()}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "private"


def test_what_several_have_written_is_loaded_bit_for_bit(path):
    save_private(path, parted())
    assert_equal(load_private(path), parted())
    written = [safetensors.torch.load_file(file) for file in files_of(path).values()]
    assert len(written) == 3 and all(written)
    names = {name for each in written for name in each}
    assert parted().engine.tensors.keys() - names == {ALONE, "exp_avg.d"}


def test_the_parts_of_two_states_are_kept_and_no_others(path):
    for number in (1, 2, 3):
        save_private(path, parted(number))
    assert len(files_of(path)) == 6
    assert (load_private(path).round, load_private(previous_path(path)).round) == (3, 2)
    plain = by_one(parted(4))
    save_private(path, plain)  # by one process
    assert len(files_of(path)) == 3
    save_private(path, plain)
    assert not files_of(path)
    assert_equal(load_private(path), plain)


def test_a_flip_in_any_file_is_refused(path):
    """For each byte of the index and of the headers, and for some others."""
    save_private(path, parted())
    index = path.read_bytes()
    places = [(path, k) for k in range(len(index))]
    for file in files_of(path).values():
        content = file.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        rest = random.Random(0).sample(range(header, len(content)), 40)
        places += [(file, k) for k in (*range(header), *rest)]
    for file, place in places:
        whole = file.read_bytes()
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        with pytest.raises(CorruptState):
            load_private(path)
        file.write_bytes(whole)
    assert_equal(load_private(path), parted())


def test_a_part_that_is_gone_short_long_or_of_another_state_is_refused(path):
    save_private(path, parted(1))
    before = {file.suffix: file for file in files_of(path).values()}
    save_private(path, parted(2))
    mine = [file for file in files_of(path).values() if file not in before.values()]
    other = before[mine[0].suffix].read_bytes()
    whole = mine[0].read_bytes()
    assert len(other) == len(whole) and other != whole
    for content in (other, whole[:-1], whole + b"\0", b""):
        mine[0].write_bytes(content)
        with pytest.raises(CorruptState, match="the content has changed"):
            load_private(path)
    mine[0].unlink()
    with pytest.raises(CorruptState, match="cannot be read"):
        load_private(path)
    loaded = load_newest(path)
    assert loaded.state.round == 1 and "using private.previous" in loaded.reason
    assert loaded.newest_is_lost


def test_a_part_that_cannot_be_read_now_does_not_make_its_state_a_lost_one(path, monkeypatch):
    save_private(path, parted(1))
    before = set(files_of(path).values())
    save_private(path, parted(2))
    part = next(file for file in files_of(path).values() if file not in before)
    open_file = checkpoint.OpenFile.at

    def at(opened):
        if opened == part:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_file(opened)

    with monkeypatch.context() as busy:
        busy.setattr(checkpoint.OpenFile, "at", at)
        loaded = resume_newest(path)
    assert loaded.state.round == 1 and not loaded.newest_is_lost
    assert resume_newest(path).state.round == 2


@pytest.mark.parametrize("moment", range(34))
def test_a_kill_at_any_moment_leaves_a_whole_state(path, monkeypatch, moment):
    """Each call of any thread that changes the disk is a moment. No call follows it."""
    save_private(path, parted(1))
    save_private(path, parted(2))
    killing = killed_after(moment)

    class Torn:
        """Each piece that is written is a moment, too."""

        def __init__(self, file):
            self._file = file
            self.write = killing(file.write)

        def __getattr__(self, name):
            return getattr(self._file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

    real_open = Path.open
    for owner, name in (
        (checkpoint.os, "fsync"),
        (checkpoint.os, "link"),
        (Path, "replace"),
        (Path, "unlink"),
    ):
        monkeypatch.setattr(owner, name, killing(getattr(owner, name)))
    monkeypatch.setattr(Path, "open", killing(lambda *a, **n: Torn(real_open(*a, **n))))
    try:
        save_private(path, parted(3))
        finished = True
    except Killed:
        finished = False
    monkeypatch.undo()
    loaded = load_newest(path)
    assert load_private(path).round == loaded.state.round in ((3,) if finished else (2, 3))
    assert_equal(loaded.state, parted(loaded.state.round))
    assert load_private(previous_path(path)).round < loaded.state.round or not finished
    assert finished == (moment >= 33)
    save_private(path, parted(4))
    assert_equal(load_newest(path).state, parted(4))
    assert len(files_of(path)) <= 6


def test_a_full_disk_is_a_state_error_and_the_state_before_stays(path, monkeypatch):
    save_private(path, parted(1))
    kept = sorted(files_of(path))
    real = checkpoint.os.fsync
    calls = []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(StateError, match="No space left"):
        save_private(path, parted(2))
    monkeypatch.undo()
    assert_equal(load_private(path), parted(1))
    assert sorted(files_of(path)) == kept, "an abandoned saving takes no room"
    save_private(path, parted(3))
    assert_equal(load_private(path), parted(3))


def test_a_state_of_the_format_before_is_read(path, monkeypatch):
    plain = by_one(parted())
    monkeypatch.setattr(checkpoint, "_FORMAT", 2)
    save_private(path, plain)
    monkeypatch.undo()
    assert b'"format": 2' in path.read_bytes()
    assert_equal(load_private(path), plain)


def test_tensors_are_dealt_to_who_has_them_and_evenly():
    forms = {f"{kind}.{n}": (torch.float32, (4, n)) for n in range(1, 9) for kind in ("m", "v")}
    first = {name for name in forms if int(name[2:]) < 5}
    dealt = deal_out(forms, [set(forms), first, {"m.8"}])
    assert sorted(name for names in dealt for name in names) == sorted(forms)
    assert set(dealt[1]) <= first and not dealt[2], "masters go with their moments"
    sizes = [sum(int(name[2:]) for name in names) for names in dealt]
    assert sizes == [52, 20, 0]  # 5 to 8, and smaller ones
    assert deal_out(forms, [first]) == [[name for name in dealt_order(forms) if name in first]]
    even = deal_out(forms, [set(forms)] * 4)
    assert [sum(int(name[2:]) for name in names) for names in even] == [18] * 4
    assert flagged(forms, flags_of(forms, first)) == [name for name in forms if name in first]


def dealt_order(forms):
    numbers = sorted({int(name[2:]) for name in forms}, reverse=True)
    return [f"{kind}.{n}" for n in numbers for kind in ("m", "v")]


def test_only_whole_tensors_in_memory_are_held():
    tensors = {"a": torch.zeros(4), "b": torch.zeros(2)}
    forms = {"a": (torch.float32, (4,)), "b": (torch.float32, (4,)), "c": (torch.float32, (1,))}
    assert held(tensors, forms) == {"a"}
    assert held(Writers(tensors), forms) == set()
    assert same(dict(Writers(tensors)), tensors)
