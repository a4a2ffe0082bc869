"""How a peer looks for the run that is meant, and when it may found one instead."""

from __future__ import annotations

import logging
import time

from swarm.errors import NobodyReachable
from swarm.network.fetch import Downloads
from swarm.network.finding import Opened, answers_of, find_run, no_longer, runs_here
from swarm.network.preparing import is_forestalled
from swarm.peer.agreement import require_no_founder, require_no_other
from swarm.peer.entrances import others_at, require_reached
from swarm.peer.host import Host
from swarm.peer.wanted import Wanted

logger = logging.getLogger(__name__)

FIND_S = 60.0
"""How long a joiner without a run file looks for a run."""
FIND_BEFORE_FOUNDING_S = 6.0
ASK_EVERY_S = 6.0
"""How often entrances are asked whether they prepare a run."""
SILENT_S = 60.0
"""One that has not said so again for this long will not found it."""
SAY_S = 60.0
"""How often the log says what is waited for."""


class Patience:
    """For how long a peer looks for a run: while one of its entrances prepares it, without end."""

    def __init__(self, host: Host, fingerprint: str | None, least_s: float) -> None:
        """Begins to look.

        Args:
            host: of this peer.
            fingerprint: of the configuration that is meant; None for any.
            least_s: it looks so long although nobody prepares a run.
        """
        self._host, self._fingerprint = host, fingerprint
        self._end_s, self._said_s = time.monotonic() + least_s, -SAY_S

    async def more_s(self) -> float:
        """Asks the entrances, and says for how long to look before they are asked again."""
        told, now_s = await answers_of(self._host.node, others_at(self._host)), time.monotonic()
        fits = [peer for peer, of in told.preparing.items() if self._fingerprint in (None, of)]
        if fits:
            self._end_s = now_s + SILENT_S
            if now_s - self._said_s >= SAY_S:
                self._said_s = now_s
                logger.info("peer=%s prepares the run; waiting for it to begin", fits[0][-6:])
        return max(0.0, min(ASK_EVERY_S, self._end_s - now_s))


async def look_for_run(
    host: Host, downloads: Downloads, wanted: Wanted, run_id: str | None, begun: str | None
) -> Opened | None:
    """The run to join; None where the wanted one may be founded.

    Args:
        host: of this peer.
        downloads: fetches what the run is configured as.
        wanted: which run is meant.
        run_id: that it must have, if one is known.
        begun: the run that this peer had begun to join, which is preferred.

    Raises:
        NobodyReachable: no run was announced in time, and none may be founded.
        RunMismatch: which run is meant is not known; or there is another than the wanted one.
    """
    fingerprint = wanted.run.fingerprint() if wanted.run else None
    look_s = FIND_BEFORE_FOUNDING_S if wanted.run else FIND_S
    patience = Patience(host, fingerprint, look_s)
    opened = await find_run(
        host.node,
        downloads,
        fingerprint=fingerprint,
        wanted=run_id,
        preferred=begun,
        deadline_s=look_s if run_id else min(look_s, ASK_EVERY_S),
        look_on=no_longer if run_id else patience.more_s,
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
    """Refuses to found a run beside those that the given addresses are in, or prepare.

    Args:
        host: of this peer.
        downloads: fetches the configurations of those runs.
        wanted: with a configuration; says whether a second run is meant.

    Raises:
        RunMismatch: there is another run, and none beside it is meant.
        NobodyReachable: nobody at the given addresses answers.
    """
    if wanted.run and not wanted.beside_others:
        told = await answers_of(host.node, others_at(host))  # first: such a run may begin meanwhile
        require_no_founder(wanted.run, told.preparing)
        require_no_other(wanted.run, await runs_here(host.node, downloads))
    require_reached(host)


async def goes_first(host: Host, wanted: Wanted, *, by_runs: bool) -> bool:
    """Whether somebody at the given addresses founds a run before this peer does; see `preparing`.

    Args:
        host: of a peer that says that it prepares a run.
        wanted: that run.
        by_runs: whether announced runs count, and not only founders.
    """
    others = others_at(host)
    if wanted.run is None or not others:
        return False
    told = await answers_of(host.node, others)
    return is_forestalled(
        host.node.peer_id,
        wanted.run.fingerprint(),
        preparing=told.preparing,
        announced=[run.record.fingerprint for run in told.runs if by_runs],
        is_beside=wanted.beside_others,
    )
