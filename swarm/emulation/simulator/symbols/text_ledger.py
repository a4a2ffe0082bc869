"""The samples on which the shared tensors were actually trained, along each chain (text deals).

Manifests say which samples are dealt, and how many were used. The ledger follows the samples that
trainers have read.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm.emulation.simulator.symbols.values import Values
from swarm.experts import expert_of_unit
from swarm.protocol.rounds import Rules
from swarm.protocol.values.manifest import Digest, Kind, Manifest, PeerId
from swarm.protocol.values.work import Stretches, num_samples, split


class Ledger:
    """The samples counted up to each manifest."""

    def __init__(self, rules: Rules, values: Values, founding: Manifest) -> None:
        self.rules = rules
        self.values = values
        self._counted: dict[Digest, Stretches] = {founding.digest: ()}

    def enter(self, manifest: Manifest, parent: Manifest, liar: PeerId | None) -> str | None:
        """Enters a manifest whose parent was entered. Returns a text if its samples are wrong.

        Each sample before the cursor must be exactly one of counted, hole or dealt, once. Samples
        of its deal that a liar claims count as read.
        """
        counted = [*self._counted[manifest.parent or ""]]
        if manifest.kind is Kind.QUORUM:
            for peer in manifest.contributors:
                if peer == liar:
                    samples = manifest.work[peer] // self.rules.sequence_length
                    counted += split(parent.dealt[peer], samples)[0]
                    continue
                read = self._read(manifest, peer)
                if num_samples(read) * self.rules.sequence_length != manifest.work[peer]:
                    return f"{peer} read {read}, and counts {manifest.work[peer]} tokens"
                counted += read
        joined = one_after_the_other(counted)
        if joined is None:
            return f"samples are counted twice: {sorted(counted)}"
        self._counted[manifest.digest] = joined
        dealt = [stretch for own in manifest.dealt.values() for stretch in own]
        everything = one_after_the_other([*joined, *manifest.holes, *dealt])
        if everything != (((0, manifest.cursor),) if manifest.cursor else ()):
            return (
                f"counted {joined}, holes {manifest.holes} and dealt {manifest.dealt} are not "
                f"all before {manifest.cursor}, once"
            )
        return None

    def _read(self, manifest: Manifest, peer: str) -> Stretches:
        """Samples that a contributor has read for its value of the first shared part."""
        unit = next(unit for unit in manifest.sources if expert_of_unit(unit) is None)
        return self.values.reads[dict(manifest.sources[unit])[peer]]


def one_after_the_other(stretches: Iterable[tuple[int, int]]) -> Stretches | None:
    """The stretches in order, with adjacent stretches joined. None if two overlap."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(stretches):
        if joined and start < joined[-1][1]:
            return None
        if joined and start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
