"""A whole swarm on this machine: one real process per peer, each with its own state directory.

Used by `swarm-local`, the demo, the drills and the tests. It ends only processes that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.emulation.controls import INDEX_VARIABLE
from swarm.emulation.links import Links
from swarm.errors import StateError, SwarmError

JOIN_LINE = re.compile(r"^swarm-peer --initial-peers (\S+)$", re.MULTILINE)
START_DEADLINE_S = 60.0
POLL_S = 0.1
Event = dict[str, Any]


@dataclass
class LocalPeer:
    """One process; it may be killed and started again with the same state.

    Attributes:
        index: its number in the swarm.
        folder: its state directory.
        arguments: for the next start; they may be replaced while it does not run.
        environment: added to this process's own.
        program: module that is run.
        prefix: what the command begins with, as to run in a network namespace.
        process: the present or the last life.
    """

    index: int
    folder: Path
    arguments: list[str]
    environment: Mapping[str, str]
    program: str = "peers.peer"
    prefix: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None
    _log_start: int = 0
    _events: list[Event] = field(default_factory=list)
    _events_read: tuple[Path, int] | None = None
    """Whose first bytes are in `_events`."""

    @property
    def log_path(self) -> Path:
        """Everything the process printed, over all its lives."""
        return self.folder.with_suffix(".log")

    def start(self) -> None:
        """Starts the process."""
        assert not self.alive, f"peer {self.index} runs already"
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                [*self.prefix, sys.executable, "-m", self.program, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How the last life ended; None while it runs."""
        return self.process.poll() if self.process else None

    @property
    def stands_still(self) -> bool:
        """Whether the process was stopped by a signal."""
        if not self.process or not self.alive:
            return False
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    @property
    def last_address(self) -> str | None:
        """The newest address that any life printed, if one has."""
        if not self.log_path.exists():
            return None
        found = JOIN_LINE.findall(self.log_path.read_text(errors="replace"))
        return str(found[-1]) if found else None

    def join_address(self, deadline_s: float = START_DEADLINE_S) -> str:
        """The address that the present life printed.

        Raises:
            SwarmError: it ended, or printed none in time.
        """
        end_s = time.monotonic() + deadline_s
        while time.monotonic() < end_s:
            match = JOIN_LINE.search(self.output())
            if match:
                return match[1]
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
            self.process.send_signal(number)

    def pause(self) -> None:
        """All processes of the peer stand still; returns when they do."""
        for pid in self._pids():
            _signal(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """They go on."""
        for pid in reversed(self._pids()):
            _signal(pid, signal.SIGCONT)

    def _pids(self) -> list[int]:
        """The peer's process and the children that it started."""
        if not self.process or not self.alive:
            return []
        return [self.process.pid, *_children(self.process.pid)]

    def kill(self) -> None:
        """Kill -9, and waits until it is gone; nothing happens to one that never ran."""
        self.send(signal.SIGKILL)
        if self.process:
            self.wait(10.0)

    def wait(self, timeout_s: float) -> int:
        """Waits for the end of the process; returns its exit code.

        Raises:
            SwarmError: it still runs after the time-out.
        """
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise SwarmError(f"peer {self.index} still runs after {timeout_s:.0f} s") from error

    def events(self) -> list[Event]:
        """The peer's history of its present run over all its lives, oldest first.

        Only what was added since the last call is read. A line being written, or torn by a kill,
        is left out.
        """
        current = self.folder / "current_run"
        if not current.exists():
            return []
        path = self.folder / "runs" / current.read_text().strip() / "events.jsonl"
        if not path.exists():
            return []
        if self._events_read is None or self._events_read[0] != path:
            self._events, self._events_read = [], (path, 0)
        with path.open("rb") as file:
            file.seek(self._events_read[1])
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            self._events_read = (path, self._events_read[1] + len(whole) + 1)
            self._events += [e for line in whole.split(b"\n") if (e := _event(line))]
        return list(self._events)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _children(parent: int) -> list[int]:
    """Processes that a process started and that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(after_name[1]) == parent:
            found.append(int(path.parent.name))
    return found


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


@dataclass
class LocalSwarm:
    """Peers of one run on this machine.

    Attributes:
        folder: holds peer-0, peer-1, ... and their logs.
        run_file: configuration of the run.
        num_peers: peers at the founding.
        options: further arguments of every peer.
        founder_options: further arguments of the founder, such as `--set`.
        environment: added to that of every peer.
        program: module that every peer runs.
        links: the emulated network they are in; None for this machine's own.
        peers: those started so far.
        started_s: of the founding, by the monotonic clock.
    """

    folder: Path
    run_file: Path
    num_peers: int
    options: Sequence[str] = ()
    founder_options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: {"OMP_NUM_THREADS": "1"})
    program: str = "peers.peer"
    links: Links | None = None
    peers: list[LocalPeer] = field(default_factory=list)
    started_s: float = 0.0

    def __enter__(self) -> LocalSwarm:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Founds the run with all peers; returns when every process is up."""
        if (self.folder / "peer-0" / "runs").exists():
            raise StateError(
                f"{self.folder} holds an earlier swarm", hint="name an empty or new --state-dir"
            )
        self.started_s = time.monotonic()
        founding = ["--run", str(self.run_file), "--wait-for-peers", str(self.num_peers)]
        founder = self.add([*founding, *self.founder_options])
        address = founder.join_address()
        for _ in range(1, self.num_peers):
            self.add(["--initial-peers", address])

    def add(self, arguments: Sequence[str]) -> LocalPeer:
        """Starts one more peer with these arguments beside the common ones."""
        index = len(self.peers)
        environment = {**self.environment, INDEX_VARIABLE: str(index)}
        peer = LocalPeer(index, self.folder / f"peer-{index}", [], environment, self.program)
        self.peers.append(peer)
        self.restart(peer, arguments)
        return peer

    def restart(self, peer: LocalPeer, arguments: Sequence[str]) -> None:
        """Starts a peer on its old state with these arguments beside the common ones."""
        peer.prefix, host = self.links.place(peer.index) if self.links else ((), "127.0.0.1")
        common = ["--state-dir", str(peer.folder), "--host-maddrs", f"/ip4/{host}/tcp/0"]
        common += ["--name", f"peer-{peer.index}", "--data-index", str(peer.index), *self.options]
        peer.arguments = [*arguments, *common]
        peer.start()

    def stop(self) -> None:
        """Ends all peers: first politely, then for certain."""
        for peer in self.peers:
            peer.resume()
            peer.send(signal.SIGINT)
        deadline_s = time.monotonic() + 15
        for peer in self.peers:
            try:
                if peer.alive:
                    peer.wait(max(deadline_s - time.monotonic(), 0.1))
            except SwarmError:
                peer.kill()

    def kill(self) -> None:
        """Kill -9 of all peers."""
        for peer in self.peers:
            peer.send(signal.SIGKILL)
        for peer in self.peers:
            peer.kill()

    def wait_until(
        self,
        done: Callable[[LocalSwarm], bool],
        *,
        what: str,
        timeout_s: float,
        on_poll: Callable[[LocalSwarm], None] | None = None,
    ) -> None:
        """Waits until a condition holds.

        Raises:
            SwarmError: it does not hold in time, or a peer ended on its own with an error.
        """
        end_s = time.monotonic() + timeout_s
        while not done(self):
            if time.monotonic() > end_s:
                raise SwarmError(f"{what}: not within {timeout_s:.0f} s; logs in {self.folder}")
            for peer in self.peers:
                # A negative code is a signal: a drill killed it.
                if peer.exit_code is not None and peer.exit_code > 0:
                    raise SwarmError(
                        f"peer {peer.index} ended with status {peer.exit_code}: "
                        f"{peer.output()[-2000:]}"
                    )
            if on_poll:
                on_poll(self)
            time.sleep(POLL_S)

    def finished(self) -> bool:
        """Whether every living peer has finished the run."""
        living = [peer for peer in self.peers if peer.alive]
        return bool(living) and all(_finished(peer.events()) for peer in living)


def _finished(events: Sequence[Event]) -> bool:
    return any(event["event"] == "finished" for event in events)


def applied(events: Sequence[Event], *kinds: str) -> list[Event]:
    """The manifests that a peer applied, of these kinds (all, if none is given)."""
    return [e for e in events if e["event"] == "applied" and (not kinds or e["kind"] in kinds)]


def tokens_lost(events: Sequence[Event]) -> int:
    """Tokens whose shared result entered no manifest; a peer counts anew in each of its lives."""
    lost, counted = 0, 0
    for event in events:
        if event["event"] == "started":
            lost, counted = lost + counted, 0
        elif event["event"] == "applied":
            counted = event["tokens_lost"]
    return lost + counted


def summary(swarm: LocalSwarm, present: Collection[int] | None = None) -> dict[str, Any]:
    """What a script wants to know of a finished swarm; call it after `stop`.

    Args:
        swarm: whose peers have ended.
        present: peers that lived at the end, whose last manifests count; None means all.

    `tokens_lost` counts tokens of local steps whose shared result entered no manifest of the
    winning chain. `bytes_sent_per_peer_per_round` is the mean of the blob bytes sent between
    founding and end.
    """
    histories = [events for peer in swarm.peers if (events := peer.events())]
    last = [applied(events)[-1] for events in histories if applied(events)]
    counted = [peer for peer in swarm.peers if present is None or peer.index in present]
    ends_at = [applied(peer.events())[-1:] for peer in counted]
    chain = {event["digest"] for newest in ends_at for event in newest}
    losses = {
        event["round"]: event["val_loss"]
        for events in histories
        for event in events
        if event["event"] == "validation"
    }
    rounds = max((event["round"] for event in last), default=0)
    ends = [event for events in histories for event in events if event["event"] == "ended"]
    sent = [event["blobs_sent"] for event in ends]
    return {
        "run_id": next((e["run"] for events in histories for e in events if "run" in e), None),
        "peers": len(histories),
        "rounds": rounds,
        "val_loss_first": losses.get(min(losses)) if losses else None,
        "val_loss_last": losses.get(max(losses)) if losses else None,
        "manifest_digests": sorted(chain),
        "tokens_total": max((event["tokens"] for event in last), default=0),
        "tokens_lost": sum(tokens_lost(events) for events in histories),
        "bytes_sent_per_peer_per_round": round(sum(sent) / max(len(sent) * rounds, 1)),
        "merges": max((len(applied(events, "merge")) for events in histories), default=0),
        "digests_per_height": [len(found) for found in digests_by_height(histories).values()],
        "seconds": round(time.monotonic() - swarm.started_s, 1),
    }


def digests_by_height(histories: Sequence[Sequence[Event]]) -> dict[int, set[str]]:
    """The different digests that peers had at each height; one each if they agreed."""
    by_height: dict[int, set[str]] = {}
    for events in histories:
        # A peer killed between record and history starts from a tip that it never reported.
        for event in (e for e in events if e["event"] in ("applied", "started")):
            by_height.setdefault(event["height"], set()).add(event["digest"])
    return dict(sorted(by_height.items()))
