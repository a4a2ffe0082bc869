"""One peer of a local swarm: a process that may be stopped, killed and started again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import Any, BinaryIO

from swarm.errors import SwarmError
from swarm.protocol.records.life_events import EventReader

JOIN_LINE = re.compile(r"^swarm-peer --initial-peers (\S+)(?: --invitation (\S+))?$", re.MULTILINE)
START_DEADLINE_S = 60.0
POLL_S = 0.1
Event = dict[str, Any]


def launch(command: list[str], log: BinaryIO, environment: dict[str, str]) -> Popen[bytes]:
    """Starts a process in its own session, with a log as output and no input."""
    return Popen(
        command, stdin=DEVNULL, stdout=log, stderr=STDOUT, env=environment, start_new_session=True
    )


@dataclass
class LocalPeer:
    """One peer process, which may be killed and started again with the same state.

    Attributes:
        index: number of the peer in the swarm.
        folder: state directory of the peer.
        arguments: arguments of the next start. They may be replaced while no process runs.
        environment: variables added to those of this process.
        program: module that is run.
        prefix: the beginning of the command, for example to run in a network namespace.
        process: the process of the present or the last life.
    """

    index: int
    folder: Path
    arguments: list[str]
    environment: Mapping[str, str]
    program: str = "peers.peer"
    prefix: Sequence[str] = ()
    process: Popen[bytes] | None = None
    _sent: set[int] = field(default_factory=set)
    """Signals that this object sent to the peer's present or last life."""
    _log_start: int = 0
    _events: list[Event] = field(default_factory=list)
    _reader: EventReader = field(default_factory=EventReader)
    _events_read: tuple[Path, int] | None = None
    """The file whose first bytes are in `_events`, and the number of these bytes."""

    @property
    def log_path(self) -> Path:
        """The log of everything that the process printed in all its lives."""
        return self.folder.with_suffix(".log")

    def start(self) -> None:
        """Starts the process."""
        assert not self.alive, f"peer {self.index} runs already"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sent.clear()
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            command = [*self.prefix, sys.executable, "-m", self.program, *self.arguments]
            self.process = launch(command, log, {**os.environ, **self.environment})

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The exit code of the last life. None while the process runs."""
        return self.process.poll() if self.process else None

    @property
    def own_end(self) -> int | None:
        """The exit code of a life that no signal of this object ended. None otherwise.

        A negative code is the signal of a crash, or of the system when memory is short.
        """
        code = self.exit_code
        return None if code is None or -code in self._sent else code

    @property
    def stands_still(self) -> bool:
        """Whether the process was stopped by a signal."""
        if not self.process or not self.alive:
            return False
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    @property
    def last_address(self) -> str | None:
        """The newest address that any life printed. None if none did."""
        if not self.log_path.exists():
            return None
        found = JOIN_LINE.findall(self.log_path.read_text(errors="replace"))
        return str(found[-1][0]) if found else None

    def join_address(self, deadline_s: float = START_DEADLINE_S) -> str:
        """The address that the present life printed. Raises like `join_options`."""
        return self.join_options(deadline_s)[1]

    def join_options(self, deadline_s: float = START_DEADLINE_S) -> list[str]:
        """The options of the line that the present life printed for others.

        While the peer founds a run, they contain the invitation with which its peers are counted.

        Raises:
            SwarmError: the process ended, or printed no line in time.
        """
        end_s = time.monotonic() + deadline_s
        while time.monotonic() < end_s:
            match = JOIN_LINE.search(self.output())
            if match:
                invited = ["--invitation", match[2]] if match[2] else []
                return ["--initial-peers", match[1], *invited]
            if not self.alive:
                raise SwarmError(f"peer {self.index} ended: {self.output()[-2000:]}")
            time.sleep(POLL_S)
        raise SwarmError(f"peer {self.index} printed no address within {deadline_s:.0f} s")

    def output(self) -> str:
        """What the present life printed."""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process, if it runs."""
        if self.process and self.alive:
            self._sent.add(number)
            self.process.send_signal(number)

    def pause(self) -> None:
        """Stops all processes of the peer. Returns when they stand still."""
        for pid in self._pids():
            _signal(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Lets the peer's processes run again."""
        for pid in reversed(self._pids()):
            _signal(pid, signal.SIGCONT)

    def _pids(self) -> list[int]:
        """The peer's process and the children that it started."""
        if not self.process or not self.alive:
            return []
        return [self.process.pid, *children_of(self.process.pid)]

    def kill(self) -> None:
        """Kills the process (kill -9) and waits for its end. Ignores a peer that never ran."""
        self.send(signal.SIGKILL)
        if self.process:
            self.wait(10.0)

    def wait(self, timeout_s: float) -> int:
        """Waits for the end of the process. Returns its exit code.

        Raises:
            SwarmError: it still runs after the time-out.
        """
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except TimeoutExpired as error:
            raise SwarmError(f"peer {self.index} still runs after {timeout_s:.0f} s") from error

    def events(self) -> list[Event]:
        """The peer's history of its present run over all its lives, oldest first.

        Only the events added since the last call are read. A line that is being written, or that a
        kill cut short, is left out.
        """
        current = self.folder / "current_run"
        if not current.exists():
            return []
        path = self.folder / "runs" / current.read_text().strip() / "events.jsonl"
        if not path.exists():
            return []
        if self._events_read is None or self._events_read[0] != path:
            self._events, self._events_read = [], (path, 0)
            self._reader = EventReader()
        if path.stat().st_size < self._events_read[1]:  # the earlier file became too large
            self._events_read = (path, 0)
        with path.open("rb") as file:
            file.seek(self._events_read[1])
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            self._events_read = (path, self._events_read[1] + len(whole) + 1)
            self._events += [e for line in whole.split(b"\n") if (e := self._event(line))]
        return list(self._events)

    def _event(self, line: bytes) -> Event | None:
        try:
            return self._reader.read(line)
        except ValueError:
            return None


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def children_of(parent: int, program: str = "") -> list[int]:
    """Running children of a process. If a program is named, only children that run this program."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after_name = path.read_text().rpartition(")")
        except OSError:  # it ended meanwhile
            continue
        if int(after_name.split()[1]) == parent and program in before:
            found.append(int(path.parent.name))
    return found
