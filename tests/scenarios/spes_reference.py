"""SPES in one process, in the plain arithmetic of its paper: the bit-exact reference of swarms.

It has no rounds, manifests, blobs or codecs. N engines in a list take local steps, and between
these come a mean, a copy and, when due, a merge. Source: SPES, arXiv 2602.11543, eq. 4-6.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from swarm.config import MergingConfig, PhaseConfig, RunConfig
from swarm.data.corpus import standard_library_corpus
from swarm.data.loader import Loader
from swarm.data.shards import Shards, open_shards
from swarm.data.tokenizer import BYTE
from swarm.emulation.local_swarm import LocalSwarm
from swarm.experts import expert_shapes, shared_shapes
from swarm.model.initial_weights import initial_tensors
from swarm.train.engine.local_steps import Task, train_local_steps
from swarm.train.engine.resident import ResidentEngine
from tests.model.plain_merge import merge_experts
from tests.scenarios.swarms import agreed_state, peer_id, read_record, read_run


def train_by_reference(
    run: RunConfig,
    shards: Shards,
    peers: Sequence[str],
    owners: Mapping[int, Sequence[int]],
    rounds: int,
) -> dict[str, Tensor]:
    """Trains N peers that are never excluded, with experts that never change owners.

    Args:
        run: must be exact: fp32 on the wire, in frozen experts and in compute.
        shards: the common text. Each peer reads the samples for its steps, in the order of `peers`,
            round after round.
        peers: their ids, ascending.
        owners: expert -> indexes into `peers` of its owners.
        rounds: training rounds.

    Returns:
        Every tensor by Hugging Face name after the last round and its merge, at all peers.
    """
    assert {run.wire.shared, run.wire.experts, run.train.frozen, run.train.compute} == {"fp32"}
    assert run.round.experts_every == 1 and not run.round.stagger
    model = run.model
    shared = list(shared_shapes(model))
    experts = {expert: list(expert_shapes(model, expert)) for expert in range(model.num_experts)}
    agreed = initial_tensors(
        run, [*shared, *(name for names in experts.values() for name in names)]
    )
    engines = [ResidentEngine(run) for _ in peers]
    loader = Loader(shards, run)
    for peer, engine in enumerate(engines):
        engine.write(agreed)
        engine.own([expert for expert in sorted(experts) if peer in owners[expert]])
    step = tokens = merged = 0
    for _ in range(rounds):
        phase = run.phase_at(tokens)
        for peer, engine in zip(peers, engines, strict=True):
            tokens += train_locally(engine, loader, run, peer, step, phase, read=tokens)
        step += phase.local_steps
        agreed = mean([engine.read(shared) for engine in engines])
        for expert, names in experts.items():
            agreed |= mean([engines[peer].read(names) for peer in sorted(owners[expert])])
        if merge_is_due(step, merged, run.merging):
            merged = step // run.merging.interval_steps
            alpha = run.merging.alpha * (1 - min(step / run.merging.decay_steps, 1))
            agreed |= merge_experts(agreed, model, alpha=alpha, top_k=run.merging.top_k).named
        for engine in engines:
            engine.write(agreed)
    loader.close()
    return agreed


def train_locally(
    engine: ResidentEngine,
    loader: Loader,
    run: RunConfig,
    peer: str,
    step: int,
    phase: PhaseConfig,
    *,
    read: int,
) -> int:
    """One peer's local steps of a round, after a number of tokens of all peers."""
    first = read // run.data.sequence_length
    num_samples = phase.local_steps * phase.batch_tokens // run.data.sequence_length
    stats = train_local_steps(
        engine,
        loader,
        run,
        Task(peer, step, ((first, first + num_samples),), phase.batch_tokens),
        left=lambda steps, _: phase.local_steps - steps,
        stop=lambda: False,
        on_step=lambda *_: None,
    )
    return stats.tokens


def merge_is_due(step: int, merged: int, merging: MergingConfig) -> bool:
    """Whether the number of completed intervals has risen while alpha is still positive."""
    return (
        merging.alpha > 0 and step < merging.decay_steps and step // merging.interval_steps > merged
    )


def mean(values: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The fp32 mean of each tensor: added up in the given order, then divided."""
    means = {}
    for name in values[0]:
        total = values[0][name].to(torch.float32)
        for value in values[1:]:
            total = total + value[name]
        means[name] = total / len(values) if len(values) > 1 else total
    return means


def assert_equals_the_reference(swarm: LocalSwarm, cache: Path) -> None:
    """Checks that all peers of a swarm have the bits of one process that trains the same peers."""
    run = read_run(swarm.run_file)
    ordered = sorted(peer_id(peer) for peer in swarm.peers)
    owners = read_record(swarm.peers[0]).tip.owners
    expected = train_by_reference(
        run,
        open_shards(standard_library_corpus(), cache, BYTE),
        ordered,
        {expert: [ordered.index(peer) for peer in peers] for expert, peers in owners.items()},
        rounds=run.run.rounds,
    )
    for peer in swarm.peers:
        state = agreed_state(peer, run)
        assert state.keys() == expected.keys()
        assert not [name for name in expected if not torch.equal(state[name], expected[name])]
