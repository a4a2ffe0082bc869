"""Which peer is asked for which bytes, and for how long attempts continue. Without a clock."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic, TypeVar

from swarm.protocol.timing.backoff import backoff_s

STALLED_S = 3600.0
"""A state counts as lost when no byte of it arrives for this long; a peer that restarts takes
minutes."""
WHOLE_S = 24 * 3600.0
"""A state that is not whole after this long is given up, even while bytes of it arrive."""
FIRST_REST_S = 10.0
LONGEST_REST_S = 900.0


@dataclass(frozen=True)
class FetchAttempts:
    """Failed attempts to fetch one manifest. Times are seconds of one monotonic clock.

    Attributes:
        begin_s: time when the first attempt began.
        most_bytes: the most bytes that were here after any attempt.
        moved_s: time when `most_bytes` last rose.
        failures: attempts in a row that brought no new bytes.
        next_s: time when the next attempt begins.
        whole_s: how long the state may take to become whole.
        longest_rest_s: the longest rest between two attempts.
    """

    begin_s: float
    most_bytes: int
    moved_s: float
    failures: int = 0
    next_s: float = 0.0
    whole_s: float = WHOLE_S
    longest_rest_s: float = LONGEST_REST_S

    @staticmethod
    def begun(
        now_s: float,
        num_bytes: int,
        *,
        whole_s: float = WHOLE_S,
        longest_rest_s: float = LONGEST_REST_S,
    ) -> FetchAttempts:
        """The state before the first attempt, when `num_bytes` are here."""
        return FetchAttempts(now_s, num_bytes, now_s, 0, now_s, whole_s, longest_rest_s)

    def failed(self, now_s: float, num_bytes: int) -> FetchAttempts:
        """The state after a failed attempt, when `num_bytes` are here.

        Only a new maximum counts as progress: wrong bytes make the number rise and fall again.
        """
        if num_bytes > self.most_bytes:
            return replace(self, most_bytes=num_bytes, moved_s=now_s, failures=0, next_s=now_s)
        failures = self.failures + 1
        rest_s = backoff_s(failures, FIRST_REST_S, self.longest_rest_s)
        return replace(self, failures=failures, next_s=now_s + rest_s)

    @property
    def has_failed(self) -> bool:
        """Whether any attempt has failed."""
        return self.failures > 0 or self.moved_s > self.begin_s

    def left_s(self, now_s: float) -> float:
        """Seconds that are left until the state must be whole; not positive once it is given up."""
        return self.begin_s + self.whole_s - now_s

    def why_given_up(self, now_s: float) -> str | None:
        """Why no further attempt is made; None while attempts continue."""
        if now_s - self.moved_s >= STALLED_S:
            return f"nothing of it came for {(now_s - self.moved_s) / 3600:.1f} h"
        if self.left_s(now_s) <= 0:
            return f"it is not whole after {(now_s - self.begin_s) / 3600:.1f} h"
        return None


Key = TypeVar("Key", bound=Hashable)


class Failure(Enum):
    """How an attempt failed; this decides what rests."""

    SILENT = "silent"  # no connection, no progress, early end, busy: the peer rests
    MISSING = "missing"  # it does not have these bytes (yet): only this job rests at this peer
    WRONG = "wrong"  # its bytes were refused: the peer rests, and never gets this job again


@dataclass(frozen=True)
class Limits:
    """How much is asked of one peer at a time, and how long a failed one rests."""

    bytes_per_peer: int = 16 * 2**20
    jobs_per_peer: int = 256
    rest_s: float = 0.5
    """After the first failure; doubles with each further one in a row."""
    longest_rest_s: float = 15.0


@dataclass(frozen=True)
class Assignment(Generic[Key]):
    """A job to ask of a peer now, and why this peer was chosen."""

    key: Key
    peer: str
    reason: str


@dataclass(frozen=True)
class _Rest:
    until: float
    failures: int
    why: str


@dataclass
class _Job(Generic[Key]):
    key: Key
    num_bytes: int
    sources: list[str]
    peer: str | None = None
    """The peer that was asked; None while the job waits."""
    rests: dict[str, _Rest] = field(default_factory=dict)
    """The last rest of each peer that did not have this job's bytes."""
    resting: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)


@dataclass
class _Load:
    num_bytes: int = 0
    num_jobs: int = 0


_SCAN = 64
"""Most waiting jobs of a peer that one decision looks at, so that its cost does not grow with the
queue."""


class Sourcing(Generic[Key]):
    """Assigns jobs to peers. Methods that need the time take it as an argument."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._jobs: dict[Key, _Job[Key]] = {}
        self._waiting: dict[str, dict[Key, None]] = {}
        """For each peer the jobs that it could do, oldest first (a dict as an ordered set)."""
        self._preferred: dict[str, dict[Key, None]] = {}
        """For each peer, the jobs that name it as their first source."""
        self._loads: dict[str, _Load] = {}
        self._rests: dict[str, _Rest] = {}
        self._resting: list[tuple[float, int, Key, str]] = []
        """Heap of jobs' rests, by their ends: until, tie-breaker, job, peer."""
        self._count = 0

    def want(self, key: Key, num_bytes: int, sources: Iterable[str]) -> None:
        """Adds a job, or further sources of a known job."""
        job = self._jobs.setdefault(key, _Job(key, num_bytes, []))
        job.sources = [*dict.fromkeys([*job.sources, *sources])]
        if job.peer is None:
            self._queue(job)

    def forget(self, key: Key) -> None:
        """Withdraws a job, whether or not a peer was asked for it. Unknown jobs are ignored."""
        job = self._jobs.pop(key, None)
        if job and job.peer is None:
            self._unqueue(job)
        elif job:
            self._unload(job)

    def is_waiting(self, key: Key) -> bool:
        """Whether the job is known, and no peer is asked for it now."""
        return key in self._jobs and self._jobs[key].peer is None

    def knows(self, key: Key) -> bool:
        """Whether the job is neither done nor forgotten."""
        return key in self._jobs

    def done(self, key: Key) -> None:
        """Ends a job whose right bytes arrived; the rests of the peer that sent them end."""
        job = self._jobs.get(key)
        if job and job.peer is not None:
            self._rests.pop(job.peer, None)
        self.forget(key)

    def released(self, key: Key) -> None:
        """Puts back an assigned job for which no peer was asked; this is not a failure."""
        job = self._jobs.get(key)
        if job:
            self._unload(job)
            self._queue(job)

    def failed(self, key: Key, kind: Failure, why: str, now: float) -> None:
        """Notes a failed attempt; the job waits for its next source."""
        job = self._jobs.get(key)
        if job is None or job.peer is None:
            return
        peer = job.peer
        if kind is Failure.MISSING:
            rest = job.rests[peer] = self._longer(job.rests.get(peer), why, now)
            job.resting.add(peer)
            self._count += 1
            heappush(self._resting, (rest.until, self._count, key, peer))
        else:
            self.peer_failed(peer, why, now)
        if kind is Failure.WRONG:
            job.refused.add(peer)
        self.released(key)

    def peer_failed(self, peer: str, why: str, now: float) -> None:
        """Lets the peer rest before it gets another job."""
        self._forget_rests(now)
        self._rests[peer] = self._longer(self._rests.get(peer), why, now)

    def _forget_rests(self, now: float) -> None:
        """Forgets idle peers whose rest ended long ago, since peer ids are free to create."""
        long_ago = now - self._limits.longest_rest_s
        rested = [peer for peer, rest in self._rests.items() if rest.until < long_ago]
        for peer in rested:
            if peer not in self._waiting and peer not in self._loads:
                del self._rests[peer]

    def _longer(self, rest: _Rest | None, why: str, now: float) -> _Rest:
        if rest and rest.until > now:
            return rest  # the peer's other flows broke at the same time: counts as one failure
        failures = rest.failures + 1 if rest else 1
        length_s = backoff_s(failures, self._limits.rest_s, self._limits.longest_rest_s)
        return _Rest(now + length_s, failures, why)

    def assign(self, now: float, most: int | None = None) -> list[Assignment[Key]]:
        """The jobs to ask for now; each counts as asked until done, failed or released.

        At most `most` jobs are assigned. Call again for the others.

        The least loaded peer chooses first. It takes its oldest job whose earlier sources are all
        busy. So a later source in a job's list helps as soon as the sources before it are full.
        """
        self._wake(now)
        assignments = _Turn(self, now, _SCAN).assign(most)
        if not assignments and not self._loads:
            assignments = _Turn(self, now, None).assign(most)
        return assignments

    def next_time(self, now: float) -> float | None:
        """When the next rest ends that keeps a job waiting; None if no rest does."""
        times = [rest.until for peer, rest in self._rests.items() if peer in self._waiting]
        times += [until for until, *_ in self._resting[:1]]
        return min((time for time in times if time > now), default=None)

    def _wake(self, now: float) -> None:
        while self._resting and self._resting[0][0] <= now:
            _, _, key, peer = heappop(self._resting)
            job = self._jobs.get(key)
            if job and peer in job.resting and job.rests[peer].until <= now:
                job.resting.remove(peer)
                if job.peer is None:
                    self._queue(job)

    def _obstacle(self, peer: str, now: float) -> str | None:
        """Why the peer gets no job at all now."""
        rest = self._rests.get(peer)
        if rest and rest.until > now:
            return f"rests {rest.until - now:.1f} s more ({rest.why})"
        load = self._load(peer)
        if load.num_bytes >= self._limits.bytes_per_peer:
            return f"has {load.num_bytes / 1e6:.1f} MB to send first"
        if load.num_jobs >= self._limits.jobs_per_peer:
            return f"has {load.num_jobs} blobs to send first"
        return None

    def _obstacle_to(self, job: _Job[Key], peer: str, now: float) -> str | None:
        """Why the peer does not get this job now."""
        if peer in job.refused:
            return "sent wrong bytes"
        if peer in job.resting:
            rest = job.rests[peer]
            return f"is asked again in {rest.until - now:.1f} s ({rest.why})"
        return self._obstacle(peer, now)

    def _reason(self, job: _Job[Key], peer: str, now: float) -> str:
        place = job.sources.index(peer)
        text = f"source {place + 1} of {len(job.sources)}"
        if place:
            first = job.sources[0]
            text += f": {first[-6:]} {self._obstacle_to(job, first, now)}"
        return text

    def _load(self, peer: str) -> _Load:
        return self._loads.get(peer) or _Load()

    def _give(self, job: _Job[Key], peer: str) -> None:
        self._unqueue(job)
        job.peer = peer
        load = self._loads.setdefault(peer, _Load())
        load.num_bytes += job.num_bytes
        load.num_jobs += 1

    def _unload(self, job: _Job[Key]) -> None:
        if job.peer is None:
            return
        load = self._loads[job.peer]
        load.num_bytes -= job.num_bytes
        load.num_jobs -= 1
        if not load.num_jobs:
            del self._loads[job.peer]
        job.peer = None

    def _queue(self, job: _Job[Key]) -> None:
        able: Iterable[str] = job.sources
        if job.refused or job.resting:
            able = (p for p in job.sources if p not in job.refused and p not in job.resting)
        for peer in able:
            self._waiting.setdefault(peer, {})[job.key] = None
        for peer in job.sources[:1]:
            if job.key in self._waiting.get(peer, ()):
                self._preferred.setdefault(peer, {})[job.key] = None

    def _unqueue(self, job: _Job[Key]) -> None:
        for peer in job.sources:
            _remove(self._waiting, peer, job.key)
        for peer in job.sources[:1]:
            _remove(self._preferred, peer, job.key)


def _remove(queues: dict[str, dict[Key, None]], peer: str, key: Key) -> None:
    """Removes a job from a peer's queue, and the queue with its last job."""
    queue = queues.get(peer)
    if queue is not None:
        queue.pop(key, None)
        if not queue:
            del queues[peer]


class _Turn(Generic[Key]):
    """One call of `Sourcing.assign`.

    During the call, a peer can become full but not free. So the first free source of a job only
    moves towards the end of its list, and no source is looked at twice.
    """

    def __init__(self, sourcing: Sourcing[Key], now: float, scan: int | None) -> None:
        self._all = sourcing
        self._now = now
        self._scan = scan
        self._blocked = {
            peer
            for peer in (*sourcing._loads, *sourcing._rests)
            if sourcing._obstacle(peer, now) is not None
        }
        self._places: dict[Key, int] = {}
        """For each job, how many of its first sources are known not to be free."""
        self._passed: set[str] = set()
        """Free peers without a suitable job. A peer leaves this set once a source before it becomes
        full."""

    def assign(self, most: int | None) -> list[Assignment[Key]]:
        """The least loaded free peer chooses first; of equally loaded ones, the first by name."""
        sourcing = self._all
        assignments: list[Assignment[Key]] = []
        free = [self._turn_of(peer) for peer in sourcing._waiting if peer not in self._blocked]
        heapify(free)
        while free and len(assignments) != most:
            _, peer = heappop(free)
            job = self._next_job(peer)
            if job is None:
                self._passed.add(peer)
                continue
            reason = sourcing._reason(job, peer, self._now)
            assignments.append(Assignment(job.key, peer, reason))
            sourcing._give(job, peer)
            if sourcing._obstacle(peer, self._now) is None:
                heappush(free, self._turn_of(peer))
                continue
            self._blocked.add(peer)
            for other in self._successors(peer):  # they may now help with its jobs
                self._passed.remove(other)
                heappush(free, self._turn_of(other))
        return assignments

    def _turn_of(self, peer: str) -> tuple[int, str]:
        return self._all._load(peer).num_bytes, peer

    def _next_job(self, peer: str) -> _Job[Key] | None:
        """The oldest suitable of this peer's first `_SCAN` jobs, or a job that prefers the peer."""
        for job in self._oldest(peer):
            if self._first_free(job) == peer:
                return job
        preferred = next(iter(self._all._preferred.get(peer, ())), None)
        return None if preferred is None else self._all._jobs[preferred]

    def _oldest(self, peer: str) -> list[_Job[Key]]:
        keys = islice(self._all._waiting.get(peer, ()), self._scan)
        return [self._all._jobs[key] for key in keys]

    def _first_free(self, job: _Job[Key]) -> str | None:
        """The source that a job would be asked of now."""
        place, sources = self._places.get(job.key, 0), job.sources
        while place < len(sources) and (
            sources[place] in self._blocked
            or sources[place] in job.refused
            or sources[place] in job.resting
        ):
            place += 1
        self._places[job.key] = place
        return sources[place] if place < len(sources) else None

    def _successors(self, full: str) -> set[str]:
        """Peers that found no job before, and are now the first free source of a job."""
        return {
            peer for job in self._oldest(full) if (peer := self._first_free(job))
        } & self._passed
