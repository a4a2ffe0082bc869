"""Offers as bytes, and the list of a roster that names them."""

from __future__ import annotations

from collections import OrderedDict
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
"""Offers that are kept decoded: those of two rounds of 256 peers."""
MAX_OFFERS_BYTES = 64 * 2**20
"""Of these as they were sent, since a trainee may send offers of 2 MiB, and decoded ones take four
times that; those of one round of 256 peers have some 150 kB each for a 7B."""


class KnownOffers:
    """Offers that may have come before: with every answer to a poll, and in rosters.

    From any thread: each step is one that no other thread sees half done.
    """

    def __init__(self) -> None:
        """Knows none."""
        self._offers: OrderedDict[bytes, Offer] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """What those that are kept had as they were sent."""
        return sum(map(len, list(self._offers)))

    def __call__(self, encoded: bytes) -> Offer:
        """The offer; the same object for as long as it is kept.

        Raises:
            BadMessage: see `decode_offer`.
        """
        known = self._offers.pop(encoded, None)
        if known is not None:
            return self._offers.setdefault(known.encoded, known)  # as the latest
        offer = decode_offer(encoded)
        vars(offer).update(
            encoded=encoded, digest=digest_of(encoded)
        )  # as its properties keep them
        offer = self._offers.setdefault(encoded, offer)
        self._forget()
        return offer

    def cache_clear(self) -> None:
        """Forgets all, as functions with a cache do."""
        self._offers.clear()

    def _forget(self) -> None:
        """Lets those go that nobody has asked for the longest."""
        kept = list(self._offers)
        number, num_bytes = len(kept), sum(map(len, kept))
        for oldest in kept:
            if number <= MAX_OFFERS and num_bytes <= MAX_OFFERS_BYTES:
                return
            self._offers.pop(oldest, None)
            number, num_bytes = number - 1, num_bytes - len(oldest)


known_offer = KnownOffers()


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
