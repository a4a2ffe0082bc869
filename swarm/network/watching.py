"""What may be watched of a peer's rounds while they run, and delayed: drills do both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from swarm.network.record_file import RecordFile
from swarm.protocol.events import Effect, Event
from swarm.protocol.rounds import RoundMachine

CarryOut = Callable[[Effect], Awaitable[None]]


class RoundObserver:
    """Told by the driver of rounds what it does; a subclass overrides what it wants to hear.

    The driver waits for each method, so whoever blocks in one holds the peer up.
    """

    def on_rounds(self, machine: RoundMachine, record_file: RecordFile) -> None:
        """Rounds begin now, on this machine, whose record is in this file."""

    def before_event(self, event: Event) -> None:
        """The machine handles an event next; in the node's loop."""

    async def carry_out(self, effect: Effect, act: CarryOut) -> None:
        """Carries out an effect by calling `act`, in the node's loop; it may wait first.

        `act` carries out any effect, so one that was held back may be given to it later.
        """
        await act(effect)

    def before_offer(self) -> None:
        """The private state is durable, and nothing was offered; in the trainer's thread."""

    def before_leave(self) -> None:
        """This peer was asked to leave, and nobody knows of it; in the trainer's thread."""


UNWATCHED = RoundObserver()
