"""Places at which a simulated peer is made to crash: right after one of its effects."""

from __future__ import annotations

from collections.abc import Callable

from swarm.emulation.simulator.taking_part import Trap
from swarm.protocol.events import Apply, Effect, Persist, Send
from swarm.protocol.manifest import Kind
from swarm.protocol.messages import Accept, Commit, Prepare, Propose, Ready


def _sends(kind: type) -> Callable[[Effect], bool]:
    return lambda effect: isinstance(effect, Send) and isinstance(effect.message, kind)


def _promises(effect: Effect) -> bool:
    if not isinstance(effect, Send) or not isinstance(effect.message, Ready):
        return False
    return effect.message.ballot.attempt > 0


TRAPS: dict[str, Trap] = {
    "any": lambda _: True,
    "vote": _sends(Accept),
    "promise": _promises,
    "write": lambda effect: isinstance(effect, Persist),
    "vote_written": lambda effect: (
        isinstance(effect, Persist) and effect.record.accepted is not None
    ),
    "apply": lambda effect: isinstance(effect, Apply),
    "merge_voted": lambda effect: (
        isinstance(effect, Persist)
        and effect.record.accepted is not None
        and effect.record.accepted.manifest.kind is Kind.MERGE
    ),
    "campaign": _sends(Prepare),
    "propose": _sends(Propose),
    "commit": _sends(Commit),
}
"""Effects right after which a peer can be made to crash."""


class Countdown:
    """A trap that lets some effects pass."""

    def __init__(self, trap: Trap, skip: int) -> None:
        self._trap = trap
        self._left = skip

    def __call__(self, effect: Effect) -> bool:
        """Whether this effect is the one."""
        if not self._trap(effect):
            return False
        self._left -= 1
        return self._left < 0
