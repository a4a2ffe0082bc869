"""The live model of one peer, and its way to and from the agreed blobs.

The engine trains, the store holds what was agreed; this class moves values between them as
`swarm.protocol.adoption` decides.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from swarm.codecs import allocate, decode_unit, encode_unit, fill, view_unit
from swarm.config import RunConfig
from swarm.data.loader import held_out_sequences
from swarm.errors import BadBlob, StateError
from swarm.experts import UnitLayout, expert_of_unit, expert_unit
from swarm.model.initialise import initial_tensors
from swarm.model.merge import Merged, merge_experts
from swarm.network.blobs import BlobStore
from swarm.protocol.adoption import Action, Adoption, ExpertDecision, adopt, due_units
from swarm.protocol.layout import Layout
from swarm.protocol.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.merging import alpha_at
from swarm.protocol.messages import Offer
from swarm.train.engine import Engine

logger = logging.getLogger(__name__)


class BlobGone(StateError):
    """A blob of an older manifest was collected: a newer tip must be adopted instead."""


@dataclass(frozen=True)
class Agreed:
    """Reads agreed values: the decoded blobs of a manifest."""

    store: BlobStore
    layout: Layout

    def blob(self, digest: Digest) -> memoryview:
        """The bytes of an agreed value.

        Raises:
            BlobGone: the store no longer has it.
        """
        blob = self.store.get(digest)
        if blob is None:
            raise BlobGone(f"the blob {digest[:12]} was collected: a newer tip has come")
        return blob

    @contextmanager
    def held(self, digests: Iterable[Digest]) -> Iterator[None]:
        """Keeps the blobs with these digests for as long as the context lasts.

        Raises:
            BlobGone: one of them is not here.
        """
        wanted = sorted(set(digests))
        self.store.pin(wanted)  # before the look, so that no collection falls between
        try:
            for digest in wanted:
                if not self.store.has(digest):
                    raise BlobGone(f"the blob {digest[:12]} was collected: a newer tip has come")
            yield
        finally:
            self.store.unpin(wanted)

    def expert(self, digest: Digest, unit: Unit) -> dict[str, Tensor]:
        """The tensors of an expert in an agreed value; raises like `blob`."""
        return decode_unit(self.layout.by_unit[unit], self.layout.shapes, self.blob(digest))

    def lent(self, digest: Digest, unit: Unit) -> dict[str, Tensor]:
        """As `expert`, but where the blob lies in a file the tensors are that file, mapped.

        Nobody may write to them. They stay what they are when the blob is collected; its pack is
        on the disk for as long as one of them lives.
        """
        file, layout = self.store.file_of(digest), self.layout.by_unit[unit]
        if file is None:
            return self.expert(digest, unit)
        begin = file.offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(
            file.pack.fileno(),
            begin + layout.num_bytes,
            offset=file.offset - begin,
            access=mmap.ACCESS_READ,
        )
        return view_unit(layout, self.layout.shapes, memoryview(mapped)[begin:])


class LiveModel:
    """What one peer trains, and what it knows about where its values came from."""

    def __init__(self, me: PeerId, run: RunConfig, engine: Engine, agreed: Agreed) -> None:
        self.me, self.run, self.engine, self.agreed = me, run, engine, agreed
        self.bases: dict[int, Digest] = {}
        """Of each owned expert: the agreed value that its local progress started from."""
        self.held: dict[Unit, Digest] = {}
        """Of each unit that is not trained here, or was just adopted: the value in the engine."""

    # ------------------------------------------------ engine -> blobs

    def offered_values(
        self, tip: Manifest, late: Collection[int] | None = None
    ) -> Iterator[tuple[Unit, memoryview, Digest]]:
        """Encoded value and base digest of each unit that this peer offers on `tip`.

        With `late` only of these experts, which rounds before left out.
        """
        shared = self.engine.read(sorted(self._shared_names())) if late is None else {}
        for unit in due_units(self.me, tip, self.run.round.experts_every):
            if late is not None and expert_of_unit(unit) not in late:
                continue
            layout = self.agreed.layout.by_unit[unit]
            expert = expert_of_unit(unit)
            if expert is None:
                yield unit, encode_unit(layout, shared), tip.entries[unit].digest
            else:
                values = self.engine.read([piece.name for piece in layout.slices])
                yield unit, encode_unit(layout, values), self.bases[expert]

    def _shared_names(self) -> set[str]:
        return {piece.name for unit in self._shared_layouts() for piece in unit.slices}

    # ------------------------------------------------ blobs -> engine

    def adopt(
        self, manifest: Manifest, *, previous: Digest, offers: Sequence[Offer] = ()
    ) -> Adoption:
        """Moves the engine to an agreed state, keeping what local progress may be kept.

        Raises:
            BlobGone: the manifest is no longer the newest; the engine is as it was.
        """
        decision = adopt(self.me, manifest, previous=previous, bases=self.bases, offers=offers)
        mine = [e for e, d in decision.experts.items() if d.action is not Action.DROP]
        with self.agreed.held(_digests(manifest)):
            self.engine.own(mine)
            for expert, choice in decision.experts.items():
                self._adopt_expert(manifest, expert, choice)
            self._write_others(manifest, set(mine), keep_shared=decision.shared is Action.KEEP)
        self.bases = {e: d.base for e, d in decision.experts.items() if d.base is not None}
        return decision

    def _adopt_expert(self, manifest: Manifest, expert: int, choice: ExpertDecision) -> None:
        unit = expert_unit(expert)
        self.held.pop(unit, None)
        logger.debug("%s: %s", choice.action.value, choice.reason)
        if choice.action is Action.REBASE:
            assert choice.rebase_from is not None
            try:
                with self.agreed.held([choice.rebase_from]):
                    self._rebase(manifest, unit, choice.rebase_from)
            except BlobGone as error:
                # As when two merges were jumped: without the old value nothing can be carried over.
                logger.info("expert %d restarts from its merged value: %s", expert, error)
                self._write(manifest, unit)
        elif choice.action in (Action.RESTART, Action.TAKE_UP):
            self._write(manifest, unit)

    def adopt_frozen(self, tip: Manifest) -> None:
        """Fills in the foreign experts beside masters that were loaded from this peer's disk.

        Raises:
            BlobGone: the manifest is no longer the newest.
        """
        self.held = {}
        with self.agreed.held(_digests(tip)):
            self._write_others(tip, set(self.engine.owned), keep_shared=True)

    def _write_others(self, manifest: Manifest, mine: set[int], *, keep_shared: bool) -> None:
        for unit, entry in manifest.entries.items():
            expert = expert_of_unit(unit)
            if expert is None or expert in mine or self.held.get(unit) == entry.digest:
                continue
            if self.engine.borrows:
                self.engine.lend(self.agreed.lent(entry.digest, unit))
            else:
                self._write(manifest, unit)
            self.held[unit] = entry.digest
        if not keep_shared:
            shared = self._shared_layouts()
            tensors = allocate(shared, self.agreed.layout.shapes)
            for layout in shared:
                fill(tensors, layout, self.agreed.blob(manifest.entries[layout.unit].digest))
            self.engine.write(tensors)

    def _shared_layouts(self) -> list[UnitLayout]:
        return [u for u in self.agreed.layout.units if expert_of_unit(u.unit) is None]

    def _write(self, manifest: Manifest, unit: Unit) -> None:
        self.engine.write(self.agreed.expert(manifest.entries[unit].digest, unit))

    def _rebase(self, manifest: Manifest, unit: Unit, base: Digest) -> None:
        merged = self.agreed.expert(manifest.entries[unit].digest, unit)
        before = self.agreed.expert(base, unit)
        masters = self.engine.read(sorted(merged))
        self.engine.write(
            {
                name: merged[name].float() + (masters[name].float() - before[name].float())
                for name in sorted(merged)
            }
        )

    # ------------------------------------------------ looking at agreed states

    def evaluate(self, manifest: Manifest, tokens_BT1: Tensor) -> float:
        """Held-out loss of the agreed state in nats per token, right after it was adopted.

        Raises:
            BlobGone: the manifest is no longer the newest.
        """
        replace: dict[str, Tensor] = {}
        for expert in self.bases:
            unit = expert_unit(expert)
            replace |= self.agreed.expert(manifest.entries[unit].digest, unit)
        return self.engine.evaluate(tokens_BT1, replace=replace)


def merge_blobs(
    manifest: Manifest, run: RunConfig, agreed: Agreed
) -> tuple[dict[Unit, memoryview], Merged]:
    """The merged experts of a due manifest, encoded, and who the donors were."""
    values: dict[str, Tensor] = {}
    for expert in range(run.model.num_experts):
        unit = expert_unit(expert)
        values |= agreed.expert(manifest.entries[unit].digest, unit)
    alpha = alpha_at(manifest.step, run.merging)
    merged = merge_experts(values, run.model, alpha=alpha, top_k=run.merging.top_k)
    units = [expert_unit(expert) for expert in range(run.model.num_experts)]
    return {unit: encode_unit(agreed.layout.by_unit[unit], merged.named) for unit in units}, merged


def initial_blobs(run: RunConfig, layout: Layout) -> Iterator[tuple[Unit, memoryview]]:
    """The encoded value of every unit before the first step; equal on every peer."""
    cached: dict[str, Tensor] = {}
    for unit in layout.units:
        names = [piece.name for piece in unit.slices]
        cached = {name: cached[name] for name in names if name in cached}
        cached |= initial_tensors(run, _missing(names, cached))
        yield unit.unit, encode_unit(unit, cached)


def _digests(manifest: Manifest) -> list[Digest]:
    return [entry.digest for entry in manifest.entries.values()]


def _missing(names: Sequence[str], there: Iterable[str]) -> list[str]:
    known = set(there)
    return [name for name in names if name not in known]


def validation_batch(manifest: Manifest, run: RunConfig, store: BlobStore) -> Tensor:
    """The founder's held-out tokens as sequences, int64 [B, T + 1].

    Raises:
        BadBlob: they are no tokens of this run's vocabulary.
        DataError: there is not one whole sequence.
    """
    blob = store.get(manifest.founding.validation)
    assert blob is not None, "the held-out tokens are part of every fetched state"
    tokens = np.frombuffer(bytes(blob), dtype="<u4").astype(np.int64)
    if len(tokens) and tokens.max() >= run.model.vocab_size:
        raise BadBlob("held_out_tokens", "the founder's held-out tokens are not of the vocabulary")
    return held_out_sequences(tokens, run.data.sequence_length)
