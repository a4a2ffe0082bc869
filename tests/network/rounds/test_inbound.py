"""Control messages from the network: valid ones become events, others are counted."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.rounds import inbound
from swarm.network.rounds.inbound import Inbound
from swarm.network.rounds.transfers import Transfers
from swarm.network.wire.identity import Identity, load_or_create_identity
from swarm.network.wire.ledger import LIMITS, Cost, Ledger
from swarm.protocol.chain.trust import Chain, Foothold
from swarm.protocol.messages import message_bytes
from swarm.protocol.messages.events import Event, Received, Record
from swarm.protocol.messages.message_bytes import decode, encode
from swarm.protocol.messages.messages import (
    Accept,
    Accepted,
    Ballot,
    Certificate,
    Commit,
    Declared,
    Evidence,
    Header,
    Hello,
    Message,
    Offer,
    Propose,
    Ready,
    Reduced,
    ReducedUnit,
    Roster,
    Signature,
    accept_statement,
    declaration_of,
    ready_statement,
    reduced_statement,
)
from swarm.protocol.values.digests import Buffer, digest_of
from swarm.protocol.values.manifest import Kind, Manifest
from tests.protocol.round_pump import found, make_offer, make_rules

RUN = "run-1"
RULES = make_rules()


class FakeDownloads:
    """Returns blobs that its peers have. Waits forever for others."""

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self.blobs: dict[str, bytes] = {}
        self.asked: list[Want] = []
        self.came = asyncio.Event()
        """Set when the missing blobs are in `blobs`."""

    async def fetch(self, wants: Sequence[Want], **_: object) -> None:
        self.asked += wants
        for want in wants:
            if want.digest not in self.blobs:
                await self.came.wait()
            self.store.put(self.blobs[want.digest], want.digest)


class Desk:
    """An inbound with fakes around it, in its own loop."""

    def __init__(self, foothold: Foothold | None = None) -> None:
        self.foothold = foothold or Foothold(Chain.of(Record(TIP, None, None)))
        self.store = BlobStore()
        self.downloads = FakeDownloads(self.store)
        self.aside = FakeDownloads(BlobStore())
        self.events: list[Event] = []
        self.refused: Counter[str] = Counter()
        self.ledger = Ledger()
        self.judge: Callable[[Message], object] = lambda _: None

    def inbound(self) -> Inbound:
        transfers = SimpleNamespace(
            downloads=self.downloads, attached=self.downloads, aside=self.aside
        )
        desk = Inbound(
            cast(Transfers, transfers),
            self.ledger,
            RUN,
            self.events.append,
            foothold=lambda: self.foothold,
            judge=self.judge,
        )
        self.refused = desk.refused
        return desk

    def run(
        self, *payloads: tuple[str, bytes], beside: Coroutine[Any, Any, None] | None = None
    ) -> Inbound:
        """Takes messages and works until nothing more happens."""

        async def work() -> Inbound:
            desk = self.inbound()
            for source, payload in payloads:
                desk.take(source, payload)
            async with asyncio.timeout(5.0):
                if beside:
                    await beside
                while desk._tasks:
                    await asyncio.sleep(0)
            return desk

        return asyncio.run(work())

    def receive(self, source: str, message: Message, header: Header | None = None) -> Message:
        """Takes one message whose attachments the sender has. Returns the delivered events."""
        payload, attachments = encode(header or HEADER, message)
        self.downloads.blobs |= attachments
        self.run((source, payload))
        (event,) = self.events
        assert isinstance(event, Received)
        assert event.source == source
        return event.message


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Identity]:
    folder: Path = tmp_path_factory.mktemp("keys")
    made = [load_or_create_identity(folder / str(number)) for number in range(3)]
    return {identity.peer_id: identity for identity in made}


@pytest.fixture
def desk(identities: dict[str, Identity]) -> Desk:
    desk = Desk()
    desk.ledger.admit(["A", "B", "C", *identities])
    return desk


TIP = replace(found(RULES, ["A", "B"]), run=RUN)
HEADER = Header(TIP.code, TIP.digest, TIP.generation)


def successor(tip: Manifest) -> Manifest:
    return replace(tip, height=1, round=1, kind=Kind.QUORUM, parent=tip.digest)


def signed(identity: Identity, ballot: Ballot, digest: str, run: str = RUN) -> Signature:
    return identity.sign(accept_statement(run, ballot, digest))


# ---------------------------------------------------------------- valid messages


def test_a_message_arrives_with_header_and_proven_sender(desk: Desk) -> None:
    assert desk.receive("A", Hello(ask=True)) == Hello(ask=True)
    assert desk.events == [Received("A", HEADER, Hello(ask=True))]
    assert not desk.refused


def signed_ready(identity: Identity, offer: Offer | None, capacity: float = 1.0) -> Ready:
    ready = Ready(Ballot(0, "A"), offer, None, capacity)
    statement = ready_statement(RUN, HEADER.tip, ready.declared.declaration)
    return replace(ready, signature=identity.sign(statement))


def test_what_a_message_refers_to_is_fetched_from_its_sender_alone(
    desk: Desk, identities: dict[str, Identity]
) -> None:
    peer = sorted(identities)[0]
    ready = signed_ready(identities[peer], make_offer(RULES, peer, TIP))
    assert desk.receive(peer, ready) == ready
    assert [want.sources for want in desk.downloads.asked] == [(peer,)]


def test_a_ready_counts_only_as_its_sender_has_signed_it(
    desk: Desk, identities: dict[str, Identity]
) -> None:
    """A stranger's too: nobody can declare another peer a joiner."""
    peer, other = sorted(identities)[:2]
    ready = signed_ready(identities[peer], make_offer(RULES, peer, TIP))
    wrong = [
        (other, ready),
        (peer, replace(ready, capacity=1e6)),
        (peer, replace(ready, offer=make_offer(RULES, other, TIP))),
        ("S", Ready(Ballot(0, "A"), None, None, 1.0)),
    ]
    for source, message in wrong:
        payload, attachments = encode(HEADER, message)
        desk.downloads.blobs |= attachments
        desk.run((source, payload))
        assert desk.refused == {"bad_signature": 1}
    assert desk.events == []


def test_results_count_only_as_their_reducer_has_signed_them(
    desk: Desk, identities: dict[str, Identity]
) -> None:
    peer, other = sorted(identities)[:2]
    means = {"shared.0": ReducedUnit(TIP.digest, 100)}
    signature = identities[peer].sign(reduced_statement(RUN, TIP.digest, means))
    reduced = Reduced(Ballot(0, "A"), TIP.digest, means, {}, signature)
    assert desk.receive(peer, reduced) == reduced
    for source, wrong in [
        (other, reduced),
        (peer, replace(reduced, roster_id=HEADER.tip[::-1])),
        (peer, replace(reduced, results={"shared.0": ReducedUnit(TIP.digest, 101)})),
    ]:
        desk.events.clear()
        desk.run((source, encode(HEADER, wrong)[0]))
        assert desk.refused == {"bad_signature": 1}
        assert desk.events == []


def test_evidence_of_many_is_judged_in_another_thread_before_it_is_handed_on(
    desk: Desk, identities: dict[str, Identity]
) -> None:
    peer = sorted(identities)[0]
    declared = signed_ready(identities[peer], None).declared
    threads: list[int] = []
    desk.judge = lambda _: threads.append(threading.get_ident())
    for number in (1, inbound.MANY + 1):
        evidence = Evidence({"P" + "x" * k: declared for k in range(number)}, {}, TIP.digest, ())
        manifest = replace(successor(TIP), parent=HEADER.tip, round=number)
        message = Propose(Ballot(0, "A"), manifest, (), evidence)
        payload, desk.downloads.blobs = encode(HEADER, message)
        desk.run(("A", payload))
    assert [thread == threading.get_ident() for thread in threads] == [True, False]
    for event in desk.events:
        assert isinstance(event, Received) and isinstance(event.message, Propose)
        assert event.message.evidence and not event.message.evidence.declared, "nobody signed it"


def test_evidence_that_many_show_at_once_is_read_and_verified_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_declared, peers = inbound.MANY + 1, [f"P{number}" for number in range(8)]
    said = Declared(declaration_of(None, 1.0, leave=False), b"x" * 64)
    evidence = Evidence({"Q" + "x" * k: said for k in range(num_declared)}, {}, TIP.digest, ())
    vote = Accepted(Ballot(0, "A"), replace(successor(TIP), parent=HEADER.tip), evidence)
    ready = Ready(Ballot(1, "B"), None, vote, 1.0, signature=b"x" * 64)
    asked: Counter[str] = Counter()

    def slow(peer: str, statement: bytes, signature: bytes) -> bool:
        time.sleep(0.001)  # so that other threads could get as far
        asked[peer[0]] += 1
        return True

    monkeypatch.setattr(inbound, "verify", slow)
    monkeypatch.setattr(inbound, "LARGE_BYTES", 0)
    desk.ledger.admit(peers)
    payload, desk.downloads.blobs = encode(HEADER, ready)
    desk.run(*((peer, payload) for peer in peers))
    assert asked == {"P": len(peers), "Q": num_declared}
    messages = [event.message for event in desk.events if isinstance(event, Received)]
    assert len(messages) == len(peers)
    shown = [
        each.accepted.evidence for each in messages if isinstance(each, Ready) and each.accepted
    ]
    assert all(each is shown[0] for each in shown)


def test_a_manifest_is_asked_of_its_sender_then_of_all_known_to_hold_it(desk: Desk) -> None:
    """Otherwise one uplink would have to carry it to all peers."""
    first, attachments = encode(HEADER, Propose(Ballot(0, "A"), TIP, ()))
    again, _ = encode(HEADER, Propose(Ballot(1, "C"), TIP, ("D", "B")))

    async def come_late() -> None:
        while len(desk.downloads.asked) < 3:
            await asyncio.sleep(0)
        desk.downloads.blobs |= attachments
        desk.downloads.came.set()

    desk.run(("A", first), ("B", first), ("C", again), beside=come_late())
    assert [want.sources for want in desk.downloads.asked] == [
        ("A",),
        ("B", "A"),
        ("C", "A", "B", "D"),
    ]
    assert len(desk.events) == 3


def test_offers_of_a_large_roster_are_asked_of_those_that_made_them_first(desk: Desk) -> None:
    makers = [f"P{one}" for one in "123456789ACDEFGH"[: inbound.MANY]]
    offers = {peer: make_offer(RULES, peer, TIP) for peer in makers}
    desk.receive("A", Roster(Ballot(0, "A"), TIP.digest, offers, {"A": 0}))
    assert {want.sources[0] for want in desk.downloads.asked} == {"A"}
    assert len(desk.downloads.asked) == len(offers) + 1, "the list, then its entries"
    desk.downloads.asked.clear()
    desk.events.clear()
    desk.store.collect(())
    offers["B"] = make_offer(RULES, "B", TIP)
    desk.receive("A", Roster(Ballot(0, "A"), TIP.digest, offers, {"A": 0}))
    listed, *named = (want.sources for want in desk.downloads.asked)
    assert listed == ("A",)
    assert sorted(named) == sorted((peer, "A") for peer in offers)


def test_what_is_here_already_is_not_fetched(desk: Desk) -> None:
    _, attachments = encode(HEADER, Propose(Ballot(0, "A"), TIP, ()))
    for digest, blob in attachments.items():
        desk.store.put(blob, digest)
    desk.receive("A", Propose(Ballot(0, "A"), TIP, ()))
    assert desk.downloads.asked == []


def test_unread_blobs_lie_in_the_store_alone(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """255 peers may show the same manifest of 2.6 MB at once."""
    found = []

    def reading(payload: bytes, attachments: Mapping[str, Buffer]) -> tuple[Header, Message]:
        found.extend(attachments.values())
        return decode(payload, attachments)

    monkeypatch.setattr(inbound, "decode", reading)
    desk.receive("A", Propose(Ballot(0, "A"), TIP, ()))
    assert found and all(isinstance(each, memoryview) for each in found)


def test_a_message_without_attachments_does_not_wait_behind_one_with(desk: Desk, monkeypatch):
    monkeypatch.setattr(inbound, "ATTACHMENT_DEADLINE_S", 0.05)
    slow, _ = encode(HEADER, Propose(Ballot(0, "A"), TIP, ()))
    quick, _ = encode(HEADER, Hello(ask=False))
    desk.run(("A", slow), ("A", quick))
    assert desk.events == [Received("A", HEADER, Hello(ask=False))]


# ---------------------------------------------------------------- invalid messages


@pytest.mark.parametrize(
    "payload", [b"", b"{}", b"\xff" * 100, b'{"header":{}}', b"[" * 10_000], ids=repr
)
def test_nonsense_is_refused_and_counted(desk: Desk, payload: bytes) -> None:
    desk.run(("A", payload))
    assert desk.events == []
    assert desk.refused == {"message_schema": 1}


def test_an_oversized_message_is_refused_unread(desk: Desk) -> None:
    desk.run(("A", b" " * (64 * 2**10 + 1)))
    assert desk.refused == {"message_size": 1}


def test_an_attachment_that_is_no_manifest_is_refused_and_counted(desk: Desk) -> None:
    nonsense = b"x" * 100
    payload, _ = encode(HEADER, Propose(Ballot(0, "A"), TIP, ()))
    frame = json.loads(payload)
    frame["message"]["manifest"] = {"digest": digest_of(nonsense), "num_bytes": len(nonsense)}
    desk.downloads.blobs = {digest_of(nonsense): nonsense}
    desk.run(("A", json.dumps(frame).encode()))
    assert desk.events == []
    assert desk.refused == {"manifest_schema": 1}


def test_attachments_that_never_come_cost_a_message_and_nothing_else(desk, monkeypatch) -> None:
    monkeypatch.setattr(inbound, "ATTACHMENT_DEADLINE_S", 0.05)
    payload, _ = encode(HEADER, Propose(Ballot(0, "A"), TIP, ()))
    desk.run(("A", payload))
    assert (desk.events, desk.refused) == ([], {"late_attachments": 1})
    most = LIMITS[Cost.PENDING].member.most
    assert desk.ledger.left("A", Cost.PENDING, 0.0) == most, "everything was freed"


def test_a_flood_of_one_peer_is_cut_off_and_others_are_heard(desk: Desk, monkeypatch) -> None:
    monkeypatch.setattr(inbound, "ATTACHMENT_DEADLINE_S", 0.2)
    payload, _ = encode(HEADER, Propose(Ballot(0, "A"), TIP, ()))
    hello, _ = encode(HEADER, Hello(ask=False))
    flood = [("A", payload)] * (int(LIMITS[Cost.PENDING].member.most) + 5)
    desk.run(*flood, ("B", hello))
    assert desk.refused["pending_of_member"] == 5
    assert [event.source for event in desk.events if isinstance(event, Received)] == ["B"]


# ---------------------------------------------------------------- strangers


def test_what_a_stranger_names_is_fetched_only_if_it_may_send_that(desk: Desk) -> None:
    makers = ["P" + "x" * number for number in range(40)]
    offers = {peer: make_offer(RULES, peer, TIP) for peer in makers}
    for message in (
        Roster(Ballot(0, "S"), TIP.digest, offers, {"S": 0}),
        Propose(Ballot(0, "S"), TIP, ()),
        Ready(Ballot(0, "A"), make_offer(RULES, "S", TIP), None, 1.0),
    ):
        payload, attachments = encode(HEADER, message)
        desk.downloads.blobs |= attachments
        desk.aside.blobs |= attachments
        desk.run(("S", payload))
        assert sum(desk.refused.values()) == 1
    assert desk.events == desk.downloads.asked == desk.aside.asked == []


def test_a_sender_that_has_used_up_its_processor_time_is_not_listened_to(desk: Desk) -> None:
    hello, _ = encode(HEADER, Hello(ask=False))
    desk.ledger.charge("S", Cost.SECONDS, 5.0, time.monotonic())
    desk.run(("S", hello))
    assert (desk.events, desk.refused) == ([], {"seconds_of_stranger": 1})


def test_parsing_is_charged_to_the_sender_also_if_it_fails(desk: Desk) -> None:
    before = desk.ledger.left("S", Cost.SECONDS, 0.0)
    desk.run(("S", b"[" * 60_000))
    assert desk.refused == {"message_schema": 1}
    assert desk.ledger.left("S", Cost.SECONDS, 0.0) < before


# ---------------------------------------------------------------- signatures


def test_an_accept_signed_by_its_sender_arrives(desk: Desk, identities) -> None:
    (peer, identity), *_ = identities.items()
    ballot = Ballot(1, peer)
    accept = Accept(ballot, TIP.digest, signed(identity, ballot, TIP.digest))
    assert desk.receive(peer, accept) == accept


@pytest.mark.parametrize("lie", ["other digest", "other ballot", "other run", "other key"])
def test_an_accept_that_its_sender_did_not_sign_is_refused(desk, identities, lie: str) -> None:
    (peer, identity), (_, other), *_ = identities.items()
    ballot = Ballot(1, peer)
    signature = {
        "other digest": signed(identity, ballot, digest_of(b"x")),
        "other ballot": signed(identity, Ballot(2, peer), TIP.digest),
        "other run": signed(identity, ballot, TIP.digest, run="run-2"),
        "other key": signed(other, ballot, TIP.digest),
    }[lie]
    payload, _ = encode(HEADER, Accept(ballot, TIP.digest, signature))
    desk.run((peer, payload))
    assert desk.events == []
    assert desk.refused == {"bad_signature": 1}


def test_a_certificate_keeps_only_votes_that_were_signed(desk: Desk, identities) -> None:
    (a, key_a), (b, key_b), (c, _) = identities.items()
    tip = replace(found(RULES, [a, b, c]), run=RUN)
    manifest = successor(tip)
    ballot = Ballot(1, a)
    right = signed(key_a, ballot, manifest.digest)
    signatures = {
        a: right,
        b: signed(key_b, ballot, tip.digest),  # for another manifest
        c: right,  # under another's name
    }
    commit = Commit(manifest, Certificate(ballot, signatures), tip)
    received = desk.receive(a, commit)
    assert isinstance(received, Commit)
    assert received.certificate == Certificate(ballot, {a: right})
    assert (received.manifest, received.parent) == (manifest, tip)


def test_a_commit_without_certificate_is_left_to_the_protocol_to_judge(desk: Desk) -> None:
    commit = Commit(successor(TIP), None, TIP)
    assert desk.receive("A", commit) == commit


async def test_stopping_drops_what_is_on_its_way(desk: Desk) -> None:
    payload, _ = encode(HEADER, Propose(Ballot(0, "A"), TIP, ()))
    taken = desk.inbound()
    taken.take("A", payload)
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await taken.stop()
    assert not taken._tasks
    assert desk.events == []


def asked_of(desk: Desk, message: Message, *, me: str, age_s: float) -> set[tuple[str, ...]]:
    """Sources asked for the attachments of a message of A whose first copy is this old."""
    now = [0.0]
    shown = inbound.Shown(lambda: now[0])
    payload, attachments = encode(HEADER, message)
    desk.downloads.blobs |= attachments
    for digest in attachments:
        shown.note(digest, "A")
    now[0] = age_s
    downloads = cast(Downloads, desk.downloads)
    asyncio.run(inbound.open_message("A", payload, desk.store, downloads, shown=shown, me=me))
    return {want.sources for want in desk.downloads.asked}


@pytest.mark.parametrize(
    "me, age_s, sources",
    [
        ("X", 0.0, {("C", "B"), ("B", "C")}),
        ("X", inbound.RELAYED_S, {("C", "B", "A"), ("B", "C", "A")}),
        ("B", 0.0, {("A",)}),
    ],
    ids=["at first the relays alone", "then the convener too", "a relay asks the convener"],
)
def test_a_proposal_comes_from_its_relays(
    desk: Desk, me: str, age_s: float, sources: set[tuple[str, ...]]
) -> None:
    """From the convener alone, 256 peers would get it only after minutes (blob relays)."""
    proposal = Propose(Ballot(0, "A"), successor(TIP), (), None, ("B", "C"))
    asked = asked_of(desk, proposal, me=me, age_s=age_s)
    assert asked and asked <= sources


def test_a_proposal_without_relays_comes_from_its_convener(desk: Desk) -> None:
    proposal = Propose(Ballot(0, "A"), successor(TIP), (), None)
    assert asked_of(desk, proposal, me="X", age_s=0.0) == {("A",)}


def test_a_message_is_read_once_before_and_once_with_what_it_names(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(wraps=message_bytes._frame)
    monkeypatch.setattr(message_bytes, "_frame", read)
    offers = {peer: make_offer(RULES, peer, TIP) for peer in "AB"}
    roster = Roster(Ballot(0, "A"), TIP.digest, offers, dict.fromkeys("AB", 0))
    assert asked_of(desk, roster, me="X", age_s=0.0) and desk.downloads.asked
    assert read.call_count == 2
