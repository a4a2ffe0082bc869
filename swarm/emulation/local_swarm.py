"""A whole swarm on this machine: one real process per peer, each with its own state directory.

Used by `swarm-local`, the demo, the drills and the tests. It ends only processes that it started.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.errors import StateError, SwarmError

JOIN_LINE = re.compile(r"^swarm-peer --initial-peers (\S+)$", re.MULTILINE)
START_DEADLINE_S = 60.0
POLL_S = 0.1
Event = dict[str, Any]


@dataclass
class LocalPeer:
    """One process; it may be killed and started again with the same state."""

    index: int
    folder: Path
    arguments: list[str]
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    _log_start: int = 0

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
                [sys.executable, "-m", "peers.peer", *self.arguments],
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

    def kill(self) -> None:
        """Kill -9, and waits until it is gone."""
        self.send(signal.SIGKILL)
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
        """The peer's history of its present run, oldest first; a line being written is left out."""
        current = self.folder / "current_run"
        if not current.exists():
            return []
        path = self.folder / "runs" / current.read_text().strip() / "events.jsonl"
        if not path.exists():
            return []
        lines = path.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines]


@dataclass
class LocalSwarm:
    """Peers of one run on this machine.

    Attributes:
        folder: holds peer-0, peer-1, ... and their logs.
        run_file: configuration of the run.
        num_peers: peers at the founding.
        options: further arguments of every peer, such as `--set`.
    """

    folder: Path
    run_file: Path
    num_peers: int
    options: Sequence[str] = ()
    founder_options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=lambda: {"OMP_NUM_THREADS": "1"})
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
        folder = self.folder / f"peer-{index}"
        common = ["--state-dir", str(folder), "--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
        common += ["--name", f"peer-{index}", "--data-index", str(index), *self.options]
        peer = LocalPeer(index, folder, [*arguments, *common], self.environment)
        self.peers.append(peer)
        peer.start()
        return peer

    def stop(self) -> None:
        """Ends all peers: first politely, then for certain."""
        for peer in self.peers:
            peer.send(signal.SIGCONT)
            peer.send(signal.SIGINT)
        deadline_s = time.monotonic() + 15
        for peer in self.peers:
            try:
                if peer.alive:
                    peer.wait(max(deadline_s - time.monotonic(), 0.1))
            except SwarmError:
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


def summary(swarm: LocalSwarm) -> dict[str, Any]:
    """What a script wants to know of a finished swarm; call it after `stop`.

    `tokens_lost` counts tokens of local steps whose shared result entered no manifest of the
    winning chain. `bytes_sent_per_peer_per_round` is the mean of the blob bytes sent between
    founding and end.
    """
    histories = [events for peer in swarm.peers if (events := peer.events())]
    last = [applied(events)[-1] for events in histories if applied(events)]
    chain = {event["digest"] for event in last}
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
        "tokens_lost": sum(event["tokens_lost"] for event in last),
        "bytes_sent_per_peer_per_round": round(sum(sent) / max(len(sent) * rounds, 1)),
        "merges": max((len(applied(events, "merge")) for events in histories), default=0),
        "digests_per_round": _digests_per_height(histories),
        "seconds": round(time.monotonic() - swarm.started_s, 1),
    }


def _digests_per_height(histories: Sequence[Sequence[Event]]) -> list[int]:
    """How many different digests peers had at each height; all ones if they agreed."""
    by_height: dict[int, set[str]] = {}
    for events in histories:
        for event in applied(events):
            by_height.setdefault(event["height"], set()).add(event["digest"])
    return [len(by_height[height]) for height in sorted(by_height)]
