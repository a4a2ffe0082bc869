"""A peer's private state on disk: what it needs, besides a manifest, to go on bit for bit.

The file is a safetensors file (tensors and, under "__metadata__", one JSON object), followed by
the 32 bytes of its BLAKE3 digest. It is written beside its place, fsynced and renamed; the one
before stays as `NAME.previous`. Nothing in it is executed, and nothing is read before the digest of
the whole file was checked.

safetensors itself would hold a second copy of the state in memory, some 40 GB for the 7B model;
writing its format is the short part.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor

from swarm.errors import CorruptState, StateError
from swarm.train.engine import EngineState
from swarm.train.guard import LossScale
from swarm.train.tensor_file import CHUNK_BYTES, OpenFile, Place, TensorFile, bytes_of

_FORMAT = 1
_DIGEST_BYTES = 32
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrivateState:
    """Everything of a peer that no manifest holds.

    Attributes:
        engine: masters, moments and counts.
        run_id: the run it belongs to.
        base_tip: digest of the manifest that it was trained from.
        round: the round it was offered for.
        step: the run's cumulative steps after these local steps.
        tokens: the run's cumulative tokens as of `base_tip`.
        data_index: which stream was trained on.
        data_step: the stream's next step.
        offered: unit -> digest of what was offered.
        expert_bases: owned expert -> digest of the agreed value that its progress extends.
        rng: states of torch's random generators, see `read_rng`.
        searches: which moments are looked for to be added to these, as the peer put it.
    """

    engine: EngineState
    run_id: str
    base_tip: str
    round: int
    step: int
    tokens: int
    data_index: int
    data_step: int
    offered: Mapping[str, str]
    expert_bases: Mapping[int, str]
    rng: Mapping[str, Tensor]
    searches: str = ""


@dataclass(frozen=True)
class Loaded:
    """A private state and which of the two files it came from, in a sentence."""

    state: PrivateState
    reason: str


def save_private(path: Path, state: PrivateState) -> None:
    """Makes a private state durable; the one before is kept as `NAME.previous`.

    When this returns the file survives a power cut. Killed at any moment, it leaves a whole file at
    `path`. Cost: writes 12 bytes per trained parameter once, holds no copy of them.

    Raises:
        StateError: the disk is full or cannot be written.
    """
    try:
        _save(path, state)
    except OSError as error:
        raise StateError(f"{path}: cannot be written: {error}") from error


def _save(path: Path, state: PrivateState) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.new")
    with beside.open("wb") as file:
        digest = blake3()
        for chunk in _encode(state):
            digest.update(chunk)
            file.write(chunk)
        file.write(digest.digest())
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        # A link first: `path` itself must at no moment be missing.
        linked = path.with_name(f"{path.name}.link")
        linked.unlink(missing_ok=True)
        os.link(path, linked)
        linked.replace(previous_path(path))
    beside.replace(path)
    _sync_folder(path.parent)


def load_private(path: Path) -> PrivateState:
    """Reads a private state; its tensors are read from the file as they are asked for.

    The file may be replaced meanwhile: it is held open. Cost: one pass for the digest; a piece is
    held, not the state.

    Raises:
        CorruptState: the file is missing, torn, truncated, changed, or of another format.
    """
    try:
        file = OpenFile(path)
        size = os.fstat(file.descriptor).st_size
        sound = size > _DIGEST_BYTES and _is_sound(file.descriptor, size - _DIGEST_BYTES)
    except OSError as error:
        raise CorruptState(f"{path}: cannot be read: {error}") from error
    if not sound:
        raise CorruptState(f"{path}: the content is not what was written ({size} bytes)")
    header_bytes = int.from_bytes(os.pread(file.descriptor, 8, 0), "little")
    header = json.loads(os.pread(file.descriptor, header_bytes, 8))
    meta = json.loads(header.pop("__metadata__")["private_state"])
    if meta.pop("format") != _FORMAT:
        raise CorruptState(f"{path}: written in a format that this version does not read")
    places = {name: _place(8 + header_bytes, entry) for name, entry in header.items()}
    return _decode(meta, file, places)


def _is_sound(descriptor: int, body_bytes: int) -> bool:
    digest = blake3()
    for start in range(0, body_bytes, CHUNK_BYTES):
        digest.update(os.pread(descriptor, min(CHUNK_BYTES, body_bytes - start), start))
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
    """Sets torch's random generators to what `read_rng` found."""
    torch.set_rng_state(states["cpu"].clone())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].clone(), device)


def _encode(state: PrivateState) -> Iterator[bytes | memoryview]:
    """The file without its digest, piece by piece, at most a few MB of it at a time."""
    engine = state.engine
    tensors = dict(sorted(engine.tensors.items()))
    tensors |= {f"rng.{name}": tensor for name, tensor in sorted(state.rng.items())}
    meta = {
        field.name: getattr(state, field.name)
        for field in dataclasses.fields(state)
        if field.name not in ("engine", "rng")
    }
    meta["offered"] = dict(state.offered)
    meta["expert_bases"] = sorted(state.expert_bases.items())
    meta["engine"] = [engine.owned, engine.updates, engine.skipped, engine.skipped_in_a_row]
    meta["scale"] = [engine.scale.value, engine.scale.good_steps]
    text = json.dumps({"format": _FORMAT, **meta}, sort_keys=True)
    header: dict[str, Any] = {"__metadata__": {"private_state": text}}
    offset = 0
    for name, tensor in tensors.items():
        stop = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    yield len(encoded).to_bytes(8, "little") + encoded
    for tensor in tensors.values():
        yield from bytes_of(tensor)


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
    return PrivateState(engine=engine, expert_bases=bases, rng=rng, **meta)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
