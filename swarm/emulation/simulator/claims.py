"""I14: what members say of their work gains them little, judged by the manifests alone.

The limits are worked out here a second time, from what the other members have said.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm.emulation.simulator.values import Mean, Values
from swarm.emulation.simulator.violation import require, short
from swarm.protocol.dealing import num_samples
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.rounds import Rules

ROUNDED = 1.002
"""Paces have four digits."""


def check_claims(manifest: Manifest, parent: Manifest, rules: Rules, values: Values) -> None:
    """Judges a round: weights in means, the run's tokens, paces and deals."""
    _check_weights(manifest, values)
    if rules.round_seconds is None:
        return
    _check_tokens(manifest, parent)
    _check_paces(manifest, parent, rules.round_seconds)
    if not rules.overlaps:
        _check_deals(manifest, rules, rules.round_seconds)


def _check_weights(manifest: Manifest, values: Values) -> None:
    """No source weighs over 1.5 times the lower median, nor over a third of three or more."""
    tokens = sorted(manifest.work.values())
    median = tokens[(len(tokens) - 1) // 2]
    for unit in manifest.sources:
        mean = values.get(manifest.entries[unit].digest)
        weights = [weight for _, weight in mean.inputs] if isinstance(mean, Mean) else [1]
        is_level = len(weights) < 3 or 3 * max(weights) <= sum(weights)
        is_usual = len(set(weights)) == 1 or 2 * max(weights) <= 3 * median
        require(
            is_level and is_usual,
            "I14",
            f"{short(manifest)}: values of {unit} weigh {weights}, for work of {tokens} tokens",
        )


def _check_tokens(manifest: Manifest, parent: Manifest) -> None:
    """Who says the most moves the run no further than another."""
    *others, largest = sorted(manifest.work.values())
    most = sum(others) + max(others, default=largest)
    require(
        manifest.tokens - parent.tokens <= most,
        "I14",
        f"{short(manifest)} is {manifest.tokens - parent.tokens} tokens on, with {manifest.work}",
    )


def _check_paces(manifest: Manifest, parent: Manifest, round_s: float) -> None:
    """The next deal, 1.25 times what fits, is twice what was counted at most, and twice the last.

    One round in which a member did little halves its pace at most.
    """
    for peer, tokens in manifest.work.items():
        if peer in manifest.members:
            pace, before = manifest.members[peer].tokens_per_s, parent.members[peer].tokens_per_s
            most = max(2 * tokens / (1.25 * round_s), before / 2)
            most = min(most, 2 * before) if before else most
            require(
                pace <= ROUNDED * most,
                "I14",
                f"{short(manifest)}: {peer} does {pace} tokens/s after {before}, with {tokens}",
            )


def _check_deals(manifest: Manifest, rules: Rules, round_s: float) -> None:
    """Of three or more voters whose pace is known one alone raises no deal."""
    paces = _paces(manifest)
    batch = rules.batch_tokens_at(manifest.tokens)
    for peer in manifest.members if len(paces) > 2 else ():
        dealt = num_samples(manifest.dealt[peer]) * rules.sequence_length
        most = 4 * round_s * max(pace for other, pace in paces.items() if other != peer)
        require(
            dealt <= most + batch,
            "I14",
            f"{short(manifest)}: {peer} is dealt {dealt} tokens, voters do {paces}",
        )


def _paces(manifest: Manifest) -> Mapping[PeerId, float]:
    members = manifest.members.items()
    return {peer: m.tokens_per_s for peer, m in members if m.votes and m.tokens_per_s}
