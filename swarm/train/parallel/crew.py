"""The worker processes of one `ParallelEngine`: started, asked, watched and ended together."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm import errors
from swarm.errors import HostileInput, SwarmError
from swarm.train.parallel.exchange import Channel, Closed, Message
from swarm.train.tensor_file import TensorFile

logger = logging.getLogger(__name__)

START_S = 300.0
"""Loading torch from a slow disk, and meeting the others, may take so long."""
END_S = 30.0
"""The system takes a killed process away at once, unless a driver holds it."""
SYMPTOM_S = 10.0
"""When one rank has failed the others wait for it in vain; what was the cause shows soon."""


class Lost(Exception):
    """Workers cannot go on: one has ended, is silent, or has no memory left.

    Attributes:
        is_memory: whether memory was short.
    """

    def __init__(self, message: str, *, is_memory: bool = False) -> None:
        super().__init__(message)
        self.is_memory = is_memory


@dataclass(frozen=True)
class Place:
    """Where workers compute.

    Attributes:
        size: number of workers.
        device: "cpu", or "cuda" for a GPU of its own for each.
        threads: CPU threads of each.
        backend: of torch.distributed; gloo also where several share a GPU.
    """

    size: int
    device: str = "cpu"
    threads: int = 1
    backend: str = "gloo"


class Crew:
    """Processes that compute together; to be used by one thread at a time.

    Attributes:
        place: where they compute.
        pids: of the processes, by rank.
    """

    def __init__(self, place: Place) -> None:
        """Starts them.

        Raises:
            Lost: they do not come up.
        """
        self.place = place
        self._folder = tempfile.TemporaryDirectory(prefix="swarm-workers-")
        self._workers: list[_Process] = []
        try:
            for _ in range(place.size):
                self._workers.append(_Process(place.threads))
            common = {
                "do": "begin",
                "size": place.size,
                "device": place.device,
                "backend": place.backend,
                "threads": place.threads,
                "rendezvous": str(Path(self._folder.name) / "rendezvous"),
            }
            messages = [common | {"rank": rank} for rank in range(place.size)]
            self._answers(messages, None, START_S)
        except OSError as error:
            self.end()
            raise Lost(f"no process can be started: {error}") from error
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """See the class."""
        return tuple(worker.process.pid for worker in self._workers)

    def ask(self, message: Message, file: TensorFile | None, within_s: float) -> Message:
        """Has all workers do the same.

        Args:
            message: what.
            file: tensors for all, or an empty one for those of the first one's answer.
            within_s: deadline.

        Returns:
            The first worker's answer, when all have answered.

        Raises:
            Lost: they are not to be asked again, but ended.
            SwarmError: as the workers raised it.
            RuntimeError: they failed by a bug of ours.
        """
        return self._answers([message] * len(self._workers), file, within_s)[0]

    def end(self) -> None:
        """Ends all processes at once; nothing may follow."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.channel.close()
            try:
                worker.process.wait(END_S)
            except subprocess.TimeoutExpired:
                logger.error("worker process %d does not end", worker.process.pid)
        self._folder.cleanup()

    def _answers(
        self, messages: Sequence[Message], file: TensorFile | None, within_s: float
    ) -> list[Message]:
        end_s = time.monotonic() + within_s
        answers: dict[int, Message] = {}
        with selectors.DefaultSelector() as selector:
            for rank, (worker, message) in enumerate(zip(self._workers, messages, strict=True)):
                worker.send(message, file, rank)
                selector.register(worker.channel.socket, selectors.EVENT_READ, rank)
            while len(answers) < len(messages):
                if any("failed" in answer for answer in answers.values()):
                    end_s = min(end_s, time.monotonic() + SYMPTOM_S)
                ready = selector.select(max(0.0, end_s - time.monotonic()))
                answers |= self._received([key.data for key, _ in ready])
                if not ready and time.monotonic() >= end_s:
                    raise Lost(_why_late(answers, len(messages), messages[0]["do"], within_s))
        for rank in sorted(answers):
            _raise_other(rank, answers[rank])
        return [answers[rank] for rank in sorted(answers)]

    def _received(self, ranks: Sequence[int]) -> dict[int, Message]:
        """The answers of those of these ranks that are whole by now."""
        answers = {}
        for rank in ranks:
            answer = self._workers[rank].receive(rank)
            if answer is not None:
                answers[rank] = answer
                _raise_memory(rank, answer)
        return answers


class _Process:
    """One worker and the socket to it."""

    def __init__(self, threads: int) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(START_S)
        root = str(Path(__file__).parents[3])  # where `swarm` lies
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        self.channel = Channel(ours)
        command = [sys.executable, "-P", "-m", "swarm.train.parallel.worker", str(theirs.fileno())]
        # Nothing but this machine is part of the exchange.
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}
        own |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **own},
                process_group=0,  # Ctrl+C is for the controller
            )
        except OSError:
            self.channel.close()
            raise
        finally:
            theirs.close()

    def send(self, message: Message, file: TensorFile | None, rank: int) -> None:
        try:
            self.channel.send(dict(message), file)
        except Closed as error:
            raise Lost(self._fate(rank)) from error

    def receive(self, rank: int) -> Message | None:
        """The answer, if it is whole by now; what the worker logs is logged here."""
        try:
            self.channel.receive()
        except Closed as error:
            raise Lost(self._fate(rank)) from error
        while (found := self.channel.take()) is not None:
            message, _ = found
            if "log" not in message:
                return message
            level, name, text = message["log"]
            logging.getLogger(name).log(level, "%s", text)
        return None

    def _fate(self, rank: int) -> str:
        try:
            code = self.process.wait(SYMPTOM_S)
        except subprocess.TimeoutExpired:
            return f"worker {rank} takes no commands"
        if code == -signal.SIGKILL:
            return f"worker {rank} was killed, perhaps by the system for lack of memory"
        return f"worker {rank} ended with status {code}"


def _why_late(answers: Mapping[int, Message], size: int, what: str, within_s: float) -> str:
    """Says which workers are silent, or which one has failed so that the others wait."""
    for rank, answer in answers.items():
        if "failed" in answer:
            return f"worker {rank} failed and the others wait: {answer['text']}"
    named = " and ".join(str(rank) for rank in range(size) if rank not in answers)
    return f"no answer to {what!r} from worker {named} within {within_s:.0f} s"


def _raise_memory(rank: int, answer: Message) -> None:
    """Raises Lost at once: the other ranks wait for this one."""
    if answer.get("failed") == "memory":
        raise Lost(f"worker {rank}: {answer['text']}", is_memory=True)


def _raise_other(rank: int, answer: Message) -> None:
    failed = answer.get("failed")
    if failed is None:
        return
    if failed == "disconnected":
        raise Lost(f"worker {rank} lost the others: {answer['text']}")
    if failed == "fault":
        raise RuntimeError(f"worker {rank} failed:\n{answer['text']}")
    kind: type[SwarmError] = getattr(errors, failed)
    if issubclass(kind, HostileInput):
        raise kind(answer["reason"], answer["text"])
    raise kind(answer["text"], hint=answer["hint"])
