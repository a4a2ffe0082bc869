"""The projection of records keeps related fields together."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from swarm.monitor.exposition import exposition
from swarm.monitor.health import health_of
from swarm.monitor.history import decode_kept, encode_kept, kept_of, recalled, with_history
from swarm.monitor.schema import as_json
from swarm.monitor.snapshot import MAX_SCORES, ScoreRow, Snapshot, snapshot_of
from swarm.monitor.terminal import fact_lines
from swarm.protocol.records.records import Score, ScoreRecord
from swarm.protocol.values.manifest import Founding, PeerId, Stretch
from swarm.protocol.values.texts import Text
from tests.monitor.small_swarm import manifest, project, remembered, sighting, snapshot_with
from tests.peer_records import DIGEST, peer_record


def test_a_row_is_one_record_and_nothing_else() -> None:
    seen = sighting()
    snapshot = project(seen)
    assert [row.record for row in snapshot.peers] == [seen.peers[p] for p in sorted(seen.peers)]


def test_without_present_peers_there_is_nothing_to_show() -> None:
    assert snapshot_of(sighting(peers={})) is None


def test_without_a_manifest_the_tip_is_what_most_peers_say() -> None:
    snapshot = snapshot_with()
    assert snapshot.manifest_digest == peer_record("QmA").manifest_digest
    assert (snapshot.generation, snapshot.height, snapshot.round) == ("0", 6, 5)


def test_one_liar_does_not_choose_the_tip() -> None:
    liar = peer_record("QmZ", height=2**40, round=2**40, manifest_digest="ff" * 32)
    assert snapshot_with(peers={**sighting().peers, "QmZ": liar}).round == 5


def test_a_fetched_manifest_gives_tip_owners_versions_and_reasons() -> None:
    tip = manifest()
    snapshot = snapshot_with(tip=tip)
    assert (snapshot.manifest_digest, snapshot.height, snapshot.round) == (tip.digest, 7, 6)
    found = [(row.expert, row.owners, row.version) for row in snapshot.experts]
    assert found == [(0, ("QmA",), 4), (1, ("QmA", "QmB"), 5), (2, ("QmGone",), 6)]
    assert snapshot.reasons == ("expert 1: QmB joined",)


def test_without_a_manifest_owners_come_from_the_peers_and_versions_are_unknown() -> None:
    snapshot = snapshot_with()
    owners = {row.expert: row.owners for row in snapshot.experts}
    assert owners[0] == ("QmA",) and owners[2] == ("QmB",) and owners[7] == ("QmC",)
    assert 6 not in owners
    assert {row.version for row in snapshot.experts} == {None}


def test_each_peer_is_compared_with_the_tip() -> None:
    other = "cd" * 32
    peers = {
        "QmA": peer_record("QmA"),
        "QmB": peer_record("QmB"),
        "QmC": peer_record("QmC", height=5, manifest_digest=other),
        "QmD": peer_record("QmD", height=7, manifest_digest=other),
        "QmE": peer_record("QmE", manifest_digest=other),
        "QmF": peer_record("QmF", height=5, generation="f00", manifest_digest=other),
    }
    found = [row.agreement.name for row in snapshot_with(peers=peers).peers]
    assert found == ["EQUAL", "EQUAL", "BEHIND", "AHEAD", "DIFFERENT", "DIFFERENT"]


def test_announcements_of_one_merge_are_one_merge() -> None:
    first, second = snapshot_with().merges
    assert (first.merged, first.step, list(first.donors)) == (1, 100, [3])
    assert (second.merged, second.step, list(second.donors)) == (2, 200, [0, 1, 2])
    assert second.donors[2] == ((1, 0), (0, 1))


def test_losses_of_all_that_have_measured_are_joined() -> None:
    assert snapshot_with().losses == ((1, 4.5), (2, 3.5), (3, 2.9), (4, 2.5), (5, 2.31))


TEXT = Text("python-3.11", "byte", DIGEST, 500, 64_000, 1000)


@pytest.mark.parametrize(
    ("cursor", "holes", "dealt", "laps", "share"),
    [
        pytest.param(300, (), {"QmA": ((0, 100),), "QmB": ((100, 300),)}, 0, 0.0, id="at first"),
        pytest.param(900, ((50, 60),), {"QmA": ((700, 800), (20, 30))}, 0, 0.78, id="first lap"),
        pytest.param(2250, (), {"QmA": ((2100, 2200),)}, 2, 0.15, id="third lap"),
        pytest.param(1050, ((1, 2),), {"QmA": ((1000, 1050),)}, 0, 0.999, id="a window is open"),
    ],
)
def test_coverage_is_what_was_counted_of_the_text(
    cursor: int,
    holes: tuple[Stretch, ...],
    dealt: Mapping[PeerId, tuple[Stretch, ...]],
    laps: int,
    share: float,
) -> None:
    founding = Founding("QmA", "nonce", DIGEST, 10, DIGEST, 10, TEXT)
    tip = manifest(founding=founding, cursor=cursor, holes=holes, dealt=dealt)
    found = as_json(snapshot_with(tip=tip))["coverage"]
    assert (found["laps"], found["share"]) == (laps, pytest.approx(share))
    assert found["windows"] == 1000
    read = found["laps"] * 1000 + found["share"] * 1000
    assert read + found["dealt"] + found["open"] == pytest.approx(cursor)


def test_a_text_of_ones_own_has_no_coverage() -> None:
    assert as_json(snapshot_with())["coverage"] is None
    assert as_json(snapshot_with(tip=manifest()))["coverage"] is None


def test_members_are_shown_as_voters_or_with_what_they_have_earned_so_far() -> None:
    members = manifest().members
    trainee = dataclasses.replace(members["QmB"], votes=False, vouched=False, counted=3)
    tip = manifest(members={**members, "QmB": trainee})
    shown = {
        peer["peer_id"]: (peer["votes"], peer["counted"])
        for peer in as_json(snapshot_with(tip=tip))["peers"]
    }
    assert shown["QmA"] == (True, 10) and shown["QmB"] == (False, 3)


def test_a_run_that_ends_with_its_founder_is_shown_as_such() -> None:
    assert "ends with" not in health_of(snapshot_with(tip=manifest())).reason
    members = {
        peer: dataclasses.replace(member, vouched=peer == "QmA")
        for peer, member in manifest().members.items()
    }
    snapshot = snapshot_with(tip=manifest(members=members))
    assert snapshot.ends_with == "QmA"
    assert "no other is vouched for" in health_of(snapshot).reason


def score(round_: int, task: str = "sciq", value: float = 0.5, metric: str = "acc") -> Score:
    return Score(DIGEST, round_, task, metric, value, 1000)


def told(*scores: Score) -> ScoreRecord:
    return ScoreRecord(scores)


def scored(scores: dict[str, ScoreRecord], **changes: Any) -> Snapshot:
    return snapshot_with(scores=scores, **{"tip": manifest()} | changes)


def test_members_come_first_and_newer_rounds_before_older_ones() -> None:
    found = scored({
        "QmX": told(score(2**31 - 1, value=1.0)),
        "QmB": told(score(4, value=0.4), score(6, value=0.6)),
        "QmA": told(score(5, value=0.5)),
    })  # fmt: skip
    rows = [(row.publisher, row.member, row.round) for row in found.scores]
    assert rows[:3] == [("QmB", True, 6), ("QmA", True, 5), ("QmB", True, 4)]
    assert rows[3:] == [("QmX", False, 2**31 - 1)]


def test_without_a_manifest_nobody_is_known_to_be_a_member() -> None:
    found = scored({"QmA": told(score(5))}, tip=None)
    assert [row.member for row in found.scores] == [None]


def test_many_strangers_push_no_members_score_out() -> None:
    crowd = {f"Qm{k:04}": told(*[score(k + 9, f"task-{j}") for j in range(9)]) for k in range(99)}
    found = remembered(scored({"QmA": told(score(1))}), scored(crowd))
    assert len(found.scores) == MAX_SCORES
    assert found.scores[0].publisher == "QmA"


def test_a_score_that_the_network_lost_is_remembered_and_a_later_one_replaces_it() -> None:
    measured = [score(4, value=0.4), score(5, value=0.6), score(5, value=0.7)]
    again = remembered(*(scored({"QmA": told(each)}) for each in measured))
    # Each publisher measures a manifest once per metric, for any claimed round.
    assert [row.value for row in again.scores] == [0.7]
    other = dataclasses.replace(score(6), manifest_digest="ef" * 32)
    both = with_history(scored({"QmA": told(other)}), again)
    assert [row.round for row in both.scores] == [6, 5]
    kept = decode_kept(encode_kept(kept_of(both)))
    restarted = recalled(scored({}), kept)
    assert restarted is not None and restarted.scores == both.scores


def test_every_view_has_the_score_and_its_publisher() -> None:
    found = scored({"QmA": told(score(5, "arc_easy", 0.4321)), "QmX": told(score(9, "piqa", 0.9))})
    lines = [line.plain for line in fact_lines(found, 90)]
    assert "score  arc_easy acc 0.4321, round 5, by name-of-QmA" in lines
    assert "score  piqa acc 0.9, round 9, by …QmX, no member" in lines
    state = as_json(found)
    assert state["scores"][0] == {"publisher": "QmA", "member": True} | vars(
        score(5, "arc_easy", 0.4321)
    )
    told_lines = exposition(dict(state)).decode().splitlines()
    assert 'swarm_score{metric="acc",publisher="QmA",task="arc_easy"} 0.4321' in told_lines
    assert ScoreRow(**state["scores"][0]) == found.scores[0]
