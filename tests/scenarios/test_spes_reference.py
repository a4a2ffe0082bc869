"""Checks the reference in cases where plain training must give the same."""

import numpy as np
import torch

from swarm.data.loader import Loader, samples_at
from swarm.experts import expert_shapes, shared_shapes
from swarm.train.engine.local_steps import Task, train_local_steps
from tests.model.plain_merge import merge_experts
from tests.scenarios.spes_reference import mean, merge_is_due, train_by_reference
from tests.train.runs import NUM_EXPERTS, all_names, new_engine, patterned_shards, same, tiny_run

SHARDS = patterned_shards()
EVERYTHING = range(NUM_EXPERTS)


ROUND = 3 * 4
"""Samples that a peer reads in a round: steps times sequences."""


def trained_alone(run, *, first, owned, steps):
    engine = new_engine(run, owned)
    with Loader(SHARDS, run) as loader:
        train_local_steps(
            engine,
            loader,
            run,
            Task("A", 0, ((first, first + 4 * steps),), run.train.batch_tokens),
            left=lambda done, _: steps - done,
            stop=lambda: False,
            on_step=lambda *_: None,
        )
    return engine.read(all_names(run))


def reference(run, peers, owners, rounds):
    return train_by_reference(run, SHARDS, peers, owners, rounds)


def test_one_peer_is_ordinary_training():
    run = tiny_run()
    alone = trained_alone(run, first=0, owned=EVERYTHING, steps=6)
    assert same(reference(run, "A", dict.fromkeys(EVERYTHING, (0,)), 2), alone)


def test_a_round_is_the_mean_of_shared_tensors_and_each_owners_experts():
    run = tiny_run()
    owners = {0: [0], 1: [0], 2: [1], 3: [1]}
    found = reference(run, "AB", owners, 1)
    first = trained_alone(run, first=0, owned=[0, 1], steps=3)
    second = trained_alone(run, first=ROUND, owned=[2, 3], steps=3)
    for name in shared_shapes(run.model):
        assert torch.equal(found[name], (first[name] + second[name]) / 2)
        assert not torch.equal(first[name], second[name])
    for expert, (owner,) in owners.items():
        for name in expert_shapes(run.model, expert):
            assert torch.equal(found[name], (first, second)[owner][name])


def test_an_expert_with_two_owners_is_their_mean():
    run = tiny_run()
    found = reference(run, "AB", dict.fromkeys(EVERYTHING, (1, 0)), 1)
    first, second = (
        trained_alone(run, first=first, owned=EVERYTHING, steps=3) for first in (0, ROUND)
    )
    assert same(found, {name: (first[name] + second[name]) / 2 for name in all_names(run)})


def test_no_sample_is_read_twice(monkeypatch):
    """Two rounds of three peers that read 3 steps of 4 sequences each."""
    read, real_read = [], Loader.read

    def spy(self, dealt, local_step, batch_tokens):
        read.append(samples_at(dealt, 4 * local_step, 4))
        return real_read(self, dealt, local_step, batch_tokens)

    monkeypatch.setattr(Loader, "read", spy)
    reference(tiny_run(), "ABC", dict.fromkeys(EVERYTHING, (1, 0)), 2)
    assert np.concatenate(read).tolist() == list(range(6 * ROUND))


def test_a_merge_follows_the_round_that_made_it_due():
    owners = {0: [0], 1: [0], 2: [1], 3: [1]}
    merging = {"alpha": 0.5, "top_k": 2, "interval_steps": 6, "decay_steps": 100}
    plain = reference(tiny_run(), "AB", owners, 2)
    run = tiny_run(merging=merging)
    merged = merge_experts(plain, run.model, alpha=0.5 * (1 - 6 / 100), top_k=2).named
    assert same(reference(run, "AB", owners, 2), plain | merged)
    assert not same(plain | merged, plain)


def test_a_merge_is_due_once_per_interval_until_alpha_is_zero():
    merging = tiny_run(
        merging={"alpha": 0.5, "top_k": 2, "interval_steps": 6, "decay_steps": 18}
    ).merging
    due = [merge_is_due(step, merged, merging) for step, merged in ((3, 0), (6, 0), (6, 1), (9, 1))]
    assert due == [False, True, False, False]
    assert [merge_is_due(step, 1, merging) for step in (12, 17, 18)] == [True, True, False]


def test_the_mean_adds_up_in_the_given_order():
    """1e8 + 1 is 1e8 in fp32, so that the order shows."""
    values = [{"a": torch.tensor([value])} for value in (1e8, 1.0, -1e8)]
    assert mean(values)["a"].item() == 0.0
    assert mean([values[0], values[2], values[1]])["a"].item() == torch.tensor(1.0).div(3).item()
