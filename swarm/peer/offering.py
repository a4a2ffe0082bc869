"""What a peer offers is judged here first, by the rule of all who will fetch it [U1]."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from swarm.codecs import Content
from swarm.codings import coded_bytes
from swarm.deltas.units import apply_delta, check_delta
from swarm.errors import BadBlob
from swarm.experts import expert_of_unit
from swarm.network.contents import BlobGone
from swarm.peer.live_model import LiveModel
from swarm.peer.rounds import Rounds
from swarm.peer.status import PeerStatus
from swarm.protocol.manifest import Digest, Manifest, Unit
from swarm.protocol.messages import OfferedUnit
from swarm.protocol.rounds.plausible import update_bound
from swarm.protocol.training import SavedWork

logger = logging.getLogger(__name__)


class Offering:
    """Stores offered values; one that nobody would take begins anew from the agreed one."""

    def __init__(
        self,
        model: LiveModel,
        rounds: Rounds,
        status: PeerStatus,
        in_turn: Callable[[Callable[[], None]], None] = lambda call: call(),
    ) -> None:
        """Offers nothing yet; `in_turn` has the thread that may change the engine do something."""
        self.model, self.rounds, self.status = model, rounds, status
        self._in_turn = in_turn
        self._refusing = threading.Lock()
        self._before_refusal: Callable[[], None] = lambda: None
        self._named: dict[Unit, OfferedUnit] = {}
        """Deltas of the live values as they are: a delta that has a name is not made again."""

    def changed(self) -> None:
        """Says that live values have changed."""
        self._named.clear()

    def resume(self, tip: Manifest, saved: SavedWork) -> None:
        """Knows again what was offered of live values that were loaded, if it is on this tip."""
        layouts = self.model.agreed.layout.by_unit
        for unit, digest in saved.offered.items():
            layout, delta = layouts[unit], saved.deltas.get(unit)
            if layout.coding != "none":
                num_bytes = layout.num_bytes if delta else coded_bytes(layout)
                base = tip.entries[unit].digest
                self._named[unit] = OfferedUnit(digest, num_bytes, base, delta)
                self.model.keep_offered(filter(None, [digest, delta]))

    @contextmanager
    def refusing_after(self, end: Callable[[], None]) -> Iterator[None]:
        """Within it a value begins anew only once `end` has returned: something reads the values.

        `end` may be called several times.
        """
        before, self._before_refusal = self._before_refusal, end
        try:
            yield
        finally:
            self._before_refusal = before

    def sync(self, units: Mapping[Unit, OfferedUnit]) -> None:
        """Makes what was offered as deltas durable: it may be counted while this peer is gone."""
        layouts = self.model.agreed.layout.by_unit
        coded = [each for unit, each in units.items() if layouts[unit].coding != "none"]
        blobs = [digest for each in coded for digest in (each.digest, each.delta) if digest]
        if blobs:
            self.model.agreed.store.sync(blobs)

    def offered_all(
        self,
        tip: Manifest,
        bases: Mapping[Unit, Digest],
        tokens: int,
        patiently: Callable[[Callable[[], OfferedUnit]], OfferedUnit] = lambda work: work(),
    ) -> dict[Unit, OfferedUnit]:
        """What is offered of these units, several at a time; `bases` and the others as `offered`.

        `patiently` calls it, again where that may help.
        """

        def offered(unit: Unit) -> OfferedUnit:
            return patiently(partial(self.offered, tip, unit, bases[unit], tokens))

        return dict(zip(bases, self.model.each(offered, bases), strict=True))

    def offered(self, tip: Manifest, unit: Unit, base: Digest, tokens: int) -> OfferedUnit:
        """What is offered of a unit, whose blobs are in the store.

        Where adopting may need them they are kept from now on.

        Args:
            tip: on which it is offered.
            unit: that is trained here.
            base: the agreed value that it was trained from.
            tokens: of the local steps since the tip.
        """
        layout, named = self.model.agreed.layout.by_unit[unit], self._named.get(unit)
        if layout.coding == "none":
            digest, num_bytes = self.store(tip, unit, self.model.value_of(unit), tokens)
            return OfferedUnit(digest, num_bytes, base)
        if named and named.base == base:
            self.model.keep_offered(filter(None, [named.digest, named.delta]))
            if self._has(named):
                return named
        made = self._named[unit] = self._moved(tip, unit, base, tokens)
        return made

    def _has(self, named: OfferedUnit) -> bool:
        store = self.model.agreed.store
        return all(store.has(digest) for digest in (named.digest, named.delta) if digest)

    def _moved(self, tip: Manifest, unit: Unit, base: Digest, tokens: int) -> OfferedUnit:
        """The delta of a unit [W5]; the value that it makes too, where that may become agreed."""
        bound = update_bound(unit, [self.model.me], {self.model.me: tokens}, tip, self.rounds.rules)
        limits = {"absolute": bound.absolute, "relative": bound.relative} if bound else {}
        with self.model.agreed.held([base]):
            try:
                return self._judged(unit, base, limits)
            except BadBlob as error:
                self._begin_anew(tip, unit, error)
                return self._judged(unit, base, {})

    def _judged(self, unit: Unit, base: Digest, limits: Mapping[str, float]) -> OfferedUnit:
        agreed, store = self.model.agreed, self._stored
        layout, before = agreed.layout.by_unit[unit], agreed.read(base)
        digest, num_bytes = store(self.model.difference(unit, base))
        delta = agreed.delta(digest)
        if self.rounds.rules.is_verbatim(unit):
            return OfferedUnit(*store(apply_delta(layout, before, delta, **limits)), base, digest)
        if limits:
            check_delta(layout, delta, before, **limits)
        return OfferedUnit(digest, num_bytes, base)

    def store(self, tip: Manifest, unit: Unit, value: Content, tokens: int) -> tuple[Digest, int]:
        """Digest and size of a unit's value in the store, after local steps on `tip`.

        A value further from the agreed one than these steps can have moved it is not offered: this
        peer says why, in log and events, goes on from the agreed value and offers that.
        """
        me = self.model.me
        bound = update_bound(unit, [me], {me: tokens}, tip, self.rounds.rules)
        is_kept = self.model.is_coded or expert_of_unit(unit) is not None
        store = self._stored if is_kept else self.rounds.store_value
        if bound is None:
            return store(value)
        try:
            with self.model.agreed.held([bound.base]):
                try:
                    return store(self.model.guarded(unit, value, bound))
                except BadBlob as error:
                    self._begin_anew(tip, unit, error)
        except BlobGone as error:
            logger.info("%s is offered unjudged: %s", unit, error)
        return store(self.model.value_of(unit))

    def _stored(self, content: Content) -> tuple[Digest, int]:
        """Stores what may be needed until it is adopted, and keeps it.

        Each round that is decided meanwhile drops what it does not know of. What is dropped before
        it is kept is stored once more, under the same digest, which is kept by then.
        """
        digest, num_bytes = self.rounds.store_value(content)
        self.model.keep_offered([digest])
        if not self.model.agreed.store.has(digest):
            self.rounds.store_value(content)
        return digest, num_bytes

    def _begin_anew(self, tip: Manifest, unit: Unit, why: BadBlob) -> None:
        def begin_anew() -> None:
            logger.error("not offered, begins anew from the agreed value: %s", why)
            self.status.refused(unit, str(why))
            self.model.begin_anew(tip, unit)

        with self._refusing:
            self._before_refusal()
            self._in_turn(begin_anew)
