"""Held-out losses of a run's rounds, as members have published them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from swarm.protocol.manifest import Digest, Manifest, PeerId
from swarm.protocol.records import ValidationRecord

MAX_ROUNDS = 4096
"""Losses of rounds that are remembered; of more, every second one of the older half is let go."""
MAX_MANIFESTS = 256
"""States whose own loss is remembered."""


@dataclass(frozen=True)
class Losses:
    """Held-out losses in nats per token.

    Attributes:
        by_round: round -> loss; of a round that was measured twice, as with a merge, either.
        by_manifest: digest of a manifest -> loss of exactly this state.
        bits_per_byte_of_nat: how many bits per byte are one nat per token; None: not known.
    """

    by_round: Mapping[int, float] = field(default_factory=dict)
    by_manifest: Mapping[Digest, float] = field(default_factory=dict)
    bits_per_byte_of_nat: float | None = None

    def until(self, manifest: Manifest) -> tuple[tuple[int, float], ...]:
        """(round, loss) up to this state, ascending; of its own round only what is its own."""
        found = {number: loss for number, loss in self.by_round.items() if number < manifest.round}
        if manifest.digest in self.by_manifest:
            found[manifest.round] = self.by_manifest[manifest.digest]
        return tuple(sorted(found.items()))

    def with_newer(self, newer: Losses) -> Losses:
        """Both, where what is newer wins; of long runs not every round, see `MAX_ROUNDS`."""
        manifests = dict(self.by_manifest) | dict(newer.by_manifest)
        return Losses(
            _thinned(dict(self.by_round) | dict(newer.by_round)),
            dict(list(manifests.items())[-MAX_MANIFESTS:]),
            newer.bits_per_byte_of_nat or self.bits_per_byte_of_nat,
        )


def told_losses(
    validations: Mapping[PeerId, ValidationRecord], members: Collection[PeerId]
) -> Losses:
    """What the records of members say; anybody may publish any figure, so others do not count."""
    found: dict[int, float] = {}
    exactly: dict[Digest, float] = {}
    nat: float | None = None
    by_age = sorted(validations.items(), key=lambda item: (item[1].round, item[0]))
    for peer, record in by_age:
        if peer in members:
            found |= dict(record.recent) | {record.round: record.val_loss}
            exactly[record.manifest_digest] = record.val_loss
            nat = record.bits_per_byte_of_nat
    return Losses(found, exactly, nat)


def _thinned(by_round: dict[int, float]) -> dict[int, float]:
    """The losses, with fewer of the older rounds where there are too many."""
    rounds = sorted(by_round)
    while len(rounds) > MAX_ROUNDS:
        half = len(rounds) // 2
        rounds = [*rounds[:half:2], *rounds[half:]]
    return {number: by_round[number] for number in rounds}
