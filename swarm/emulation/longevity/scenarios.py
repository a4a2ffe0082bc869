"""What happens in a month, one scenario for each group of classes that live as long as a peer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from swarm.emulation.longevity.audit import SAMPLES, Allowed, Audit
from swarm.emulation.longevity.sockets import Line
from swarm.emulation.longevity.subject import Other, Subject, Task, name_of
from swarm.emulation.longevity.world import DAY_S, World
from swarm.protocol.events import BlobWanted
from swarm.protocol.records import HEARTBEAT_S

HOUR_S = 3600.0


@dataclass(frozen=True)
class Scale:
    """How long a scenario lasts.

    Attributes:
        days: of virtual time.
        rounds: of the run in it.
    """

    days: float
    rounds: int

    @property
    def seconds(self) -> float:
        """Of virtual time."""
        return self.days * DAY_S

    @property
    def round_s(self) -> float:
        """From one round to the next."""
        return self.seconds / self.rounds


def _sampler(world: World, scale: Scale, audit: Audit) -> Callable[[], None]:
    """Samples when that is due; to be called often."""
    due = count(1)
    next_s = [scale.seconds / SAMPLES]

    def look() -> None:
        while world.now_s >= next_s[0]:
            audit.sample()
            next_s[0] = scale.seconds / SAMPLES * (next(due) + 1)

    return look


def transport(world: World, scale: Scale) -> Audit:
    """Fetches every round, with no direct way to one peer and none but a relay to another.

    The subject has one port forwarded, that of libp2p. Of the others one can be dialled, one has
    its port for direct streams closed, and one cannot be dialled at all. Once a day the subject's
    line is cut for 20 minutes in the middle of a fetch; peers are away for hours.
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
    sample, slowest_s, before = _sampler(world, scale, audit), 0.0, subject.timers()
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
        first = near if number % 8 == 0 else hidden if number % 8 == 4 else shut
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
    """Publishes at every heartbeat while the DHT fails, disks are full, and code has bugs.

    The publisher, presence, the peer's clock, its quota and its status run for real. In the first
    quarter each of what the publisher calls fails once with RuntimeError and MemoryError.
    """
    task, line = Task.new(), Line(lambda _: 80.0)
    near = Other(world, world.machine(), [])
    subject = Subject(world, task, line, list(near.node.addresses), quota_gb=1e6)
    tip = task.founding([near.peer_id, subject.node.peer_id])
    run = name_of(task, tip)
    world.net.dht_outages = [
        (at_s, at_s + 120.0) for at_s in (0.3 * scale.seconds, 0.6 * scale.seconds)
    ]
    world.disk.full = [(0.45 * scale.seconds, 0.45 * scale.seconds + 300.0)]
    subject.enter(tip, run)
    near.announce(run, subject.status.record())
    audit = Audit(
        world,
        {"node": subject.node, "status": subject.status, "publisher": subject.publisher},
        {"state": world.folder / "state"},
        allowed=[
            Allowed("events.jsonl", 2000 * scale.rounds / scale.days, "2 kB a round"),
            Allowed("PeerStatus._counted", 8 * scale.rounds / scale.days, "4,096 rounds", 33_000),
        ],
        quiet=[(b - 60.0, e + 60.0) for b, e in (*world.net.dht_outages, *world.disk.full)],
    )
    mine = subject.node.identity.public_key
    audit.rate(
        "the peer's record", HEARTBEAT_S + 2,
        lambda: sum(n for (key, owner), n in world.net.stored.items()
                    if owner == mine and "peers" in key),
    )  # fmt: skip
    audit.rate("the quota's count", 12.0, lambda: world.disk.calls["fsync"] / 2)
    sample, sabotage = _sampler(world, scale, audit), _sabotage(subject, scale)
    for number in range(scale.rounds):
        while world.now_s < (number + 1) * scale.round_s:
            world.threads.sleep(min(scale.round_s, 30.0))
            sabotage()
            sample()
        tip = task.following(tip, {}, run)
        subject.apply(tip)
    audit.demand(bool(subject.present), "nobody is seen in the run")
    return audit


def _sabotage(subject: Subject, scale: Scale) -> Callable[[], None]:
    """Has each of the calls of the publisher's loop fail once with each kind of error."""
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


SCENARIOS: dict[str, Callable[[World, Scale], Audit]] = {
    "transport": transport,
    "publishing": publishing,
}
SHORT: dict[str, Scale] = {
    "transport": Scale(4.0, 1140),
    "publishing": Scale(0.2, 40),
}
