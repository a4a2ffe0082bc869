"""The projection of records keeps related fields together."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from swarm.monitor.exposition import exposition
from swarm.monitor.health import health_of
from swarm.monitor.history import decode_kept, encode_kept, kept_of, recalled, with_history
from swarm.monitor.schema import as_json
from swarm.monitor.snapshot import MAX_SCORES, Agreement, ScoreRow, Sighting, Snapshot, snapshot_of
from swarm.monitor.terminal import fact_lines
from swarm.protocol.records.records import PeerRecord, Score, ScoreRecord
from swarm.protocol.values.manifest import Founding, Manifest, PeerId, Stretch
from swarm.protocol.values.texts import Text
from tests.peer_records import DIGEST

Sightings = Callable[..., Sighting]


def project(seen: Sighting) -> Snapshot:
    snapshot = snapshot_of(seen)
    assert snapshot is not None
    return snapshot


def test_a_row_is_one_record_and_nothing_else(make_sighting: Sightings) -> None:
    seen = make_sighting()
    snapshot = project(seen)
    assert [row.record for row in snapshot.peers] == [seen.peers[p] for p in sorted(seen.peers)]


def test_without_present_peers_there_is_nothing_to_show(make_sighting: Sightings) -> None:
    assert snapshot_of(make_sighting(peers={})) is None


def test_without_a_manifest_the_tip_is_what_most_peers_say(make_sighting: Sightings) -> None:
    seen = make_sighting()
    snapshot = project(seen)
    tip = seen.peers["QmA"]
    assert snapshot.manifest_digest == tip.manifest_digest
    assert (snapshot.generation, snapshot.height, snapshot.round) == ("0", 6, 5)


def test_one_liar_does_not_choose_the_tip(
    make_sighting: Sightings, make_peer: Callable[..., PeerRecord]
) -> None:
    seen = make_sighting()
    liar = make_peer("QmZ", height=2**40, round=2**40, manifest_digest="ff" * 32)
    snapshot = project(dataclasses.replace(seen, peers={**seen.peers, "QmZ": liar}))
    assert snapshot.round == 5


def test_a_fetched_manifest_gives_tip_owners_versions_and_reasons(
    make_sighting: Sightings, make_manifest: Callable[..., Manifest]
) -> None:
    tip = make_manifest()
    snapshot = project(make_sighting(tip=tip))
    assert (snapshot.manifest_digest, snapshot.height, snapshot.round) == (tip.digest, 7, 6)
    found = [(row.expert, row.owners, row.version) for row in snapshot.experts]
    assert found == [(0, ("QmA",), 4), (1, ("QmA", "QmB"), 5), (2, ("QmGone",), 6)]
    assert snapshot.reasons == ("expert 1: QmB joined",)


def test_without_a_manifest_owners_come_from_the_peers_and_versions_are_unknown(
    make_sighting: Sightings,
) -> None:
    snapshot = project(make_sighting())
    owners = {row.expert: row.owners for row in snapshot.experts}
    assert owners[0] == ("QmA",) and owners[2] == ("QmB",) and owners[7] == ("QmC",)
    assert 6 not in owners
    assert {row.version for row in snapshot.experts} == {None}


def test_each_peer_is_compared_with_the_tip(
    make_sighting: Sightings, make_peer: Callable[..., PeerRecord]
) -> None:
    other = "cd" * 32
    peers = {
        "QmA": make_peer("QmA"),
        "QmB": make_peer("QmB"),
        "QmC": make_peer("QmC", height=5, manifest_digest=other),
        "QmD": make_peer("QmD", height=7, manifest_digest=other),
        "QmE": make_peer("QmE", manifest_digest=other),
        "QmF": make_peer("QmF", height=5, generation="f00", manifest_digest=other),
    }
    snapshot = project(make_sighting(peers=peers))
    assert [row.agreement for row in snapshot.peers] == [
        Agreement.EQUAL,
        Agreement.EQUAL,
        Agreement.BEHIND,
        Agreement.AHEAD,
        Agreement.DIFFERENT,
        Agreement.DIFFERENT,
    ]


def test_announcements_of_one_merge_are_one_merge(make_sighting: Sightings) -> None:
    first, second = project(make_sighting()).merges
    assert (first.merged, first.step, list(first.donors)) == (1, 100, [3])
    assert (second.merged, second.step, list(second.donors)) == (2, 200, [0, 1, 2])
    assert second.donors[2] == ((1, 0), (0, 1))


def test_losses_of_all_that_have_measured_are_joined(make_sighting: Sightings) -> None:
    losses = project(make_sighting()).losses
    assert losses == ((1, 4.5), (2, 3.5), (3, 2.9), (4, 2.5), (5, 2.31))


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
    make_sighting: Sightings,
    make_manifest: Callable[..., Manifest],
    cursor: int,
    holes: tuple[Stretch, ...],
    dealt: Mapping[PeerId, tuple[Stretch, ...]],
    laps: int,
    share: float,
) -> None:
    founding = Founding("QmA", "nonce", DIGEST, 10, DIGEST, 10, TEXT)
    tip = make_manifest(founding=founding, cursor=cursor, holes=holes, dealt=dealt)
    found = as_json(project(make_sighting(tip=tip)))["coverage"]
    assert (found["laps"], found["share"]) == (laps, pytest.approx(share))
    assert found["windows"] == 1000
    read = found["laps"] * 1000 + found["share"] * 1000
    assert read + found["dealt"] + found["open"] == pytest.approx(cursor)


def test_a_text_of_ones_own_has_no_coverage(
    make_sighting: Sightings, make_manifest: Callable[..., Manifest]
) -> None:
    assert as_json(project(make_sighting()))["coverage"] is None
    assert as_json(project(make_sighting(tip=make_manifest())))["coverage"] is None


def test_members_are_shown_as_voters_or_with_what_they_have_earned_so_far(
    make_sighting: Callable[..., Sighting], make_manifest: Callable[..., Manifest]
) -> None:
    seen = make_sighting(tip=make_manifest())
    assert seen.tip is not None
    trainee = dataclasses.replace(seen.tip.members["QmB"], votes=False, vouched=False, counted=3)
    tip = dataclasses.replace(seen.tip, members={**seen.tip.members, "QmB": trainee})
    snapshot = snapshot_of(dataclasses.replace(seen, tip=tip))
    assert snapshot is not None
    shown = {
        peer["peer_id"]: (peer["votes"], peer["counted"]) for peer in as_json(snapshot)["peers"]
    }
    assert shown["QmA"] == (True, 10) and shown["QmB"] == (False, 3)


def test_a_run_that_ends_with_its_founder_is_shown_as_such(
    make_sighting: Callable[..., Sighting], make_manifest: Callable[..., Manifest]
) -> None:
    seen = make_sighting(tip=make_manifest())
    assert seen.tip is not None and "ends with" not in health_of(project(seen)).reason
    members = {
        peer: dataclasses.replace(member, vouched=peer == "QmA")
        for peer, member in seen.tip.members.items()
    }
    alone = dataclasses.replace(seen, tip=dataclasses.replace(seen.tip, members=members))
    snapshot = project(alone)
    assert snapshot.ends_with == "QmA"
    assert "no other is vouched for" in health_of(snapshot).reason


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
    # Each publisher measures a manifest once per metric, for any claimed round.
    assert [row.value for row in again.scores] == [0.7]
    other = dataclasses.replace(score(6), manifest_digest="ef" * 32)
    both = with_history(seen({"QmA": told(other)}), again)
    assert [row.round for row in both.scores] == [6, 5]
    kept = decode_kept(encode_kept(kept_of(both)))
    restarted = recalled(seen({}), kept)
    assert restarted is not None and restarted.scores == both.scores


def test_every_view_has_the_score_and_its_publisher(seen) -> None:
    found = seen({"QmA": told(score(5, "arc_easy", 0.4321)), "QmX": told(score(9, "piqa", 0.9))})
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
