"""Faults of this machine end a program with one line, a hint and their own exit code."""

import errno
import logging
import threading
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from peers.command_line.options import program
from swarm.errors import OutOfMemory, StateError, SwarmError
from swarm.peer.machine.local_faults import UNBORN_LOOKS, UnbornThreads, named_fault
from swarm.peer.machine.state_directory import RunDirectory, StateDirectory
from swarm.peer.status.status import PeerStatus


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (MemoryError(), OutOfMemory, "no memory is left"),
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory, "micro batch"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemory, "--capacity"),
        (OSError(errno.ENOSPC, "No space left", "/x/record"), StateError, "/x/record: No space"),
        (OSError(errno.EMFILE, "Too many open files"), StateError, "ulimit -n"),
        (OSError(errno.EACCES, "denied", "/x/record"), StateError, "/x/record: denied (run it as"),
        (OSError(errno.EPERM, "not permitted", "/x/lock"), StateError, "/x/lock: not permitted ("),
    ],
)
def test_a_fault_of_the_machine_has_a_name_and_a_remedy(
    error: BaseException, kind: type[SwarmError], text: str
) -> None:
    named = named_fault(error)
    assert type(named) is kind and text in str(named)


@pytest.mark.parametrize("bug", [RuntimeError("a bug"), OSError(errno.ENOENT, "x"), KeyError()])
def test_our_own_bugs_keep_their_tracebacks(bug: BaseException) -> None:
    assert named_fault(bug) is None


def test_torch_s_own_refusal_is_recognised() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert isinstance(named_fault(raised.value), OutOfMemory)


def test_a_program_without_memory_ends_with_one_line_and_its_code() -> None:
    @program("swarm-test")
    def main() -> None:
        """Takes too much."""
        raise MemoryError

    assert isinstance(main, click.Command)
    result = CliRunner().invoke(main)
    assert result.exit_code == OutOfMemory.exit_code
    assert result.stderr.startswith("swarm-test: error: no memory is left (")
    assert result.stderr.count("\n") == 1


def test_a_program_in_another_user_s_folder_ends_with_one_line_and_its_code() -> None:
    @program("swarm-test")
    def main() -> None:
        """Looks into a folder of mode 0700."""
        raise PermissionError(errno.EACCES, "Permission denied", "/var/lib/swarm/current_run")

    assert isinstance(main, click.Command)
    result = CliRunner().invoke(main)
    assert result.exit_code == StateError.exit_code == 6
    assert result.stderr == (
        "swarm-test: error: /var/lib/swarm/current_run: Permission denied "
        "(run it as the user that owns it)\n"
    )


def test_a_state_directory_of_another_user_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, mode: int = 0o777) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("swarm.durable.make_folder", refuse)
    with pytest.raises(StateError, match=r"denied \(run it as the user that owns it"):
        StateDirectory(tmp_path / "theirs")


def test_history_that_cannot_be_written_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    status = PeerStatus.__new__(PeerStatus)
    status.directory = RunDirectory(tmp_path / "is" / "not" / "there")
    with caplog.at_level(logging.ERROR):
        status._event("applied", round=3)
    assert "event applied was not written" in caplog.text


@pytest.mark.parametrize("name", ["port", "known_peers", "current_run"])
def test_a_damaged_file_of_a_state_directory_is_as_good_as_none(tmp_path: Path, name: str) -> None:
    for damage in (b"\xff\xfe\x00garbage", b"", b"../../etc"):
        (tmp_path / name).write_bytes(damage)
        state = StateDirectory(tmp_path)
        assert state.port is None
        assert not [known for known in state.known_peers if "/tcp/" in known.text]
        run = state.current_run
        assert run is None or not state.run(run).config_path.exists()
        state.close()


def test_a_state_directory_that_cannot_be_made_is_a_state_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StateError, match="--state-dir"):
        StateDirectory(tmp_path / "file" / "state")


class Unborn(threading.Thread):
    """A thread that never runs, as without memory for its first call."""

    ident = None

    def run(self) -> None:
        self.ended.wait()

    def __init__(self) -> None:
        super().__init__(name="unborn", daemon=True)
        self.ended = threading.Event()


def test_a_thread_that_never_begins_is_told_after_some_looks_and_a_running_one_never() -> None:
    unborn, looks = Unborn(), UnbornThreads()
    unborn.start()
    try:
        seen = [looks.look() for _ in range(UNBORN_LOOKS)]
    finally:
        unborn.ended.set()
        unborn.join()
    assert seen == [[]] * (UNBORN_LOOKS - 1) + [["unborn"]]
    assert looks.look() == []
