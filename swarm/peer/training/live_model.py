"""The live model of one peer, and the transfer of values between engine and agreed blobs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from torch import Tensor

from swarm.codecs import Content, encoded, guarded
from swarm.config import RunConfig
from swarm.data.held_out import HeldOut
from swarm.deltas.unit_deltas import Parts, difference, follow, overwrite, rebase
from swarm.experts import ELEMENT_BYTES, Slice, UnitLayout, expert_of, expert_of_unit, expert_unit
from swarm.model.merge import Donors, donors_of, merged_part
from swarm.network.blobs.blob_store import BlobGone, BlobStore, reader, write
from swarm.peer.machine.cpu_threads import ONE_THREAD, OneAtATime, UnitThreads
from swarm.peer.text.agreed_model import Agreed
from swarm.protocol.training.adoption import Action, Adoption
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.values.schedule import alpha_at
from swarm.protocol.values.updates import UpdateBound
from swarm.train.engine.engine import Engine

logger = logging.getLogger(__name__)


Patiently = Callable[[Callable[[], Digest]], Digest]


@contextmanager
def put_aside(
    engine: Parts,
    store: BlobStore,
    layout: Layout,
    units: Collection[Unit],
    begin_anew: Callable[[Unit], None],
    *,
    threads: UnitThreads,
    patiently: Patiently,
) -> Iterator[None]:
    """Has the agreed values of these units in the engine while the block runs.

    Args:
        engine: trains them.
        store: keeps the local progress of the units in the meantime, in fp32.
        layout: layout of the run.
        units: whose values in the engine differ from the agreed ones.
        begin_anew: gives the engine the agreed value of a unit.
        threads: threads that do this work.
        patiently: calls the function that writes progress into the store, again after temporary
            errors.

    Raises:
        StateError: progress could not be written, and the engine is unchanged; or progress could
            not be read again, and the engine is unusable.
    """
    aside: dict[Unit, Digest] = {}
    elements = sum(layout.by_unit[unit].num_elements for unit in units)

    def put(unit: Unit) -> None:
        local = encoded(_in_fp32(layout.by_unit[unit]), engine.read_part)
        aside[unit] = patiently(lambda: write(store.draft(local.num_bytes), local))
        begin_anew(unit)

    def put_back(unit: Unit) -> None:
        overwrite(engine, _in_fp32(layout.by_unit[unit]), reader(store, aside[unit]))

    try:
        threads.each(put, sorted(units), elements)
        yield
    finally:
        threads.each(put_back, list(aside), elements)
        store.unpin(aside.values())


def _in_fp32(layout: UnitLayout) -> UnitLayout:
    """The layout with the same elements in fp32, the type of the masters."""
    num_bytes = layout.num_elements * ELEMENT_BYTES["fp32"]
    return replace(layout, codec="fp32", num_bytes=num_bytes)


def merge_blobs(
    manifest: Manifest, run: RunConfig, agreed: Agreed
) -> tuple[dict[Unit, Content], Donors]:
    """The merged experts of a manifest whose merge is due, and their donors.

    Donors are found first. The experts' contents are read and computed on demand, a chunk at a
    time. The search for donors needs memory for chunks of all experts in fp64. After that, 16 bytes
    for each of `CHUNK_ELEMENTS` and the chunk's encoded form are needed. See `swarm.model.merge`.

    Raises:
        BlobGone: the manifest is no longer the newest. Reading the contents may raise it too.
    """

    def read(part: Slice) -> Tensor:
        expert = expert_of(part.name)
        assert expert is not None
        unit = expert_unit(expert)
        return agreed.part(manifest.entries[unit].digest, unit, part)

    donors = donors_of(read, run.model, run.merging.top_k)
    alpha = alpha_at(manifest.step, run.merging)
    merged = partial(merged_part, read=read, donors=donors, alpha=alpha)
    units = [expert_unit(expert) for expert in range(run.model.num_experts)]
    return {unit: encoded(agreed.layout.by_unit[unit], merged) for unit in units}, donors


Result = TypeVar("Result")

_FOLLOWING = (Action.CORRECTED, Action.CARRIED)
"""Actions that keep local progress, which moves with the agreed value."""


@dataclass(frozen=True)
class Move:
    """How the live value of a unit moves towards the agreed value.

    Attributes:
        after: the agreed value.
        before: the value from which progress is measured; None if there is no progress to keep.
        counted: this peer's delta that the agreed value already contains.
        is_jump: True adds progress to the agreed value, like `rebase`. False moves the live value
            as the agreed value moved, like `follow`.
    """

    after: Digest
    before: Digest | None = None
    counted: Digest | None = None
    is_jump: bool = False

    @property
    def rests_on(self) -> list[Digest]:
        """Blobs without which progress is lost."""
        return [digest for digest in (self.before, self.counted) if digest]


def moves_to(
    manifest: Manifest, decision: Adoption, layout: Layout, before: Manifest | None
) -> dict[Unit, Move]:
    """The moves of units that this peer trains, without unchanged units; see `adopt`."""
    chosen = {expert_unit(e): (d.action, d.rebase_from) for e, d in decision.experts.items()}
    for unit in _shared_units(layout):
        if unit not in decision.kept_parts:
            chosen[unit] = decision.shared, decision.shared_from.get(unit)
    moves = {}
    for unit, (action, offered) in chosen.items():
        after = manifest.entries[unit].digest
        if action in _FOLLOWING:
            if move := _followed(manifest, layout.by_unit[unit], before, offered):
                moves[unit] = move
        elif action in (Action.REBASE, Action.AVERAGED):
            moves[unit] = Move(after, offered, is_jump=True)
        elif action in (Action.RESTART, Action.TAKE_UP):
            moves[unit] = Move(after)
    return moves


def _followed(
    manifest: Manifest, layout: UnitLayout, before: Manifest | None, offered: Digest | None
) -> Move | None:
    """The move of the agreed value, if it moved, minus this peer's own contribution.

    Policy: carried steps.

    With deltas, the contribution is the offered delta. If values are offered, the contribution is
    the difference between the offered and the previous value.
    """
    entry = manifest.entries[layout.unit]
    is_known = before is not None and before.digest != manifest.digest
    base = before.entries[layout.unit].digest if before and is_known else entry.base
    if base == entry.digest:
        return None
    if offered and layout.coding == "none":
        return Move(entry.digest, offered)
    return Move(entry.digest, base, offered if base else None)


class LiveModel:
    """The model that one peer trains, and the origins of its values."""

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
        """For each owned expert, the agreed value from which its local progress started."""
        self.held: dict[Unit, Digest] = {}
        """Digest of the value in the engine, for each unit that is frozen or was just adopted."""
        self.local_parts: frozenset[Unit] = frozenset()
        """Parts of the shared tensors whose values in the engine differ from the agreed ones."""
        self._offered: list[Digest] = []
        self._rests_on = frozenset[Digest]()
        """Values from which the next deltas are computed."""
        self.is_coded = any(unit.coding != "none" for unit in agreed.layout.units)

    # ------------------------------------------------ engine -> blobs

    def value_of(self, unit: Unit) -> Content:
        """The encoded value of a unit that is trained here."""
        return encoded(self.agreed.layout.by_unit[unit], self._parts.read_part)

    def difference(self, unit: Unit, base: Digest) -> Content:
        """The delta from the agreed value of a unit to its trained value."""
        return difference(self._parts, self.agreed.layout.by_unit[unit], self.agreed.read(base))

    def guarded(self, unit: Unit, value: Content, bound: UpdateBound) -> Content:
        """The value; reading it raises BadBlob if the value is outside the bound.

        Policy: update bounds.
        """
        base, layout = self.agreed.read(bound.base), self.agreed.layout.by_unit[unit]
        return guarded(layout, value, base, absolute=bound.absolute, relative=bound.relative)

    def begin_anew(self, tip: Manifest, unit: Unit) -> None:
        """Restarts a trained unit from its agreed value; its progress is lost."""
        self._move(unit, Move(tip.entries[unit].digest))

    def each(self, work: Callable[[Unit], Result], units: Iterable[Unit]) -> list[Result]:
        """The results of `work` for each of these units, computed by several threads."""
        found, layouts = list(units), self.agreed.layout.by_unit
        return self.threads.each(work, found, sum(layouts[unit].num_elements for unit in found))

    def keep_offered(self, digests: Iterable[Digest]) -> None:
        """Keeps offered blobs until `drop_offered`, because the adoption of a mean may need them.

        Several threads may call this at a time.
        """
        fresh = list(digests)
        self.agreed.store.pin(fresh)
        self._offered.extend(fresh)

    def drop_offered(self) -> None:
        """Drops offered blobs, once they are adopted or given up."""
        dropped, self._offered = self._offered, []
        self.agreed.store.unpin(dropped)

    # ------------------------------------------------ blobs -> engine

    def adopt(self, manifest: Manifest, decision: Adoption, before: Manifest | None = None) -> None:
        """Moves the engine to an agreed state, by the decision on all local progress.

        All needed values are secured in the store first, and written to the engine after that.

        Args:
            manifest: the agreed state.
            decision: made by `swarm.protocol.training.adoption`.
            before: the manifest that the engine has adopted; if None, each unit counts as having
                the `base` of its entry.

        Raises:
            BlobGone: the manifest is no longer the newest; the engine is unchanged.
        """
        moves = moves_to(manifest, decision, self.agreed.layout, before)
        rests_on = {digest for move in moves.values() for digest in move.rests_on}
        with self.agreed.held(_digests(manifest), rests_on) as gone:
            self._rest_on(manifest, decision.bases.values())
            self.engine.own(list(decision.bases))
            for expert, choice in decision.experts.items():
                logger.debug("%s: %s", choice.action.value, choice.reason)
                self.held.pop(expert_unit(expert), None)
            self.each(lambda unit: self._move(unit, moves[unit], gone), moves)
            self._write_others(manifest)
        if decision.shared is not Action.KEEP:
            follows = decision.shared in _FOLLOWING
            self.local_parts = frozenset(self._shared_units) if follows else decision.kept_parts
        self.bases = decision.bases

    def adopt_frozen(self, tip: Manifest) -> None:
        """Adds the frozen experts to an engine whose masters were loaded from this peer's disk.

        Raises:
            BlobGone: the manifest is no longer the newest.
        """
        self.held = {}
        with self.agreed.held(_digests(tip)):
            self._rest_on(tip, self.bases.values())
            self._write_others(tip)
        if self.is_coded:
            self.local_parts = frozenset(self._shared_units)

    @property
    def _shared_units(self) -> list[Unit]:
        return _shared_units(self.agreed.layout)

    def _rest_on(self, manifest: Manifest, bases: Iterable[Digest]) -> None:
        """Keeps the values from which deltas are computed, those of the shared tensors included."""
        shared = (manifest.entries[unit].digest for unit in self._shared_units)
        rests_on = frozenset([*shared, *bases]) if self.is_coded else frozenset[Digest]()
        self.agreed.store.pin(rests_on)
        self.agreed.store.unpin(self._rests_on)
        self._rests_on = rests_on

    def _move(self, unit: Unit, move: Move, gone: Collection[Digest] = ()) -> None:
        layout, agreed = self.agreed.layout.by_unit[unit], self.agreed
        after, lost = agreed.read(move.after), [each for each in move.rests_on if each in gone]
        if lost:  # as when two merges were skipped
            logger.info("%s restarts from its agreed value: %s", unit, BlobGone(lost[0]))
        if move.before is None or lost:
            overwrite(self._parts, layout, after)
        elif move.is_jump:
            rebase(self._parts, layout, agreed.read(move.before), after)
        else:
            counted = agreed.delta(move.counted) if move.counted else None
            follow(self._parts, layout, agreed.read(move.before), after, counted)

    def _write_others(self, manifest: Manifest) -> None:
        """Writes frozen experts one matrix at a time, since scales may cover whole rows."""
        owned = self.engine.owned
        for unit, entry in manifest.entries.items():
            expert = expert_of_unit(unit)
            if expert is None or expert in owned or self.held.get(unit) == entry.digest:
                continue
            lent = self.agreed.lent(entry.digest, unit) if self.engine.borrows else None
            if lent:
                self.engine.lend(lent)
            else:
                for name, tensor in self.agreed.tensors(entry.digest, unit):
                    self.engine.write({name: tensor})
            self.held[unit] = entry.digest

    # ------------------------------------------------ looking at agreed states

    def evaluate(
        self,
        manifest: Manifest,
        held_out: HeldOut,
        patiently: Patiently = lambda work: work(),
    ) -> float:
        """Held-out loss of the agreed state in nats per token, right after it was adopted.

        The agreed values of owned experts come from the store matrix by matrix; `Engine.evaluate`
        documents the memory. During the evaluation, local progress of shared tensors is on disk;
        `patiently` calls the function that writes it.

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


def _digests(manifest: Manifest) -> list[Digest]:
    return [entry.digest for entry in manifest.entries.values()]


def _shared_units(layout: Layout) -> list[Unit]:
    return [each.unit for each in layout.units if expert_of_unit(each.unit) is None]
