"""Honest local steps stay within the members' bounds, anywhere in the schedule (update bounds)."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from swarm.experts import expert_unit, shared_unit
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.rounds.policies.update_bounds import update_bound
from swarm.protocol.values.layout import layout_of
from swarm.train.engine.local_steps import learning_rate, schedule_step
from swarm.train.engine.optimizer import OwnedOptimizer
from tests.protocol.round_pump import found
from tests.train.runs import tiny_run

STEPS = 5
ROUNDS = 40
RUN = tiny_run(
    run={"rounds": ROUNDS},
    round={"local_steps": STEPS},
    optimizer={"warmup_steps": 30, "final_share": 0.05},
)
SIZE = 512
SHARED, EXPERT = shared_unit(0), expert_unit(0)
PLACES = {"warm-up": 0, "warm": 4, "peak": 6, "middle": 20, "last": ROUNDS - 1, "over": ROUNDS + 9}
"""Past rounds."""


def tip_at(rounds, rules):
    tip = found(rules, ["A", "B"])
    tokens = 2 * rounds * STEPS * RUN.train.batch_tokens
    entries = {unit: replace(entry, version=rounds) for unit, entry in tip.entries.items()}
    step = rules.step_after(replace(tip, step=(rounds - 1) * STEPS), tokens)
    return replace(tip, round=rounds, step=step if rounds else 0, tokens=tokens, entries=entries)


def rules_of(run):
    return replace(Rules.of("run", run, layout_of(run)), planned_peers=2)


def pulls(pattern, generator):
    """An endless sequence of gradients."""
    sign = torch.randn(SIZE, generator=generator).sign()
    while True:
        noise = torch.randn(SIZE, generator=generator)
        yield {
            "noise": noise,
            "steady": sign * (1 + 0.1 * noise),
            "rare": noise * (torch.rand(SIZE, generator=generator) < 0.05) * 1e3,
            "growing": noise.sign() * torch.logspace(-6, 6, SIZE),
        }[pattern]


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("pattern", ["noise", "steady", "rare", "growing"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("timed", [False, True], ids=["exact", "timed"])
def test_honest_steps_are_within_the_bound(place, pattern, form, timed):
    """Also for a peer with zero moments under the count of the others."""
    run = RUN
    if timed:
        seconds = RUN.round.model_copy(update={"seconds": 9.0})
        optimizer = RUN.optimizer.model_copy(update={"schedule_steps": ROUNDS * STEPS})
        run = RUN.model_copy(update={"round": seconds, "optimizer": optimizer})
    rules = rules_of(run)
    tip = tip_at(PLACES[place], rules)
    value = nn.Parameter(torch.randn(SIZE, generator=torch.Generator().manual_seed(1)))
    base = value.detach().clone()
    adamw = OwnedOptimizer(run.optimizer, form)
    adamw.follow({"model.norm.weight": value}, ())
    adamw.count_from(tip.step)
    gradients = pulls(pattern, torch.Generator().manual_seed(2))
    for local_step in range(STEPS):
        value.grad = next(gradients).clone()
        adamw.update(learning_rate(schedule_step(tip.step, local_step, run), run))
    bound = update_bound(SHARED, ["A"], {"A": STEPS * run.train.batch_tokens}, tip, rules)
    assert bound is not None
    moved = (value.detach() - base).abs()
    limit = bound.absolute + bound.relative * base.abs()
    assert bool((moved <= limit).all()), float((moved / limit).max())


@pytest.mark.parametrize("pattern", ["noise", "steady", "rare", "growing"])
@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
def test_honest_steps_of_muon_are_within_the_bound(pattern, form):
    run = tiny_run(
        run={"rounds": ROUNDS},
        round={"local_steps": STEPS},
        optimizer={"kind": "muon", "matrix_lr": 0.02, "warmup_steps": 30},
    )
    rules = rules_of(run)
    tip = tip_at(6, rules)
    name = "model.layers.0.self_attn.q_proj.weight"
    value = nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(1)))
    base = value.detach().clone()
    optimizer = OwnedOptimizer(run.optimizer, form)
    optimizer.follow({name: value}, ())
    gradients = pulls(pattern, torch.Generator().manual_seed(2))
    for local_step in range(STEPS):
        value.grad = next(gradients)[:256].view(16, 16).clone()
        optimizer.update(learning_rate(schedule_step(tip.step, local_step, run), run))
    bound = update_bound(SHARED, ["A"], {"A": STEPS * run.train.batch_tokens}, tip, rules)
    assert bound is not None
    limit = bound.absolute + bound.relative * base.abs()
    moved = (value.detach() - base).abs()
    assert bool((moved <= limit).all()), float((moved / limit).max())
    assert bool((moved * 100 > limit).any()), "the bound would let anything pass"


def test_the_bound_follows_the_schedule_and_is_two_to_twenty_times_tighter_than_at_its_peak():
    rules = rules_of(RUN)
    before = 4 * STEPS * RUN.optimizer.lr * 1.17  # for any schedule
    times = {}
    for place, rounds in PLACES.items():
        work = {"A": STEPS * RUN.train.batch_tokens}
        bound = update_bound(SHARED, ["A"], work, tip_at(rounds, rules), rules)
        assert bound is not None
        times[place] = before / bound.absolute
    assert times["peak"] == pytest.approx(2.0, rel=0.02)
    assert times["middle"] > 2.5
    assert times["over"] == pytest.approx(40.0, rel=0.05)
    assert times["last"] > 20.0
    assert times["warm-up"] > 5.0


def test_what_may_be_older_than_the_tip_has_the_largest_rate_since():
    rules = rules_of(RUN)
    tip = tip_at(30, rules)
    work = {"A": STEPS * RUN.train.batch_tokens}

    def per_step(unit, steps, tip=tip, rules=rules):
        bound = update_bound(unit, ["A"], work, tip, rules)
        assert bound is not None
        return bound.absolute / steps

    renewed = per_step(EXPERT, STEPS)
    assert renewed == pytest.approx(per_step(SHARED, STEPS), rel=1e-6)
    entries = {**tip.entries, EXPERT: replace(tip.entries[EXPERT], version=27)}
    missed = per_step(EXPERT, 4 * STEPS, replace(tip, entries=entries))
    assert missed / renewed == pytest.approx(RUN.rate_share(135) / RUN.rate_share(150), rel=0.02)
    coded = replace(
        rules, unit_coding={EXPERT: "b2"}, delta_bytes={EXPERT: 30}, owners_per_expert=1
    )
    late = per_step(EXPERT, STEPS, rules=coded)
    assert late / renewed == pytest.approx(RUN.rate_share(130) / RUN.rate_share(150), rel=0.02)
