"""A peer's private state on disk: all it needs, besides a manifest, to go on bit for bit.

The file is a safetensors file with the tensors, then one JSON object with all else, the length of
that (8 bytes) and the BLAKE3 digest of everything before (32). It is written beside its place,
fsynced and renamed; the one before stays as `NAME.previous`. Nothing in it is executed, and nothing
is read before the digest of the whole file was checked.

The offered digests stand at the end, so that tensors are hashed and written, each in a thread of
its own, while the offered values are still encoded and stored.

safetensors itself would hold a second copy of the state in memory, some 40 GB for the 7B model;
writing its format is the short part.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, Self

import torch
from blake3 import blake3
from torch import Tensor

from swarm import durable
from swarm.errors import CorruptState, StateError
from swarm.train.engine import Counts, EngineState
from swarm.train.guard import LossScale
from swarm.train.tensor_file import LazyTensors, OpenFile, Place, TensorFile, bytes_of

_FORMAT = 2
_LENGTH_BYTES = 8
_DIGEST_BYTES = 32
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_CHUNKS_AHEAD = 4
"""Chunks that are hashed and not written: the memory that saving takes."""
_HASHED_BYTES = 64 * 2**20
"""Read and hashed at once: enough for all cores."""
_FLUSH_BYTES = 256 * 2**20
"""Written at once, before the disk is made to keep up: the last fsync shall be short."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrivateState:
    """Everything of a peer that no manifest holds.

    Attributes:
        engine: masters, moments and counts.
        run_id: the run it belongs to.
        base_tip: digest of the manifest that it was trained from.
        round: the round it was offered for.
        steps: local steps that are offered,
        tokens: their tokens, and
        seconds: how long they took.
        data_position: samples of the peer's own text that it has trained on, these included.
        offered: unit -> digest of the offered value.
        expert_bases: owned expert -> digest of the agreed value that its progress extends.
        rng: states of torch's random generators, see `read_rng`.
        carried: what the round before left out already, see `swarm.protocol.adoption`.
        deltas: unit -> digest of the delta that makes its offered value, where there is one.
        part_bases: part of the shared tensors -> the same, if not all are due in each round.
        is_offered: False if the steps are in no offer yet: written as the peer stopped.
    """

    engine: EngineState
    run_id: str
    base_tip: str
    round: int
    steps: int
    tokens: int
    seconds: float
    data_position: int
    offered: Mapping[str, str]
    expert_bases: Mapping[int, str]
    rng: Mapping[str, Tensor]
    carried: frozenset[str] = frozenset()
    deltas: Mapping[str, str] = field(default_factory=dict)
    part_bases: Mapping[str, str] = field(default_factory=dict)
    is_offered: bool = True


@dataclass(frozen=True)
class Loaded:
    """A private state and which of the two files it came from, in a sentence."""

    state: PrivateState
    reason: str


class Saving:
    """A private state that is being written: its tensors are hashed and written by two threads.

    The tensors must not change until it was finished. A context manager: a file that was not
    finished when the context ends is given up, and the threads have ended.
    """

    def __init__(self, path: Path, engine: EngineState, rng: Mapping[str, Tensor]) -> None:
        """Begins to write; `finish` raises the errors of writing."""
        self.path = path
        self.is_open = True
        """Whether it can be finished: once, whatever comes of it."""
        self._tensors = (engine.tensors, {f"rng.{name}": each for name, each in rng.items()})
        self._digest = blake3(max_threads=blake3.AUTO)
        self._chunks = SimpleQueue[bytes | memoryview | None]()
        self._room = threading.Semaphore(_CHUNKS_AHEAD)
        self._given_up = False
        self._pool = ThreadPoolExecutor(2, "swarm-private")
        self._written = self._pool.submit(self._write)
        self._hashed = self._pool.submit(self._hash)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._given_up, self.is_open = True, False
        self._pool.shutdown()
        if self._written.exception() is None:
            self._written.result().close()

    def finish(self, state: PrivateState) -> None:
        """Adds all that is no tensor and puts the file into its place, durable.

        Raises:
            OSError: the disk refused, now or while the tensors were written.
        """
        self.is_open = False
        self._hashed.result()
        with self._written.result() as file:
            for chunk in _trailer(state):
                self._digest.update(chunk)
                file.write(chunk)
            file.write(self._digest.digest())
            file.flush()
            os.fsync(file.fileno())
        durable.put_in_place(self.path, previous=previous_path(self.path))

    def _hash(self) -> None:
        try:
            for chunk in _encode(*self._tensors):
                if self._given_up:
                    return
                self._digest.update(chunk)
                self._room.acquire()
                self._chunks.put(chunk)
        finally:
            self._chunks.put(None)

    def _write(self) -> BinaryIO:
        try:
            durable.make_folder(self.path.parent)
            file = durable.beside(self.path).open("wb")
            try:
                self._write_chunks(file)
            except BaseException:
                file.close()
                raise
            return file
        finally:
            self._given_up = True  # nobody takes chunks any more
            self._room.release()

    def _write_chunks(self, file: BinaryIO) -> None:
        unflushed = 0
        while (chunk := self._chunks.get()) is not None:
            self._room.release()
            unflushed += file.write(chunk)
            if unflushed >= _FLUSH_BYTES:
                os.fdatasync(file.fileno())
                unflushed = 0


def save_private(path: Path, state: PrivateState, begun: Saving | None = None) -> None:
    """Makes a private state durable; the one before is kept as `NAME.previous`.

    When this returns the file survives a power cut. Killed at any moment, it leaves a whole file at
    `path`. Cost: writes 12 bytes per trained parameter once, holds no copy of them.

    `begun` is the saving of just its tensors, if that was begun; it is tried once.

    Raises:
        StateError: the disk is full or cannot be written.
    """
    try:
        if begun is not None and begun.is_open:
            begun.finish(state)
        else:
            with Saving(path, state.engine, state.rng) as saving:
                saving.finish(state)
    except OSError as error:
        raise StateError(f"{path}: cannot be written: {error}") from error


def load_private(path: Path) -> PrivateState:
    """Reads a private state; its tensors are read from the file as they are asked for.

    The file may be replaced meanwhile: it is held open. Cost: one pass for the digest; a piece is
    held, not the state.

    Raises:
        CorruptState: the file is missing, torn, truncated, changed, or of another format.
    """
    try:
        file = OpenFile.at(path)
        size = os.fstat(file.descriptor).st_size
        sound = size > _DIGEST_BYTES and _is_sound(file.descriptor, size - _DIGEST_BYTES)
    except OSError as error:
        raise CorruptState(f"{path}: cannot be read: {error}") from error
    if not sound:
        raise CorruptState(f"{path}: the content is not what was written ({size} bytes)")
    meta = _read_meta(file, size)
    if meta.pop("format") != _FORMAT:
        raise CorruptState(f"{path}: written in a format that this version does not read")
    header_bytes = int.from_bytes(os.pread(file.descriptor, _LENGTH_BYTES, 0), "little")
    header = json.loads(os.pread(file.descriptor, header_bytes, _LENGTH_BYTES))
    start = _LENGTH_BYTES + header_bytes
    return _decode(meta, file, {name: _place(start, entry) for name, entry in header.items()})


def peek_counts(path: Path) -> Counts | None:
    """What `EngineState.counts` is in the file at `path`; it is read without a check of the digest.

    Returns:
        None if there is no such file, or nothing like one.
    """
    try:
        file = OpenFile.at(path)
        owned, *counts = _read_meta(file, os.fstat(file.descriptor).st_size)["engine"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    updates, skipped, skipped_in_a_row = counts
    return tuple(owned), updates, skipped, skipped_in_a_row


def _read_meta(file: OpenFile, size: int) -> dict[str, Any]:
    end = size - _DIGEST_BYTES - _LENGTH_BYTES
    length = int.from_bytes(os.pread(file.descriptor, _LENGTH_BYTES, end), "little")
    meta: dict[str, Any] = json.loads(os.pread(file.descriptor, length, end - length))
    return meta


def _is_sound(descriptor: int, body_bytes: int) -> bool:
    digest = blake3(max_threads=blake3.AUTO)
    for start in range(0, body_bytes, _HASHED_BYTES):
        digest.update(os.pread(descriptor, min(_HASHED_BYTES, body_bytes - start), start))
    return digest.digest() == os.pread(descriptor, _DIGEST_BYTES, body_bytes)


def load_newest(path: Path) -> Loaded | None:
    """The private state at `path`, or the one before it if that file is damaged.

    Returns:
        None if there is neither file: nothing was ever saved.

    Raises:
        CorruptState: all files that are there are damaged.
    """
    damaged = []
    for candidate in (path, previous_path(path)):
        if not candidate.exists():
            continue
        try:
            state = load_private(candidate)
        except CorruptState as error:
            logger.error("%s", error)
            damaged.append(str(error))
            continue
        return Loaded(state, "; ".join([*damaged, f"using {candidate.name}, round {state.round}"]))
    if damaged:
        raise CorruptState("; ".join(damaged), hint="remove the files to start from the manifest")
    return None


def previous_path(path: Path) -> Path:
    """Where the private state before the one at `path` is kept."""
    return path.with_name(f"{path.name}.previous")


def read_rng(device: torch.device) -> dict[str, Tensor]:
    """States of torch's random generators: "cpu" and, on a GPU, "cuda"."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets torch's random generators to the states that `read_rng` found."""
    torch.set_rng_state(states["cpu"].clone())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].clone(), device)


def _trailer(state: PrivateState) -> Iterator[bytes]:
    """The end of the file, behind the tensors, without the digest."""
    engine = state.engine
    meta = {
        each.name: getattr(state, each.name)
        for each in dataclasses.fields(state)
        if each.name not in ("engine", "rng", "carried", "deltas")
    }
    if state.deltas:
        meta["deltas"] = dict(state.deltas)
    if state.carried:
        meta["carried"] = sorted(state.carried)
    meta["offered"] = dict(state.offered)
    if not state.part_bases:
        del meta["part_bases"]
    meta["expert_bases"] = sorted(state.expert_bases.items())
    meta["engine"] = engine.counts
    meta["scale"] = [engine.scale.value, engine.scale.good_steps]
    text = json.dumps({"format": _FORMAT, **meta}, sort_keys=True).encode()
    yield text
    yield len(text).to_bytes(_LENGTH_BYTES, "little")


def _encode(*groups: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file, piece by piece, at most a few MB of it at a time."""
    header: dict[str, Any] = {}
    offset = 0
    for tensors in groups:
        for name, (dtype, shape) in sorted(_forms(tensors).items()):
            stop = offset + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _DTYPES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, stop],
            }
            offset = stop
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(_LENGTH_BYTES, "little") + encoded
    for tensors in groups:
        for name in sorted(tensors):
            yield from bytes_of(tensors[name])


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    if isinstance(tensors, LazyTensors):
        return tensors.forms()
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _place(start: int, entry: Mapping[str, Any]) -> Place:
    dtype = next(dtype for dtype, name in _DTYPES.items() if name == entry["dtype"])
    return Place(start + entry["data_offsets"][0], dtype, tuple(entry["shape"]))


def _decode(meta: dict[str, Any], file: OpenFile, places: Mapping[str, Place]) -> PrivateState:
    owned, updates, skipped, skipped_in_a_row = meta.pop("engine")
    tensors = TensorFile(file, places)
    rng = {name[4:]: tensors[name] for name in tensors if name.startswith("rng.")}
    engine = EngineState(
        tensors=TensorFile(file, {n: at for n, at in places.items() if not n.startswith("rng.")}),
        owned=tuple(owned),
        updates=updates,
        skipped=skipped,
        skipped_in_a_row=skipped_in_a_row,
        scale=LossScale(*meta.pop("scale", (1.0, 0))),
    )
    bases = {int(expert): digest for expert, digest in meta.pop("expert_bases")}
    carried = frozenset(meta.pop("carried", ()))
    return PrivateState(engine=engine, expert_bases=bases, rng=rng, carried=carried, **meta)
