"""What is wrong with which peer, why, and what to do, from what peers say of themselves and others.

The monitor shows these sentences, and the peer concerned logs them. Only peers that speak for the
run are heard here, and only they are missed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from swarm.monitor.snapshot import PeerRow, Snapshot
from swarm.protocol.figures import NOTHING_DONE, TOO_LATE, Silence
from swarm.protocol.manifest import PeerId
from swarm.protocol.printable import ranges
from swarm.protocol.records import HEARTBEAT_S, PeerState

SILENT_S = 2 * HEARTBEAT_S
"""A peer whose record did not change for longer has missed two heartbeats."""
SLOW_TIMES = 1.5
SLOW_S = 1.0
"""A peer is slow when it was busy longer than the others' median by both of these."""
WAITING = "averaging"
"""The phase that is mostly the wait for others."""
_GOING = (PeerState.LEAVING, PeerState.FINISHED)


_COMES_BACK = "the command that started it lets it go on"
_REFUSED = "start it again; if that repeats, suspect its memory, its GPU or compute.precision"
_TOO_MUCH = "fewer experts for it (--capacity), a faster machine, or round.seconds in a new run"


class Fault(Enum):
    """What may be wrong with a peer, the worst first."""

    DEAD = "dead"  # its machine says that nothing listens there
    CUT = "cut"  # others get no answer from it, or it from them
    SILENT = "silent"  # nobody has heard of it, and nobody says why
    TROUBLE = "trouble"  # its machine waits for a person, as with a full disk
    LATE = "late"  # the round was decided while it still trained
    LEFT_OUT = "left out"  # it had offered, and its work was not taken
    SLOW = "slow"  # it was busy far longer than the others


REMEDIES = {
    Fault.DEAD: _COMES_BACK,
    Fault.CUT: "swarm-doctor on that machine says what is in the way",
    Fault.SILENT: f"look whether it runs: {_COMES_BACK}",
    Fault.TROUBLE: "",  # in its own words
    Fault.LATE: _TOO_MUCH,
    Fault.LEFT_OUT: "a faster line, or fewer bytes in a new run: swarm-plan --link",
    Fault.SLOW: f"end other programs there; {_TOO_MUCH}",
}


@dataclass(frozen=True)
class Cause:
    """One sentence about one peer, which ends with the remedy in brackets."""

    fault: Fault
    peer: PeerId
    text: str


def causes_of(snapshot: Snapshot) -> tuple[Cause, ...]:
    """All that can be said, the worst first; each peer has its worst alone."""
    found = [*_unheard(snapshot), *_troubled(snapshot), *_uncounted(snapshot), *_slow(snapshot)]
    worst: dict[PeerId, Cause] = {}
    order = list(Fault)
    for cause in sorted(found, key=lambda cause: (order.index(cause.fault), cause.peer)):
        worst.setdefault(cause.peer, cause)
    return tuple(map(_with_remedy, worst.values()))


def _with_remedy(cause: Cause) -> Cause:
    remedy = REMEDIES[cause.fault]
    if cause.fault is Fault.LEFT_OUT and "refuse" in cause.text:
        remedy = _REFUSED
    return replace(cause, text=f"{cause.text} ({remedy})") if remedy else cause


# ---------------------------------------------------------------- peers that are not heard


def _unheard(snapshot: Snapshot) -> list[Cause]:
    """Peers that others do not reach, and peers that have said nothing for too long."""
    rows = {row.record.peer_id: row for row in snapshot.speaking}
    said = _accusations(snapshot)
    found = []
    while said:
        partners: dict[PeerId, set[PeerId]] = {}
        for by, of in said:
            partners.setdefault(by, set()).add(of)
            partners.setdefault(of, set()).add(by)
        # Of two peers that miss each other, the one that more others miss, or that is not there.
        peer = max(
            partners, key=lambda p: (len(partners[p]), p not in rows, _unheard_s(rows, p), p)
        )
        gone = sorted(by for by, of in said if of == peer and said[by, of] is Silence.GONE)
        others = sorted(partners[peer])
        if gone:
            text = f"nothing listens on its machine any more, as {snapshot.names(gone)} found"
        else:
            text = f"its line to {snapshot.names(others)} is cut: no message gets through"
        fault = Fault.DEAD if gone else Fault.CUT
        found.append(Cause(fault, peer, f"{snapshot.called(peer)}: {text}{_owned(snapshot, peer)}"))
        said = {pair: silence for pair, silence in said.items() if peer not in pair}
    named = {cause.peer for cause in found}
    for peer, row in rows.items():
        silent_s = _unheard_s(rows, peer, snapshot.at)
        if peer not in named and silent_s > SILENT_S and row.record.state not in _GOING:
            text = f"has said nothing for {silent_s:.0f} s: its process or its line is gone"
            found.append(_silent(snapshot, peer, text))
    for peer in snapshot.absent:
        if peer not in named:
            found.append(_silent(snapshot, peer, "has no record: its process or its line is gone"))
    return found


def _accusations(snapshot: Snapshot) -> dict[tuple[PeerId, PeerId], Silence]:
    """Who does not reach whom: of members that are needed, by peers that are heard."""
    left = {row.record.peer_id for row in snapshot.speaking if row.record.state in _GOING}
    known = {row.record.peer_id for row in snapshot.speaking} | set(snapshot.absent)
    return {
        (row.record.peer_id, peer): silence
        for row in snapshot.speaking
        if row.record.link and row.record.peer_id not in left
        for peer, silence in row.record.link.unreached.items()
        if peer in known - left and peer != row.record.peer_id
    }


def _silent(snapshot: Snapshot, peer: PeerId, text: str) -> Cause:
    told = f"{snapshot.called(peer)} {text}{_owned(snapshot, peer)}"
    return Cause(Fault.SILENT, peer, told)


def _unheard_s(rows: Mapping[PeerId, PeerRow], peer: PeerId, now: float = 0.0) -> float:
    heard = rows[peer].heard if peer in rows else None
    return 0.0 if heard is None else now - heard


def _owned(snapshot: Snapshot, peer: PeerId) -> str:
    owned = [row.expert for row in snapshot.experts if peer in row.owners]
    return f"; it owns experts {ranges(owned)}" if owned else ""


# ---------------------------------------------------------------- peers that are heard


def _troubled(snapshot: Snapshot) -> list[Cause]:
    return [
        Cause(Fault.TROUBLE, row.record.peer_id, f"{row.called} waits: {row.record.trouble}")
        for row in snapshot.speaking
        if row.record.trouble
    ]


def _uncounted(snapshot: Snapshot) -> list[Cause]:
    """Members without whom the newest round went, in their own words and in the convener's."""
    convener: dict[PeerId, str] = {}
    for row in snapshot.speaking:
        if row.record.last_round and row.record.last_round.round == snapshot.round:
            convener |= row.record.last_round.left_out
    found = []
    for row in snapshot.speaking:
        peer, last = row.record.peer_id, row.record.last_round
        own = last.why_not if last and last.round == snapshot.round else ""
        if peer not in snapshot.left_out or not (own or peer in convener):
            continue
        words = [own] if own else []
        words += [f"the convener says: {convener[peer]}"] if peer in convener else []
        is_late = not own or TOO_LATE in own or NOTHING_DONE in own
        fault = Fault.LATE if is_late else Fault.LEFT_OUT
        text = f"round {snapshot.round} went without {row.called}: {'; '.join(words)}"
        found.append(Cause(fault, peer, text))
    return found


def _slow(snapshot: Snapshot) -> list[Cause]:
    """Peers that were busy far longer in their last round than the others in theirs."""
    busy = {row.record.peer_id: _busy_s(row) for row in snapshot.speaking if row.record.last_round}
    found = []
    for row in snapshot.speaking:
        peer, last = row.record.peer_id, row.record.last_round
        others = [seconds for other, seconds in busy.items() if other != peer]
        if not last or not others:
            continue
        usual_s, most = statistics.median(others), _longest(row)
        if busy[peer] > max(SLOW_TIMES * usual_s, usual_s + SLOW_S):
            text = (
                f"{row.called} is slow: busy for {busy[peer]:.1f} s in round {last.round}, "
                f"most of it {most}; the others' median is {usual_s:.1f} s"
            )
            found.append(Cause(Fault.SLOW, peer, text))
    return found


def _busy_s(row: PeerRow) -> float:
    last = row.record.last_round
    return sum(s for phase, s in last.phases.items() if phase != WAITING) if last else 0.0


def _longest(row: PeerRow) -> str:
    phases = dict(row.record.last_round.phases) if row.record.last_round else {}
    phases.pop(WAITING, None)
    name = max(phases, key=lambda phase: (phases[phase], phase), default="")
    return f"{name.replace('_', ' ')}, {phases[name]:.1f} s" if name else "unknown"
