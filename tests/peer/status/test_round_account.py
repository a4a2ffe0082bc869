"""Why a round excluded a peer: its own actions, and the convener's account."""

import errno
from dataclasses import replace

import pytest

from swarm.errors import StateError
from swarm.network.blobs import disk_retry
from swarm.peer.status.observing import RoundReport
from swarm.peer.status.round_log import Moved, RoundAccount, left_out_by, why_not_counted
from swarm.protocol.messages.events import Reason, Topic
from swarm.protocol.records.records import MAX_BRIEF, TOO_LATE
from swarm.protocol.rounds.policies.roster_deadline import Absent, OpenRoster, why_close
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import Kind, Manifest
from swarm.train.engine.local_steps import LocalStats
from tests.protocol.round_pump import found, make_rules

FIRST = found(make_rules(), ["A", "B", "C"])
TIP: Manifest = replace(FIRST, height=1, round=1, kind=Kind.QUORUM, contributors=("A", "B"))
STATS = LocalStats(4, 64, 9.5, 0, 2.0, 2.0, completed=False)
NOTHING = Moved(0, 0, 0, 0, 0, 0)


def report(stats: LocalStats | None = STATS, *, counted: bool = False) -> RoundReport:
    return RoundReport(TIP, stats, counted, 2.5, "applied")


def test_a_peer_says_what_it_did_while_the_round_went_on_without_it() -> None:
    late = why_not_counted(report(), "C")
    assert (
        late == f"{TOO_LATE}: still training when the round was decided, 4 local steps took 9.5 s"
    )
    offered = why_not_counted(report(replace(STATS, completed=True)), "C")
    assert offered.startswith("its offer was not taken, 2.5 s before the decision")
    assert "no local steps" in why_not_counted(report(None), "C")
    assert "no member" in why_not_counted(report(), "Z")
    assert why_not_counted(report(counted=True), "C") == ""
    assert why_not_counted(replace(report(), manifest=FIRST), "C") == ""


def test_the_convener_tells_why_it_closed_the_roster_without_somebody() -> None:
    """The rule itself makes the words, so they cannot differ."""
    absent = [
        Absent("C", silent_s=30.0, remaining_s=None, worked_s=30.0),
        Absent("B", silent_s=0.0, remaining_s=500.0, worked_s=1.0),
    ]
    why = why_close(OpenRoster(60.0, 60.0, 3, 5, True, 5.0, absent), Timers())
    assert why
    told = left_out_by([Reason(Topic.ROUND, why)], replace(TIP, contributors=("A",)))
    assert told["C"].startswith("silent for 30.0 s (limit ")
    assert told["B"].startswith("needs 500.0 s more, which costs 3 peers more than its 1.0 s")


@pytest.mark.parametrize(
    ("text", "refused", "words"),
    [
        (
            "peer C left out after 3.0 s (limit 0.0): B refuses its values: non_finite",
            "",
            "B refuses its values",
        ),
        (
            "peer C left out: its uplink of 1 Mbit/s would be busy for 72.0 s, not 4.8, and so on",
            "",
            "left out: its uplink of 1 Mbit/s would be busy for 72.0 s, not 4.8",
        ),
        (
            "READY from C refused: its offer is of another tip",
            "READY",
            "its offer was refused: its offer is",
        ),
    ],
)
def test_the_convener_tells_of_lines_values_and_offers_that_it_did_not_take(
    text: str, refused: str, words: str
) -> None:
    topic = Topic.REFUSED if refused else Topic.ROUND
    assert words in left_out_by([Reason(topic, text, refused)], TIP)["C"]
    assert left_out_by([Reason(topic, text.replace(" C ", " B "), refused)], TIP) == {}


def test_an_account_has_the_words_of_its_own_round_alone() -> None:
    account = RoundAccount("A")
    text = "peer C left out after 3.0 s (limit 2.0): its machine refuses messages"
    said = [Reason(Topic.ROUND, text)]
    account.reasons_of = lambda: tuple(said)
    first = account.close(report(counted=True), 5.0, {"training": 4.00049}, NOTHING)
    assert (first.phases, list(first.left_out)) == ({"training": 4.0}, ["C"])
    assert account.close(report(counted=True), 5.0, {}, NOTHING).left_out == {}


def test_what_the_machine_waits_for_is_told_and_remembered_for_the_round() -> None:
    account, tries = RoundAccount("C"), []

    def write() -> None:
        if len(tries) < 2:
            raise StateError("the pack at /home/me/7.pack") from OSError(errno.ENOSPC, "full")

    disk_retry.patiently(write, "offered value", lambda _: tries.append(account.trouble()))
    assert tries == ["offered value: No space left on device (free some space)"] * 2
    assert account.trouble() == ""
    why = account.close(report(), 9.0, {}, NOTHING).why_not
    assert why.startswith("offered value: No space left") and len(why) <= MAX_BRIEF
    assert account.close(report(), 9.0, {}, NOTHING).why_not.startswith(TOO_LATE)
