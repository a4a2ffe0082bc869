"""Computes the cost of faults from the histories that a swarm's peers write. Pure functions."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from swarm.emulation.local_peer import Event
from swarm.emulation.local_swarm import applied

Histories = Sequence[Sequence[Event]]
"""Events of each peer, by its number. None for a peer that was never in the run."""
AWAY = ("kill", "pause", "cut", "partition")
"""Kinds of faults after which a peer has to come back."""


@dataclass(frozen=True)
class Happened:
    """One fault that was carried out.

    Attributes:
        kind: see `fault_plan`.
        peers: numbers of the peers that it hit.
        at_s: time of the fault, seconds since 1970.
        until_s: time when the fault was undone, for example by a restart of the peer. None if it
            never was.
        role, phase: where a trap caught the peer. None without a trap.
    """

    kind: str
    peers: tuple[int, ...]
    at_s: float
    until_s: float | None = None
    role: str | None = None
    phase: str | None = None


@dataclass(frozen=True)
class Round:
    """One training round of the chain.

    Attributes:
        number: number of the round.
        ended_s: seconds since 1970 at which the first peer applied it.
        seconds: time since the end of the previous round, including a merge between the two.
        tokens: tokens that the round counted.
        contributors: ids of the peers whose work is in the round.
    """

    number: int
    ended_s: float
    seconds: float
    tokens: int
    contributors: frozenset[str]


def rounds_of(histories: Histories) -> list[Round]:
    """The training rounds that peers applied, without the first round, whose start is unknown."""
    first: dict[int, Event] = {}
    for events in histories:
        for event in applied(events, "quorum"):
            known = first.get(event["round"])
            if known is None or event["time"] < known["time"]:
                first[event["round"]] = event
    ordered = [first[number] for number in sorted(first)]
    return [
        Round(
            event["round"],
            event["time"],
            event["time"] - before["time"],
            event["tokens"] - before["tokens"],
            frozenset(event["contributors"]),
        )
        for before, event in itertools.pairwise(ordered)
    ]


def ids_of(histories: Histories) -> dict[int, str]:
    """Id of each peer that ever started, by its number."""
    found = {}
    for index, events in enumerate(histories):
        if started := next((e for e in events if e["event"] == "started"), None):
            found[index] = str(started["peer_id"])
    return found


def rounds_hit(fault: Happened, histories: Histories) -> list[Round]:
    """Rounds from that of a fault to the first round in which all hit peers take part again.

    If no peer comes back from the fault, or faults of its kind stop no peer, only the round of the
    fault.
    """
    after = [found for found in rounds_of(histories) if found.ended_s > fault.at_s]
    back_s = fault.until_s if fault.kind in AWAY else None
    if back_s is None:
        return after[:1]
    ids = ids_of(histories)
    wanted = {ids[peer] for peer in fault.peers if peer in ids}
    for position, found in enumerate(after):
        if found.ended_s > back_s and wanted <= found.contributors:
            return after[: position + 1]
    return after


def quiet_rounds(faults: Sequence[Happened], histories: Histories) -> list[Round]:
    """Rounds that no fault touched."""
    hit = {found.number for fault in faults for found in rounds_hit(fault, histories)}
    return [found for found in rounds_of(histories) if found.number not in hit]


def fault_reports(
    faults: Sequence[Happened], histories: Histories, started_s: float
) -> list[dict[str, Any]]:
    """Each fault and its cost, for a verdict.

    `seconds_lost` is how much longer the rounds of `rounds_hit` were than the median of quiet
    rounds. Where faults overlap, each fault is charged with the whole loss.

    Times are counted from `started_s`, in seconds since 1970.
    """
    quiet = quiet_rounds(faults, histories) or rounds_of(histories)
    usual_s = statistics.median(found.seconds for found in quiet) if quiet else 0.0
    rows = []
    for fault in faults:
        hit = rounds_hit(fault, histories)
        lost_s = sum(found.seconds - usual_s for found in hit)
        is_back = bool(hit) and fault.until_s is not None and hit[-1].ended_s > fault.until_s
        rows.append(
            {
                "kind": fault.kind,
                "peers": list(fault.peers),
                "role": fault.role,
                "phase": fault.phase,
                "round": hit[0].number if hit else None,
                "at_s": round(fault.at_s - started_s, 1),
                "for_s": None if fault.until_s is None else round(fault.until_s - fault.at_s, 1),
                "rounds_hit": len(hit),
                "back_after_s": round(hit[-1].ended_s - fault.at_s, 1) if is_back else None,
                "seconds_lost": round(max(lost_s, 0.0), 1),
            }
        )
    return rows


def rounds_without_owner(fault: Happened, histories: Histories) -> int:
    """Rounds after a fault in which no peer that was there owned some of its victims' experts.

    A victim is there again once it applies a manifest before the next round ends. All other peers
    count as there, because a fault that hits an adopter is counted by itself.
    """
    lost: set[int] = set()
    for peer in fault.peers:
        before = [e for e in applied(histories[peer]) if e["time"] <= fault.at_s]
        lost |= set(before[-1]["owned"]) if before else set()
    victims = {events[0]["peer_id"]: events for peer in fault.peers if (events := histories[peer])}
    rounds = [found for found in rounds_of(histories) if found.ended_s > fault.at_s]
    for position, found in enumerate(rounds):
        next_s = rounds[position + 1].ended_s if position + 1 < len(rounds) else inf
        owners = next(e["owners"] for events in histories for e in _of_round(events, found))
        away = {
            peer_id
            for peer_id, events in victims.items()
            if not any(event["time"] <= next_s for event in _of_round(events, found))
        }
        if all(set(owners[str(expert)]) - away for expert in lost):
            return position
    return len(rounds)


def _of_round(events: Sequence[Event], found: Round) -> list[Event]:
    """A round's manifest and its merge, if any: a peer that comes back may find both at once."""
    return [event for event in applied(events) if event["round"] == found.number]


def living_s(
    peer: int, faults: Sequence[Happened], events: Sequence[Event], span: tuple[float, float]
) -> float:
    """Seconds of a span in which a peer could have trained.

    A peer lives from each `started` in its history to the next kill, or to its end. Pauses are left
    out, and so is the time in which a process loads its libraries. A peer that is cut off, late, or
    without the newest model counts as living.
    """
    from_s, to_s = span
    mine = [fault for fault in faults if peer in fault.peers]
    ends = [fault.at_s for fault in mine if fault.kind in ("kill", "restart")]
    ends += [event["time"] for event in events if event["event"] == "ended"]
    pauses = [(f.at_s, f.until_s or to_s) for f in mine if f.kind == "pause"]
    total_s = 0.0
    for start in (event["time"] for event in events if event["event"] == "started"):
        end_s = min([end for end in ends if end > start] + [to_s])
        total_s += _overlap((start, end_s), span)
        total_s -= sum(_overlap(pause, (max(start, from_s), min(end_s, to_s))) for pause in pauses)
    return total_s


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


@dataclass(frozen=True)
class Goodput:
    """Tokens in committed rounds, and the tokens that the living peers could have trained.

    Attributes:
        committed_tokens: tokens in the rounds of the span.
        possible_tokens: `tokens_per_s` x the sum of `living_s` over the peers.
        tokens_per_s: pace of one peer in an undisturbed round, including its waits for the others:
            the median of tokens / contributors / seconds over rounds before the span, or the pace
            of a peer that never waits if that is less.
    """

    committed_tokens: int
    possible_tokens: float
    tokens_per_s: float

    @property
    def share(self) -> float | None:
        """Committed over possible tokens. None if no pace of a peer was seen."""
        return self.committed_tokens / self.possible_tokens if self.possible_tokens else None


def goodput(
    faults: Sequence[Happened],
    histories: Histories,
    warm_up_rounds: int,
    most_tokens_per_s: float = inf,
) -> Goodput:
    """The goodput of a swarm from its undisturbed first rounds to its last round.

    Args:
        faults: all faults that happened.
        histories: histories of all peers.
        warm_up_rounds: number of rounds that ended before the first fault. They set the pace.
        most_tokens_per_s: pace of a peer that only takes local steps. Rounds that overlap with
            steps can end at shorter intervals than the steps take, for example after a late start.
    """
    rounds = rounds_of(histories)
    calm, rest = rounds[:warm_up_rounds], rounds[warm_up_rounds:]
    if not calm or not rest:
        return Goodput(0, 0.0, 0.0)
    paces = [r.tokens / max(len(r.contributors), 1) / r.seconds for r in calm]
    tokens_per_s = min(statistics.median(paces), most_tokens_per_s)
    span = (calm[-1].ended_s, rest[-1].ended_s)
    lived_s = sum(living_s(i, faults, events, span) for i, events in enumerate(histories))
    return Goodput(sum(r.tokens for r in rest), tokens_per_s * lived_s, tokens_per_s)


def spread(values: Sequence[float]) -> Mapping[str, float]:
    """Median, 90th percentile (nearest rank) and maximum. Empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    rank = max(0, -(-9 * len(ordered) // 10) - 1)
    return {
        "median": round(statistics.median(ordered), 2),
        "p90": round(ordered[rank], 2),
        "max": round(ordered[-1], 2),
    }
