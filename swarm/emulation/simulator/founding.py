"""How a simulated swarm begins."""

from __future__ import annotations

from dataclasses import replace

from swarm.emulation.simulator.taking_part import Setup
from swarm.emulation.simulator.values import Initial, Values
from swarm.experts import expert_of_unit
from swarm.protocol.manifest import FOUNDING_GENERATION, Entry, Founding, Kind, Manifest, Member
from swarm.protocol.ownership import assign
from swarm.protocol.rounds.deals import first_book
from swarm.protocol.texts import Text
from swarm.protocol.voting import TRIAL_ROUNDS

TEXT = Text("text", "byte", "digest", documents=1, tokens=2001, windows=500)


def found(setup: Setup, values: Values) -> Manifest:
    """Manifest 0 with all founders as members."""
    rules = setup.rules
    characters = {peer: setup.characters[peer] for peer in sorted(setup.founders)}
    members = {
        peer: Member(0, each.capacity, room=each.rooms[0]) for peer, each in characters.items()
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
        unit: Entry(values.digest_of(Initial(unit)), size, 0, founder, rules.unit_codec[unit])
        for unit, size in rules.unit_bytes.items()
    }
    founding = Founding(founder, "nonce", "config", 1, "validation", 4, TEXT)
    book = first_book(founding, members, rules)
    return Manifest(
        run="",
        generation=FOUNDING_GENERATION,
        height=0,
        round=0,
        kind=Kind.FOUNDING,
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
