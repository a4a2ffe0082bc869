"""Symbolic unit values: a value *is* the record of how it came about."""

from __future__ import annotations

from typing import NamedTuple

from swarm.protocol.manifest import Digest, PeerId, Unit

# As tuples these must never be equal across classes; their lengths differ.


class Initial(NamedTuple):
    """A value of manifest 0."""

    unit: Unit


class Mean(NamedTuple):
    """The fp32 mean of these values, summed in this order."""

    unit: Unit
    inputs: tuple[Digest, ...]


class Merged(NamedTuple):
    """An expert merged from all experts' values; peers with other arithmetic get another one."""

    experts: tuple[Digest, ...]
    expert: int
    variant: int


class Trained(NamedTuple):
    """A value that a peer trained from an agreed one."""

    unit: Unit
    base: Digest
    writer: PeerId
    serial: int


Value = Initial | Mean | Merged | Trained


class Values:
    """All values of one schedule, by digest."""

    def __init__(self) -> None:
        self._digests: dict[Value, Digest] = {}
        self._values: dict[Digest, Value] = {}

    def digest_of(self, value: Value) -> Digest:
        """The value's name; equal values have equal names."""
        digest = self._digests.get(value)
        if digest is None:
            digest = f"{type(value).__name__.lower()}-{len(self._values)}"
            self._digests[value] = digest
            self._values[digest] = value
        return digest

    def __getitem__(self, digest: Digest) -> Value:
        return self._values[digest]

    def get(self, digest: Digest) -> Value | None:
        """The value of this name, or None if there is none."""
        return self._values.get(digest)
