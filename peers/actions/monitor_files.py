"""The files of swarm-monitor: its own history, which it also writes, and peers' histories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from swarm import durable
from swarm.errors import ConfigError
from swarm.monitor import history
from swarm.monitor.replay import frames
from swarm.monitor.snapshot import Snapshot
from swarm.peer.machine.state_directory import current_run_of
from swarm.protocol.records.life_events import EventReader


class HistoryFile:
    """`--history FILE`: losses, merges, rounds and events, kept across restarts of the monitor."""

    def __init__(self, path: Path) -> None:
        """Reads the file, if there is one.

        Raises:
            ConfigError: the file exists and cannot be read.
        """
        self._path = path
        self._kept: history.Kept | None = None
        try:
            self._kept = history.decode_kept(path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--history {path}: {str(error).splitlines()[0]}",
                hint="name a file that swarm-monitor wrote, or a new one",
            ) from error

    def before(self, first: Snapshot) -> Snapshot | None:
        """The state of the run before the first look, according to the file."""
        return history.recalled(first, self._kept) if self._kept else None

    def keep(self, snapshot: Snapshot) -> None:
        """Rewrites the file if the snapshot has news.

        Raises:
            OSError: the file cannot be written.
        """
        kept = history.kept_of(snapshot)
        if kept != self._kept:
            durable.write_file(self._path, history.encode_kept(kept))
            self._kept = kept


class Earlier:
    """`--events FILE`: the rounds before the first look, from histories of peers."""

    def __init__(self, paths: Sequence[Path], kept: HistoryFile | None) -> None:
        """Reads the files. `kept` takes precedence over them, and saves what the monitor sees.

        Raises:
            ConfigError: a file is not a readable history of a peer, or the runs differ.
        """
        self._kept, named = kept, ", ".join(map(str, paths))
        try:
            lines = [line.decode(errors="replace") for path in paths for line in _lines(path)]
            self._earlier = history.earlier_of(lines)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--events {named}: {str(error).splitlines()[0]}",
                hint="name events.jsonl in STATE_DIR/runs/RUN_ID of peers of one run",
            ) from error
        self._named = named

    def before(self, first: Snapshot) -> Snapshot | None:
        """The state of the run before the first look, according to the files.

        Raises:
            ConfigError: the files are of another run.
        """
        run = self._earlier.run
        if run and first.run_id and run != first.run_id:
            raise ConfigError(
                f"--events {self._named}: they are of {run}, and this is {first.run_id}",
                hint="name those of this run, or the other run with --run-id",
            )
        known = self._kept.before(first) if self._kept else None
        return history.with_earlier(first, known, self._earlier)

    def keep(self, snapshot: Snapshot) -> None:
        """Saves the snapshot's history in the file of --history, if there is one."""
        if self._kept:
            self._kept.keep(snapshot)


class Replay:
    """`--replay STATE_DIR`: each look shows the next manifest. The last manifest stays."""

    refresh_s = 2.0

    def __init__(self, folder: Path, *, to_end: bool = False) -> None:
        """Reads the histories below the state directory of a peer or of swarm-local.

        With `to_end`, the first look is at the last manifest.

        Raises:
            StateError: there is no history.
            ConfigError: the history has no manifest, or is of another version.
        """
        found = folder.expanduser()
        peers = sorted(path.parent for path in found.glob("peer-*/current_run")) or [found]
        run_id, _ = current_run_of(peers[0], None)
        histories = {
            peer.name: list(_events(current_run_of(peer, run_id)[1].events_path)) for peer in peers
        }
        try:
            shown = list(frames(run_id, histories))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"--replay {folder}: a line of events.jsonl is of another version: {error}"
            ) from error
        if not shown:
            raise ConfigError(f"--replay {folder}: no manifest was applied yet")
        self._frames = iter(shown[-1:] if to_end else shown)
        self.before: Snapshot | None = None

    def look(self) -> Snapshot:
        """The next frame, or the last frame again."""
        self.before = next(self._frames, self.before)
        assert self.before is not None, "there is a first one"
        return self.before


def _lines(path: Path) -> list[bytes]:
    """The lines of a history that a person named, after those of its `older` file."""
    if not durable.older(path).exists():
        path.stat()
    return durable.read_lines(path)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The events in whole lines, since a kill may have cut a line short."""
    reader = EventReader()
    for line in durable.read_lines(path):
        try:
            found = reader.read(line)
        except ValueError:
            continue
        if "event" in found:
            yield found
