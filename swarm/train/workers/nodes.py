"""The controller's side of workers on other machines: their connections and commands.

Each node has an agent (`agent.py`), which dials the controller and waits to be called. A connection
serves one `Crew`. When either side or a fault closes the connection, the node's workers end.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

import torch

from swarm.background import SYSTEM, SupervisedThread, System
from swarm.errors import BadMessage, ConfigError, OutOfMemory, WorkersFailed
from swarm.train.engine.ranks import meeting_at
from swarm.train.engine.tensor_file import TensorFile
from swarm.train.workers import controller_wire
from swarm.train.workers.exchange import Closed, Message, opened
from swarm.train.workers.members import Lost, Member
from swarm.train.workers.roster import Node, Wanted, node_of, objection, seats, size_of
from swarm.version import __version__

logger = logging.getLogger(__name__)

MAX_STRANGERS = 16
"""Most connections that are asked for the key at a time. A further connection ends the oldest
connection of the host with most. A node with the key answers at once, so it is not affected."""
GIVES_WAY_S = 1.0
"""Seconds within which an ended connection makes room for another."""
MAX_WAITING = 256
"""Most nodes that wait to be called. A further node replaces the oldest."""
LOOK_S = 1.0
SAY_EVERY_S = 15.0
COMPLAIN_EVERY_S = 60.0


PUBLIC = (
    "it dials from a public address: name a public address of this machine in --workers-from to "
    "let such nodes in"
)


def versions() -> tuple[str, str]:
    """The versions that all machines of a peer must share: swarm and torch."""
    return __version__, torch.__version__


@dataclass(frozen=True)
class Called:
    """The part of a crew that is on other machines.

    Attributes:
        members: nodes and their ranks.
        interface: network interface by which this machine reaches them. None leaves the choice to
            torch.
        meeting: where workers of this machine find the others.
        store: the store of torch.distributed at the meeting.
    """

    members: list[Member]
    interface: str | None
    meeting: Message
    store: object


@dataclass(frozen=True)
class _Waiting:
    """A node that holds the key and waits to be called."""

    name: str
    wire: controller_wire.Wire
    node: Node


def listen(host: str, port: int) -> socket.socket:
    """A socket that nodes can dial. Port 0 takes a free one.

    Raises:
        ConfigError: nobody can listen there.
    """
    try:
        return socket.create_server((host, port), backlog=MAX_STRANGERS)
    except OSError as error:
        raise ConfigError(
            f"compute.workers_from: cannot listen on {host}:{port}: {error}",
            hint="it is an address of this machine, with a port that is free",
        ) from error


def is_public(host: str) -> bool:
    """Whether an address is public. False for a host name."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


class Nodes:
    """Listens for nodes. Separate threads admit nodes.

    Attributes:
        port: the port on which it listens.
    """

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        wanted: Wanted,
        *,
        device: str,
        wait_s: float,
        remaining_s: Callable[[], float] = lambda: inf,
        system: System = SYSTEM,
    ) -> None:
        """Begins to listen.

        Args:
            address: host and port. Port 0 takes a free one.
            key: the key that nodes must hold.
            wanted: the numbers of workers.
            device: the device on which workers compute.
            wait_s: longest wait of `called` for all workers.
            remaining_s: most seconds of waiting from now on. 0 or less once a leaving peer must
                end.
            system: starts its threads.

        Raises:
            ConfigError: nobody can listen there.
        """
        self._key, self._wanted, self._device, self._wait_s = key, wanted, device, wait_s
        self._remaining_s = remaining_s
        self._listener = listen(*address)
        self._host, self.port = self._listener.getsockname()[:2]
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._strangers = threading.BoundedSemaphore(MAX_STRANGERS)
        self._asked: dict[socket.socket, str] = {}
        """Hosts of the connections that are asked for the key, the oldest first."""
        self._takes_public = is_public(self._host)
        self._refusals, self._complained_s = 0, float("-inf")
        self._system, self._thread = system, SupervisedThread("nodes", self._listen, system)
        self._thread.start()

    def called(self) -> Called:
        """Waits for enough nodes, and takes them out of the waiting ones.

        Raises:
            WorkersFailed: too few nodes have come in time.
        """
        began_s = said_s = time.monotonic()
        with self._changed:
            while True:
                self._forget_closed()
                now_s = time.monotonic()
                left_s = min(began_s + self._wait_s - now_s, self._remaining_s())
                found = seats(self._nodes(), self._wanted, is_late=left_s <= 0)
                if found is not None:
                    break
                there = sum(node.workers for node in self._nodes())
                if left_s <= 0:
                    raise _too_few(there, self._wanted, now_s - began_s)
                if now_s >= said_s:
                    said_s = now_s + SAY_EVERY_S
                    logger.info(
                        "waiting for workers of other machines: %d of %d are there (%d nodes), "
                        "%.0f s more",
                        there,
                        self._wanted.elsewhere,
                        len(self._waiting),
                        left_s,
                    )
                self._changed.wait(min(LOOK_S, left_s))
            chosen = [
                (each, ranks) for each, ranks in zip(self._waiting, found, strict=True) if ranks
            ]
            self._waiting = [
                each for each, ranks in zip(self._waiting, found, strict=True) if not ranks
            ]
        return self._begun(chosen)

    def has_more(self, size: int, age_s: float) -> bool:
        """Whether a crew of fewer workers than wanted is worth restarting with more.

        Args:
            size: size of the crew.
            age_s: seconds for which it has computed. A crew younger than `wait_s` is never
                restarted.
        """
        if age_s < self._wait_s or size == self._wanted.here + self._wanted.elsewhere:
            return False
        with self._changed:
            self._forget_closed()
            there = size + sum(node.workers for node in self._nodes())
        return size_of(there, self._wanted, is_late=True) > size

    def close(self) -> None:
        """Stops listening, and closes the connections of waiting nodes."""
        self._thread.stopping.set()
        with contextlib.suppress(OSError):  # it is closed already
            # A thread in accept() keeps the socket open until the socket is shut down.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            for each in self._waiting:
                each.wire.close()
            self._waiting = []

    def _begun(self, chosen: Sequence[tuple[_Waiting, range]]) -> Called:
        elsewhere = sum(len(ranks) for _, ranks in chosen)
        if elsewhere < self._wanted.elsewhere:
            logger.warning(
                "after %.0f s only %d of %d workers of other machines are used: sums are added up "
                "in other blocks until all are back",
                self._wait_s,
                elsewhere,
                self._wanted.elsewhere,
            )
        for each, ranks in chosen:
            logger.info("workers %d to %d: on %s", ranks[0], ranks[-1], each.name)
        here = "127.0.0.1" if not chosen else chosen[0][0].wire.socket.getsockname()[0]
        try:
            meeting = socket.create_server((self._host, 0))
            port = meeting.getsockname()[1]
            store = meeting_at(here, port, listening=meeting.detach())
        except (OSError, RuntimeError) as error:
            for each, _ in chosen:
                each.wire.close()
            raise Lost(f"workers cannot meet at {here}: {error}") from error
        members: list[Member] = [NodeWorkers(each.name, each.wire, r) for each, r in chosen]
        interface = controller_wire.interface_of(here) if chosen else "lo"
        return Called(members, interface, {"host": here, "port": port}, store)

    def _nodes(self) -> list[Node]:
        return [each.node for each in self._waiting]

    def _forget_closed(self) -> None:
        for each in [each for each in self._waiting if not each.wire.is_open()]:
            each.wire.close()
            self._waiting.remove(each)

    # ------------------------------------------------ strangers

    def _listen(self) -> None:
        while True:
            try:
                end, address = self._listener.accept()
            except OSError:  # the listener is closed, or a connection ended before it was accepted
                if self._listener.fileno() < 0:
                    return
                time.sleep(LOOK_S)
                continue
            name = f"{address[0]}:{address[1]}"
            if is_public(address[0]) and not self._takes_public:
                end.close()
                self._complain(name, controller_wire.Refused(PUBLIC))
            elif self._makes_room():
                self._begin_to_let_in(end, address[0], name)
            else:
                end.close()

    def _makes_room(self) -> bool:
        """Reserves a place for a connection that is asked for the key; may end the oldest."""
        if self._strangers.acquire(blocking=False):
            return True
        with self._changed:
            counts = Counter(self._asked.values())
            oldest = max(self._asked, key=lambda end: counts[self._asked[end]], default=None)
            if oldest is not None:
                with contextlib.suppress(OSError):  # it has just ended
                    oldest.shutdown(socket.SHUT_RDWR)
        return self._strangers.acquire(timeout=GIVES_WAY_S)

    def _begin_to_let_in(self, end: socket.socket, host: str, name: str) -> None:
        with self._changed:
            self._asked[end] = host
        try:
            self._system.start(partial(self._let_in, end, name), "nodes-handshake")
        except OutOfMemory as error:
            self._asked_no_more(end)
            end.close()
            self._complain(name, error)

    def _asked_no_more(self, end: socket.socket) -> None:
        with self._changed:
            del self._asked[end]
        self._strangers.release()

    def _let_in(self, end: socket.socket, name: str) -> None:
        try:
            wire = controller_wire.Wire(end)
            node = node_of(controller_wire.admit(wire, self._key))
            problem = objection(node, self._device, versions())
            wire.send({"refused": problem} if problem else {"welcome": True})
            if problem:
                raise controller_wire.Refused(problem)
        except (controller_wire.Refused, Closed, BadMessage, OSError) as error:
            end.close()
            self._complain(name, error)
        except Exception:
            end.close()
            logger.exception("a node at %s was not let in by a fault of this peer", name)
        else:
            with self._changed:
                self._forget_closed()
                self._waiting.append(_Waiting(name, wire, node))
                while len(self._waiting) > MAX_WAITING:
                    self._waiting.pop(0).wire.close()
                self._changed.notify_all()
        finally:
            self._asked_no_more(end)

    def _complain(self, name: str, why: Exception) -> None:
        """Logs refusals, at most once a minute."""
        with self._changed:
            self._refusals += 1
            if time.monotonic() < self._complained_s + COMPLAIN_EVERY_S:
                return
            count, self._refusals = self._refusals, 0
            self._complained_s = time.monotonic()
        logger.warning(
            "workers: refused %d connections, the last one from %s: %s", count, name, why
        )


class NodeWorkers(Member):
    """The ranks of one node, reached by its connection."""

    def __init__(self, name: str, wire: controller_wire.Wire, ranks: range) -> None:
        """Takes ownership of the connection."""
        self.ranks, self.socket = ranks, wire.socket
        self._name, self._wire = f"{name} (workers {ranks[0]} to {ranks[-1]})", wire
        self._answer: TensorFile | None = None

    def send(self, message: Message, file: TensorFile | None) -> None:
        """See `Member`. Also sends the bytes of tensors."""
        self._answer = None
        try:
            if file is None:
                self._wire.send(message)
            elif "tensors" in message:
                segments = controller_wire.segments_of(opened(file.file, message["tensors"]))
                self._wire.send(message, file.file.descriptor, segments)
            else:
                self._answer = file
                self._wire.send({**message, "answers": True})
        except Closed as error:
            raise Lost(f"{self._name} has disconnected: {error}") from error

    def receive(self) -> dict[int, Message]:
        """See `Member`. Writes tensors of the answers to the file for them."""
        answers: dict[int, Message] = {}
        try:
            self._wire.receive()
            while (found := self._wire.take()) is not None:
                answers |= self._answered(*found)
        except Closed as error:
            raise Lost(f"{self._name} has disconnected: {error}") from error
        except (BadMessage, OSError) as error:
            raise Lost(f"{self._name}: {error}") from error
        return answers

    def _answered(self, message: Message, segments: controller_wire.Segments) -> dict[int, Message]:
        if "lost" in message:
            raise Lost(f"{self._name}: {message['lost']}")
        rank, answer = message.get("rank"), message.get("answer")
        if type(rank) is not int or rank not in self.ranks or not isinstance(answer, dict):
            raise BadMessage("worker_wire", "an answer without a known worker")
        if segments:
            if self._answer is None:
                raise BadMessage("worker_wire", "tensors that were not requested")
            self._wire.fetch(self._answer.file.descriptor, segments)
        return {rank: answer}

    def kill(self) -> None:
        """See `Member`. The agent ends its workers."""
        self._wire.close()

    def end(self) -> None:
        """See `Member`. The node dials again when its workers have ended."""


def _too_few(there: int, wanted: Wanted, wait_s: float) -> WorkersFailed:
    least = f"a multiple of {wanted.unit}" if wanted.unit > 1 else "any number"
    return WorkersFailed(
        f"within {wait_s:.0f} s {there} of {wanted.elsewhere} workers of other machines came, "
        f"and with the {wanted.here} here it has to be {least}",
        hint="start swarm-worker on them; its log names the obstacle",
    )
