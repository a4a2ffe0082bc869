"""How a peer or an observer finds the wanted run, and how a founder announces one."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarm.config import RunConfig
from swarm.errors import BadRecord, HostileInput, NobodyReachable, RunMismatch, Unreachable
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.node.node import Node
from swarm.network.runs.run_records import check_announcement, decode_config, fetch_records, heard
from swarm.protocol.messages.message_bytes import foreign_manifest
from swarm.protocol.records.records import RunRecord, RunState, decode_record, runs_keys
from swarm.protocol.values.digests import Buffer
from swarm.protocol.values.manifest import Manifest, PeerId, run_id

logger = logging.getLogger(__name__)


_IS_PREPARING = re.compile(rb"preparing ([0-9a-f]{64})")


def encode_preparing(fingerprint: str) -> bytes:
    """The answer of a peer that founds a run with this configuration."""
    return f"preparing {fingerprint}".encode()


def decode_preparing(answer: Buffer) -> str | None:
    """The fingerprint in a stranger's answer of that form; None for any other bytes."""
    match = _IS_PREPARING.fullmatch(answer)
    return match[1].decode() if match else None


def is_forestalled(
    me: PeerId,
    fingerprint: str,
    *,
    preparing: Mapping[PeerId, str],
    announced: Iterable[str],
    is_beside: bool,
) -> bool:
    """Whether a peer that prepares a run must leave the founding to others, or not found at all.

    If peers prepare a run at the same time and ask each other, the peer with the smallest id
    continues and the others wait for it. So exactly one of them founds.

    Args:
        me: this peer.
        fingerprint: fingerprint of the run that it prepares.
        preparing: peers at its given addresses that prepare a run too, with the fingerprint of each
            run.
        announced: fingerprints of the runs of peers at these addresses.
        is_beside: whether the run may coexist with others, so that only runs with its fingerprint
            count.
    """
    there = {of for peer, of in preparing.items() if peer < me}.union(announced)
    return fingerprint in there if is_beside else bool(there)


RUN_QUESTION = b"run"
"""Asks a peer for its run; the answer is the peer's `RunRecord`, or `preparing`, or nothing."""
POLL_S = 0.3
ASK_S = 3.0
ALONE_S = 0.5
"""For this long, the search waits only for the answers of peers that it asked directly."""
OPEN_S = 20.0
"""Limit for fetching configuration and manifest 0 of one candidate."""
NEXT_AFTER_S = 1.0
"""The next candidate is tried after this long, even if the previous one is still being opened."""
OTHERS_S = 4.0
"""The search ends after this long if only other runs than the named one are announced."""
MAX_CANDIDATES = 32
MAX_ASKED = 8
LookOn = Callable[[], Awaitable[float]]


@dataclass(frozen=True)
class Announced:
    """An announced run, and the peers that announced it."""

    record: RunRecord
    publishers: tuple[PeerId, ...]


@dataclass(frozen=True)
class Opened:
    """A run with a verified announcement.

    Attributes:
        announced: bound by run id and manifest 0; while the run gathers peers, only the founder's
            claim.
        run: configuration of the run.
        founding: manifest 0; None while its founder gathers peers.
    """

    announced: Announced
    run: RunConfig
    founding: Manifest | None


@dataclass(frozen=True)
class Answers:
    """Answers of peers that were asked for their run.

    Attributes:
        runs: the runs of these peers.
        preparing: peers that found a run which cannot be announced yet, with the run's fingerprint.
    """

    runs: list[Announced]
    preparing: dict[PeerId, str]


async def answers_of(node: Node, peers: Iterable[PeerId]) -> Answers:
    """The answers of these peers about their run; at most `MAX_ASKED` are asked."""
    asked = [peer for peer in dict.fromkeys(peers) if peer != node.peer_id][:MAX_ASKED]
    answers = await asyncio.gather(*(_run_of(node, peer) for peer in asked))
    said = dict(zip(asked, answers, strict=True))
    records = {peer: one for peer, one in said.items() if isinstance(one, RunRecord)}
    preparing = {peer: one for peer, one in said.items() if isinstance(one, str)}
    return Answers(_sound(node, records), preparing)


async def runs_of(node: Node, peers: Iterable[PeerId]) -> list[Announced]:
    """The runs of these peers, by their answers."""
    return (await answers_of(node, peers)).runs


async def told_by(node: Node, peers: Sequence[PeerId], within_s: float) -> Answers:
    """The answers of these peers, once one of them names a run; empty if none does in time.

    Args:
        node: keeps connecting to its given addresses.
        peers: the peers to ask.
        within_s: how long the question is repeated; it is asked at least once.
    """
    end_s = time.monotonic() + within_s
    while True:
        told = await answers_of(node, peers)
        if told.runs or told.preparing or time.monotonic() >= end_s:
            return told
        await asyncio.sleep(POLL_S)


async def _run_of(node: Node, peer: PeerId) -> RunRecord | str | None:
    try:
        answer = await node.request(peer, RUN_QUESTION, ASK_S)
        preparing = decode_preparing(answer)
        return preparing or (decode_record(RunRecord, answer) if answer else None)
    except Unreachable as error:
        logger.info("peer=%s did not say which run it is in: %s", peer[-6:], error)
    except BadRecord as error:
        node.traffic.refuse(error.reason)
        logger.warning("peer=%s announcement refused: %s", peer[-6:], error)
    return None


async def announced_runs(node: Node) -> list[Announced]:
    """All runs in the DHT; running ones first, each group by number of publishers.

    Raises:
        NobodyReachable: the DHT did not answer.
        NetworkDown: the daemon is dead.
    """
    return _sound(node, await fetch_records(node, RunRecord, runs_keys()))


def _sound(node: Node, records: Mapping[PeerId, RunRecord]) -> list[Announced]:
    """Groups equal announcements; drops announcements that contradict themselves."""
    publishers: dict[RunRecord, list[PeerId]] = {}
    for peer, record in sorted(records.items()):
        try:
            check_announcement(record)
            if record.state is RunState.RUNNING:
                check_run_id(record)
            elif record.founder != peer:
                raise BadRecord("record_founder", f"{record.run} gathers at {record.founder}")
        except (BadRecord, RunMismatch) as error:
            _refuse(node, peer, error)
            continue
        publishers.setdefault(record, []).append(peer)
    return sorted(
        (Announced(record, tuple(peers)) for record, peers in publishers.items()),
        key=lambda a: (a.record.state is not RunState.RUNNING, -len(a.publishers), a.record.run),
    )


def check_run_id(record: RunRecord) -> None:
    """Refuses an announcement whose id does not bind its content.

    Raises:
        RunMismatch: name, fingerprint or manifest 0 does not match the id.
    """
    if record.run != run_id(record.name, record.fingerprint, record.founding):
        raise RunMismatch(f"the announcement of {record.run} contradicts its own id")


async def no_longer() -> float:
    """The default of `look_on`: no further search."""
    return 0.0


async def find_run(
    node: Node,
    downloads: Downloads,
    *,
    fingerprint: str | None,
    wanted: str | None,
    preferred: str | None = None,
    deadline_s: float,
    look_on: LookOn = no_longer,
) -> Opened | None:
    """The run to join, or None if none appears before the deadline.

    Args:
        node: connected to the DHT.
        downloads: fetches manifest 0 and the configuration.
        fingerprint: fingerprint of the wanted configuration, if one is known.
        wanted: the requested run id, or that of the run in which this peer was.
        preferred: the run to take if several have the same configuration.
        deadline_s: how long to search. The deadline does not interrupt the opening of a found run.
        look_on: called at the deadline and at the end of each extension; returns how many more
            seconds to search.

    Raises:
        RunMismatch: several runs are announced and none was named; or only other runs than the
            named one are announced.
        NobodyReachable: a peer at a given address is in the run, but the run cannot be opened.
    """
    begin_s = time.monotonic()
    end_s = begin_s + deadline_s
    others, is_named = set[str](), wanted is not None or fingerprint is not None

    def meant(runs: list[Announced]) -> list[Announced]:
        others.update(run.record.run for run in runs if wanted not in (None, run.record.run))
        fits = [
            run
            for run in runs
            if wanted in (None, run.record.run) and fingerprint in (None, run.record.fingerprint)
        ]
        return sorted(fits, key=lambda run: run.record.run != preferred)

    while True:
        told, rumours = await _heard_of(node, meant, is_named=is_named)
        if opened := await _open(node, downloads, told or rumours, is_named=is_named):
            return opened
        if others and not (told or rumours) and time.monotonic() > begin_s + OTHERS_S:
            raise RunMismatch(
                f"no peer announces {wanted}; announced are {', '.join(sorted(others))}",
                hint="name one of these with --run-id",
            )
        if (now_s := time.monotonic()) > end_s:
            end_s = now_s + (more_s := await look_on())
            if not more_s and told:
                raise NobodyReachable(f"{told[0].record.run} is announced and cannot be fetched")
            if not more_s:
                return None
        await asyncio.sleep(POLL_S)


async def _heard_of(
    node: Node, meant: Callable[[list[Announced]], list[Announced]], *, is_named: bool
) -> tuple[list[Announced], list[Announced]]:
    """The possible runs of the peers at the given addresses, and those of all others."""
    asking = asyncio.create_task(answers_of(node, node.entrances))
    try:
        await asyncio.wait([asking], timeout=ALONE_S)
        told = meant(asking.result().runs) if asking.done() else []
        if not is_named and asking.done() and asking.result().preparing and not told:
            return [], []  # the run in preparation is the wanted one
        rumours = [] if told else meant(await heard(announced_runs(node), []))
        several = len({run.record.run for run in rumours}) > 1
        # Of several runs, that of the given addresses is wanted, unless another was named.
        if not rumours or asking.done() or (several and not is_named):
            told = meant((await asking).runs)
    finally:
        asking.cancel()
    if not (told or rumours) and is_named:
        rumours = meant(await runs_of(node, node.neighbours))
    return told, rumours


async def runs_here(node: Node, downloads: Downloads) -> list[tuple[str, RunConfig]]:
    """Id and configuration of each run that is announced here and can be verified."""
    found = [*await runs_of(node, node.entrances), *await heard(announced_runs(node), [])]
    return [
        (opened.announced.record.run, opened.run)
        for opened in await _open_each(node, downloads, found)
    ]


async def _open(
    node: Node, downloads: Downloads, candidates: Sequence[Announced], *, is_named: bool
) -> Opened | None:
    """The run among the candidates; if none was named, only one may be verified."""
    if is_named:
        return await _open_first(node, downloads, candidates)
    opened = await _open_each(node, downloads, candidates)
    if len(opened) > 1:
        names = ", ".join(one.announced.record.run for one in opened)
        raise RunMismatch(
            f"several runs are announced here: {names}", hint="name one with --run-id"
        )
    return opened[0] if opened else None


async def _open_each(
    node: Node, downloads: Downloads, candidates: Sequence[Announced]
) -> list[Opened]:
    """Each candidate that can be verified."""
    by_run: dict[str, list[Announced]] = {}
    for candidate in candidates[:MAX_CANDIDATES]:
        by_run.setdefault(candidate.record.run, []).append(candidate)
    tries = (_open_first(node, downloads, by_run[run]) for run in sorted(by_run))
    return [one for one in await asyncio.gather(*tries) if one]


async def _open_first(
    node: Node, downloads: Downloads, candidates: Sequence[Announced]
) -> Opened | None:
    """The first verified candidate; each has some time before the next one is tried."""
    waiting, running = list(candidates[:MAX_CANDIDATES]), set[asyncio.Task[Opened | None]]()
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.create_task(_opened(node, downloads, waiting.pop(0))))
            done, running = await asyncio.wait(
                running,
                timeout=NEXT_AFTER_S if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if opened := next(filter(None, (task.result() for task in done)), None):
                return opened
        return None
    finally:
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)


async def _opened(node: Node, downloads: Downloads, candidate: Announced) -> Opened | None:
    try:
        return await open_run(candidate, downloads, timeout_s=OPEN_S)
    except (HostileInput, NobodyReachable, RunMismatch) as error:
        _refuse(node, candidate.publishers[0], error)
        return None


def _refuse(node: Node, peer: PeerId, error: Exception) -> None:
    if not isinstance(error, NobodyReachable):
        node.traffic.refuse(getattr(error, "reason", "record_run"))
    logger.warning("peer=%s announcement refused: %s", peer[-6:], error)


async def open_run(announced: Announced, downloads: Downloads, *, timeout_s: float) -> Opened:
    """Fetches the blobs that an announcement names, and compares them with it.

    Args:
        announced: an announcement that its run id binds, unless the run still gathers peers.
        downloads: fetches blobs from the run's publishers.
        timeout_s: time limit for manifest 0 and for the configuration, which are fetched together.

    Raises:
        NobodyReachable: no publisher sent the blobs in time.
        HostileInput: a blob is no manifest or no configuration.
        RunMismatch: the id, manifest 0 or the configuration differs from the announcement.
    """
    record = announced.record
    if record.state is RunState.GATHERING:
        return Opened(announced, await fetch_config(announced, downloads, timeout_s), None)
    check_run_id(record)
    wanted = Want(record.founding, record.founding_bytes, announced.publishers)
    run, blob = await asyncio.gather(
        fetch_config(announced, downloads, timeout_s),
        downloads.fetch_one(wanted, timeout_s=timeout_s),
    )
    founding = foreign_manifest(bytes(blob))
    fixed = founding.founding
    said = (record.founder, record.config, record.config_bytes)
    if (fixed.founder, fixed.config, fixed.config_bytes) != said:
        raise RunMismatch(f"the announcement of {record.run} contradicts its manifest 0")
    return Opened(announced, run, founding)


async def fetch_config(
    announced: Announced, downloads: Downloads, timeout_s: float = OPEN_S
) -> RunConfig:
    """The run's configuration, checked against the announced fingerprint.

    Raises:
        NobodyReachable: no publisher sent the configuration in time.
        BadBlob: the blob is no configuration.
        RunMismatch: the configuration differs from the announced one.
    """
    record = announced.record
    wanted = Want(record.config, record.config_bytes, announced.publishers)
    return decode_config(await downloads.fetch_one(wanted, timeout_s=timeout_s), record)


def whom_to_ask(node: Node, announced: Announced, present: Collection[PeerId]) -> list[PeerId]:
    """Peers to ask for the newest tip: those of the given addresses, then random others.

    No figure in a record gives precedence, and no number of records displaces the given peers.
    """
    others = sorted({*announced.publishers, *present})
    random.shuffle(others)
    chosen = dict.fromkeys([*node.entrances[: MAX_ASKED // 2], *others])
    return [peer for peer in chosen if peer != node.peer_id][:MAX_ASKED]
