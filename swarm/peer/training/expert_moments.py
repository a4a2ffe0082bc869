"""Adam moments of experts that change owners, between the engine and other peers.

When a manifest is adopted, an owner offers the moments of each expert for which the manifest names
new owners. A new owner trains at once, and adds the moments when they arrive. The sum is exact:
after t updates with decay beta, moments are those grown from zeros plus beta^t times the moments
that were missing.
"""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Callable, Mapping

from torch import Tensor

from swarm.codecs import cut_from, encoded, read_part, read_parts
from swarm.errors import StateError
from swarm.experts import Slice, UnitLayout, expert_unit
from swarm.network.blobs.blob_store import BlobGone
from swarm.network.rounds.moments_exchange import Arrival, MomentsExchange
from swarm.peer.status.status import PeerStatus
from swarm.peer.training.live_model import LiveModel
from swarm.protocol.exchange import handover
from swarm.protocol.training.adoption import Action, Adoption
from swarm.protocol.values.digests import digest_of_chunks
from swarm.protocol.values.manifest import Manifest, PeerId
from swarm.train.engine.muon import MOMENTUM_DECAY

logger = logging.getLogger(__name__)

TOGETHER = 2
"""How many experts a leaver hands over at a time; more at once might all be unfinished at its
end."""


class ExpertMoments:
    """The trainer's side of the moment hand-over; only the trainer's thread may call it."""

    def __init__(self, model: LiveModel, exchange: MomentsExchange, status: PeerStatus) -> None:
        self.model, self.exchange, self.status = model, exchange, status
        self.before_change: Callable[[], None] = lambda: None
        """Called before moments of the engine change, because another thread may be reading
        them."""
        self._out: list[handover.Moments] = []
        """All moments that were offered so far."""
        self._leaving: dict[int, tuple[PeerId, ...]] = {}
        """Experts whose moments a leaver has still to offer, with their new owners."""
        self._leaving_round = 0
        self._steps: dict[int, int] = {}
        """For each expert with awaited moments, its updates since this peer took it up."""

    # ------------------------------------------------ giving

    def before_adopt(self, previous: Manifest, manifest: Manifest) -> None:
        """Offers the moments of experts that get new owners in `manifest`."""
        me = self.model.me
        number = handover.handover_round(me, previous, manifest)
        for expert, peers in handover.handed_over(me, previous, manifest).items():
            self._give(expert, number, peers)

    def leave(self, adopted: Manifest, tip: Manifest) -> None:
        """Notes the experts to hand over: those that a tip without this peer gives to others.

        Args:
            adopted: the manifest that the engine has adopted.
            tip: the newest manifest.
        """
        self._leaving = handover.handed_over(self.model.me, adopted, tip)
        self._leaving_round = handover.handover_round(self.model.me, adopted, tip)

    def hand_over(self) -> None:
        """Offers the next few experts of a leaver whenever earlier experts have arrived."""
        under_way = sum(map(self.exchange.is_waited_for, self._out))
        while self._leaving and under_way < TOGETHER:
            expert, peers = self._leaving.popitem()
            self._give(expert, self._leaving_round, peers)
            under_way += 1

    def all_handed_over(self) -> bool:
        """Whether all needed moments have arrived, as confirmed, or were given up."""
        return not self._leaving and not any(map(self.exchange.is_waited_for, self._out))

    def summary(self) -> str:
        """A sentence about the moments that were handed over."""
        wanted = {moments.expert for moments in self._out} | self._leaving.keys()
        if not wanted:
            return "no moments were handed over"
        said = f"moments of {len(self.exchange.given)} of {len(wanted)} experts handed over"
        if not self._leaving:
            return said
        rest = sum(self._layout(expert).num_bytes for expert in self._leaving)
        return f"{said}; no time for {rest / 1e9:.1f} GB more (--leave-timeout gives more time)"

    def _layout(self, expert: int) -> UnitLayout:
        """Layout of an expert's moments blob, which contains masters if the wire rounds values.

        If experts move by deltas, the blob contains no masters. A master then differs from the
        agreed value by the error of a coding. A new owner could not tell which peer's error it is,
        so the error is lost.
        """
        wire = self.model.run.wire
        with_master = wire.experts != "fp32" and wire.experts_coding == "none"
        return handover.moments_layout(self.model.agreed.layout, expert, with_master=with_master)

    def _give(self, expert: int, number: int, peers: tuple[PeerId, ...]) -> None:
        """Offers an expert's moments, unless the disk fails; nothing depends on them."""
        if expert not in self.model.bases:
            return
        content = encoded(self._layout(expert), cut_from(self._read))
        try:
            moments = self.exchange.give(expert, number, content, peers)
        except StateError as error:
            logger.error("moments of expert %d are not handed over: %s", expert, error)
            return
        self._out.append(moments)
        logger.info(
            "moments expert=%d round=%d for %s, bytes=%d digest=%s", expert, number,
            ", ".join(p[-6:] for p in peers), moments.num_bytes, moments.digest[:12],
        )  # fmt: skip
        self.status.gave_moments(moments, peers)

    def _read(self, name: str) -> Tensor:
        """One tensor of a moments blob, from the engine."""
        kind, _, tensor = name.partition(".")
        if kind == handover.MASTER:
            return self.model.engine.read([tensor])[tensor]
        return self.model.engine.read_moments([tensor])[name]

    # ------------------------------------------------ taking

    def adopted(self, adoption: Adoption, previous: Manifest, manifest: Manifest) -> None:
        """Requests the moments of new experts of this peer; drops requests for former ones."""
        taken = [
            expert
            for expert, decision in adoption.experts.items()
            if decision.action is Action.TAKE_UP
            and manifest.entries[expert_unit(expert)].version > 0
        ]
        self._steps = {e: steps for e, steps in self._steps.items() if e in self.model.bases}
        self._steps |= dict.fromkeys(taken, 0)
        self.exchange.keep_only(self.model.bases.keys())
        self.exchange.take_up(taken, previous, manifest)

    def on_step(self, *, skipped: bool) -> None:
        """After a local step: adds moments that have arrived meanwhile."""
        if not skipped:
            self._steps = {expert: steps + 1 for expert, steps in self._steps.items()}
        self.install()

    def install(self) -> None:
        """Adds arrived moments to those of the engine, once for each expert."""
        while True:
            try:
                arrival = self.exchange.arrivals.get_nowait()
            except queue.Empty:
                return
            try:
                if arrival.expert in self._steps:  # else the expert has left meanwhile
                    self._add(arrival, self._steps.pop(arrival.expert))
            finally:
                self.exchange.taken(arrival)

    def _add(self, arrival: Arrival, steps: int) -> None:
        """Adds moments tensor by tensor, with at most three fp32 tensors in memory."""
        expert, moments = arrival.expert, arrival.moments
        if moments is None:
            self.status.took_moments(expert, None, arrival.reason)
            return
        self.before_change()
        layout = handover.layout_of_size(self.model.agreed.layout, expert, moments.num_bytes)
        assert layout is not None, "its size was checked before it was fetched"
        shapes = handover.moments_shapes(self.model.agreed.layout, expert)
        read = self.model.agreed.read(moments.digest)

        def named(name: str) -> Tensor:
            return read_part(layout, Slice(name, 0, math.prod(shapes[name])), read).view(
                shapes[name]
            )

        tensors = [
            each.name for each in self.model.agreed.layout.by_unit[expert_unit(expert)].slices
        ]
        kinds = self.model.agreed.layout.moments
        for tensor in tensors:
            came = {name: named(name) for name in (f"{kind}.{tensor}" for kind in kinds)}
            self.model.engine.write_moments(self._aged(tensor, came, steps))
        reason = arrival.reason
        if steps:
            reason += f", {steps} steps late"
        has_master = len(layout.slices) > len(kinds) * len(tensors)
        if has_master and self._add_master(
            expert, lambda part: read_part(layout, _master(part), read)
        ):
            reason += ", with masters"
        self.status.took_moments(expert, moments, reason)

    def _aged(self, tensor: str, came: Mapping[str, Tensor], steps: int) -> Mapping[str, Tensor]:
        """The engine's moments plus the arrived ones, which are decayed by `steps` updates."""
        if not steps:
            return came
        first, second = self.model.run.optimizer.betas
        kept = {"exp_avg": first, "exp_avg_sq": second, "momentum": MOMENTUM_DECAY}
        aged = {}
        for name, now in self.model.engine.read_moments([tensor]).items():
            aged[name] = now.add_(came[name] * kept[name.partition(".")[0]] ** steps)
        return aged

    def _add_master(self, expert: int, masters: Callable[[Slice], Tensor]) -> bool:
        """Adds the part that the wire rounded off, if these masters round to the agreed value."""
        model, layout = self.model, self.model.agreed.layout.by_unit[expert_unit(expert)]
        base = model.bases[expert]
        if digest_of_chunks(encoded(layout, masters)) != base:
            return False
        try:
            with model.agreed.held([base]):
                for part, agreed in read_parts(layout, model.agreed.read(base)):
                    rounded_off = masters(part) - agreed.float()
                    model.engine.write_part(part, model.engine.read_part(part) + rounded_off)
        except BlobGone:
            return False
        return True


def _master(part: Slice) -> Slice:
    """Where a moments blob has these elements of the masters."""
    return Slice(f"{handover.MASTER}.{part.name}", part.start, part.stop)
