"""Which offers are kept decoded: as many bytes as it takes, the latest that were asked for."""

from __future__ import annotations

import pytest

from swarm.protocol import offers
from swarm.protocol.messages import Offer
from swarm.protocol.offers import MAX_OFFERS, MAX_OFFERS_BYTES, KnownOffers

MIB = 2**20


@pytest.fixture(autouse=True)
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Offers that were decoded, each from bytes that are none here."""
    seen = list[bytes]()

    def decode(encoded: bytes) -> Offer:
        seen.append(encoded)
        return Offer("f" * 64, 1, 1, {})

    monkeypatch.setattr(offers, "decode_offer", decode)
    return seen


def test_100_offers_of_2_mib_are_not_all_kept() -> None:
    known = KnownOffers()
    for number in range(100):
        known(number.to_bytes(2 * MIB))
        assert known.num_bytes <= MAX_OFFERS_BYTES
    assert known.num_bytes == MAX_OFFERS_BYTES


def test_the_same_offer_is_the_same_object_while_others_come(decoded: list[bytes]) -> None:
    known, one = KnownOffers(), bytes(MIB)
    offer = known(one)
    for number in range(1, 200):
        known(number.to_bytes(MIB))
        assert known(bytes(MIB)) is offer, "whoever was asked for last stays"
    assert len(decoded) == 200 and offer.encoded is one
    assert known((1).to_bytes(MIB)) is not offer and len(decoded) == 201, "it had gone"


def test_small_offers_are_bounded_by_their_number() -> None:
    known = KnownOffers()
    for number in range(MAX_OFFERS + 9):
        known(number.to_bytes(100))
    assert known.num_bytes == 100 * MAX_OFFERS
    known.cache_clear()
    assert known.num_bytes == 0
