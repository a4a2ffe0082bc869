"""Live values while agreed ones move by deltas: nothing is lost, nothing is counted twice."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from swarm.codecs import values_in
from swarm.config import RunConfig
from swarm.experts import Slice, expert_of_unit
from swarm.network.blobs.blob_store import BlobStore, store_content
from swarm.network.rounds.reductions import LeftOver, Reductions
from swarm.peer.machine.cpu_threads import UnitThreads
from swarm.peer.status.status import PeerStatus
from swarm.peer.text.agreed_model import Agreed
from swarm.peer.training.live_model import LiveModel
from swarm.peer.training.offering import Offering, Rounds
from swarm.protocol.messages.events import Reduce
from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.rounds import Rules
from swarm.protocol.training import SavedWork
from swarm.protocol.training.adoption import Action, Adoption, adopt
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Digest, Entry, Kind, Manifest, Unit
from swarm.protocol.values.schedule import Schedule
from swarm.train.engine.resident import ResidentEngine
from tests.peer.adopting import founded_in
from tests.train.runs import held_out, tiny_run

PEERS = ("me", "you")
EACH_ROUND = Schedule()
CODED = {"shared_coding": "b2", "experts_coding": "b1", "part_bytes": 4096}


class Swarm:
    """Two peers with one store, whose rounds are made by hand."""

    def __init__(self, run: RunConfig, owners: int = 1, threads: int = 1) -> None:
        self.run, self.layout, self.store = run, layout_of(run), BlobStore()
        rules = replace(Rules.of("run", run, self.layout), owners_per_expert=owners)
        self.rules = replace(rules, step_bound=None)
        tip = founded_in(self.store, run, PEERS)
        both = dict.fromkeys(tip.owners, PEERS) if owners == 2 else tip.owners
        self.tip = replace(tip, owners=both)
        rounds = SimpleNamespace(rules=self.rules, store_value=self._store_value)
        agreed = Agreed(self.store, self.layout)
        self.lives = {
            peer: LiveModel(peer, run, ResidentEngine(run), agreed, UnitThreads(threads))
            for peer in PEERS
        }
        self.offerings = {
            peer: Offering(live, cast(Rounds, rounds), cast(PeerStatus, None))
            for peer, live in self.lives.items()
        }
        self.carried: dict[str, frozenset[Unit]] = dict.fromkeys(PEERS, frozenset())

        def unpin(digest: Digest) -> None:
            self.store.unpin([digest])

        draft = partial(self.store.draft, on_finish=unpin)
        self.reducing = Reductions(self.store, self.layout, draft, unpin)
        self.left_over = LeftOver(self.store, self.tip, self.rules)
        for peer in PEERS:
            self._adopt(peer, self.tip, "", [])

    def _store_value(self, value: Any) -> tuple[Digest, int]:
        return store_content(self.store, value), value.num_bytes

    def _adopt(
        self, peer: str, manifest: Manifest, previous: Digest, offers: Sequence[Offer]
    ) -> Adoption:
        live = self.lives[peer]
        decision = adopt(
            peer,
            manifest,
            previous=previous,
            bases=live.bases,
            offers=offers,
            carried=self.carried[peer],
        )
        live.adopt(manifest, decision, self.tip)
        self.carried[peer] = decision.carried
        if not decision.keeps_all:
            self.offerings[peer].changed()
        return decision

    def train(self, peer: str, moves: Mapping[Unit, Tensor]) -> None:
        """Adds a change to each unit that a peer trains."""
        for unit, part, values in self.parts(peer):
            start, stop = values
            engine = self.lives[peer].engine
            engine.write_part(part, engine.read_part(part) + moves[unit][start:stop])
        self.offerings[peer].changed()

    def parts(self, peer: str) -> Iterator[tuple[Unit, Slice, tuple[int, int]]]:
        """The slices of a peer's units, and their places in the units."""
        for unit in EACH_ROUND.due_of(peer, self.tip):
            start = 0
            for piece in self.layout.by_unit[unit].slices:
                stop = start + piece.stop - piece.start
                yield unit, piece, (start, stop)
                start = stop

    def live(self, peer: str, unit: Unit) -> Tensor:
        """The live value of a unit, flat."""
        engine = self.lives[peer].engine
        pieces = self.layout.by_unit[unit].slices
        return torch.cat([engine.read_part(piece).clone() for piece in pieces])

    def agreed(self, unit: Unit) -> Tensor:
        blob = self.store.get(self.tip.entries[unit].digest)
        return values_in(blob or b"", self.layout.by_unit[unit].codec).float()

    def left(self, unit: Unit) -> Tensor:
        """The remainders of means, while they are due."""
        base = self.tip.entries[unit].digest
        digest = self.left_over.of(Reduce("", unit, (), None, base))
        if digest is None:
            return torch.zeros(self.layout.by_unit[unit].num_elements)
        return values_in(self.store.get(digest) or b"", "fp32")

    def round(
        self, counted: Sequence[str] = PEERS, without: Sequence[Unit] = ()
    ) -> dict[str, Adoption]:
        """All offer, some are counted, all adopt. Unreferenced blobs are collected."""
        offers: dict[str, Offer] = {}
        for peer, live in self.lives.items():
            bases = {}
            for unit in EACH_ROUND.due_of(peer, self.tip):
                expert = expert_of_unit(unit)
                bases[unit] = (
                    self.tip.entries[unit].digest if expert is None else live.bases[expert]
                )
            units = self.offerings[peer].offered_all(self.tip, bases, 64)
            assert self.offerings[peer].offered_all(self.tip, bases, 64) == units
            offers[peer] = Offer(self.tip.digest, 1, 64, units)
        entries, sources = dict(self.tip.entries), {}
        for unit, entry in self.tip.entries.items():
            offered = {p: o.units[unit] for p, o in offers.items() if unit in o.units}
            values = tuple((p, each.digest) for p, each in offered.items() if p in counted)
            if values and unit not in without:
                entries[unit] = self._moved(unit, entry, values, offered)
                sources[unit] = values
        number = self.tip.round + 1
        work = dict.fromkeys(counted, 64)
        after = replace(
            self.tip,
            height=number,
            round=number,
            kind=Kind.QUORUM,
            parent=self.tip.digest,
            entries=entries,
            sources=sources,
            work=work,
        )
        self.left_over.applied(after)
        self.store.collect({entry.digest for entry in after.entries.values()})
        decisions = {p: self._adopt(p, after, self.tip.digest, [offers[p]]) for p in PEERS}
        for live in self.lives.values():
            live.drop_offered()
        self.tip = after
        return decisions

    def _moved(
        self,
        unit: Unit,
        entry: Entry,
        values: tuple[tuple[str, Digest], ...],
        offered: Mapping[str, OfferedUnit],
    ) -> Entry:
        coding = self.layout.by_unit[unit].coding
        changes: dict[str, Any] = {"version": self.tip.round + 1, "coding": coding}
        if coding != "none":
            changes["base"] = entry.digest
        if unit in self.rules.averaged_deltas or len(values) > 1:
            base = entry.digest if unit in self.rules.averaged_deltas else None
            effect = Reduce("", unit, values, None, base)
            mean = self.reducing.mean(effect, self.left_over.of(effect))
            assert mean
            self.left_over.found(self.tip, unit, mean)
            made, delta = mean.result.digest, mean.result.delta
        else:
            made, delta = values[0][1], offered[values[0][0]].delta
        return replace(entry, digest=made, delta=delta, **changes)


def moves(swarm: Swarm, seed: int, scale: float = 1e-3) -> dict[Unit, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        each.unit: torch.randn(each.num_elements, generator=generator) * scale
        for each in swarm.layout.units
    }


@pytest.mark.parametrize("experts", ["fp32", "bf16"])
def test_all_that_was_trained_is_agreed_or_still_to_be_sent(experts: str) -> None:
    swarm = Swarm(tiny_run(wire={**CODED, "experts": experts}))
    units = [each.unit for each in swarm.layout.units]
    trained = {(p, u): swarm.live(p, u) for p in PEERS for u in EACH_ROUND.due_of(p, swarm.tip)}
    sums = {unit: swarm.agreed(unit) for unit in units if expert_of_unit(unit) is None}
    for number in range(6):
        for index, peer in enumerate(PEERS):
            steps = moves(swarm, 2 * number + index)
            swarm.train(peer, steps)
            for unit in units:
                if (peer, unit) in trained:
                    trained[peer, unit] += steps[unit]
                if unit in sums:
                    sums[unit] += steps[unit] / 2
        assert {each.shared for each in swarm.round().values()} == {Action.CORRECTED}
    for unit, total in sums.items():
        lives = [swarm.live(peer, unit) for peer in PEERS]
        assert torch.allclose((lives[0] + lives[1]) / 2 + swarm.left(unit), total, atol=2e-6)
        if swarm.layout.by_unit[unit].coding == "none":
            assert torch.equal(lives[0], swarm.agreed(unit))
    for (peer, unit), value in trained.items():
        if expert_of_unit(unit) is not None:  # a single writer's master is never touched
            assert torch.equal(swarm.live(peer, unit), value)
        left = swarm.live(peer, unit) - swarm.agreed(unit)
        rounded_off = 2**-8 * value.abs().max() if experts == "bf16" else 0.0
        assert left.abs().max() < 12e-3 + rounded_off, "unsent values do not grow"


def test_several_threads_come_to_the_bits_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.peer.machine.cpu_threads.WORTH_ELEMENTS", 0)
    run = tiny_run(wire=CODED)
    swarms = [Swarm(run, threads=threads) for threads in (1, 4)]
    text = held_out(run)
    losses = []
    for swarm in swarms:
        for number in range(3):
            for index, peer in enumerate(PEERS):
                swarm.train(peer, moves(swarm, 2 * number + index))
            swarm.round()
        losses.append(swarm.lives["me"].evaluate(swarm.tip, text))
    one, several = swarms
    assert one.tip.entries == several.tip.entries
    assert losses[0] == losses[1]
    for peer in PEERS:
        for each in one.layout.units:
            assert torch.equal(one.live(peer, each.unit), several.live(peer, each.unit))


def test_the_held_out_loss_is_of_the_agreed_values_and_leaves_the_live_ones_alone() -> None:
    swarm = Swarm(tiny_run(wire=CODED))
    for index, peer in enumerate(PEERS):
        swarm.train(peer, moves(swarm, index, scale=0.05))
    swarm.round()
    shared = [each.unit for each in swarm.layout.units if expert_of_unit(each.unit) is None]
    before = {(peer, unit): swarm.live(peer, unit) for peer in PEERS for unit in shared}
    text = held_out(swarm.run)
    losses = [swarm.lives[peer].evaluate(swarm.tip, text) for peer in PEERS]
    assert losses[0] == losses[1]
    assert all(torch.equal(swarm.live(peer, unit), kept) for (peer, unit), kept in before.items())
    assert any(not torch.equal(kept, swarm.agreed(unit)) for (_, unit), kept in before.items())


def test_a_peer_that_is_left_out_keeps_its_steps_for_the_next_round() -> None:
    swarm = Swarm(tiny_run(wire=CODED))
    unit = next(u.unit for u in swarm.layout.units if u.coding == "b2")
    for number, peer in enumerate(PEERS):
        swarm.train(peer, moves(swarm, number))
    ahead = swarm.live("you", unit) - swarm.agreed(unit)
    decisions = swarm.round(counted=["me"])
    assert decisions["me"].shared is Action.CORRECTED
    assert decisions["you"].shared is Action.CARRIED
    assert torch.allclose(swarm.live("you", unit) - swarm.agreed(unit), ahead, atol=1e-6)
    exact = next(
        u.unit for u in swarm.layout.units if u.coding == "none" and expert_of_unit(u.unit) is None
    )
    assert not torch.equal(swarm.live("you", exact), swarm.agreed(exact))
    assert torch.equal(swarm.live("me", exact), swarm.agreed(exact))
    decisions = swarm.round(counted=["me"])
    assert decisions["you"].shared is Action.RESTART, "not twice in a row"
    assert torch.equal(swarm.live("you", unit), swarm.agreed(unit))


def test_a_part_that_a_round_does_not_move_is_left_as_it_is() -> None:
    swarm = Swarm(tiny_run(wire=CODED))
    unit = next(u.unit for u in swarm.layout.units if u.coding == "b2")
    for number in range(2):
        for peer in PEERS:
            swarm.train(peer, moves(swarm, number))
        before = swarm.live("me", unit)
        decisions = swarm.round(without=[unit] if number else [])
    assert decisions["me"].shared is Action.CORRECTED
    assert torch.equal(swarm.live("me", unit), before)


def test_two_owners_of_an_expert_close_the_loop_as_shared_tensors_do() -> None:
    swarm = Swarm(tiny_run(wire={**CODED, "experts": "bf16", "experts_coding": "b2"}), owners=2)
    unit = "expert.1"
    total = swarm.agreed(unit)
    for number in range(6):
        for index, peer in enumerate(PEERS):
            # Far below bf16's resolution at these values.
            steps = moves(swarm, 2 * number + index, scale=1e-5)
            swarm.train(peer, steps)
            total += steps[unit] / 2
        assert swarm.round()["me"].experts[1].action is Action.CORRECTED
    lives = [swarm.live(peer, unit) for peer in PEERS]
    assert torch.allclose((lives[0] + lives[1]) / 2 + swarm.left(unit), total, atol=1e-7)


def test_what_a_delta_counts_from_is_not_collected_before_it_was_adopted() -> None:
    swarm = Swarm(tiny_run(wire=CODED))
    values = {entry.digest for entry in swarm.tip.entries.values()}
    swarm.store.collect(set())
    assert values - set(swarm.store.digests()) == set()
    for number in range(3):
        for peer in PEERS:
            swarm.train(peer, moves(swarm, number))
        swarm.round()
    assert not values & set(swarm.store.digests()), "and not kept forever"


def test_all_that_an_adoption_takes_is_kept_before_the_engine_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swarm = Swarm(tiny_run(wire={**CODED, "experts": "bf16", "experts_coding": "b2"}), owners=2)
    for index, peer in enumerate(PEERS):
        swarm.train(peer, moves(swarm, index))
    engine, calls = swarm.lives[PEERS[-1]].engine, list[str]()  # the last one that adopts
    for where, name in ((swarm.store, "pin"), (engine, "own"), (engine, "write_part")):
        call = getattr(where, name)

        def spied(*given: Any, name: str = name, call: Any = call) -> Any:
            calls.append(name)
            return call(*given)

        monkeypatch.setattr(where, name, spied)
    assert swarm.round()[PEERS[-1]].shared is Action.CORRECTED
    assert "write_part" in calls and "pin" not in calls[calls.index("own") :]


def test_without_the_blobs_that_it_takes_a_live_value_becomes_the_agreed_one() -> None:
    swarm = Swarm(tiny_run(wire=CODED))
    swarm.train("me", moves(swarm, 1))
    for live in swarm.lives.values():
        live.keep_offered = lambda digests: None  # type: ignore[method-assign]
    swarm.round()
    for unit in EACH_ROUND.due_of("me", swarm.tip):
        if expert_of_unit(unit) is None:
            assert torch.equal(swarm.live("me", unit), swarm.agreed(unit))


def test_what_a_collection_drops_while_it_is_offered_is_made_again() -> None:
    """Rounds continue meanwhile, as for a peer that has just returned."""
    swarm = Swarm(tiny_run(wire=CODED))
    swarm.train("me", moves(swarm, 1))
    offering, tip = swarm.offerings["me"], swarm.tip
    bases = {unit: tip.entries[unit].digest for unit in EACH_ROUND.due_of("me", tip)}
    kept, seen = set(bases.values()), set[Digest]()

    def collected_once(value: Any) -> tuple[Digest, int]:
        digest, num_bytes = swarm._store_value(value)
        if digest not in seen:
            seen.add(digest)
            swarm.store.collect(kept)
        return digest, num_bytes

    cast(Any, offering.rounds).store_value = collected_once
    units = offering.offered_all(tip, bases, 64)
    swarm.store.collect(kept)
    offered = {d for each in units.values() for d in (each.digest, each.delta) if d}
    assert [digest for digest in offered if not swarm.store.has(digest)] == []
    swarm.lives["me"].drop_offered()
    swarm.store.collect(kept)
    assert offered.isdisjoint(swarm.store.digests())


def test_after_a_restart_the_named_blobs_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = Swarm(tiny_run(wire=CODED))
    swarm.train("me", moves(swarm, 1))
    live, tip = swarm.lives["me"], swarm.tip
    coded = [u for u in EACH_ROUND.due_of("me", tip) if swarm.layout.by_unit[u].coding != "none"]
    bases = {unit: tip.entries[unit].digest for unit in coded}
    first = {u: swarm.offerings["me"].offered(tip, u, bases[u], 64) for u in coded}
    saved = SavedWork(
        run_id="run",
        base_tip=tip.digest,
        round=1,
        steps=1,
        tokens=64,
        seconds=1.0,
        data_position=0,
        expert_bases=live.bases,
        offered={unit: each.digest for unit, each in first.items()},
        deltas={unit: each.delta for unit, each in first.items() if each.delta},
    )
    monkeypatch.setattr(LiveModel, "difference", None)  # no delta may be made again
    again = Offering(live, swarm.offerings["me"].rounds, cast(PeerStatus, None))
    again.resume(tip, saved)
    swarm.store.collect({entry.digest for entry in tip.entries.values()})
    assert {u: again.offered(tip, u, bases[u], 64) for u in coded} == first


def test_a_run_without_codings_pins_nothing() -> None:
    swarm = Swarm(tiny_run())
    swarm.train("me", moves(swarm, 1))
    swarm.store.collect(set())
    assert len(swarm.store) == 0
