"""Computations of a peer for a round: means of values, means of deltas, and values from deltas.

A mean of deltas leaves a remainder, a blob that stays in the store while it is valid.
`swarm.protocol.exchange.deltas` says how long. Remainders are not durable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swarm.codecs import Content, mean_of
from swarm.codings import coded_bytes
from swarm.deltas.unit_deltas import apply_delta, reduced
from swarm.errors import BadBlob
from swarm.network.blobs.blob_store import BlobGone, BlobStore, Draft, delta_in, kept, reader, write
from swarm.protocol.exchange.deltas import Remainders
from swarm.protocol.messages.events import Rebuild, Reduce
from swarm.protocol.messages.messages import ReducedUnit
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.manifest import Digest, Manifest, Unit

Merger = Callable[[Manifest], Mapping[Unit, Content]]
"""The merged experts of a tip whose merge is due, computed on demand from its agreed values."""
OpenValue = Callable[[int], Draft]
"""Opens a draft of this many bytes."""


@dataclass(frozen=True)
class Mean:
    """The result of a `Reduce`.

    Attributes:
        result: the result for the round machine; its blobs stay pinned until the machine has the
            event.
        left: the remainder of a mean of deltas, a blob that is pinned until it is released.
    """

    result: ReducedUnit
    left: Digest | None = None


class LeftOver:
    """Remainders of this peer's means of deltas, kept for later means; used in the node's loop."""

    def __init__(self, store: BlobStore, tip: Manifest, rules: Rules) -> None:
        """See `Remainders`; that of a unit which is due once a cycle is valid for some cycles."""
        self._store, self._tip = store, tip
        self._remainders = Remainders[Digest](tip.digest, rules.silent_rounds)
        self._pinned = set[Digest]()

    def of(self, effect: Reduce) -> Digest | None:
        """The remainder to add to this mean, if there is a valid one."""
        return self._remainders.of(effect.unit) if effect.base else None

    def found(self, tip: Manifest, unit: Unit, mean: Mean) -> None:
        """Notes a mean of deltas for the round after this tip."""
        if mean.left is None or mean.result.delta is None:
            return
        self._remainders.found(tip.digest, unit, mean.result.delta, mean.left)
        if mean.left in self._pinned:
            self._store.unpin([mean.left])
        self._pinned.add(mean.left)
        self._let_go()

    def applied(self, manifest: Manifest) -> None:
        """Notes a new tip."""
        self._remainders.applied(manifest, self._tip)
        self._tip = manifest
        self._let_go()

    def _let_go(self) -> None:
        """Unpins remainders that are no longer valid; each has one pin."""
        good = {left for _, left in self._remainders.items()}
        self._store.unpin(self._pinned - good)
        self._pinned &= good


class Reductions:
    """The computations, which run in the caller's thread."""

    def __init__(
        self,
        store: BlobStore,
        layout: Layout,
        open_value: OpenValue,
        is_stored: Callable[[Digest], None],
    ) -> None:
        """Has computed nothing yet.

        Args:
            store: store of the peer.
            layout: layout of the run.
            open_value: opens a draft for a value. The round machine gets an event when the draft is
                finished.
            is_stored: reports a blob that is pinned for the machine.
        """
        self.store, self.layout = store, layout
        self.open_value, self.is_stored = open_value, is_stored

    def mean(self, effect: Reduce, remainder: Digest | None) -> Mean | None:
        """The mean for a `Reduce`; None if a blob that it needs is no longer here.

        Args:
            effect: the `Reduce`, with or without deltas.
            remainder: remainder of the unit's previous mean of deltas.
        """
        wanted = [digest for _, digest in effect.inputs]
        with kept(self.store, [*wanted, *filter(None, [effect.base, remainder])]) as missing:
            if missing:
                return None
            if effect.base is None:
                return Mean(self._mean_of_values(effect, wanted))
            return self._mean_of_deltas(effect, effect.base, remainder)

    def _mean_of_values(self, effect: Reduce, digests: Sequence[Digest]) -> ReducedUnit:
        layout = self.layout.by_unit[effect.unit]
        if len(digests) == 1:  # the mean of a single value is the value
            self.store.pin(digests)
            self.is_stored(digests[0])
            return ReducedUnit(digests[0], layout.num_bytes)
        reads = [reader(self.store, digest) for digest in digests]
        value = mean_of(reads, layout.num_bytes, layout.codec, effect.weights)
        return ReducedUnit(write(self.open_value(layout.num_bytes), value), layout.num_bytes)

    def _mean_of_deltas(self, effect: Reduce, base: Digest, remainder: Digest | None) -> Mean:
        layout = self.layout.by_unit[effect.unit]
        sizes = coded_bytes(layout), layout.num_bytes
        runs = reduced(
            layout,
            reader(self.store, base),
            [delta_in(self.store, digest) for _, digest in effect.inputs],
            reader(self.store, remainder) if remainder else None,
            effect.weights,
        )
        with (
            self.open_value(sizes[0]) as delta,
            self.open_value(sizes[1]) as value,
            self.store.draft(4 * layout.num_elements) as left,
        ):
            for run in runs:
                delta.write(run.delta)
                value.write(run.value)
                left.write(run.left)
            made, moved = delta.finish(), value.finish()
            self.store.sync([made, moved])  # before others are informed (delta means)
            return Mean(ReducedUnit(moved, sizes[1], made), left.finish())

    def rebuild(self, effect: Rebuild) -> str | None:
        """Computes a value from its base and its delta, stores it and reports it.

        Returns:
            None, or why the result is not the value; then nothing is stored.
        """
        layout = self.layout.by_unit[effect.unit]
        with kept(self.store, [effect.base, effect.delta]) as missing:
            if missing:
                return "its base or its delta is no longer here"
            try:
                base, delta = reader(self.store, effect.base), delta_in(self.store, effect.delta)
                value = apply_delta(layout, base, delta)
                made = write(self.store.draft(layout.num_bytes), value)
            except (BadBlob, BlobGone) as error:
                return str(error)
        if made != effect.digest:
            self.store.unpin([made])
            return f"the delta {effect.delta[:12]} makes {made[:12]} of {effect.base[:12]}"
        self.is_stored(made)
        return None
