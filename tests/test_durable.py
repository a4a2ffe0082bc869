"""Files that are replaced as a whole: synced paths, and the state after a failed step."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from swarm import durable


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls of the disk, in order: `sync NAME` and `rename NAME`."""
    told: list[str] = []
    sync, rename = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        told.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        sync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        told.append(f"rename {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    return told


def test_content_is_durable_before_its_name_and_the_name_before_the_return(
    tmp_path: Path, steps: list[str]
) -> None:
    durable.write_file(tmp_path / "tip", b"new")
    assert steps == ["sync tip.new", "rename tip", f"sync {tmp_path.name}"]


@pytest.mark.parametrize("failing", range(1, 5))
def test_a_step_that_fails_leaves_old_or_new_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    path, previous = tmp_path / "tip", tmp_path / "tip.previous"
    durable.write_file(path, b"one", previous=previous)
    durable.write_file(path, b"two", previous=previous)
    count = 0

    def stumble(real: object) -> object:
        def step(*given: object, **named: object) -> object:
            nonlocal count
            count += 1
            if count == failing:
                raise OSError(28, "No space left on device")
            return real(*given, **named)  # type: ignore[operator]

        return step

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", stumble(os.fsync))
        patch.setattr(Path, "replace", stumble(Path.replace))
        with pytest.raises(OSError, match="No space"):
            durable.write_file(path, b"three", previous=previous)
    assert path.read_bytes() == (b"three" if failing == 4 else b"two")
    assert previous.read_bytes() == (b"one" if failing < 3 else b"two")
    durable.write_file(path, b"four", previous=previous)
    assert path.read_bytes() == b"four"


def test_every_new_folder_is_made_known_by_the_one_above(tmp_path: Path, steps: list[str]) -> None:
    durable.make_folder(tmp_path / "runs" / "demo", mode=0o700)
    assert steps == [f"sync {tmp_path.name}", "sync runs"]
    assert stat.S_IMODE((tmp_path / "runs" / "demo").stat().st_mode) == 0o700
    steps.clear()
    durable.make_folder(tmp_path / "runs" / "demo")
    assert steps == []


def test_the_mode_is_that_of_the_file_from_its_first_byte_on(tmp_path: Path) -> None:
    (tmp_path / "key.new").write_bytes(b"left behind")
    (tmp_path / "key.new").chmod(0o644)
    durable.write_file(tmp_path / "key", b"secret", mode=0o600)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_lines_are_appended_behind_one_that_is_torn_or_whose_end_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    durable.append_lines(path, b"a\nb")
    durable.append_lines(path, b"c\n", sync=True)
    durable.append_lines(path, b"d\n")
    assert path.read_bytes() == b"a\nb\nc\nd\n"
    monkeypatch.setattr(os, "pread", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
    durable.append_lines(path, b"e\n")
    assert path.read_bytes() == b"a\nb\nc\nd\n\ne\n"


def test_a_folder_takes_what_the_disk_counts(tmp_path: Path) -> None:
    (tmp_path / "whole").write_bytes(b"x" * 2**20)
    (tmp_path / "of-two-names").hardlink_to(tmp_path / "whole")
    with (tmp_path / "hole").open("wb") as file:
        file.truncate(2**30)
    assert 2**20 <= durable.bytes_on_disk(tmp_path) < 1.5 * 2**20
    assert durable.bytes_on_disk(tmp_path / "none") == 0
