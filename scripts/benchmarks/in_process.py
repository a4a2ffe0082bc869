"""A swarm in one process, without a network, to measure the effect of a method on the loss.

This module computes nothing itself. Local steps, schedule of the units, deltas, weights of a mean,
the mean and its remainder, adoption, owners and merges are the functions that a peer calls. Tests
compare the result, bit for bit, with the plain reference of SPES and with swarms of processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from conditions import WAITING, Conditions, LimitedEngine
from torch import Tensor

from swarm.codecs import (
    Buffer,
    Read,
    allocate,
    encoded,
    fill,
    mean_of,
    read_part,
    read_parts,
    read_tensors,
)
from swarm.config import RunConfig
from swarm.data.held_out import HeldOut
from swarm.data.loader import Loader
from swarm.deltas.unit_deltas import Delta, apply_delta, difference, follow, rebase, reduced
from swarm.experts import Slice, UnitLayout, expert_of, expert_of_unit, expert_unit
from swarm.model.merge import donors_of, merged_part
from swarm.peer.text.agreed_model import initial_contents
from swarm.protocol.membership.ownership import assign
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.schedule import alpha_at, merge_due, merged_until
from swarm.protocol.values.work import weights
from swarm.train.engine.engine import Engine
from swarm.train.engine.local_steps import Task, train_local_steps
from swarm.train.engine.resident import ResidentEngine


class Entry(NamedTuple):
    """The fields of a manifest's entry that the schedule reads."""

    version: int
    codec: str


class Tip(NamedTuple):
    """The fields of a manifest that schedule and merging read."""

    round: int
    step: int
    merged: int
    entries: Mapping[str, Entry]
    owners: Mapping[int, tuple[str, ...]]
    ownerless: frozenset[str] = frozenset()
    """Empty, since each expert has an owner here."""


@dataclass(frozen=True)
class Move:
    """A change of a unit by a round or a merge.

    Attributes:
        layout: layout of the unit.
        before: bytes of its previous agreed value.
        after: bytes of the new agreed value.
        offered: the offer of each source, a delta or a value. None for a merge.
    """

    layout: UnitLayout
    before: bytes
    after: bytes
    offered: Mapping[str, bytes] | None = field(default=None, repr=False)


class InProcessSwarm:
    """`run.peers` peers that are never excluded, with experts that never change owners."""

    def __init__(
        self,
        run: RunConfig,
        loader: Loader | Sequence[Loader],
        conditions: Conditions = WAITING,
        *,
        owners: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        """Starts all peers with the initial model and their shares of the experts.

        Args:
            run: exact, or with codings.
            loader: of the common text, or of the text of each peer.
            conditions: of the training.
            owners: of each expert, by peer ids. None: the owners among new peers with equal
                machines.
        """
        self.run, self.conditions = run, conditions
        self.layout = layout_of(run)
        self.rules = Rules.of(run.run.name, run, self.layout)
        self.is_coded = bool(self.rules.unit_coding)
        assert self.is_coded or {unit.codec for unit in self.layout.units} == {"fp32"}
        assert run.train.frozen == run.train.compute == "fp32" and not run.round.seconds
        owners = owners or _owners(run)
        self.peers = tuple(sorted({peer for each in owners.values() for peer in each}))
        loaders = [loader] * len(self.peers) if isinstance(loader, Loader) else loader
        self.loaders = dict(zip(self.peers, loaders, strict=True))
        self.values = {
            unit: content.whole() for unit, content in initial_contents(run, self.layout)
        }
        entries = {unit.unit: Entry(0, unit.codec) for unit in self.layout.units}
        self.tip = Tip(0, 0, 0, entries, {e: tuple(sorted(each)) for e, each in owners.items()})
        self.engines = {peer: self._engine(peer) for peer in self.peers}
        self.steps = self.tokens = self.merges = 0
        self._left: dict[str, bytes] = {}
        self._pending: list[Move] = []

    @property
    def agreed(self) -> dict[str, Tensor]:
        """The agreed model by name."""
        tensors = allocate(self.layout.units, self.layout.shapes)
        for layout in self.layout.units:
            fill(tensors, layout, self.values[layout.unit])
        return tensors

    def round(self) -> None:
        """Local steps of each peer, the agreement, and a merge if one is due."""
        if self.conditions.rotates and self.tip.round % self.run.round.experts_every == 0:
            self._rotate()
        phase = self.run.phase_at(self.tokens)
        early = min(self.conditions.delay, phase.local_steps)
        work = Counter(self._train(early))
        self._adopt()
        work.update(self._train(phase.local_steps - early))
        self._agree(work)
        if not self.conditions.delay:
            self._adopt()

    def loss(self, held_out: HeldOut) -> float:
        """Held-out loss of the agreed model, nats per token."""
        engine = ResidentEngine(self.run)
        engine.write(self.agreed)
        return held_out.mean(lambda tokens, scored: engine.evaluate(tokens, scored_BT=scored))

    # ------------------------------------------------ local steps

    def _engine(self, peer: str) -> LimitedEngine:
        engine = LimitedEngine(self.run, self.conditions)
        engine.own(self._owned(peer))
        engine.write(self.agreed)
        engine.held = self._to_hold(peer)
        self._take_away(engine, self.tip.owners.keys() - engine.held)
        return engine

    @property
    def held(self) -> dict[str, set[int]]:
        """The experts that each peer has in memory."""
        return {peer: engine.held for peer, engine in self.engines.items()}

    def _owned(self, peer: str) -> list[int]:
        return [expert for expert, owners in self.tip.owners.items() if peer in owners]

    def _to_hold(self, peer: str) -> set[int]:
        """The experts that a peer has in memory in this cycle: its own, and the next ones."""
        owned, number = self._owned(peer), len(self.tip.owners)
        room = self.conditions.held - len(owned) if self.conditions.held else number
        others = [(owned[0] + step) % number for step in range(number)]
        others = [expert for expert in others if expert not in owned]
        turn = self.tip.round // self.run.round.experts_every if self.conditions.rotates else 0
        return {*owned, *(others[(turn * room + k) % len(others)] for k in range(room) if others)}

    def _rotate(self) -> None:
        for peer, engine in self.engines.items():
            before, now = engine.held, self._to_hold(peer)
            self._take_away(engine, before - now)
            for unit in map(expert_unit, sorted(now - before)):
                layout = self.layout.by_unit[unit]
                read = _reader(self.values[unit])
                engine.write(dict(read_tensors(layout, self.layout.shapes, read)))
            engine.held = now

    def _take_away(self, engine: Engine, experts: Collection[int]) -> None:
        """Sets experts to 0, so that they add nothing to the output of their layer."""
        for unit in map(expert_unit, sorted(experts)):
            names = [part.name for part in self.layout.by_unit[unit].slices]
            engine.write({name: torch.zeros(self.layout.shapes[name]) for name in names})

    def _train(self, steps: int) -> dict[str, int]:
        """Trains each peer for some steps on the next samples. Returns the predicted tokens."""
        work = {peer: self._train_one(peer, steps) for peer in self.peers if steps}
        self.steps += steps
        return work

    def _train_one(self, peer: str, steps: int) -> int:
        phase, length = self.run.phase_at(self.tokens), self.run.data.sequence_length
        first = self.tokens // length
        samples = steps * phase.batch_tokens // length
        stats = train_local_steps(
            self.engines[peer],
            self.loaders[peer],
            self.run,
            Task(peer, self.steps, ((first, first + samples),), phase.batch_tokens),
            left=lambda done, _: steps - done,
            stop=lambda: False,
            on_step=lambda *_: None,
        )
        self.tokens += stats.tokens
        return stats.tokens

    # ------------------------------------------------ agreement

    def _agree(self, work: Mapping[str, int]) -> None:
        due = self.rules.schedule.due(self.tip)  # type: ignore[arg-type]  # reads these only
        for layout in self.layout.units:
            if layout.unit in due:
                self._moved(self._average(layout, work))
        number = self.tip.round + 1
        renewed = {unit: self.tip.entries[unit]._replace(version=number) for unit in due}
        self.tip = self.tip._replace(
            round=number, step=self.steps, entries={**self.tip.entries, **renewed}
        )
        if merge_due(self.tip, self.run.merging):  # type: ignore[arg-type]
            self._merge()

    def _sources(self, unit: str) -> tuple[str, ...]:
        expert = expert_of_unit(unit)
        return self.peers if expert is None else self.tip.owners[expert]

    def _average(self, layout: UnitLayout, work: Mapping[str, int]) -> Move:
        before, sources = self.values[layout.unit], self._sources(layout.unit)
        engines, shares = [self.engines[peer] for peer in sources], weights(work, sources)
        if layout.coding == "none":
            given = [encoded(layout, engine.read_part).whole() for engine in engines]
            reads = [_reader(each) for each in given]
            after = mean_of(reads, layout.num_bytes, layout.codec, shares).whole()
            after = given[0] if len(given) == 1 else after
        else:
            base = _reader(before)
            given = [difference(engine, layout, base).whole() for engine in engines]
            if self.rules.is_verbatim(layout.unit):
                after = apply_delta(layout, base, _delta(given[0])).whole()
            else:
                keeps = self.conditions.keeps_remainder
                left = self._left.get(layout.unit) if keeps else None
                deltas = [_delta(each) for each in given]
                made = list(reduced(layout, base, deltas, _reader(left) if left else None, shares))
                after = b"".join(run.value for run in made)
                self._left[layout.unit] = b"".join(run.left for run in made)
        return Move(layout, before, after, dict(zip(sources, given, strict=True)))

    def _merge(self) -> None:
        """Moves all experts towards their donors, from the previous agreed values."""
        run, values, layouts = self.run, dict(self.values), self.layout.by_unit

        def read(part: Slice) -> Tensor:
            expert = expert_of(part.name)
            assert expert is not None
            unit = expert_unit(expert)
            return read_part(layouts[unit], part, _reader(values[unit]))

        donors = donors_of(read, run.model, run.merging.top_k)
        alpha = alpha_at(self.tip.step, run.merging)
        merged = partial(merged_part, read=read, donors=donors, alpha=alpha)
        for expert in range(run.model.num_experts):
            layout = layouts[expert_unit(expert)]
            self._moved(Move(layout, values[layout.unit], encoded(layout, merged).whole()))
        self.tip = self.tip._replace(merged=merged_until(self.tip.step, run.merging))
        self.merges += 1

    def _moved(self, move: Move) -> None:
        self.values[move.layout.unit] = move.after
        self._pending.append(move)

    # ------------------------------------------------ adoption

    def _adopt(self) -> None:
        for move in self._pending:
            for peer, engine in self.engines.items():
                self._follow(peer, engine, move)
        self._pending = []

    def _follow(self, peer: str, engine: LimitedEngine, move: Move) -> None:
        """Like `LiveModel.adopt`, for a peer that every round counts."""
        layout, before, after = move.layout, _reader(move.before), _reader(move.after)
        expert = expert_of_unit(layout.unit)
        if expert is not None and expert not in engine.held:
            return
        if peer not in self._sources(layout.unit):
            engine.write(dict(read_tensors(layout, self.layout.shapes, after)))
        elif move.offered is None:
            rebase(engine, layout, before, after)
        elif not self.is_coded:
            for part, values in read_parts(layout, after):
                engine.write_part(part, values)
        elif layout.coding == "none":
            follow(engine, layout, _reader(move.offered[peer]), after)
        elif not self.rules.is_verbatim(layout.unit):
            follow(engine, layout, before, after, _delta(move.offered[peer]))


def _owners(run: RunConfig) -> Mapping[int, Sequence[str]]:
    peers = [f"peer-{number:02}" for number in range(run.run.peers)]
    return assign(
        {},
        dict.fromkeys(peers, 1.0),
        peers,
        stale=(),
        owners_per_expert=run.ownership.owners_per_expert,
        num_experts=run.model.num_experts,
        seed=run.run.name,
    ).owners


def _reader(blob: Buffer) -> Read:
    whole = memoryview(blob)
    return lambda offset, length: whole[offset : offset + length]


def _delta(blob: bytes) -> Delta:
    return Delta(len(blob), _reader(blob))
