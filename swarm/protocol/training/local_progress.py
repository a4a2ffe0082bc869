"""Local progress that the tip does not count yet.

This module computes which samples a peer reads in a round, its early offers (overlapped rounds,
overlap accounting), and which part of a private state is still valid after a crash [P6] (merge
rebase, shared progress).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.experts import expert_of_unit
from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.rounds.policies.deals import most_samples
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.timing.deadlines import LocalWork, local_work_left
from swarm.protocol.training.shell import Applied, SavedWork, Work
from swarm.protocol.values.manifest import Digest, Kind, Manifest, PeerId, Unit
from swarm.protocol.values.work import Stretches, num_samples, split


@dataclass(frozen=True)
class Tally:
    """The amount of some local steps; see `Work`."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: Work | Tally | None) -> Tally:
        """The sum with another amount; None counts as none."""
        if other is None:
            return self
        return Tally(
            self.steps + other.steps, self.tokens + other.tokens, self.seconds + other.seconds
        )


class Ahead:
    """Offered steps in the model that the tip does not contain."""

    def __init__(self) -> None:
        self.flight: Work | None = None
        """The last offer, until a manifest decides on it."""
        self.behind = Tally()
        """Earlier offers that no manifest has counted."""

    @property
    def uncounted(self) -> Tally:
        """The steps of the offer in flight and of earlier uncounted offers together."""
        return self.behind + self.flight

    def decided(self, *, is_counted: bool, is_lost: bool) -> int:
        """Notes that a newer manifest is adopted.

        Args:
            is_counted: whether the manifest counted the offer in flight, which contains all these
                steps.
            is_lost: whether the shared tensors restart from the agreed values.

        Returns:
            Tokens of steps that are now lost: neither in the model nor in a manifest.
        """
        uncounted, self.flight = Tally() if is_counted else self.uncounted, None
        self.behind = Tally() if is_lost else uncounted
        return uncounted.tokens if is_lost else 0


class Reading:
    """The position in the text: agreed for a common text, this peer's own in a private corpus."""

    def __init__(self, rules: Rules, me: PeerId) -> None:
        self.rules, self.me = rules, me
        self.position = 0
        """Where this round begins in a private corpus."""
        self.began_s = 0.0
        """When this round began, by the shell's clock."""

    def next_round(self, began_s: float, offered_tokens: int) -> None:
        """Begins a round; in a private corpus, offered samples are not read again."""
        self.began_s = began_s
        self.position = self.position_after(offered_tokens)

    def position_after(self, tokens: int) -> int:
        """The position in a private corpus after `tokens` of this round."""
        return self.position + tokens // self.rules.sequence_length

    def dealt(self, tip: Manifest, read_tokens: int) -> Stretches:
        """The samples that further local steps on a tip read, in this order."""
        samples = read_tokens // self.rules.sequence_length
        if self.rules.is_dealt:
            return split(tip.dealt[self.me], samples)[1]
        most = most_samples(self.me, tip, self.rules)
        return ((self.position + samples, self.position + most),) if samples < most else ()

    def goes_on(self, before: Manifest, after: Manifest, tokens: int) -> bool:
        """Whether samples read beyond one tip come first in this peer's deal at another tip.

        Policy: overlapped deals.

        They do if the second tip is the child of the first. On another chain the same samples may
        be assigned to other members, which count them there, even if all values are equal.
        """
        if after.parent == before.digest or not self.rules.is_dealt:
            return True
        samples = tokens // self.rules.sequence_length
        first, there = (split(tip.dealt.get(self.me, ()), samples)[0] for tip in (before, after))
        return first == there

    def work_left(
        self, tip: Manifest, uncounted: int, done: int, step_s: float, passed_s: float
    ) -> LocalWork:
        """How many local steps are left after `done` (counted work).

        If rounds overlap, time without steps does not count.

        Args:
            tip: the tip from which the steps start.
            uncounted: tokens of offers that are not in the tip (overlap accounting).
            done: steps since the last offer.
            step_s: mean seconds of one of these steps; 0 before the first.
            passed_s: seconds since the round began.
        """
        rules = self.rules
        samples = num_samples(self.dealt(tip, uncounted))
        passed_s = done * step_s if rules.overlaps else passed_s
        steps = samples * rules.sequence_length // rules.batch_tokens_at(tip.tokens)
        if rules.round_seconds is None:
            return local_work_left(min(steps, rules.local_steps_at(tip.tokens)), done, step_s)
        return local_work_left(steps, done, step_s, rules.round_seconds - passed_s)


def problem_of(saved: SavedWork, run_id: str, tip: Manifest) -> str | None:
    """Why training may not continue from a private state, in a sentence; None if it may.

    The state has to be of this run. If it names the tip, its steps have to be of the round after
    the tip. The same holds if the tip is a reform and the state names the reform's parent, since a
    reform changes no values.
    """
    if saved.run_id != run_id:
        return f"the private state belongs to the run {saved.run_id}, not {run_id}"
    has_steps = saved.steps > 0 and saved.tokens > 0
    fits = saved.round == tip.round + 1 and (has_steps or not saved.is_offered)
    if saved.base_tip in _same(tip) and not fits:
        return (
            f"the private state (round {saved.round}, {saved.steps} steps, {saved.tokens} "
            f"tokens) cannot follow the manifest that it names (round {tip.round})"
        )
    return None


def manifests_to(newest: Applied, base_tip: Digest) -> list[Manifest]:
    """The manifests to adopt, one after the other, from `base_tip` to the newest tip.

    Of the manifests in between, the record has only the tip's parent, from which a merge is
    computed again (merge rebase).
    """
    tip, parent = newest.manifest, newest.parent
    if base_tip == tip.digest:
        return []
    if parent and parent.digest == tip.parent and parent.parent == base_tip:
        return [parent, tip]
    return [tip]


def offer_of(saved: SavedWork, unit_bytes: Mapping[Unit, int]) -> Offer:
    """The offer with which the private state was saved, without its work."""
    units = {
        unit: OfferedUnit(digest, unit_bytes[unit], base="")
        for unit, digest in saved.offered.items()
    }
    return Offer(saved.base_tip, 0, 0, units)


def offer_again(saved: SavedWork, tip: Manifest, me: PeerId, rules: Rules) -> Offer | None:
    """An offer that was in flight when a peer stopped, for the round after the tip.

    The private state is older than the offer. So the peer has the offered blobs, but not the steps
    that made them. It offers the blobs once more and waits.

    Returns:
        None if a round has decided on the offer, or this peer has to offer other units now.
    """
    is_undecided = saved.base_tip in _same(tip) and saved.round == tip.round + 1
    if saved.run_id != rules.run or not is_undecided:
        return None
    if set(saved.offered) != set(rules.schedule.due_of(me, tip)):
        return None
    units = {}
    for unit, digest in saved.offered.items():
        expert, delta = expert_of_unit(unit), saved.deltas.get(unit)
        is_delta = unit in rules.unit_coding and delta is None
        num_bytes = (rules.delta_bytes if is_delta else rules.unit_bytes)[unit]
        base = tip.entries[unit].digest if expert is None else saved.expert_bases[expert]
        units[unit] = OfferedUnit(digest, num_bytes, base, delta)
    return Offer(tip.digest, saved.steps, saved.tokens, units, saved.seconds)


def _same(tip: Manifest) -> set[Digest | None]:
    """Tips whose work is valid for the round after this tip, since a reform changes no values."""
    return {tip.digest, tip.parent} if tip.kind is Kind.REFORM else {tip.digest}
