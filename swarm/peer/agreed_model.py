"""The agreed model on this machine's disk, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarm.codecs import read_parts
from swarm.config import RunConfig
from swarm.data.tokenizer import Tokenizer
from swarm.errors import BadBlob, CorruptState, StateError, StateLocked
from swarm.network.blobs import BlobStore
from swarm.network.record_file import RecordFile
from swarm.peer.live_model import Agreed
from swarm.peer.run_tokenizer import tokenizer_of
from swarm.peer.state_directory import StateDirectory
from swarm.progress import Reporter
from swarm.protocol.layout import Layout, layout_of
from swarm.protocol.manifest import Manifest


@dataclass(frozen=True)
class AgreedModel:
    """A run's model as of one manifest.

    Attributes:
        run: the run's configuration.
        manifest: what was agreed: round, step, members, digests.
        store: where its blobs are.
    """

    run: RunConfig
    manifest: Manifest
    store: BlobStore

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by Hugging Face name; as `named_tensors`."""
        return named_tensors(layout_of(self.run), self.manifest, self.store)

    def tokenizer(self) -> Tokenizer:
        """The run's; as `tokenizer_of`."""
        return tokenizer_of(self.manifest, self.store)


def named_tensors(
    layout: Layout, manifest: Manifest, store: BlobStore
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model in its agreed dtype, each as soon as its last part is read.

    Memory: one tensor, which may be cut between two parts, and a chunk.

    Raises:
        CorruptState: a blob is missing.
        BadBlob: a blob has not the size of its unit.
    """
    agreed, pending, left = Agreed(store, layout), dict[str, Tensor](), dict[str, int]()
    reading = Reporter("reading the model", "unit")
    for unit in reading.each(layout.units, len(layout.units)):
        digest = manifest.entries[unit.unit].digest
        size = store.size(digest)
        if size is None:
            raise CorruptState(f"the value of {unit.unit} in round {manifest.round} is missing")
        if size != unit.num_bytes:
            raise BadBlob("size", f"{unit.unit}: {size} bytes, its layout has {unit.num_bytes}")
        for part, values in read_parts(unit, agreed.read(digest)):
            if part.name not in pending:
                pending[part.name] = torch.empty(layout.shapes[part.name], dtype=values.dtype)
                left[part.name] = pending[part.name].numel()
            pending[part.name].view(-1)[part.start : part.stop] = values
            left[part.name] -= len(values)
            if left[part.name] == 0:
                yield part.name, pending.pop(part.name)


def open_state(path: Path, run_id: str | None = None) -> tuple[StateDirectory, AgreedModel]:
    """The newest agreed model of a peer that is not running; the directory is locked until closed.

    Args:
        path: the peer's state directory.
        run_id: which run; None for the one that the peer was in last.

    Raises:
        StateError: there is no run in the directory.
        StateLocked: its peer is running.
        CorruptState: the run's configuration cannot be read.
    """
    if not path.expanduser().is_dir():
        raise StateError(f"{path}: no such state directory", hint="give --initial-peers")
    try:
        state = StateDirectory(path)
    except StateLocked as error:
        raise StateLocked(
            f"{path}: its peer is running", hint="export with --initial-peers ADDRESS"
        ) from error
    try:
        run_id = run_id or state.last_run
        if run_id is None:
            raise StateError(f"{path}: there is no run in it", hint="give --initial-peers")
        directory = state.run(run_id)
        record = RecordFile(directory.record_path).read()
        if record is None:
            raise StateError(f"{path}: no state of {run_id}")
        return state, AgreedModel(directory.read_config(), record.tip, BlobStore(directory.path))
    except BaseException:
        state.close()
        raise
