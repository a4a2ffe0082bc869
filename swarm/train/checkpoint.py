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
import mmap
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

_FORMAT = 1
_DIGEST_BYTES = 32
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_CHUNK_BYTES = 16 * 2**20

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
        offered: unit -> digest of what was offered.
        expert_bases: owned expert -> digest of the agreed value that its progress extends.
        rng: states of torch's random generators, see `read_rng`.
        searches: which moments are looked for to be added to these, as the peer put it.
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
    """Reads a private state; its tensors are views of the mapped file, copied when written to.

    Raises:
        CorruptState: the file is missing, torn, truncated, changed, or of another format.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CorruptState(f"{path}: cannot be read: {error}") from error
    content = memoryview(mapped)
    body, stated = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if blake3(body).digest() != stated:
        raise CorruptState(f"{path}: the content is not what was written ({len(content)} bytes)")
    header_bytes = int.from_bytes(body[:8], "little")
    header = json.loads(bytes(body[8 : 8 + header_bytes]))
    meta = json.loads(header.pop("__metadata__")["private_state"])
    if meta.pop("format") != _FORMAT:
        raise CorruptState(f"{path}: written in a format that this version does not read")
    data = body[8 + header_bytes :]
    return _decode(meta, {name: _tensor(data, entry) for name, entry in header.items()})


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
        yield from _pieces(tensor)


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    content = tensor.detach().contiguous().flatten().view(torch.uint8)
    for piece in content.split(_CHUNK_BYTES):
        yield memoryview(piece.cpu().numpy())


def _tensor(data: memoryview, entry: Mapping[str, Any]) -> Tensor:
    start, stop = entry["data_offsets"]
    dtype = next(dtype for dtype, name in _DTYPES.items() if name == entry["dtype"])
    if start == stop:
        return torch.empty(entry["shape"], dtype=dtype)
    return torch.frombuffer(data[start:stop], dtype=dtype).view(entry["shape"])


def _decode(meta: dict[str, Any], tensors: Mapping[str, Tensor]) -> PrivateState:
    owned, updates, skipped, skipped_in_a_row = meta.pop("engine")
    rng = {name[4:]: each for name, each in tensors.items() if name.startswith("rng.")}
    engine = EngineState(
        tensors={name: each for name, each in tensors.items() if not name.startswith("rng.")},
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
