"""Whose values are behind the units of a manifest, in few bytes: all contribute to most units."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping

from pydantic import ValidationInfo

from swarm.protocol.digests import DIGEST_BYTES

Sources = Mapping[str, tuple[tuple[str, str], ...]]
"""Of each renewed unit: the offered values behind it, as (peer, digest)."""


def packed_sources(sources: Sources, contributors: tuple[str, ...]) -> dict[str, object]:
    """Sources as JSON has them: of units to which all contribute, the digests alone, in base64."""
    packed: dict[str, object] = {}
    for unit, values in sources.items():
        packed[unit] = values
        peers, digests = zip(*values, strict=True) if values else ((), ())
        if peers and peers == contributors:
            joined = "".join(digests)
            if len(joined) == 2 * DIGEST_BYTES * len(peers) and (plain := _from_hex(joined)):
                packed[unit] = b64encode(plain).decode()
    return packed


def _from_hex(digits: str) -> bytes | None:
    """The bytes of hex digits in lower case; None for anything else."""
    try:
        plain = bytes.fromhex(digits)
    except ValueError:
        return None
    return plain if plain.hex() == digits else None


def sources_from(packed: object, info: ValidationInfo) -> object:
    """What `packed_sources` made, unpacked; other things stay, to be judged by their type."""
    contributors = info.data.get("contributors", ())
    if not isinstance(packed, Mapping):
        return packed
    return {unit: _values_from(values, contributors) for unit, values in packed.items()}


def _values_from(packed: object, contributors: tuple[str, ...]) -> object:
    if not isinstance(packed, str):
        return packed
    digests = b64decode(packed, validate=True)  # its error is a ValueError, so one of validation
    if len(digests) != DIGEST_BYTES * len(contributors):
        raise ValueError("not a digest for each contributor")
    starts = range(0, len(digests), DIGEST_BYTES)
    return tuple(
        (peer, digests[start : start + DIGEST_BYTES].hex())
        for peer, start in zip(contributors, starts, strict=True)
    )
