"""The extended model: faults and conditions beyond those of classes A to E.

| class | what is tried |
|---|---|
| F | disks are lost or rolled back |
| G | 8 to 12 peers, anything on anybody |
| H | machines sleep, wall clocks jump, most links work in one direction only |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

from swarm.emulation.simulator import faults
from swarm.emulation.simulator.cast import Character
from swarm.emulation.simulator.faults import CLASSES, Draw, Mix, Scenario
from swarm.emulation.simulator.world import World
from swarm.protocol.manifest import PeerId

STRANGER = "s"
"""Ends the name under which a peer comes back that lost its key."""
JUMPS_S = (-7200.0, -90.0, -3.0, 40.0, 900.0, 86400.0)


@dataclass(frozen=True)
class ExtendedMix(Mix):
    """What a class of the extended model is made of."""


EXTENDED: dict[str, Mix] = {
    "F": ExtendedMix(
        window_s=(40.0, 110.0),
        kinds={
            "lose_disk": 4.0,
            "lose_everything": 2.0,
            "roll_back": 4.0,
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
}
ALL_CLASSES: Mapping[str, Mix] = CLASSES | EXTENDED


def draw(mix: Mix, random: Random) -> Scenario:
    """The scenario that a random generator stands for."""
    if isinstance(mix, ExtendedMix):
        return _ExtendedDraw(mix, random).scenario()
    return faults.draw(mix, random)


class _ExtendedDraw(Draw):
    """One scenario of the extended model while it is drawn."""

    mix: ExtendedMix

    def __init__(self, mix: ExtendedMix, random: Random) -> None:
        super().__init__(mix, random)
        self.returned: list[PeerId] = []

    def scenario(self) -> Scenario:
        scenario = super().scenario()
        characters = dict(scenario.setup.characters)
        for peer in self.returned:
            characters[peer] = characters[peer.removesuffix(STRANGER)]
        return replace(scenario, setup=replace(scenario.setup, characters=characters))

    def _character(self, peer: PeerId) -> Character:
        return replace(super()._character(peer), clock_s=self.random.uniform(0.0, 1e6))

    # ------------------------------------------------------------ disks

    def _mortal(self) -> PeerId | None:
        """A peer whose disk may be lost: one disk has to live."""
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

    def _roll_back(self, time_s: float) -> None:
        peer = self._victim()
        self._plan(time_s, World.roll_back, peer)
        self._plan(time_s + self.random.choice([0.1, 2.0, 10.0]), World.reboot, peer)

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
        """Every direction of every link is cut or not, by chance."""
        share, duration_s = self.random.choice([0.2, 0.4, 0.6]), self.random.choice([10.0, 40.0])
        for source in self.peers:
            for other in self.peers:
                if source != other and self.random.random() < share:
                    self._plan(time_s, World.cut, source, other)
                    self._plan(time_s + duration_s, World.uncut, source, other)

    def _one_way(self, time_s: float) -> None:
        """One half hears the other, which does not hear it."""
        here = [peer for peer in self.peers if self.random.random() < 0.5]
        duration_s = self.random.choice([20.0, 60.0, 110.0])
        for source in here:
            for other in self.peers:
                if other not in here:
                    self._plan(time_s, World.cut, source, other)
                    self._plan(time_s + duration_s, World.uncut, source, other)
