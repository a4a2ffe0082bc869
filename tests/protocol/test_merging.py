from dataclasses import replace

import pytest

from swarm.config import MergingConfig
from swarm.protocol.manifest import Founding, Kind, Manifest
from swarm.protocol.merging import alpha_at, merge_due, merged_until

PAPER = MergingConfig(alpha=0.1, top_k=4, decay_steps=12_500, interval_steps=500)
TIP = Manifest(
    run="r",
    generation="0",
    height=1,
    round=1,
    kind=Kind.QUORUM,
    parent="0" * 64,
    founding=Founding("a", "n", "c" * 64, 1, "v" * 64, 4),
    step=0,
    tokens=0,
    merged=0,
    members={},
    contributors=(),
    sources={},
    owners={},
    entries={},
)


def test_alpha_falls_linearly_to_zero_and_stays_there():
    assert alpha_at(0, PAPER) == 0.1
    assert alpha_at(6_250, PAPER) == pytest.approx(0.05)
    assert alpha_at(12_500, PAPER) == 0.0
    assert alpha_at(10**9, PAPER) == 0.0


def test_the_papers_schedule_has_24_merges_whose_alphas_sum_to_1_2():
    manifest, alphas = TIP, []
    for _ in range(200):
        manifest = replace(manifest, step=manifest.step + 50)
        if merge_due(manifest, PAPER):
            alphas.append(alpha_at(manifest.step, PAPER))
            manifest = replace(manifest, merged=merged_until(manifest.step, PAPER))
    for _ in range(200):  # the schedule's second half, and beyond its end
        manifest = replace(manifest, step=manifest.step + 50)
        if merge_due(manifest, PAPER):
            alphas.append(alpha_at(manifest.step, PAPER))
            manifest = replace(manifest, merged=merged_until(manifest.step, PAPER))
    assert len(alphas) == 24
    assert sum(alphas) == pytest.approx(1.2)


def test_a_merge_is_due_once_even_if_two_intervals_went_by():
    late = replace(TIP, step=1_000)
    assert merge_due(late, PAPER)
    done = replace(late, kind=Kind.MERGE, merged=merged_until(late.step, PAPER))
    assert done.merged == 2
    assert not merge_due(done, PAPER)


@pytest.mark.parametrize("kind", list(Kind))
def test_the_kind_of_the_tip_plays_no_part(kind):
    assert merge_due(replace(TIP, kind=kind, step=500), PAPER)
    assert not merge_due(replace(TIP, kind=kind, step=500, merged=1), PAPER)
    assert not merge_due(replace(TIP, kind=kind, step=499), PAPER)


def test_no_merge_is_due_when_merging_is_off_or_over():
    assert not merge_due(replace(TIP, step=500), MergingConfig(alpha=0.0, interval_steps=500))
    assert not merge_due(replace(TIP, step=12_500), PAPER)
