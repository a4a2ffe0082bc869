"""Files that are replaced as a whole, or get whole lines, and survive a power cut.

POSIX promises neither. A file that is written in place may be read half written. A file's name is
on disk only once its folder was synced, and the folder's name only once the folder above was.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def beside(path: Path) -> Path:
    """The path at which the next content of a file is written, in the same folder."""
    return path.with_name(f"{path.name}.new")


def write_file(
    path: Path, content: bytes, *, mode: int = 0o666, previous: Path | None = None
) -> None:
    """Replaces a file. After the return, its content survives a kill and a power cut.

    Args:
        path: the file. After a kill at any moment it has the whole old or the whole new content.
        content: the whole new content.
        mode: permissions, reduced by the process's mask.
        previous: a name under which the old content is kept.

    Raises:
        OSError: the disk could not be written; the old content is still there.
    """
    new = beside(path)
    new.unlink(missing_ok=True)  # a file left over from a kill may have other permissions
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    put_in_place(path, previous=previous)


def put_in_place(path: Path, *, previous: Path | None = None) -> None:
    """Gives a file's name to the synced content at the path `beside` it.

    The old content is kept under the name `previous`, if one is given.

    Raises:
        OSError: the disk could not be written; the old content is still there.
    """
    if previous is not None and path.exists():
        # A link instead of a rename, so that `path` and `previous` exist at every moment.
        linked = previous.with_name(f"{previous.name}.link")
        linked.unlink(missing_ok=True)
        os.link(path, linked)
        linked.replace(previous)
    beside(path).replace(path)
    sync_folder(path.parent)


def older(path: Path) -> Path:
    """The path of a file's earlier lines, once the file has become too large."""
    return path.with_name(f"{path.name}.old")


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file that `append_lines` bounds, oldest first. A missing file has no lines.

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
    """Adds whole lines to a file, made if missing. First ends a line that a crash cut short.

    Args:
        path: the file.
        lines: each with a line end.
        sync: makes the lines durable.
        most_bytes: a file of this size is renamed to its `older` path, and replaces the file there.
            So both files together have at most about twice this size. None: no bound.

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
    """Whether a new line may begin here. False if unreadable, since an empty line is harmless."""
    try:
        return not size or os.pread(descriptor, 1, size - 1) == b"\n"
    except OSError:
        return False


def make_folder(folder: Path, *, mode: int = 0o777) -> None:
    """Makes a folder, and the missing folders above it, durably. Raises OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True, mode=mode)
    sync_folder(folder.parent)


def bytes_on_disk(folder: Path) -> int:
    """Bytes that removing a folder frees.

    Counts disk blocks, because files may have holes or two names. Leaves out files that vanish
    during the count.
    """
    sizes = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(OSError):
                status = (Path(root) / name).lstat()
                sizes[status.st_ino] = 512 * status.st_blocks
    return sum(sizes.values())


def sync_file(path: Path) -> None:
    """Makes durable a file that other code has written. Raises OSError."""
    _sync(path, os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable. Raises OSError."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
