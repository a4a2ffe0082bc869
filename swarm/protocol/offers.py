"""Offers as bytes, and the list of a roster that names them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from swarm.errors import BadMessage
from swarm.protocol.digests import Buffer, digest_of
from swarm.protocol.messages import Offer, OfferedUnit
from swarm.protocol.schemas import BlobSchema, OfferSchema, RosterListSchema, parse

MAX_OFFER_BYTES = 2 * 2**20
MAX_ROSTER_BYTES = 2**18
"""Of the list of 1,024 offers and reducers, some 212 kB."""
MAX_OFFERS = 512
"""Offers that are kept decoded: those of two rounds of 256 peers, some 150 kB each for a 7B."""


@lru_cache(maxsize=MAX_OFFERS)
def known_offer(encoded: bytes) -> Offer:
    """An offer that may have come before: with every answer to a poll, and in rosters."""
    offer = decode_offer(encoded)
    vars(offer).update(encoded=encoded, digest=digest_of(encoded))  # as its properties keep them
    return offer


def decode_offer(encoded: Buffer) -> Offer:
    """An offer from bytes that are not trusted.

    Raises:
        BadMessage: too large, not of the schema, or not canonical.
    """
    if len(encoded) > MAX_OFFER_BYTES:
        raise BadMessage("offer_size", f"an offer of {len(encoded)} bytes is too large")
    parsed = parse(OfferSchema, encoded, "offer")
    offer = Offer(
        parsed.tip,
        parsed.steps,
        parsed.tokens,
        {
            unit: OfferedUnit(offered.digest, offered.num_bytes, offered.base, offered.delta)
            for unit, offered in sorted(parsed.units.items())
        },
        parsed.seconds,
    )
    if offer.encoded != bytes(encoded):
        raise BadMessage("offer_schema", "the offer is not in canonical form")
    return offer


@lru_cache(maxsize=2)
def decode_roster(encoded: bytes) -> RosterListSchema:
    """The list of a roster; its repetition costs nothing.

    Raises:
        BadMessage: not of the schema.
    """
    return parse(RosterListSchema, encoded, "roster")


def offers_in(listed: RosterListSchema | None) -> Iterator[BlobSchema]:
    """The blobs that a roster's list names.

    Raises:
        BadMessage: one is announced too large for an offer.
    """
    for blob in listed.offers.values() if listed else ():
        if blob.num_bytes > MAX_OFFER_BYTES:
            raise BadMessage("attachment_size", f"an attachment of {blob.num_bytes} bytes")
        yield blob
