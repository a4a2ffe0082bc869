"""A swarm whose rounds exchange slices of the units: even in bytes, equal to plain arithmetic."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.data.corpus import standard_library_corpus
from swarm.data.loader import Loader
from swarm.data.shards import Shards, open_shards
from swarm.data.tokenizer import BYTE
from swarm.emulation.local_swarm import LocalSwarm, applied, summary
from swarm.experts import Slice, expert_shapes, shared_shapes
from swarm.model.cost import bytes_sent_per_peer_per_round
from swarm.model.initial_weights import initial_tensors
from swarm.protocol.values.layout import layout_of
from swarm.train.engine.resident import ResidentEngine
from tests.model.plain_merge import merge_experts
from tests.scenarios.spes_reference import mean, merge_is_due, train_locally
from tests.scenarios.swarms import (
    agreed_state,
    finish,
    kill_and_restart,
    peer_id,
    read_record,
    read_run,
    rounds,
    started_swarm,
)

pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]

NUM_PEERS = PERIOD = 4
ROUNDS = 10
KILLED_AFTER = 6
SETTINGS = [
    f"run.rounds={ROUNDS}",
    f"run.peers={NUM_PEERS}",
    "model.num_experts=16",
    "round.local_steps=2",
    f"round.experts_every={PERIOD}",
    f"round.shared_every={PERIOD}",
    "round.stagger=true",
    "merging.interval_steps=10",  # after round 5, in the middle of a cycle
    "round.roster_after_s=300.0",  # rounds wait for all peers that start one after another
    "round.reform_after_s=600.0",
]


def test_rounds_of_slices_are_flat_and_equal_plain_arithmetic_through_kills(tmp_path: Path) -> None:
    with started_swarm(
        tmp_path, NUM_PEERS, SETTINGS, after_rounds=KILLED_AFTER, within_s=300
    ) as swarm:
        run = read_run(swarm.run_file)
        sent = [_bytes_sent(swarm, number) for number in range(2, KILLED_AFTER + 1)]
        kill_and_restart(swarm)
        finish(swarm, 300)
        verdict = summary(swarm)
        ordered = sorted(peer_id(peer) for peer in swarm.peers)
        states = [agreed_state(peer, run) for peer in swarm.peers]
        tip = read_record(swarm.peers[0]).tip
        merges = applied(swarm.peers[0].events(), "merge")
    assert set(verdict["digests_per_height"]) == {1}
    assert verdict["tokens_lost"] == 0
    assert len(merges) == 2
    assert {entry.version for entry in tip.entries.values()} == {ROUNDS}  # the last one is whole
    # Every byte of every round, except pieces that a peer requested twice.
    formula = NUM_PEERS * bytes_sent_per_peer_per_round(run, NUM_PEERS)
    assert all(abs(each - formula) < 0.03 * formula for each in sent), (formula, sent)
    owners = {expert: ordered.index(peers[0]) for expert, peers in tip.owners.items()}
    shards = open_shards(standard_library_corpus(), tmp_path / "data", BYTE)
    expected = _train_in_slices(run, shards, ordered, owners)
    for state in states:
        assert [name for name in expected if not torch.equal(state[name], expected[name])] == []


def _bytes_sent(swarm: LocalSwarm, number: int) -> int:
    """Blob bytes that all peers together sent in a round."""
    events = [e for peer in swarm.peers for e in rounds(peer) if e["round"] == number]
    assert len(events) == NUM_PEERS
    return sum(event["blob_bytes_sent"] for event in events)


# ---------------------------------------------------------------- plain arithmetic


def _slices(run: RunConfig, number: int) -> list[Slice]:
    """Runs of elements of the shared tensors that round `number` averages."""
    parts = [unit for unit in layout_of(run).units if unit.unit.startswith("shared")]
    assert {unit.codec for unit in parts} == {"fp32"} and len(parts) % PERIOD == 0
    size, slot = len(parts) // PERIOD, number % PERIOD
    due = parts if number == ROUNDS else parts[slot * size : (slot + 1) * size]
    return [piece for unit in due for piece in unit.slices]


def _experts(owners: Mapping[int, int], number: int) -> list[int]:
    """Experts that a round exchanges: each owner's k-th, by k plus the owner's place."""
    if number == ROUNDS:
        return sorted(owners)
    due = []
    for owner in range(NUM_PEERS):
        own = sorted(expert for expert, peer in owners.items() if peer == owner)
        due += [e for k, e in enumerate(own) if (k + owner) % PERIOD == number % PERIOD]
    return due


def _train_in_slices(
    run: RunConfig, shards: Shards, peers: Sequence[str], owners: Mapping[int, int]
) -> dict[str, Tensor]:
    """As `train_by_reference`, but a round averages and copies only its slice."""
    model = run.model
    names = {expert: list(expert_shapes(model, expert)) for expert in owners}
    of_experts = [name for own in names.values() for name in own]
    agreed = initial_tensors(run, [*shared_shapes(model), *of_experts])
    engines = [ResidentEngine(run) for _ in peers]
    for peer, engine in enumerate(engines):
        engine.write(agreed)
        engine.own([expert for expert in sorted(owners) if owners[expert] == peer])
    step = tokens = merged = 0
    with Loader(shards, run) as loader:
        for number in range(1, ROUNDS + 1):
            phase = run.phase_at(tokens)
            for peer, engine in zip(peers, engines, strict=True):
                tokens += train_locally(engine, loader, run, peer, step, phase, read=tokens)
            step += phase.local_steps
            for piece in _slices(run, number):
                value = mean([{"": engine.read_part(piece)} for engine in engines])[""]
                agreed[piece.name].view(-1)[piece.start : piece.stop] = value
                for engine in engines:
                    engine.write_part(piece, value)
            for expert in _experts(owners, number):
                agreed |= engines[owners[expert]].read(names[expert])
            before = {name: agreed[name].clone() for name in of_experts}
            if merge_is_due(step, merged, run.merging):
                merged = step // run.merging.interval_steps
                alpha = run.merging.alpha * (1 - min(step / run.merging.decay_steps, 1))
                agreed |= merge_experts(agreed, model, alpha=alpha, top_k=run.merging.top_k).named
            for peer, engine in enumerate(engines):
                for expert, owner in owners.items():
                    for name in names[expert]:
                        value = agreed[name]
                        if owner == peer:  # progress that it has not offered yet stays
                            ahead = engine.read([name])[name] - before[name]
                            value = torch.where(ahead == 0, value, value + ahead)
                            if torch.equal(agreed[name], before[name]):
                                continue
                        engine.write({name: value})
    return agreed
