"""Whether what a person asked for says which run is meant, before any of it is begun."""

from __future__ import annotations

from swarm.errors import ConfigError, StateError
from swarm.peer.state_directory import StateDirectory


def require_way_in(
    state: StateDirectory, *, has_file: bool, has_addresses: bool, run_id: str | None
) -> None:
    """Refuses a start that could only wait for somebody to announce something.

    Args:
        state: what is on disk.
        has_file: whether a run file was given.
        has_addresses: whether addresses of peers were given.
        run_id: that was asked for.

    Raises:
        ConfigError: nothing says which run is meant.
        StateError: the run that was asked for is not on disk, or there are several.
    """
    here = state.run_ids
    listed = f"it has {', '.join(here)}" if here else "it has none"
    if run_id:
        state.run(run_id)
    if has_file or has_addresses or (run_id in here if run_id else state.current_run):
        return
    if run_id:
        raise StateError(
            f"--state-dir {state.path} has no run {run_id}; {listed}",
            hint="join it with --initial-peers ADDRESS, or name the --state-dir that has it",
        )
    if here:
        raise StateError(
            f"--state-dir {state.path} has several runs and does not say which was the last: "
            f"{', '.join(here)}",
            hint="name one with --run-id",
        )
    if not state.known_peers:
        raise ConfigError(
            "nothing says which run is meant",
            hint="found one with --run FILE, join one with --initial-peers ADDRESS, or go on with "
            f"one with --state-dir DIR; {state.path} has none",
        )
