"""Keys that join an open run, work or not, and vanish: class V [R7]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from swarm.emulation.simulator.faults import Draw, Mix, Scenario
from swarm.emulation.simulator.network import Weather
from swarm.emulation.simulator.taking_part import Character
from swarm.emulation.simulator.world import World

MANY, FEW = 8, 3
"""Honest voters, vouched for by the founder. Of three, one more voter may be a key."""
GAP_S = 4 * 9.0
"""Four rounds of the many: up to 4 s of local steps, 5 s for the rest with what is lost. Keys that
vanish one after another, each just when a round needs it, have made one take 28 s."""
FAIR = Weather(loss=0.0, duplication=0.0, delay_s=0.05)
"""What is lost is the matter of other classes; here a gap is what keys cause."""
ONE_NETWORK = 0.3
"""Chance that all keys are at addresses of one network; else these are not known."""
NETWORK = "192.0.2.0/24"
IDLE_S = 1e6
"""Local steps of a key that trains nothing."""


@dataclass(frozen=True)
class KeysMix(Mix):
    """What class V is made of."""

    keys: tuple[int, int] = (4, 50)

    def drawing(self) -> type[Draw]:
        """What draws its scenarios."""
        return KeysDraw


KEYS: dict[str, Mix] = {
    "V": KeysMix(
        peers=(MANY, MANY),
        experts=8,
        most_owners=2,
        strangers=0.0,
        faults=(0, 0),
        window_s=(70.0, 130.0),
        merging=0.2,
    )
}


class KeysDraw(Draw):
    """One scenario of keys against honest voters."""

    mix: KeysMix

    def __init__(self, mix: KeysMix, random: Random) -> None:
        super().__init__(mix, random)
        if random.random() < 0.3:
            self.peers = self.peers[:FEW]
        self.stable, self.victims, self.strangers = list(self.peers), [], []

    def scenario(self) -> Scenario:
        """Adds the keys, which come within a second and vanish one by one or at once."""
        random = self.random
        scenario = super().scenario()
        keys = [f"k{index:02}" for index in range(random.randint(*self.mix.keys))]
        came_s = random.uniform(5.0, 20.0)
        gone_s = random.uniform(came_s + 1.0, self.heal_s) if random.random() < 0.6 else None
        script = []
        for key in keys:
            end_s = gone_s or random.uniform(came_s + 1.0, self.heal_s)
            script.append((came_s + random.random(), World.join, (key,)))
            script.append((end_s, World.kill, (key,)))
        characters = {**scenario.setup.characters, **{key: self._key() for key in keys}}
        if Random(scenario.heal_s).random() < ONE_NETWORK:  # aside: a seed stands for what it did
            characters |= {key: replace(characters[key], network=NETWORK) for key in keys}
        return replace(
            scenario,
            setup=replace(scenario.setup, characters=characters),
            weather=FAIR,
            rough={},
            script=tuple(sorted((*scenario.script, *script), key=lambda line: line[0])),
            progress_s=GAP_S,
        )

    def _key(self) -> Character:
        works = self.random.random() < 0.6
        return Character(local_steps_s=self.random.uniform(1.0, 4.0) if works else IDLE_S)
