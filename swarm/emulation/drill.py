"""A fault drill: peers of a local swarm are killed -9 one after another, and what that costs.

One peer at a time is killed at a random moment of the round and started again on its old state,
through the address of another peer that may itself be dead. The verdict is read from the
histories that the peers write.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.emulation.local_swarm import (
    Event,
    LocalPeer,
    LocalSwarm,
    applied,
    digests_by_height,
    tokens_lost,
)
from swarm.errors import SwarmError

WARM_UP_ROUNDS = 4
OLD_ADDRESS_SHARE = 0.25
"""So many restarts are given the founder's first address, whether it lives or not."""
LONGEST_ABSENCE_S = 6.0
POLL_S = 0.1


@dataclass(frozen=True)
class Bounds:
    """What counts as a hang, in seconds."""

    manifest_s: float = 180.0
    """Longest wait for the next manifest, whoever was killed."""
    return_s: float = 300.0
    """Longest wait until a killed peer contributes again."""


@dataclass(frozen=True)
class Round:
    """One training round of the chain."""

    number: int
    ended_s: float
    """Seconds since 1970 at which the first peer applied it."""
    seconds: float
    """Since the round before; a merge between the two is included."""
    contributors: frozenset[str]


@dataclass(frozen=True)
class Kill:
    """One kill -9 and the return of its victim."""

    peer: int
    peer_id: str
    at_s: float
    """Seconds since 1970."""
    into_round_s: float
    """Seconds after the manifest before it was seen."""
    round: int
    """The last that had ended."""


@dataclass
class Drill:
    """Kills peers of a swarm; see `run`.

    Attributes:
        swarm: not yet started.
        kills: how many.
        seed: of victims, moments and addresses.
        say: told what happens.
        bounds: what counts as a hang.
    """

    swarm: LocalSwarm
    kills: int
    seed: int = 0
    say: Callable[[str], None] = lambda _: None
    bounds: Bounds = Bounds()
    done: list[Kill] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """Peers that ended on their own."""
    _seen: tuple[int, float] = (-1, 0.0)
    """Greatest height anywhere, and when it was first seen."""

    def run(self) -> None:
        """Starts the swarm and kills; without kills it waits for the end of the run.

        It ends early at the first hang or when a peer ends on its own: what follows would say
        nothing about single kills.
        """
        draw = random.Random(self.seed)
        self._seen = (-1, time.monotonic())
        self.swarm.start()
        founder_address = self.swarm.peers[0].join_address()
        if not self.kills:
            self._until(LocalSwarm.finished, "the end of the run", float("inf"))
            return
        self._until(lambda _: len(self.rounds()) >= WARM_UP_ROUNDS, "the first rounds", 600.0)
        for number in range(1, self.kills + 1):
            if self.hangs or self.ended:
                return
            self._kill_one(draw, number, founder_address)

    def _kill_one(self, draw: random.Random, number: int, founder_address: str) -> None:
        height = self._height()
        if not self._until(lambda _: self._height() > height, "a round", self.bounds.manifest_s):
            return
        usual_s = statistics.median(r.seconds for r in self.quiet_rounds())
        time.sleep(draw.uniform(0.0, usual_s))
        victim = draw.choice(self.swarm.peers)
        kill = Kill(
            victim.index,
            _peer_id(victim),
            time.time(),
            time.monotonic() - self._seen[1],
            self.rounds()[-1].number,
        )
        victim.kill()
        self.done.append(kill)
        time.sleep(draw.uniform(0.0, LONGEST_ABSENCE_S))
        living = [peer for peer in self.swarm.peers if peer.alive]
        address = draw.choice(living).join_address()
        if draw.random() < OLD_ADDRESS_SHARE:
            address = founder_address
        self.swarm.restart(victim, ["--initial-peers", address])
        if self._until(lambda _: self._is_back(kill), "the return of a peer", self.bounds.return_s):
            after = self._rounds_of(kill)
            self.say(
                f"kill {number}/{self.kills}: peer-{victim.index} {kill.into_round_s:.1f} s into "
                f"round {kill.round + 1}; that round took {after[0].seconds:.1f} s, usual "
                f"{usual_s:.1f}; back after {time.time() - kill.at_s:.1f} s and {len(after)} rounds"
            )

    def _until(self, done: Callable[[LocalSwarm], bool], what: str, limit_s: float) -> bool:
        """Waits for a condition while manifests go on coming; returns whether it came true."""
        end_s = time.monotonic() + limit_s
        while True:
            now_s = time.monotonic()
            if self._height() > self._seen[0]:
                self._seen = (self._height(), now_s)
            if done(self.swarm):
                return True
            for peer in self.swarm.peers:
                if peer.exit_code is not None and peer.exit_code >= 0:
                    tail = " ".join(peer.output()[-300:].split())
                    self.ended.append(f"peer-{peer.index}, status {peer.exit_code}: {tail}")
            late_s = now_s - self._seen[1]
            if now_s > end_s or late_s > self.bounds.manifest_s:
                self.hangs.append(
                    f"{what}: not within {limit_s:.0f} s; last manifest {late_s:.0f} s ago"
                )
            if self.hangs or self.ended:
                self.say(" ".join([*self.hangs, *self.ended]))
                return False
            time.sleep(POLL_S)

    def _height(self) -> int:
        chains = (applied(peer.events()) for peer in self.swarm.peers)
        return max((chain[-1]["height"] for chain in chains if chain), default=-1)

    def _is_back(self, kill: Kill) -> bool:
        """Whether a round with all peers was applied by all of them after the kill."""
        everybody = {_peer_id(peer) for peer in self.swarm.peers}
        for peer in self.swarm.peers:
            chain = applied(peer.events(), "quorum")
            last = chain[-1] if chain else None
            whole = last is not None and everybody <= set(last["contributors"])
            if last is None or not whole or last["round"] <= kill.round + 1:
                return False
        return True

    # ------------------------------------------------ what the histories say

    def rounds(self) -> list[Round]:
        """The training rounds of the chain so far, oldest first, without the first."""
        return rounds_of([peer.events() for peer in self.swarm.peers])

    def _rounds_of(self, kill: Kill) -> list[Round]:
        """Rounds from the one in which the kill fell to the first with everybody again."""
        after = [r for r in self.rounds() if r.ended_s > kill.at_s]
        back = next(
            (
                i
                for i, r in enumerate(after)
                if i > 0 and len(r.contributors) == self.swarm.num_peers
            ),
            len(after) - 1,
        )
        return after[: back + 1]

    def quiet_rounds(self) -> list[Round]:
        """Rounds that no kill had anything to do with."""
        hit = {r.number for kill in self.done for r in self._rounds_of(kill)}
        return [r for r in self.rounds() if r.number not in hit]

    def verdict(self) -> dict[str, Any]:
        """What a script wants to know; see the fields."""
        histories = [peer.events() for peer in self.swarm.peers]
        by_height = digests_by_height(histories)
        quiet = self.quiet_rounds()
        usual_s = statistics.median(r.seconds for r in quiet) if quiet else None
        hit = [self._rounds_of(kill) for kill in self.done]
        hit = [rounds for rounds in hit if rounds]
        extra = [sum(r.seconds - (usual_s or 0.0) for r in rounds) for rounds in hit]
        last = [chain[-1] for events in histories if (chain := applied(events))]
        return {
            "peers": self.swarm.num_peers,
            "kills": len(self.done),
            "rounds": max((event["round"] for event in last), default=0),
            "manifests": len(by_height),
            "merges": max((len(applied(events, "merge")) for events in histories), default=0),
            "inconsistent": sum(len(digests) > 1 for digests in by_height.values()),
            "hangs": self.hangs,
            "ended": self.ended,
            "quiet_rounds": len(quiet),
            "round_s": spread([r.seconds for r in quiet]),
            "hit_round_s": spread([rounds[0].seconds for rounds in hit]),
            "extra_s_per_kill": spread(extra),
            "rounds_until_back": spread([float(len(rounds)) for rounds in hit]),
            "tokens_total": max((event["tokens"] for event in last), default=0),
            "tokens_lost": sum(tokens_lost(events) for events in histories),
            "seconds": round(time.monotonic() - self.swarm.started_s, 1),
        }


def rounds_of(histories: Sequence[Sequence[Event]]) -> list[Round]:
    """The training rounds that peers applied, by their first appearance; the first has no start."""
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
            frozenset(event["contributors"]),
        )
        for before, event in itertools.pairwise(ordered)
    ]


def spread(values: Sequence[float]) -> Mapping[str, float]:
    """Median, 90th percentile (nearest rank) and maximum; empty without values."""
    if not values:
        return {}
    ordered = sorted(values)
    rank = max(0, -(-9 * len(ordered) // 10) - 1)
    return {
        "median": round(statistics.median(ordered), 2),
        "p90": round(ordered[rank], 2),
        "max": round(ordered[-1], 2),
    }


def _peer_id(peer: LocalPeer) -> str:
    found = next((e["peer_id"] for e in peer.events() if e["event"] == "started"), None)
    if found is None:
        raise SwarmError(f"peer-{peer.index} never started; log {peer.log_path}")
    return str(found)
