"""Offers as bytes, and the list of a roster that names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator, TypeAdapter

from swarm.canonical import canonical
from swarm.errors import BadMessage
from swarm.protocol.digests import Buffer, digest_of
from swarm.protocol.messages import OFFER, Offer, Uplinks
from swarm.protocol.schemas import Blob, OnWire, PeerText, in_order, parse

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
    offer = parse(OFFER, encoded, "offer")
    if offer.encoded != bytes(encoded):
        raise BadMessage("offer_schema", "the offer is not in canonical form")
    return offer


@dataclass(frozen=True)
class RosterList(OnWire):
    """The blob beside a ROSTER: it grows with the swarm, and names blobs itself."""

    offers: Annotated[Mapping[PeerText, Blob], AfterValidator(in_order)]
    reducers: Uplinks


_ROSTER_LIST = TypeAdapter(RosterList)


@lru_cache(maxsize=2)
def decode_roster(encoded: bytes) -> RosterList:
    """The list of a roster; its repetition costs nothing.

    Raises:
        BadMessage: not of the schema.
    """
    return parse(_ROSTER_LIST, encoded, "roster")


def encode_roster(listed: RosterList) -> bytes:
    """The list of a roster as a blob."""
    return canonical(_ROSTER_LIST.dump_python(listed))
