"""One message of a member with the last possible attempt stops every round forever.

The attempt was within the bound of the wire, but the ballots after it were not, and a record that
promised it could not be read again. The rules run in real round machines under a fake clock.
Messages go through the real codec, and records through real files.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.config.section import MAX_COUNT
from swarm.errors import BadManifest, BadMessage
from swarm.network.rounds.record_file import RecordFile
from swarm.protocol.messages.events import Received, Record, Topic
from swarm.protocol.messages.message_bytes import decode, decode_offer, encode, foreign_manifest
from swarm.protocol.messages.messages import (
    MAX_ATTEMPT,
    Accepted,
    Ballot,
    Message,
    Offer,
    Prepare,
    Propose,
    Ready,
    Roster,
)
from swarm.protocol.rounds.acceptor import LEAP, attempt_problem
from swarm.protocol.values.manifest import Member
from tests.protocol.round_pump import Pump, found, header_of, in_training, make_rules

LAST = 2**31
FIRST = found(make_rules(), ["A", "B"], run="run-1")


def liar_and_honest(pump: Pump) -> tuple[str, str]:
    """A member that does not convene the next height, and all others."""
    return pump.last, pump.others(pump.last)


def tell(pump: Pump, liar: str, honest: str, message: Message) -> None:
    encoded, blobs = encode(header_of(pump.tip_of(liar)), message)
    for peer in honest:
        pump.give(peer, Received(liar, *decode(encoded, blobs)))


def lies(pump: Pump, liar: str) -> list[Message]:
    """All messages by which a member can name an attempt."""
    machine = pump.nodes[liar].machine
    first, mine = machine.tip.order[0], Ballot(LAST, liar)
    return [
        Prepare(mine),
        Propose(mine, machine.tip, (liar,)),
        Roster(mine, "0" * 64, {}, {liar: 0}),
        Ready(mine, None, None, 1.0),
        Ready(Ballot(LAST, first), None, None, 1.0),
        Ready(Ballot(LAST - 1, liar), None, None, 1.0),
    ]


@pytest.mark.parametrize("lie", range(6))
@pytest.mark.parametrize("peers", ["ABC", "ABCDE"])
def test_one_message_with_the_last_attempt_stops_nobody(peers: str, lie: int) -> None:
    pump = in_training(peers)
    liar, honest = liar_and_honest(pump)
    tell(pump, liar, honest, lies(pump, liar)[lie])
    pump.run_to_height(5, honest)
    for peer in honest:
        record = pump.nodes[peer].record
        assert record.promised is None or record.promised.attempt < LEAP
    said = pump.said(Topic.REFUSED, honest)
    assert "is implausible: no other member has named more than" in said


def test_the_same_every_second_stops_nobody_either() -> None:
    pump = in_training("ABCD")
    liar, honest = liar_and_honest(pump)

    def lie() -> None:
        for message in lies(pump, liar):
            tell(pump, liar, honest, message)
        pump.after(1.0, lie)

    lie()
    pump.run_to_height(6, honest)
    assert len(pump.digests_at(6, honest)) == 1


def test_two_members_that_fail_after_each_other_are_followed_wherever_they_are() -> None:
    """A peer that was away during thousands of attempts believes the second member's report."""
    pump = in_training("ABCD")
    first, second, _, back = pump.order
    machine = pump.nodes[back].machine
    header = header_of(machine.tip)
    far = 5 * LEAP
    machine.handle(Received(first, header, Prepare(Ballot(far, first))), pump.now)
    assert machine.record.promised is None
    machine.handle(Received(second, header, Prepare(Ballot(far + 1, second))), pump.now)
    assert machine.record.promised == Ballot(far + 1, second)


def test_what_is_plausible() -> None:
    def problem(attempt: int, claims: dict[str, int], passed_s: float = 0.0) -> str | None:
        ballot = Ballot(attempt, "L")
        return attempt_problem(ballot, "L", claims, passed_s=passed_s, takeover_s=1.5)

    assert problem(LEAP, {}) is None
    assert "limit 1024" in str(problem(LEAP + 1, {}))
    assert problem(LEAP + 1, {}, passed_s=1.5) is None, "time makes room for takeovers"
    assert problem(LEAP + 7, {"A": 7, "L": LAST}) is None
    assert problem(LEAP + 8, {"A": 7, "L": LAST}) is not None, "its own claim does not count"
    assert problem(LAST, {"A": LAST - 1}) is None
    assert problem(LAST + 1, {"A": LAST}) is not None
    # With a leap at each takeover at one height, the last attempt is months away.
    assert LAST / (LEAP + 1) * 1.5 > 30 * 86_400


def test_nobody_goes_beyond_the_bound_that_receivers_check() -> None:
    pump = in_training("ABC")
    machine = pump.nodes[pump.last].machine  # convenes nothing yet
    machine._standing.persist_promise(Ballot(MAX_ATTEMPT, "C"))
    machine._takeover.take_over("nobody convenes")
    assert machine._succession.campaign is None
    header = header_of(machine.tip)
    decode(*encode(header, Prepare(Ballot(MAX_ATTEMPT, "A"))))
    beyond, _ = encode(header, Prepare(Ballot(MAX_ATTEMPT + 1, "A")))
    with pytest.raises(BadMessage, match="attempt"):
        decode(beyond, {})


@pytest.mark.parametrize("attempt", [MAX_ATTEMPT + 1, 2**62])
@pytest.mark.parametrize("has_voted", [True, False])
def test_a_record_beyond_the_bound_is_repaired_and_its_peer_abstains(
    tmp_path: Path, caplog, attempt: int, has_voted: bool
) -> None:
    ballot = Ballot(attempt, "A")
    written = Record(FIRST, None, None, ballot, Accepted(ballot, FIRST) if has_voted else None)
    file = RecordFile(tmp_path / "record")
    file.write(written)
    read = file.read()
    assert read == Record(FIRST, None, None, abstain_until_height=FIRST.height + 1)
    assert "beyond the bound" in caplog.text
    file.write(read)
    assert file.read() == read, "and is valid from then on"


def test_an_abstention_that_goes_further_is_kept(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "record")
    file.write(Record(FIRST, None, None, Ballot(LAST + 1, "A"), None, abstain_until_height=9))
    read = file.read()
    assert read and read.abstain_until_height == 9


@pytest.mark.parametrize(
    "field", ["height", "round", "step", "tokens", "merged", "member", "entry", "work", "lineage"]
)
@pytest.mark.parametrize("count", [MAX_COUNT + 1, 10**400, -1])
def test_a_manifest_whose_counts_nobody_could_pass_on_is_refused(field: str, count: int) -> None:
    foreign_manifest(FIRST.encoded)
    unit, entry = next(iter(FIRST.entries.items()))
    changes = {
        "member": {"members": {**FIRST.members, "A": Member(count, 1.0)}},
        "entry": {"entries": {**FIRST.entries, unit: replace(entry, version=count)}},
        "work": {"work": {"A": count}},
        "lineage": {"lineage": ((count, (1, "0a")),)},
    }.get(field, {field: count})
    with pytest.raises(BadManifest):
        foreign_manifest(replace(FIRST, **changes).encoded)


@pytest.mark.parametrize("capacity", ["NaN", "Infinity", "-1.0", "1e300"])
def test_a_member_without_a_plausible_capacity_is_refused(capacity: str) -> None:
    marked = replace(FIRST, members={**FIRST.members, "A": Member(0, 0.123)}).encoded
    assert marked.count(b"0.123") == 1
    with pytest.raises(BadManifest):
        foreign_manifest(marked.replace(b"0.123", capacity.encode()))


@pytest.mark.parametrize("field", ["steps", "tokens"])
def test_an_offer_may_not_bring_a_run_to_the_bound_of_its_sums(field: str) -> None:
    offer = Offer("0" * 64, 1, 1, {})
    assert decode_offer(replace(offer, **{field: 2**40}).encoded).is_late
    with pytest.raises(BadMessage, match=field):
        decode_offer(replace(offer, **{field: 2**40 + 1}).encoded)
    assert json.loads(offer.encoded)[field] == 1
