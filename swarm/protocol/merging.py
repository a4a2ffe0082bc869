"""When an expert merge is due [M1]; how it is computed is the model's business.

Source: SPES (arXiv 2602.11543), equations 5 and 6.
"""

from __future__ import annotations

from swarm.config import MergingConfig
from swarm.protocol.manifest import Manifest


def alpha_at(step: int, merging: MergingConfig) -> float:
    """Weight of the donors at a cumulative step: alpha0 (1 - min(step / decay_steps, 1))."""
    return merging.alpha * (1.0 - min(step / merging.decay_steps, 1.0))


def merged_until(step: int, merging: MergingConfig) -> int:
    """Number of merge intervals completed by this step; what a merge sets `merged` to."""
    return step // merging.interval_steps


def merge_due(manifest: Manifest, merging: MergingConfig) -> bool:
    """Whether this manifest's only successor is a merge [M1].

    Depends on `step` and `merged` alone, never on the manifest's kind or a peer's own count: so
    it is the same everywhere, and a reform of a due manifest is due as well.
    """
    return (
        alpha_at(manifest.step, merging) > 0.0
        and merged_until(manifest.step, merging) > manifest.merged
    )
