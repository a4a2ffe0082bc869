"""Named tensors in a file, each read when it is looked up."""

from __future__ import annotations

import os
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarm.errors import CorruptState, StateError

CHUNK_BYTES = 16 * 2**20
"""Bytes of one write. Tensors on a GPU are copied to the host in such pieces."""

Form = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""


@dataclass(frozen=True)
class Place:
    """The place of a tensor in the file."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class OpenFile:
    """A file that stays open as long as this object is referenced, even if its name is removed."""

    def __init__(self, descriptor: int) -> None:
        """Takes ownership of a descriptor."""
        self.descriptor = descriptor

    @classmethod
    def at(cls, path: Path) -> OpenFile:
        """Opens a file for reading and writing. Raises OSError."""
        return cls(os.open(path, os.O_RDWR))

    def __del__(self) -> None:
        os.close(self.descriptor)


class LazyTensors(Mapping[str, Tensor]):
    """A mapping that loads a tensor at each look-up."""

    @abstractmethod
    def forms(self) -> dict[str, Form]:
        """Type and shape of each tensor, without reading any."""


class TensorFile(LazyTensors):
    """A mapping whose values are new tensors on the CPU, each read on look-up.

    It holds the open file, but no tensors. Reading raises CorruptState if the file has become too
    short, and StateError if the disk fails.

    Attributes:
        file: the file of the tensors.
    """

    def __init__(self, file: OpenFile, places: Mapping[str, Place]) -> None:
        self.file, self._places = file, dict(places)
        self._end = max((place.offset + place.num_bytes for place in places.values()), default=0)

    @classmethod
    def temporary(cls, folder: Path | None) -> TensorFile:
        """An empty file without a name, which disappears with this object.

        Args:
            folder: a folder on the disk to use. None for the system's folder for temporary files.

        Raises:
            StateError: it cannot be made.
        """
        try:
            descriptor, path = tempfile.mkstemp(dir=folder)
            os.close(descriptor)
            file = OpenFile.at(Path(path))
            os.unlink(path)
        except OSError as error:
            raise StateError(f"{folder}: no file for tensors: {error.strerror}") from error
        return cls(file, {})

    @classmethod
    def in_memory(cls) -> TensorFile:
        """An empty file in memory only, which other processes can read or write.

        Raises:
            MemoryError: no memory is left.
        """
        try:
            return cls(OpenFile(os.memfd_create("tensors")), {})
        except OSError as error:
            raise MemoryError(f"no memory for tensors: {error.strerror}") from error

    def behind(self) -> TensorFile:
        """An empty `TensorFile` in the same file, which writes after the tensors of this object."""
        more = TensorFile(self.file, {})
        more._end = self._end
        return more

    @property
    def places(self) -> Mapping[str, Place]:
        """The places of the tensors."""
        return self._places

    def forms(self) -> dict[str, Form]:
        """See `LazyTensors`."""
        return {name: (place.dtype, place.shape) for name, place in self._places.items()}

    def append(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor after the others, in pieces of `CHUNK_BYTES`.

        Raises:
            StateError: the disk is full or cannot be written.
        """
        place = Place(self._end, tensor.dtype, tuple(tensor.shape))
        self._fill(place, tensor)
        self._places[name], self._end = place, self._end + place.num_bytes

    def leave_room(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Reserves room after the others for a tensor that is written later or elsewhere."""
        place = Place(self._end, dtype, shape)
        self._places[name], self._end = place, self._end + place.num_bytes

    def put(self, name: str, tensor: Tensor) -> None:
        """Writes a tensor into its reserved room. Raises as `append`."""
        place = self._places[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (place.dtype, place.shape), (name, place)
        self._fill(place, tensor)

    def _fill(self, place: Place, tensor: Tensor) -> None:
        offset = place.offset
        try:
            for piece in bytes_of(tensor):
                while piece:
                    written = os.pwrite(self.file.descriptor, piece, offset)
                    piece, offset = piece[written:], offset + written
        except OSError as error:
            raise StateError(
                f"a tensor cannot be written: {error.strerror}", hint="free some space"
            ) from error

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Appends tensors, looking up one at a time. Raises as `append`."""
        for name in tensors:
            self.append(name, tensors[name])

    def __getitem__(self, name: str) -> Tensor:
        """A copy of the tensor."""
        place = self._places[name]
        flat = torch.empty(place.num_bytes, dtype=torch.uint8)
        view, offset = flat.numpy().data, place.offset
        while view:
            try:
                count = os.preadv(self.file.descriptor, [view[:CHUNK_BYTES]], offset)
            except OSError as error:
                raise StateError(f"a tensor cannot be read: {error.strerror}") from error
            if not count:
                raise CorruptState(f"the file ends within {name}")
            view, offset = view[count:], offset + count
        return flat.view(place.dtype).view(place.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._places  # `Mapping` would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class JoinedFiles(LazyTensors):
    """The tensors of several files as one mapping.

    Attributes:
        files: the files. No name is in two of them.
    """

    def __init__(self, files: Sequence[TensorFile]) -> None:
        self.files = tuple(files)
        self._file_of = {name: file for file in files for name in file}

    def forms(self) -> dict[str, Form]:
        """See `LazyTensors`."""
        return {name: form for file in self.files for name, form in file.forms().items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._file_of[name][name]

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, Form]:
    """Type and shape of each tensor, without reading lazy tensors."""
    if isinstance(tensors, LazyTensors):
        return tensors.forms()
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The memory of a tensor on the host, in pieces of `CHUNK_BYTES`."""
    content = tensor.detach().contiguous().flatten().view(torch.uint8)
    for piece in content.split(CHUNK_BYTES):
        yield memoryview(piece.cpu().numpy())
