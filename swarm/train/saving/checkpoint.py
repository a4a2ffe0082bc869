"""A peer's private state on disk. With a manifest, it is enough to resume bit for bit.

The file begins with the tensors in the safetensors format. One JSON object with all other fields
follows, then its length (8 bytes) and the BLAKE3 digest of everything before (32). The file is
written under a temporary name, fsynced and renamed. The previous file stays as `NAME.previous`.
Loading executes no code from the file, and first checks the digest of the whole file.

Worker processes write their own tensors, each process to one file (`hashed_file.py`), a *part*. The
state's JSON lists lengths and digests of the parts, and the state's file has all other tensors. The
state is written last. Parts that neither this state nor the previous one lists are removed.

The offered digests come at the end of the file. So one thread can hash the tensors, and another can
write them, while the offered values are still being encoded and stored.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from swarm import durable
from swarm.errors import CorruptState, StateError
from swarm.train.engine.engine import Counts, EngineState
from swarm.train.engine.guard import LossScale
from swarm.train.engine.tensor_file import JoinedFiles, OpenFile, TensorFile
from swarm.train.saving import hashed_file

_FORMAT = 3
_READABLE = (2, 3)
"""Formats that can be read; format 2 had no parts."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrivateState:
    """The state of a peer that no manifest contains.

    Attributes:
        engine: masters, moments and counts.
        run_id: the run it belongs to.
        base_tip: digest of the manifest from which training started.
        round: the round for which the steps were offered.
        steps: local steps that are offered.
        tokens: tokens of these steps.
        seconds: duration of these steps.
        data_position: samples of the private corpus that the peer has read, including these steps.
        offered: digest of the offered value of each unit.
        expert_bases: for each owned expert, digest of the agreed value that its progress extends.
        rng: states of torch's random generators, see `read_rng`.
        carried: units that the previous round left out, see `swarm.protocol.training.adoption`.
        deltas: for each unit with a delta, digest of the delta that makes its offered value.
        part_bases: for each part of the shared tensors, digest of the agreed value that its
            progress extends. Empty if all parts are due in each round.
        is_offered: False if the steps are in no offer yet, because the peer was stopping.
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
    """A private state, the file (of two) that it came from, and a sentence about the choice."""

    state: PrivateState
    reason: str
    newest_is_lost: bool
    """Whether this is the previous state because the newest one is damaged or missing. False if the
    newest one only could not be read."""


class Saving:
    """A private state that threads or workers are hashing and writing.

    The tensors must not change before `finish` or `give_up`. As a context manager, it gives up an
    unfinished file at the end, and waits for the threads.
    """

    def __init__(self, path: Path, engine: EngineState, rng: Mapping[str, Tensor]) -> None:
        """Begins to write. `finish` raises the errors of writing."""
        self.path = path
        self.is_open = True
        """Whether `finish` may be called, which is allowed only once."""
        self._is_in_place = False
        self._tensors = engine.tensors
        self._rng = {f"rng.{name}": each for name, each in rng.items()}
        self._parts: hashed_file.Parts | None = None
        self._file = hashed_file.HashedFile(durable.beside(path), self._groups)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()

    def give_up(self) -> None:
        """Removes the file unless it is finished, and waits for the threads."""
        self.is_open = False
        self._file.give_up()
        if not self._is_in_place:
            drop_unfinished(self.path)
        if self._parts is not None:
            self._tidy_if_possible()

    def finish(self, state: PrivateState) -> None:
        """Adds all other fields, and puts the file durably into its place.

        Raises:
            OSError: the disk refused, now or while the tensors were written.
            SwarmError: the workers that hold the tensors have failed.
        """
        self.is_open = False
        self._file.finish(lambda: _trailer(state, self._finished_parts()), seal=True)
        durable.put_in_place(self.path, previous=previous_path(self.path))
        self._is_in_place = True
        self._tidy_if_possible()

    def _groups(self) -> list[Mapping[str, Tensor]]:
        """The tensors of this file, after workers have begun to write the others."""
        self._tidy()
        tensors = self._tensors
        if isinstance(tensors, hashed_file.PartedTensors):
            folder = hashed_file.folder_of(self.path)
            durable.make_folder(folder)
            self._parts = tensors.begin_parts(folder, hashed_file.new_stem())
            tensors = self._parts.rest
        return [tensors, self._rng]

    def _finished_parts(self) -> Sequence[hashed_file.Part]:
        """The parts, once they and their names are durable."""
        if self._parts is None:
            return ()
        parts = self._parts.finish()
        durable.sync_folder(hashed_file.folder_of(self.path))
        return parts

    def _tidy_if_possible(self) -> None:
        try:
            self._tidy()
        except OSError as error:
            logger.warning("%s: unneeded files remain: %s", hashed_file.folder_of(self.path), error)

    def _tidy(self) -> None:
        """Removes abandoned parts, and parts of no present state."""
        states = [each for each in (self.path, previous_path(self.path)) if each.exists()]
        listed = [_peek_parts(each) for each in states]
        if None not in listed:
            hashed_file.drop_parts(
                hashed_file.folder_of(self.path), [part for parts in listed for part in parts or ()]
            )


def save_private(path: Path, state: PrivateState, begun: Saving | None = None) -> None:
    """Makes a private state durable, and keeps the previous one as `NAME.previous`.

    After the call the file survives a power cut. After a kill at any moment there is a whole file
    at `path`. The cost is one write of 12 bytes per trained parameter, without a copy in memory.

    `begun` is a saving of the state's tensors that has begun already.

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


def drop_unfinished(path: Path) -> None:
    """Removes the temporary file of a killed or abandoned saving of the state at `path`."""
    try:
        durable.beside(path).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s is left: %s", durable.beside(path), error)


def load_private(path: Path) -> PrivateState:
    """Reads a private state. Tensors are read from the file on look-up.

    The file stays open, so it may be replaced while it is read. The cost is one pass for the
    digest, and memory for a piece.

    Raises:
        CorruptState: the file is torn, truncated or changed.
        UnreadableState: the file is missing, cannot be read now, or has another format.
    """
    try:
        file = OpenFile.at(path)
        size = os.fstat(file.descriptor).st_size
        sound = size > hashed_file.DIGEST_BYTES and _is_sound(file, size - hashed_file.DIGEST_BYTES)
    except OSError as error:
        raise hashed_file.UnreadableState(f"{path}: cannot be read: {error}") from error
    if not sound:
        raise CorruptState(f"{path}: the content has changed ({size} bytes)")
    meta = _read_meta(file, size)
    if meta.pop("format") not in _READABLE:
        raise hashed_file.UnreadableState(
            f"{path}: written in a format that this version does not read",
            hint="start the version that wrote it, or remove the file to start from the manifest",
        )
    own = TensorFile(file, hashed_file.places_in(file))
    parts = [
        hashed_file.open_part(hashed_file.folder_of(path), hashed_file.Part(*each))
        for each in meta.pop("parts", ())
    ]
    names = [name for each in (own, *parts) for name in each]
    if len(set(names)) < len(names):
        raise CorruptState(f"{path}: a tensor is in two of its parts")
    return _decode(meta, own, parts)


def peek_counts(path: Path) -> Counts | None:
    """`EngineState.counts` of the file at `path`, without a check of the digest.

    Returns:
        None if there is no file, or it has another form.
    """
    try:
        file = OpenFile.at(path)
        owned, *counts = _read_meta(file, os.fstat(file.descriptor).st_size)["engine"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    updates, skipped, skipped_in_a_row = counts
    return tuple(owned), updates, skipped, skipped_in_a_row


def _peek_parts(path: Path) -> list[hashed_file.Part] | None:
    """The parts of a state, without a check of the digest. None if it is unreadable."""
    try:
        file = OpenFile.at(path)
        meta = _read_meta(file, os.fstat(file.descriptor).st_size)
        return [hashed_file.Part(*each) for each in meta.get("parts", ())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_meta(file: OpenFile, size: int) -> dict[str, Any]:
    end = size - hashed_file.DIGEST_BYTES - hashed_file.LENGTH_BYTES
    length = int.from_bytes(os.pread(file.descriptor, hashed_file.LENGTH_BYTES, end), "little")
    meta: dict[str, Any] = json.loads(os.pread(file.descriptor, length, end - length))
    return meta


def _is_sound(file: OpenFile, body_bytes: int) -> bool:
    return hashed_file.digest_of(file, body_bytes) == os.pread(
        file.descriptor, hashed_file.DIGEST_BYTES, body_bytes
    )


def load_newest(path: Path) -> Loaded | None:
    """The private state at `path`, or the previous state if this file is damaged or unreadable.

    Returns:
        None if both files are missing, since no state was ever saved.

    Raises:
        CorruptState: all files that are there are damaged or unreadable.
    """
    damaged, is_unread = [], False
    for candidate in (path, previous_path(path)):
        if not candidate.exists():
            continue
        try:
            state = load_private(candidate)
        except CorruptState as error:
            logger.error("%s", error)
            damaged.append(str(error))
            is_unread |= isinstance(error, hashed_file.UnreadableState)
            continue
        reason = "; ".join([*damaged, f"using {candidate.name}, round {state.round}"])
        return Loaded(state, reason, newest_is_lost=candidate != path and not is_unread)
    if damaged:
        remedy = "mend what cannot be read, or " if is_unread else ""
        hint = f"{remedy}remove the files to start from the manifest"
        raise CorruptState("; ".join(damaged), hint=hint)
    return None


def resume_newest(path: Path) -> Loaded | None:
    """Like `load_newest`, for the peer that will save here: also removes useless files.

    It removes the temporary file of a killed saving. If the newest state is damaged, the previous
    state takes its place. Otherwise the next saving would replace the previous state by the damaged
    state, and a kill during that saving would leave no good state. A file that cannot be read now
    or by this version stays until the next saving. Until then, a start that can read the file
    resumes from it.

    Raises:
        CorruptState: all files that are there are damaged or unreadable.
    """
    drop_unfinished(path)
    loaded = load_newest(path)
    if loaded and loaded.newest_is_lost:
        try:
            previous_path(path).replace(path)
            durable.sync_folder(path.parent)
        except OSError as error:
            logger.warning("%s stays as it is: %s", path, error)
    return loaded


def previous_path(path: Path) -> Path:
    """The path of the private state before the one at `path`."""
    return path.with_name(path.name + hashed_file.PREVIOUS)


def read_rng(device: torch.device) -> dict[str, Tensor]:
    """States of torch's random generators: "cpu" and, on a GPU, "cuda"."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Sets torch's random generators to states from `read_rng`."""
    torch.set_rng_state(states["cpu"].clone())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].clone(), device)


def _trailer(state: PrivateState, parts: Sequence[hashed_file.Part]) -> Iterator[bytes]:
    """The end of the file, after the tensors, without the digest."""
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
    if parts:
        meta["parts"] = [dataclasses.astuple(part) for part in parts]
    meta["scale"] = [engine.scale.value, engine.scale.good_steps]
    text = json.dumps({"format": _FORMAT, **meta}, sort_keys=True).encode()
    yield text
    yield len(text).to_bytes(hashed_file.LENGTH_BYTES, "little")


def _decode(meta: dict[str, Any], own: TensorFile, parts: Sequence[TensorFile]) -> PrivateState:
    owned, updates, skipped, skipped_in_a_row = meta.pop("engine")
    rng = {name[4:]: own[name] for name in own if name.startswith("rng.")}
    places = {name: at for name, at in own.places.items() if not name.startswith("rng.")}
    tensors = TensorFile(own.file, places)
    engine = EngineState(
        tensors=JoinedFiles([tensors, *parts]) if parts else tensors,
        owned=tuple(owned),
        updates=updates,
        skipped=skipped,
        skipped_in_a_row=skipped_in_a_row,
        scale=LossScale(*meta.pop("scale", (1.0, 0))),
    )
    bases = {int(expert): digest for expert, digest in meta.pop("expert_bases")}
    carried = frozenset(meta.pop("carried", ()))
    return PrivateState(engine=engine, expert_bases=bases, rng=rng, carried=carried, **meta)
