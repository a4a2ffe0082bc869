"""Bounds on the change of a value by local steps."""

import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import RunConfig, parse_config
from swarm.errors import ConfigError
from swarm.experts import expert_unit, shared_unit
from swarm.protocol.rounds.policies import update_bounds
from swarm.protocol.rounds.policies.deals import quotas
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.rounds.policies.update_bounds import update_bound
from swarm.protocol.values.manifest import Manifest, PeerId
from swarm.protocol.values.updates import REST, SLACK, StepBound, bound_after
from tests.protocol.round_pump import found, make_rules
from tests.train.runs import tiny_run

RUN = tiny_run()
STEP = StepBound(absolute=0.001, relative=0.0001)
RULES = replace(make_rules(), step_bound=STEP)
TIP = found(RULES, ["A", "B"])


def with_betas(first: float, second: float, **changes: float) -> RunConfig:
    optimizer = RUN.optimizer.model_copy(update={"betas": (first, second), **changes})
    return RUN.model_copy(update={"optimizer": optimizer})


gradients = st.lists(
    st.sampled_from([0.0, 0.0, 1e-6, 1.0, -1.0, 1e3, -1e3, 1e-3]), min_size=1, max_size=40
)


@given(gradients, st.sampled_from([(0.9, 0.95), (0.9, 0.999), (0.5, 0.9), (0.8, 0.65)]))
def test_no_gradients_take_adamw_beyond_the_bound_of_its_steps(pulls, betas) -> None:
    """Without slack, by the formulas of Adam, with the largest weight on the newest gradient."""
    first, second = betas
    run = with_betas(first, second, weight_decay=0.0)
    limit = StepBound.of(run).absolute * (1 + 1e-9)
    mean = square = 0.0
    for count, pull in enumerate([*pulls, 1.0], 1):
        mean = first * mean + (1 - first) * pull
        square = second * square + (1 - second) * pull**2
        root = math.sqrt(square / (1 - second**count)) + run.optimizer.eps
        assert run.optimizer.lr * abs(mean / (1 - first**count)) / root <= limit


def test_betas_that_bound_no_step_are_refused() -> None:
    text = (Path(__file__).parents[3] / "configs/runs/demo.toml").read_text()

    def parsed(second: float) -> RunConfig:
        changes = [f"optimizer.betas=[0.9, {second}]"]
        return parse_config(RunConfig, text, source="demo.toml", overrides=changes)

    assert parsed(0.82)
    with pytest.raises(ConfigError, match="without bound"):
        parsed(0.8)


def test_shared_tensors_have_the_steps_of_the_offer_and_experts_those_since_their_version() -> None:
    def steps(unit: str, tokens: int, tip=TIP, rules=RULES) -> float:
        bound = update_bound(unit, ["A"], {"A": tokens}, tip, rules)
        assert bound is not None and bound.base == tip.entries[unit].digest
        decay = SLACK * STEP.relative
        for count in range(1, 200):
            if math.isclose(
                bound.absolute - REST["fp32"], SLACK * count * STEP.absolute * (1 + count * decay)
            ):
                return count
        raise AssertionError(bound)

    assert steps(shared_unit(0), 1000) == 10
    assert steps(shared_unit(0), 300) == 3
    assert steps(expert_unit(0), 1000) == 10
    assert steps(expert_unit(0), 0) == 10, "a late offer: those of a round"
    assert steps(expert_unit(0), 0, replace(TIP, round=3)) == 40, "four rounds have left it out"
    assert steps(expert_unit(0), 0, replace(TIP, round=99)) == 40, "it waited for an owner"
    units = [shared_unit(0), expert_unit(0)]
    coded = replace(
        RULES, unit_coding=dict.fromkeys(units, "b2"), delta_bytes=dict.fromkeys(units, 30)
    )
    assert steps(shared_unit(0), 300, rules=coded) == 13, "with those of a round before it"
    assert steps(expert_unit(0), 1000, rules=coded) == 10, "taken verbatim"
    two_owners = replace(coded, owners_per_expert=2)
    assert steps(expert_unit(0), 1000, rules=two_owners) == 20


def test_a_mean_has_the_bound_of_its_furthest_source() -> None:
    work = {"A": 1000, "B": 200}
    both = update_bound(shared_unit(0), ["A", "B"], work, TIP, RULES)
    assert both == update_bound(shared_unit(0), ["A"], work, TIP, RULES)
    assert both != update_bound(shared_unit(0), ["B"], work, TIP, RULES)


def test_what_is_no_update_has_no_bound() -> None:
    assert update_bound(shared_unit(0), [], {}, TIP, RULES) is None
    assert update_bound("shared.99", ["A"], {}, TIP, RULES) is None
    assert update_bound(shared_unit(0), ["A"], {}, TIP, make_rules()) is None


def plain_steps(unit: str, peer: PeerId, tokens: int, tip: Manifest, rules: Rules) -> int:
    """The rule for one source, with all deals computed for it alone."""
    batch = rules.batch_tokens_at(tip.tokens)
    is_expert = unit in rules.expert_units
    is_carried = rules.overlaps or unit in rules.averaged_deltas
    if not is_expert and rules.shared_every == 1 and not is_carried:
        return tokens // batch
    text = tip.founding.text
    dealt = quotas(tip.members, tip.tokens, text.windows if text else None, rules).get(peer, 0)
    a_round = max(tokens, dealt * rules.sequence_length) // batch
    if not is_expert and rules.shared_every == 1:
        return tokens // batch + a_round
    period = rules.experts_every if is_expert else rules.shared_every
    rounds = min(max(1, tip.round + 1 - tip.entries[unit].version), 4 * period)
    return a_round * (rounds + period * is_carried)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_dealt_is_worked_out_once_for_all_bounds_of_a_proposal(seed, monkeypatch) -> None:
    random = Random(seed)
    every = random.choice([1, 3])
    rules = make_rules(
        experts=6, parts=4, shared_every=every, stagger=every > 1, owners_per_expert=2
    )
    coded = random.choice([[], sorted(rules.unit_bytes)])
    rules = replace(
        rules, step_bound=STEP, round_seconds=random.choice([None, 3.2]),
        overlaps=random.random() < 0.5, unit_coding=dict.fromkeys(coded, "b2"),
        delta_bytes=dict.fromkeys(coded, 30),
    )  # fmt: skip
    tip = replace(found(rules, list("ABCD")), round=random.randrange(5))
    paced = {
        p: replace(m, tokens_per_s=random.choice([0.0, 9.5, 1e3])) for p, m in tip.members.items()
    }
    tip = replace(tip, members=paced)
    calls: list[int] = []

    def counted(*arguments: Any) -> dict[PeerId, int]:
        calls.append(1)
        return quotas(*arguments)

    monkeypatch.setattr(update_bounds, "quotas", counted)
    work = {peer: random.randrange(9) * 130 for peer in "ABC"}  # D is late
    for unit, entry in tip.entries.items():
        sources = random.sample("ABCD", random.randint(1, 4))
        steps = max(plain_steps(unit, peer, work.get(peer, 0), tip, rules) for peer in sources)
        expected = bound_after(steps, entry.digest, "fp32", STEP)
        assert update_bound(unit, sources, work, tip, rules) == expected
    assert len(calls) == 1
    other = replace(tip, members={**paced, "A": replace(paced["A"], tokens_per_s=1e6)})
    assert update_bound(expert_unit(0), ["A"], work, other, rules) == bound_after(
        plain_steps(expert_unit(0), "A", work["A"], other, rules),
        other.entries[expert_unit(0)].digest, "fp32", STEP,
    )  # fmt: skip


def test_a_bound_grows_with_the_steps_and_covers_the_wire() -> None:
    few, many = (bound_after(steps, "d", "bf16", STEP) for steps in (1, 100))
    assert few.absolute < many.absolute < 1.0
    assert few.relative > 2**-7, "what bf16 rounds"
