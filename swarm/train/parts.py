"""Files beside a private state that hold tensors of it, each written by a process of its own.

They lie in the folder `NAME.parts` beside the state, which names each with its length and digest.
A name is given once, so that what the newest state and the one before name is never written to.
"""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from swarm.errors import CorruptState
from swarm.train.hashed_file import digest_of, places_in
from swarm.train.tensor_file import LazyTensors, OpenFile, TensorFile

PREVIOUS = ".previous"
"""Behind the name of the state before."""


class UnreadableState(CorruptState):
    """A file may be sound, but cannot be read now, or not by this version.

    It is as good as damaged for whoever needs it now, and is kept for a later start.
    """


@dataclass(frozen=True)
class Part:
    """A safetensors file, whole and durable.

    Attributes:
        name: in the folder of parts.
        num_bytes: of it.
        digest: BLAKE3 of it, in hex.
    """

    name: str
    num_bytes: int
    digest: str


class Parts(ABC):
    """Parts that are being written, which has begun.

    Attributes:
        rest: the tensors that are in none of them.
    """

    rest: Mapping[str, Tensor]

    @abstractmethod
    def finish(self) -> Sequence[Part]:
        """Waits until all are whole and durable.

        Raises:
            OSError: the disk refused.
            SwarmError: those that write them cannot go on.
        """


class PartedTensors(LazyTensors):
    """Tensors that others hold, who can write them to files themselves."""

    @abstractmethod
    def begin_parts(self, folder: Path, stem: str) -> Parts:
        """Has them begin; the tensors must not change until they have finished.

        Args:
            folder: where the parts come, which exists.
            stem: their names begin with it, and no others do.

        Raises:
            SwarmError: they cannot.
        """


def folder_of(path: Path) -> Path:
    """Where the parts of the state at `path` lie, and those of the state before it."""
    return path.with_name(f"{path.name.removesuffix(PREVIOUS)}.parts")


def new_stem() -> str:
    """The beginning of names that no other parts have."""
    return secrets.token_hex(8)


def open_part(folder: Path, part: Part) -> TensorFile:
    """The tensors of a part, which was checked.

    Raises:
        CorruptState: the file is missing, torn or changed.
        UnreadableState: it cannot be read now.
    """
    path = folder / part.name
    try:
        file = OpenFile.at(path)
        size = os.fstat(file.descriptor).st_size
        if size != part.num_bytes or digest_of(file, size).hex() != part.digest:
            raise CorruptState(f"{path}: the content is not what was written ({size} bytes)")
        return TensorFile(file, places_in(file))
    except OSError as error:
        kind = CorruptState if isinstance(error, FileNotFoundError) else UnreadableState
        raise kind(f"{path}: cannot be read: {error}") from error


def drop_parts(folder: Path, named: Iterable[Part]) -> None:
    """Removes the files of a folder that are none of the named parts; raises OSError."""
    kept = {part.name for part in named}
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)
