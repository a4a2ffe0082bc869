"""Strangers that forge messages, or join an open run and vanish (class vanishing-keys) [R7]."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random

from swarm.emulation.simulator.faults.faults import Draw, Mix, Scenario
from swarm.emulation.simulator.faults.world import Weather, World
from swarm.emulation.simulator.peers.participant import Character
from swarm.emulation.simulator.peers.surroundings import Packet
from swarm.emulation.simulator.symbols.signing import sign
from swarm.protocol.messages import messages
from swarm.protocol.rounds.policies.composition import compose_reform
from swarm.protocol.values.manifest import Kind, Manifest, Member, PeerId

STRANGER = "x0"


HEARD = 0.8
"""Share of the peers that a forgery reaches."""
Forged = list[tuple[PeerId, Packet]]
Forgery = Callable[[World], Forged]


def forge(world: World, forgery: Forgery) -> None:
    """Sends forged messages to peers, from strangers that are not simulated as peers."""
    for source, (header, message) in forgery(world):
        left = world.door.let_in(source, header, message)
        for node in list(world.nodes.values()):
            if left is not None and world.random.random() < HEARD:
                world.at(world.random.random(), node.receive, source, Packet(header, left))


def invented_parent(world: World) -> Forged:
    """A manifest decided by the only member of an invented parent."""
    tip, run = _newest(world), world.task.rules.run
    mine = {STRANGER: Member(0, 1.0)}
    parent = replace(tip, run=run, members=mine, contributors=(STRANGER,), height=tip.height + 3)
    owners = dict.fromkeys(tip.owners, (STRANGER,))
    forged = replace(
        parent, kind=Kind.QUORUM, height=parent.height + 1, parent=parent.digest, owners=owners
    )
    path = (
        messages.Link(parent.head),
        messages.Link(forged.head, _signed(world, forged, [STRANGER]), parent.head),
    )
    return [_commit(world, forged, [STRANGER], path)]


def stranger_reform(world: World) -> Forged:
    """A reform by a stranger. It lists a voter of the tip, which has not signed it."""
    tip = _newest(world)
    members = {peer: Member(0, 1.0) for peer in (STRANGER, tip.order[0])}
    forged = compose_reform(tip, members, "ab" * 16, world.task.rules)
    path = (
        messages.Link(tip.head),
        messages.Link(forged.head, _signed(world, forged, [STRANGER]), tip.head),
    )
    return [_commit(world, forged, [STRANGER], path)]


def yesterdays_majority(world: World) -> Forged:
    """A manifest forged by departed peers, for a height at which they once were a quorum."""
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
            step = messages.Link(forged.head, _signed(world, forged, keys), tip.head)
            return [_commit(world, forged, keys, (messages.Link(link.head), step))]
    return []


def older_keys(victim: PeerId) -> Forgery:
    """The forgery of a successor of an absent peer's own tip, by the members of that time."""

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
                    (messages.Link(tip.head), messages.Link(forged.head, signed)),
                    (messages.Link(link.head), messages.Link(forged.head, signed, tip.head)),
                ]
                return [_commit(world, forged, keys, path) for path in paths]
        return []

    return forgery


def unsigned_ready(world: World) -> Forged:
    """READYs in the names of members with a wish to leave, which the members never signed."""
    tip = _newest(world)
    header = messages.Header(tip.code, tip.digest, tip.generation)
    return [
        (
            peer,
            Packet(
                header,
                messages.Ready(messages.Ballot(0, tip.order[0]), None, None, 1e6, leave=True),
            ),
        )
        for peer in tip.members
    ]


def copied_invitation(world: World) -> Forged:
    """A copy of another peer's credential, relayed or from the manifest, shown by a stranger."""
    tip = _newest(world)
    shown = [world.credentials[peer] for peer in sorted(world.credentials)]
    if not shown:
        return []
    copy, run = world.random.choice(shown), world.task.rules.run
    header = messages.Header(tip.code, tip.digest, tip.generation)
    ready = messages.Ready(messages.Ballot(0, tip.order[0]), None, None, 1.0, credential=copy)
    statement = messages.ready_statement(run, tip.digest, ready.declared.declaration)
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


def _signed(world: World, manifest: Manifest, keys: Iterable[PeerId]) -> messages.Certificate:
    ballot = messages.Ballot(0, STRANGER)
    statement = messages.accept_statement(world.task.rules.run, ballot, manifest.digest)
    return messages.Certificate(ballot, {peer: sign(peer, statement) for peer in keys})


def _commit(
    world: World,
    manifest: Manifest,
    keys: Iterable[PeerId],
    path: tuple[messages.Link, ...],
) -> tuple[PeerId, Packet]:
    header = messages.Header(manifest.code, manifest.digest, manifest.generation)
    return STRANGER, Packet(
        header, messages.Commit(manifest, _signed(world, manifest, keys), None, path)
    )


MANY, FEW = 8, 3
"""Numbers of honest voters, vouched for by the founder. With three, one key may become a voter."""
GAP_S = 4 * 9.0
"""Longest time without a round: four rounds of 8 voters, each with up to 4 s of local steps and 5 s
of messages, some lost. Keys that vanished one by one, each when a round needed it, have made a
round take 28 s."""
FAIR = Weather(loss=0.0, duplication=0.0, delay_s=0.05)
"""Links that lose no message, so that only keys cause gaps between rounds."""
ONE_NETWORK = 0.3
"""Chance that the addresses of all keys are in one network. Otherwise the addresses are unknown."""
NETWORK = "192.0.2.0/24"
IDLE_S = 1e6
"""Seconds of local steps of a key that trains nothing."""


@dataclass(frozen=True)
class KeysMix(Mix):
    """The ingredients of class vanishing-keys."""

    keys: tuple[int, int] = (4, 50)

    def drawing(self) -> type[Draw]:
        """The class that draws its scenarios."""
        return KeysDraw


KEYS: dict[str, Mix] = {
    "V": KeysMix(
        peers=(MANY, MANY),
        experts=8,
        most_owners=2,
        strangers=0.0,
        faults=(0, 0),
        window_s=(70.0, 130.0),
        merging=0.2,
    )
}


class KeysDraw(Draw):
    """One scenario of keys against honest voters."""

    mix: KeysMix

    def __init__(self, mix: KeysMix, random: Random) -> None:
        super().__init__(mix, random)
        if random.random() < 0.3:
            self.peers = self.peers[:FEW]
        self.stable, self.victims, self.strangers = list(self.peers), [], []

    def scenario(self) -> Scenario:
        """Adds the keys, which come within a second and vanish one by one or at once."""
        random = self.random
        scenario = super().scenario()
        keys = [f"k{index:02}" for index in range(random.randint(*self.mix.keys))]
        came_s = random.uniform(5.0, 20.0)
        gone_s = random.uniform(came_s + 1.0, self.heal_s) if random.random() < 0.6 else None
        script = []
        for key in keys:
            end_s = gone_s or random.uniform(came_s + 1.0, self.heal_s)
            script.append((came_s + random.random(), World.join, (key,)))
            script.append((end_s, World.kill, (key,)))
        characters = {**scenario.setup.characters, **{key: self._key() for key in keys}}
        if (
            Random(scenario.heal_s).random() < ONE_NETWORK
        ):  # a separate generator, so a seed keeps its faults
            characters |= {key: replace(characters[key], network=NETWORK) for key in keys}
        return replace(
            scenario,
            setup=replace(scenario.setup, characters=characters),
            weather=FAIR,
            rough={},
            script=tuple(sorted((*scenario.script, *script), key=lambda line: line[0])),
            progress_s=GAP_S,
        )

    def _key(self) -> Character:
        works = self.random.random() < 0.6
        return Character(local_steps_s=self.random.uniform(1.0, 4.0) if works else IDLE_S)
