"""Directed scenarios of rounds of any length: peers take steps and report their progress.

Timers are those of a real peer, and links are good. Faults are scripted: a peer that lives and
never offers, one that restarts, one that is many times slower than others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from random import Random
from typing import ClassVar

from swarm.config import MergingConfig
from swarm.emulation.simulator.fault_schedule import build
from swarm.emulation.simulator.faults import faults
from swarm.emulation.simulator.faults.world import Weather, World
from swarm.emulation.simulator.peers.participant import Character, Setup, UnderTest
from swarm.emulation.simulator.peers.simulated_peer import Node
from swarm.emulation.simulator.peers.symbol_trainer import Trainer
from swarm.protocol.rounds import Rules
from swarm.protocol.timing.deadlines import Measured, Timers, production_timers
from swarm.protocol.values.manifest import Kind, Manifest, PeerId

LOCAL_STEPS = 100
"""Local steps of every peer, whatever the steps of its work in a scenario: these only divide its
time."""
UNITS = ("shared.0", *(f"expert.{expert}" for expert in range(4)))


@dataclass(frozen=True)
class Work:
    """The local steps of one peer in a round."""

    step_s: float
    num_steps: int
    slip: float = 1.0
    """Steps after the first take this multiple of its time, and the peer does not notice."""
    stuck_from: int | None = None
    """From this round on the peer is alive, but ends no step any more."""

    @classmethod
    def of_seconds(cls, seconds: float, step_s: float) -> Work:
        """As many steps as fit a time, at least one."""
        return cls(step_s, max(1, int(seconds / step_s)))

    @property
    def total_s(self) -> float:
        """From the first step to the last."""
        return self.step_s * (1 + (self.num_steps - 1) * self.slip)


class Worker(Trainer):
    """A trainer that takes single steps, and reports after each when it will be done."""

    works: ClassVar[Mapping[PeerId, Work]] = {}

    @property
    def _work(self) -> Work:
        return self.works[self.shell.me]

    def _plan(self, left: Callable[[int, float], int]) -> tuple[int, float]:
        """With `round.seconds` the steps of its work, if they fit and were dealt (counted work)."""
        work, steps = self._work, left(0, 0.0)
        if self.task.rules.round_seconds is not None:
            fits = (done for done in range(work.num_steps) if not left(done, work.step_s))
            steps = next(fits, work.num_steps)
        return steps, steps * work.step_s

    async def _take_steps(self, tip: Manifest) -> None:
        work = self._work
        steps = work.num_steps if self.task.rules.round_seconds is None else self._lesson.steps
        if work.stuck_from is not None and tip.round + 1 >= work.stuck_from:
            steps = 0
            await self._pass(inf)
        for done in range(steps):
            if done:
                self._expect(self._job, tip, (steps - done) * work.step_s)
            await self._pass(work.step_s * (work.slip if done else 1.0))
            if self._newer:
                return


def real_timers(measured: Measured, base: Timers) -> Timers:
    """The timers of a real peer whose run fixes none: adapted, T_reform included."""
    return production_timers(
        measured, roster_after_s=base.roster_s, reform_after_s=None, base=base
    ).timers


@dataclass
class Course:
    """The result of a scenario."""

    world: World
    applied: list[tuple[float, Manifest]] = field(default_factory=list)
    """Every training round of the longest chain, with the time when the first peer had it."""
    widest: Timers = faults.CALM_TIMERS
    """The largest T_roster and T_reform that any peer had."""

    @property
    def contributors(self) -> list[set[PeerId]]:
        """Of each round."""
        return [set(manifest.contributors) for _, manifest in self.applied]

    @property
    def durations_s(self) -> list[float]:
        """Of each round."""
        return [after - before for before, after in pairwise([0.0, *(t for t, _ in self.applied)])]

    def utilisation(self, peer: PeerId, work: Work) -> float:
        """Share of time that a peer spent on counted work."""
        counted = sum(peer in contributors for contributors in self.contributors)
        return counted * work.total_s / self.applied[-1][0]

    def convener(self) -> PeerId:
        """Who convenes now."""
        return next(node.machine.campaign.convener for node in self.world.alive())

    def restart_convener(self, after_s: float = 5.0) -> None:
        """Kills the current convener, and starts it again."""
        peer = self.convener()
        self.world.crash(peer)
        self.world.at(after_s, self.world.reboot, peer)


def go_through(
    works: Mapping[PeerId, Work],
    rounds: int,
    *,
    at: Sequence[tuple[float, Callable[[Course], None]]] = (),
    tested: UnderTest | None = None,
    round_seconds: float | None = None,
    uplinks: Mapping[PeerId, float] | None = None,
    unit_bytes: int = 100,
    within_s: float = 1e6,
) -> Course:
    """Runs a swarm through a number of training rounds.

    Args:
        works: the work of each founder in a round.
        rounds: of the longest chain.
        at: events at given seconds.
        tested: the code under test, perhaps mutated. None: with all rules.
        round_seconds: value of `round.seconds`. Each peer offers the steps of its own work.
        uplinks: of each peer, in bytes per second, known to the peer. None: bytes take no time.
        unit_bytes: of the shared tensors, and of each of four experts.
        within_s: limit of the simulation.

    Returns:
        Its course.

    Raises:
        Violation: an invariant does not hold.
    """
    trainer: type[Worker] = type("Workers", (Worker,), {"works": dict(works)})
    up = uplinks or {}
    characters = {p: Character(sync_s=0.05, up_bytes_per_s=up.get(p, inf)) for p in works}
    setup = Setup(
        tuple(works),
        _rules(len(works), round_seconds, unit_bytes),
        faults.CALM_TIMERS,
        characters,
        has_adapted_timers=True,
        has_slow_links=uplinks is not None,
    )
    scenario = faults.Scenario(
        setup, faults.CALM_TIMERS, Weather(delay_s=0.05), {}, (), within_s, ()
    )
    tested = replace(tested or UnderTest(), trainer=trainer, timers=real_timers)
    world = build(scenario, Random(0), tested=tested)
    course = Course(world)
    for time_s, what in at:
        world.at(time_s, what, course)
    world.on_apply = lambda node: _note(course, node)
    world.run(lambda: len(course.applied) >= rounds or world.now > within_s)
    return course


def _rules(num_peers: int, round_seconds: float | None, unit_bytes: int) -> Rules:
    return Rules(
        run="run",
        num_experts=len(UNITS) - 1,
        owners_per_expert=1,
        merging=MergingConfig(),
        unit_bytes=dict.fromkeys(UNITS, unit_bytes),
        unit_codec=dict.fromkeys(UNITS, "fp32"),
        experts_every=1,
        local_steps_at=lambda _: LOCAL_STEPS,
        batch_tokens_at=lambda _: faults.SAMPLES_PER_STEP * faults.SAMPLE_TOKENS,
        sequence_length=faults.SAMPLE_TOKENS,
        planned_peers=num_peers,
        round_seconds=round_seconds,
        is_dealt=True,
    )


def _note(course: Course, node: Node) -> None:
    tip, timers = node.disk.record.tip, node.machine.timers
    widest = course.widest
    course.widest = replace(
        widest,
        roster_s=max(widest.roster_s, timers.roster_s),
        reform_s=max(widest.reform_s, timers.reform_s),
    )
    if tip.kind is Kind.QUORUM and tip.round > len(course.applied):
        course.applied.append((course.world.now, tip))
