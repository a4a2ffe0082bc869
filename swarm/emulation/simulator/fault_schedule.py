"""One schedule from beginning to end: build, break, heal, judge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from swarm.emulation.simulator.faults.faults import Mix, Scenario, draw
from swarm.emulation.simulator.faults.hostile import ALL_CLASSES
from swarm.emulation.simulator.faults.world import World
from swarm.emulation.simulator.peers.participant import UnderTest
from swarm.emulation.simulator.peers.simulated_peer import Node
from swarm.emulation.simulator.symbols.values import Tag, Violation, require, short
from swarm.protocol.chain.trust import Chain, proof_problem, reform_electors
from swarm.protocol.messages.messages import Link
from swarm.protocol.values.manifest import Kind, Manifest, PeerId


class Progress:
    """Judges the progress of spared peers by their tips. Other peers do not count."""

    def __init__(
        self,
        spared: Collection[PeerId],
        founding: Manifest,
        limit_s: float,
        excused_s: Callable[[float, float], float],
    ) -> None:
        """Starts all peers at manifest 0.

        Args:
            spared: peers that must have rounds. If empty, nothing is judged.
            founding: manifest 0.
            limit_s: longest time between two rounds of more than half of the spared peers, and for
                which a spared peer may lack a tip that more than half of them have.
            excused_s: number of seconds between two moments that do not count.
        """
        self._limit_s, self._excused_s = limit_s, excused_s
        self._tips = dict.fromkeys(spared, founding)
        self._rounds = dict.fromkeys(spared, founding.code)
        """Code of each peer's newest tip that brought it a round."""
        self._level = founding.code
        """The code that more than half of the spared peers have reached by rounds."""
        self._risen_s = 0.0
        self._behind_s: dict[PeerId, float] = {}
        """For each peer whose tip is below the level: since when."""
        self._due_s = limit_s if spared else inf

    def applied(self, peer: PeerId, tip: Manifest, now_s: float) -> None:
        """Judges a peer's new tip.

        Raises:
            Violation: I3, if the tip came too late.
        """
        before = self._tips.get(peer)
        if before is None:
            return
        self.require(now_s)
        self._tips[peer] = tip
        if tip.kind is Kind.QUORUM or tip.round != before.round:
            self._rounds[peer] = tip.code
        level = sorted(self._rounds.values(), reverse=True)[len(self._rounds) // 2]
        if level > self._level:
            self._level, self._risen_s = level, now_s
        behind = (peer for peer, tip in self._tips.items() if tip.code < self._level)
        self._behind_s = {peer: self._behind_s.get(peer, now_s) for peer in behind}
        self._due_s = min([self._risen_s, *self._behind_s.values()]) + self._limit_s

    def require(self, now_s: float) -> None:
        """Judges how long ago the last round was.

        Raises:
            Violation: I3.
        """
        if now_s <= self._due_s:
            return
        since = {f"most of {sorted(self._tips)}": self._risen_s, **self._behind_s}
        for who, since_s in since.items():
            waited_s = now_s - since_s
            if waited_s > self._limit_s < waited_s - self._excused_s(since_s, now_s):
                raise Violation("I3", f"no round for {waited_s:.1f} s at {who}, spared from faults")


RECOVERY_LIMIT_S = 320.0
"""Seconds after healing within which all live peers must have three more rounds."""
ROUNDS_AFTER_HEALING = 3
PROVED_FROM = 8
"""Approximate number of older heads, evenly spread, that are tried as tips of peers that return
(chain pruning)."""
PROVED_EVERY = 50
"""Heights between two judgements of chains, which are also judged at a schedule's end."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one schedule."""

    fault_class: str
    seed: int
    violation: str | None
    rounds: int
    """Training rounds in the longest chain."""
    merges: int
    reforms: int
    manifests: int
    recovery_s: float
    """Time from healing until all live peers had three more rounds."""


class _Judge:
    """Judges progress [I3], long chains (chain pruning) and, at the end, agreement [I5]."""

    def __init__(self, world: World, scenario: Scenario) -> None:
        self.world = world
        self.scenario = scenario
        self.done = False
        self.is_healed = False
        self._progress = Progress(
            scenario.stable, world.founding, scenario.progress_s, self._liars_s
        )
        self._limit_s = scenario.heal_s + RECOVERY_LIMIT_S

    def heal(self) -> None:
        """Ends all faults."""
        self.is_healed = True
        self.world.heal(self.scenario.calm_timers)

    def applied(self, node: Node) -> None:
        """Judges a peer's new tip."""
        tip = node.disk.record.tip
        self._progress.applied(node.me, tip, self.world.now)
        if tip.height % PROVED_EVERY == 0:
            _judge_chain(self.world, node)
        if self.is_healed:
            self.done = self._is_recovered(self._tips())

    def is_over(self) -> bool:
        """Whether the schedule may end. Also judges the limits."""
        if not self.is_healed:
            self._progress.require(self.world.now)
        elif self.world.now > self._limit_s:
            self.done = self._is_recovered(self._tips_with_a_future())
            if not self.done:
                raise Violation("I5", f"no three rounds on all live peers: {self._states()}")
        return self.done

    def _liars_s(self, since_s: float, now_s: float) -> float:
        """Seconds between two moments that a lying convener may have cost (takeover)."""
        liar, timers = self.world.liar, self.scenario.setup.timers
        return liar.convening_s(timers, since_s, now_s) if liar else 0.0

    def _tips(self) -> list[Manifest]:
        return [node.disk.record.tip for node in self.world.alive()]

    def _tips_with_a_future(self) -> list[Manifest]:
        """All tips, up to the best tip, from which a peer may still continue.

        A peer whose tip is lower than the best tip has a better chain to follow [F1].
        """
        led = [self._may_go_on(node) for node in self.world.alive()]
        best = max((tip.code for tip in led if tip), default=None)
        return [tip for tip in self._tips() if best and tip.code <= best]

    def _may_go_on(self, node: Node) -> Manifest | None:
        """A peer's tip, if a live peer may continue from it [F3] and can be shown it.

        Policy: chain pruning.
        """
        tip, chain = node.disk.record.tip, node.machine.chain
        electors = [peer for peer in self.world.alive() if peer.me in reform_electors(tip.head)]
        for known in (elector.machine.chain for elector in electors):
            path = known.rooted(chain.proof(known.tip.code))
            is_proved = proof_problem(path, tip.head, known.trusted) is None
            if is_proved or node.me in tip.members:
                return tip
        return None

    def _is_recovered(self, tips: Sequence[Manifest]) -> bool:
        if not tips:
            return True
        invariants = self.world.invariants
        if any(
            invariants.rounds_since(tip, self.scenario.heal_s) < ROUNDS_AFTER_HEALING
            for tip in tips
        ):
            return False
        best = max(tips, key=lambda tip: tip.code)
        return all(invariants.descends(best, tip) for tip in tips)

    def _states(self) -> str:
        return ", ".join(
            f"{node.me} {short(node.disk.record.tip)} {node.machine.phase.value}"
            for node in self.world.alive()
        )


def run_schedule(
    fault_class: str,
    seed: int,
    *,
    tested: UnderTest | None = None,
    mix: Mix | None = None,
    trace: Callable[[str], None] | None = None,
) -> Outcome:
    """Runs the schedule that a class and a seed define.

    Args:
        fault_class: letter in `ALL_CLASSES`. Only a label when `mix` is given.
        seed: number of the schedule in the class.
        tested: the code under test, mutated or not.
        mix: faults that replace those of the class.
        trace: called with a line for every event and effect.

    Returns:
        The outcome. Its `violation` says which invariant broke and how. None if none broke.
    """
    random = Random(f"{fault_class}:{seed}")
    scenario = draw(mix or ALL_CLASSES[fault_class], random)
    world = build(scenario, random, tested=tested, trace=trace)
    violation = None
    try:
        play(world, scenario)
    except Violation as found:
        violation = str(found)
    except AssertionError as error:
        violation = f"assertion: {error}"
    except Exception as error:
        error.add_note(f"in schedule {fault_class}:{seed}")
        raise
    return _outcome(fault_class, seed, violation, world, scenario)


def build(
    scenario: Scenario,
    random: Random,
    *,
    tested: UnderTest | None = None,
    trace: Callable[[str], None] | None = None,
) -> World:
    """The scenario's swarm, before anything has happened."""
    world = World(scenario.setup, random, tested=tested or UnderTest(), trace=trace)
    world.network.weather = scenario.weather
    world.network.rough = scenario.rough
    for time_s, method, arguments in scenario.script:
        world.at(time_s, method, world, *arguments)
    return world


def play(world: World, scenario: Scenario) -> None:
    """Runs the scenario until all live peers have recovered from its faults.

    Raises:
        Violation: an invariant does not hold.
    """
    judge = _Judge(world, scenario)
    world.on_apply = judge.applied
    world.at(scenario.heal_s, judge.heal)
    world.run(judge.is_over)
    for node in world.alive():
        _judge_chain(world, node)
    if world.task.rules.unit_coding:
        _judge_tags(world)


def _judge_chain(world: World, node: Node) -> None:
    """Judges whether a peer's chain proves its tip to peers with any of its older heads.

    Policy: chain pruning.
    """
    chain, known = node.machine.chain, world.invariants.manifests
    behind = [known[chain.tip.digest]]
    while parent := behind[-1].parent:
        behind.append(known[parent])
    apart = max(1, len(behind) // PROVED_FROM)
    for manifest in (*behind[::apart], behind[-1]):
        path = Chain((Link(manifest.head),)).rooted(chain.proof(manifest.code))
        problem = proof_problem(path, chain.tip, {manifest.digest})
        require(
            problem is None, "I20", f"{node.me} proves nothing from {short(manifest)}: {problem}"
        )


def _judge_tags(world: World) -> None:
    """Judges whether local steps of live peers have vanished [E5]."""
    nodes, alive = world.nodes.values(), world.alive()
    present: list[Iterable[Tag]] = [left for node in nodes for _, left in node.remainders.items()]
    for node in nodes:
        live = node.trainer.model.deltas.live.values()
        whole = world.task.values.tags_of(node.me)
        present += [each.extra for each in live] if node.is_up else [whole]
    best = max((node.disk.record.tip for node in alive), key=lambda tip: tip.code)
    invariants = world.invariants
    forked = [m for m in invariants.manifests.values() if m.generation != best.generation]
    invariants.deltas.all_are_somewhere(best, forked, present)


def _outcome(
    fault_class: str, seed: int, violation: str | None, world: World, scenario: Scenario
) -> Outcome:
    manifests = list(world.invariants.manifests.values())
    kinds = [manifest.kind for manifest in manifests]
    return Outcome(
        fault_class,
        seed,
        violation,
        rounds=max(manifest.round for manifest in manifests),
        merges=kinds.count(Kind.MERGE),
        reforms=kinds.count(Kind.REFORM),
        manifests=len(kinds),
        recovery_s=world.now - scenario.heal_s,
    )
