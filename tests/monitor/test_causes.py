"""Five faults, each reported with its true cause and its peer's name within two heartbeats."""

from dataclasses import replace
from typing import Any

import pytest

from swarm.monitor.health import REMEDIES, SILENT_S, Fault, Word, causes_of, health_of
from swarm.monitor.schema import as_json
from swarm.monitor.snapshot import Sighting, Snapshot, snapshot_of
from swarm.protocol.records.records import (
    HEARTBEAT_S,
    LinkFigures,
    PeerRecord,
    PeerState,
    RoundFigures,
    Silence,
)
from swarm.protocol.values.manifest import Member
from tests.monitor.small_swarm import manifest, remembered
from tests.peer_records import peer_record

PEERS = ("QmA", "QmB", "QmC", "QmD")
TIP = replace(
    manifest(owners={0: ("QmA",), 1: ("QmB",), 2: ("QmC",), 3: ("QmD",)}),
    members={peer: Member(0, 1.0) for peer in PEERS},
    contributors=PEERS,
)
WITHOUT_D = replace(TIP, contributors=PEERS[:3])


def figures(**changes: Any) -> RoundFigures:
    phases = {"training": 10.0, "offering": 0.5, "averaging": 3.0}
    return replace(RoundFigures(6, True, 13.5, phases, 100, 100), **changes)


def line(**unreached: Silence) -> LinkFigures:
    return LinkFigures(20.0, 80.0, 40.0, unreached)


def peer(peer_id: str, **changes: Any) -> PeerRecord:
    known: dict[str, Any] = {"manifest_digest": TIP.digest, "height": 7, "round": 6}
    known |= {"name": peer_id[-1], "last_round": figures(), "link": line(), "rounds_total": 20}
    return peer_record(peer_id, **known | changes)


def look(at: float, tip: Any = TIP, *, silent_since: float | None = None, **changes: Any) -> Any:
    """A look at all four.

    `changes` has fields of a peer by its letter, or None for no record. D may be silent since a
    time.
    """
    at_tip = {"manifest_digest": tip.digest}
    peers = {
        p: peer(p, **at_tip | (changes.get(p[-1]) or {})) for p in PEERS if changes.get(p[-1], 1)
    }
    published = dict.fromkeys(peers, at - 1.0)
    if silent_since is not None and "QmD" in peers:
        published["QmD"] = silent_since
    return snapshot_of(Sighting("demo-1", "demo", peers, {}, {}, tip, published=published, at=at))


def seen(*looks: Snapshot) -> Snapshot:
    found = remembered(*looks)
    as_json(found)
    return found


def only(snapshot: Snapshot) -> tuple[Fault, str, str]:
    (cause,) = causes_of(snapshot)
    return cause.fault, cause.peer, cause.text


def test_a_sound_swarm_has_no_causes() -> None:
    sound = seen(look(100.0), look(102.0))
    assert causes_of(sound) == ()
    assert health_of(sound).word is Word.HEALTHY


def test_a_slow_peer_is_named_with_the_phase_that_took_long() -> None:
    slow = figures(phases={"training": 24.0, "offering": 0.5, "averaging": 0.2})
    snapshot = seen(look(100.0, D={"last_round": slow}))
    fault, who, text = only(snapshot)
    assert (fault, who) == (Fault.SLOW, "QmD")
    assert "D is slow: busy for 24.5 s in round 6, most of it training, 24.0 s" in text
    assert "the others' median is 10.5 s" in text
    health = health_of(snapshot)  # slow is no fault, but is reported
    assert health.word is Word.HEALTHY and "D is slow" in health.reason


def test_who_waits_longest_is_not_slow() -> None:
    waits = figures(phases={"training": 2.0, "averaging": 60.0})
    assert causes_of(seen(look(100.0, A={"last_round": waits}))) == ()


def test_a_cut_line_is_told_by_those_on_both_sides_of_it() -> None:
    silent = Silence.SILENT
    cut = {"link": line(QmA=silent, QmB=silent, QmC=silent)}
    others = {"link": line(QmD=silent)}
    fault, who, text = only(seen(look(100.0, A=others, B=others, C=others, D=cut)))
    assert (fault, who) == (Fault.CUT, "QmD")
    assert "D: its link to A, B, C is cut" in text and "it owns experts 3" in text


def test_a_line_between_two_peers_alone_names_both() -> None:
    one = {"link": line(QmD=Silence.SILENT)}
    (cause,) = causes_of(seen(look(100.0, C=one)))
    assert cause.fault is Fault.CUT and {"C", "D"} <= set(cause.text.replace(":", "").split())


def test_a_dead_owner_is_told_by_others_at_once_and_with_its_experts() -> None:
    gone = {"link": line(QmD=Silence.GONE)}
    snapshot = seen(look(100.0, A=gone, B=gone))
    fault, who, text = only(snapshot)
    assert (fault, who) == (Fault.DEAD, "QmD")
    assert text == (
        "D: nothing listens on its machine any more, as A, B found; it owns experts 3 "
        "(the command that started it resumes it)"
    )
    assert health_of(snapshot).word is Word.DEGRADED
    without = seen(look(130.0, A=gone, D=None))
    assert only(without)[:2] == (Fault.DEAD, "QmD")
    health = health_of(without)
    assert health.word is Word.DEGRADED and "nothing listens" in health.reason


@pytest.mark.parametrize("after_s", [0.0, SILENT_S - 1, SILENT_S + 1])
def test_a_peer_of_which_nobody_hears_is_named_after_two_heartbeats(after_s: float) -> None:
    """By the monitor's own clock, because the peer's may be an hour off."""
    first = look(100.0, silent_since=5000.0)
    snapshot = seen(first, look(100.0 + after_s, silent_since=5000.0))
    assert SILENT_S == 2 * HEARTBEAT_S
    if after_s <= SILENT_S:
        assert causes_of(snapshot) == ()
    else:
        assert only(snapshot)[:2] == (Fault.SILENT, "QmD")
        assert f"has said nothing for {after_s:.0f} s" in only(snapshot)[2]


def test_a_peer_that_leaves_or_is_done_is_not_missed() -> None:
    gone = {"link": line(QmD=Silence.GONE)}
    for state in (PeerState.LEAVING, PeerState.FINISHED):
        states = {"A": gone, "D": {"state": state}}
        looks = [look(at, silent_since=50.0, **states) for at in (100.0, 130.0)]
        assert causes_of(seen(*looks)) == ()


def test_a_full_disk_is_told_in_the_words_of_the_peer_that_waits_for_it() -> None:
    trouble = "offered value: No space left on device (free some space)"
    snapshot = seen(look(100.0, D={"trouble": trouble}))
    assert only(snapshot) == (Fault.TROUBLE, "QmD", f"D waits: {trouble}")
    assert health_of(snapshot).word is Word.DEGRADED


def test_a_peer_too_late_is_told_with_its_own_figures_and_the_conveners_reason() -> None:
    why = "too late: still training when the round was decided, 3 local steps took 9.5 s"
    said = figures(left_out={"QmD": "needs 8.0 s more, which costs 3 peers too much"})
    late = figures(counted=False, why_not=why)
    snapshot = seen(look(100.0, WITHOUT_D, A={"last_round": said}, D={"last_round": late}))
    fault, who, text = only(snapshot)
    assert (fault, who) == (Fault.LATE, "QmD")
    assert f"round 6 went without D: {why}; the convener says: needs 8.0 s more" in text
    assert health_of(snapshot).word is Word.DEGRADED


def test_an_offer_that_was_refused_is_not_called_late() -> None:
    own = figures(counted=False, why_not="its offer was not taken, 2.1 s before the decision")
    said = figures(left_out={"QmD": "…QmB refuses its values: non_finite"})
    snapshot = seen(look(100.0, WITHOUT_D, A={"last_round": said}, D={"last_round": own}))
    assert only(snapshot)[0] is Fault.LEFT_OUT
    assert "refuses its values: non_finite" in only(snapshot)[2]


def test_each_fault_has_its_remedy() -> None:
    assert REMEDIES.keys() == set(Fault)
    assert {fault for fault, remedy in REMEDIES.items() if not remedy} == {Fault.TROUBLE}
    own = figures(counted=False, why_not="its offer was not taken, 2.1 s before the decision")
    slow = figures(left_out={"QmD": "its uplink of 1 Mbit/s would be busy for 72.0 s, not 4.8"})
    false = figures(left_out={"QmD": "…QmB refuses its values: non_finite"})
    for convener, remedy in ((slow, "swarm-plan --link)"), (false, "or compute.precision)")):
        looked = look(100.0, WITHOUT_D, A={"last_round": convener}, D={"last_round": own})
        assert only(seen(looked))[2].endswith(remedy)


def test_of_several_faults_of_a_peer_the_worst_is_told() -> None:
    slow = figures(phases={"training": 99.0})
    gone = {"link": line(QmD=Silence.GONE)}
    snapshot = seen(look(100.0, A=gone, D={"last_round": slow, "trouble": "disk full"}))
    assert only(snapshot)[0] is Fault.DEAD


def test_experts_that_fit_no_machine_are_told_with_the_room_that_there_is() -> None:
    small = {letter: {"room": 1} for letter in "ABCD"}
    tip = replace(TIP, owners={**TIP.owners, 4: (), 5: ()})
    waiting = seen(look(100.0, tip, **small))
    text = "experts 4-5 wait for an owner, frozen: the machines of 4 peers have room for 4 of 6"
    assert (health_of(waiting).word, health_of(waiting).reason) == (Word.DEGRADED, text)
    paused = {letter: {"room": 1, "state": PeerState.PAUSED} for letter in "ABCD"}
    health = health_of(seen(look(100.0, tip, **paused)))
    assert (health.word, health.reason) == (Word.PAUSED, text)
