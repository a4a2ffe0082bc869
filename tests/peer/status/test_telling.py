"""The log reports a round's decision in few lines, without long names and empty reasons."""

import logging
from dataclasses import replace
from typing import Any

import pytest

from swarm.monitor.health import Fault, causes_of
from swarm.peer.status.round_log import SAID_ROUNDS, OwnCauses, because, told
from swarm.protocol.records.records import NOTHING_DONE, TOO_LATE, Silence
from swarm.protocol.values.manifest import Manifest
from tests.monitor.test_causes import PEERS, TIP, WITHOUT_D, figures, line, look, peer

ME, GONE = "12D3KooW" + "a" * 44, "12D3KooW" + "b" * 38 + "cdefgh"


def test_experts_of_which_the_same_is_said_share_a_line() -> None:
    reasons = [f"expert {k}: peer {GONE} left, adopted by {ME}, load 3/3" for k in (0, 1, 2, 5)]
    assert told([f"{GONE} removed: it asked to leave", *reasons]) == [
        "…cdefgh removed: it asked to leave",
        "experts 0-2,5: peer …cdefgh left, adopted by …aaaaaa, load 3/3",
    ]


def test_one_expert_is_named_alone() -> None:
    assert told([f"expert 7: given to {ME}, load 1/1"]) == ["expert 7: given to …aaaaaa, load 1/1"]


def test_a_hundred_decisions_are_not_a_hundred_lines() -> None:
    lines = told([f"peer-{k} joined as a trainee" for k in range(100)], max_lines=4)
    assert lines[:3] == [f"peer-{k} joined as a trainee" for k in range(3)]
    assert lines[3:] == ["and 97 more such decisions"]


def test_no_reason_is_not_shown_as_an_empty_one() -> None:
    assert because("") == ""
    assert because(f"{ME} convenes") == " reason='…aaaaaa convenes'"


SILENT = Silence.SILENT
LATE = figures(counted=False, why_not=f"{TOO_LATE}: still training when the round was decided")
UNREACHED = {"link": line(QmA=SILENT, QmB=SILENT, QmC=SILENT)}
AILING: dict[Fault, tuple[Manifest, dict[str, Any]]] = {
    Fault.CUT: (TIP, {"A": {"link": line(QmD=SILENT)}, "D": UNREACHED}),
    Fault.LATE: (WITHOUT_D, {"D": {"last_round": LATE}}),
    Fault.LEFT_OUT: (
        WITHOUT_D,
        {"D": {"last_round": figures(counted=False, why_not="its offer was not taken")}},
    ),
    Fault.SLOW: (TIP, {"D": {"last_round": figures(phases={"training": 24.0})}}),
}
"""A monitor's view of D for each fault that D can know."""


def test_each_fault_that_a_peer_can_know_of_is_tried() -> None:
    elsewhere = {Fault.DEAD, Fault.SILENT, Fault.TROUBLE}  # it ended, or `patience` reported it
    assert AILING.keys() | elsewhere == set(Fault)


def test_what_others_said_before_this_peer_was_started_again_is_not_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = {"QmA": peer("QmA", link=line(QmD=Silence.GONE), manifest_digest=TIP.digest)}
    OwnCauses("demo-1").note(before, peer("QmD", manifest_digest=TIP.digest), TIP)
    assert not caplog.messages


@pytest.mark.parametrize("fault", AILING)
def test_a_peer_logs_the_sentence_that_the_monitor_shows_of_it_once(
    fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    tip, changes = AILING[fault]
    snapshot = look(100.0, tip, **changes)
    (shown,) = (cause.text for cause in causes_of(snapshot) if cause.peer == "QmD")
    records = {row.record.peer_id: row.record for row in snapshot.peers}
    own, causes = records.pop("QmD"), OwnCauses("demo-1")
    with caplog.at_level(logging.INFO):
        causes.note(records, own, tip)
        for number in range(7, 10):  # others are read occasionally
            again = replace(tip, round=number)
            last = own.last_round and replace(own.last_round, round=number)
            causes.note({}, replace(own, last_round=last), again)
    assert caplog.messages == [shown]
    assert shown.endswith(")"), "the remedy"


@pytest.mark.parametrize(
    ("late_in", "sound_in", "told_in"),
    [
        ((6, 7, 9, 9 + SAID_ROUNDS), (8, 11), [6]),
        ((6, 30, 70), (), [6]),  # a starved peer applies many rounds before it looks again
        ((6, 30), (7,), [6, 30]),
    ],
)
def test_a_fault_is_told_again_once_it_was_away_for_some_rounds(
    late_in: tuple[int, ...],
    sound_in: tuple[int, ...],
    told_in: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    causes, told_at = OwnCauses("demo-1"), []
    with caplog.at_level(logging.WARNING):
        for number in sorted((*late_in, *sound_in)):
            tip = replace(WITHOUT_D if number in late_in else TIP, round=number)
            last = replace(LATE if number in late_in else figures(), round=number)
            before = len(caplog.messages)
            causes.note({}, peer("QmD", last_round=last, manifest_digest=tip.digest), tip)
            told_at += [number] if len(caplog.messages) > before else []
    assert told_at == told_in


def test_a_peer_that_catches_up_is_late() -> None:
    why = f"{NOTHING_DONE}: it did no local steps on the manifest before"
    behind = {"last_round": figures(counted=False, why_not=why)}
    (cause,) = causes_of(look(100.0, WITHOUT_D, D=behind))
    assert cause.fault is Fault.LATE and "round.seconds in a new run" in cause.text


def test_what_others_say_is_of_members_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Anybody can sign a record."""
    causes = OwnCauses("demo-1")
    strangers = {f"QmX{k}": peer(f"QmX{k}", link=line(QmD=Silence.GONE)) for k in range(50)}
    causes.note(strangers, peer("QmD", manifest_digest=TIP.digest), TIP)
    assert not caplog.messages and causes._others == {}
    causes.note({p: peer(p) for p in PEERS}, peer("QmD"), None)
    assert causes._others == {}, "without a manifest nobody is known to be a member"
