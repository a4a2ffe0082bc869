import errno
import json
import logging
import os
import random
import threading
import weakref
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from blake3 import blake3

from swarm.errors import CorruptState, StateError
from swarm.train.engine import tensor_file
from swarm.train.engine.engine import EngineState
from swarm.train.engine.tensor_file import LazyTensors
from swarm.train.saving import checkpoint, hashed_file
from swarm.train.saving.checkpoint import (
    PrivateState,
    Saving,
    load_newest,
    load_private,
    peek_counts,
    previous_path,
    read_rng,
    restore_rng,
    resume_newest,
    save_private,
)
from tests.train.runs import all_names, batch, new_engine, same, tiny_run

CPU = torch.device("cpu")


def state_of(engine_state, round_number=1):
    return PrivateState(
        engine=engine_state,
        run_id="tiny-1234",
        base_tip="ab" * 32,
        round=round_number,
        steps=6,
        tokens=1536,
        seconds=1.25,
        data_position=2**40 + 5,
        offered={"shared.0": "cd" * 32, "expert.1": "ef" * 32},
        expert_bases={1: "12" * 32, 10: "34" * 32},
        rng=read_rng(CPU),
    )


def small_state(round_number=1):
    tensors = {
        "master.model.norm.weight": torch.tensor([1.5, -0.0, float(round_number)]),
        "exp_avg.model.norm.weight": torch.tensor([1e-40, 0.0, -3.0]),
        "exp_avg_sq.empty": torch.empty(0, 4),
    }
    return state_of(EngineState(tensors, (1, 10), 6, 2, 1), round_number)


def assert_equal(left, right):
    assert same(dict(left.engine.tensors), dict(right.engine.tensors))
    assert same(dict(left.rng), dict(right.rng))
    for changed in (left, right):
        assert list(changed.engine.tensors)
    plain = [
        replace(state, engine=replace(state.engine, tensors={}), rng={}) for state in (left, right)
    ]
    assert plain[0] == plain[1]


def full_disk(*_):
    raise OSError(28, "No space left on device")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "private"


def test_what_was_saved_is_loaded_bit_for_bit(path):
    save_private(path, small_state())
    assert_equal(load_private(path), small_state())
    assert_equal(load_newest(path).state, small_state())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("part_bases", {"shared.0": "56" * 32}),
        ("carried", frozenset(["expert.3", "shared.1"])),
        ("deltas", {"expert.3": "d" * 64}),
    ],
)
def test_what_few_states_have_is_saved_where_there_is_any(path, field, value):
    plain, more = small_state(), replace(small_state(), **{field: value})
    save_private(path, more)
    assert_equal(load_private(path), more)
    save_private(path, plain)
    assert field.encode() not in path.read_bytes()
    assert_equal(load_private(path), plain)


def test_nothing_saved_is_no_error(path):
    assert load_newest(path) is None


def test_the_file_is_safetensors_json_and_a_digest(path):
    save_private(path, small_state())
    content = path.read_bytes()
    assert content[-32:] == blake3(content[:-32]).digest()
    length = int.from_bytes(content[-40:-32], "little")
    assert json.loads(content[-40 - length : -40])["run_id"] == "tiny-1234"
    tensors = safetensors.torch.load(content[: -40 - length])
    assert same(
        {name: tensors[name] for name in small_state().engine.tensors},
        dict(small_state().engine.tensors),
    )


def test_rows_of_a_stack_are_saved_without_their_neighbours(path):
    stack = torch.arange(24.0).view(4, 3, 2)
    state = state_of(EngineState({"a": stack[1], "b": stack[:, 1], "c": stack[3].T}, (), 0, 0, 0))
    save_private(path, state)
    assert same(dict(load_private(path).engine.tensors), dict(state.engine.tensors))


def test_a_state_whose_tensors_come_one_by_one_is_the_same_file(path):
    """As the state of workers: listing its tensors reads none of them."""
    state = small_state()
    save_private(path, state)
    whole = path.read_bytes()
    lazy = load_private(path).engine
    lookups = []

    class Counted(LazyTensors):
        def forms(self):
            return lazy.tensors.forms()

        def __iter__(self):
            return iter(lazy.tensors)

        def __len__(self):
            return len(lazy.tensors)

        def __getitem__(self, name):
            lookups.append(name)
            return lazy.tensors[name]

    save_private(path, replace(state, engine=replace(lazy, tensors=Counted())))
    assert path.read_bytes() == whole
    assert sorted(lookups) == sorted(lazy.tensors)


def test_the_counts_of_a_state_are_read_without_its_tensors(path):
    assert peek_counts(path) is None
    state = small_state()
    save_private(path, state)
    assert peek_counts(path) == state.engine.counts
    for content in (b"", b"123", b"[]" + (2).to_bytes(8, "little") + bytes(32)):
        path.write_bytes(content)
        assert peek_counts(path) is None


def test_the_state_before_is_kept(path):
    for number in (1, 2, 3):
        save_private(path, small_state(number))
    assert load_private(path).round == 3
    assert load_private(previous_path(path)).round == 2
    assert sorted(file.name for file in path.parent.iterdir()) == ["private", "private.previous"]


def test_a_flip_of_any_byte_is_detected(path):
    save_private(path, small_state())
    whole = path.read_bytes()
    for place in random.Random(0).sample(range(len(whole)), 200):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(CorruptState):
            load_private(path)


@pytest.mark.parametrize("kept", [0, 1, 7, 31, 32, 33, 100, -33, -1])
def test_a_truncated_file_is_detected(path, kept):
    save_private(path, small_state())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CorruptState):
        load_private(path)


def test_bytes_behind_the_end_are_detected(path):
    save_private(path, small_state())
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CorruptState):
        load_private(path)


def test_another_format_is_refused(path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_FORMAT", 99)
    save_private(path, small_state())
    monkeypatch.undo()
    with pytest.raises(CorruptState, match="format"):
        load_private(path)


def test_a_damaged_file_gives_way_to_the_one_before_and_says_so(path, caplog):
    save_private(path, small_state(1))
    save_private(path, small_state(2))
    path.write_bytes(path.read_bytes()[:-5])
    with caplog.at_level(logging.ERROR):
        loaded = load_newest(path)
    assert loaded.state.round == 1
    assert "the content has changed" in loaded.reason
    assert "using private.previous, round 1" in loaded.reason
    assert "the content has changed" in caplog.text


def test_who_goes_on_from_the_state_before_keeps_it_until_the_next_is_there(path, monkeypatch):
    """A kill between the renames of a saving must not leave two damaged files."""
    save_private(path, small_state(1))
    save_private(path, small_state(2))
    path.write_bytes(path.read_bytes()[:-5])
    unfinished = path.with_name("private.new")
    unfinished.write_bytes(b"a saving that was killed")
    assert load_newest(path).state.round == 1, "reading alone changes nothing"
    assert path.exists() and unfinished.exists()
    loaded = resume_newest(path)
    assert loaded.state.round == 1 and "the content has changed" in loaded.reason
    assert_equal(loaded.state, small_state(1))
    assert [file.name for file in path.parent.iterdir()] == ["private"]
    replace_file = checkpoint.Path.replace

    def killed_at_last(self, target):
        if target == path:
            raise Killed
        return replace_file(self, target)

    monkeypatch.setattr(checkpoint.Path, "replace", killed_at_last)
    with pytest.raises(Killed):
        save_private(path, small_state(3))
    monkeypatch.undo()
    assert resume_newest(path).state.round == 1
    save_private(path, small_state(3))
    path.write_bytes(b"")
    assert load_newest(path).state.round == 1


def of_another_format(path, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "_FORMAT", 4)
        save_private(path, small_state(2))


def unreadable_now(path, monkeypatch):
    save_private(path, small_state(2))
    open_file = checkpoint.OpenFile.at

    def at(opened):
        if opened == path:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_file(opened)

    monkeypatch.setattr(checkpoint.OpenFile, "at", at)


@pytest.mark.parametrize("save", [of_another_format, unreadable_now])
def test_a_newest_state_that_is_sound_but_cannot_be_read_stays(path, monkeypatch, save):
    save_private(path, small_state(1))
    save(path, monkeypatch)
    newest, before = path.read_bytes(), previous_path(path).read_bytes()
    loaded = resume_newest(path)
    assert_equal(loaded.state, small_state(1))
    assert f"{path}: " in loaded.reason and "using private.previous, round 1" in loaded.reason
    assert (path.read_bytes(), previous_path(path).read_bytes()) == (newest, before)
    save_private(path, small_state(3))
    assert previous_path(path).read_bytes() == newest
    monkeypatch.undo()
    assert resume_newest(path).state.round == 3


def test_two_damaged_files_are_an_error_that_names_both(path):
    save_private(path, small_state(1))
    save_private(path, small_state(2))
    for file in (path, previous_path(path)):
        file.write_bytes(b"")
    with pytest.raises(CorruptState, match=r"private: .*private\.previous: "):
        load_newest(path)


def test_a_state_that_may_be_readable_later_is_to_be_mended_before_it_is_removed(path, monkeypatch):
    save_private(path, small_state(1))
    unreadable_now(path, monkeypatch)
    previous_path(path).write_bytes(b"")
    with pytest.raises(CorruptState, match="mend what cannot be read, or remove the files"):
        load_newest(path)


class Killed(BaseException):
    """The process dies here."""


def killed_after(moment):
    """Wraps functions. The process dies after so many calls of them in all."""
    left = moment

    def killing(real):
        def call(*arguments, **named):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return real(*arguments, **named)

        return call

    return killing


@pytest.mark.parametrize("moment", range(12))
def test_a_kill_at_any_moment_of_saving_leaves_a_whole_state(path, monkeypatch, moment):
    """Each call that changes the disk is a moment. The state is the new or the old one, whole."""
    save_private(path, small_state(1))
    save_private(path, small_state(2))
    killing = killed_after(moment)
    for owner, name in (
        (checkpoint.os, "fsync"),
        (checkpoint.os, "link"),
        (checkpoint.Path, "replace"),
        (checkpoint.Path, "unlink"),
        (checkpoint.Path, "open"),
    ):
        monkeypatch.setattr(owner, name, killing(getattr(owner, name)))
    try:
        save_private(path, small_state(3))
        finished = True
    except Killed:
        finished = False
    monkeypatch.undo()
    loaded = load_newest(path)
    assert load_private(path).round == loaded.state.round in ((3,) if finished else (2, 3))
    # Seven calls: open, fsync, unlink, link, replace, replace, fsync of the folder.
    assert finished == (moment >= 7)
    save_private(path, small_state(4))
    assert load_newest(path).state.round == 4


def test_a_disk_that_refuses_is_a_state_error(path, monkeypatch):
    monkeypatch.setattr(checkpoint.os, "fsync", full_disk)
    with pytest.raises(StateError, match="No space left"):
        save_private(path, small_state())


def test_random_numbers_go_on_where_they_were():
    before = torch.get_rng_state()
    try:
        states = read_rng(CPU)
        expected = torch.rand(3)
        restore_rng(states, CPU)
        assert torch.equal(torch.rand(3), expected)
    finally:
        torch.set_rng_state(before)


def test_resuming_from_disk_gives_the_bits_of_a_run_without_a_stop(path):
    run = tiny_run()
    straight, stopped = new_engine(run, [1, 2]), new_engine(run, [1, 2])
    for step in range(5):
        straight.step(batch(run, step), lr=1e-2)
        stopped.step(batch(run, step), lr=1e-2)
    save_private(path, state_of(stopped.state_dict()))
    stopped.step(batch(run, 99), lr=1e-2)  # the saved tensors are no longer views of the engine
    again = new_engine(run)
    again.load_state_dict(load_private(path).engine)
    for step in range(5, 10):
        straight.step(batch(run, step), lr=1e-2)
        again.step(batch(run, step), lr=1e-2)
    assert same(again.read(all_names(run)), straight.read(all_names(run)))
    assert same(dict(again.state_dict().tensors), dict(straight.state_dict().tensors))


def test_tensors_are_written_before_it_is_known_what_is_offered(path, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 64)
    state = state_of(EngineState({"a": torch.arange(1000.0)}, (), 0, 0, 0))
    with Saving(path, state.engine, state.rng) as begun:
        begun._file._written.result()
        written = path.with_name("private.new").stat().st_size
        assert not path.exists()
        save_private(path, state, begun)
    assert 4000 <= written < path.stat().st_size
    assert_equal(load_private(path), state)


def test_what_was_begun_and_given_up_leaves_the_state_before_and_no_thread(path, monkeypatch):
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 64)
    save_private(path, small_state(1))
    threads = threading.active_count()
    state = state_of(EngineState({"a": torch.arange(10_000.0)}, (), 0, 0, 0), 2)
    with pytest.raises(RuntimeError, match="asked to stop"), Saving(path, state.engine, state.rng):
        raise RuntimeError("asked to stop")
    assert threading.active_count() == threads
    assert load_private(path).round == 1


def test_a_disk_that_refuses_a_begun_saving_is_tried_anew(path, monkeypatch):
    """More chunks than the queue holds, so that the hashing thread must not wait forever."""
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 64)
    monkeypatch.setattr(hashed_file, "FLUSH_BYTES", 64)
    state = state_of(EngineState({"a": torch.arange(1000.0)}, (), 0, 0, 0))
    monkeypatch.setattr(checkpoint.os, "fdatasync", full_disk)
    with Saving(path, state.engine, state.rng) as begun:
        with pytest.raises(StateError, match="No space left"):
            save_private(path, state, begun)
        monkeypatch.setattr(hashed_file, "FLUSH_BYTES", 2**20)
        save_private(path, state, begun)
    assert_equal(load_private(path), state)


def test_a_disk_that_is_full_is_given_back_what_was_written(path, monkeypatch):
    """At once, because offered values wait for room while the saving is still open."""
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 64)
    monkeypatch.setattr(hashed_file, "FLUSH_BYTES", 640)
    state = state_of(EngineState({"a": torch.arange(1000.0)}, (), 0, 0, 0))
    monkeypatch.setattr(checkpoint.os, "fdatasync", full_disk)
    with Saving(path, state.engine, state.rng) as begun:
        assert begun._file._written.exception(60)
        assert path.with_name("private.new").stat().st_size == 0
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("name", ["fsync", "link"])
def test_what_could_not_be_finished_is_removed(path, monkeypatch, name):
    save_private(path, small_state(1))
    monkeypatch.setattr(checkpoint.os, name, full_disk)
    with pytest.raises(StateError, match="No space left"):
        save_private(path, small_state(2))
    assert list(path.parent.iterdir()) == [path]
    assert load_private(path).round == 1


@pytest.mark.parametrize("end", ["finished", "given up", "refused"])
def test_a_saving_that_has_ended_refers_to_no_tensor(path, monkeypatch, uncollected, end):
    """The engine then owns other experts. Keeping the old values would raise the peak."""
    tensor = torch.arange(1000.0)
    state, found = state_of(EngineState({"a": tensor}, (), 0, 0, 0)), weakref.ref(tensor)

    with Saving(path, state.engine, state.rng) as begun:
        if end == "finished":
            save_private(path, state, begun)
        elif end == "refused":
            monkeypatch.setattr(checkpoint.os, "fdatasync", full_disk)
            monkeypatch.setattr(hashed_file, "FLUSH_BYTES", 64)
            with pytest.raises(StateError, match="No space left"):
                save_private(path, state, begun)
    del tensor, state, begun
    assert found() is None


def test_saving_holds_a_few_chunks_at_most(path, monkeypatch):
    """A hanging disk stops the hashing when the queue of chunks is full."""
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 64)
    go_on, hashed, pieces = threading.Event(), [], tensor_file.bytes_of

    def counted(tensor):
        for piece in pieces(tensor):
            hashed.append(len(piece))
            yield piece

    class Slow(type(path)):
        def open(self, *arguments):
            go_on.wait(60)
            return super().open(*arguments)

    monkeypatch.setattr(tensor_file, "bytes_of", counted)
    state = state_of(EngineState({"a": torch.arange(1000.0)}, (), 0, 0, 0))
    with Saving(Slow(path), state.engine, state.rng) as begun:
        while len(hashed) < hashed_file.CHUNKS_AHEAD:
            assert not begun._file._hashed.done()
        assert not begun._file._hashed.done()
        assert len(hashed) <= hashed_file.CHUNKS_AHEAD + 1
        go_on.set()
        save_private(path, state, begun)
    assert_equal(load_private(path), state)


@pytest.mark.parametrize("call", ["open", "fdatasync"])
def test_a_disk_that_does_not_answer_is_given_up(path, monkeypatch, caplog, call):
    answers = threading.Event()

    class Hanging(type(path)):
        def open(self, *arguments):
            if call == "open":
                answers.wait(60)
            return super().open(*arguments)

    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 64)
    monkeypatch.setattr(hashed_file, "FLUSH_BYTES", 64)
    monkeypatch.setattr(checkpoint.os, "fdatasync", lambda _: answers.wait(60))
    for name, seconds in (("STALLED_S", 0.05), ("LOOK_S", 0.01), ("END_S", 0.1)):
        monkeypatch.setattr(hashed_file, name, seconds)
    state = state_of(EngineState({"a": torch.arange(1000.0)}, (), 0, 0, 0))
    refused = pytest.raises(StateError, match=r"the disk has not answered for")
    with Saving(Hanging(path), state.engine, state.rng) as begun, refused:
        save_private(path, state, begun)
    assert "a disk may not answer: swarm-private" in caplog.text
    monkeypatch.undo()
    save_private(path, state)
    answers.set()  # its bytes from now on go to no file of that name
    begun._file._pool.shutdown()
    assert_equal(load_private(path), state)
