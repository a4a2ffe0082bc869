"""Files that are replaced as a whole or get whole lines, and that a power cut does not take back.

POSIX promises neither by itself: a file written in place may be seen half written, and a name is on
disk only once the folder that holds it was synced, the folder's own name once its parent was.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def beside(path: Path) -> Path:
    """Where the next content of a file is written, in the same folder."""
    return path.with_name(f"{path.name}.new")


def write_file(
    path: Path, content: bytes, *, mode: int = 0o666, previous: Path | None = None
) -> None:
    """Replaces a file; when this returns, its content survives a kill and a power cut.

    Args:
        path: the file; killed at any moment, the old or the new content is there as a whole.
        content: all of it.
        mode: permissions, less the process's mask.
        previous: a name under which the content before is kept.

    Raises:
        OSError: the disk refused; the old content is there.
    """
    new = beside(path)
    new.unlink(missing_ok=True)  # one that was left behind may have other permissions
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    put_in_place(path, previous=previous)


def put_in_place(path: Path, *, previous: Path | None = None) -> None:
    """Gives what lies `beside` a file, and was synced, the file's name.

    The content before is kept under the name `previous`, if one is given.

    Raises:
        OSError: the disk refused; the old content is there.
    """
    if previous is not None and path.exists():
        # Links, not renames: at no moment is there no file at `path`, or none at `previous`.
        linked = previous.with_name(f"{previous.name}.link")
        linked.unlink(missing_ok=True)
        os.link(path, linked)
        linked.replace(previous)
    beside(path).replace(path)
    sync_folder(path.parent)


def older(path: Path) -> Path:
    """Where the lines lie that a file had before it became too large."""
    return path.with_name(f"{path.name}.old")


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file that `append_lines` bounds, the oldest first; none where it is missing.

    Raises:
        OSError: the disk refused.
    """
    found: list[bytes] = []
    for each in (older(path), path):
        if each.exists():
            found += each.read_bytes().splitlines()
    return found


def append_lines(
    path: Path, lines: bytes, *, sync: bool = False, most_bytes: int | None = None
) -> bool:
    """Adds whole lines to a file, which is made when missing; a line that a crash tore is ended.

    Args:
        path: the file.
        lines: each with its end.
        sync: makes them durable.
        most_bytes: a file that has reached this size becomes the `older` one, in place of that
            before, so there are about twice as many bytes at most. None: it grows.

    Returns:
        Whether the next line begins a new file.

    Raises:
        OSError: the disk refused.
    """
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        file.write(lines if _ends_a_line(file.fileno(), size) else b"\n" + lines)
        if sync:
            file.flush()
            os.fsync(file.fileno())
        size = file.tell()
    is_full = most_bytes is not None and size >= most_bytes
    if is_full:
        path.replace(older(path))
    return is_full


def _ends_a_line(descriptor: int, size: int) -> bool:
    """Whether a new line may begin here; False where that cannot be read: one too many is none."""
    try:
        return not size or os.pread(descriptor, 1, size - 1) == b"\n"
    except OSError:
        return False


def make_folder(folder: Path, *, mode: int = 0o777) -> None:
    """Makes a folder, and those above it that are missing, durably; raises OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True, mode=mode)
    sync_folder(folder.parent)


def bytes_on_disk(folder: Path) -> int:
    """What removing a folder gives back, as the disk counts it: files have holes, or two names.

    What vanishes meanwhile does not count.
    """
    sizes = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(OSError):
                status = (Path(root) / name).lstat()
                sizes[status.st_ino] = 512 * status.st_blocks
    return sum(sizes.values())


def sync_file(path: Path) -> None:
    """Makes the content of a file durable that others have written; raises OSError."""
    _sync(path, os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable; raises OSError."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
