"""What each kind of fault does to the processes and links of a local swarm, and its end."""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from swarm.emulation.controls import ControlFolder
from swarm.emulation.fault_plan import (
    Cut,
    Fault,
    Heal,
    Join,
    Kill,
    Leave,
    Partition,
    Pause,
    Restart,
    Seconds,
    Skew,
    Slow,
    drawn_s,
)
from swarm.emulation.fault_verdict import Happened
from swarm.emulation.local_peer import LocalPeer
from swarm.emulation.local_swarm import LocalSwarm
from swarm.errors import SwarmError

RETRY_S = 1.0
"""A peer that is to be started again but still leaves is looked at so often."""
OLD_ADDRESS_SHARE = 0.25
"""So many restarts are given the founder's first address, whether it lives or not."""


@dataclass
class FaultActions:
    """Carries faults out, and takes them back when their time is over.

    Attributes:
        swarm: whom they meet.
        folder: through which peers are told.
        draw: of durations, other ends and addresses.
        happened: faults carried out so far.
        away: peer that is away -> when it was brought back, seconds since 1970; None before.
        gone: peers that left, were asked to, or are dead for good.
    """

    swarm: LocalSwarm
    folder: ControlFolder
    draw: random.Random
    happened: list[Happened] = field(default_factory=list)
    away: dict[int, float | None] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    """Heap of (monotonic time, order, what to do)."""
    _order: itertools.count[int] = field(default_factory=itertools.count)

    # ------------------------------------------------ time

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Does something at a moment of the monotonic clock."""
        heapq.heappush(self._due, (at_s, next(self._order), action))

    def do_what_is_due(self) -> None:
        """Call it several times a second."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()

    def _later(self, span: Seconds | None, position: int, undo: Callable[[], None]) -> None:
        """Takes a fault back after its time, if it has one."""
        if span is None:
            return

        def take_back() -> None:
            self.happened[position] = replace(self.happened[position], until_s=time.time())
            undo()

        self.at(time.monotonic() + drawn_s(span, self.draw), take_back)

    def _away_until(
        self, peer: LocalPeer, span: Seconds | None, position: int, undo: Callable[[], None]
    ) -> None:
        if span is None:
            self.gone.add(peer.index)
            return
        self.away[peer.index] = None

        def return_it() -> None:
            # An emptied entry means that it went away for good meanwhile.
            if peer.index in self.away:
                self.away[peer.index] = time.time()
            undo()

        self._later(span, position, return_it)

    # ------------------------------------------------ faults

    def carry_out(self, fault: Fault, peer: LocalPeer | None) -> Happened:
        """Does it; returns what is noted of it.

        Args:
            fault: of a plan.
            peer: whom it meets; None for the kinds that meet nobody in particular.
        """
        wanted = getattr(fault, "peer", None)
        noted = Happened(
            fault.kind,
            self._met(fault, peer),
            time.time(),
            role=wanted if isinstance(wanted, str) and wanted not in ("random", "any") else None,
            phase=fault.at.phase,
        )
        self.happened.append(noted)
        position = len(self.happened) - 1
        if isinstance(fault, (Partition, Heal, Join)):
            self._act_on_all(fault, position)
        elif peer is not None:
            self._act_on_one(fault, peer, position)
        return noted

    def _met(self, fault: Fault, peer: LocalPeer | None) -> tuple[int, ...]:
        if isinstance(fault, Partition):
            return tuple(peer for group in fault.groups for peer in group)
        if isinstance(fault, Join):
            return (len(self.swarm.peers),)
        if peer is None:
            return ()
        if isinstance(fault, Cut) and fault.to is not None:
            others = [other.index for other in self.swarm.peers if other is not peer]
            return (peer.index, fault.to if isinstance(fault.to, int) else self.draw.choice(others))
        return (peer.index,)

    def _act_on_one(self, fault: Fault, peer: LocalPeer, position: int) -> None:
        tell, index = self.folder.tell, peer.index
        if isinstance(fault, Kill):
            peer.kill()
            self._away_until(peer, fault.for_s, position, lambda: self.start_again(peer))
        elif isinstance(fault, Pause):
            peer.pause()
            self._away_until(peer, fault.for_s, position, peer.resume)
        elif isinstance(fault, Restart):
            peer.kill()
            self.away[index] = time.time()
            self.start_again(peer)
        elif isinstance(fault, Leave):
            self._leave(peer, fault.for_s, position)
        elif isinstance(fault, Slow):
            tell(index, slow=fault.factor)
            self._later(fault.for_s, position, lambda: tell(index, slow=1.0))
        elif isinstance(fault, Skew):
            tell(index, skew_s=fault.by_s)
            self._later(fault.for_s, position, lambda: tell(index, skew_s=0.0))
        elif isinstance(fault, Cut):
            self._cut(fault, peer, position)

    def _leave(self, peer: LocalPeer, span: Seconds | None, position: int) -> None:
        self.gone.add(peer.index)
        self.away.pop(peer.index, None)
        peer.send(signal.SIGINT)

        def return_it() -> None:
            if peer.index not in self.gone:  # it was killed on its way out, and started again
                return
            if peer.alive:
                self.at(time.monotonic() + RETRY_S, return_it)
                return
            self.away[peer.index] = time.time()
            self.start_again(peer)

        self._later(span, position, return_it)

    def _act_on_all(self, fault: Partition | Heal | Join, position: int) -> None:
        if isinstance(fault, Join):
            self.away[len(self.swarm.peers)] = time.time()
            self.swarm.add(["--initial-peers", self._address()])
            return
        links = self.swarm.links
        assert links is not None, "a plan that cuts links is refused without them"
        if isinstance(fault, Heal):
            links.heal()
            return
        links.partition(fault.groups)
        self._later(fault.for_s, position, links.heal)

    def _cut(self, fault: Cut, peer: LocalPeer, position: int) -> None:
        links, index = self.swarm.links, peer.index
        assert links is not None, "a plan that cuts links is refused without them"
        ends = list(self.happened[position].peers[1:])
        ends = ends or [p.index for p in self.swarm.peers if p.index != index]
        pairs = [(index, end) for end in ends]
        pairs += [] if fault.one_way else [(end, index) for end in ends]
        links.cut(pairs)
        if fault.to is None and not fault.one_way:
            self._away_until(peer, fault.for_s, position, lambda: links.mend(pairs))
        else:
            self._later(fault.for_s, position, lambda: links.mend(pairs))

    # ------------------------------------------------ peers

    def start_again(self, peer: LocalPeer) -> None:
        """Starts a peer on its state, through an address that may be dead."""
        if peer.alive:
            return
        self.gone.discard(peer.index)
        self.swarm.restart(peer, ["--initial-peers", self._address()])

    def _address(self) -> str:
        """Of a living peer or, now and then, the founder's, whether it lives or not."""
        there = [p for p in self.swarm.peers if p.alive and p.index not in self.gone]
        known = [p.last_address for p in there if p.last_address]
        first = self.swarm.peers[0].last_address
        if first and (not known or self.draw.random() < OLD_ADDRESS_SHARE):
            return first
        if not known:
            raise SwarmError("no peer has printed its address")
        return self.draw.choice(known)
