"""A convener that proposes invented members, owners or leavers gets no vote.

Nor does one that invents contributors, their work, or reducers' results.
"""

from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.errors import HostileInput
from swarm.network.rounds.inbound import verified
from swarm.network.wire.identity import Identity, load_or_create_identity
from swarm.protocol.messages.messages import (
    Accept,
    Accepted,
    Ballot,
    Evidence,
    Header,
    Message,
    Offer,
    Propose,
    Ready,
    ReducedUnit,
    ready_statement,
)
from swarm.protocol.rounds.campaign import Campaign
from swarm.protocol.rounds.policies.checks import successor_problem
from swarm.protocol.rounds.policies.composition import Attendance, compose_round
from swarm.protocol.rounds.policies.deals import book_after
from swarm.protocol.rounds.policies.rosters import plan_roster
from swarm.protocol.rounds.proposer import Proposer
from swarm.protocol.values.manifest import Manifest, Wish, leave_statement
from tests.protocol.round_pump import Pump, in_training, make_offer, make_rules, name

RULES = replace(make_rules(experts=6), round_seconds=3.2)
"""With a time instead of a number of steps, tokens depend on a peer's claim."""
Forge = Callable[[Manifest, Manifest, str], Manifest]
"""A manifest, its parent and the forger -> the forger's proposal."""


def dealt_anew(manifest: Manifest, parent: Manifest) -> Manifest:
    """The manifest with the deals that follow from its members, as all peers check."""
    book = book_after(parent, manifest.work, manifest.members, manifest.tokens, RULES)
    return replace(manifest, cursor=book.cursor, holes=book.holes, dealt=book.dealt)


def alone(manifest: Manifest, parent: Manifest, me: str) -> Manifest:
    owners = dict.fromkeys(manifest.owners, (me,))
    members = {me: manifest.members[me]}
    return dealt_anew(replace(manifest, members=members, owners=owners), parent)


def without_one(manifest: Manifest, parent: Manifest, me: str) -> Manifest:
    """Another member leaves, and the forger gets its experts."""
    victim = next(peer for peer in manifest.members if peer != me)
    members = {peer: member for peer, member in manifest.members.items() if peer != victim}
    owners = {e: (me,) if victim in names else names for e, names in manifest.owners.items()}
    return dealt_anew(replace(manifest, members=members, owners=owners), parent)


def all_experts(manifest: Manifest, parent: Manifest, me: str) -> Manifest:
    return replace(manifest, owners=dict.fromkeys(manifest.owners, (me,)))


def long_silent(manifest: Manifest, parent: Manifest, me: str) -> Manifest:
    """All others have been silent for three rounds, and leave with the next."""
    members = {
        peer: member if peer == me else replace(member, silent=3)
        for peer, member in manifest.members.items()
    }
    return replace(manifest, members=members)


def strong(manifest: Manifest, parent: Manifest, me: str) -> Manifest:
    """A member gets another capacity than it has declared."""
    silent = {p: replace(m, silent=1, capacity=1e-9) for p, m in manifest.members.items()}
    return replace(manifest, members={**silent, me: manifest.members[me]})


def outvoted(manifest: Manifest, parent: Manifest, me: str) -> Manifest:
    """More strangers than members come at once."""
    strangers = {
        f"Z{k}": replace(manifest.members[me], silent=1, counted=0, votes=False, vouched=False)
        for k in range(9)
    }
    return dealt_anew(replace(manifest, members={**manifest.members, **strangers}), parent)


def settled(manifest: Manifest, parent: Manifest, me: str) -> Manifest:
    """A stranger joins without a trial."""
    stranger = replace(manifest.members[me], silent=1)
    return dealt_anew(replace(manifest, members={**manifest.members, "Z": stranger}), parent)


def invented(manifest: Manifest, parent: Manifest, me: str) -> Manifest:
    """One more peer has contributed, with values of the forger and the weight of a round."""
    ghosts = [peer for peer in parent.members if peer not in manifest.contributors]
    if not ghosts:
        return heavier(manifest, parent, me)
    ghost = ghosts[0]
    offers = {**offers_of(manifest, parent), ghost: make_offer(RULES, ghost, parent)}
    return composed(manifest, parent, offers)


def heavier(manifest: Manifest, parent: Manifest, me: str) -> Manifest:
    """The forger claims twice the work, so that its values weigh twice."""
    offers = offers_of(manifest, parent)
    mine = replace(offers[me], tokens=2 * offers[me].tokens, steps=2 * offers[me].steps)
    return composed(manifest, parent, {**offers, me: mine})


def other_means(manifest: Manifest, parent: Manifest, me: str) -> Manifest:
    """The means of other reducers are replaced."""
    entries = {
        unit: replace(entry, digest=name("forged", unit)) if entry.source != me else entry
        for unit, entry in manifest.entries.items()
        if unit in manifest.sources
    }
    return replace(manifest, entries={**manifest.entries, **entries})


def offers_of(manifest: Manifest, parent: Manifest) -> dict[str, Offer]:
    """The offers, as of the pump's peers."""
    return {peer: make_offer(RULES, peer, parent) for peer in manifest.contributors}


def composed(manifest: Manifest, parent: Manifest, offers: dict[str, Offer]) -> Manifest:
    """A consistent round of these offers, with all other fields unchanged."""
    plan = plan_roster(parent, offers, RULES)
    means = {unit: ReducedUnit(name("any", unit), RULES.unit_bytes[unit]) for unit in plan.reducers}
    members = manifest.members
    heard = [peer for peer, member in members.items() if not member.silent]
    joiners = {peer: m.capacity for peer, m in members.items() if peer not in parent.members}
    return compose_round(parent, plan, means, Attendance(heard, {}, joiners), RULES)


FORGERIES = [alone, without_one, all_experts, long_silent, strong, outvoted, settled]
INVENTIONS = [invented, heavier, other_means]
"""Parent and manifest do not show these. Before evidence was required, all voted for them."""


def usurped(forge: Forge, *, one_is_away: bool = False) -> tuple[Pump, str, list[Message]]:
    """Four peers, with a forger as the first convener of the third round, and its votes.

    One peer may be away, so that it does not contribute.
    """
    votes: list[Message] = []

    class Usurper(Proposer):
        def propose(
            self, campaign: Campaign, manifest: Manifest, evidence: Evidence | None, why: str
        ) -> None:
            super().propose(campaign, forge(manifest, self.tip, self.me), evidence, why)

    pump = in_training("ABCD", RULES)
    forger = pump.first
    if one_is_away:
        silent = pump.last
        pump.kill(silent)
        pump.after(60.0, lambda: pump.restart(silent))
    pump.nodes[forger].machine._proposer.__class__ = Usurper

    def watch(source: str, destination: str, message: Message) -> bool:
        if isinstance(message, Accept) and destination == forger:
            votes.append(message)
        return False

    pump.lose = watch
    return pump, forger, votes


def reasons_of(pump: Pump, peers: str) -> str:
    return "".join(reason.text for peer in peers for reason in pump.nodes[peer].reasons)


@pytest.mark.parametrize("forge", INVENTIONS)
def test_nobody_votes_for_work_that_nobody_has_put_its_name_to(forge: Forge) -> None:
    found: list[str | None] = []

    def noted(manifest: Manifest, parent: Manifest, me: str) -> Manifest:
        lie = forge(manifest, parent, me)
        assert lie != manifest
        found.append(successor_problem(lie, parent, RULES, due=False))
        return lie

    pump, forger, votes = usurped(noted, one_is_away=True)
    honest = pump.others(forger)
    pump.run_to_height(5, honest, within_s=400.0)
    assert found and found[0] is None
    assert not [vote for vote in votes if isinstance(vote, Accept) and vote.ballot.attempt == 0]
    assert f"PROPOSE from {forger}" in reasons_of(pump, honest)


@pytest.mark.parametrize("forge", FORGERIES)
def test_nobody_votes_for_members_and_owners_that_do_not_follow(forge: Forge) -> None:
    pump, forger, votes = usurped(forge)
    honest = pump.others(forger)
    pump.run_to_height(5, honest, within_s=400.0)
    assert not votes
    for peer in honest:
        assert all(m.members.keys() >= set(honest) for m in pump.nodes[peer].applied)
    assert "PROPOSE from" in reasons_of(pump, honest)


def test_who_leaves_on_wish_says_so_under_its_own_key(tmp_path: Path) -> None:
    """A wish belongs to one peer, run and tip. Shells drop messages with other ones."""
    run, tip = "run-1", name("tip")
    leaver, other = (load_or_create_identity(tmp_path / each) for each in ("a", "b"))
    wrong = {
        "another's key": (other, leave_statement(run, tip)),
        "another run": (leaver, leave_statement("run-2", tip)),
        "another tip": (leaver, leave_statement(run, name("before"))),
    }
    header = Header(((1, ()),), tip, "0")
    first = in_training("A", RULES, height=1).tip_of("A")

    def signed(ready: Ready, signer: Identity) -> Ready:
        statement = ready_statement(run, tip, ready.declared.declaration)
        return replace(ready, signature=signer.sign(statement))

    def messages(wish: Wish) -> list[tuple[Message, str]]:
        manifest = replace(first, parent=tip, wishes={leaver.peer_id: wish})
        ballot = Ballot(1, other.peer_id)
        return [
            (signed(Ready(ballot, None, None, 1.0, leave=True, wish=wish), leaver), leaver.peer_id),
            (signed(Ready(ballot, None, Accepted(ballot, manifest), 1.0), other), other.peer_id),
            (Propose(ballot, manifest, ()), other.peer_id),
        ]

    for message, source in messages(wish_of(leaver, leave_statement(run, tip))):
        assert verified(header, message, source, run) == message
    for signer, statement in wrong.values():
        for message, source in messages(wish_of(signer, statement)):
            with pytest.raises(HostileInput):
                verified(header, message, source, run)


def wish_of(signer: Identity, statement: bytes) -> Wish:
    return b64encode(signer.sign(statement)).decode()


def test_a_wish_of_somebody_that_stays_is_refused() -> None:
    pump = in_training("AB", RULES)
    parent, tip = pump.nodes["A"].applied[:2]
    assert successor_problem(tip, parent, RULES, due=False) is None
    wished = replace(tip, wishes={"B": ""})
    assert successor_problem(wished, parent, RULES, due=False)


def test_a_convener_that_takes_votes_and_announces_nothing_is_replaced() -> None:
    """It returned before its successors each time, so there was no round for minutes."""

    class Silent(Proposer):
        def is_chosen(self, campaign: Campaign) -> bool:
            return False

    pump = in_training("ABCD", RULES)
    forger = pump.first
    pump.nodes[forger].machine._proposer.__class__ = Silent
    honest = pump.others(forger)
    height = pump.tip_of(honest[0]).height
    took_s = pump.run_to_height(height + 1, honest, within_s=200.0)
    assert took_s < pump.timers.attempt_limit_s(0) + 5 * pump.timers.heartbeat_s
    assert "its attempt 0 had this peer's vote: others convene next" in reasons_of(pump, honest)
