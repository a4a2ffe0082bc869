"""What a peer tells of its worker processes: in its log, its history and its record."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from swarm.protocol.figures import MAX_BRIEF, WorkersFigures, workers_figures
from swarm.protocol.records import shortened
from swarm.train.local_steps import LocalStats
from swarm.train.parallel.figures import folded

logger = logging.getLogger(__name__)


def told_workers(stats: LocalStats) -> WorkersFigures | None:
    """For the record; said in the log too. None of local steps in one process."""
    found = folded(stats.workers)
    if found is None:
        return None
    logger.info("%s", found.words())
    return workers_figures({**asdict(found), "why": shortened(found.why, MAX_BRIEF)})


def workers_event(stats: LocalStats | None) -> dict[str, Any] | None:
    """For the history: the figures of each worker too. None as above."""
    found = folded(stats.workers) if stats else None
    if stats is None or found is None:
        return None
    return {**asdict(found), "ranks": [asdict(rank) for rank in stats.workers]}
