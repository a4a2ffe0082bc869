"""Checks that the options identify one run, before anything is started."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from swarm import errors
from swarm.network.rounds.record_file import RecordFile
from swarm.peer.machine.state_directory import RunDirectory, StateDirectory
from swarm.peer.text.run_request import Wanted, explain_difference


def require_way_in(wanted: Wanted, addresses: Collection[str], state: StateDirectory) -> None:
    """Refuses a start if neither options nor state directory identify the run.

    Args:
        wanted: the wanted run.
        addresses: the given addresses of peers.
        state: the state directory.

    Raises:
        ConfigError: nothing identifies the run.
        StateError: the named run is not on disk; or several runs are, and none is named.
    """
    here, run_id = state.run_ids, wanted.run_id
    listed = f"it has {', '.join(here)}" if here else "it has none"
    if run_id:
        state.run(run_id)
    current = state.current_run
    if wanted.run or addresses or (run_id in (*here, current) if run_id else current):
        return
    if run_id:
        raise errors.StateError(
            f"--state-dir {state.path} has no run {run_id}; {listed}",
            hint="join it with --initial-peers ADDRESS, or name the --state-dir that has it",
        )
    if here:
        raise errors.StateError(
            f"--state-dir {state.path} has several runs and does not say which was the last: "
            f"{', '.join(here)}",
            hint="name one with --run-id",
        )
    if not state.known_peers:
        raise errors.ConfigError(
            "nothing says which run is meant",
            hint="found one with --run FILE, join one with --initial-peers ADDRESS, or resume one "
            f"with --state-dir DIR; {state.path} has none",
        )


def run_on_disk(wanted: Wanted, state: StateDirectory) -> str | None:
    """The wanted run on disk; None if there is none. The last run is preferred.

    Args:
        wanted: has the run's id, its configuration, or neither, which means the last run.
        state: the state directory.
    """
    last = wanted.run_id or state.current_run
    if last is None or not state.run(last).path.exists():
        last = None
    if wanted.run is None:
        return last
    others = () if wanted.run_id else state.run_ids
    found = {run: _fingerprint(state.run(run)) for run in (last, *others) if run}
    same = (run for run, is_of in found.items() if is_of == wanted.run.fingerprint())
    return next(same, last if last and found[last] is None else None)


def is_to_be_founded(wanted: Wanted, state: StateDirectory) -> bool:
    """Whether a run would be founded, unless others at the given addresses are in it already."""
    return wanted.run is not None and (wanted.beside_others or run_on_disk(wanted, state) is None)


def _fingerprint(directory: RunDirectory) -> str | None:
    """None if the configuration is damaged; it is restored and compared when the run resumes."""
    try:
        return directory.read_config().fingerprint()
    except errors.CorruptState:
        return None


def require_finished(wanted: Wanted, state: StateDirectory) -> None:
    """Refuses to found a run while another run on disk is unfinished, as after an edited run file.

    Every setting is part of a run, even its number of rounds, so other settings make another run.

    Args:
        wanted: the request, with the configuration of the run to be founded.
        state: the state directory.

    Raises:
        RunMismatch: the run on disk has other settings, and is not finished; or it is the same
            run, and this peer was still joining it.
        CorruptState: the record of the run on disk is damaged.
    """
    current = wanted.run_id or state.current_run
    if wanted.run is None or wanted.beside_others or current is None:
        return
    directory = state.run(current)
    try:
        run = directory.read_config()
    except errors.CorruptState:  # for example, its folder was removed
        return
    difference = explain_difference(wanted.run, run)
    record = RecordFile(directory.record_path).read()
    if record is None and not difference:
        raise errors.RunMismatch(
            f"--state-dir {state.path} was joining {current}, the run of this file, and nobody "
            "announces it",
            hint="start again once a peer of it can be reached, as with --initial-peers ADDRESS; "
            "--new-run founds a second run",
        )
    is_finished = record is not None and record.tip.round >= run.run.rounds
    if difference and not is_finished:
        raise errors.RunMismatch(
            f"--state-dir {state.path} is in {current}, which is not finished, and not the run of "
            f"this file: {difference}",
            hint=f"swarm-peer --state-dir {state.path} --run-id {current} resumes it; "
            "--new-run founds a second run",
        )


def with_way_back(
    error: errors.NobodyReachable | errors.RunMismatch,
    wanted: Wanted,
    begun: str | None,
    state: StateDirectory,
) -> errors.SwarmError:
    """The error of a failed join, with a hint how to resume earlier runs of this peer.

    Args:
        error: raised by the attempt.
        wanted: the request, which may name a run.
        begun: the run on disk that was to be joined, if there is one.
        state: the state directory.
    """
    others = [run for run in state.run_ids if run != begun]
    if begun and others and not (wanted.run or wanted.run_id):
        hint = f"this peer was joining {begun}; --run-id {others[0]} resumes the run before"
        if len(others) > 1:
            hint = f"this peer was joining {begun}; --run-id resumes {', '.join(others)}"
        error.hint = f"{error.hint}; {hint}" if error.hint else hint
    return error


def path_of_key(given: str | None, state: StateDirectory) -> Path:
    """Path of the peer's key. Refuses a missing key if there are runs on disk.

    With a new key this peer would be a stranger in these runs, without vote, experts, or the right
    to invite.

    Args:
        given: the path that the person named; None for the file in the state directory.
        state: the state directory.

    Raises:
        StateError: there is no key, although there is a record of a run.
    """
    path = Path(given or state.identity_path).expanduser()
    try:
        is_missing = not path.exists()
    except OSError:  # reading it reports the error
        is_missing = False
    if is_missing and state.run_ids:
        raise errors.StateError(
            f"identity file {path} is missing, and --state-dir {state.path} has "
            f"runs of that identity: {', '.join(state.run_ids)}",
            hint="put the key back, or name it with --identity-path; without it, start as a new "
            "peer with a new --state-dir",
        )
    return path
