"""How the run does, in one word with its reason; how long rounds take and what is left."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import Enum

from swarm.monitor.causes import Fault, causes_of
from swarm.monitor.snapshot import Agreement, Snapshot
from swarm.protocol.printable import ranges
from swarm.protocol.records import PeerState

USUAL_ROUNDS = 20
"""The usual round is the median of so many."""
STALLED_TIMES = 3.0
STALLED_S = 60.0
"""A run stalls when its round takes longer than both: so many usual ones, and this."""
MAX_CAUSES = 2
"""In the reason; the snapshot has all."""


class Word(Enum):
    """What may be wrong, the worst that applies."""

    GATHERING = "gathering"  # the founder waits for peers
    FINISHED = "finished"  # all rounds are done
    SPLIT = "split"  # a member has another manifest of the same height, or another generation
    HALTED = "halted"  # the voters that are present are no quorum
    PAUSED = "paused"  # peers wait for machines with room: too few experts have an owner
    STALLED = "stalled"  # the round takes far longer than usual
    DEGRADED = "degraded"  # a member is absent or not heard, or the last round went without one
    UNKNOWN = "unknown"  # no peer gave the newest manifest
    HEALTHY = "healthy"


@dataclass(frozen=True)
class Health:
    """A word, and the figures or names behind it in one sentence."""

    word: Word
    reason: str


@dataclass(frozen=True)
class Pace:
    """How fast it goes; None: not known yet.

    Attributes:
        round_s: the usual round: the median of the last `USUAL_ROUNDS` that the monitor saw whole;
            before there is one, the median of what peers say of their last.
        committed_per_s: tokens that entered the model a second, over the same rounds.
        utilisation: tokens that entered the model a second by the sum of the peers' tokens/s,
            each at its round; median over the same rounds.
        eta_s: until the last round, at the usual pace.
    """

    round_s: float | None
    committed_per_s: float | None
    utilisation: float | None
    eta_s: float | None


def health_of(snapshot: Snapshot) -> Health:
    """The worst that can be said of the run, with what is known of its cause."""
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
    """Whether all rounds are done, by the newest manifest or by the word of all that speak."""
    speaking = snapshot.speaking
    if snapshot.round >= snapshot.rounds_total:
        return bool(speaking) or not snapshot.peers
    return bool(speaking) and all(row.record.state is PeerState.FINISHED for row in speaking)


def _health(snapshot: Snapshot) -> Health:
    """The same by the newest manifest and who is present alone."""
    if snapshot.run_id is None:
        word = f"{len(snapshot.peers)} of {snapshot.wait_for_peers} peers are there"
        return Health(Word.GATHERING, word)
    speaking = snapshot.speaking  # nobody does while all members are absent
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
    """Which experts wait for an owner, frozen, and why; empty where none does."""
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
    """From the rounds that the monitor saw whole, else from the peers' last ones."""
    whole = [point for point in snapshot.rounds if point.seconds is not None][-USUAL_ROUNDS:]
    taken = [point.seconds for point in whole if point.seconds is not None] or [
        row.record.last_round.seconds for row in snapshot.speaking if row.record.last_round
    ]
    if not taken:
        return Pace(None, None, None, None)
    round_s = statistics.median(taken)
    measured = [p.committed_per_s for p in whole if p.committed_per_s is not None]
    committed = statistics.median(measured) if measured else None
    # Each round by the pace of its own steps: machines may be busier now than they were.
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
