"""A stranger's records have their own rows, and change no statement about the run."""

import dataclasses
import io
import json
from typing import Any

import pytest
from rich.console import Console

from swarm.errors import BadRecord
from swarm.monitor import terminal
from swarm.monitor.exposition import exposition
from swarm.monitor.health import Word, health_of
from swarm.monitor.history import decode_kept, encode_kept, kept_of
from swarm.monitor.schema import as_json
from swarm.monitor.server import Feed
from swarm.monitor.snapshot import Sighting, Snapshot
from swarm.monitor.terminal import render
from swarm.protocol.records.records import (
    MAX_REAL,
    LinkFigures,
    MergeRecord,
    PeerRecord,
    PeerState,
    RoundFigures,
    RoutingFigures,
    Silence,
    ValidationRecord,
    decode_record,
    encode_record,
)
from tests.monitor.crowds import STRANGER, peer_id, sighting
from tests.monitor.small_swarm import project, remembered
from tests.peer_records import DIGEST, peer_record

ROUND = 8
"""The look at which strangers come. This look and the one before have no faults."""
OTHER = peer_id(77)
MEMBERS = [peer_id(k) for k in range(4)]


def peer(who: str = STRANGER, **changes: Any) -> PeerRecord:
    tip = sighting(4, 8, ROUND).tip
    assert tip is not None
    known = {"manifest_digest": tip.digest, "height": ROUND, "round": ROUND, "rounds_total": 400}
    return peer_record(who, **known | changes)


def last_round(seconds: float = 20.0, **changes: Any) -> RoundFigures:
    phases = {"training": seconds}
    return RoundFigures(ROUND, False, seconds, phases, 0, 0, **changes)


def validation(round_: int, *losses: float) -> ValidationRecord:
    recent = tuple(enumerate(losses[1:], start=1))
    return ValidationRecord(round_, DIGEST, losses[0], 4096, 1, recent)


MOST = {"tokens_per_s": MAX_REAL, "loss": MAX_REAL, "last_round": last_round(MAX_REAL)}
FORGED: dict[str, list[PeerRecord | MergeRecord | ValidationRecord]] = {
    "losses that stay the newest": [validation(10**6, 0.001, 9.0, 9.0, 9.0)],
    "losses far apart": [validation(10**6, MAX_REAL, -MAX_REAL)],
    "a merge": [MergeRecord("0", 2**30, 2**30, 2**60, 1.0, {0: ((5,),), 60_000: ((1, 2),)})],
    "sums": [peer(**MOST), peer(OTHER, **MOST)],
    "members that it misses": [
        peer(link=LinkFigures(1.0, 1.0, 1.0, dict.fromkeys(MEMBERS, Silence.GONE)))
    ],
    "trouble": [peer(trouble="everything is lost")],
    "a slow round": [peer(last_round=last_round(9999.0))],
    "the word of a convener": [
        peer(last_round=last_round(left_out=dict.fromkeys(MEMBERS, "refused")))
    ],
    "the end of the run": [
        peer(who, state=PeerState.FINISHED, rounds_total=0) for who in (STRANGER, OTHER)
    ],
    "another tip": [peer(manifest_digest="cd" * 32, generation="f00")],
    "figures of all kinds": [
        peer(
            control_bytes_sent=2**62, moments_bytes_sent=2**62, zero_moments=9, steps_skipped=9,
            grad_spikes=9, tokens_lost=2**62, refused={"forged": 9}, engine="forged",
            routing=RoutingFigures(MAX_REAL, 99, 1.0, MAX_REAL, (1000,) * 8, ((0, 1, 1000),)),
            link=LinkFigures(0.0, MAX_REAL, MAX_REAL, {}),
        )
    ],
}  # fmt: skip


def with_forged(name: str, round_: int = ROUND) -> Sighting:
    seen = sighting(4, 8, round_)
    fields = {PeerRecord: "peers", MergeRecord: "merges", ValidationRecord: "validations"}
    for k, record in enumerate(FORGED[name]):
        record = decode_record(type(record), encode_record(record))
        field = fields[type(record)]
        forged = {
            record.peer_id if isinstance(record, PeerRecord) else (STRANGER, OTHER)[k]: record
        }
        seen = dataclasses.replace(seen, **{field: {**getattr(seen, field), **forged}})
    return seen


def looks(*seen: Sighting) -> Snapshot:
    """Looks two seconds apart, as in a monitor with a memory."""
    return remembered(*map(project, seen))


def printed(snapshot: Snapshot) -> str:
    console = Console(width=200, height=60, file=io.StringIO())
    console.print(render(snapshot, width=200, height=60))
    return console.file.getvalue()


SOUND = looks(sighting(4, 8, ROUND - 1), sighting(4, 8, ROUND))


@pytest.mark.parametrize("name", FORGED)
def test_a_strangers_record_changes_nothing_but_its_own_row(name: str) -> None:
    forged = looks(sighting(4, 8, ROUND - 1), with_forged(name))
    again = looks(with_forged(name, ROUND - 1), with_forged(name))
    for found in (forged, again):
        said, sound = as_json(found), as_json(SOUND)
        mine = {row["peer_id"]: row for row in said.pop("peers")}
        assert {row["peer_id"]: row for row in sound.pop("peers")}.items() <= mine.items()
        assert said == sound
        assert said["health"]["word"] == Word.HEALTHY.value
        assert terminal.fact_lines(found, 90) == terminal.fact_lines(SOUND, 90)


@pytest.mark.parametrize("name", FORGED)
def test_whatever_strangers_sign_can_be_shown_and_kept(name: str) -> None:
    for tip in (sighting(4, 8, ROUND).tip, None):
        found = looks(dataclasses.replace(with_forged(name), tip=tip))
        json.dumps(as_json(found), allow_nan=False)
        feed = Feed(1)
        feed.show(as_json(found))
        json.loads(feed.since(None)[1].partition("data: ")[2])
        kept = kept_of(found)
        assert decode_kept(encode_kept(kept)) == kept
        assert exposition(dict(as_json(found)))
        assert printed(found)


def test_metrics_have_no_samples_of_strangers() -> None:
    """Sums are over members only, and new keys make no new series."""
    found = looks(sighting(4, 8, ROUND - 1), with_forged("sums"))
    assert exposition(dict(as_json(found))) == exposition(dict(as_json(SOUND)))


def test_the_screen_says_how_many_are_no_members() -> None:
    forged = looks(with_forged("another tip"))
    assert "4 peers  " in printed(SOUND)
    assert "5 peers, 1 no member" in printed(forged) and "DIFFERENT" not in printed(forged)


def test_a_strangers_decision_is_told_after_those_of_members() -> None:
    seen = sighting(4, 8, ROUND)
    behind = {
        p: dataclasses.replace(record, height=ROUND - 1, manifest_digest=DIGEST, reason="late")
        for p, record in seen.peers.items()
    }
    behind[STRANGER] = peer(reason="look at me")
    found = looks(dataclasses.replace(seen, peers=behind))
    lines = [
        line.plain for line in terminal.reason_lines(found, terminal.keys_of(found.peers), 90, 9)
    ]
    assert [line for line in lines if "why" in line][-1].endswith("look at me")


def test_who_is_no_member_comes_and_goes_unsaid_and_a_member_does_not() -> None:
    seen = sighting(4, 8, ROUND)
    assert seen.tip is not None
    joined = dataclasses.replace(
        seen.tip, members={**seen.tip.members, STRANGER: seen.tip.members[MEMBERS[0]]}
    )
    stranger = {**seen.peers, STRANGER: peer()}
    there = dataclasses.replace(seen, peers=stranger)
    assert looks(seen, there, seen).events == ()
    member = dataclasses.replace(there, tip=joined)
    texts = [event.text for event in looks(seen, there, member).events]
    assert f"name-of-{STRANGER} is present" in texts
    gone = dataclasses.replace(seen, tip=joined)
    texts = [event.text for event in looks(member, gone).events]
    assert f"name-of-{STRANGER} is no longer present; its last state was: training" in texts
    # A removed member that is still running is not reported as gone.
    texts = [event.text for event in looks(member, there).events]
    assert not [text for text in texts if "is no longer present" in text]
    assert f"name-of-{STRANGER} is no longer a member; its last state was: training" in texts


def test_losses_of_a_member_stay_when_it_leaves() -> None:
    seen = sighting(4, 8, ROUND)
    assert seen.tip is not None
    (measured,) = seen.validations
    left = dataclasses.replace(
        seen.tip, members={p: m for p, m in seen.tip.members.items() if p != measured}
    )
    later = dataclasses.replace(seen, tip=left)
    assert looks(later).losses == ()
    found = looks(seen, later)
    assert found.losses == looks(seen).losses != ()
    assert found.bits_per_byte_of_nat == looks(seen).bits_per_byte_of_nat


def test_strangers_alone_do_not_end_a_run() -> None:
    seen = with_forged("the end of the run")
    alone = {p: record for p, record in seen.peers.items() if p not in MEMBERS}
    found = looks(dataclasses.replace(seen, peers=alone))
    assert health_of(found).word is Word.HALTED
    assert printed(found)
    json.dumps(as_json(found), allow_nan=False)


@pytest.mark.parametrize("loss", [1.7e308, -1.7e308])
def test_losses_beyond_all_measure_are_refused_as_they_come(loss: float) -> None:
    for record in (validation(9, loss), validation(9, 2.0, loss), peer(loss=loss)):
        with pytest.raises(BadRecord):
            decode_record(type(record), encode_record(record))
