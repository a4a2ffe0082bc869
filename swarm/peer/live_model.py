"""The live model of one peer, and its way to and from the agreed blobs.

The engine trains, the store holds what was agreed; this class moves values between them as it is
told.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import Tensor

from swarm.codecs import (
    Content,
    Read,
    cut_from,
    encoded,
    guarded,
    read_part,
    read_parts,
    read_tensors,
)
from swarm.config import RunConfig
from swarm.data.held_out import HeldOut
from swarm.deltas.units import Delta
from swarm.errors import ConfigError
from swarm.experts import Slice, expert_of, expert_of_unit, expert_unit, misfit
from swarm.model.initialise import initial_tensors
from swarm.network.blobs import BlobStore
from swarm.network.contents import BlobGone, delta_in, kept, reader, store_content
from swarm.peer.live_deltas import difference, follow, rebase
from swarm.peer.putting_aside import Patiently, put_aside
from swarm.peer.unit_threads import ONE_THREAD, OneAtATime, UnitThreads
from swarm.protocol.adoption import Action, Adoption, ExpertDecision
from swarm.protocol.digests import digest_of_chunks
from swarm.protocol.layout import Layout
from swarm.protocol.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.updates import UpdateBound
from swarm.train.engine import Engine

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_FOLLOWING = (Action.CORRECTED, Action.CARRIED)
"""Local progress goes on from where it is, and the agreed value moves beneath it."""


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
    def held(self, digests: Iterable[Digest]) -> Iterator[None]:
        """Keeps the blobs with these digests for as long as the context lasts.

        Raises:
            BlobGone: one of them is not here.
        """
        with kept(self.store, digests) as missing:
            if missing:
                raise BlobGone(missing[0])
            yield

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


class LiveModel:
    """What one peer trains, and what it knows about where its values came from."""

    def __init__(
        self,
        me: PeerId,
        run: RunConfig,
        engine: Engine,
        agreed: Agreed,
        threads: UnitThreads = ONE_THREAD,
    ) -> None:
        self.me, self.run, self.engine, self.agreed = me, run, engine, agreed
        self.threads, self._parts = threads, OneAtATime(engine)
        self.bases: dict[int, Digest] = {}
        """Of each owned expert: the agreed value that its local progress started from."""
        self.held: dict[Unit, Digest] = {}
        """Of each unit that is not trained here, or was just adopted: the value in the engine."""
        self.local_parts: frozenset[Unit] = frozenset()
        """Parts of the shared tensors whose values in the engine are not the agreed ones."""
        self._offered: list[Digest] = []
        self._rests_on = frozenset[Digest]()
        """Values that the next deltas are counted from."""
        self.is_coded = any(unit.coding != "none" for unit in agreed.layout.units)

    # ------------------------------------------------ engine -> blobs

    def value_of(self, unit: Unit) -> Content:
        """The encoded value of a unit that is trained here."""
        return encoded(self.agreed.layout.by_unit[unit], self._parts.read_part)

    def difference(self, unit: Unit, base: Digest) -> Content:
        """What a unit that is trained here has over the agreed value, as a delta of that."""
        return difference(self._parts, self.agreed.layout.by_unit[unit], self.agreed.read(base))

    def guarded(self, unit: Unit, value: Content, bound: UpdateBound) -> Content:
        """The value, which raises BadBlob while it is read if it is beyond the bound [U1]."""
        base, layout = self.agreed.read(bound.base), self.agreed.layout.by_unit[unit]
        return guarded(layout, value, base, absolute=bound.absolute, relative=bound.relative)

    def begin_anew(self, tip: Manifest, unit: Unit) -> None:
        """Gives the engine the agreed value of a unit that is trained here; progress is lost."""
        layout, read = self.agreed.layout.by_unit[unit], self.agreed.read(tip.entries[unit].digest)
        for part, values in read_parts(layout, read):
            self._parts.write_part(part, values)

    def each(self, work: Callable[[Unit], Result], units: Iterable[Unit]) -> list[Result]:
        """What `work` makes of each of these units, which several threads do."""
        found, layouts = list(units), self.agreed.layout.by_unit
        return self.threads.each(work, found, sum(layouts[unit].num_elements for unit in found))

    def keep_offered(self, digests: Iterable[Digest]) -> None:
        """Keeps what was offered until `drop_offered`: adopting a mean may need it.

        Several threads may call it at a time.
        """
        fresh = list(digests)
        self.agreed.store.pin(fresh)
        self._offered.extend(fresh)

    def drop_offered(self) -> None:
        """Says that what was offered has been adopted, or never will be."""
        dropped, self._offered = self._offered, []
        self.agreed.store.unpin(dropped)

    # ------------------------------------------------ blobs -> engine

    def adopt(self, manifest: Manifest, decision: Adoption, before: Manifest | None = None) -> None:
        """Moves the engine to an agreed state, as was decided for each piece of local progress.

        Args:
            manifest: the agreed state.
            decision: by `swarm.protocol.adoption`.
            before: the manifest that the engine is at, if known; without it nothing goes on from
                where it is by a delta.

        Raises:
            BlobGone: the manifest is no longer the newest; the engine is as it was.
        """
        mine = [e for e, d in decision.experts.items() if d.action is not Action.DROP]
        with self.agreed.held(_digests(manifest)):
            self.engine.own(mine)
            choices = {expert_unit(expert): expert for expert in decision.experts}
            self.each(
                lambda unit: self._adopt_expert(
                    manifest, choices[unit], decision.experts[choices[unit]], before
                ),
                choices,
            )
            self._write_others(manifest, set(mine))
            if decision.shared in _FOLLOWING:
                self.each(
                    lambda unit: self._follow(
                        manifest, unit, before, decision.shared_from.get(unit)
                    ),
                    [unit for unit in self._shared_units if unit not in decision.kept_parts],
                )
                self.local_parts = frozenset(self._shared_units)
            elif decision.shared is not Action.KEEP:
                self._write_shared(manifest, decision.kept_parts)
            self._rest_on(manifest, decision.bases.values())
        self.bases = decision.bases

    @property
    def _shared_units(self) -> list[Unit]:
        units = (layout.unit for layout in self.agreed.layout.units)
        return [unit for unit in units if expert_of_unit(unit) is None]

    def _rest_on(self, manifest: Manifest, bases: Iterable[Digest]) -> None:
        """Keeps the values that deltas are counted from, those of the shared tensors among them."""
        shared = (manifest.entries[unit].digest for unit in self._shared_units)
        rests_on = frozenset([*shared, *bases]) if self.is_coded else frozenset[Digest]()
        self.agreed.store.pin(rests_on)
        self.agreed.store.unpin(self._rests_on)
        self._rests_on = rests_on

    def _follow(
        self, manifest: Manifest, unit: Unit, before: Manifest | None, offered: Digest | None
    ) -> None:
        """Moves a unit that is trained here as the agreed value moved, less what it brought [W8].

        What it brought is the delta that it offered, or where values are offered what that one has
        over the value before.
        """
        layout, after = self.agreed.layout.by_unit[unit], manifest.entries[unit].digest
        is_known = before is not None and before.digest != manifest.digest
        base = before.entries[unit].digest if before and is_known else manifest.entries[unit].base
        if base == after:  # no round has moved it
            return
        if layout.coding == "none" and offered:
            base, offered = offered, None
        if base is None:
            self.begin_anew(manifest, unit)
            return
        try:
            with self.agreed.held([base, *filter(None, [offered])]):
                counted = self.agreed.delta(offered) if offered else None
                follow(
                    self._parts, layout, self.agreed.read(base), self.agreed.read(after), counted
                )
        except BlobGone as error:
            logger.info("%s restarts from its agreed value: %s", unit, error)
            self.begin_anew(manifest, unit)

    def _adopt_expert(
        self, manifest: Manifest, expert: int, choice: ExpertDecision, before: Manifest | None
    ) -> None:
        unit = expert_unit(expert)
        self.held.pop(unit, None)
        logger.debug("%s: %s", choice.action.value, choice.reason)
        if choice.action in _FOLLOWING:
            self._follow(manifest, unit, before, choice.rebase_from)
        elif choice.action in (Action.REBASE, Action.AVERAGED):
            assert choice.rebase_from is not None
            try:
                with self.agreed.held([choice.rebase_from]):
                    self._rebase(manifest, unit, choice.rebase_from)
            except BlobGone as error:
                # As when two merges were jumped, or after a restart: without the old value nothing
                # can be carried over.
                logger.info("expert %d restarts from its agreed value: %s", expert, error)
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
            self._write_others(tip, set(self.engine.owned))
            self._rest_on(tip, self.bases.values())
        if self.is_coded:
            self.local_parts = frozenset(self._shared_units)

    def _write_others(self, manifest: Manifest, mine: set[int]) -> None:
        for unit, entry in manifest.entries.items():
            expert = expert_of_unit(unit)
            if expert is None or expert in mine or self.held.get(unit) == entry.digest:
                continue
            lent = self.agreed.lent(entry.digest, unit) if self.engine.borrows else None
            if lent:
                self.engine.lend(lent)
            else:
                self._write(manifest, unit)
            self.held[unit] = entry.digest

    def _write_shared(self, manifest: Manifest, kept: frozenset[Unit]) -> None:
        anew = [unit for unit in self._shared_units if unit not in kept]
        self.each(partial(self.begin_anew, manifest), anew)
        self.local_parts = kept

    def _write(self, manifest: Manifest, unit: Unit) -> None:
        """A matrix at a time: frozen ones may be stored with scales of whole rows."""
        for name, tensor in self.agreed.tensors(manifest.entries[unit].digest, unit):
            self.engine.write({name: tensor})

    def _rebase(self, manifest: Manifest, unit: Unit, base: Digest) -> None:
        layout, after = self.agreed.layout.by_unit[unit], manifest.entries[unit].digest
        rebase(self._parts, layout, self.agreed.read(base), self.agreed.read(after))

    # ------------------------------------------------ looking at agreed states

    def evaluate(
        self,
        manifest: Manifest,
        held_out: HeldOut,
        patiently: Patiently = lambda work: work(),
    ) -> float:
        """Held-out loss of the agreed state in nats per token, right after it was adopted.

        The agreed values of owned experts come from the store matrix by matrix; see
        `Engine.evaluate` for what is held. Local progress of shared tensors is put aside on the
        disk meanwhile; `patiently` calls what writes it.

        Raises:
            BlobGone: the manifest is no longer the newest.
            StateError: see `put_aside`.
        """

        def agreed(name: str) -> Tensor:
            expert = expert_of(name)
            assert expert is not None
            unit = expert_unit(expert)
            return self.agreed.tensor(manifest.entries[unit].digest, unit, name)

        units = [*map(expert_unit, self.bases), *self.local_parts]
        begin_anew = partial(self.begin_anew, manifest)
        aside = put_aside(
            self._parts,
            self.agreed.store,
            self.agreed.layout,
            self.local_parts,
            begin_anew,
            threads=self.threads,
            patiently=patiently,
        )
        with self.agreed.held(manifest.entries[u].digest for u in units), aside:
            return held_out.mean(
                lambda tokens, scored: self.engine.evaluate(tokens, scored_BT=scored, agreed=agreed)
            )


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


def _digests(manifest: Manifest) -> list[Digest]:
    return [entry.digest for entry in manifest.entries.values()]
