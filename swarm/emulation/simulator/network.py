"""Links between simulated peers: loss, duplication, delay, partitions and one-way cuts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from random import Random

from swarm.protocol.manifest import PeerId


@dataclass(frozen=True)
class Weather:
    """How bad the links are."""

    loss: float = 0.0
    """Share of messages that are lost."""
    duplication: float = 0.0
    """Share of the others that arrive twice."""
    delay_s: float = 0.1
    """Usual one-way delay; each message's is drawn from half to twice of it."""
    spike: float = 0.0
    """Share of messages with an unusual delay."""
    spike_s: float = 0.0
    """Largest unusual delay."""


CALM = Weather()


@dataclass
class Network:
    """The state of all links."""

    weather: Weather = CALM
    rough: Mapping[PeerId, Weather] = field(default_factory=dict)
    """Peers all of whose links, in both directions, have a weather of their own."""
    side: dict[PeerId, int] = field(default_factory=dict)
    """Side of the partition that each peer is on; peers not named are on side 0."""
    cuts: set[tuple[PeerId, PeerId]] = field(default_factory=set)
    """(source, destination) pairs between which nothing passes."""

    def split(self, sides: Collection[Collection[PeerId]]) -> None:
        """Separates these groups of peers from each other."""
        self.side = {peer: index for index, side in enumerate(sides) for peer in side}

    def mend(self) -> None:
        """Removes every partition, cut and bad weather."""
        self.side, self.rough, self.weather = {}, {}, CALM
        self.cuts.clear()

    def is_open(self, source: PeerId, destination: PeerId) -> bool:
        """Whether anything gets from one peer to another at all."""
        if (source, destination) in self.cuts:
            return False
        return not self.side or self.side.get(source, 0) == self.side.get(destination, 0)

    def delays(self, source: PeerId, destination: PeerId, random: Random) -> list[float]:
        """When a message posted now arrives, once or twice; empty if it is lost."""
        if not self.is_open(source, destination):
            return []
        weather = self.weather
        if self.rough:
            weather = self.rough.get(source) or self.rough.get(destination) or weather
        if weather.loss and random.random() < weather.loss:
            return []
        copies = 2 if weather.duplication and random.random() < weather.duplication else 1
        return [self._delay(weather, random) for _ in range(copies)]

    @staticmethod
    def _delay(weather: Weather, random: Random) -> float:
        if weather.spike and random.random() < weather.spike:
            return random.random() * weather.spike_s
        return weather.delay_s * (0.5 + 1.5 * random.random())
