"""What a monitor remembers of looks before, and what it says has changed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from swarm.monitor.causes import REMEDIES, Fault
from swarm.monitor.health import Word, health_of, pace_of
from swarm.monitor.history import MAX_EVENTS, MAX_POINTS, with_history
from swarm.monitor.snapshot import Agreement, Sighting, Snapshot, Topic, snapshot_of
from swarm.protocol.figures import RoundFigures
from swarm.protocol.manifest import Manifest
from swarm.protocol.records import PeerRecord, PeerState, ValidationRecord

Sightings = Callable[..., Sighting]
Manifests = Callable[..., Manifest]
Peers = Callable[..., PeerRecord]
Looks = Callable[..., Snapshot]


def project(seen: Sighting) -> Snapshot:
    found = snapshot_of(seen)
    assert found is not None
    return found


@pytest.fixture
def look(make_sighting: Sightings, make_manifest: Manifests, make_peer: Peers) -> Looks:
    """A look at two peers and a newest manifest that counts both; fields of it may be changed."""

    def one(round_: int, at: float, *, peers: str = "AB", **changes: Any) -> Snapshot:
        members = {f"Qm{p}": make_manifest().members["QmA"] for p in "AB"}
        tip = make_manifest(
            round=round_, height=round_, tokens=1000 * round_,
            **{"members": members, "reasons": (), "contributors": ("QmA", "QmB"), **changes},
        )  # fmt: skip
        rows = {
            f"Qm{p}": make_peer(
                f"Qm{p}", manifest_digest=tip.digest, tokens_per_s=100.0, rounds_total=20
            )
            for p in peers
        }
        seen = make_sighting(peers=rows, merges={}, validations={}, tip=tip, at=at)
        return project(seen)

    return one


def looks(*snapshots: Snapshot) -> Snapshot:
    before = None
    for snapshot in snapshots:
        before = with_history(snapshot, before)
    assert before is not None
    return before


def test_history_outlives_the_records_it_came_from(make_sighting: Sightings) -> None:
    before = looks(project(make_sighting()))
    newer = {"QmA": ValidationRecord(6, "ab" * 32, 2.2, 100, 200)}
    now = project(make_sighting(merges={}, validations=newer))
    shown = with_history(now, before)
    assert shown.losses == (*before.losses, (6, 2.2))
    assert shown.merges == before.merges
    assert shown.peers == now.peers
    alone = with_history(now, None)
    other_run = dataclasses.replace(before, run_id="another")
    assert with_history(now, other_run) == alone
    assert alone.losses == now.losses


def test_a_rounds_seconds_are_told_only_of_rounds_that_were_seen_whole(look: Looks) -> None:
    seen = looks(look(3, 100.0), look(3, 102.0), look(4, 103.0), look(5, 113.0), look(7, 143.0))
    told = [(p.round, p.seconds, p.committed_per_s) for p in seen.rounds]
    assert told == [
        (3, None, None), (4, None, None), (5, 10.0, 100.0), (7, 15.0, pytest.approx(2000 / 30)),
    ]  # fmt: skip
    pace = pace_of(seen)
    assert pace.round_s == 12.5 and pace.eta_s == 13 * 12.5
    assert pace.utilisation == pytest.approx((100 + 2000 / 30) / 2 / 200)
    early = looks(look(3, 100.0), look(4, 103.0))
    assert pace_of(early).eta_s is None
    told = [
        dataclasses.replace(row.record, last_round=RoundFigures(4, True, 8.0 + 4.0 * k, {}, 0, 0))
        for k, row in enumerate(early.peers)
    ]
    rows = (
        dataclasses.replace(row, record=record)
        for row, record in zip(early.peers, told, strict=True)
    )
    pace = pace_of(dataclasses.replace(early, peers=tuple(rows)))
    assert (pace.round_s, pace.eta_s, pace.committed_per_s) == (10.0, 160.0, None)


def test_what_changed_is_told_once_and_by_name(look: Looks) -> None:
    seen = looks(
        look(3, 100.0),
        look(4, 110.0, peers="A", contributors=("QmA",), reasons=("QmB said nothing",)),
        look(4, 112.0, peers="A", contributors=("QmA",), reasons=("QmB said nothing",)),
        look(5, 120.0),
    )
    assert [(event.at, event.topic, event.text) for event in seen.events] == [
        (110.0, Topic.ROUND, "round 4 decided, with 1 of 2 members, without …QmB"),
        (110.0, Topic.MEMBERS, "QmB said nothing"),
        (110.0, Topic.PEER, "name-of-QmB is gone; its last word was: training"),
        (120.0, Topic.ROUND, "round 5 decided, after 10.0 s, with 2 of 2 members"),
        (120.0, Topic.PEER, "name-of-QmB is there"),
    ]


def test_history_is_bounded(look: Looks) -> None:
    full = looks(look(3, 100.0))
    point, event = full.rounds[0], looks(look(3, 1.0), look(4, 2.0)).events[0]
    full = dataclasses.replace(full, rounds=(point,) * MAX_POINTS, events=(event,) * MAX_EVENTS)
    later = with_history(look(4, 110.0), full)
    assert (len(later.rounds), len(later.events)) == (MAX_POINTS, MAX_EVENTS)
    assert later.rounds[-1].round == 4


# ---------------------------------------------------------------- health


def test_health_is_the_worst_that_can_be_said_and_names_its_cause(look: Looks) -> None:
    sound = looks(look(3, 100.0), look(4, 110.0), look(5, 120.0))
    assert health_of(sound).word is Word.HEALTHY

    def word(**changes: Any) -> tuple[Word, str]:
        heard = [dataclasses.replace(row, heard=None) for row in sound.peers]
        found = health_of(dataclasses.replace(sound, **{"peers": tuple(heard), **changes}))
        return found.word, found.reason

    gone = f"has no record: its process or its line is gone ({REMEDIES[Fault.SILENT]})"
    assert word(run_id=None, wait_for_peers=4) == (Word.GATHERING, "2 of 4 peers are there")
    assert word(round=20) == (Word.FINISHED, "20 of 20 rounds are done")
    assert word(left_out=("QmB",)) == (Word.DEGRADED, "round 5 went without name-of-QmB")
    assert word(absent=("QmZ",)) == (Word.DEGRADED, f"…QmZ {gone}")
    assert word(absent=("QmZ",), quorum=False) == (
        Word.HALTED, f"the voters that are present are no quorum; absent: …QmZ; …QmZ {gone}",
    )  # fmt: skip
    assert word(members=None)[0] is Word.UNKNOWN
    assert word(at=175.0)[0] is Word.HEALTHY, "a round may take a minute"
    assert word(at=185.0) == (
        Word.STALLED, "no round for 65 s; a usual one takes 10 s",
    )  # fmt: skip
    first, second = sound.peers
    other = dataclasses.replace(second, agreement=Agreement.DIFFERENT)
    assert word(peers=(first, other)) == (
        Word.SPLIT, "name-of-QmB: another tip than the others",
    )  # fmt: skip


def test_a_stranger_with_another_tip_splits_nothing(look: Looks) -> None:
    sound = looks(look(3, 100.0))
    stranger = dataclasses.replace(
        sound.peers[1], agreement=Agreement.DIFFERENT, votes=None, contributed=False
    )
    peers = (*sound.peers, stranger)
    assert health_of(dataclasses.replace(sound, peers=peers)).word is Word.HEALTHY


def test_all_peers_finished_is_finished(look: Looks) -> None:
    sound = looks(look(3, 100.0))
    ended = tuple(
        dataclasses.replace(row, record=dataclasses.replace(row.record, state=PeerState.FINISHED))
        for row in sound.peers
    )
    assert health_of(dataclasses.replace(sound, peers=ended)).word is Word.FINISHED
