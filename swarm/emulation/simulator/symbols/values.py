"""Symbolic unit values: a value *is* the record of how it was made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from swarm.protocol.values.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.values.work import Stretches


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


def require(condition: bool, invariant: str, text: str) -> None:
    """Raises a `Violation` unless the condition holds."""
    if not condition:
        raise Violation(invariant, text)


def short(manifest: Manifest) -> str:
    """A manifest's name in traces and messages."""
    return (
        f"{manifest.kind.value}@{manifest.height}/r{manifest.round}"
        f"[{manifest.generation[:6]}:{manifest.digest[:6]}]"
    )


# Tuples of different classes must never be equal, so their lengths or field types differ.


class Initial(NamedTuple):
    """A value of manifest 0."""

    unit: Unit


class Mean(NamedTuple):
    """The weighted fp32 mean of these values, summed in this order."""

    unit: Unit
    inputs: tuple[tuple[Digest, int], ...]
    """The values, each with its weight."""


class Merged(NamedTuple):
    """An expert merged from all experts' values. Peers with other arithmetic get another value."""

    experts: tuple[Digest, ...]
    expert: int
    variant: int


class Trained(NamedTuple):
    """A value that a peer trained from an agreed value."""

    unit: Unit
    base: Digest
    writer: PeerId
    serial: int


class Moved(NamedTuple):
    """A value that a delta made from an agreed value. `Merged` has fields of other types."""

    unit: Unit
    base: Digest
    delta: Digest


Value = Initial | Mean | Merged | Trained | Moved


class Tag(NamedTuple):
    """Some local steps on a unit that moves by deltas."""

    writer: PeerId
    unit: Unit
    serial: int


class Maker(NamedTuple):
    """The maker of a delta, its unit, and the agreed value that it moves."""

    unit: Unit
    base: Digest
    peer: PeerId


SHARE = 0.6
"""Share of a value's tags beyond the agreed value that a delta brings."""


def mean_of(unit: Unit, inputs: Sequence[Digest], weights: Sequence[int] | None) -> Mean:
    """The mean of these values. Without weights, all values count the same."""
    return Mean(unit, tuple(zip(inputs, weights or [1] * len(inputs), strict=True)))


class Values:
    """All values of one schedule, by digest."""

    def __init__(self) -> None:
        self._digests: dict[Value, Digest] = {}
        self._values: dict[Digest, Value] = {}
        self._serials = 0
        self.reads: dict[Digest, Stretches] = {}
        """For each trained shared value, or its delta, the samples on which it was actually
        trained."""
        self.moves: dict[Digest, Mapping[Tag, int]] = {}
        """The tags that each delta brings."""
        self.makers: dict[Digest, Maker] = {}
        """The maker of each delta."""
        self.tags: set[Tag] = set()
        """All tags that there ever were."""
        self.lost: set[Tag] = set()
        """Tags that their writers count as lost. Some of these tags were delivered before."""
        self.dropped: set[Tag] = set()
        """Tags of remainders that were dropped."""
        self._contents: dict[Digest, Counter[Tag]] = {}

    def digest_of(self, value: Value) -> Digest:
        """The value's name. Equal values have equal names."""
        digest = self._digests.get(value)
        if digest is None:
            digest = f"{type(value).__name__.lower()}-{len(self._values)}"
            self._digests[value] = digest
            self._values[digest] = value
        return digest

    def trained(self, unit: Unit, base: Digest, writer: PeerId) -> Digest:
        """A value that differs from all earlier ones."""
        self._serials += 1
        return self.digest_of(Trained(unit, base, writer, self._serials))

    # ------------------------------------------------------------ deltas

    def tag(self, writer: PeerId, unit: Unit) -> Tag:
        """A tag for local steps."""
        tag = Tag(writer, unit, len(self.tags))
        self.tags.add(tag)
        return tag

    def tags_of(self, writer: PeerId) -> set[Tag]:
        """All tags of a peer."""
        return {tag for tag in self.tags if tag.writer == writer}

    def encoded(self, unit: Unit, base: Digest, maker: PeerId, over: Mapping[Tag, int]) -> Digest:
        """A new delta, which brings some of the tags that a value has beyond an agreed value."""
        self._serials += 1
        random = Random(self._serials)
        digest = f"delta-{self._serials}"
        taken = [tag for tag in sorted(over) if random.random() < SHARE]
        self.moves[digest] = {tag: over[tag] for tag in taken}
        self.makers[digest] = Maker(unit, base, maker)
        return digest

    def moved(self, unit: Unit, base: Digest, delta: Digest) -> Digest:
        """The value that a delta makes from an agreed value."""
        return self.digest_of(Moved(unit, base, delta))

    def contents(self, digest: Digest) -> Counter[Tag]:
        """The tags that were brought into an agreed value, with their counts."""
        known = self._contents.get(digest)
        if known is None:
            value, known = self._values[digest], Counter()
            if isinstance(value, Merged):
                known.update(self.contents(value.experts[value.expert]))
            elif isinstance(value, Moved):
                known.update(self.contents(value.base))
                known.update(self.moves[value.delta])
            self._contents[digest] = known
        return known

    def __getitem__(self, digest: Digest) -> Value:
        return self._values[digest]

    def get(self, digest: Digest) -> Value | None:
        """The value of this name, or None if there is none."""
        return self._values.get(digest)
