"""Digests of files are taken once, and again after any change, also one that hides."""

import os
from pathlib import Path

import pytest
from blake3 import blake3

from swarm.data.file_digests import SETTLED_S, FileDigests
from swarm.errors import DataError


def later(path: Path) -> float:
    return path.stat().st_ctime + SETTLED_S + 1


def digest(path: Path, kept: Path | None, now_s: float) -> str:
    (found,) = FileDigests(kept, lambda: now_s).of(path.parent, [path.name])
    return found


def test_a_file_that_has_not_changed_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept = tmp_path / "a.txt", tmp_path / "kept"
    path.write_bytes(b"text")
    expected = blake3(b"text").hexdigest()
    assert digest(path, kept, later(path)) == expected
    monkeypatch.setattr("swarm.data.file_digests._digest_of", None)
    assert digest(path, kept, later(path)) == expected


def test_an_edit_that_keeps_size_and_time_is_seen(tmp_path: Path) -> None:
    path, kept = tmp_path / "a.txt", tmp_path / "kept"
    path.write_bytes(b"text")
    status = path.stat()
    digest(path, kept, later(path))
    path.write_bytes(b"TEXT")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert digest(path, kept, later(path)) == blake3(b"TEXT").hexdigest()


def test_a_file_that_changed_just_now_is_not_remembered(tmp_path: Path) -> None:
    path, kept = tmp_path / "a.txt", tmp_path / "kept"
    path.write_bytes(b"text")
    digest(path, kept, path.stat().st_ctime + SETTLED_S / 2)
    assert not kept.exists() or kept.read_bytes() == b"{}"


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b'{"a": 1}'])
def test_what_is_remembered_may_be_damaged_and_does_not_grow(
    tmp_path: Path, content: bytes
) -> None:
    path, kept = tmp_path / "a.txt", tmp_path / "kept"
    path.write_bytes(b"text")
    kept.write_bytes(content)
    for _ in range(3):
        assert digest(path, kept, later(path)) == blake3(b"text").hexdigest()
        path.write_bytes(b"text")
    assert kept.read_bytes().count(b":") == 1


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.txt: No such file"):
        FileDigests().of(tmp_path, ["a.txt"])
