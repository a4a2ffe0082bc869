"""How a peer searches for its run at the given addresses, and when it may found a run instead."""

from __future__ import annotations

import logging
import time

from swarm.errors import CorruptState, NobodyReachable
from swarm.network.fetch.fetcher import Downloads
from swarm.network.rounds.record_file import RecordFile
from swarm.network.runs import run_search
from swarm.peer.machine.state_directory import RunDirectory, StateDirectory
from swarm.peer.start.host import Host
from swarm.peer.text.run_request import Wanted, require_no_founder, require_no_other
from swarm.protocol.values.manifest import PeerId

logger = logging.getLogger(__name__)

NEW_S = 6.0
"""How long peers that were never met are asked. Known peers, which may have left, are asked
once."""


async def runs_there(host: Host, run_id: str) -> bool:
    """False if peers at the given addresses are in other runs, and none is in the run on disk.

    Args:
        host: host of this peer, which has a run on disk.
        run_id: id of that run.

    Raises:
        NobodyReachable: no peer there names its run, and this peer has met none of these peers in
            the run on disk.
    """
    entrances = others_at(host)
    is_new = bool(entrances) and met_in(run_id, host.state).isdisjoint(entrances)
    told = await run_search.told_by(host.node, entrances, NEW_S if is_new else 0.0)
    same = [run for run in told.runs if run.record.run == run_id]
    is_other = bool(told.runs or told.preparing) and not same
    if is_other:
        logger.info("the peers there are in another run than run=%s; joining theirs", run_id)
        return False
    for run in same:
        host.state.run(run_id).add_entered_by(run.publishers)
    if is_new and not same:
        raise NobodyReachable(
            f"no peer at {_addresses(host)} says which run it is in, and none of them was met in "
            f"{run_id}, the run in --state-dir {host.state.path}",
            hint="check the address, and that the other peer runs; without --initial-peers this "
            f"peer resumes {run_id}",
        )
    return True


def require_reached(host: Host) -> None:
    """Refuses to found a run where peers at the given addresses may already train it.

    Raises:
        NobodyReachable: nobody at the given addresses answers.
    """
    entrances = others_at(host)
    if entrances and host.node.neighbours.isdisjoint(entrances):
        raise NobodyReachable(
            f"no peer answers at {_addresses(host)}, so no run is founded",
            hint="check the address, and that the other peer runs; without --initial-peers the run "
            "is founded",
        )


def others_at(host: Host) -> list[PeerId]:
    """Peers at the given addresses except this one, since all machines may get the same list."""
    return [peer for peer in host.node.entrances if peer != host.node.peer_id]


def met_in(run_id: str, state: StateDirectory) -> frozenset[PeerId]:
    """Peers whose addresses may have led into a run on disk.

    They are the members in the run's record, the founder, and the peers through which this peer
    entered. Peers that ever answered this peer count too, except members of other runs on disk.
    """
    directory = state.run(run_id)
    others = (_members_in(state.run(other)) for other in state.run_ids if other != run_id)
    answered = {text.rpartition("/")[2] for text, answered_at in state.known_peers if answered_at}
    entered_by = directory.read_entered_by()
    return _members_in(directory).union(entered_by, answered.difference(*others))


def _members_in(directory: RunDirectory) -> frozenset[PeerId]:
    try:
        record = RecordFile(directory.record_path).read()
    except CorruptState:  # reported where the run is resumed
        record = None
    return frozenset({*record.tip.members, record.tip.founding.founder} if record else ())


def _addresses(host: Host) -> str:
    return ", ".join(host.config.network.initial_peers)


FIND_S = 60.0
"""How long a joiner without a run file looks for a run."""
FIND_BEFORE_FOUNDING_S = 6.0
ASK_EVERY_S = 6.0
"""How often peers at the given addresses are asked whether they prepare a run."""
SILENT_S = 60.0
"""A founder that has not repeated its answer for this long counts as ended."""
SAY_S = 60.0
"""How often the log reports the wait."""


class RunSearchDeadline:
    """The end of a search for a run, postponed while a peer at a given address prepares it."""

    def __init__(self, host: Host, fingerprint: str | None, least_s: float) -> None:
        """Starts the search.

        Args:
            host: host of this peer.
            fingerprint: fingerprint of the wanted configuration; None for any.
            least_s: seconds to search even if no peer prepares a run.
        """
        self._host, self._fingerprint = host, fingerprint
        self._end_s, self._said_s = time.monotonic() + least_s, -SAY_S

    async def more_s(self) -> float:
        """Asks the peers at the given addresses; returns the seconds to wait, or 0 at the end."""
        told, now_s = (
            await run_search.answers_of(self._host.node, others_at(self._host)),
            time.monotonic(),
        )
        fits = [peer for peer, of in told.preparing.items() if self._fingerprint in (None, of)]
        if fits:
            self._end_s = now_s + SILENT_S
            if now_s - self._said_s >= SAY_S:
                self._said_s = now_s
                logger.info("peer=%s prepares the run; waiting for it to begin", fits[0][-6:])
        return max(0.0, min(ASK_EVERY_S, self._end_s - now_s))


async def look_for_run(
    host: Host, downloads: Downloads, wanted: Wanted, run_id: str | None, begun: str | None
) -> run_search.Opened | None:
    """The run to join; None if the wanted run may be founded.

    Args:
        host: host of this peer.
        downloads: fetches the run's configuration.
        wanted: the wanted run.
        run_id: the id that the run must have, if one is known.
        begun: the run that this peer had begun to join, which is preferred.

    Raises:
        NobodyReachable: no run was announced in time, and this peer may not found one.
        RunMismatch: several runs are announced and none was named; or only other runs are
            announced.
    """
    fingerprint = wanted.run.fingerprint() if wanted.run else None
    look_s = FIND_BEFORE_FOUNDING_S if wanted.run else FIND_S
    patience = RunSearchDeadline(host, fingerprint, look_s)
    opened = await run_search.find_run(
        host.node,
        downloads,
        fingerprint=fingerprint,
        wanted=run_id,
        preferred=begun,
        deadline_s=look_s if run_id else min(look_s, ASK_EVERY_S),
        look_on=run_search.no_longer if run_id else patience.more_s,
    )
    if opened is None and wanted.run is None:
        raise NobodyReachable(
            f"no run was announced within {FIND_S:.0f} s",
            hint="check the address, or found a run with --run FILE",
        )
    if opened is None:
        await require_alone(host, downloads, wanted)
    return opened


async def require_alone(host: Host, downloads: Downloads, wanted: Wanted) -> None:
    """Refuses to found a run if peers at the given addresses are in a run, or prepare one.

    Args:
        host: host of this peer.
        downloads: fetches the configurations of those runs.
        wanted: has a configuration, and says whether a second run is wanted.

    Raises:
        RunMismatch: there is another run, and no second run is wanted.
        NobodyReachable: nobody at the given addresses answers.
    """
    if wanted.run and not wanted.beside_others:
        told = await run_search.answers_of(
            host.node, others_at(host)
        )  # before `runs_here`: a prepared run may begin meanwhile
        require_no_founder(wanted.run, told.preparing)
        require_no_other(wanted.run, await run_search.runs_here(host.node, downloads))
    require_reached(host)


async def goes_first(host: Host, wanted: Wanted, *, by_runs: bool) -> bool:
    """Whether a peer at the given addresses has precedence as founder; see `is_forestalled`.

    Args:
        host: host of this peer, which answers others that it prepares a run.
        wanted: the request for the run.
        by_runs: whether peers in a run also count, and not only founders.
    """
    others = others_at(host)
    if wanted.run is None or not others:
        return False
    told = await run_search.answers_of(host.node, others)
    return run_search.is_forestalled(
        host.node.peer_id,
        wanted.run.fingerprint(),
        preparing=told.preparing,
        announced=[run.record.fingerprint for run in told.runs if by_runs],
        is_beside=wanted.beside_others,
    )
