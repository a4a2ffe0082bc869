"""Messages, offers and records as bytes: exact both ways, small, and strict."""

import json
from base64 import b64encode
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import BadManifest, BadMessage, HostileInput, StateError
from swarm.protocol.chain.chain_record import decode_record, encode_record
from swarm.protocol.messages.events import Record
from swarm.protocol.messages.message_bytes import (
    MAX_MESSAGE_BYTES,
    BareMessage,
    decode,
    decode_offer,
    encode,
    encode_evidence,
)
from swarm.protocol.messages.messages import (
    MAX_ATTEMPT,
    Accept,
    Accepted,
    Ballot,
    Certificate,
    Commit,
    Declaration,
    Declared,
    Evidence,
    Header,
    Hello,
    Link,
    Message,
    Prepare,
    Propose,
    Ready,
    Reduced,
    ReducedUnit,
    Report,
    Roster,
)
from swarm.protocol.messages.schemas import (
    MAX_HOLDERS,
    MAX_MISSING,
    MAX_REFORMS,
    MAX_RELAYS,
    MAX_RESULTS,
)
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.invitation import Credential, Invitation, Used
from swarm.protocol.values.manifest import FormerMember, Kind, Manifest, Member
from tests.protocol.round_pump import found, header_of, make_offer, make_rules, name

RULES = make_rules()
TIP = replace(found(RULES, ["A", "B"]), run="run-1")
INVITATION = Invitation("run-1", "K", 2, 0, 7, "A", "A" * 86 + "==")
CREDENTIAL = Credential(INVITATION, "B" * 85 + "A==")
NEXT = replace(
    TIP,
    height=1,
    round=1,
    kind=Kind.QUORUM,
    parent=TIP.digest,
    sources={"shared.0": (("A", name(1)), ("B", name(2)))},
    lineage=((0, (2, "ab" * 16)),),
    invited={"B": CREDENTIAL},
    invitations={INVITATION.name: Used(7, ("B",))},
    absent={"C": FormerMember(1, 3, 2, weight=8)},
    reasons=("B joined",),
)
OFFER = make_offer(RULES, "A", TIP)
BALLOT = Ballot(3, "A")
HEADER = header_of(NEXT)
SIGNATURE = b"s" * 64
EVIDENCE = Evidence(
    {
        "A": Declared(Declaration(OFFER.digest, 2.5, 1.0, leave=False), SIGNATURE),
        "C": Declared(Declaration(None, 0.0, 2.0, leave=True), SIGNATURE),
    },
    {"A": 50},
    name("roster"),
    (Report("A", {"expert.1": ReducedUnit(name(3), 7)}, SIGNATURE),),
)
CERTIFICATE = Certificate(BALLOT, {"A": SIGNATURE, "B": SIGNATURE})
MESSAGES: list[Message] = [
    Hello(ask=True),
    Prepare(BALLOT),
    Ready(BALLOT, OFFER, Accepted(Ballot(1, "B"), NEXT, EVIDENCE), 2.5, leave=True),
    Ready(BALLOT, None, None, 1.0),
    Roster(BALLOT, name("roster"), {"A": OFFER, "B": OFFER}, {"A": 0, "B": 40}),
    Roster(BALLOT, name("roster"), {}, {}),
    Reduced(BALLOT, name("roster"), {"expert.1": ReducedUnit(name(3), 7)}, {"B": "no answer"}),
    Propose(BALLOT, NEXT, ("A",), EVIDENCE),
    Accept(BALLOT, NEXT.digest, SIGNATURE),
    Ready(BALLOT, None, Accepted(Ballot(1, "B"), NEXT), 2.5, uplink_mbit=40, signature=SIGNATURE),
    Propose(BALLOT, NEXT, ("A",)),
    Commit(NEXT, CERTIFICATE, TIP),
    Commit(NEXT, None, None),
    Commit(NEXT, None, None, (Link(TIP.head), Link(NEXT.head, CERTIFICATE, TIP.head))),
    Ready(Ballot(0, "A"), None, None, 1.0, credential=CREDENTIAL),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    payload, attachments = encode(HEADER, message)
    bare = BareMessage(payload)
    named = dict(bare.attachments) | dict(bare.attachments_within(attachments))
    assert named == {d: len(blob) for d, blob in attachments.items()}
    assert decode(payload, attachments) == (HEADER, message)


def test_a_roster_s_offers_are_named_by_the_list_beside_it() -> None:
    payload, attachments = encode(HEADER, MESSAGES[4])
    roster = BareMessage(payload)
    ((listed, _),) = roster.attachments
    assert listed not in dict(roster.attachments_within(attachments))
    assert roster.holders({}) == {}, "nobody knows before the list is here"
    assert set(roster.holders(attachments).values()) <= {("A",), ("B",)}
    for spoilt, reason in ((b"", "attachment_digest"), (None, "attachment_missing")):
        with pytest.raises(BadMessage) as caught:
            roster.attachments_within({listed: spoilt} if spoilt is not None else {})
        assert caught.value.reason == reason
    heartbeat, nothing = encode(HEADER, MESSAGES[5])
    assert not nothing and not BareMessage(heartbeat).attachments
    assert not BareMessage(heartbeat).attachments_within({})


def test_offers_and_manifests_travel_beside_the_message() -> None:
    payload, attachments = encode(HEADER, MESSAGES[2])
    assert attachments == {
        digest_of(OFFER.encoded): OFFER.encoded,
        NEXT.blob: NEXT.encoded,
        digest_of(encode_evidence(EVIDENCE)): encode_evidence(EVIDENCE),
    }
    assert b"entries" not in payload
    assert b"shared" not in payload


LARGEST_CODE = (
    *((2**40, (2**20, "f" * 32)) for _ in range(MAX_REFORMS)),
    (2**40, ()),
)
LARGEST_HEADER = Header(LARGEST_CODE, name("tip"), "f" * 32)
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def _peer(number: int) -> str:
    """A name as long as a libp2p peer id."""
    return "12D3KooW" + "z" * 42 + BASE58[number // 58] + BASE58[number % 58]


def _largest() -> list[Message]:
    """Each message in a swarm of 1,024, with fields as large as their schemas allow."""
    peers = [_peer(number) for number in range(1024)]
    ballot = Ballot(MAX_ATTEMPT, peers[0])
    signatures = dict.fromkeys(peers, SIGNATURE)
    wish = b64encode(SIGNATURE).decode()
    results = {
        f"shared.{999_999 - part}": ReducedUnit(name(part), 2**62) for part in range(MAX_RESULTS)
    }
    missing = dict.fromkeys(peers[:MAX_MISSING], "\u0001\U0001f600" * 1000)
    return [
        Hello(ask=False),
        Prepare(ballot),
        Ready(
            ballot, OFFER, Accepted(ballot, NEXT, EVIDENCE), 1.2345678901234567e-300, leave=False,
            dialable=False, remaining_s=1.2345678901234567e-300,
            worked_s=1.2345678901234567e-300, wish=wish, uplink_mbit=10**6,
            signature=SIGNATURE,
        ),
        Roster(ballot, name("id"), dict.fromkeys(peers, OFFER), dict.fromkeys(peers, 10**6)),
        Reduced(ballot, name("id"), results, missing, SIGNATURE),
        Propose(
            ballot, NEXT, tuple(peers[:MAX_HOLDERS]), EVIDENCE, tuple(peers[:MAX_RELAYS])
        ),
        Accept(ballot, NEXT.digest, SIGNATURE),
        Commit(NEXT, Certificate(ballot, signatures), TIP),
    ]  # fmt: skip


@pytest.mark.parametrize("message", _largest(), ids=lambda message: type(message).__name__)
def test_no_message_of_a_thousand_peers_is_over_64_kb(message: Message) -> None:
    payload, attachments = encode(LARGEST_HEADER, message)
    assert len(payload) < MAX_MESSAGE_BYTES == 65_536
    header, heard = decode(payload, attachments)
    assert header == LARGEST_HEADER, "all of it is legal"
    assert type(heard) is type(message)


def test_whatever_a_message_lists_has_a_bound_on_the_wire_too() -> None:
    """A list with one more element is refused, so no honest convener can be made to repeat it."""
    *_, reduced, propose, _, _ = _largest()
    assert isinstance(reduced, Reduced) and isinstance(propose, Propose)
    unit, result = next(iter(reduced.results.items()))
    for longer in (
        replace(reduced, results={**reduced.results, f"{unit}0": result}),
        replace(reduced, missing={**reduced.missing, _peer(1025): ""}),
        replace(propose, holders=(*propose.holders, _peer(1025))),
        replace(propose, relays=(*propose.relays, _peer(1025))),
    ):
        payload, attachments = encode(HEADER, longer)
        with pytest.raises(BadMessage):
            decode(payload, attachments)


def test_a_message_that_would_be_too_large_is_an_error_that_its_sender_survives() -> None:
    """`RoundDriver` logs a StateError and continues. An assertion ended the convener's process."""
    code = LARGEST_CODE[:-1] * 3
    with pytest.raises(StateError, match="HELLO of"):
        encode(replace(LARGEST_HEADER, code=code), Hello(ask=True))


def test_a_record_comes_back_from_the_disk_as_it_was() -> None:
    for record in (
        Record(TIP, None, None),
        Record(NEXT, CERTIFICATE, TIP, BALLOT, Accepted(BALLOT, NEXT, EVIDENCE), 9),
        Record(TIP, None, None, BALLOT, Accepted(BALLOT, NEXT)),
    ):
        assert decode_record(encode_record(record)) == record
    with pytest.raises(BadMessage):
        decode_record(encode_record(record)[:-1])


@pytest.mark.parametrize("seconds", ["-1.0", "NaN", "Infinity", "1e300", '"3"', "true", "null"])
def test_an_offer_says_how_long_its_steps_took(seconds: str) -> None:
    timed = replace(OFFER, seconds=12.25)
    assert decode_offer(timed.encoded) == timed
    with pytest.raises(BadMessage, check=lambda error: error.reason == "offer_schema"):
        decode_offer(timed.encoded.replace(b"12.25", seconds.encode()))


def test_an_offer_comes_back_as_it_was_and_only_in_canonical_form() -> None:
    assert decode_offer(OFFER.encoded) == OFFER
    with pytest.raises(BadMessage, match="canonical"):
        decode_offer(OFFER.encoded.replace(b",", b", ", 1))


def _changed(message: Message, path: list[object], value: object) -> bytes:
    frame = json.loads(encode(HEADER, message)[0])
    place = frame
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(frame).encode()


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (MESSAGES[1], ["message", "extra"], 1),
        (MESSAGES[1], ["message", "type"], "pickle"),
        (MESSAGES[1], ["message", "ballot", "attempt"], -1),
        (MESSAGES[1], ["message", "ballot", "attempt"], 1.5),
        (MESSAGES[1], ["message", "ballot", "attempt"], "1"),
        (MESSAGES[1], ["message", "ballot", "convener"], "../../etc"),
        (MESSAGES[1], ["header", "tip"], "A" * 64),
        (MESSAGES[1], ["header", "tip"], "a" * 64 + "\n"),
        (MESSAGES[1], ["header", "code"], []),
        (MESSAGES[1], ["header", "code"], [[1, [2]]]),
        (MESSAGES[3], ["message", "capacity"], 0.0),
        (MESSAGES[3], ["message", "capacity"], float("nan")),
        (MESSAGES[3], ["message", "capacity"], float("inf")),
        (MESSAGES[2], ["message", "offer", "num_bytes"], 2**40),
        (MESSAGES[7], ["message", "manifest", "num_bytes"], 2**40),
        (MESSAGES[7], ["message", "evidence", "num_bytes"], 2**40),
        (MESSAGES[2], ["message", "accepted", "evidence", "num_bytes"], 2**40),
        (MESSAGES[3], ["message", "signature"], None),
        (MESSAGES[6], ["message", "signature"], "QUJD" * 22),
        (MESSAGES[8], ["message", "signature"], "not base64!"),
        (MESSAGES[8], ["message", "signature"], "QUJD" * 22),
        (MESSAGES[8], ["message", "signature"], "A" * 85 + "B=="),
        (MESSAGES[8], ["message", "signature"], "A" * 84 + "=="),
    ],
)
def test_a_wrong_field_is_refused_with_a_reason(
    message: Message, path: list[object], value: object
) -> None:
    with pytest.raises(BadMessage) as caught:
        BareMessage(_changed(message, path, value))
    assert caught.value.reason in ("message_schema", "attachment_size")


def test_a_message_too_large_is_refused_unread() -> None:
    with pytest.raises(BadMessage, check=lambda error: error.reason == "message_size"):
        BareMessage(b" " * (MAX_MESSAGE_BYTES + 1))


def test_attachments_must_be_there_and_be_what_their_digest_says() -> None:
    payload, attachments = encode(HEADER, MESSAGES[7])
    with pytest.raises(BadMessage, check=lambda error: error.reason == "attachment_missing"):
        decode(payload, {})
    with pytest.raises(BadMessage, check=lambda error: error.reason == "attachment_digest"):
        decode(payload, dict.fromkeys(attachments, b"x" * len(NEXT.encoded)))


@pytest.mark.parametrize(
    "manifest",
    [
        replace(NEXT, parent="../../record"),
        replace(NEXT, members={"A/B": Member(0, 1.0)}),
        replace(NEXT, generation="g+1"),
        replace(NEXT, entries={**TIP.entries, "../x": TIP.entries["shared.0"]}),
        replace(
            NEXT,
            entries={**TIP.entries, "shared.0": replace(TIP.entries["shared.0"], digest="no\n")},
        ),
    ],
)
def test_names_that_are_no_names_are_refused_in_manifests(manifest: Manifest) -> None:
    with pytest.raises(BadManifest, check=lambda error: error.reason == "manifest_names"):
        decode(*encode(HEADER, Propose(BALLOT, manifest, ())))


@settings(max_examples=300)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(payload: bytes) -> None:
    with pytest.raises(BadMessage):
        BareMessage(payload)
    with pytest.raises(BadMessage):
        decode_offer(payload)
    with pytest.raises(BadMessage):
        decode_record(payload)


@settings(max_examples=400)
@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_changed_bytes_is_refused_or_still_a_message(
    message: Message, data: st.DataObject
) -> None:
    payload, attachments = encode(HEADER, message)
    start = data.draw(st.integers(0, len(payload)))
    stop = data.draw(st.integers(start, min(len(payload), start + 8)))
    changed = payload[:start] + data.draw(st.binary(max_size=8)) + payload[stop:]
    try:
        header, again = decode(changed, attachments)
    except HostileInput:
        return
    encode(header, again)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=400)
@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_a_foreign_value_is_refused_or_still_a_message(
    message: Message, data: st.DataObject
) -> None:
    payload, attachments = encode(HEADER, message)
    frame = json.loads(payload)
    place: dict[str, object] = frame[data.draw(st.sampled_from(["header", "message"]))]
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(json_values)
    try:
        header, again = decode(json.dumps(frame).encode(), attachments)
    except HostileInput:
        return
    encode(header, again)
