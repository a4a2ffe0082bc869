"""Adam moments between engine and other peers, as experts change hands; the trainer's side.

Owners put copies out for their backups while a round runs, and what a manifest takes from them
as it is adopted. A peer that takes an expert up trains on at once; its moments are added when they
come. That is exact: the moments after t updates are those that zeros would have become plus
beta^t times those that were missing.
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from torch import Tensor

from swarm.codecs import cut_from, encoded, read_part, read_parts
from swarm.errors import StateError
from swarm.experts import Slice, expert_unit
from swarm.network.moments import Arrival, MomentsExchange
from swarm.network.patience import patiently
from swarm.peer.live_model import BlobGone, LiveModel
from swarm.peer.status import PeerStatus
from swarm.protocol.adoption import Action, Adoption
from swarm.protocol.digests import digest_of_chunks
from swarm.protocol.manifest import Kind, Manifest, PeerId
from swarm.protocol.moments import (
    KINDS,
    MASTER,
    Moments,
    Search,
    backup_holders,
    decode_searches,
    encode_searches,
    handed_over,
    handover_round,
    is_backup_round,
    is_in_vain,
    layout_of_size,
    moments_layout,
    moments_shapes,
    transfer_limit_s,
)

logger = logging.getLogger(__name__)

TOGETHER = 2
"""Experts that a leaver hands over at a time; what has no time to arrive is not copied either."""


class MomentsKeeper:
    """Everything the trainer does about moments; only its thread calls this."""

    def __init__(self, model: LiveModel, exchange: MomentsExchange, status: PeerStatus) -> None:
        self.model, self.exchange, self.status = model, exchange, status
        self.every = model.run.ownership.backup_every_rounds
        self._copies: list[Moments] = []
        """Put out for the backups, who are told once the round is over."""
        self._given_up: dict[Moments, tuple[PeerId, ...]] = {}
        self._searches: tuple[Search, ...] = ()
        """For what has not been added yet."""
        self._handing_over: list[tuple[frozenset[int], Future[tuple[Moments, ...]]]] = []
        """Experts that are being handed over, and those confirmed when that is over."""
        self._leaving: dict[int, tuple[PeerId, ...]] = {}
        """What a leaver has still to hand over, and to whom."""
        self._leaving_round = 0
        self._told: dict[int, tuple[PeerId, ...]] = {}
        """To whom a leaver has handed over."""

    # ------------------------------------------------ giving

    def offered(self, tip: Manifest) -> None:
        """Copies the moments for the backups, in a round in which that is due.

        Called when the round's offer is out: until the next manifest nothing here changes, and
        nobody waits. What is still looked for is not copied: it would take the place of what may
        be found.
        """
        number = tip.round + 1
        if not is_backup_round(number, self.every):
            return
        began_s, holders = time.monotonic(), backup_holders(tip)
        sought = {expert for search in self._searches for expert in search.experts}
        mine = [e for e in sorted(self.model.bases) if e in holders and e not in sought]
        self._copies = [kept for e in mine if (kept := self._keep(e, number))]
        if self._copies:
            logger.info(
                "backup round=%d experts=%d bytes=%d copied in %.2f s", number,
                len(self._copies), sum(m.num_bytes for m in self._copies),
                time.monotonic() - began_s,
            )  # fmt: skip

    def before_adopt(self, previous: Manifest, manifest: Manifest) -> None:
        """Copies the moments of experts that others own from `manifest` on."""
        me = self.model.me
        number = handover_round(me, previous, manifest)
        self._given_up = self._keep_for(handed_over(me, previous, manifest), number)

    def adopted(self, adoption: Adoption, previous: Manifest, manifest: Manifest) -> None:
        """Tells others what is here for them, and looks for the moments of what is new here."""
        if self._given_up:
            self._announce(self._given_up, is_handover=True)
            self._given_up = {}
        if self._copies and manifest.kind is Kind.QUORUM:
            holders = backup_holders(manifest)
            mine = [m for m in self._copies if m.expert in self.model.bases]
            wanted = {m: (holders[m.expert],) for m in mine if m.expert in holders}
            self._announce(wanted)
            self._copies = []
        taken = [
            expert
            for expert, decision in adoption.experts.items()
            if decision.action is Action.TAKE_UP
            and manifest.entries[expert_unit(expert)].version > 0
        ]
        self._look_only_for(self.model.bases)
        self._look_for(Search(tuple(taken), previous, manifest))
        patiently(partial(self.exchange.expire, manifest, self.every), "list of moments")

    def leave(self, adopted: Manifest, tip: Manifest) -> None:
        """Everything is to be handed over, to those who own it now or would adopt it.

        Args:
            adopted: the manifest that the engine is at.
            tip: the newest; with this peer still a member if its leave is not decided yet.
        """
        if self.model.me in tip.members:
            holders = backup_holders(tip)
            whom: dict[int, tuple[PeerId, ...]] = {e: (peer,) for e, peer in holders.items()}
        else:
            whom = handed_over(self.model.me, adopted, tip)
        mine = {expert: peers for expert, peers in whom.items() if expert in self.model.bases}
        self._leaving = {e: p for e, p in mine.items() if self._told.get(e) != p}
        self._leaving_round = handover_round(self.model.me, adopted, tip)

    def hand_over(self, remaining_s: float) -> None:
        """Puts out the next experts of a leaver, a few at a time, as those before arrive."""
        under_way = sum(not future.done() for _, future in self._handing_over)
        while self._leaving and under_way < TOGETHER:
            expert, peers = self._leaving.popitem()
            self._told[expert] = peers
            kept = self._keep_for({expert: peers}, self._leaving_round)
            self._announce(kept, remaining_s, is_handover=True)
            under_way += 1

    def all_handed_over(self) -> bool:
        """Whether everything that others need is confirmed to be there, or given up."""
        return not self._leaving and all(future.done() for _, future in self._handing_over)

    def summary(self) -> str:
        """What was handed over, for people."""
        given = {expert for experts, _ in self._handing_over for expert in experts}
        there = {
            moments.expert
            for _, future in self._handing_over
            if future.done()
            for moments in future.result()
        }
        wanted = given | self._leaving.keys()
        said = f"moments of {len(there)} of {len(wanted)} experts handed over"
        if not self._leaving:
            return said
        layout = self.model.agreed.layout
        rest = sum(
            moments_layout(layout, e, with_master=self._with_masters).num_bytes
            for e in self._leaving
        )
        return f"{said}; no time for {rest / 1e9:.1f} GB more, a longer --leave-timeout has it"

    def _keep_for(
        self, whom: Mapping[int, tuple[PeerId, ...]], number: int
    ) -> dict[Moments, tuple[PeerId, ...]]:
        """Puts out, for good, what is mine of these experts."""
        kept = {
            self._keep(expert, number, for_good=True): peers
            for expert, peers in whom.items()
            if expert in self.model.bases
        }
        return {moments: peers for moments, peers in kept.items() if moments}

    @property
    def _with_masters(self) -> bool:
        """Whether masters go along for good: where the wire rounds them."""
        return self.model.run.wire.experts != "fp32"

    def _keep(self, expert: int, number: int, *, for_good: bool = False) -> Moments | None:
        """Puts an expert's moments out; `for_good` with masters, where the wire rounds them.

        Returns:
            None if the disk does not take them: a copy is worth no interruption.
        """
        layout = self.model.agreed.layout
        with_master = for_good and self._with_masters
        content = encoded(
            moments_layout(layout, expert, with_master=with_master), cut_from(self._read)
        )
        try:
            return self.exchange.keep(expert, number, content)
        except StateError as error:
            logger.error("moments of expert %d are not kept for others: %s", expert, error)
            return None

    def _read(self, name: str) -> Tensor:
        """One tensor of a moments blob, from the engine."""
        kind, _, tensor = name.partition(".")
        if kind == MASTER:
            return self.model.engine.read([tensor])[tensor]
        return self.model.engine.read_moments([tensor])[name]

    def _announce(
        self,
        wanted: Mapping[Moments, tuple[PeerId, ...]],
        deadline_s: float | None = None,
        *,
        is_handover: bool = False,
    ) -> None:
        if not wanted:
            return
        limit_s = transfer_limit_s(sum(moments.num_bytes for moments in wanted))
        future = self.exchange.announce(wanted, limit_s if deadline_s is None else deadline_s)
        if is_handover:
            for moments, peers in wanted.items():
                logger.info(
                    "moments expert=%d round=%d for %s, bytes=%d digest=%s", moments.expert,
                    moments.round, ", ".join(p[-6:] for p in peers), moments.num_bytes,
                    moments.digest[:12],
                )  # fmt: skip
                self.status.gave_moments(moments, peers)
            self._handing_over.append((frozenset(m.expert for m in wanted), future))

    # ------------------------------------------------ taking

    @property
    def searches(self) -> str:
        """What is looked for, to be saved with the moments that it will be added to."""
        return encode_searches(self._searches)

    def resume(self, searches: str, tip: Manifest) -> None:
        """Looks again for what is not in the moments that were just loaded.

        Args:
            searches: as saved with these; "" in files of older versions.
            tip: the newest manifest, by which the search may be in vain.
        """
        self._searches = ()
        for search in decode_searches(searches) if searches else ():
            late = [e for e in search.experts if is_in_vain(search, e, tip, self.every)]
            for expert in late:
                since = f"looked for since round {search.manifest.round}, nobody keeps any by now"
                self.status.took_moments(expert, None, f"zero moments: {since}")
            left = tuple(expert for expert in search.experts if expert not in late)
            self._look_for(replace(search, experts=left))

    def _look_for(self, search: Search) -> None:
        if search.experts:
            self._searches += (search,)
            self.exchange.take_up(search)

    def _look_only_for(self, experts: Collection[int]) -> None:
        """Forgets whatever else is looked for."""
        each = (
            replace(search, experts=tuple(e for e in search.experts if e in experts))
            for search in self._searches
        )
        self._searches = tuple(search for search in each if search.experts)

    def on_step(self, *, skipped: bool) -> None:
        """A local step was done: adds what has come meanwhile."""
        if not skipped:
            self._searches = tuple(replace(s, steps=s.steps + 1) for s in self._searches)
        self.install()

    def install(self) -> None:
        """Adds the moments that have come to those of the engine, of each expert once."""
        while True:
            try:
                arrival = self.exchange.arrivals.get_nowait()
            except queue.Empty:
                return
            steps = {e: search.steps for search in self._searches for e in search.experts}
            try:
                if arrival.expert in steps:  # else no longer mine, or looked for twice
                    self._look_only_for(steps.keys() - {arrival.expert})
                    self._add(arrival, steps[arrival.expert])
            finally:
                self.exchange.taken(arrival)

    def _add(self, arrival: Arrival, steps: int) -> None:
        """Adds moments tensor by tensor: three tensors in fp32 are held at the peak."""
        expert, moments = arrival.expert, arrival.moments
        if moments is None:
            self.status.took_moments(expert, None, arrival.reason)
            return
        layout = layout_of_size(self.model.agreed.layout, expert, moments.num_bytes)
        assert layout is not None, "its size was checked before it was fetched"
        shapes = moments_shapes(self.model.agreed.layout, expert)
        read = self.model.agreed.read(moments.digest)

        def named(name: str) -> Tensor:
            return read_part(layout, Slice(name, 0, math.prod(shapes[name])), read).view(
                shapes[name]
            )

        tensors = [
            each.name for each in self.model.agreed.layout.by_unit[expert_unit(expert)].slices
        ]
        for tensor in tensors:
            came = {name: named(name) for name in (f"{kind}.{tensor}" for kind in KINDS)}
            self.model.engine.write_moments(self._aged(tensor, came, steps))
        reason = arrival.reason
        if steps:
            reason += f", {steps} steps late"
        has_master = len(layout.slices) > len(KINDS) * len(tensors)
        if has_master and self._add_master(
            expert, lambda part: read_part(layout, _master(part), read)
        ):
            reason += ", with masters"
        self.status.took_moments(expert, moments, reason)

    def _aged(self, tensor: str, came: Mapping[str, Tensor], steps: int) -> Mapping[str, Tensor]:
        """The engine's moments plus what is left, after so many updates, of those that came."""
        if not steps:
            return came
        first, second = self.model.run.optimizer.betas
        aged = {}
        for name, now in self.model.engine.read_moments([tensor]).items():
            beta = second if name.startswith("exp_avg_sq.") else first
            aged[name] = now.add_(came[name] * beta**steps)
        return aged

    def _add_master(self, expert: int, masters: Callable[[Slice], Tensor]) -> bool:
        """Adds what the wire had rounded off, if the masters are those of the agreed value."""
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
    """Where the masters of a run of elements lie in a moments blob."""
    return Slice(f"{MASTER}.{part.name}", part.start, part.stop)
