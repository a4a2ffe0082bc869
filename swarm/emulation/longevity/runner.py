"""Runs scenarios of a month, with or without a fault in the code, and reports what broke."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from swarm.background import SupervisedThread
from swarm.data.loader import Loader
from swarm.emulation.longevity.audit import Audit, Scale
from swarm.emulation.longevity.month import world
from swarm.emulation.longevity.scenarios import SCENARIOS
from swarm.export import run_follower
from swarm.export.manager import ExportManager
from swarm.network.blobs import packs
from swarm.network.blobs.blob_store import Pins
from swarm.network.runs import joiner
from swarm.network.wire import link_health, tcp_dialer
from swarm.network.wire.steady_clock import SteadyClock
from swarm.peer.start import quota
from swarm.peer.status import round_log
from swarm.peer.status.publisher import ClockCheck, Publisher
from swarm.protocol.chain import trust
from swarm.protocol.timing import pace
from swarm.protocol.timing.pace import Dated, Recent

Patches = tuple[tuple[Any, str, Any], ...]


@dataclass(frozen=True)
class Mutant:
    """A fault that the code once had, or must never have.

    Attributes:
        fault: the wrong behavior.
        scenario: name of the scenario that shows the fault.
        shown_by: part of the audit's text about the fault.
        patches: owner, name and new value of each replaced name.
    """

    fault: str
    scenario: str
    shown_by: str
    patches: Callable[[], Patches]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Replaces code by the fault. KeyError if there is no such code."""
        before = [(owner, name, vars(owner)[name]) for owner, name, _ in self.patches()]
        for owner, name, value in self.patches():
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)


# ---------------------------------------------------------------- exponents and counters


def _rests_without_bound(way: Any, now_s: float) -> None:
    way.is_known = False
    pause_s = tcp_dialer.FIRST_PAUSE_S * 2.0**way.failures
    way.not_before_s = now_s + min(pause_s, tcp_dialer.LONGEST_PAUSE_S)
    way.failures += 1


# ---------------------------------------------------------------- loops that one exception ends


def _unsupervised(thread: Any) -> None:
    thread._body()


# ---------------------------------------------------------------- rates, minima, maxima


def _lowest(recent: Any, _: float) -> float | None:
    return min((each.value for each in recent.newest), default=None)


def _added_to_the_best(recent: Any, value: float, at_s: float) -> None:
    recent.best = max(value, getattr(recent, "best", value))
    recent.newest = (*recent.newest, Dated(value, at_s))[-recent._kept :]


def _only_higher(known: Any, mbit: float) -> None:
    known.best = max(mbit, getattr(known, "best", mbit))
    known._tests.add(known.best, known._clock())


def _best(recent: Any, *_: float) -> float | None:
    return getattr(recent, "best", None)


# ---------------------------------------------------------------- joins and deadlines


def _joined_at_the_end(loader: Any) -> None:
    loader._reader.shutdown(cancel_futures=True)


def _begun_again(waiting: Any, *_: object) -> None:
    waiting._attempts = waiting._failing_s = None


# ---------------------------------------------------------------- what grows


async def _leaks_a_task(publisher: Any) -> None:
    leaked = publisher.__dict__.setdefault("leaked", [])
    leaked.append(asyncio.get_running_loop().create_task(asyncio.sleep(1e9)))
    await _published(publisher)


def _kept_for_ever(known: dict[str, Any], peer: str, new: Any, *_: object, **__: object) -> Any:
    return known.setdefault(peer, new())


def _stays(*_: object) -> None:
    return None


def _all_links(links: Any, *_: int) -> tuple[Any, ...]:
    return tuple(links)


# ---------------------------------------------------------------- compared once, counted where used


async def _compared_once(clock: Any) -> None:
    if not clock.__dict__.get("was_compared"):
        clock.was_compared = True
        await _compare(clock)


def _not_followed(clock: Any) -> float:
    return float(time.time() - clock())


def _counted_where_used(traffic: Any) -> int:
    return round(quota._known_of(traffic) * quota.OVERHEAD)


# ---------------------------------------------------------------- subsets and defaults


def _zero_if_unknown(*arguments: Any) -> float:
    return _up_mbit(*arguments) or 0.0


_published, _compare, _up_mbit = Publisher._publish, ClockCheck.compare, round_log.up_mbit


MUTANTS: dict[str, Mutant] = {
    "exponent_without_bound": Mutant(
        "1: a pause of 5.0 * 2**failures overflows at the 1,025th failure",
        "transport", "OverflowError",
        lambda: ((tcp_dialer._Way, "failed", _rests_without_bound),),
    ),
    "exception_ends_thread": Mutant(
        "2: one foreign exception ends the publisher",
        "publishing", "thread publisher ended",
        lambda: ((SupervisedThread, "_run", _unsupervised),),
    ),
    "waiting_counts": Mutant(
        "3: waiting is transfer time, and the slowest of the recent ones decides",
        "transport", "after an outage",
        lambda: ((pace, "STALL_S", 1e9), (Recent, "low", _lowest)),
    ),
    "best_is_kept": Mutant(
        "4: the best of all uplinks ever measured is published",
        "lines", "an uplink of 6 Mbit/s is published",
        lambda: ((Recent, "add", _added_to_the_best), (Recent, "high", _best),
                 (link_health.LinkHealth, "tested", _only_higher)),
    ),
    "hanging_thread_joined": Mutant(
        "5: leaving waits for a thread whose deadline has passed",
        "reading", "for a thread that a disk holds",
        lambda: ((Loader, "close", _joined_at_the_end),),
    ),
    "deadline_begins_again": Mutant(
        "6: each failed attempt begins the deadlines of an export again",
        "exports", "fetched",
        lambda: ((run_follower.Waiting, "failed", _begun_again),),
    ),
    "clock_compared_once": Mutant(
        "8: the clock of records is compared once, and follows nothing",
        "clocks", "the clock of records is off",
        lambda: ((ClockCheck, "compare", _compared_once), (SteadyClock, "look", _not_followed)),
    ),
    "chain_not_pruned": Mutant(
        "9: the chain of heads grows with rounds",
        "chain", "Chain.links grows",
        lambda: ((trust, "pruned", _all_links),),
    ),
    "counted_where_used": Mutant(
        "10: the quota does not count the bytes that measure a line",
        "lines", "the quota counted",
        lambda: ((quota, "bytes_moved", _counted_where_used),),
    ),
    "task_for_each_record": Mutant(
        "a task is left behind by each publication",
        "publishing", "timers grows",
        lambda: ((Publisher, "_publish", _leaks_a_task),),
    ),
    "peers_never_forgotten": Mutant(
        "memory of other peers grows with their number",
        "strangers", "grows",
        lambda: (
            (link_health, "recalled", _kept_for_ever), (tcp_dialer, "recalled", _kept_for_ever)
        ),
    ),
    "pins_never_taken_back": Mutant(
        "a blob that was fetched stays pinned",
        "transport", "Pins._pins grows",
        lambda: ((Pins, "unpin", _stays),),
    ),
    "old_exports_stay": Mutant(
        "exports before the newest are not removed",
        "exports", "of the newest exports",
        lambda: ((ExportManager, "_remove_old", _stays),),
    ),
    "descriptors_stay_open": Mutant(
        "a pack that is deleted keeps its descriptor",
        "store", "descriptors grow",
        lambda: ((packs.FilePack, "__del__", _stays),),
    ),
    "one_key_of_all": Mutant(
        "presence is read under one of the keys that hold it",
        "publishing", "are not seen",
        lambda: ((joiner, "NUM_SHARDS", 1),),
    ),
    "zero_for_unknown": Mutant(
        "a figure that nobody has measured is published as a number",
        "lines", "an uplink that nobody has measured",
        lambda: ((round_log, "up_mbit", _zero_if_unknown),),
    ),
}  # fmt: skip
"""The first nine restore earlier faults of the peer. Each other mutant stands for a kind of
fault."""


@dataclass(frozen=True)
class Outcome:
    """The result of one scenario.

    Attributes:
        scenario: name of the scenario.
        problems: texts of the faults. Empty if there were none.
        days: days of virtual time that passed.
        seconds: seconds of one core that it took.
        sizes: the last sample.
        warnings: how often each warning or error was logged, by its text.
    """

    scenario: str
    problems: list[str]
    days: float
    seconds: float
    sizes: dict[str, float]
    warnings: dict[str, int]


@dataclass(frozen=True)
class Job:
    """A scenario to run; see `run_scenario`. `mutant` names the code's fault; see `MUTANTS`."""

    scenario: str
    scale: Scale
    seed: int = 0
    memory: bool = False
    mutant: str | None = None


def run_job(job: Job) -> Outcome:
    """Runs a job, with its fault if it has one."""
    with MUTANTS[job.mutant].planted() if job.mutant else nullcontext():
        return run_scenario(job.scenario, job.scale, job.seed, memory=job.memory)


def run_scenario(name: str, scale: Scale, seed: int = 0, *, memory: bool = False) -> Outcome:
    """Runs one scenario. `memory` traces allocations, which doubles the time."""
    began_s, found, failure = time.process_time(), list[Audit](), ""
    with world(seed) as month:

        def main() -> None:
            found.append(SCENARIOS[name](month, scale))

        if memory:
            tracemalloc.start()
        try:
            month.run(main)
        except Exception as error:  # noqa: BLE001
            failure = f"the scenario ended with {error!r}"
        finally:
            tracemalloc.stop()
        problems = [failure] if failure else found[0].problems()
        warnings = {
            text: count for (level, text), count in month.said.counts.most_common() if level >= 30
        }
        sizes = found[0].samples[-1][1] if found and found[0].samples else {}
        return Outcome(
            name, problems, month.now_s / 86_400, time.process_time() - began_s, sizes, warnings
        )
