"""Scores: anybody may publish them, members' go first, and monitors remember them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from swarm.monitor.exposition import exposition
from swarm.monitor.history import with_history
from swarm.monitor.kept import decode_kept, encode_kept, kept_of, recalled
from swarm.monitor.panels import facts
from swarm.monitor.schema import as_json
from swarm.monitor.scores import MAX_SCORES, ScoreRow
from swarm.monitor.snapshot import Sighting, Snapshot, snapshot_of
from swarm.protocol.manifest import Manifest
from swarm.protocol.records import Score, ScoreRecord
from tests.peer_records import DIGEST


def score(round_: int, task: str = "sciq", value: float = 0.5, metric: str = "acc") -> Score:
    return Score(DIGEST, round_, task, metric, value, 1000)


def told(*scores: Score) -> ScoreRecord:
    return ScoreRecord(scores)


@pytest.fixture
def seen(
    make_sighting: Callable[..., Sighting], make_manifest: Callable[..., Manifest]
) -> Callable[..., Snapshot]:
    def look(scores: dict[str, ScoreRecord], **changes: Any) -> Snapshot:
        found = snapshot_of(make_sighting(scores=scores, **{"tip": make_manifest()} | changes))
        assert found is not None
        return found

    return look


def test_members_come_first_and_newer_rounds_before_older_ones(seen) -> None:
    found = seen({
        "QmX": told(score(2**31 - 1, value=1.0)),
        "QmB": told(score(4, value=0.4), score(6, value=0.6)),
        "QmA": told(score(5, value=0.5)),
    })  # fmt: skip
    rows = [(row.publisher, row.member, row.round) for row in found.scores]
    assert rows == [
        ("QmB", True, 6),
        ("QmA", True, 5),
        ("QmB", True, 4),
        ("QmX", False, 2**31 - 1),
    ]


def test_without_a_manifest_nobody_is_known_to_be_a_member(seen) -> None:
    found = seen({"QmA": told(score(5))}, tip=None)
    assert [row.member for row in found.scores] == [None]


def test_many_strangers_push_no_members_score_out(seen) -> None:
    crowd = {f"Qm{k:04}": told(*[score(k + 9, f"task-{j}") for j in range(9)]) for k in range(99)}
    before = seen({"QmA": told(score(1))})
    found = with_history(seen(crowd), with_history(before, None))
    assert len(found.scores) == MAX_SCORES
    assert found.scores[0].publisher == "QmA"


def test_a_score_that_is_gone_from_the_network_is_remembered_and_a_later_one_replaces_it(
    seen,
) -> None:
    first = with_history(seen({"QmA": told(score(4, value=0.4))}), None)
    later = with_history(seen({"QmA": told(score(5, value=0.6))}), first)
    again = with_history(seen({"QmA": told(score(5, value=0.7))}), later)
    # One manifest is measured once by each publisher and metric, whatever round it is said to be.
    assert [row.value for row in again.scores] == [0.7]
    other = dataclasses.replace(score(6), manifest_digest="ef" * 32)
    both = with_history(seen({"QmA": told(other)}), again)
    assert [row.round for row in both.scores] == [6, 5]
    kept = decode_kept(encode_kept(kept_of(both)))
    restarted = recalled(seen({}), kept)
    assert restarted is not None and restarted.scores == both.scores


def test_every_view_has_the_score_and_its_publisher(seen) -> None:
    found = seen({"QmA": told(score(5, "arc_easy", 0.4321)), "QmX": told(score(9, "piqa", 0.9))})
    lines = [line.plain for line in facts(found, 90)]
    assert "score  arc_easy acc 0.4321, round 5, by name-of-QmA" in lines
    assert "score  piqa acc 0.9, round 9, by …QmX, no member" in lines
    state = as_json(found)
    assert state["scores"][0] == {"publisher": "QmA", "member": True} | vars(
        score(5, "arc_easy", 0.4321)
    )
    told_lines = exposition(dict(state)).decode().splitlines()
    assert 'swarm_score{metric="acc",publisher="QmA",task="arc_easy"} 0.4321' in told_lines
    assert ScoreRow(**state["scores"][0]) == found.scores[0]
