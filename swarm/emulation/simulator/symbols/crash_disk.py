"""The disk of a simulated peer, and the interface of the peer that all its parts use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, Protocol

from swarm.emulation.simulator.symbols.values import Tag
from swarm.protocol.chain.trust import Chain, with_reforms
from swarm.protocol.messages.events import Event, Record
from swarm.protocol.messages.messages import Link, OfferedUnit
from swarm.protocol.training import SavedWork
from swarm.protocol.values.manifest import Digest, PeerId, Unit
from swarm.protocol.values.work import Stretches

SURVIVAL = 0.3
"""Share of the unsynced blobs that survive a crash by chance."""


class Progress(NamedTuple):
    """Local progress on one expert: its present value, and the agreed value before training."""

    base: Digest
    value: Digest


class Live(NamedTuple):
    """A trained value: the agreed value that it is based on, and its tags beyond this value."""

    base: Digest
    extra: Mapping[Tag, int]


@dataclass(frozen=True)
class PrivateState:
    """A peer's private state [P6], replaced atomically."""

    work: SavedWork
    progress: Mapping[int, Progress]
    live: Mapping[Unit, Live] = field(default_factory=dict)
    """Values of units that move by deltas."""
    named: Mapping[Unit, OfferedUnit] = field(default_factory=dict)
    """Offers of units that move by deltas."""
    started: Mapping[Unit, Digest] = field(default_factory=dict)
    """See `Model.started`."""
    read: Stretches = ()
    """Samples on which the offer was trained."""
    missed: frozenset[Unit] = frozenset()
    """See `trained_symbols.Past`."""


class Disk:
    """Record, private state and blobs. Blobs are readable when written, durable when synced."""

    def __init__(
        self, record: Record, durable: Iterable[Digest], chain: Iterable[Link] = ()
    ) -> None:
        self.record = record
        self.tip_s = 0.0
        """When the record got its tip."""
        self.came_from: Digest | None = None
        """The tip before the present one."""
        self.links = tuple(chain) or Chain.of(record).links
        """The chain of heads up to the tip."""
        self.earlier: Record | None = None
        """The previous record, which is read when the newest one is damaged."""
        self.is_lost = False
        """Whether record, blobs and private state are lost."""
        self.private: PrivateState | None = None
        self.offer: SavedWork | None = None
        """The offer made after the private state was written."""
        self.durable = set(durable)
        self.volatile: set[Digest] = set()

    def __contains__(self, digest: Digest) -> bool:
        return digest in self.durable or digest in self.volatile

    def write(self, digest: Digest) -> None:
        """Makes a blob readable."""
        if digest not in self.durable:
            self.volatile.add(digest)

    def sync(self, digests: Iterable[Digest]) -> None:
        """Makes the blobs with these digests durable, except unreadable ones."""
        for digest in digests:
            if digest in self.volatile:
                self.volatile.remove(digest)
                self.durable.add(digest)

    def keep(self, digests: Collection[Digest]) -> None:
        """Deletes every other blob."""
        self.durable.intersection_update(digests)
        self.volatile.intersection_update(digests)

    def lose(self) -> None:
        """Loses everything."""
        self.is_lost = True
        self.private = self.earlier = self.offer = None
        self.durable.clear()
        self.volatile.clear()

    def rewrite(self, links: tuple[Link, ...]) -> None:
        """Replaces the chain of heads."""
        self.links = with_reforms(links, self.links)

    def crash(self, random: Random) -> None:
        """Loses most of what was not synced."""
        self.volatile = {digest for digest in sorted(self.volatile) if random.random() < SURVIVAL}

    def readable(self) -> list[Digest]:
        """All blobs that a restarted peer finds."""
        return sorted(self.durable | self.volatile)


class Shell(Protocol):
    """The peer, as its parts see it. Each part extends this protocol by its own needs."""

    me: PeerId
    disk: Disk

    def tell(self, event: Event) -> None:
        """Hands an event to the machine."""

    def after(self, delay_s: float, method: Callable[..., None], *arguments: object) -> None:
        """Calls the method later, unless the peer crashes first."""

    def now_s(self) -> float:
        """The time."""
