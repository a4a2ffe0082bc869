"""Allowed senders of each type of message: members and strangers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.protocol.messages.events import Record
from swarm.protocol.messages.message_bytes import encode
from swarm.protocol.messages.messages import (
    Accept,
    Accepted,
    Ballot,
    Commit,
    Hello,
    Message,
    Prepare,
    Propose,
    Ready,
    Reduced,
    Roster,
)
from swarm.protocol.messages.signatures import (
    MAX_STRANGER_PROOF_BYTES,
    Claim,
    Standing,
    claim_of,
    outline_of,
    refusal_of,
    standing_in,
    who_takes_part,
)
from swarm.protocol.values.manifest import MAX_MANIFEST_BYTES
from tests.protocol.round_pump import found, header_of, make_offer, make_rules

RULES = make_rules()
TIP = found(RULES, ["A", "B"])
HEADER = header_of(TIP)
BALLOT = Ballot(1, "A")
OFFER = make_offer(RULES, "B", TIP)
VOTE = Accepted(BALLOT, TIP)

CASES: list[tuple[Message, int, str | None]] = [
    (Hello(ask=True), 0, None),
    (Prepare(BALLOT), 0, None),
    (Ready(BALLOT, None, None, 1.0), 0, None),
    (Ready(BALLOT, OFFER, None, 1.0), 1, "ready_of_stranger"),
    (Ready(BALLOT, None, VOTE, 1.0), 1, "ready_of_stranger"),
    (Roster(BALLOT, TIP.digest, {"B": OFFER}, {"A": 0}), 1, "roster_of_stranger"),
    (Roster(BALLOT, TIP.digest, {}, {"A": 0}), 0, "roster_of_stranger"),
    (Reduced(BALLOT, TIP.digest, {}, {}), 0, "reduced_of_stranger"),
    (Propose(BALLOT, TIP, ()), 1, "propose_of_stranger"),
    (Accept(BALLOT, TIP.digest, bytes(64)), 0, "accept_of_stranger"),
    (Commit(TIP, None, None), 2, None),
    (Commit(replace(TIP, height=1), None, TIP), 3, None),
]


@pytest.mark.parametrize(("message", "attachments", "refusal"), CASES)
def test_each_type_of_message_from_member_and_stranger(
    message: Message, attachments: int, refusal: str | None
) -> None:
    claim = claim_of(encode(HEADER, message)[0])
    assert claim.kind == type(message).__name__.lower()
    assert len(claim.attachments) == attachments
    assert claim.header == HEADER
    outline = outline_of(message)
    assert (outline.kind, len(outline.attachments)) == (claim.kind, attachments)
    for judged in (claim, outline):
        assert refusal_of(judged, Standing.VOTER) is None
        of_trainee = f"{claim.kind}_of_trainee"
        is_refused = claim.kind in ("roster", "propose", "accept")
        assert refusal_of(judged, Standing.TRAINEE) == (of_trainee if is_refused else None)
        assert refusal_of(judged, Standing.STRANGER) == refusal


def test_all_types_of_messages_are_tried() -> None:
    assert {type(message) for message, *_ in CASES} == set(Message.__args__)


def test_a_strangers_commit_may_have_any_manifest_and_a_small_proof() -> None:
    manifest = ("00" * 32, MAX_MANIFEST_BYTES)
    most, more = (("11" * 32, MAX_STRANGER_PROOF_BYTES + extra) for extra in (0, 1))
    assert refusal_of(Claim("commit", (manifest, most, manifest)), Standing.STRANGER) is None
    for attachments in ((manifest, more), (manifest, more, manifest)):
        assert refusal_of(Claim("commit", attachments), Standing.STRANGER) == "proof_of_stranger"
        assert refusal_of(Claim("commit", attachments), Standing.VOTER) is None


def test_plausible_are_members_of_the_tip_its_parent_and_what_was_voted_for() -> None:
    parent, tip, voted = (found(RULES, names) for names in (["A", "B"], ["B", "C"], ["C", "D"]))
    assert who_takes_part(Record(tip, None, None))[0] == {"B", "C"}
    assert who_takes_part(Record(tip, None, parent))[0] == {"A", "B", "C"}
    record = Record(tip, None, None, None, Accepted(BALLOT, voted))
    assert who_takes_part(record)[0] == {"B", "C", "D"}


def test_a_trainee_is_who_votes_nowhere_that_is_plausible() -> None:
    tip = found(RULES, ["A", "B", "C"])
    members = {p: replace(m, votes=p == "A") for p, m in tip.members.items()}
    young = replace(tip, members=members)
    assert who_takes_part(Record(young, None, None))[1] == {"B", "C"}
    record = Record(young, None, replace(tip, members={"B": tip.members["B"]}))
    assert who_takes_part(record)[1] == {"C"}
    standings = [standing_in(record, peer) for peer in "ABCD"]
    assert standings == [Standing.VOTER, Standing.VOTER, Standing.TRAINEE, Standing.STRANGER]
