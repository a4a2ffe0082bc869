"""The members of a `Crew`: worker processes of this machine, and nodes with their own workers."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from swarm.train.engine.tensor_file import TensorFile
from swarm.train.workers.exchange import Channel, Closed, Message

logger = logging.getLogger(__name__)

START_S = 300.0
"""Longest time to load torch from a slow disk and to meet the others."""
END_S = 30.0
"""Longest wait for a killed process, which the system removes at once unless a driver holds it."""
SYMPTOM_S = 10.0
"""Longest wait for further answers after a rank has failed. The first failure may be only a
symptom, whose cause another rank reports within this time."""


class Lost(Exception):
    """Workers cannot continue: one has ended, is silent, or has no memory left.

    Attributes:
        is_memory: whether the cause is a lack of memory.
    """

    def __init__(self, message: str, *, is_memory: bool = False) -> None:
        super().__init__(message)
        self.is_memory = is_memory


class Member(ABC):
    """One or several ranks at the other end of a socket.

    Attributes:
        ranks: ranks of the member.
        socket: readable when there is something to `receive`.
    """

    ranks: range
    socket: socket.socket

    @abstractmethod
    def send(self, message: Message, file: TensorFile | None) -> None:
        """Sends a command to its ranks. Raises Lost."""

    @abstractmethod
    def receive(self) -> dict[int, Message]:
        """The complete answers, by rank. Raises Lost."""

    @abstractmethod
    def kill(self) -> None:
        """Kills its ranks without waiting for their end."""

    @abstractmethod
    def end(self) -> None:
        """Waits for killed processes, and closes the socket."""


class WorkerProcess(Member):
    """A worker on this machine and the socket to it."""

    def __init__(self, rank: int, threads: int, interface: str | None = "lo") -> None:
        """Starts the process.

        Args:
            rank: rank of the worker.
            threads: CPU threads of the worker.
            interface: network interface for meeting the others. None leaves the choice to torch.

        Raises:
            OSError: the system starts no process.
        """
        self.ranks = range(rank, rank + 1)
        ours, theirs = socket.socketpair()
        ours.settimeout(START_S)
        self.socket = ours
        self._channel = Channel(ours)
        command = [
            sys.executable,
            "-P",
            "-m",
            "swarm.train.workers.worker_process",
            str(theirs.fileno()),
        ]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_environment(threads, interface)},
                process_group=0,  # Ctrl+C is for the controller
            )
        except OSError:
            self._channel.close()
            raise
        finally:
            theirs.close()

    def send(self, message: Message, file: TensorFile | None) -> None:
        """See `Member`."""
        try:
            self._channel.send(dict(message), file)
        except Closed as error:
            raise Lost(self._fate()) from error

    def receive(self) -> dict[int, Message]:
        """See `Member`. Also logs the worker's log records."""
        try:
            self._channel.receive()
        except Closed as error:
            raise Lost(self._fate()) from error
        while (found := self._channel.take()) is not None:
            message, _ = found
            if "log" not in message:
                return {self.ranks.start: message}
            level, name, text = message["log"]
            logging.getLogger(name).log(level, "%s", text)
        return {}

    def kill(self) -> None:
        """See `Member`."""
        self.process.kill()

    def end(self) -> None:
        """See `Member`."""
        self._channel.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            logger.error("worker process %d does not end", self.process.pid)

    def _fate(self) -> str:
        rank = self.ranks.start
        try:
            code = self.process.wait(SYMPTOM_S)
        except subprocess.TimeoutExpired:
            return f"worker {rank} takes no commands"
        if code == -signal.SIGKILL:
            return f"worker {rank} was killed, perhaps by the system for lack of memory"
        return f"worker {rank} ended with status {code}"


def _environment(threads: int, interface: str | None) -> dict[str, str]:
    root = str(Path(__file__).parents[3])  # the folder of `swarm`
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    own = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    if interface == "lo":
        # The exchange stays on this machine, whatever a person has set.
        own |= dict.fromkeys(names, interface)
    elif interface is not None:
        own |= {name: os.environ.get(name, interface) for name in names}
    return own
