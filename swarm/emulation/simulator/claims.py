"""I14: what members say of their work gains them little, judged by the manifests alone.

The limits are worked out here a second time, from what the other members have said.
"""

from __future__ import annotations

from swarm.emulation.simulator.values import Mean, Values
from swarm.emulation.simulator.violation import require, short
from swarm.protocol.dealing import num_samples
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.rounds import Rules

ROUNDED = 1.002
"""Paces have four digits."""


def check_claims(manifest: Manifest, parent: Manifest, rules: Rules, values: Values) -> None:
    """Judges a round: weights in means, the run's tokens, paces and deals."""
    _check_weights(manifest, parent, values)
    if rules.round_seconds is None:
        return
    _check_tokens(manifest, parent)
    _check_paces(manifest, parent, rules.round_seconds)
    if not rules.overlaps:
        _check_deals(manifest, rules, rules.round_seconds)


def _trust(manifest: Manifest, peer: PeerId) -> int:
    """With how many members' work an anchor trusts a peer."""
    member = manifest.members.get(peer)
    return member.weight if member else 1


def _each(manifest: Manifest, parent: Manifest) -> list[tuple[int, int]]:
    """Tokens for each of the members that a contributor counts as, and their number; sorted."""
    trusts = ((_trust(parent, peer), tokens) for peer, tokens in manifest.work.items())
    return sorted((max(1, tokens // trust), trust) for trust, tokens in trusts)


def _check_weights(manifest: Manifest, parent: Manifest, values: Values) -> None:
    """No source weighs over 1.5 times the lower median, nor over a third of three or more.

    The limit of a source that is trusted with more is so many times higher, and it may have more
    than a third.
    """
    each = _each(manifest, parent)
    median = each[(len(each) - 1) // 2][0]
    for unit, sources in manifest.sources.items():
        mean = values.get(manifest.entries[unit].digest)
        weights = [weight for _, weight in mean.inputs] if isinstance(mean, Mean) else [1]
        trusts = [_trust(parent, peer) for peer, _ in sources]
        weighed = list(zip(weights, trusts, strict=True)) if len(weights) == len(trusts) else []
        others = [weight for weight, trust in weighed if trust == 1]
        is_level = len(weighed) < 3 or 3 * max(others, default=0) <= sum(weights)
        is_usual = len(set(weights)) == 1 or all(2 * w <= 3 * median * t for w, t in weighed)
        require(
            is_level,
            "I14",
            f"{short(manifest)}: values of {unit} weigh {weights}, trusted with {trusts}",
        )
        require(
            is_usual,
            "I14",
            f"{short(manifest)}: values of {unit} weigh {weights}, for work of {each}",
        )


def _check_tokens(manifest: Manifest, parent: Manifest) -> None:
    """The largest claim moves the run no further than another."""
    each = _each(manifest, parent)
    *others, (_, trust) = each
    second = others[-1][0] if others else each[0][0]
    most = sum((1 + tokens) * times for tokens, times in others) + (1 + second) * trust
    require(
        manifest.tokens - parent.tokens <= most,
        "I14",
        f"{short(manifest)} is {manifest.tokens - parent.tokens} tokens on, with {each}",
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
    paces = {
        peer: member.tokens_per_s / member.weight
        for peer, member in manifest.members.items()
        if member.votes and member.tokens_per_s
    }
    batch = rules.batch_tokens_at(manifest.tokens)
    for peer in manifest.members if len(paces) > 2 else ():
        dealt = num_samples(manifest.dealt[peer]) * rules.sequence_length
        usual = round_s * max(pace for other, pace in paces.items() if other != peer)
        most = usual * max(4, 1.25 * _trust(manifest, peer))
        require(
            dealt <= most + batch,
            "I14",
            f"{short(manifest)}: {peer} is dealt {dealt} tokens, voters do {paces}",
        )
