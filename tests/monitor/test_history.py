"""A monitor's memory of earlier looks, and the changes that it reports."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from peers.actions.monitor_files import Earlier, HistoryFile
from swarm.errors import ConfigError
from swarm.monitor.health import REMEDIES, Fault, Word, health_of, pace_of
from swarm.monitor.history import MAX_EVENTS, MAX_POINTS, earlier_of, with_history
from swarm.monitor.snapshot import Agreement, Snapshot, Topic
from swarm.protocol.records.records import PeerState, RoundFigures, ValidationRecord
from tests.monitor.crowds import crowd
from tests.monitor.small_swarm import manifest, remembered, snapshot_with
from tests.monitor.test_replay import applied
from tests.peer_records import peer_record


def look(round_: int, at: float, *, peers: str = "AB", **changes: Any) -> Snapshot:
    """A look at two peers and a newest manifest that counts both, with changed fields."""
    members = {f"Qm{p}": manifest().members["QmA"] for p in "AB"}
    tip = manifest(
        round=round_, height=round_, tokens=1000 * round_,
        **{"members": members, "reasons": (), "contributors": ("QmA", "QmB"), **changes},
    )  # fmt: skip
    told = {"manifest_digest": tip.digest, "tokens_per_s": 100.0, "rounds_total": 20}
    rows = {f"Qm{p}": peer_record(f"Qm{p}", **told) for p in peers}
    return snapshot_with(peers=rows, merges={}, validations={}, tip=tip, at=at)


def test_history_outlives_the_records_it_came_from() -> None:
    before = remembered(snapshot_with())
    newer = {"QmA": ValidationRecord(6, "ab" * 32, 2.2, 100, 200)}
    now = snapshot_with(merges={}, validations=newer)
    shown = with_history(now, before)
    assert shown.losses == (*before.losses, (6, 2.2))
    assert shown.merges == before.merges
    assert shown.peers == now.peers
    alone = with_history(now, None)
    other_run = dataclasses.replace(before, run_id="another")
    assert with_history(now, other_run) == alone
    assert alone.losses == now.losses


def test_a_rounds_seconds_are_told_only_of_rounds_that_were_seen_whole() -> None:
    seen = remembered(
        look(3, 100.0), look(3, 102.0), look(4, 103.0), look(5, 113.0), look(7, 143.0)
    )
    told = [(p.round, p.seconds, p.committed_per_s) for p in seen.rounds]
    assert told == [
        (3, None, None), (4, None, None), (5, 10.0, 100.0), (7, 15.0, pytest.approx(2000 / 30)),
    ]  # fmt: skip
    pace = pace_of(seen)
    assert pace.round_s == 12.5 and pace.eta_s == 13 * 12.5
    assert pace.utilisation == pytest.approx((100 + 2000 / 30) / 2 / 200)
    early = remembered(look(3, 100.0), look(4, 103.0))
    assert pace_of(early).eta_s is None
    figures = [RoundFigures(4, True, seconds, {}, 0, 0) for seconds in (8.0, 12.0)]
    rows = tuple(
        dataclasses.replace(row, record=dataclasses.replace(row.record, last_round=last_round))
        for row, last_round in zip(early.peers, figures, strict=True)
    )
    pace = pace_of(dataclasses.replace(early, peers=rows))
    assert (pace.round_s, pace.eta_s, pace.committed_per_s) == (10.0, 160.0, None)


def test_what_changed_is_told_once_and_by_name() -> None:
    alone = {"peers": "A", "contributors": ("QmA",), "reasons": ("QmB said nothing",)}
    seen = remembered(
        look(3, 100.0), look(4, 110.0, **alone), look(4, 112.0, **alone), look(5, 120.0)
    )
    assert [(event.at, event.topic, event.text) for event in seen.events] == [
        (110.0, Topic.ROUND, "round 4 decided, with 1 of 2 members, without …QmB"),
        (110.0, Topic.MEMBERS, "QmB said nothing"),
        (110.0, Topic.PEER, "name-of-QmB is no longer present; its last state was: training"),
        (120.0, Topic.ROUND, "round 5 decided, after 10.0 s, with 2 of 2 members"),
        (120.0, Topic.PEER, "name-of-QmB is present"),
    ]


def test_history_is_bounded() -> None:
    full = remembered(look(3, 100.0))
    point, event = full.rounds[0], remembered(look(3, 1.0), look(4, 2.0)).events[0]
    full = dataclasses.replace(full, rounds=(point,) * MAX_POINTS, events=(event,) * MAX_EVENTS)
    later = with_history(look(4, 110.0), full)
    assert (len(later.rounds), len(later.events)) == (MAX_POINTS, MAX_EVENTS)
    assert later.rounds[-1].round == 4


# ---------------------------------------------------------------- health


def test_health_is_the_worst_that_can_be_said_and_names_its_cause() -> None:
    sound = remembered(look(3, 100.0), look(4, 110.0), look(5, 120.0))
    assert health_of(sound).word is Word.HEALTHY

    def word(**changes: Any) -> tuple[Word, str]:
        heard = [dataclasses.replace(row, heard=None) for row in sound.peers]
        found = health_of(dataclasses.replace(sound, **{"peers": tuple(heard), **changes}))
        return found.word, found.reason

    gone = f"has no record: its process has ended or its link is cut ({REMEDIES[Fault.SILENT]})"
    assert word(run_id=None, wait_for_peers=4) == (Word.GATHERING, "2 of 4 peers are present")
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


def test_a_stranger_with_another_tip_splits_nothing() -> None:
    sound = remembered(look(3, 100.0))
    stranger = dataclasses.replace(
        sound.peers[1], agreement=Agreement.DIFFERENT, votes=None, contributed=False
    )
    peers = (*sound.peers, stranger)
    assert health_of(dataclasses.replace(sound, peers=peers)).word is Word.HEALTHY


def test_all_peers_finished_is_finished() -> None:
    sound = remembered(look(3, 100.0))
    ended = tuple(
        dataclasses.replace(row, record=dataclasses.replace(row.record, state=PeerState.FINISHED))
        for row in sound.peers
    )
    assert health_of(dataclasses.replace(sound, peers=ended)).word is Word.FINISHED


FIRST = crowd(4, 8, 9, seen_rounds=1)
NOW_S = FIRST.at


def line(**fields: Any) -> str:
    return json.dumps(fields)


def history(run: str | None = None) -> str:
    kinds = ("blobs", "control", "moments")
    zeros = {f"{kind}_{way}": 0 for kind in kinds for way in ("sent", "received")}
    started = {"event": "started", "time": NOW_S - 900, "run": run or FIRST.run_id}
    merge = applied(2, "c", at=NOW_S - 800) | {"kind": "merge", "height": 3}
    loss = {"event": "validation", "digest": "a", "bits_per_byte": 1.0}
    return "\n".join([
        line(**started, peer_id="QmA", height=0, digest="a", **zeros),
        line(**applied(1, "a", at=NOW_S - 890)),
        line(**loss, time=NOW_S - 889, round=0, val_loss=5.5),
        line(**applied(2, "b", at=NOW_S - 850)),
        line(**loss, time=NOW_S - 849, round=9, val_loss=99.0),
        line(**merge),
        '{"event": "appl',
        "",
    ])  # fmt: skip


def test_histories_tell_losses_rounds_and_merges_once(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(history())
    found = Earlier([tmp_path / "one", tmp_path / "two"], None)
    before = found.before(FIRST)
    seen = with_history(FIRST, before)
    assert dict(seen.losses)[0] == 5.5, "records have forgotten it"
    assert dict(seen.losses)[9] == dict(FIRST.losses)[9], "a record is newer than a history"
    assert [event.topic for event in seen.events] == [Topic.ROUND, Topic.ROUND, Topic.MERGE]
    assert seen.events[0].text == "round 1 decided, with 2 of 2 members"
    assert [point.round for point in seen.rounds] == [9]


def test_what_the_monitor_itself_has_seen_comes_first(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(history())
    kept = HistoryFile(tmp_path / "history")
    own = with_history(crowd(4, 8, 10, seen_rounds=1), FIRST)
    kept.keep(own)
    both = Earlier([tmp_path / "events.jsonl"], HistoryFile(tmp_path / "history"))
    seen = both.before(FIRST)
    assert seen and seen.events[-len(own.events) :] == own.events
    assert len(seen.events) == len(own.events) + 3 and seen.rounds == own.rounds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (history("other-0000000000000000"), "they are of other-0000000000000000, and this is"),
        (history() + history("other-0000000000000000"), "several runs"),
        ('{"event": "applied", "time": 1.0}', "generation"),
        ("{}", "no event"),
    ],
)
def test_files_of_other_runs_and_versions_are_told(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)) as refused:
        Earlier([path], None).before(FIRST)
    assert said in str(refused.value) or said == "generation"
    assert "events.jsonl" in str(refused.value)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_left_out(loss: float) -> None:
    """A peer records any loss of its model, but JSON has no such number."""
    common = {"event": "validation", "time": NOW_S, "digest": "a", "bits_per_byte": 1.0}
    lines = [line(**common, round=k, val_loss=v) for k, v in ((1, 2.5), (2, loss))]
    assert earlier_of(lines).losses == ((1, 2.5),)


def test_no_line_is_no_history() -> None:
    assert earlier_of([]).run is None
