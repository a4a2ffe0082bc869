"""Held-out losses of a run's rounds, as members have published them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from swarm.protocol.manifest import Digest, Manifest, PeerId
from swarm.protocol.records import ValidationRecord

MAX_ROUNDS = 4096
"""Losses of rounds that are remembered; of more, every second one of the older half is let go."""
MAX_MANIFESTS = 256
"""States whose own loss is remembered."""
ALIKE = 0.01
"""By so much of a loss two machines that measure one state may differ."""


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


def told_losses(validations: Mapping[PeerId, ValidationRecord], tip: Manifest | None) -> Losses:
    """Held-out losses by the records of the tip's members; anybody may publish any figure.

    The tip's loss is its first convener's figure: nobody else measures it. The loss of an earlier
    round is the median of what voters say. Where voters contradict each other, those count that are
    contradicted least: one peer alone measures a round, so a liar that rewrites the curve
    contradicts all others.

    Args:
        validations: the newest record of each peer.
        tip: None while nobody has shown a manifest; then everybody counts, and every round.
    """
    heard = {p: r for p, r in sorted(validations.items()) if tip is None or p in tip.members}
    said: dict[int, dict[PeerId, float]] = {}
    for peer in heard.keys() & tip.voters if tip else heard:
        for number, loss in (*heard[peer].recent, (heard[peer].round, heard[peer].val_loss)):
            if tip is None or number < tip.round:
                said.setdefault(number, {})[peer] = loss
    doubts = _contradicted(said.values())
    by_round = {number: _believed(claims, doubts) for number, claims in said.items()}
    exactly: dict[Digest, float] = {}
    measured = heard.get(tip.order[0]) if tip else None
    if tip and measured and measured.manifest_digest == tip.digest:
        by_round[tip.round] = exactly[tip.digest] = measured.val_loss
    nats = sorted(record.bits_per_byte_of_nat for record in heard.values())
    return Losses(by_round, exactly, nats[(len(nats) - 1) // 2] if nats else None)


def _contradicted(rounds: Iterable[Mapping[PeerId, float]]) -> Counter[PeerId]:
    """How often another one has said something else of the same round, of each peer."""
    found: Counter[PeerId] = Counter()
    for claims in rounds:
        losses = sorted(claims.values())
        for peer, loss in claims.items():
            apart = ALIKE * abs(loss)
            alike = bisect_right(losses, loss + apart) - bisect_left(losses, loss - apart)
            found[peer] += len(losses) - alike
    return found


def _believed(claims: Mapping[PeerId, float], doubts: Mapping[PeerId, int]) -> float:
    """The median of those that are contradicted least; of two the higher, the less flattering."""
    least = min(doubts[peer] for peer in claims)
    sound = sorted(loss for peer, loss in claims.items() if doubts[peer] == least)
    return sound[len(sound) // 2]


def _thinned(by_round: dict[int, float]) -> dict[int, float]:
    """The losses, with fewer of the older rounds where there are too many."""
    rounds = sorted(by_round)
    while len(rounds) > MAX_ROUNDS:
        half = len(rounds) // 2
        rounds = [*rounds[:half:2], *rounds[half:]]
    return {number: by_round[number] for number in rounds}
