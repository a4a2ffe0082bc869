"""Finite garbage enters no manifest.

A peer that made it by mistake learns so, and continues.
"""

import asyncio
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from swarm import codecs
from swarm.emulation.local_swarm import applied, summary
from swarm.errors import BadBlob
from swarm.network.blobs.blob_store import BlobStore, store_content
from swarm.network.rounds.transfers import Transfers
from swarm.network.runs.run_founding import founding_manifest
from swarm.peer.status.status import PeerStatus
from swarm.peer.text.agreed_model import Agreed, initial_contents
from swarm.peer.training.live_model import LiveModel
from swarm.peer.training.offering import Offering, Rounds
from swarm.protocol.messages.events import (
    BlobWanted,
    Effect,
    Event,
    Fetch,
    Purpose,
    Reduce,
    Stored,
    Topic,
    Unobtainable,
)
from swarm.protocol.messages.messages import Offer
from swarm.protocol.rounds import Rules
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Founding, Manifest
from swarm.protocol.values.updates import IMPLAUSIBLE, StepBound, UpdateBound
from swarm.train.engine.resident import ResidentEngine
from tests.network.conftest import Peers
from tests.peer.adopting import adopt_into, offered_values
from tests.protocol.round_pump import Node, Pump, make_rules, name, start_swarm
from tests.scenarios.swarms import ROUND_S, finish, peer_id, started_swarm
from tests.train.runs import tiny_run

# ---------------------------------------------------------------- the values

RUN = tiny_run()
LAYOUT = layout_of(RUN)
SHARED = next(unit for unit in LAYOUT.units if unit.unit.startswith("shared"))
COUNT = SHARED.num_elements
BASE = torch.randn(COUNT, generator=torch.Generator().manual_seed(0))


def content(values: torch.Tensor) -> codecs.Content:
    return codecs.encoded(SHARED, lambda part: values[_place(part) : _place(part) + _size(part)])


def _size(part: codecs.Slice) -> int:
    return part.stop - part.start


def _place(part: codecs.Slice) -> int:
    offset = 0
    for piece in SHARED.slices:
        if piece.name == part.name and piece.start <= part.start < piece.stop:
            return offset + part.start - piece.start
        offset += _size(piece)
    raise KeyError(part)


def read(blob: bytes, offset: int, length: int) -> bytes:
    return blob[offset : offset + length]


def test_one_element_beyond_the_bound_is_refused_wherever_it_is() -> None:
    blob = content(BASE).whole()
    base = partial(read, blob)
    check = partial(codecs.check_update, SHARED, base=base, absolute=0.01, relative=0.001)
    check(content=content(BASE))
    check(content=content(BASE + 0.0099))
    for place in (0, COUNT // 2, COUNT - 1):
        for wrong in (1e18, -1e18, 12.0, float("nan")):
            values = BASE.clone()
            values[place] = wrong
            with pytest.raises(BadBlob, match="cannot have moved") as refusal:
                check(content=content(values))
            assert refusal.value.reason == IMPLAUSIBLE
    assert blob == content(BASE).whole(), "the agreed value is only read"


# ---------------------------------------------------------------- the decisions

GARBAGE = "garbage"


class Judging(Pump):
    """A pump with sound and garbage values, in which values with a bound are checked."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self.garbage: set[str] = set()

    def offer_of(self, peer: str, tip: Manifest) -> Offer:
        offer = super().offer_of(peer, tip)
        if peer != "D" or tip.round < 2:
            return offer
        units = {
            unit: replace(value, digest=name(GARBAGE, tip.digest, unit))
            for unit, value in offer.units.items()
        }
        self.garbage.update(value.digest for value in units.values())
        return replace(offer, units=units)

    def _carry_out_one(self, peer: str, node: Node, effect: Effect) -> None:
        if isinstance(effect, Reduce) and {digest for _, digest in effect.inputs} & self.garbage:
            self.garbage.add(name("mean", *effect.inputs))
        super()._carry_out_one(peer, node, effect)

    def _fetch(self, peer: str, purpose: Purpose, number: int, want: BlobWanted, turn: int) -> None:
        if want.bound is None or want.digest not in self.garbage:
            super()._fetch(peer, purpose, number, want, turn)
            return
        for source in want.sources:
            self._later(peer, 0.1, Unobtainable(want.digest, source, IMPLAUSIBLE))


def pump_with_a_liar() -> Judging:
    """Four peers, in their third round, from which on D offers garbage."""
    rules = replace(make_rules(experts=8), step_bound=StepBound(0.001, 0.0))
    pump = start_swarm("ABCD", rules, kind=Judging)
    pump.run_rounds(2)
    return cast(Judging, pump)


def test_garbage_is_left_out_of_every_round_at_once() -> None:
    pump = pump_with_a_liar()
    assert pump.run_rounds(8, within_s=400.0) / 6 < 15.0, "even where the liar convenes"
    assert pump.garbage
    for manifest in pump.nodes["A"].applied:
        assert not pump.garbage & {entry.digest for entry in manifest.entries.values()}
        assert ("D" in manifest.contributors) == (manifest.round <= 2)
    said = pump.said(Topic.ROUND)
    assert f"refuses its values: {IMPLAUSIBLE}" in said
    waits = [float(wait) for wait in re.findall(r"peer D left out after ([\d.]+) s", said)]
    assert waits and max(waits) < pump.timers.poll_s / 2, "the refusal itself closes the roster"


# ---------------------------------------------------------------- real nodes


def test_a_fetched_update_is_judged_and_so_is_one_that_was_smuggled_in(peers: Peers) -> None:
    far, near = BlobStore(), BlobStore()
    server = peers.serving(far)
    base = store_content(near, content(BASE))
    good = store_content(far, content(BASE + 0.001))
    bad = store_content(far, content(BASE + 1e18))
    smuggled = store_content(near, content(BASE - 1e18))
    node = peers.node()
    events: list[Event] = []
    transfers = Transfers(node, near, LAYOUT, events.append)
    bound = UpdateBound(base, 0.01, 0.001)
    wants = tuple(
        BlobWanted(SHARED.unit, digest, SHARED.num_bytes, (server.peer_id,), bound)
        for digest in (good, bad, smuggled)
    )

    async def fetch() -> None:
        await transfers.start(Fetch(Purpose.REDUCE, wants))
        while len({event.digest for event in events}) < 3:  # type: ignore[union-attr]
            await asyncio.sleep(0.02)
        await transfers.stop()

    asyncio.run_coroutine_threadsafe(fetch(), node.loop).result(60.0)
    assert [event.digest for event in events if isinstance(event, Stored)] == [good]
    refused = {e.digest: e.reason for e in events if isinstance(e, Unobtainable)}
    assert refused == dict.fromkeys((bad, smuggled), IMPLAUSIBLE)
    assert not near.has(bad)


# ---------------------------------------------------------------- the sender


def test_who_made_garbage_is_told_and_goes_on_from_the_agreed_value() -> None:
    store = BlobStore()
    initial = {
        unit: (store_content(store, value), value.num_bytes)
        for unit, value in initial_contents(RUN, LAYOUT)
    }
    founding = Founding("me", "n", "c" * 64, 1, "d" * 64, 4)
    tip = founding_manifest(founding, RUN, LAYOUT, initial, {"me": 1.0})
    live = LiveModel("me", RUN, ResidentEngine(RUN), Agreed(store, LAYOUT))
    adopt_into(live, tip, previous="")
    told: list[str] = []
    status = SimpleNamespace(refused=lambda unit, reason: told.append(unit))
    rules = Rules.of("run", RUN, LAYOUT)
    rounds = SimpleNamespace(
        rules=rules,
        store_value=lambda value: (store_content(store, value), value.num_bytes),
    )
    offering = Offering(live, cast(Rounds, rounds), cast(PeerStatus, status))
    spoilt = {SHARED.unit, "expert.0"}
    for unit in spoilt:
        part = LAYOUT.by_unit[unit].slices[0]
        live.engine.write_part(part, torch.full((_size(part),), 1e18))
    tokens = RUN.train.batch_tokens
    stored = {
        unit: offering.store(tip, unit, value, tokens)[0]
        for unit, value, _ in offered_values(live, tip)
    }
    assert set(told) == spoilt
    assert stored == {unit: tip.entries[unit].digest for unit in stored}


# ---------------------------------------------------------------- a live swarm

ROUNDS = 5


@pytest.mark.scenario
@pytest.mark.exhaustive
def test_a_live_swarm_goes_on_without_the_peer_that_offers_garbage(tmp_path: Path) -> None:
    with started_swarm(
        tmp_path, 3, [f"run.rounds={ROUNDS}"], founder_options=["--wait-for-peers", "4"]
    ) as swarm:
        swarm.program = "tests.hostile.garbage_peer"
        liar = swarm.add(swarm.peers[0].join_options())
        finish(swarm, ROUNDS * ROUND_S)
        honest = swarm.peers[:3]
        histories = [peer.events() for peer in honest]
        liar_id, verdict = peer_id(liar), summary(swarm)
    assert verdict["digests_per_height"] == [1] * len(verdict["digests_per_height"])
    refused: Counter[str] = Counter()
    for events in histories:
        rounds = applied(events, "quorum")
        assert [event["round"] for event in rounds] == list(range(1, ROUNDS + 1))
        counted = [liar_id in event["contributors"] for event in rounds]
        assert counted == [True] + [False] * (ROUNDS - 1)
        assert all(len(event["contributors"]) >= 3 for event in rounds)
        losses = [event["val_loss"] for event in events if event["event"] == "validation"]
        assert all(loss < 7.0 for loss in losses)
        ended = next(event for event in reversed(events) if event["event"] == "ended")
        refused.update(ended["refused"])
    assert refused[IMPLAUSIBLE] > 0
