"""Carries a fault plan out on a local swarm: a thin shell around `fault_plan` and the processes."""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from swarm.emulation.controls import FOLDER_VARIABLE, ControlFolder, Controls, Trap
from swarm.emulation.fault_plan import (
    Cut,
    Fault,
    FaultPlan,
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
    moments,
)
from swarm.emulation.fault_verdict import Happened
from swarm.emulation.local_swarm import LocalPeer, LocalSwarm, applied
from swarm.errors import ConfigError, SwarmError

PROGRAM = "peers.emulated"
"""What the peers of a swarm under faults run."""
RETRY_S = 1.0
"""A random fault that finds too many peers away is tried again so soon."""
POLL_S = 0.1
OLD_ADDRESS_SHARE = 0.25
"""So many restarts are given the founder's first address, whether it lives or not."""


@dataclass(frozen=True)
class Bounds:
    """What counts as a hang, in seconds."""

    manifest_s: float = 180.0
    """Longest wait for the next manifest, whatever happened."""
    return_s: float = 300.0
    """Longest wait until a peer that is there again contributes."""


@dataclass
class FaultRunner:
    """Carries out what a plan says, when it says so; see `poll`.

    Attributes:
        swarm: its peers run `PROGRAM`; not yet started.
        plan: what goes wrong.
        say: told what happens.
        bounds: what counts as a hang.
        happened: faults carried out so far.
        hangs: what took too long.
        ended: peers that ended on their own.
    """

    swarm: LocalSwarm
    plan: FaultPlan
    say: Callable[[str], None] = lambda _: None
    bounds: Bounds = Bounds()
    happened: list[Happened] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    """Heap of (monotonic time, order, what to do)."""
    _by_round: list[tuple[int, int]] = field(default_factory=list)
    """(round, number of the fault) of those that wait for a round to begin."""
    _trapped: dict[str, int] = field(default_factory=dict)
    """Name of a trap that waits -> number of its fault."""
    _away: dict[int, float | None] = field(default_factory=dict)
    """Peer that is away -> when it was brought back, seconds since 1970; None while it is not."""
    _gone: set[int] = field(default_factory=set)
    """Peers that left for good or were asked to."""
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _seen: tuple[int, float] = (-1, 0.0)
    """Greatest height anywhere, and when it was first seen."""
    _stopped: bool = False

    def __post_init__(self) -> None:
        """Checks plan and swarm against each other.

        Raises:
            ConfigError: the plan names a peer that does not exist, or cuts links that it may not.
        """
        self.folder = ControlFolder(self.swarm.folder / "emulation")
        self.draw = random.Random(self.plan.seed)
        joins = sum(isinstance(fault, Join) for fault in self.plan.fault)
        for number, fault in enumerate(self.plan.fault):
            for peer in _named(fault):
                if peer >= self.swarm.num_peers + joins:
                    raise ConfigError(
                        f"fault[{number}]: there is no peer {peer}; "
                        f"the swarm has 0 to {self.swarm.num_peers + joins - 1}"
                    )
        if self.plan.needs_links and self.swarm.links is None:
            raise ConfigError("the plan cuts links, which needs --link", hint="as --link lan")

    # ------------------------------------------------ what a program calls

    def prepare(self) -> None:
        """Makes the swarm's peers ones that obey; call it before the swarm starts."""
        self._seen = (-1, time.monotonic())
        self.folder.create()
        self.folder.tell_all(Controls(step_s=self.plan.step_s))
        self.swarm.program = PROGRAM
        variable = {FOLDER_VARIABLE: str(self.folder.path)}
        self.swarm.environment = {**self.swarm.environment, **variable}

    def begin(self, run_s: float = 30 * 86400.0) -> None:
        """Starts the clock of the plan; call it when the swarm has started.

        Args:
            run_s: no timed fault later than this.
        """
        now_s = time.monotonic()
        for number, fault in enumerate(self.plan.fault):
            if fault.at.phase:
                self._arm(number, fault)
            elif fault.at.round is not None:
                self._by_round.append((fault.at.round, number))
            # Each fault has a generator of its own: one more line in a plan moves no other.
            draw = random.Random(f"{self.plan.seed}/{number}")
            for after_s in moments(fault.at, draw, min(run_s, 30 * 86400.0)):
                self._at(now_s + after_s, partial(self._carry_out, fault))

    def poll(self, _: LocalSwarm | None = None) -> None:
        """Does what is due; call it several times a second."""
        self._note_returns()
        for name, number in list(self._trapped.items()):
            self._look_into(name, self.plan.fault[number])
        began = self._round() + 1
        for due in [entry for entry in self._by_round if entry[0] <= began]:
            self._by_round.remove(due)
            self._carry_out(self.plan.fault[due[1]])
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()

    def run(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Polls until a condition holds; False after a hang or when a peer ended on its own."""
        end_s = time.monotonic() + limit_s
        while not done():
            self.poll()
            self._look_for_trouble()
            if time.monotonic() > end_s:
                self.hangs.append(f"not done within {limit_s:.0f} s")
            if self.hangs or self.ended:
                self.say(" ".join([*self.hangs, *self.ended]))
                return False
            time.sleep(POLL_S)
        return True

    def stop_faults(self) -> None:
        """No new faults; those under way are still taken back when their time comes."""
        self._stopped = True
        for name in self._trapped:
            self.folder.disarm(name)
        self._trapped, self._by_round = {}, []

    def all_back(self) -> bool:
        """Whether everybody who is to come back contributes again."""
        return not self._away

    # ------------------------------------------------ when

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), action))

    def _arm(self, number: int, fault: Fault) -> None:
        assert fault.at.phase and fault.at.round
        wanted = getattr(fault, "peer", None)
        peer = wanted if isinstance(wanted, int) else None
        if wanted == "random":
            peer = self.draw.randrange(self.swarm.num_peers)
        role = wanted if isinstance(wanted, str) and wanted != "random" else None
        name = f"fault-{number:04}"
        self._trapped[name] = number
        self.folder.arm(Trap(name, fault.at.phase, fault.at.round, peer, role))

    def _look_into(self, name: str, fault: Fault) -> None:
        caught = self.folder.caught(name)
        if caught is None or not self.swarm.peers[caught.peer].stands_still:
            return
        del self._trapped[name]
        if not isinstance(fault, (Kill, Pause)):
            self.swarm.peers[caught.peer].resume()
        self._carry_out(fault, caught.peer)

    def _note_returns(self) -> None:
        for peer, back_s in list(self._away.items()):
            if back_s is None:
                continue
            events = applied(self.swarm.peers[peer].events(), "quorum")
            if any(event["counted"] and event["time"] > back_s for event in events):
                del self._away[peer]
            elif time.time() - back_s > self.bounds.return_s:
                self.hangs.append(f"peer-{peer} is not back after {self.bounds.return_s:.0f} s")

    def _look_for_trouble(self) -> None:
        now_s, height = time.monotonic(), self._height()
        if height > self._seen[0]:
            self._seen = (height, now_s)
        late_s = now_s - self._seen[1]
        if late_s > self.bounds.manifest_s:
            self.hangs.append(f"no manifest for {late_s:.0f} s after height {height}")
        for peer in self.swarm.peers:
            code = peer.exit_code
            if code is not None and code >= 0 and peer.index not in self._gone:
                tail = " ".join(peer.output()[-300:].split())
                self.ended.append(f"peer-{peer.index}, status {code}: {tail}")

    def _height(self) -> int:
        chains = (applied(peer.events()) for peer in self.swarm.peers)
        return max((chain[-1]["height"] for chain in chains if chain), default=-1)

    def _round(self) -> int:
        chains = (applied(peer.events()) for peer in self.swarm.peers)
        return max((chain[-1]["round"] for chain in chains if chain), default=0)

    # ------------------------------------------------ what

    def _carry_out(self, fault: Fault, caught: int | None = None) -> None:
        if self._stopped:
            return
        peer = self._victim(fault) if caught is None else self.swarm.peers[caught]
        if peer is None and getattr(fault, "peer", None) is not None:
            self._at(time.monotonic() + RETRY_S, partial(self._carry_out, fault))
            return
        met = tuple(_named(fault)) if peer is None else (peer.index,)
        if peer is not None and isinstance(fault, Cut) and fault.to is not None:
            met = (peer.index, fault.to)
        if isinstance(fault, Join):
            met = (len(self.swarm.peers),)
        role = getattr(fault, "peer", None)
        report = Happened(
            fault.kind,
            met,
            time.time(),
            role=role if isinstance(role, str) and role != "random" else None,
            phase=fault.at.phase,
        )
        position = len(self.happened)
        self.happened.append(report)
        self.say(
            f"{fault.kind} {', '.join(f'peer-{p}' for p in met)} {fault.at.phase or ''}".strip()
        )
        self._act(fault, peer, position)

    def _victim(self, fault: Fault) -> LocalPeer | None:
        """Whom a fault meets; None when it names nobody, or must wait."""
        wanted = getattr(fault, "peer", None)
        if isinstance(wanted, int):
            return self.swarm.peers[wanted]
        most = self.plan.max_down or (self.swarm.num_peers - 1) // 2
        if wanted is None or len(self._away) >= max(most, 1):
            return None
        free = [
            peer
            for peer in self.swarm.peers
            if peer.alive and peer.index not in self._away and peer.index not in self._gone
        ]
        return self.draw.choice(free) if len(free) > 1 else None

    def _act(self, fault: Fault, peer: LocalPeer | None, position: int) -> None:
        if isinstance(fault, (Partition, Heal, Join)):
            self._act_on_all(fault, position)
            return
        assert peer is not None
        if isinstance(fault, Kill):
            peer.kill()
            self._away_until(peer, fault.for_s, position, lambda: self.bring_back(peer))
        elif isinstance(fault, Pause):
            peer.pause()
            self._away_until(peer, fault.for_s, position, peer.resume)
        elif isinstance(fault, Restart):
            peer.kill()
            self._away[peer.index] = time.time()
            self.bring_back(peer)
        elif isinstance(fault, Leave):
            self._gone.add(peer.index)
            peer.send(signal.SIGINT)
        elif isinstance(fault, Slow):
            self.folder.tell(peer.index, slow=fault.factor)
            self._later(fault.for_s, position, lambda: self.folder.tell(peer.index, slow=1.0))
        elif isinstance(fault, Skew):
            self.folder.tell(peer.index, skew_s=fault.by_s)
            self._later(fault.for_s, position, lambda: self.folder.tell(peer.index, skew_s=0.0))
        else:
            self._cut(fault, peer, position)

    def _act_on_all(self, fault: Partition | Heal | Join, position: int) -> None:
        if isinstance(fault, Join):
            self.swarm.add(["--initial-peers", self._address()])
            return
        links = self.swarm.links
        assert links is not None
        if isinstance(fault, Heal):
            links.heal()
            return
        links.partition(fault.groups)
        self._later(fault.for_s, position, links.heal)

    def _cut(self, fault: Cut, peer: LocalPeer, position: int) -> None:
        links, index = self.swarm.links, peer.index
        assert links is not None
        others = [p.index for p in self.swarm.peers if p.index != index]
        ends = [fault.to] if fault.to is not None else others
        pairs = [(index, end) for end in ends]
        pairs += [] if fault.one_way else [(end, index) for end in ends]
        links.cut(pairs)
        if fault.to is None and not fault.one_way:
            self._away_until(peer, fault.for_s, position, lambda: links.mend(pairs))
        else:
            self._later(fault.for_s, position, lambda: links.mend(pairs))

    def _away_until(
        self, peer: LocalPeer, span: Seconds | None, position: int, undo: Callable[[], None]
    ) -> None:
        if span is None:
            self._gone.add(peer.index)
            return
        self._away[peer.index] = None

        def return_it() -> None:
            self._away[peer.index] = time.time()
            undo()

        self._later(span, position, return_it)

    def _later(self, span: Seconds | None, position: int, undo: Callable[[], None]) -> None:
        """Takes a fault back after its time, if it has one."""
        if span is None:
            return

        def take_back() -> None:
            self.happened[position] = replace(self.happened[position], until_s=time.time())
            undo()

        self._at(time.monotonic() + drawn_s(span, self.draw), take_back)

    # ------------------------------------------------ peers

    def bring_back(self, peer: LocalPeer) -> None:
        """Starts a peer again on its state, through an address that may be dead."""
        self._gone.discard(peer.index)
        self.swarm.restart(peer, ["--initial-peers", self._address()])

    def _address(self) -> str:
        """Of a living peer or, now and then, the founder's, whether it lives or not."""
        known = [p.last_address for p in self.swarm.peers if p.alive and p.last_address]
        first = self.swarm.peers[0].last_address
        if first and (not known or self.draw.random() < OLD_ADDRESS_SHARE):
            return first
        if not known:
            raise SwarmError("no peer has printed its address")
        return self.draw.choice(known)


def _named(fault: Fault) -> Sequence[int]:
    """Numbers of the peers that a fault names."""
    if isinstance(fault, Partition):
        return [peer for group in fault.groups for peer in group]
    wanted = [getattr(fault, name, None) for name in ("peer", "to")]
    return [peer for peer in wanted if isinstance(peer, int)]
