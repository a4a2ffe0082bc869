"""The health of a run in one word, and the faults of its peers with causes and remedies."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from swarm.monitor.snapshot import Agreement, PeerRow, Snapshot
from swarm.protocol.records.printable import ranges
from swarm.protocol.records.records import HEARTBEAT_S, NOTHING_DONE, TOO_LATE, PeerState, Silence
from swarm.protocol.values.manifest import PeerId

SILENT_S = 2 * HEARTBEAT_S
"""A peer whose record did not change for this long has missed two heartbeats."""
SLOW_TIMES = 1.5
SLOW_S = 1.0
"""A peer is slow if its busy time exceeds both `SLOW_TIMES` times the others' median and this
median plus `SLOW_S`."""
WAITING = "averaging"
"""The phase that is mostly the wait for others."""
_GOING = (PeerState.LEAVING, PeerState.FINISHED)


_COMES_BACK = "the command that started it resumes it"
_REFUSED = "start it again; if that repeats, suspect its memory, its GPU or compute.precision"
_TOO_MUCH = "fewer experts for it (--capacity), a faster machine, or round.seconds in a new run"


class Fault(Enum):
    """Possible faults of a peer, the worst first."""

    DEAD = "dead"  # its machine says that the port is closed
    CUT = "cut"  # messages between it and others get no answer
    SILENT = "silent"  # no peer has heard from it, and no peer knows why
    TROUBLE = "trouble"  # its machine waits for a person, for example with a full disk
    LATE = "late"  # the round was decided while it still trained
    LEFT_OUT = "left out"  # it had offered, and its work was not taken
    SLOW = "slow"  # it was busy far longer than the others


REMEDIES = {
    Fault.DEAD: _COMES_BACK,
    Fault.CUT: "swarm-doctor on that machine says what is in the way",
    Fault.SILENT: f"look whether it runs: {_COMES_BACK}",
    Fault.TROUBLE: "",  # the peer's own words name the remedy
    Fault.LATE: _TOO_MUCH,
    Fault.LEFT_OUT: "a faster link, or fewer bytes in a new run: swarm-plan --link",
    Fault.SLOW: f"end other programs there; {_TOO_MUCH}",
}


@dataclass(frozen=True)
class Cause:
    """One sentence about one peer, which ends with the remedy in brackets."""

    fault: Fault
    peer: PeerId
    text: str


def causes_of(snapshot: Snapshot) -> tuple[Cause, ...]:
    """All known causes, the worst first, but only the worst cause of each peer."""
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


# ---------------------------------------------------------------- peers without news


def _unheard(snapshot: Snapshot) -> list[Cause]:
    """Peers that others do not reach, and peers that were silent for too long."""
    rows = {row.record.peer_id: row for row in snapshot.speaking}
    said = _accusations(snapshot)
    found = []
    while said:
        partners: dict[PeerId, set[PeerId]] = {}
        for by, of in said:
            partners.setdefault(by, set()).add(of)
            partners.setdefault(of, set()).add(by)
        # Of two peers that miss each other, the peer that more others miss is named, or the absent
        # one.
        peer = max(
            partners, key=lambda p: (len(partners[p]), p not in rows, _unheard_s(rows, p), p)
        )
        gone = sorted(by for by, of in said if of == peer and said[by, of] is Silence.GONE)
        others = sorted(partners[peer])
        if gone:
            text = f"nothing listens on its machine any more, as {snapshot.names(gone)} found"
        else:
            text = f"its link to {snapshot.names(others)} is cut: no message gets through"
        fault = Fault.DEAD if gone else Fault.CUT
        found.append(Cause(fault, peer, f"{snapshot.called(peer)}: {text}{_owned(snapshot, peer)}"))
        said = {pair: silence for pair, silence in said.items() if peer not in pair}
    named = {cause.peer for cause in found}
    for peer, row in rows.items():
        silent_s = _unheard_s(rows, peer, snapshot.at)
        if peer not in named and silent_s > SILENT_S and row.record.state not in _GOING:
            text = (
                f"has said nothing for {silent_s:.0f} s: its process has ended or its link is cut"
            )
            found.append(_silent(snapshot, peer, text))
    for peer in snapshot.absent:
        if peer not in named:
            found.append(
                _silent(snapshot, peer, "has no record: its process has ended or its link is cut")
            )
    return found


def _accusations(snapshot: Snapshot) -> dict[tuple[PeerId, PeerId], Silence]:
    """Unreached members that are needed, by the peers that do not reach them."""
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


# ---------------------------------------------------------------- peers with news


def _troubled(snapshot: Snapshot) -> list[Cause]:
    return [
        Cause(Fault.TROUBLE, row.record.peer_id, f"{row.called} waits: {row.record.trouble}")
        for row in snapshot.speaking
        if row.record.trouble
    ]


def _uncounted(snapshot: Snapshot) -> list[Cause]:
    """Members that the newest round left out, with their own reason and the convener's."""
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
    """Peers that were busy far longer in their last round than the other peers."""
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


USUAL_ROUNDS = 20
"""The usual round is the median of this many rounds."""
STALLED_TIMES = 3.0
STALLED_S = 60.0
"""A run stalls if its round exceeds both `STALLED_TIMES` usual rounds and `STALLED_S` seconds."""
MAX_CAUSES = 2
"""Limit of causes in the reason. The snapshot has all causes."""


class Word(Enum):
    """States of a run. The worst state that applies counts."""

    GATHERING = "gathering"  # the founder waits for peers
    FINISHED = "finished"  # all rounds are done
    SPLIT = "split"  # a member has another manifest of the same height, or another generation
    HALTED = "halted"  # the present voters are too few for a quorum
    PAUSED = "paused"  # peers wait for machines with room: too few experts have an owner
    STALLED = "stalled"  # the round takes far longer than usual
    DEGRADED = "degraded"  # a member is absent or silent, or was left out of the last round
    UNKNOWN = "unknown"  # no peer gave the newest manifest
    HEALTHY = "healthy"


@dataclass(frozen=True)
class Health:
    """A state, and the figures or names that explain it in one sentence."""

    word: Word
    reason: str


@dataclass(frozen=True)
class Pace:
    """The speed of a run. None for figures that are not yet known.

    Attributes:
        round_s: the usual round: the median of the last `USUAL_ROUNDS` that the monitor saw whole,
            or before the first of these, of the last rounds that peers report.
        committed_per_s: tokens per second that entered the model, over the same rounds.
        utilisation: tokens per second that entered the model, divided by the sum of the peers'
            tokens/s in that round; median over the same rounds.
        eta_s: seconds until the last round, at the usual pace.
    """

    round_s: float | None
    committed_per_s: float | None
    utilisation: float | None
    eta_s: float | None


def health_of(snapshot: Snapshot) -> Health:
    """The health of the run: the worst state that applies, with its known causes."""
    found = _of_causes(snapshot)
    if snapshot.ends_with is None or found.word not in (Word.HEALTHY, Word.DEGRADED):
        return found
    last = snapshot.called(snapshot.ends_with)
    return Health(found.word, f"{found.reason}; the run ends with {last}: no other is vouched for")


def _of_causes(snapshot: Snapshot) -> Health:
    found = _health(snapshot)
    causes = causes_of(snapshot) if snapshot.run_id and found.word is not Word.FINISHED else ()
    told = [cause.text for cause in causes[:MAX_CAUSES]]
    harmful = [cause for cause in causes if cause.fault is not Fault.SLOW]
    if found.word is Word.DEGRADED or (found.word is Word.HEALTHY and harmful):
        return Health(Word.DEGRADED, "; ".join(told or [found.reason]))
    if found.word is Word.UNKNOWN:
        return found
    return Health(found.word, "; ".join([found.reason, *told]))


def is_finished(snapshot: Snapshot) -> bool:
    """Whether all rounds are done, by the newest manifest or by all peers that speak."""
    speaking = snapshot.speaking
    if snapshot.round >= snapshot.rounds_total:
        return bool(speaking) or not snapshot.peers
    return bool(speaking) and all(row.record.state is PeerState.FINISHED for row in speaking)


def _health(snapshot: Snapshot) -> Health:
    """The health by the newest manifest and the presence of peers only."""
    if snapshot.run_id is None:
        word = f"{len(snapshot.peers)} of {snapshot.wait_for_peers} peers are present"
        return Health(Word.GATHERING, word)
    speaking = snapshot.speaking  # empty while all members are absent
    if is_finished(snapshot):
        done = f"{snapshot.round} of {snapshot.rounds_total} rounds are done"
        return Health(Word.FINISHED, done if speaking else f"{done}; no peer serves the model now")
    split = [
        row.record.peer_id
        for row in snapshot.peers
        if row.agreement is Agreement.DIFFERENT and (row.votes is not None or not snapshot.members)
    ]
    if split:
        return Health(Word.SPLIT, f"{snapshot.names(split)}: another tip than the others")
    if snapshot.quorum is False:
        gone = snapshot.names(snapshot.absent)
        return Health(Word.HALTED, f"the voters that are present are no quorum; absent: {gone}")
    waits = waiting_text(snapshot)
    if waits and any(row.record.state is PeerState.PAUSED for row in speaking):
        return Health(Word.PAUSED, waits)
    usual_s, last = pace_of(snapshot).round_s, snapshot.rounds[-1] if snapshot.rounds else None
    since_s = snapshot.at - last.at if last else 0.0
    if usual_s is not None and since_s > max(STALLED_TIMES * usual_s, STALLED_S):
        told = f"no round for {since_s:.0f} s; a usual one takes {usual_s:.0f} s"
        return Health(Word.STALLED, told)
    if snapshot.members is None:
        return Health(Word.UNKNOWN, "no peer has shown the newest manifest yet")
    if snapshot.absent:
        return Health(Word.DEGRADED, f"absent: {snapshot.names(snapshot.absent)}")
    if snapshot.left_out:
        names = snapshot.names(snapshot.left_out)
        return Health(Word.DEGRADED, f"round {snapshot.round} went without {names}")
    if waits:
        return Health(Word.DEGRADED, waits)
    told = f"round {snapshot.round} has the work of all {snapshot.members} members"
    return Health(Word.HEALTHY, told if snapshot.round else "the first round has begun")


def waiting_text(snapshot: Snapshot) -> str:
    """A sentence on experts that wait for an owner, frozen. Empty if every expert has an owner."""
    waiting = [row.expert for row in snapshot.experts if not row.owners]
    if not waiting:
        return ""
    experts = len(snapshot.experts)
    room = sum(min(row.record.room, experts) for row in snapshot.speaking)
    return (
        f"experts {ranges(waiting)} wait for an owner, frozen: the machines of "
        f"{len(snapshot.speaking)} peers have room for {room} of {experts}"
    )


def pace_of(snapshot: Snapshot) -> Pace:
    """The speed, from rounds that the monitor saw whole, or else from the peers' last rounds."""
    whole = [point for point in snapshot.rounds if point.seconds is not None][-USUAL_ROUNDS:]
    taken = [point.seconds for point in whole if point.seconds is not None] or [
        row.record.last_round.seconds for row in snapshot.speaking if row.record.last_round
    ]
    if not taken:
        return Pace(None, None, None, None)
    round_s = statistics.median(taken)
    measured = [p.committed_per_s for p in whole if p.committed_per_s is not None]
    committed = statistics.median(measured) if measured else None
    # Uses the pace in each round, because machines may be busier now than they were then.
    shares = [
        p.committed_per_s / max(p.tokens_per_s, 1e-9)
        for p in whole
        if p.committed_per_s is not None and p.tokens_per_s
    ]
    left = max(snapshot.rounds_total - snapshot.round, 0)
    return Pace(
        round_s,
        committed,
        statistics.median(shares) if shares else None,
        left * round_s,
    )
