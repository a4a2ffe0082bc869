"""Carries out a fault plan on a local swarm: the effect of each kind of fault, and its end."""

from __future__ import annotations

import heapq
import itertools
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from swarm.emulation import fault_plan
from swarm.emulation.controls import FOLDER_VARIABLE, ControlFolder, Controls, Trap
from swarm.emulation.fault_verdict import Happened
from swarm.emulation.local_peer import LocalPeer
from swarm.emulation.local_swarm import LocalSwarm, applied
from swarm.errors import ConfigError, SwarmError

RETRY_S = 1.0
"""Seconds between retries of a restart (its peer is leaving) or fault (too many are away)."""
OLD_ADDRESS_SHARE = 0.25
"""Share of the restarts that get the founder's address, even if the founder is dead."""


@dataclass
class FaultActions:
    """Carries out faults, and undoes them when their time is over.

    Attributes:
        swarm: swarm whose peers the faults hit.
        folder: folder that carries commands to the peers.
        draw: generator of durations, second peers of cuts, and addresses.
        happened: faults carried out so far.
        away: for each peer that is away, when it was brought back (seconds since 1970), or None
            before that.
        gone: peers that left, were asked to leave, or are dead for good.
    """

    swarm: LocalSwarm
    folder: ControlFolder
    draw: random.Random
    happened: list[Happened] = field(default_factory=list)
    away: dict[int, float | None] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    """Heap of (monotonic time, order, action)."""
    _order: itertools.count[int] = field(default_factory=itertools.count)

    # ------------------------------------------------ time

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Calls an action at a moment of the monotonic clock."""
        heapq.heappush(self._due, (at_s, next(self._order), action))

    def do_what_is_due(self) -> None:
        """Calls all actions that are due. Call it several times a second."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()

    def _later(
        self, span: fault_plan.Seconds | None, position: int, undo: Callable[[], None]
    ) -> None:
        """Undoes a fault after its time, if it has a time."""
        if span is None:
            return

        def take_back() -> None:
            self.happened[position] = replace(self.happened[position], until_s=time.time())
            undo()

        self.at(time.monotonic() + fault_plan.drawn_s(span, self.draw), take_back)

    def _away_until(
        self,
        peer: LocalPeer,
        span: fault_plan.Seconds | None,
        position: int,
        undo: Callable[[], None],
    ) -> None:
        if span is None:
            self.gone.add(peer.index)
            return
        self.away[peer.index] = None

        def return_it() -> None:
            # A peer without an entry has left for good meanwhile.
            if peer.index in self.away:
                self.away[peer.index] = time.time()
            undo()

        self._later(span, position, return_it)

    # ------------------------------------------------ faults

    def carry_out(self, fault: fault_plan.Fault, peer: LocalPeer | None) -> Happened:
        """Carries out a fault. Returns the note about it.

        Args:
            fault: a fault of a plan.
            peer: the peer that the fault hits. None for kinds that hit no single peer.
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
        if isinstance(fault, (fault_plan.Partition, fault_plan.Heal, fault_plan.Join)):
            self._act_on_all(fault, position)
        elif peer is not None:
            self._act_on_one(fault, peer, position)
        return noted

    def _met(self, fault: fault_plan.Fault, peer: LocalPeer | None) -> tuple[int, ...]:
        if isinstance(fault, fault_plan.Partition):
            return tuple(peer for group in fault.groups for peer in group)
        if isinstance(fault, fault_plan.Join):
            return (len(self.swarm.peers),)
        if peer is None:
            return ()
        if isinstance(fault, fault_plan.Cut) and fault.to is not None:
            others = [other.index for other in self.swarm.peers if other is not peer]
            return (peer.index, fault.to if isinstance(fault.to, int) else self.draw.choice(others))
        return (peer.index,)

    def _act_on_one(self, fault: fault_plan.Fault, peer: LocalPeer, position: int) -> None:
        tell, index = self.folder.tell, peer.index
        if isinstance(fault, fault_plan.Kill):
            peer.kill()
            self._away_until(peer, fault.for_s, position, lambda: self.start_again(peer))
        elif isinstance(fault, fault_plan.Pause):
            peer.pause()
            self._away_until(peer, fault.for_s, position, peer.resume)
        elif isinstance(fault, fault_plan.Restart):
            peer.kill()
            self.away[index] = time.time()
            self.start_again(peer)
        elif isinstance(fault, fault_plan.Leave):
            self._leave(peer, fault.for_s, position)
        elif isinstance(fault, fault_plan.Slow):
            tell(index, slow=fault.factor)
            self._later(fault.for_s, position, lambda: tell(index, slow=1.0))
        elif isinstance(fault, fault_plan.Skew):
            tell(index, skew_s=fault.by_s)
            self._later(fault.for_s, position, lambda: tell(index, skew_s=0.0))
        elif isinstance(fault, fault_plan.Cut):
            self._cut(fault, peer, position)

    def _leave(self, peer: LocalPeer, span: fault_plan.Seconds | None, position: int) -> None:
        self.gone.add(peer.index)
        self.away.pop(peer.index, None)
        peer.send(signal.SIGINT)

        def return_it() -> None:
            if peer.index not in self.gone:  # it was killed while it left, and started again
                return
            if peer.alive:
                self.at(time.monotonic() + RETRY_S, return_it)
                return
            self.away[peer.index] = time.time()
            self.start_again(peer)

        self._later(span, position, return_it)

    def _act_on_all(
        self, fault: fault_plan.Partition | fault_plan.Heal | fault_plan.Join, position: int
    ) -> None:
        if isinstance(fault, fault_plan.Join):
            self.away[len(self.swarm.peers)] = time.time()
            self.swarm.add(["--initial-peers", self._address()])
            return
        links = self.swarm.links
        assert links is not None, "a plan that cuts links is refused without them"
        if isinstance(fault, fault_plan.Heal):
            links.heal()
            return
        links.partition(fault.groups)
        self._later(fault.for_s, position, links.heal)

    def _cut(self, fault: fault_plan.Cut, peer: LocalPeer, position: int) -> None:
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
        """A living peer's address or, sometimes, the founder's, even if the founder is dead."""
        there = [p for p in self.swarm.peers if p.alive and p.index not in self.gone]
        known = [p.last_address for p in there if p.last_address]
        first = self.swarm.peers[0].last_address
        if first and (not known or self.draw.random() < OLD_ADDRESS_SHARE):
            return first
        if not known:
            raise SwarmError("no peer has printed its address")
        return self.draw.choice(known)


PROGRAM = "peers.emulated"
"""The program of peers in a swarm under faults."""
POLL_S = 0.1
LONGEST_S = 30 * 86400.0


@dataclass(frozen=True)
class Bounds:
    """Limits beyond which a wait counts as a hang, in seconds."""

    manifest_s: float = 180.0
    """Longest wait for the next manifest, after any fault."""
    return_s: float = 300.0
    """Longest wait until a peer that is back contributes."""
    trap_s: float = 300.0
    """Longest wait until a peer comes to the place where a fault is to hit it."""


@dataclass
class FaultRunner:
    """Carries out a plan at its times; see `poll`.

    Attributes:
        swarm: a swarm that has not started. Its peers run `PROGRAM`.
        plan: the faults.
        say: called with a text about each fault.
        bounds: limits beyond which a wait counts as a hang.
        hangs: texts about waits that took too long.
        ended: peers that ended on their own.
    """

    swarm: LocalSwarm
    plan: fault_plan.FaultPlan
    say: Callable[[str], None] = lambda _: None
    bounds: Bounds = Bounds()
    hangs: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    _by_round: list[int] = field(default_factory=list)
    """Numbers of the faults that wait for a round, in the plan's order."""
    _trapped: dict[str, tuple[fault_plan.Fault, float]] = field(default_factory=dict)
    """For each trap that waits, by name: its fault, and since when it waits."""
    _seen: tuple[int, float] = (-1, 0.0)
    """Greatest height anywhere, and when it was first seen."""
    _is_stopped: bool = False

    def __post_init__(self) -> None:
        """Checks plan and swarm against each other.

        Raises:
            ConfigError: the plan names a peer that does not exist, or the swarm has no links to
                cut.
        """
        self.folder = ControlFolder(self.swarm.folder / "emulation")
        self.draw = random.Random(self.plan.seed)
        self.actions = FaultActions(self.swarm, self.folder, self.draw)
        joins = sum(isinstance(fault, fault_plan.Join) for fault in self.plan.fault)
        for number, fault in enumerate(self.plan.fault):
            for peer in _named(fault):
                if peer >= self.swarm.num_peers + joins:
                    raise ConfigError(
                        f"fault[{number}]: there is no peer {peer}; "
                        f"the swarm has 0 to {self.swarm.num_peers + joins - 1}"
                    )
        if self.plan.needs_links and self.swarm.links is None:
            raise ConfigError("the plan cuts links, which needs --link", hint="as --link lan")

    # ------------------------------------------------ calls of a program

    @property
    def happened(self) -> list[Happened]:
        """Faults carried out so far."""
        return self.actions.happened

    def prepare(self) -> None:
        """Makes the swarm's peers obey a drill. Call it before the swarm starts."""
        self._seen = (-1, time.monotonic())
        self.folder.create()
        self.folder.tell_all(Controls(step_s=self.plan.step_s))
        self.swarm.program = PROGRAM
        variable = {FOLDER_VARIABLE: str(self.folder.path)}
        self.swarm.environment = {**self.swarm.environment, **variable}

    def begin(self, run_s: float = LONGEST_S) -> None:
        """Starts the plan's clock after the swarm's start. No timed fault comes after `run_s`."""
        now_s = time.monotonic()
        for number, fault in enumerate(self.plan.fault):
            if fault.at.round is not None:
                self._by_round.append(number)
            # Each fault has its own generator, so that a further fault in a plan moves no other
            # fault.
            draw = random.Random(f"{self.plan.seed}/{number}")
            for after_s in fault_plan.moments(fault.at, draw, run_s):
                self.actions.at(now_s + after_s, partial(self._meet, fault))

    def poll(self, _: LocalSwarm | None = None) -> None:
        """Carries out what is due. Call it several times a second."""
        self._note_returns()
        for name, (fault, _since_s) in list(self._trapped.items()):
            self._look_into(name, fault)
        self._begin_rounds()
        self.actions.do_what_is_due()

    def run(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Polls until a condition holds. False after a hang, or when a peer ended on its own."""
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
        """Begins no new faults. Faults under way are still undone in time."""
        for name in self._trapped:
            self.folder.disarm(name)
        self._trapped, self._by_round, self._is_stopped = {}, [], True

    def all_back(self) -> bool:
        """Whether all peers that have to come back contribute again."""
        return not self.actions.away

    def all_done(self) -> bool:
        """Whether all faults of rounds have happened and all peers are back."""
        return not self._by_round and not self._trapped and self.all_back()

    # ------------------------------------------------ times of faults

    @property
    def _most_down(self) -> int:
        return self.plan.max_down or max((self.swarm.num_peers - 1) // 2, 1)

    def _begin_rounds(self) -> None:
        """Begins faults of rounds that have begun: now, or when a peer comes to a fault's phase."""
        began = self._round() + 1
        for number in list(self._by_round):
            fault = self.plan.fault[number]
            busy = len(self.actions.away) + len(self._trapped)
            is_away = getattr(fault, "peer", None) in self.actions.away
            if self.plan.in_order and (is_away or busy >= self._most_down):
                return
            if fault.at.phase:
                # The trap is set early, because peers know better than this runner when a round
                # begins.
                self._by_round.remove(number)
                self._arm(number, fault)
            elif (fault.at.round or 0) <= began:
                self._by_round.remove(number)
                self._meet(fault)
            elif self.plan.in_order:
                return

    def _arm(self, number: int, fault: fault_plan.Fault) -> None:
        name = f"fault-{number:04}"
        self._trapped[name] = (fault, time.monotonic())
        self.folder.arm(_trap_of(name, fault, self.draw, self.swarm.num_peers))

    def _look_into(self, name: str, fault: fault_plan.Fault) -> None:
        caught = self.folder.caught(name)
        if caught is None:
            return
        if not self.swarm.peers[caught.peer].alive:  # another fault killed it in the trap
            self.folder.forget(name)
            self.folder.arm(_trap_of(name, fault, self.draw, self.swarm.num_peers))
            return
        if not self.swarm.peers[caught.peer].stands_still:
            return
        del self._trapped[name]
        peer = self.swarm.peers[caught.peer]
        self._carry_out(fault, peer)
        if not isinstance(fault, (fault_plan.Kill, fault_plan.Pause)):
            peer.resume()

    def _meet(self, fault: fault_plan.Fault) -> None:
        """Carries out a due fault without a trap. A random fault waits while too many are away."""
        wanted = getattr(fault, "peer", None)
        if self._is_stopped:
            return
        if wanted is None or isinstance(wanted, int):
            self._carry_out(fault, None if wanted is None else self.swarm.peers[wanted])
            return
        away, gone = self.actions.away, self.actions.gone
        free = [p for p in self.swarm.peers if p.alive and p.index not in {*away, *gone}]
        if len(away) >= self._most_down or len(free) < 2:
            self.actions.at(time.monotonic() + RETRY_S, partial(self._meet, fault))
            return
        self._carry_out(fault, self.draw.choice(free))

    def _carry_out(self, fault: fault_plan.Fault, peer: LocalPeer | None) -> None:
        noted = self.actions.carry_out(fault, peer)
        names = ", ".join(f"peer-{p}" for p in noted.peers)
        where = " ".join(word for word in (noted.role, noted.phase) if word)
        self.say(f"{noted.kind} {names} {where}".rstrip())

    # ------------------------------------------------ observations

    def _note_returns(self) -> None:
        for peer, back_s in list(self.actions.away.items()):
            if back_s is None:
                continue
            events = applied(self.swarm.peers[peer].events(), "quorum")
            if any(event["counted"] and event["time"] > back_s for event in events):
                del self.actions.away[peer]
            elif time.time() - back_s > self.bounds.return_s:
                self.hangs.append(f"peer-{peer} is not back after {self.bounds.return_s:.0f} s")

    def _look_for_trouble(self) -> None:
        now_s, height = time.monotonic(), self._height()
        if height > self._seen[0]:
            self._seen = (height, now_s)
        late_s = now_s - self._seen[1]
        if late_s > self.bounds.manifest_s:
            self.hangs.append(f"no manifest for {late_s:.0f} s after height {height}")
        for name, (fault, since_s) in self._trapped.items():
            if now_s - since_s > self.bounds.trap_s:
                self.hangs.append(f"{name}: nobody came to {fault.at.phase} in time")
        for peer in self.swarm.peers:
            code = peer.own_end
            if code is not None and peer.index not in self.actions.gone:
                tail = " ".join(peer.output()[-300:].split())
                self.ended.append(f"peer-{peer.index}, status {code}: {tail}")

    def _height(self) -> int:
        chains = (applied(peer.events()) for peer in self.swarm.peers)
        return max((chain[-1]["height"] for chain in chains if chain), default=-1)

    def _round(self) -> int:
        chains = (applied(peer.events()) for peer in self.swarm.peers)
        return max((chain[-1]["round"] for chain in chains if chain), default=0)


def _trap_of(name: str, fault: fault_plan.Fault, draw: random.Random, num_peers: int) -> Trap:
    """The trap in which a fault is to catch its peer."""
    assert fault.at.phase and fault.at.round
    wanted = getattr(fault, "peer", None)
    peer = wanted if isinstance(wanted, int) else None
    if wanted == "random":
        peer = draw.randrange(num_peers)
    role = wanted if isinstance(wanted, str) and wanted not in ("random", "any") else None
    return Trap(name, fault.at.phase, fault.at.round, peer, role)


def _named(fault: fault_plan.Fault) -> Sequence[int]:
    """Numbers of the peers that a fault names."""
    if isinstance(fault, fault_plan.Partition):
        return [peer for group in fault.groups for peer in group]
    wanted = [getattr(fault, name, None) for name in ("peer", "to")]
    return [peer for peer in wanted if isinstance(peer, int)]
