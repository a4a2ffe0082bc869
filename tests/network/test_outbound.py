"""Messages on their way out."""

from __future__ import annotations

import pytest

from swarm.network import outbound
from swarm.network.blobs import BlobStore
from swarm.network.outbound import Outbound
from swarm.protocol.messages import Ballot, Header, Hello, Roster
from tests.protocol.round_pump import found, make_offer, make_rules

RULES = make_rules()
TIP = found(RULES, ["A", "B"])
HEADER = Header(TIP.code, TIP.digest, TIP.generation)
OFFERS = {peer: make_offer(RULES, peer, TIP) for peer in "AB"}


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Messages that were really encoded."""
    seen: list[object] = []

    def encode(header, message, plain=outbound.encode):  # type: ignore[no-untyped-def]
        seen.append(message)
        return plain(header, message)

    monkeypatch.setattr(outbound, "encode", encode)
    return seen


def test_a_message_to_many_peers_is_encoded_once(encodings: list[object]) -> None:
    box = Outbound(BlobStore())
    roster, heartbeat = (Roster(Ballot(0, "A"), "0" * 64, of, ("A",)) for of in (OFFERS, {}))
    payloads = {box.encode(HEADER, each) for _ in range(50) for each in (roster, heartbeat)}
    assert len(payloads) == 2
    assert encodings == [roster, heartbeat]


def test_what_a_message_refers_to_is_put_back_if_it_was_dropped(encodings: list[object]) -> None:
    store = BlobStore()
    box = Outbound(store)
    roster = Roster(Ballot(0, "A"), "0" * 64, OFFERS, ("A",))
    payload = box.encode(HEADER, roster)
    store.collect(())
    assert box.encode(HEADER, roster) == payload
    assert len(encodings) == 2


def test_an_equal_message_of_another_time_is_another(encodings: list[object]) -> None:
    box = Outbound(BlobStore())
    box.encode(HEADER, Hello(ask=True))
    box.encode(Header(TIP.code, TIP.digest, "ff"), Hello(ask=True))
    assert len(encodings) == 2
