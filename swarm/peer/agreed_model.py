"""The agreed model on this machine's disk, tensor by tensor."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarm.codecs import Content, Read, cut_from, encoded, read_part, read_parts, read_tensors
from swarm.config import RunConfig
from swarm.data.tokenizer import Tokenizer
from swarm.deltas.units import Delta
from swarm.errors import BadBlob, ConfigError, CorruptState, StateError, StateLocked
from swarm.experts import Slice, misfit
from swarm.model.initialise import initial_tensors
from swarm.network.blobs import BlobStore
from swarm.network.contents import BlobGone, delta_in, kept, reader, store_content
from swarm.network.record_file import RecordFile
from swarm.peer.run_tokenizer import tokenizer_of
from swarm.peer.state_directory import StateDirectory
from swarm.progress import Reporter
from swarm.protocol.digests import digest_of_chunks
from swarm.protocol.layout import Layout, layout_of
from swarm.protocol.manifest import Digest, Manifest, Unit


@dataclass(frozen=True)
class Agreed:
    """Reads agreed values: the decoded blobs of a manifest."""

    store: BlobStore
    layout: Layout

    def read(self, digest: Digest) -> Read:
        """What reads bytes of an agreed value; it raises BlobGone when they are here no longer."""
        return reader(self.store, digest)

    def delta(self, digest: Digest) -> Delta:
        """A delta in the store; reading it raises like `read`."""
        return delta_in(self.store, digest)

    @contextmanager
    def held(
        self, digests: Iterable[Digest], hoped: Iterable[Digest] = ()
    ) -> Iterator[frozenset[Digest]]:
        """Keeps the blobs with these digests for as long as the context lasts.

        Args:
            digests: of blobs that have to be here.
            hoped: of others; gives those that are not here.

        Raises:
            BlobGone: a blob is not here that has to be.
        """
        needed = set(digests)
        with kept(self.store, needed.union(hoped)) as missing:
            for digest in missing:
                if digest in needed:
                    raise BlobGone(digest)
            yield frozenset(missing)

    def part(self, digest: Digest, unit: Unit, part: Slice) -> Tensor:
        """Agreed values of a run of elements; see `codecs.read_part`. Raises like `read`."""
        return read_part(self.layout.by_unit[unit], part, self.read(digest))

    def tensor(self, digest: Digest, unit: Unit, name: str) -> Tensor:
        """The agreed value of one of an expert's matrices, not to be written to."""
        shape = self.layout.shapes[name]
        return self.part(digest, unit, Slice(name, 0, math.prod(shape))).view(shape)

    def tensors(self, digest: Digest, unit: Unit) -> Iterator[tuple[str, Tensor]]:
        """The matrices of an expert, one after the other; as `tensor`."""
        return read_tensors(self.layout.by_unit[unit], self.layout.shapes, self.read(digest))

    def lent(self, digest: Digest, unit: Unit) -> dict[str, Tensor] | None:
        """The tensors of an expert in the file in which its blob lies, mapped; None if in none.

        Nobody may write to them. They stay what they are when the blob is collected; its pack is
        on the disk for as long as one of them lives.
        """
        file, layout = self.store.file_of(digest), self.layout.by_unit[unit]
        if file is None:
            return None
        begin = file.offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            file.pack.fileno(),
            begin + layout.num_bytes,
            offset=file.offset - begin,
            access=mmap.ACCESS_READ,
        )
        within = memoryview(mapped)[begin:]
        read: Read = lambda offset, length: within[offset : offset + length]  # noqa: E731
        return dict(read_tensors(layout, self.layout.shapes, read))


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


def initial_contents(
    run: RunConfig, layout: Layout, weights: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[Unit, Content]]:
    """The value of every unit before the first step: by the run's seed, or of given weights.

    Holds one whole tensor and a chunk; cut tensors are made once if parts are taken in order.

    Raises:
        ConfigError: while a content is read: a given tensor is of another shape.
    """

    def value(name: str) -> Tensor:
        if weights is None:
            return initial_tensors(run, [name])[name]
        tensor = weights[name]
        if why := misfit(name, (*tensor.shape,), layout.shapes[name]):
            raise ConfigError(f"the weights are of another model: {why}")
        return tensor

    whole = cut_from(value)
    for unit in layout.units:
        yield unit.unit, encoded(unit, whole)


def recompute_initial(manifest: Manifest, run: RunConfig, layout: Layout, store: BlobStore) -> None:
    """Computes the values that nobody has trained yet, instead of fetching them.

    Where a run was founded on given weights it computes none: only members have those.
    """
    if run.run.initial == "given":
        return
    missing = {
        unit: entry.digest
        for unit, entry in manifest.entries.items()
        if entry.version == 0 and manifest.merged == 0 and not store.has(entry.digest)
    }
    is_seeded = False
    for unit, content in initial_contents(run, layout) if missing else ():
        if unit not in missing:
            continue
        if not is_seeded and digest_of_chunks(content) != missing[unit]:
            return
        is_seeded = True
        store_content(store, content)
