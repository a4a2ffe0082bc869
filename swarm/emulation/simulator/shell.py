"""What every part of a simulated peer needs of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from swarm.emulation.simulator.disk import Disk
from swarm.protocol.events import Event
from swarm.protocol.manifest import PeerId


class Shell(Protocol):
    """The peer, as its parts see it; each adds what it alone needs."""

    me: PeerId
    disk: Disk

    def tell(self, event: Event) -> None:
        """Hands an event to the machine."""

    def after(self, delay_s: float, method: Callable[..., None], *arguments: object) -> None:
        """Calls the method later, unless the peer crashes first."""

    def now_s(self) -> float:
        """The time."""
