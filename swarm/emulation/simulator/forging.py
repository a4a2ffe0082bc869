"""What strangers send everybody: keys of their own, and those of peers that are members no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from swarm.emulation.simulator.signing import sign
from swarm.emulation.simulator.surroundings import Packet
from swarm.emulation.simulator.world import World
from swarm.protocol.manifest import Kind, Manifest, Member, PeerId
from swarm.protocol.messages import (
    Ballot,
    Certificate,
    Commit,
    Header,
    Link,
    Ready,
    accept_statement,
    ready_statement,
)
from swarm.protocol.rounds.composition import compose_reform

STRANGER = "x0"


HEARD = 0.8
"""Share of the peers that a forgery reaches."""
Forged = list[tuple[PeerId, Packet]]
Forgery = Callable[[World], Forged]


def forge(world: World, forgery: Forgery) -> None:
    """Strangers, which are no peers here, send everybody something."""
    for source, (header, message) in forgery(world):
        left = world.door.let_in(source, header, message)
        for node in list(world.nodes.values()):
            if left is not None and world.random.random() < HEARD:
                world.at(world.random.random(), node.receive, source, Packet(header, left))


def invented_parent(world: World) -> Forged:
    """A manifest decided by the only member of a parent that nobody has ever seen."""
    tip, run = _newest(world), world.task.rules.run
    mine = {STRANGER: Member(0, 1.0)}
    parent = replace(tip, run=run, members=mine, contributors=(STRANGER,), height=tip.height + 3)
    owners = dict.fromkeys(tip.owners, (STRANGER,))
    forged = replace(
        parent, kind=Kind.QUORUM, height=parent.height + 1, parent=parent.digest, owners=owners
    )
    path = (Link(parent.head), Link(forged.head, _signed(world, forged, [STRANGER]), parent.head))
    return [_commit(world, forged, [STRANGER], path)]


def stranger_reform(world: World) -> Forged:
    """A reform by somebody that was no member, with a voter of the tip that signed nothing."""
    tip = _newest(world)
    members = {peer: Member(0, 1.0) for peer in (STRANGER, tip.order[0])}
    forged = compose_reform(tip, members, "ab" * 16, world.task.rules)
    path = (Link(tip.head), Link(forged.head, _signed(world, forged, [STRANGER]), tip.head))
    return [_commit(world, forged, [STRANGER], path)]


def yesterdays_majority(world: World) -> Forged:
    """Those that have gone for good sign what they like, where they once were a quorum."""
    tip = _newest(world)
    gone = [peer for peer, node in world.nodes.items() if node.has_left or peer not in tip.members]
    for link in world.nodes[_holder(world)].machine.chain.links[-2::-1]:
        keys = [peer for peer in gone if peer in link.head.voters]
        if link.head.is_quorum(keys):
            forged = replace(
                tip,
                height=tip.height + 1,
                parent=tip.digest,
                members={peer: Member(0, 1.0) for peer in sorted(keys)},
                owners=dict.fromkeys(tip.owners, (sorted(keys)[0],)),
                contributors=tuple(sorted(keys)),
            )
            step = Link(forged.head, _signed(world, forged, keys), tip.head)
            return [_commit(world, forged, keys, (Link(link.head), step))]
    return []


def older_keys(victim: PeerId) -> Forgery:
    """Those that were members before a peer went away show it what would follow its own tip."""

    def forgery(world: World) -> Forged:
        tip, node = world.disks[victim].record.tip, world.nodes[victim]
        for link in node.machine.chain.links[::-1]:
            keys = [p for p in link.head.voters if p in world.nodes and world.nodes[p].has_left]
            if link.head.is_quorum(keys) and not tip.is_quorum(keys):
                mine = {peer: Member(0, 1.0) for peer in sorted(keys)}
                forged = replace(
                    tip,
                    height=tip.height + 1,
                    round=tip.round + 1,
                    parent=tip.digest,
                    members=mine,
                    contributors=tuple(mine),
                    owners=dict.fromkeys(tip.owners, tuple(mine)[:1]),
                )
                signed = _signed(world, forged, keys)
                paths = [
                    (Link(tip.head), Link(forged.head, signed)),
                    (Link(link.head), Link(forged.head, signed, tip.head)),
                ]
                return [_commit(world, forged, keys, path) for path in paths]
        return []

    return forgery


def unsigned_ready(world: World) -> Forged:
    """A stranger speaks for nobody but itself."""
    tip = _newest(world)
    header = Header(tip.code, tip.digest, tip.generation)
    return [
        (peer, Packet(header, Ready(Ballot(0, tip.order[0]), None, None, 1e6, leave=True)))
        for peer in tip.members
    ]


def copied_invitation(world: World) -> Forged:
    """A stranger shows what another has shown, as it was relayed or stands in the manifest."""
    tip = _newest(world)
    shown = [world.credentials[peer] for peer in sorted(world.credentials)]
    if not shown:
        return []
    copy, run = world.random.choice(shown), world.task.rules.run
    header = Header(tip.code, tip.digest, tip.generation)
    ready = Ready(Ballot(0, tip.order[0]), None, None, 1.0, credential=copy)
    statement = ready_statement(run, tip.digest, ready.declared.declaration)
    signed = replace(ready, signature=sign(STRANGER, statement))
    return [(STRANGER, Packet(header, signed))]


FORGERIES: dict[str, Forgery] = {
    "invented_parent": invented_parent,
    "stranger_reform": stranger_reform,
    "yesterdays_majority": yesterdays_majority,
    "unsigned_ready": unsigned_ready,
}


def _holder(world: World) -> PeerId:
    return max(world.nodes, key=lambda peer: (world.disks[peer].record.tip.code, peer))


def _newest(world: World) -> Manifest:
    return world.disks[_holder(world)].record.tip


def _signed(world: World, manifest: Manifest, keys: Iterable[PeerId]) -> Certificate:
    ballot = Ballot(0, STRANGER)
    statement = accept_statement(world.task.rules.run, ballot, manifest.digest)
    return Certificate(ballot, {peer: sign(peer, statement) for peer in keys})


def _commit(
    world: World,
    manifest: Manifest,
    keys: Iterable[PeerId],
    path: tuple[Link, ...],
) -> tuple[PeerId, Packet]:
    header = Header(manifest.code, manifest.digest, manifest.generation)
    return STRANGER, Packet(header, Commit(manifest, _signed(world, manifest, keys), None, path))
