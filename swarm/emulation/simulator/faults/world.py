"""The event queue, the peers, lossy links, the founding of a swarm, and all faults of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from random import Random

from swarm.emulation.simulator.faults.liar import Liar
from swarm.emulation.simulator.peers.bulk_transfers import Get
from swarm.emulation.simulator.peers.invariants import Invariants
from swarm.emulation.simulator.peers.participant import Loss, PlannedCrash, Setup, UnderTest
from swarm.emulation.simulator.peers.simulated_peer import Node
from swarm.emulation.simulator.peers.surroundings import Packet, Payload
from swarm.emulation.simulator.symbols.crash_disk import Disk
from swarm.emulation.simulator.symbols.trained_symbols import Task
from swarm.emulation.simulator.symbols.values import Initial, Values, Violation
from swarm.experts import expert_of_unit
from swarm.protocol.chain.trust import proof_problem
from swarm.protocol.membership.membership import TRIAL_ROUNDS
from swarm.protocol.membership.ownership import assign
from swarm.protocol.messages.events import Record, Undeliverable
from swarm.protocol.messages.messages import Link
from swarm.protocol.rounds.policies.deals import first_book
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values import manifest
from swarm.protocol.values.invitation import Credential
from swarm.protocol.values.texts import Text


@dataclass(frozen=True)
class Weather:
    """How bad the links are."""

    loss: float = 0.0
    """Share of messages that are lost."""
    duplication: float = 0.0
    """Share of the other messages that arrive twice."""
    delay_s: float = 0.1
    """Usual one-way delay. Each message's delay is between half and twice this delay."""
    spike: float = 0.0
    """Share of messages with an unusual delay."""
    spike_s: float = 0.0
    """Largest unusual delay."""


CALM = Weather()


@dataclass
class Network:
    """The state of all links."""

    weather: Weather = CALM
    rough: Mapping[manifest.PeerId, Weather] = field(default_factory=dict)
    """Peers whose links, in both directions, have their own weather."""
    side: dict[manifest.PeerId, int] = field(default_factory=dict)
    """Side of the partition that each peer is on. Other peers are on side 0."""
    cuts: set[tuple[manifest.PeerId, manifest.PeerId]] = field(default_factory=set)
    """(source, destination) pairs between which nothing passes."""

    def split(self, sides: Collection[Collection[manifest.PeerId]]) -> None:
        """Separates these groups of peers from each other."""
        self.side = {peer: index for index, side in enumerate(sides) for peer in side}

    def mend(self) -> None:
        """Removes every partition, cut and bad weather."""
        self.side, self.rough, self.weather = {}, {}, CALM
        self.cuts.clear()

    def is_open(self, source: manifest.PeerId, destination: manifest.PeerId) -> bool:
        """Whether any message gets from one peer to another."""
        if (source, destination) in self.cuts:
            return False
        return not self.side or self.side.get(source, 0) == self.side.get(destination, 0)

    def delays(
        self, source: manifest.PeerId, destination: manifest.PeerId, random: Random
    ) -> list[float]:
        """Delays of a message posted now: two if the message is duplicated, none if it is lost."""
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


TEXT = Text("text", "byte", "digest", documents=1, tokens=2001, windows=500)


def found(setup: Setup, values: Values) -> manifest.Manifest:
    """Manifest 0 with all founders as members."""
    rules = setup.rules
    characters = {peer: setup.characters[peer] for peer in sorted(setup.founders)}
    members = {
        peer: manifest.Member(0, each.capacity, room=each.rooms[0])
        for peer, each in characters.items()
    }
    for peer in setup.known:
        members[peer] = replace(members[peer], counted=TRIAL_ROUNDS - 1, votes=False, vouched=False)
    owners = assign(
        {},
        {peer: member.capacity for peer, member in members.items()},
        members,
        stale=(),
        rooms=rules.rooms_of(members),
        owners_per_expert=rules.owners_per_expert,
        num_experts=rules.num_experts,
        seed="founding",
    ).owners
    founder = setup.founders[0]
    entries = {
        unit: manifest.Entry(
            values.digest_of(Initial(unit)), size, 0, founder, rules.unit_codec[unit]
        )
        for unit, size in rules.unit_bytes.items()
    }
    founding = manifest.Founding(founder, "nonce", "config", 1, "validation", 4, TEXT)
    book = first_book(founding, members, rules)
    return manifest.Manifest(
        run="",
        generation=manifest.FOUNDING_GENERATION,
        height=0,
        round=0,
        kind=manifest.Kind.FOUNDING,
        parent=None,
        founding=founding,
        step=0,
        tokens=0,
        merged=0,
        members=members,
        contributors=(),
        sources={},
        owners=owners,
        entries=dict(sorted(entries.items(), key=lambda item: expert_of_unit(item[0]) or -1)),
        cursor=book.cursor,
        holes=book.holes,
        dealt=book.dealt,
    )


MAX_EVENTS, MAX_EVENTS_A_PAIR = 1_000_000, 20
"""Limits of events in a schedule, and of further events per pair of peers. More is a message storm.
Voters without a quorum greet all others, so 256 peers send far more than 64."""
DISCOVER_S = 20.0
"""Seconds between two looks of all peers into the DHT."""
RESTORE_S = 5.0
"""Seconds between two searches of a peer without a record for a peer that proves a tip to it."""
RESTART_S = 2.0
"""Seconds until a person restarts a peer."""
AMBUSH_S = (3.0, 10.0, 25.0)
"""Seconds for which a peer may be cut off when another peer has a planned crash."""
REFUSED = 0.7
"""Share of messages to a dead process that come back as refused. Routers drop the others."""
REFUSED_IN_ERROR = 0.002
"""Share of messages to a living process that look refused."""
UNSENT_S = 0.01
"""Seconds before a crash in which posted messages may never leave the machine."""


class World:
    """A running simulation."""

    def __init__(
        self,
        setup: Setup,
        random: Random,
        *,
        tested: UnderTest,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.now = 0.0
        self.random = random
        self.setup = setup
        self.timers = setup.timers
        self.tested = tested
        self.trace = trace
        self.network = Network()
        self.door = tested.door(setup.rules.run)
        self.task = Task(setup.rules, Values())
        self.founding = found(setup, self.task.values)
        self.invariants = Invariants(setup, self.task.values, self.founding)
        self.nodes: dict[manifest.PeerId, Node] = {}
        self.disks: dict[manifest.PeerId, Disk] = {}
        self.on_apply: Callable[[Node], None] | None = None
        self.credentials = dict(setup.credentials)
        """Credentials with which peers start."""
        self.liar: Liar | None = None
        if setup.liar:
            self.liar = Liar(setup.liar, setup.lies, self, Random(random.getrandbits(32)))
        self.dead: set[manifest.PeerId] = set()
        """Peers that will never start again."""
        self._queue: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._numbers = count()
        for peer in setup.founders:
            self.start(peer, Record(tip=self.founding, certificate=None, parent=None))
        self.at(DISCOVER_S, self.discover)

    # ------------------------------------------------------------ time

    def at(self, delay_s: float, method: Callable[..., None], *arguments: object) -> None:
        """Calls a function later."""
        assert delay_s >= 0, f"{method} is to be called {-delay_s} s ago"
        heappush(self._queue, (self.now + delay_s, next(self._numbers), method, arguments))

    def run(self, until: Callable[[], bool]) -> None:
        """Handles events in order of time, until the condition holds after one of them."""
        queue = self._queue
        most = MAX_EVENTS + MAX_EVENTS_A_PAIR * len(self.nodes) ** 2
        for _ in range(most):
            self.now, _, method, arguments = heappop(queue)
            method(*arguments)
            if until():
                return
        raise Violation("I3", f"{most} events in {self.now:.0f} s: a storm of messages")

    def discover(self) -> None:
        """Lets all peers look up the others. The DHT knows only addresses."""
        self.at(DISCOVER_S, self.discover)
        for node in list(self.nodes.values()):
            node.discover(tuple(sorted(self.nodes)))

    def post(self, source: manifest.PeerId, destination: manifest.PeerId, payload: Payload) -> None:
        """Sends a message over the network, or the lies that a liar sends instead."""
        if self.liar and source == self.liar.me and isinstance(payload, Packet):
            self.liar.convenes(payload, self.now)
            for packet in self.liar.says(destination, payload):
                self._send(source, destination, packet)
        else:
            self._send(source, destination, payload)

    def _send(
        self, source: manifest.PeerId, destination: manifest.PeerId, payload: Payload
    ) -> None:
        node = self.nodes.get(destination)
        if node is None:
            return
        delays = self.network.delays(source, destination, self.random)
        now = self.now
        for delay_s in delays:
            message = (node, source, payload, now)
            heappush(self._queue, (now + delay_s, next(self._numbers), self._deliver, message))
        if delays and isinstance(payload, Packet):
            is_gone = not node.is_up and self.network.is_open(destination, source)
            if self.random.random() < (REFUSED if is_gone else REFUSED_IN_ERROR):
                sender = self.nodes[source]
                sender.after(2 * delays[0], sender.tell, Undeliverable(destination))

    def reachable(self, source: manifest.PeerId, destination: manifest.PeerId) -> Node | None:
        """The destination, if it runs and its links with the source work in both directions."""
        node, network = self.nodes.get(destination), self.network
        if node is None or not node.is_there():
            return None
        is_open = network.is_open(source, destination) and network.is_open(destination, source)
        return node if is_open else None

    def _deliver(
        self, node: Node, source: manifest.PeerId, payload: Payload, posted_s: float
    ) -> None:
        sender = self.nodes[source]
        if sender.fell_s - UNSENT_S <= posted_s <= sender.fell_s:
            return
        if not isinstance(payload, Packet):
            liar = self.liar if isinstance(payload, Get) else None
            if not liar or node.me != liar.me or liar.serves():
                node.receive(source, payload)
            return
        message = self.door.let_in(source, *payload)
        if message is not None:
            packet = Packet(payload.header, message)
            if self.liar and node.me == self.liar.me and node.is_up:
                for answer in self.liar.hears(packet):
                    self._send(node.me, source, answer)
            node.receive(source, packet)

    def asked_of(self, peer: manifest.PeerId) -> Collection[manifest.Unit]:
        """Units that a peer reduces."""
        return self.nodes[peer].machine.reduced_units

    # ------------------------------------------------------------ faults

    def start(self, peer: manifest.PeerId, record: Record, chain: Iterable[Link] = ()) -> None:
        """Starts a new peer, which has a record and all blobs of its tip."""
        durable = [entry.digest for entry in record.tip.entries.values()]
        node = Node(self, peer, self.setup.characters[peer], Disk(record, durable, chain))
        self.nodes[peer] = node
        self.disks[peer] = node.disk
        node.boot()

    def join(self, peer: manifest.PeerId) -> None:
        """A stranger arrives, with the tip that a peer has shown, or only with manifest 0."""
        if peer in self.dead:
            return
        if self.random.random() < 0.7:
            self.join_shown(peer)
        else:
            self.join_proved(peer)

    def join_shown(self, peer: manifest.PeerId) -> None:
        """A stranger asks a peer for its tip. If this is not proved, it asks another later [L2]."""
        if peer in self.dead:
            return
        hosts = [node for node in self.nodes.values() if node.is_up and not node.is_paused]
        shown = self._proved(self.random.choice(hosts)) if hosts else None
        if shown:
            self.start(peer, *shown)
        else:
            self.at(RESTORE_S, self.join_shown, peer)

    def join_proved(self, peer: manifest.PeerId) -> None:
        """A stranger arrives only with manifest 0, and gets a proof that skips many heads."""
        self.start(peer, Record(self.founding, certificate=None, parent=None))

    def leave(self, peer: manifest.PeerId) -> None:
        """The person at this peer asks it to leave."""
        if peer in self.nodes:
            self.nodes[peer].ask_to_leave()

    def vouch(self, peer: manifest.PeerId, credential: Credential) -> None:
        """An anchor vouches for a peer, which joins or restarts with the credential."""
        self._note(f"{peer} is given an invitation by {credential.invitation.inviter}")
        self.credentials[peer] = credential
        self.invariants.given.add((peer, credential))
        node = self.nodes.get(peer)
        if node is not None and node.is_up and not node.is_paused:
            node.crash()
            self.at(RESTART_S, self.reboot, peer)

    def crash(self, peer: manifest.PeerId) -> None:
        """Kills a peer's process."""
        node = self.nodes.get(peer)
        if node is not None and node.is_up:
            node.crash()

    def kill(self, peer: manifest.PeerId) -> None:
        """Kills a peer's process for good."""
        self.dead.add(peer)
        self.crash(peer)

    def reboot(self, peer: manifest.PeerId) -> None:
        """Starts a peer that is down."""
        node = self.nodes.get(peer)
        if node is not None and not node.is_up and not node.has_left and peer not in self.dead:
            if not node.disk.is_lost or self._restore(node):
                node.boot()
            else:
                self.at(RESTORE_S, self.reboot, peer)

    def lose_disk(self, peer: manifest.PeerId) -> None:
        """Kills a peer and empties its state directory. Its key is stored elsewhere."""
        node = self.nodes.get(peer)
        if node is None or node.has_left or peer in self.dead:
            return
        self.crash(peer)
        self._note(f"{peer} loses its state directory")
        self.invariants.lost_disk(peer)
        node.disk.lose()

    def lose_everything(
        self, peer: manifest.PeerId, stranger: manifest.PeerId, after_s: float
    ) -> None:
        """Kills a peer and empties its disk with the key. The peer comes back as a stranger."""
        if peer in self.nodes and not self.nodes[peer].has_left and peer not in self.dead:
            self.lose_disk(peer)
            self.dead.add(peer)
            self.at(after_s, self.join, stranger)

    def roll_back(self, peer: manifest.PeerId) -> None:
        """Kills a peer and damages its record, so that the previous record is read."""
        node = self.nodes.get(peer)
        if node is None or node.has_left or peer in self.dead or node.disk.is_lost:
            return
        self.crash(peer)
        earlier = node.disk.earlier
        if earlier is None:
            return
        self._note(f"{peer} has its record rolled back to height {earlier.tip.height}")
        self.invariants.lost_disk(peer)
        if any(entry.digest not in node.disk.durable for entry in earlier.tip.entries.values()):
            node.disk.lose()
        else:
            node.disk.record, node.disk.earlier = self.tested.rolled_back(earlier), None
            node.disk.came_from = None

    def _restore(self, node: Node) -> bool:
        """Gives a peer without a record the newest tip that is proved to it. False if none is."""
        hosts = [other for other in self.alive() if self.reachable(node.me, other.me)]
        proved = [shown for shown in map(self._proved, hosts) if shown]
        if not proved:
            return False
        best, path = max(proved, key=lambda shown: shown[0].tip.code)
        durable = [entry.digest for entry in best.tip.entries.values()]
        node.disk = Disk(self.tested.without_record(node.me, best, path), durable, path)
        self.disks[node.me] = node.disk
        return True

    def _proved(self, host: Node) -> tuple[Record, tuple[Link, ...]] | None:
        """A host's tip and the links that prove it to a newcomer. None if they do not [L2]."""
        told, trusted = host.disk.record, self.founding.digest
        path = host.machine.chain.proof(trusted)
        problem = proof_problem(path, told.tip.head, {trusted}, is_new=True)
        if problem:
            self._note(f"{host.me} proves its tip to no newcomer: {problem}")
            return None
        return Record(told.tip, told.certificate, told.parent), path

    def sleep(self, peer: manifest.PeerId) -> None:
        """Suspends a whole machine, so that messages to it are lost."""
        node = self.nodes.get(peer)
        if node is not None and node.is_up and not node.is_paused:
            node.pause()
            node.is_deaf = True

    def wake(self, peer: manifest.PeerId, slept_s: float) -> None:
        """Lets the machine continue, as if no time had passed for it."""
        node = self.nodes.get(peer)
        if node is not None and node.is_up and node.is_deaf:
            node.slept_s += slept_s
            node.resume()

    def skew(self, peer: manifest.PeerId, seconds: float) -> None:
        """Moves a peer's wall clock."""
        if peer in self.nodes:
            self._note(f"wall clock of {peer} jumps by {seconds:.0f} s")
            self.nodes[peer].wall_ahead_s += seconds

    def arm(self, peer: manifest.PeerId, planned: PlannedCrash) -> None:
        """Lets a peer crash at a chosen effect."""
        if peer in self.nodes:
            self.nodes[peer].planned = planned

    def applied(self, me: manifest.PeerId) -> None:
        """Tells the judges a peer's new tip."""
        if self.on_apply:
            self.on_apply(self.nodes[me])

    def fell(self, me: manifest.PeerId, planned: PlannedCrash) -> None:
        """Notes a planned crash. The peer starts again some time later."""
        node = self.nodes[me]
        if self.random.random() < 0.5:
            node.fell_s = self.now
        self.at(planned.restart_s, self.reboot, node.me)
        if planned.loss is Loss.RECORD:
            self.roll_back(me)
        elif planned.loss is Loss.DISK:
            self.lose_disk(me)
        if planned.isolated is not None:
            here = [peer for peer in self.nodes if peer != planned.isolated]
            self.split((here, [planned.isolated]))
            self.at(self.random.choice(AMBUSH_S), self.split, ())

    def pause(self, peer: manifest.PeerId) -> None:
        """Stops a process (SIGSTOP)."""
        node = self.nodes.get(peer)
        if node is not None and node.is_up:
            node.pause()

    def resume(self, peer: manifest.PeerId) -> None:
        """Lets a stopped process continue."""
        node = self.nodes.get(peer)
        if node is not None and node.is_up and node.is_paused:
            node.resume()

    def split(self, sides: Collection[Collection[manifest.PeerId]]) -> None:
        """Partitions the network. Without sides, makes it one network again."""
        self._note(f"partition: {[sorted(side) for side in sides]}")
        self.network.split(sides)

    def cut(self, source: manifest.PeerId, destination: manifest.PeerId) -> None:
        """Cuts one direction of one link."""
        self._note(f"link {source} -> {destination} is cut")
        self.network.cuts.add((source, destination))

    def revolt(self, planned: PlannedCrash, duration_s: float) -> None:
        """Cuts the convener off from one member, and arms all others."""
        up = sorted(node.me for node in self.alive())
        conveners = [self.nodes[peer].machine.campaign.convener for peer in up]
        if len(up) < 3 or conveners[0] not in up:
            return
        rival = self.random.choice([peer for peer in up if peer != conveners[0]])
        for source, destination in ((conveners[0], rival), (rival, conveners[0])):
            self.cut(source, destination)
            self.at(duration_s, self.uncut, source, destination)
        for peer in up:
            if peer not in (conveners[0], rival):
                self.arm(peer, planned)

    def uncut(self, source: manifest.PeerId, destination: manifest.PeerId) -> None:
        """Mends one direction of one link."""
        self.network.cuts.discard((source, destination))

    def storm(self, weather: Weather) -> None:
        """Changes the weather of all links that do not have their own."""
        self._note(f"weather: {weather}")
        self.network.weather = weather

    def heal(self, timers: Timers) -> None:
        """Ends all faults. From now on, all peers use these timers."""
        self._note("---------------- everything heals")
        self.network.mend()
        if self.liar:
            self.liar.is_lying = False
        self.timers = timers
        for peer, node in self.nodes.items():
            node.planned = None
            if node.is_up:
                node.use(timers)
            self.resume(peer)
            self.reboot(peer)

    def alive(self) -> list[Node]:
        """Peers whose process runs."""
        return [node for node in self.nodes.values() if node.is_up]

    def _note(self, text: str) -> None:
        if self.trace:
            self.trace(f"{self.now:8.2f}     *** {text}")
