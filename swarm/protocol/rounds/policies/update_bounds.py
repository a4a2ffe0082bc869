"""How far the values of a round may be from the values before the training. Pure.

Policy: update bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

from swarm.config import Codec
from swarm.protocol.rounds.policies.deals import quotas
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.values.manifest import Manifest, PeerId, Unit
from swarm.protocol.values.updates import UpdateBound, bound_after


def update_bound(
    unit: Unit, peers: Iterable[PeerId], work: Mapping[PeerId, int], tip: Manifest, rules: Rules
) -> UpdateBound | None:
    """The bound of a value that one of these peers trained from the tip's value, or of a mean.

    A mean is no further from the tip's value than its furthest source.

    The peers are members of the tip; `work` has the tokens of those that are not late.

    Returns:
        None if values are not checked, as in a simulation.
    """
    entry, sources = tip.entries.get(unit), list(peers)
    if rules.step_bound is None or entry is None or not sources:
        return None
    behind = _behind(unit, {peer: work.get(peer, 0) for peer in sources}, tip, rules)
    step = rules.step_bound.between(
        max(0, tip.step - behind.rounds * _steps_a_round(_Case(tip, rules))),
        tip.step + (behind.steps if rules.round_seconds is None else 0),
    )
    codec = cast(Codec, rules.unit_codec[unit])
    return bound_after(behind.steps, entry.digest, codec, step)


@dataclass(frozen=True)
class _Behind:
    """The amount of training that a value may contain."""

    steps: int
    """The most local steps that a source of the value may have taken."""
    rounds: int
    """The number of earlier rounds in which some of these steps may have been taken."""


def _behind(unit: Unit, work: Mapping[PeerId, int], tip: Manifest, rules: Rules) -> _Behind:
    """The training that a value of these sources may contain; `work` has their tokens.

    Shared tensors restart with each tip if all of them are due in each round. An expert's local
    progress continues through rounds that did not count it. A shared part's progress continues
    through rounds in which the part was not due (shared progress). In each of these rounds a peer
    trained no more than it was dealt (deal sizes). Where deltas are averaged, steps that one period
    left out may be carried. Where rounds overlap, steps of the previous round may be carried as
    well. Remainders of codings add no step, but they may come from steps of K + 1 periods.

    An expert that waited for an owner has an old version but no progress (expert ownership). So at
    most K + 1 of its periods count. Otherwise the first owner could move the expert as far as in
    all rounds of the wait.
    """
    batch = rules.batch_tokens_at(tip.tokens)
    is_expert = unit in rules.expert_units
    is_carried = rules.overlaps or unit in rules.averaged_deltas
    period = rules.experts_every if is_expert else rules.shared_every
    most = (rules.silent_limit + 1) * period
    if not is_expert and rules.shared_every == 1 and not is_carried:
        return _Behind(max(work.values()) // batch, 0)
    dealt, length = _dealt(_Case(tip, rules)), rules.sequence_length
    a_round = {p: max(tokens, dealt.get(p, 0) * length) // batch for p, tokens in work.items()}
    if not is_expert and rules.shared_every == 1:
        steps = max(tokens // batch + a_round[peer] for peer, tokens in work.items())
        return _Behind(steps, most if unit in rules.unit_coding else 1)
    rounds = min(max(1, tip.round + 1 - tip.entries[unit].version), most)
    steps = max(a_round.values()) * (rounds + period * is_carried)
    before = most if unit in rules.unit_coding else rounds - 1
    return _Behind(steps, before + period * is_carried)


@dataclass(frozen=True)
class _Case:
    """A cache key that compares objects by identity; each source of each unit is looked up."""

    names: tuple[int, int] = field(init=False)
    tip: Manifest = field(compare=False)
    rules: Rules = field(compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", (id(self.tip), id(self.rules)))


@lru_cache(maxsize=8)
def _dealt(case: _Case) -> Mapping[PeerId, int]:
    """Samples that each member may read after the tip."""
    tip, text = case.tip, case.tip.founding.text
    return quotas(tip.members, tip.tokens, text.windows if text else None, case.rules)


@lru_cache(maxsize=8)
def _steps_a_round(case: _Case) -> int:
    """Steps of the run in an earlier round: of the last round, or the mean if that is more."""
    tip, rules = case.tip, case.rules
    last = rules.local_steps_at(tip.tokens)
    if rules.round_seconds is not None:
        last = rules.steps_of(rules.tokens_after(tip, tip.work) - tip.tokens, tip) + 1
    return max(last, -(-tip.step // max(1, tip.round)))
