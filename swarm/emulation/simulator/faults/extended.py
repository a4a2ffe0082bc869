"""The extended model: faults beyond the base model's classes; see swarm/emulation/README.md."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from swarm.emulation.simulator.faults.faults import Draw, Mix, Scenario
from swarm.emulation.simulator.faults.world import World
from swarm.emulation.simulator.peers.participant import TRAPS, Character, Loss, PlannedCrash
from swarm.protocol.rounds import Rules
from swarm.protocol.values.manifest import PeerId

STEPS_S = (0.2, 0.4, 1.6, 4.0)
"""Seconds of a local step where rounds last a given time."""
DELTA_BYTES = 30
"""Size of the delta of a unit of 100 bytes."""
STRANGER = "s"
"""Suffix of the new name of a peer that lost its key and comes back."""
JUMPS_S = (-7200.0, -90.0, -3.0, 40.0, 900.0, 86400.0)


@dataclass(frozen=True)
class ExtendedMix(Mix):
    """The ingredients of a class of the extended model."""

    unit_mbytes: tuple[float, float] | None = None
    """Least and most megabytes of a unit. None: transfers take no time."""
    up_mbytes_per_s: tuple[float, ...] = (4.0, 6.0, 20.0)
    down_mbytes_per_s: tuple[float, ...] = (5.0, 20.0)
    local_steps_s: tuple[float, float] | None = None
    """Least and most seconds of local steps, so that rounds last longer than their transfers. None:
    as in the base model."""
    has_adapted_timers: bool = False
    failing_syncs: float = 0.0
    """Chance that a sync fails for good, on peers that may have faults."""
    round_seconds: float | None = None
    """How long local steps take. None: every peer takes the same number of steps."""
    copy_s: tuple[float, ...] = ()
    """How long an owner takes to offer moments. Empty: moments are not modeled."""
    has_deltas: bool = False
    """Whether units move by deltas: experts, a part of the shared tensors, or both."""
    has_overlap: bool = False
    """Whether peers train during a round. Experts and one shared part then have deltas."""

    def drawing(self) -> type[ExtendedDraw]:
        """The class that draws its scenarios."""
        return ExtendedDraw


EXTENDED: dict[str, ExtendedMix] = {
    "F": ExtendedMix(
        window_s=(40.0, 110.0),
        failing_syncs=0.1,
        kinds={
            "lose_disk": 4.0,
            "lose_everything": 2.0,
            "roll_back": 3.0,
            "betrayal": 3.0,
            "crash": 2.0,
            "trap": 3.0,
            "split": 2.0,
            "cut": 1.0,
            "pause": 0.5,
        },
        merging=0.3,
    ),
    "G": ExtendedMix(
        peers=(8, 12),
        strangers=0.15,
        window_s=(30.0, 70.0),
        faults=(4, 16),
        merging=0.3,
    ),
    "H": ExtendedMix(
        peers=(3, 7),
        window_s=(50.0, 120.0),
        kinds={"sleep": 4.0, "skew": 3.0, "mesh": 3.0, "one_way": 3.0, "pause": 2.0, "crash": 1.0},
        merging=0.3,
    ),
    "J": ExtendedMix(
        peers=(2, 6),
        strangers=0.1,
        window_s=(60.0, 150.0),
        kinds={
            "crash": 3.0,
            "trap": 3.0,
            "pause": 1.5,
            "split": 1.5,
            "cut": 2.0,
            "storm": 1.0,
            "die": 1.0,
            "leave": 0.5,
        },
        faults=(2, 10),
        merging=0.2,
        loss=0.1,
        unit_mbytes=(1.1, 7.0),
        local_steps_s=(14.0, 20.0),
        has_adapted_timers=True,
    ),
    "K": ExtendedMix(
        peers=(3, 7),
        strangers=0.4,
        window_s=(50.0, 120.0),
        kinds={"die": 2.0, "leave": 3.0, "crash": 3.0, "pause": 1.0, "cut": 1.0, "split": 1.0},
        loss=0.1,
        merging=0.2,
        copy_s=(0.0, 0.3, 1.0, 3.0, 9.0),
    ),
    "L": ExtendedMix(
        peers=(3, 9),
        strangers=0.2,
        window_s=(60.0, 120.0),
        kinds={
            "lose_disk": 1.0,
            "lose_everything": 1.0,
            "roll_back": 1.0,
            "betrayal": 1.0,
            "sleep": 1.0,
            "skew": 1.0,
            "mesh": 0.5,
            "one_way": 0.5,
            "crash": 1.0,
            "trap": 2.0,
            "pause": 1.0,
            "split": 1.0,
            "leave": 0.5,
        },
        faults=(3, 10),
        loss=0.1,
        merging=0.2,
        unit_mbytes=(1.1, 5.0),
        local_steps_s=(14.0, 20.0),
        has_adapted_timers=True,
        copy_s=(0.0, 1.0, 9.0),
    ),
    "M": ExtendedMix(
        peers=(3, 9),
        minority_only=True,
        strangers=0.0,
        window_s=(90.0, 150.0),
        kinds={"deaf": 4.0, "mute": 2.0, "sleep": 1.0, "crash": 0.5},
        faults=(1, 6),
        slow=0.1,
        merging=0.2,
    ),
    "N": ExtendedMix(
        peers=(2, 7),
        strangers=0.3,
        window_s=(50.0, 130.0),
        kinds={
            "crash": 3.0,
            "trap": 3.0,
            "lose_disk": 0.5,
            "pause": 1.0,
            "split": 3.0,
            "cut": 2.0,
            "die": 0.5,
            "leave": 0.5,
        },
        loss=0.1,
        merging=0.4,
        round_seconds=3.2,
    ),
    "R": ExtendedMix(
        peers=(2, 7),
        strangers=0.2,
        window_s=(50.0, 120.0),
        kinds={
            "crash": 3.0,
            "trap": 4.0,
            "lose_disk": 0.5,
            "roll_back": 0.5,
            "pause": 1.0,
            "split": 2.0,
            "cut": 2.0,
            "storm": 0.5,
            "die": 0.5,
            "leave": 0.5,
        },
        loss=0.15,
        merging=0.3,
        has_deltas=True,
    ),
}


OVERLAPPED: dict[str, ExtendedMix] = {
    "O": replace(EXTENDED["R"], has_overlap=True),
    "U": replace(EXTENDED["R"], has_overlap=True, round_seconds=3.2),
}
"""Classes in which peers train during a round. In U, a round lasts a given time, and paces
differ."""


_LARGE = ExtendedMix(
    strangers=0.1,
    window_s=(15.0, 30.0),
    faults=(1, 4),
    kinds={**Mix().kinds, "die": 4.0},
    loss=0.1,
    most_owners=2,
)
LARGE: dict[str, Mix] = {
    "S": replace(_LARGE, peers=(64, 64), experts=96),
    "T": replace(_LARGE, peers=(256, 256), experts=288, window_s=(5.0, 15.0)),
}
"""Short schedules of many peers. An expert has one or two owners, and a peer owns some experts."""


class ExtendedDraw(Draw):
    """One scenario of the extended model while it is drawn."""

    mix: ExtendedMix

    def __init__(self, mix: ExtendedMix, random: Random) -> None:
        super().__init__(mix, random)
        self.returned: list[PeerId] = []

    def scenario(self) -> Scenario:
        """Draws the rest of the scenario."""
        scenario = super().scenario()
        characters = dict(scenario.setup.characters)
        for peer in self.returned:
            characters[peer] = characters[peer.removesuffix(STRANGER)]
        setup = replace(
            scenario.setup,
            characters=characters,
            has_slow_links=self.mix.unit_mbytes is not None,
            has_adapted_timers=self.mix.has_adapted_timers,
            copy_s=self.random.choice(self.mix.copy_s) if self.mix.copy_s else None,
        )
        return replace(scenario, setup=setup)

    def _newcomers(self) -> list[PeerId]:
        return [*self.strangers, *self.returned]

    def _rules(self) -> Rules:
        rules = replace(super()._rules(), round_seconds=self.mix.round_seconds)
        if self.mix.has_deltas:
            rules = self._with_deltas(rules)
        if self.mix.unit_mbytes is None:
            return rules
        sizes = {
            unit: int(1e6 * self.random.uniform(*self.mix.unit_mbytes)) for unit in rules.unit_bytes
        }
        return replace(rules, unit_bytes=sizes)

    def _with_deltas(self, rules: Rules) -> Rules:
        """Rules with deltas. One shared part has none, like norms and routers."""
        moved = self.random.choice(["experts", "shared", "both", "both"])
        moved = "both" if self.mix.has_overlap else moved
        units = [*rules.expert_units] if moved != "shared" else []
        units += [rules.shared_units[-1]] if moved != "experts" else []
        return replace(
            rules,
            unit_coding=dict.fromkeys(units, "b2"),
            delta_bytes=dict.fromkeys(units, DELTA_BYTES),
            overlaps=self.mix.has_overlap,
        )

    def _character(self, peer: PeerId) -> Character:
        character = replace(super()._character(peer), clock_s=self.random.uniform(0.0, 1e6))
        if self.mix.failing_syncs and peer in self.victims:
            character = replace(character, failing_syncs=self.mix.failing_syncs)
        if self.mix.round_seconds is not None:
            character = replace(character, step_s=self.random.choice(STEPS_S))
        if self.mix.unit_mbytes is None:
            return character
        if self.mix.local_steps_s is not None:
            seconds = self.random.uniform(*self.mix.local_steps_s)
            character = replace(character, local_steps_s=seconds)
        return replace(
            character,
            up_bytes_per_s=1e6 * self.random.choice(self.mix.up_mbytes_per_s),
            down_bytes_per_s=1e6 * self.random.choice(self.mix.down_mbytes_per_s),
        )

    # ------------------------------------------------------------ disks

    def _mortal(self) -> PeerId | None:
        """A peer whose disk may be lost, since one disk has to survive."""
        mortal = [peer for peer in self.victims if peer != self.keeper]
        return self.random.choice(mortal) if mortal else None

    def _lose_disk(self, time_s: float) -> None:
        peer = self._mortal()
        if peer is not None:
            self._plan(time_s, World.lose_disk, peer)
            self._plan(time_s + self.random.choice([0.5, 4.0, 15.0]), World.reboot, peer)

    def _lose_everything(self, time_s: float) -> None:
        peer = self._mortal()
        if peer is None or peer in self.strangers or peer + STRANGER in self.returned:
            return
        self.returned.append(peer + STRANGER)
        after_s = self.random.choice([0.5, 4.0, 15.0])
        self._plan(time_s, World.lose_everything, peer, peer + STRANGER, after_s)

    def _die(self, time_s: float) -> None:
        peer = self._mortal()
        if peer is not None:
            self._plan(time_s, World.kill, peer)

    def _roll_back(self, time_s: float) -> None:
        peer = self._victim()
        self._plan(time_s, World.roll_back, peer)
        self._plan(time_s + self.random.choice([0.1, 2.0, 10.0]), World.reboot, peer)

    def _betrayal(self, time_s: float) -> None:
        """A peer that has just voted or promised crashes, and its vote is lost."""
        random = self.random
        trap = TRAPS[random.choice(["vote", "vote_written", "promise", "commit"])]
        peer = self._mortal()
        if peer is not None:
            loss = random.choice([Loss.RECORD, Loss.RECORD, Loss.DISK])
            isolated = self._victim() if random.random() < 0.5 else None
            restart_s = random.choice(self.mix.restart_s)
            self._plan(time_s, World.arm, peer, PlannedCrash(trap, restart_s, isolated, loss))

    def _betrayed_revolt(self, time_s: float) -> None:
        """Two conveners are cut off from each other, and a vote that one of them gets is lost."""
        planned = PlannedCrash(
            TRAPS["vote"], self.random.choice(self.mix.restart_s), None, Loss.RECORD
        )
        self._plan(time_s, World.revolt, planned, self.random.choice([8.0, 15.0]))

    # ------------------------------------------------------------ clocks and links

    def _sleep(self, time_s: float) -> None:
        peer, asleep_s = self._victim(), self.random.choice([5.0, 20.0, 40.0, 90.0])
        asleep_s = min(asleep_s, self.heal_s - time_s - 0.01)
        if asleep_s > 0:
            self._plan(time_s, World.sleep, peer)
            self._plan(time_s + asleep_s, World.wake, peer, asleep_s)

    def _skew(self, time_s: float) -> None:
        self._plan(time_s, World.skew, self._victim(), self.random.choice(JUMPS_S))

    def _mesh(self, time_s: float) -> None:
        """Each direction of each link is cut with some chance."""
        share, duration_s = self.random.choice([0.2, 0.4, 0.6]), self.random.choice([10.0, 40.0])
        for source in self.peers:
            for other in self.peers:
                if source != other and self.random.random() < share:
                    self._plan(time_s, World.cut, source, other)
                    self._plan(time_s + duration_s, World.uncut, source, other)

    def _deaf(self, time_s: float) -> None:
        """A peer hears nobody, but is heard."""
        self._cut_off(time_s, self._victim(), outwards=False)

    def _mute(self, time_s: float) -> None:
        """A peer hears everybody, but nobody hears it."""
        self._cut_off(time_s, self._victim(), outwards=True)

    def _cut_off(self, time_s: float, victim: PeerId, *, outwards: bool) -> None:
        duration_s = self.random.choice([20.0, 60.0, 140.0])
        for other in self.peers:
            if other != victim:
                link = (victim, other) if outwards else (other, victim)
                self._plan(time_s, World.cut, *link)
                self._plan(time_s + duration_s, World.uncut, *link)

    def _one_way(self, time_s: float) -> None:
        """Messages between two halves of the peers pass in one direction only."""
        here = [peer for peer in self.peers if self.random.random() < 0.5]
        duration_s = self.random.choice([20.0, 60.0, 110.0])
        for source in here:
            for other in self.peers:
                if other not in here:
                    self._plan(time_s, World.cut, source, other)
                    self._plan(time_s + duration_s, World.uncut, source, other)
