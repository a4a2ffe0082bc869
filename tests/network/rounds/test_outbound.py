"""Outgoing messages."""

from __future__ import annotations

import pytest

from swarm.network.blobs.blob_store import BlobStore
from swarm.network.rounds import outbound
from swarm.network.rounds.outbound import HELD_S, Outbound
from swarm.protocol.messages.message_bytes import BareMessage
from swarm.protocol.messages.messages import Ballot, Header, Hello, Roster
from tests.fake_time import Time
from tests.protocol.round_pump import found, make_offer, make_rules

RULES = make_rules()
TIP = found(RULES, ["A", "B"])
HEADER = Header(TIP.code, TIP.digest, TIP.generation)
OFFERS = {peer: make_offer(RULES, peer, TIP) for peer in "AB"}


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Messages that were encoded, not cached."""
    seen: list[object] = []

    def encode(header, message, plain=outbound.encode):  # type: ignore[no-untyped-def]
        seen.append(message)
        return plain(header, message)

    monkeypatch.setattr(outbound, "encode", encode)
    return seen


def test_a_message_to_many_peers_is_encoded_once(encodings: list[object]) -> None:
    box = Outbound(BlobStore())
    roster, heartbeat = (Roster(Ballot(0, "A"), "0" * 64, of, {"A": 0}) for of in (OFFERS, {}))
    payloads = {box.encode(HEADER, each) for _ in range(50) for each in (roster, heartbeat)}
    assert len(payloads) == 2
    assert encodings == [roster, heartbeat]


def test_what_a_message_refers_to_outlives_a_collection_until_its_receivers_have_had_time() -> None:
    store, clock = BlobStore(), Time()
    box = Outbound(store, clock)
    payload = box.encode(HEADER, Roster(Ballot(0, "A"), "0" * 64, OFFERS, {"A": 0}))
    digests = [digest for digest, _ in BareMessage(payload).attachments]
    assert digests
    for now_s, is_held in [(0.0, True), (HELD_S - 1, True), (HELD_S, False)]:
        clock.now_s = now_s
        box.encode(HEADER, Hello(ask=True))
        store.collect(())
        assert {store.has(digest) for digest in digests} == {is_held}, now_s


def test_what_is_sent_again_is_held_from_then_on() -> None:
    store, clock = BlobStore(), Time()
    box = Outbound(store, clock)
    roster = Roster(Ballot(0, "A"), "0" * 64, OFFERS, {"A": 0})
    digests = [digest for digest, _ in BareMessage(box.encode(HEADER, roster)).attachments]
    clock.now_s = HELD_S - 1
    box.encode(HEADER, roster)
    clock.now_s = 2 * HELD_S - 2
    box.encode(HEADER, Hello(ask=True))
    store.collect(())
    assert all(store.has(digest) for digest in digests)


def test_messages_hold_so_many_blobs_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "KEPT", 3)
    store = BlobStore()
    box = Outbound(store)
    for attempt in range(10):
        box.encode(HEADER, Roster(Ballot(attempt, "A"), f"{attempt:064x}", OFFERS, {"A": 0}))
    box.encode(HEADER, Hello(ask=True))
    store.collect(())
    assert len(store) <= 3


def test_what_a_message_refers_to_is_put_back_if_it_was_dropped(encodings: list[object]) -> None:
    store, clock = BlobStore(), Time()
    box = Outbound(store, clock)
    roster = Roster(Ballot(0, "A"), "0" * 64, OFFERS, {"A": 0})
    payload = box.encode(HEADER, roster)
    clock.now_s = HELD_S
    box.encode(HEADER, Hello(ask=True))
    store.collect(())
    assert box.encode(HEADER, roster) == payload
    assert encodings.count(roster) == 2


def test_an_equal_message_of_another_time_is_another(encodings: list[object]) -> None:
    box = Outbound(BlobStore())
    box.encode(HEADER, Hello(ask=True))
    box.encode(Header(TIP.code, TIP.digest, "ff"), Hello(ask=True))
    assert len(encodings) == 2
