"""The agreed model on this machine's disk, and the held-out text for its evaluation."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarm.codecs import Content, Read, cut_from, encoded, read_part, read_parts, read_tensors
from swarm.config import RunConfig
from swarm.data.held_out import HeldOut, held_out_windows, split_documents
from swarm.data.tokenizer import END_OF_TEXT, Tokenizer
from swarm.deltas.unit_deltas import Delta
from swarm.errors import BadBlob, ConfigError, CorruptState, DataError, StateError, StateLocked
from swarm.experts import Slice, misfit
from swarm.model.initial_weights import initial_tensors
from swarm.network.blobs import blob_store
from swarm.network.rounds.record_file import RecordFile
from swarm.peer.machine.state_directory import StateDirectory
from swarm.peer.text.run_text import tokenizer_of
from swarm.progress import Reporter
from swarm.protocol.values.digests import digest_of_chunks
from swarm.protocol.values.layout import Layout, layout_of
from swarm.protocol.values.manifest import Digest, Founding, Manifest, Unit


@dataclass(frozen=True)
class Agreed:
    """Reads agreed values: the decoded blobs of a manifest."""

    store: blob_store.BlobStore
    layout: Layout

    def read(self, digest: Digest) -> Read:
        """A reader of an agreed value's bytes; raises BlobGone once these are no longer here."""
        return blob_store.reader(self.store, digest)

    def delta(self, digest: Digest) -> Delta:
        """A delta in the store; reading it raises like `read`."""
        return blob_store.delta_in(self.store, digest)

    @contextmanager
    def held(
        self, digests: Iterable[Digest], hoped: Iterable[Digest] = ()
    ) -> Iterator[frozenset[Digest]]:
        """Keeps the blobs with these digests while the context lasts.

        Args:
            digests: digests of required blobs.
            hoped: digests of optional blobs; the context yields those that are missing.

        Raises:
            BlobGone: a required blob is missing.
        """
        needed = set(digests)
        with blob_store.kept(self.store, needed.union(hoped)) as missing:
            for digest in missing:
                if digest in needed:
                    raise blob_store.BlobGone(digest)
            yield frozenset(missing)

    def part(self, digest: Digest, unit: Unit, part: Slice) -> Tensor:
        """Agreed values of consecutive elements; see `codecs.read_part`. Raises like `read`."""
        return read_part(self.layout.by_unit[unit], part, self.read(digest))

    def tensor(self, digest: Digest, unit: Unit, name: str) -> Tensor:
        """The agreed value of one of an expert's matrices, read-only."""
        shape = self.layout.shapes[name]
        return self.part(digest, unit, Slice(name, 0, math.prod(shape))).view(shape)

    def tensors(self, digest: Digest, unit: Unit) -> Iterator[tuple[str, Tensor]]:
        """The matrices of an expert, one after the other, as of `tensor`."""
        return read_tensors(self.layout.by_unit[unit], self.layout.shapes, self.read(digest))

    def lent(self, digest: Digest, unit: Unit) -> dict[str, Tensor] | None:
        """The tensors of an expert, mapped from the file of its blob; None if it is in no file.

        The tensors are read-only, and keep their values when the blob is deleted. The blob's pack
        stays on the disk as long as one of the tensors lives.
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
        manifest: the agreed state: round, step, members, digests.
        store: has its blobs.
    """

    run: RunConfig
    manifest: Manifest
    store: blob_store.BlobStore

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by Hugging Face name, as of `named_tensors`."""
        return named_tensors(layout_of(self.run), self.manifest, self.store)

    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer, as `tokenizer_of` gives it."""
        return tokenizer_of(self.manifest, self.store)


def named_tensors(
    layout: Layout, manifest: Manifest, store: blob_store.BlobStore
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model in its agreed dtype, each once its last part is read.

    Needs memory for a chunk and one tensor, whose elements may be in two parts.

    Raises:
        CorruptState: a blob is missing.
        BadBlob: a blob's size differs from its unit's.
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
    """The newest agreed model of a peer that is not running; locks the directory until `close`.

    Args:
        path: the peer's state directory.
        run_id: id of the wanted run. None for the run that the peer was in last.

    Raises:
        StateError: there is no run in the directory.
        StateLocked: the peer of the directory is running.
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
        return state, AgreedModel(
            directory.read_config(), record.tip, blob_store.BlobStore(directory.path)
        )
    except BaseException:
        state.close()
        raise


def initial_contents(
    run: RunConfig, layout: Layout, weights: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[Unit, Content]]:
    """The value of every unit before the first step, by the run's seed or from given weights.

    Needs memory for one tensor and a chunk. A tensor that is cut over several units is made once if
    its parts are read in order.

    Raises:
        ConfigError: raised by reading a content: a given tensor has another shape.
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


def recompute_initial(
    manifest: Manifest, run: RunConfig, layout: Layout, store: blob_store.BlobStore
) -> None:
    """Computes the values before the first step, instead of fetching them.

    Does nothing if the run was founded on given weights, which only members have.
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
        blob_store.store_content(store, content)


def held_out_text(model: AgreedModel) -> list[str]:
    """The founder's held-out documents.

    Raises:
        DataError: the run's tokenizer does not reproduce the tokens and the number of bytes, so the
            text cannot be recovered. Some tokenizers change a text, for example its case.
        TokenizerError: the tokenizer cannot run here.
        BadBlob: the tokens are outside the run's vocabulary.
    """
    tokens, end, num_bytes = held_out_tokens(model.manifest, model.run, model.store)
    tokenizer = model.tokenizer()
    documents = list(split_documents(tokens, end))
    found = tokenizer.decoded(documents)
    again = tokenizer.encoded(found)
    same = sum(map(len, found)) == num_bytes and all(
        ours is not None and theirs is not None and np.array_equal(ours, theirs[:-1])
        for ours, theirs in itertools.zip_longest(documents, again)
    )
    try:
        text = [document.decode() for document in found]
    except UnicodeDecodeError:
        same = False
    if not same:
        raise DataError(
            "the run's tokenizer does not reproduce the held-out text, so other programs "
            "cannot get it"
        )
    return text


def held_out_tokens(
    manifest: Manifest, run: RunConfig, store: blob_store.BlobStore
) -> tuple[NDArray[np.int64], int, int]:
    """Tokens of the founder's held-out documents, the token that closes each, and the text's size.

    Raises:
        BadBlob: a token is outside this run's vocabulary.
    """
    founding = manifest.founding
    blob = store.get(founding.validation)
    assert blob is not None, "the held-out tokens are part of every fetched state"
    tokens = np.frombuffer(bytes(blob), dtype="<u4").astype(np.int64)
    if len(tokens) and tokens.max() >= run.model.vocab_size:
        raise BadBlob("held_out_tokens", "the founder's held-out tokens are not of the vocabulary")
    used, end = founding.tokenizer, end_of_text(founding)
    return tokens, end, used.held_out_bytes if used else int((tokens != end).sum())


def end_of_text(founding: Founding) -> int:
    """The token that closes a document of a run."""
    return founding.tokenizer.end_of_text if founding.tokenizer else END_OF_TEXT


def held_out_of(manifest: Manifest, run: RunConfig, store: blob_store.BlobStore) -> HeldOut:
    """The founder's held-out text.

    Raises:
        BadBlob: a token is outside this run's vocabulary, or there is no token to predict.
    """
    tokens, end, num_bytes = held_out_tokens(manifest, run, store)
    try:
        return held_out_windows(tokens, end, run.data.sequence_length, num_bytes)
    except DataError as error:
        raise BadBlob("held_out_tokens", f"the founder's: {error}") from error
