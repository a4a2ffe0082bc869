"""The events of a month, one scenario for each group of classes that live as long as a peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

from swarm.emulation.longevity import storage_scenarios, virtual_dht
from swarm.emulation.longevity.audit import HOUR_S, Allowed, Audit, Scale, sampler
from swarm.emulation.longevity.month import World
from swarm.emulation.longevity.sockets import Line
from swarm.emulation.longevity.subject import Other, Subject, Task, announced, name_of
from swarm.errors import HostileInput, Unreachable
from swarm.network.fetch.bulk import PROTOCOL
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.node.peer_probe import QUESTION, Question
from swarm.network.node.substrate import PeerID
from swarm.network.wire import ledger, relayed_messages, tcp_dialer, transport
from swarm.network.wire import link_health as lines_module
from swarm.network.wire.control import _Payload
from swarm.network.wire.identity import peer_id_of
from swarm.network.wire.steady_clock import LIMIT_S
from swarm.peer.status.publisher import ClockCheck
from swarm.protocol.messages.events import BlobWanted
from swarm.protocol.records.records import HEARTBEAT_S
from swarm.protocol.timing.fitness import HOME_MBIT


def transfers(world: World, scale: Scale) -> Audit:
    """Fetches every round, also from a peer without direct streams and a peer behind a relay.

    Only the subject's port of libp2p is forwarded. One of the other peers can be dialled, one has
    its port for direct streams closed, and one cannot be dialled at all. Once a day the subject's
    line is cut for 20 minutes in the middle of a fetch. Peers are away for hours.
    """
    task, line = Task.new(), Line(lambda _: 80.0)
    near = Other(world, world.machine(), [])
    known = list(near.node.addresses)
    shut = Other(world, world.machine(), known)
    hidden = Other(world, world.machine(is_reachable=False), known)
    subject = Subject(world, task, line, known)
    direct = subject.node._ways.direct
    assert direct is not None and shut.node._ways.direct is not None
    shut.machine.closed_ports.add(shut.node._ways.direct.door.port)
    subject.machine.closed_ports.add(direct.door.port)
    subject.machine.is_reachable = False
    hours = world.rng
    audit = Audit(
        world, {"node": subject.node, "transfers": subject.transfers, "store": subject.store},
        {"state": world.folder / "state"},
    )  # fmt: skip
    sample, slowest_s, before = sampler(world, scale, audit), 0.0, subject.timers()
    for number in range(scale.rounds):
        world.threads.sleep(max(number * scale.round_s - world.now_s, 1.0))
        unit = task.shared[0] if number % 8 == 0 else f"expert.{number % 4}"
        value = task.value(unit, number)
        for other in (near, shut, hidden):
            other.give({unit: value}, keep=4)
        digest = near.held[-1]
        shut.machine.is_up = hours.random() > 0.02
        if number % max(scale.rounds // max(int(scale.days), 1), 1) == 8:
            line.outages = [(world.now_s + 0.05, world.now_s + 1200.0)]
        first = near if number % 8 == 0 else hidden if number % 16 == 4 else shut
        sources = (first.peer_id, *(o.peer_id for o in (near, shut) if o is not first))
        began_s = world.now_s
        came = subject.fetch([BlobWanted(unit, digest, len(value), sources)], 3000.0)
        slowest_s = max(slowest_s, world.now_s - began_s)
        audit.demand(came, f"round {number}: what three peers have was not fetched")
        if came:
            subject.store.sync([digest])
        subject.store.collect([digest])
        timers = subject.timers()
        for name in ("reform_s", "attempt_s"):
            now_s, first_s = getattr(timers, name), getattr(before, name)
            audit.demand(
                now_s <= 2 * first_s,
                f"{name} is {now_s:.0f} s after an outage, {first_s:.0f} s before, at 80 Mbit/s",
            )
        sample()
    return audit


def publishing(world: World, scale: Scale) -> Audit:
    """Publishes at every heartbeat while the DHT fails, disks are full, and calls raise errors.

    The publisher, presence, the peer's clock, its quota and its status run for real. In the first
    quarter each call of the publisher fails once with RuntimeError and once with MemoryError.
    Later, libp2p's daemon is killed twice, and the peer restarts twice.
    """
    task, whole_s = Task.new(), scale.seconds
    near = Other(world, world.machine(), [])
    subject = Subject(world, task, Line(lambda _: 80.0), list(near.node.addresses), quota_gb=1e6)
    tip = task.founding([near.peer_id, subject.node.peer_id])
    run = name_of(task, tip)
    world.net.dht_outages = [(part * whole_s, part * whole_s + 120.0) for part in (0.3, 0.6)]
    world.disk.full = [(0.45 * whole_s, 0.45 * whole_s + 300.0)]
    events = [(0.5, "kill"), (0.55, "start"), (0.7, "start"), (0.8, "kill")]
    subject.enter(tip, run)
    near.announce(run, subject.status.record())
    others = [peer for k in range(8) if (peer := announced(world, run, subject.status.record(), k))]
    disturbed = [*world.net.dht_outages, *world.disk.full]
    disturbed += [(part * whole_s, part * whole_s + 60.0) for part, _ in events]
    audit = Audit(
        world, subject.parts, {"state": world.folder / "state"},
        allowed=list(history_of(scale)), quiet=[(b - 60.0, e + 60.0) for b, e in disturbed],
        failures=8,
    )  # fmt: skip
    mine, written = subject.node.identity.public_key, [0]
    audit.rate(
        "the peer's record", HEARTBEAT_S + 2,
        lambda: sum(n for (key, owner), n in world.net.stored.items()
                    if owner == mine and "peers" in key),
    )  # fmt: skip
    audit.rate("the quota's count", 12.0, lambda: written[0])
    _counting(subject, written)
    sample, sabotage = sampler(world, scale, audit), _sabotage(subject, scale)
    for number in range(scale.rounds):
        while world.now_s < (number + 1) * scale.round_s:
            world.threads.sleep(min(scale.round_s, 30.0))
            sabotage()
            if events and world.now_s >= events[0][0] * whole_s:
                _happens(events.pop(0)[1], subject, audit)
                _counting(subject, written)
            sample()
        tip = task.following(tip, {}, run)
        subject.apply(tip)
    unseen = {near.peer_id, *others} - subject.present
    audit.demand(not unseen, f"{len(unseen)} of {len(others) + 1} peers of the run are not seen")
    audit.demand(subject.node.failure is None, "libp2p's daemon is not back")
    subject.end()
    return audit


def _happens(event: str, subject: Subject, audit: Audit) -> None:
    if event == "kill":
        subject.daemon.kill()
    else:
        subject.start_again()
        audit.roots = subject.parts


def _counting(subject: Subject, written: list[int]) -> None:
    """Counts how often the quota's count is written."""
    assert subject.quota._quota
    month = subject.quota._quota.count
    write = type(month).write.__get__(month)

    def counted() -> None:
        written[0] += 1
        write()

    month.write = counted  # type: ignore[method-assign]


def _sabotage(subject: Subject, scale: Scale) -> Callable[[], None]:
    """Makes each call of the publisher's loop fail once with each kind of error."""
    calls = [
        (subject.publisher, "_beside"), (subject.publisher._clock, "compare"),
        (subject.status, "record"), (subject.publisher, "_on_present"),
    ]  # fmt: skip
    plan = [(owner, name, kind) for owner, name in calls for kind in (RuntimeError, MemoryError)]
    every_s = 0.25 * scale.seconds / (len(plan) + 1)

    def look() -> None:
        if not plan or subject.world.now_s < every_s * (9 - len(plan)):
            return
        owner, name, kind = plan.pop(0)
        real = getattr(owner, name)

        def failing(*_: object) -> None:
            setattr(owner, name, real)
            raise kind(f"{name} failed")

        setattr(owner, name, failing)

    return look


def lines(world: World, scale: Scale) -> Audit:
    """Measures the peer's uplink, which falls from 80 to 6 Mbit/s and rises again.

    Once a round, another peer fetches from the subject. The quota must also count a month of
    measurements.
    """
    task, day_s = Task.new(), scale.seconds
    line = Line(lambda at_s: 6.0 if 0.3 * day_s <= at_s < 0.7 * day_s else 80.0)
    first = Other(world, world.machine(), [])
    known = list(first.node.addresses)
    others = [first, *(Other(world, world.machine(), known) for _ in range(2))]
    subject = Subject(world, task, line, known, quota_gb=1e6)
    members = [subject.node.peer_id, *(other.peer_id for other in others)]
    tip = task.founding(members)
    run = name_of(task, tip)
    subject.enter(tip, run, publishes=False)
    for other in others:
        other.announce(run, subject.status.record())
    audit = Audit(
        world, {"node": subject.node, "status": subject.status, "line": subject.line},
        {"state": world.folder / "state"},
        allowed=list(history_of(scale)),
    )  # fmt: skip
    sample, unknown = sampler(world, scale, audit), subject.status.record().link
    audit.demand(
        unknown is not None and unknown.up_mbit is None,
        "an uplink that nobody has measured is published as a number",
    )
    with world.at(first.machine):
        downloads = Downloads(first.node, first.store)
    moved = [_moved_bytes(subject), subject.counted_bytes()]
    for number in range(scale.rounds):
        world.threads.sleep(max((number + 1) * scale.round_s - world.now_s, 1.0))
        value = task.value(task.shared[0], number)
        digest = subject.store.put(value)
        want = Want(digest, len(value), (subject.node.peer_id,))
        try:
            first.node.run(downloads.fetch([want]), 60.0)
        except TimeoutError:
            audit.demand(False, f"round {number}: what the subject has was not fetched from it")
        first.store.collect([])
        subject.store.collect([])
        for _ in range(3):  # as at heartbeats
            world.threads.sleep(HEARTBEAT_S)
            with world.at(subject.machine):
                subject.node.run(subject.line.measure_again(), 30.0)
        tip = task.following(tip, {}, run)
        subject.apply(tip)
        share = world.now_s / day_s
        if 0.5 < share < 0.69 or 0.9 < share < 1.0:  # the peer has had time to notice the change
            _judge_line(audit, subject, line.up_mbit(world.now_s))
        sample()
    world.threads.sleep(30.0)
    true_bytes = _moved_bytes(subject) - moved[0]
    counted_bytes = subject.counted_bytes() - moved[1]
    audit.demand(
        0.9 * true_bytes < counted_bytes < 1.3 * true_bytes,
        f"the quota counted {counted_bytes / 1e6:.1f} MB of {true_bytes / 1e6:.1f} MB",
    )
    return audit


def _judge_line(audit: Audit, subject: Subject, true_mbit: float) -> None:
    """Demands that the published uplink and the upload limit follow the line."""
    link, cap = subject.status.record().link, subject.node.traffic.up.mbit
    known_mbit = (link.up_mbit if link else None) or 0.0
    day = f"day {audit.world.now_s / 86_400:.2f}"
    audit.demand(
        0.4 * true_mbit < known_mbit < 1.7 * true_mbit,
        f"{day}: an uplink of {true_mbit:g} Mbit/s is published as {known_mbit:.3g}",
    )
    is_held = cap is not None and cap < true_mbit
    audit.demand(
        is_held if true_mbit < HOME_MBIT else cap is None,
        f"{day}: uploads of a line of {true_mbit:g} Mbit/s are held to {cap} Mbit/s",
    )


def _moved_bytes(subject: Subject) -> int:
    """Bytes that the line actually carried in both directions."""
    return subject.machine.line.moved_bytes + subject.machine.received_bytes


BOUNDS = (
    (relayed_messages, "MAX_PEERS"),
    (lines_module, "MAX_LINES"), (ledger, "MAX_KNOWN"), (tcp_dialer, "MAX_WAYS"),
    (transport, "MAX_PEERS"),
)  # fmt: skip
"""Bounds of data about other peers, each by module and name of the constant."""


def strangers(world: World, scale: Scale) -> Audit:
    """Thousands of peers come and go. They call, and are called after they have left.

    The number of peers with kept data is bounded. The bounds are 1/32 of the shipped bounds, so
    that fewer strangers reach them.
    """
    task = Task.new()
    for module, name in BOUNDS:
        world.set(module, name, getattr(module, name) // 32)
    near = Other(world, world.machine(), [])
    subject = Subject(world, task, Line(), list(near.node.addresses))
    audit = Audit(world, {"node": subject.node, "store": subject.store})
    sample, node = sampler(world, scale, audit), subject.node
    daemon = subject.daemon
    every = max(1, 800 // scale.rounds)
    payload = QUESTION + Question(kind="about").model_dump_json().encode()

    async def meet(peer: str) -> None:
        with suppress(Unreachable):
            await node.post(peer, b"hello", 5.0)
        with suppress(Unreachable):
            (await node.open_stream(peer, PROTOCOL, 5.0)).close()

    async def called(peer: str) -> None:
        handler, _ = daemon.handlers["swarm.request"]
        with suppress(HostileInput):
            await handler(_Payload(payload), SimpleNamespace(remote_id=PeerID.from_base58(peer)))

    for number in range(scale.rounds):
        world.threads.sleep(max((number + 1) * scale.round_s - world.now_s, 0.1))
        peers = [p for p in (peer_id_of(world.rng.randbytes(32)) for _ in range(every)) if p]

        async def everybody(peers: list[str] = peers) -> None:
            await asyncio.gather(*(meet(p) for p in peers), *(called(p) for p in peers))

        with world.at(subject.machine):
            node.run(everybody(), 120.0)
        sample()
    return audit


def clocks(world: World, scale: Scale) -> Audit:
    """The machine's oscillator is 60 ppm fast. An NTP client corrects the wall clock each hour.

    One time, the wall clock is wrong by an hour for a while.
    """
    task = Task.new()
    first = Other(world, world.machine(), [])
    known = list(first.node.addresses)
    others = [first, *(Other(world, world.machine(), known) for _ in range(2))]
    subject = Subject(world, task, Line(), known)
    clock = subject.machine.clock
    clock.drift = 60e-6
    audit, worst_s = Audit(world, {"node": subject.node}), 0.0
    sample = sampler(world, scale, audit)
    with world.at(subject.machine):
        own = ClockCheck(subject.node, lambda: [other.peer_id for other in others])
    at_s, next_hour_s = 0.0, HOUR_S
    while at_s < scale.seconds:
        world.threads.sleep(60.0)
        at_s = world.now_s
        is_wrong = 0.5 * scale.seconds < at_s < 0.5 * scale.seconds + 2 * HOUR_S
        if at_s >= next_hour_s:
            next_hour_s += HOUR_S
            clock.set_right()
            clock.stepped_s += HOUR_S if is_wrong else 0.0
        with world.at(subject.machine):
            subject.node.run(own.compare(), 30.0)
            off_s = abs(virtual_dht.dht_clock()() - clock.true_wall())
        worst_s = max(worst_s, off_s)
        audit.demand(
            off_s < LIMIT_S, f"the clock of records is off by more than {LIMIT_S:g} s, after all"
        )
        sample()
    return audit


def history_of(scale: Scale) -> tuple[Allowed, ...]:
    """The history that a peer keeps of its rounds."""
    a_day = scale.rounds / scale.days
    return (
        Allowed("events.jsonl", 2000 * a_day, "2 kB a round"),
        Allowed("PeerStatus._counted", 8 * a_day, "4,096 rounds", 33_000),
    )


SCENARIOS: dict[str, Callable[[World, Scale], Audit]] = {
    "transport": transfers,
    "publishing": publishing,
    "lines": lines,
    "strangers": strangers,
    "clocks": clocks,
    "store": storage_scenarios.store,
    "chain": storage_scenarios.chain,
    "exports": storage_scenarios.exports,
    "monitor": storage_scenarios.monitor,
    "reading": storage_scenarios.reading,
}
SHORT: dict[str, Scale] = {
    "transport": Scale(5.0, 1400),
    "publishing": Scale(0.2, 40),
    "lines": Scale(1.6, 64),
    "strangers": Scale(0.5, 48),
    "clocks": Scale(1.0, 24),
    "store": Scale(2.0, 200),
    "chain": Scale(4.0, 1000),
    "exports": Scale(8.0, 800),
    "monitor": Scale(2.0, 300),
    "reading": Scale(1.0, 100),
}
