"""A whole swarm on this machine: one real process per peer, each with its own state directory.

Used by `swarm-local`, the demo, the drills and the tests. It ends only processes that it has
started.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.emulation.controls import INDEX_VARIABLE
from swarm.emulation.links import Links
from swarm.emulation.local_peer import POLL_S, Event, LocalPeer
from swarm.errors import StateError, SwarmError


@dataclass
class LocalSwarm:
    """Peers of one run on this machine.

    Attributes:
        folder: holds peer-0, peer-1, ... and their logs.
        run_file: configuration of the run.
        num_peers: peers at the founding.
        options: further arguments of every peer.
        own_options: further arguments of single peers, by index.
        founder_options: further arguments of the founder, such as `--set`.
        environment: variables added to those of every peer.
        program: module that every peer runs.
        links: the emulated network of the peers. None for this machine's own network.
        peers: the peers started so far.
        started_s: time of the founding, by the monotonic clock.
    """

    folder: Path
    run_file: Path
    num_peers: int
    options: Sequence[str] = ()
    own_options: Callable[[int], Sequence[str]] = lambda _: ()
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
        """Founds the run with all peers. Returns when every process is up."""
        if (self.folder / "peer-0" / "runs").exists():
            raise StateError(
                f"{self.folder} holds an earlier swarm", hint="name an empty or new --state-dir"
            )
        self.started_s = time.monotonic()
        founding = ["--run", str(self.run_file), "--wait-for-peers", str(self.num_peers)]
        founder = self.add([*founding, *self.founder_options])
        join = founder.join_options()
        for _ in range(1, self.num_peers):
            self.add(join)

    def add(self, arguments: Sequence[str]) -> LocalPeer:
        """Starts a further peer with these arguments and the common arguments."""
        index = len(self.peers)
        environment = {**self.environment, INDEX_VARIABLE: str(index)}
        peer = LocalPeer(index, self.folder / f"peer-{index}", [], environment, self.program)
        self.peers.append(peer)
        self.restart(peer, arguments)
        return peer

    def restart(self, peer: LocalPeer, arguments: Sequence[str]) -> None:
        """Starts a peer on its old state with these arguments and the common arguments."""
        listen = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
        if self.links:
            peer.prefix, listen = self.links.place(peer.index)
        common = ["--state-dir", str(peer.folder), *listen]
        common += ["--name", f"peer-{peer.index}", *self.options, *self.own_options(peer.index)]
        peer.arguments = [*arguments, *common]
        peer.start()

    def stop(self) -> None:
        """Ends all peers: first with a request, then with kill -9."""
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
        """Kills all peers (kill -9)."""
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
            SwarmError: the condition does not hold in time, or not when a peer ended on its own
                with an error.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            # Read before the condition is checked, which may wait for a peer's end.
            failed = [(peer, code) for peer in self.peers if (code := peer.own_end)]
            if done(self):
                return
            for peer, code in failed:
                raise SwarmError(f"peer {peer.index} {_how_ended(code)}: {peer.output()[-2000:]}")
            if time.monotonic() > end_s:
                raise SwarmError(f"{what}: not within {timeout_s:.0f} s; logs in {self.folder}")
            if on_poll:
                on_poll(self)
            time.sleep(POLL_S)

    def finished(self) -> bool:
        """Whether every living peer has finished the run."""
        living = [peer for peer in self.peers if peer.alive]
        return bool(living) and all(_finished(peer.events()) for peer in living)


def _how_ended(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    hint = " (by hand, or by the system, as memory was short)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


def _finished(events: Sequence[Event]) -> bool:
    return any(event["event"] == "finished" for event in events)


def applied(events: Sequence[Event], *kinds: str) -> list[Event]:
    """The manifests that a peer applied, of these kinds (of all kinds if none is given)."""
    return [e for e in events if e["event"] == "applied" and (not kinds or e["kind"] in kinds)]


def tokens_lost(events: Sequence[Event]) -> int:
    """Tokens whose shared result entered no manifest. Each life of a peer counts from zero."""
    lost, counted = 0, 0
    for event in events:
        if event["event"] == "started":
            lost, counted = lost + counted, 0
        elif event["event"] in ("applied", "ended"):
            counted = event["tokens_lost"]
    return lost + counted


def bytes_sent(events: Sequence[Event]) -> int:
    """Blob bytes that a peer sent in all its lives, as its history says."""
    before, life = 0, 0
    for event in events:
        if event["event"] == "started":
            before, life = before + life, event["blobs_sent"]
        elif event["event"] == "applied":
            life += event["blob_bytes_sent"]
        elif event["event"] == "ended":
            life = event["blobs_sent"]
    return before + life


def summary(swarm: LocalSwarm, present: Collection[int] | None = None) -> dict[str, Any]:
    """The facts of a finished swarm that scripts use. Call it after `stop`.

    Args:
        swarm: a swarm whose peers have ended.
        present: peers that lived at the end, whose last manifests count. None: all peers.

    `tokens_lost` counts tokens of local steps whose shared result entered no manifest of the
    winning chain. `bytes_sent_per_peer_per_round` is the mean of the blob bytes sent between
    founding and end. Bytes that a life sent after its last round count only if it ended in order.
    """
    histories = [events for peer in swarm.peers if (events := peer.events())]
    last = [applied(events)[-1] for events in histories if applied(events)]
    counted = [peer for peer in swarm.peers if present is None or peer.index in present]
    ends_at = [applied(peer.events())[-1:] for peer in counted]
    chain = {event["digest"] for newest in ends_at for event in newest}
    measured = {
        event["round"]: event
        for events in histories
        for event in events
        if event["event"] == "validation"
    }
    first, newest = (measured[at(measured)] for at in (min, max)) if measured else ({}, {})
    rounds = max((event["round"] for event in last), default=0)
    sent = sum(bytes_sent(events) for events in histories)
    return {
        "run_id": next((e["run"] for events in histories for e in events if "run" in e), None),
        "peers": len(histories),
        "rounds": rounds,
        "val_loss_first": first.get("val_loss"),
        "val_loss_last": newest.get("val_loss"),
        "bits_per_byte_first": first.get("bits_per_byte"),
        "bits_per_byte_last": newest.get("bits_per_byte"),
        "manifest_digests": sorted(chain),
        "tokens_total": max((event["tokens"] for event in last), default=0),
        "tokens_lost": sum(tokens_lost(events) for events in histories),
        "bytes_sent_per_peer_per_round": round(sent / len(histories) / rounds) if rounds else None,
        "merges": max((len(applied(events, "merge")) for events in histories), default=0),
        "digests_per_height": [len(found) for found in digests_by_height(histories).values()],
        "seconds": round(time.monotonic() - swarm.started_s, 1),
    }


def digests_by_height(histories: Sequence[Sequence[Event]]) -> dict[int, set[str]]:
    """The different digests that peers had at each height: one for each height if they agreed."""
    by_height: dict[int, set[str]] = {}
    for events in histories:
        # A peer killed between record and history starts from a tip that it never reported.
        for event in (e for e in events if e["event"] in ("applied", "started")):
            by_height.setdefault(event["height"], set()).add(event["digest"])
    return dict(sorted(by_height.items()))
