"""Symbolic unit values: a value *is* the record of how it came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swarm.protocol.dealing import Stretches
from swarm.protocol.manifest import Digest, PeerId, Unit

# As tuples these must never be equal across classes; their lengths differ.


class Initial(NamedTuple):
    """A value of manifest 0."""

    unit: Unit


class Mean(NamedTuple):
    """The weighted fp32 mean of these values, summed in this order."""

    unit: Unit
    inputs: tuple[tuple[Digest, int], ...]
    """Each with its weight."""


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


def mean_of(unit: Unit, inputs: Sequence[Digest], weights: Sequence[int] | None) -> Mean:
    """The mean of these values; without weights all count the same."""
    return Mean(unit, tuple(zip(inputs, weights or [1] * len(inputs), strict=True)))


class Values:
    """All values of one schedule, by digest."""

    def __init__(self) -> None:
        self._digests: dict[Value, Digest] = {}
        self._values: dict[Digest, Value] = {}
        self._serials = 0
        self.reads: dict[Digest, Stretches] = {}
        """Of each trained shared value: the samples that it was really trained on."""

    def digest_of(self, value: Value) -> Digest:
        """The value's name; equal values have equal names."""
        digest = self._digests.get(value)
        if digest is None:
            digest = f"{type(value).__name__.lower()}-{len(self._values)}"
            self._digests[value] = digest
            self._values[digest] = value
        return digest

    def trained(self, unit: Unit, base: Digest, writer: PeerId) -> Digest:
        """A value that was never there before."""
        self._serials += 1
        return self.digest_of(Trained(unit, base, writer, self._serials))

    def __getitem__(self, digest: Digest) -> Value:
        return self._values[digest]

    def get(self, digest: Digest) -> Value | None:
        """The value of this name, or None if there is none."""
        return self._values.get(digest)
