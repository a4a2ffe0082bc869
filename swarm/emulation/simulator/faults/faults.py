"""Fault classes: draw a swarm and its faults from a seed; see swarm/emulation/README.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random

from swarm.config import MergingConfig
from swarm.emulation.simulator.faults.guests import drawn_guests
from swarm.emulation.simulator.faults.world import Weather, World
from swarm.emulation.simulator.peers import participant
from swarm.experts import expert_unit, shared_unit
from swarm.protocol.rounds import Rules
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import PeerId

NUM_EXPERTS = 4
NUM_PARTS = 2
LOCAL_STEPS = 2
SAMPLES_PER_STEP = 2
SAMPLE_TOKENS = 4
CALM_TIMERS = Timers(tick_s=1.0)
"""The model's timers. The coarser tick only makes schedules cheaper."""
LONG_S = (110.0, 190.0)
"""Durations of faults after which a spared majority might have waited too long for a round [I3]."""


@dataclass(frozen=True)
class Mix:
    """The ingredients of a fault class."""

    peers: tuple[int, int] = (2, 7)
    """Least and most peers, strangers included."""
    experts: int = NUM_EXPERTS
    most_owners: int | None = None
    """Largest number of owners of an expert. None: the number of peers."""
    strangers: float = 0.2
    """Chance that a peer does not found the run but joins later."""
    minority_only: bool = False
    """Whether a strict majority is spared from every fault."""
    majority_dies: bool = False
    """Whether at least half of the peers are killed for good."""
    window_s: tuple[float, float] = (40.0, 150.0)
    """Earliest and latest time at which everything heals."""
    faults: tuple[int, int] = (3, 14)
    """Least and most faults before everything heals."""
    kinds: Mapping[str, float] = field(
        default_factory=lambda: {
            "crash": 3.0,
            "trap": 4.0,
            "pause": 1.5,
            "split": 2.0,
            "shatter": 0.3,
            "duel": 1.0,
            "cut": 2.0,
            "storm": 1.0,
            "leave": 0.5,
        }
    )
    """Weights of the kinds of faults."""
    traps: Mapping[str, float] = field(
        default_factory=lambda: dict.fromkeys(participant.TRAPS, 1.0) | {"any": 6.0}
    )
    """Weights of the places at which a peer is made to crash."""
    ambush: float = 0.2
    """Chance that another peer is cut off when a peer crashes at one of these places."""
    loss: float = 0.3
    """Largest share of messages lost."""
    spike_s: float = 8.0
    """Largest delay."""
    haste: tuple[float, float] = (1.0, 1.0)
    """The timers are multiplied by a factor from this range until everything heals."""
    hasty_reform: bool = False
    """Whether T_reform is also multiplied by this factor."""
    merging: float = 0.5
    """Chance that the run merges experts."""
    slow: float = 0.25
    """Chance that a peer is slow at something."""
    sync_s: tuple[float, ...] = (0.1, 3.0)
    """How long a slow peer's disk may take to make blobs durable."""
    restart_s: tuple[float, ...] = (0.3, 3.0, 15.0)
    """Times after which a peer that crashed by trap starts again."""
    small: float = 0.35
    """Chance that machines have room for only some experts."""
    is_sliced: bool = False
    """Whether each round exchanges only a slice of the units (slice schedule)."""
    certificates: float = 1.0
    """Chance that commits need certificates, as they always do in a real run. Without
    certificates, wrong decisions spread further."""

    def drawing(self) -> type[Draw]:
        """The class that draws its scenarios."""
        return Draw


CLASSES: dict[str, Mix] = {
    "A": Mix(),
    "B": Mix(peers=(3, 7), minority_only=True, window_s=LONG_S),
    "C": Mix(majority_dies=True, strangers=0.1, window_s=(60.0, 150.0), faults=(1, 8)),
    "D": Mix(
        haste=(0.08, 0.5),
        hasty_reform=True,
        traps={"vote": 4.0, "any": 2.0, "propose": 1.0, "vote_written": 1.0},
        kinds={"trap": 6.0, "crash": 1.0, "cut": 1.0, "storm": 1.0, "pause": 0.5},
        faults=(4, 16),
        window_s=(30.0, 90.0),
    ),
    "E": Mix(
        peers=(3, 5),
        haste=(0.08, 0.5),
        traps={"promise": 4.0, "any": 2.0, "campaign": 1.0, "vote": 1.0},
        kinds={"trap": 6.0, "cut": 5.0, "crash": 1.0, "storm": 1.0},
        faults=(4, 16),
        window_s=(30.0, 90.0),
    ),
}


@dataclass(frozen=True)
class Scenario:
    """A swarm and the faults planned for it."""

    setup: participant.Setup
    calm_timers: Timers
    """Timers of all peers after healing."""
    weather: Weather
    rough: Mapping[PeerId, Weather]
    stable: tuple[PeerId, ...]
    """Peers that must see a round every `progress_s`. Empty: progress is not required."""
    heal_s: float
    script: tuple[tuple[float, Callable[..., None], tuple[object, ...]], ...]
    """Planned calls (time, method of `World`, arguments), in order of time."""
    progress_s: float = 90.0
    """Longest time between two rounds of the stable peers."""


def draw(mix: Mix, random: Random) -> Scenario:
    """The scenario that a random generator defines."""
    return mix.drawing()(mix, random).scenario()


class Draw:
    """One scenario while it is drawn."""

    def __init__(self, mix: Mix, random: Random) -> None:
        self.mix = mix
        self.random = random
        self.script: list[tuple[float, Callable[..., None], tuple[object, ...]]] = []
        self.heal_s = random.uniform(*mix.window_s)
        self.peers = [f"p{index}" for index in range(random.randint(*mix.peers))]
        spared = len(self.peers) // 2 + 1 if mix.minority_only else 1
        self.stable = sorted(random.sample(self.peers, spared)) if mix.minority_only else []
        self.victims = [peer for peer in self.peers if peer not in self.stable]
        keeper = self.stable[0] if self.stable else self.peers[0]
        self.keeper = keeper  # founds the run, never leaves and never dies
        self.strangers = [
            peer for peer in self.victims if peer != keeper and random.random() < mix.strangers
        ]

    def _with_rooms(
        self, characters: Mapping[PeerId, participant.Character]
    ) -> dict[PeerId, participant.Character]:
        """The machines, which may lack room for all experts, or for those of lost peers.

        A separate generator draws the rooms, so that a seed gives the same faults with or without
        them.
        """
        aside = Random()
        aside.setstate(self.random.getstate())
        if aside.random() >= self.mix.small:
            return dict(characters)
        fair = -(-self.mix.experts // len(self.peers))
        sizes = [0, 1, fair, fair, fair + 1, 2 * fair, self.mix.experts]
        return {
            peer: replace(each, rooms=tuple(aside.choices(sizes, k=aside.choice([1, 1, 2, 3]))))
            for peer, each in characters.items()
        }

    def _with_guests(self, setup: participant.Setup) -> participant.Setup:
        """The swarm with invitations for strangers, and with some founders that have no vote yet.

        A separate generator draws these invitations.
        """
        aside = Random()
        aside.setstate(self.random.getstate())
        aside.seed(aside.getrandbits(64))
        candidates = [peer for peer in self.victims if peer in setup.founders[1:]]
        known = [peer for peer in candidates if aside.random() < self.mix.strangers / 2]
        guests = drawn_guests(self._newcomers(), known, setup, aside)
        for peer, credential in guests.later.items():
            came_s = (s for s, what, named in self.script if what is World.join and peer in named)
            vouched_s = aside.uniform(min(came_s, default=0.0), self.heal_s)
            self._plan(vouched_s, World.vouch, peer, credential)
        return replace(setup, known=frozenset(known), credentials=guests.at_once)

    def _newcomers(self) -> list[PeerId]:
        """Peers that do not found the run."""
        return self.strangers

    def scenario(self) -> Scenario:
        """Draws the rest of the scenario."""
        random, mix = self.random, self.mix
        founders = tuple(peer for peer in self.peers if peer not in self.strangers)
        calm = CALM_TIMERS
        haste = random.uniform(*mix.haste)
        rules = self._rules()
        setup = participant.Setup(
            founders,
            rules,
            calm
            if haste == 1.0
            else _hurry(calm, haste, mix.hasty_reform and random.random() < 0.5),
            self._with_rooms({peer: self._character(peer) for peer in self.peers}),
        )
        for peer in self.strangers:
            self._plan(random.uniform(0.0, self.heal_s), World.join, peer)
        kinds = [kind for kind in mix.kinds if self.victims]
        for _ in range(random.randint(*mix.faults)):
            kind = random.choices(kinds, [mix.kinds[kind] for kind in kinds])[0]
            getattr(self, f"_{kind}")(random.uniform(0.0, self.heal_s))
        if mix.majority_dies:
            self._majority_dies()
        setup = self._with_guests(setup)
        bad = self._weather()
        is_rough = bool(self.stable)
        return Scenario(
            setup,
            calm,
            Weather(random.uniform(0.0, 0.05), 0.05, random.choice([0.05, 0.3]))
            if is_rough
            else bad,
            dict.fromkeys(self.victims, bad) if is_rough else {},
            tuple(self.stable),
            self.heal_s,
            tuple(sorted(self.script, key=lambda line: line[0])),
        )

    # ------------------------------------------------------------ the swarm

    def _rules(self) -> Rules:
        random = self.random
        every, shared_every, parts = random.choice([1, 1, 2, 3]), 1, NUM_PARTS
        if self.mix.is_sliced:
            every, shared_every = random.choice([2, 3, 4, 5]), random.choice([1, 2, 3, 4])
            parts = max(NUM_PARTS, shared_every * random.choice([1, 2]))
        units = [shared_unit(part) for part in range(parts)]
        units += [expert_unit(expert) for expert in range(self.mix.experts)]
        merging = MergingConfig(
            alpha=0.1 if random.random() < self.mix.merging else 0.0,
            top_k=2,
            decay_steps=random.choice([LOCAL_STEPS * 6, 10**6]),
            interval_steps=LOCAL_STEPS * every * random.choice([1, 1, 2]),
        )
        return Rules(
            run="run",
            num_experts=self.mix.experts,
            owners_per_expert=random.choice(
                [1, 1, 1, 2, 2, self.mix.most_owners or len(self.peers)]
            ),
            merging=merging,
            unit_bytes=dict.fromkeys(units, 100),
            unit_codec=dict.fromkeys(units, "fp32"),
            experts_every=every,
            shared_every=shared_every,
            stagger=self.mix.is_sliced,
            local_steps_at=lambda _: LOCAL_STEPS,
            batch_tokens_at=lambda _: SAMPLES_PER_STEP * SAMPLE_TOKENS,
            sequence_length=SAMPLE_TOKENS,
            planned_peers=len(self.peers),
            is_dealt=True,
            certificates=random.random() < self.mix.certificates,
        )

    def _character(self, peer: PeerId) -> participant.Character:
        random = self.random
        odd = random.random()
        is_slow = peer in self.victims and random.random() < self.mix.slow
        return participant.Character(
            capacity=random.choice([1.0, 1.0, 2.0]),
            local_steps_s=random.choice([8.0, 20.0]) if is_slow else random.uniform(1.5, 4.0),
            sync_s=random.choice(self.mix.sync_s) if is_slow else 0.05,
            reduce_s=random.choice([0.1, 3.0]) if is_slow else 0.1,
            merge_s=random.choice([0.5, 15.0]) if is_slow else 0.3,
            arithmetic=-1 if odd < 0.1 else 1 if odd < 0.25 else 0,
        )

    def _weather(self) -> Weather:
        random, mix = self.random, self.mix
        return Weather(
            loss=random.choice([0.0, random.uniform(0.0, mix.loss)]),
            duplication=random.choice([0.0, 0.1]),
            delay_s=random.choice([0.03, 0.1, 0.4]),
            spike=random.choice([0.0, 0.03, 0.15]),
            spike_s=random.uniform(0.5, mix.spike_s),
        )

    # ------------------------------------------------------------ faults

    def _plan(self, time_s: float, method: Callable[..., None], *arguments: object) -> None:
        if time_s < self.heal_s:
            self.script.append((time_s, method, arguments))

    def _victim(self) -> PeerId:
        return self.random.choice(self.victims)

    def _crash(self, time_s: float) -> None:
        peer = self._victim()
        self._plan(time_s, World.crash, peer)
        self._plan(time_s + self.random.choice([0.1, 4.0, 20.0, 90.0]), World.reboot, peer)

    def _trap(self, time_s: float) -> None:
        mix, random = self.mix, self.random
        name = random.choices(list(mix.traps), list(mix.traps.values()))[0]
        skip = random.randrange(30) if name == "any" else random.choice([0, 0, 0, 1, 2])
        isolated = self._victim() if random.random() < mix.ambush else None
        planned = participant.PlannedCrash(
            participant.Countdown(participant.TRAPS[name], skip),
            random.choice(mix.restart_s),
            isolated,
        )
        self._plan(time_s, World.arm, self._victim(), planned)

    def _pause(self, time_s: float) -> None:
        peer = self._victim()
        self._plan(time_s, World.pause, peer)
        self._plan(time_s + self.random.choice([1.0, 7.0, 25.0, 70.0]), World.resume, peer)

    def _split(self, time_s: float) -> None:
        """Some of the victims are cut off from the rest."""
        away = [peer for peer in self.victims if self.random.random() < 0.5]
        here = [peer for peer in self.peers if peer not in away]
        self._plan(time_s, World.split, (here, away))
        self._plan(time_s + self.random.choice([5.0, 20.0, 80.0]), World.split, ())

    def _shatter(self, time_s: float) -> None:
        """No victim reaches any peer."""
        sides = (tuple(self.stable), *((peer,) for peer in self.victims))
        self._plan(time_s, World.split, sides)
        self._plan(time_s + self.random.choice([20.0, 80.0, 110.0]), World.split, ())

    def _duel(self, time_s: float) -> None:
        """Two peers do not reach each other, so that either may convene against the other."""
        pair = self.random.sample(self.peers, min(2, len(self.peers)))
        if self.stable or len(pair) < 2:
            return
        duration_s = self.random.choice([3.0, 8.0, 20.0])
        for source, destination in (pair, pair[::-1]):
            self._plan(time_s, World.cut, source, destination)
            self._plan(time_s + duration_s, World.uncut, source, destination)

    def _revolt(self, time_s: float) -> None:
        """The convener is cut off from one peer, and the other peers crash when they promise."""
        planned = participant.PlannedCrash(
            participant.TRAPS["promise"], self.random.choice(self.mix.restart_s)
        )
        self._plan(time_s, World.revolt, planned, self.random.choice([8.0, 15.0]))

    def _isolate(self, time_s: float) -> None:
        """One peer reaches no other peer for a short time."""
        victim = self._victim()
        here = tuple(peer for peer in self.peers if peer != victim)
        self._plan(time_s, World.split, (here, (victim,)))
        self._plan(time_s + self.random.choice([1.0, 4.0, 10.0]), World.split, ())

    def _cut(self, time_s: float) -> None:
        victim = self._victim()
        others = [peer for peer in self.peers if peer != victim]
        if not others:
            return
        others = self.random.sample(others, self.random.randint(1, len(others)))
        duration_s = self.random.choice([5.0, 15.0, 60.0])
        outwards = self.random.random() < 0.5
        for other in others:
            link = (victim, other) if outwards else (other, victim)
            self._plan(time_s, World.cut, *link)
            self._plan(time_s + duration_s, World.uncut, *link)

    def _storm(self, time_s: float) -> None:
        if not self.stable:
            self._plan(time_s, World.storm, self._weather())

    def _leave(self, time_s: float) -> None:
        peer = self._victim()
        if peer != self.keeper:
            self._plan(time_s, World.leave, peer)

    def _majority_dies(self) -> None:
        """At least half of the peers die, at about the same time."""
        mortal = [peer for peer in self.peers if peer != self.keeper]
        least = -(-len(self.peers) // 2)
        doomed = self.random.sample(mortal, self.random.randint(least, len(mortal)))
        time_s = self.random.uniform(5.0, self.heal_s)
        together = self.random.random() < 0.5
        for peer in sorted(doomed):
            delay_s = 0.0 if together else self.random.uniform(0.0, 10.0)
            self._plan(min(time_s + delay_s, self.heal_s - 0.1), World.kill, peer)


def _hurry(timers: Timers, factor: float, with_reform: bool) -> Timers:
    return replace(
        timers,
        tick_s=0.5,
        heartbeat_s=timers.heartbeat_s * factor,
        silence_s=timers.silence_s * factor,
        roster_s=timers.roster_s * factor,
        roster_late_s=timers.roster_late_s * factor,
        wordless_s=timers.wordless_s * factor,
        reduce_s=timers.reduce_s * factor,
        vote_s=timers.vote_s * factor,
        attempt_s=timers.attempt_s * factor,
        discover_s=timers.discover_s * factor,
        reform_s=timers.reform_s * max(factor, 0.25) if with_reform else timers.reform_s,
    )
