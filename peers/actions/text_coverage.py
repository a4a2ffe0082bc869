"""How much of its text a run has read, by the agreed state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.errors import DataError, NobodyReachable
from swarm.monitor.snapshot import Coverage, coverage_of
from swarm.peer.guest import look
from swarm.peer.text.agreed_model import open_state


def coverage(folder: Path | None, addresses: Sequence[str], run_id: str | None) -> dict[str, Any]:
    """How much text is covered, open and repeated, in windows of the run's sequence length.

    Args:
        folder: state directory of a peer that is not running. None to ask peers.
        addresses: addresses of peers of the run.
        run_id: id of the run, if there are several.

    Raises:
        StateError: there is no run in the directory, or its peer is running.
        NobodyReachable: no peer answers, or none gave the agreed state.
        DataError: in this run every peer has its own text.
    """
    if folder is None:
        seen = look(addresses, run_id)
        if seen.step is None:
            raise NobodyReachable(
                f"{seen.name}: none of its peers gave the agreed state in time",
                hint="ask again; while a founder gathers peers there is none yet",
            )
        return _said(f"{seen.name}, round {seen.round}", seen.coverage)
    state, model = open_state(folder, run_id)
    try:
        manifest = model.manifest
        return _said(f"{model.run.run.name}, round {manifest.round}", coverage_of(manifest))
    finally:
        state.close()


def _said(run: str, coverage: Coverage | None) -> dict[str, Any]:
    if coverage is None:
        raise DataError(
            f"{run}: no agreed text is known",
            hint="peers with texts of their own agree on none; a run begins to deal with round 0",
        )
    return {
        "run": run,
        "windows": coverage.windows,
        "covered": min(coverage.counted, coverage.windows),
        "being_read": coverage.dealt,
        "open": coverage.open,
        "repeated": coverage.repeated,
    }
