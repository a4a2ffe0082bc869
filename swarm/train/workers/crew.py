"""The workers of one `ParallelEngine`: starting, calling, asking, watching and ending them."""

from __future__ import annotations

import selectors
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from swarm import errors
from swarm.errors import HostileInput, SwarmError, WorkersFailed
from swarm.train.engine.tensor_file import TensorFile
from swarm.train.workers.exchange import Message
from swarm.train.workers.members import START_S, SYMPTOM_S, Lost, Member, WorkerProcess
from swarm.train.workers.nodes import LOOK_S, Nodes

OVERTIME_S = 10.0
"""Limit of a question once the peer's time to leave is over; its last questions are short."""


@dataclass(frozen=True)
class Place:
    """The devices on which the workers of this machine compute.

    Attributes:
        size: number of workers on this machine.
        device: "cpu", or "cuda" with a separate GPU for each worker.
        threads: CPU threads of each worker.
        backend: the backend of torch.distributed; gloo on CPUs, and if several workers share a GPU.
    """

    size: int
    device: str = "cpu"
    threads: int = 1
    backend: str = "gloo"


class Crew:
    """Processes that compute together. Only one thread at a time may use it.

    Attributes:
        place: place of the workers of this machine.
        pids: process ids, by rank; on another node, an id is valid there only.
        is_starting: whether the workers are still catching up with the peer. Commands then end with
            the peer's time to leave. Later commands may exceed this time a little.
    """

    def __init__(
        self,
        place: Place,
        nodes: Nodes | None = None,
        remaining_s: Callable[[], float] = lambda: inf,
    ) -> None:
        """Starts the workers as soon as the nodes are there.

        Args:
            place: place of the workers of this machine.
            nodes: the nodes with workers for this peer. None for workers of this machine alone.
            remaining_s: most seconds that their start may take from now on. 0 or less once a
                leaving peer must end.

        Raises:
            Lost: the workers do not start.
            WorkersFailed: too few nodes come, or the peer must end before they have begun.
        """
        self.place, self._nodes, self._remaining_s = place, nodes, remaining_s
        self.is_starting = True
        self._folder = tempfile.TemporaryDirectory(prefix="swarm-workers-")
        self._members: list[Member] = []
        self._store: object = None  # the workers' meeting point, which must stay referenced
        try:
            called = nodes.called() if nodes else None
            self._members += called.members if called else []
            interface = called.interface if called else "lo"
            for rank in range(place.size):
                self._members.append(WorkerProcess(rank, place.threads, interface))
            self._members.sort(key=lambda member: member.ranks.start)
            self._size = sum(len(member.ranks) for member in self._members)
            common = {
                "do": "begin",
                "size": self._size,
                "device": place.device,
                "backend": place.backend,
                "threads": place.threads,
                "meeting": called.meeting if called else {"file": f"{self._folder.name}/meeting"},
            }
            self._store = called.store if called else None
            answers = self._answers([common | _own(each) for each in self._members], None, START_S)
            self.pids = tuple(answer["pid"] for answer in answers)
            self._began_s = time.monotonic()
        except OSError as error:
            self.end()
            raise Lost(f"no process can be started: {error}") from error
        except BaseException:
            self.end()
            raise

    def ask(self, message: Message, file: TensorFile | None, within_s: float) -> list[Message]:
        """Sends one command to all workers.

        Args:
            message: the command.
            file: tensors for all, which the message lists, or an empty file for tensors of the
                answer.
            within_s: deadline.

        Returns:
            The answers by rank.

        Raises:
            Lost: the workers cannot be asked any more, and must be ended.
            WorkersFailed: the peer must end, and the workers first.
            SwarmError: raised by the workers.
            RuntimeError: a bug in the workers.
        """
        return self._answers([message] * len(self._members), file, within_s)

    @property
    def may_grow(self) -> bool:
        """Whether waiting nodes would make a restarted crew larger."""
        age_s = time.monotonic() - self._began_s
        return self._nodes is not None and self._nodes.has_more(self._size, age_s)

    def end(self) -> None:
        """Ends all processes at once. No call may follow."""
        for member in self._members:
            member.kill()
        for member in self._members:
            member.end()
        self._store = None
        self._folder.cleanup()

    def _answers(
        self, messages: Sequence[Message], file: TensorFile | None, within_s: float
    ) -> list[Message]:
        """The answers by rank, from messages by member."""
        asked_s = time.monotonic()
        end_s = asked_s + within_s
        answers: dict[int, Message] = {}
        with selectors.DefaultSelector() as selector:
            for member, message in zip(self._members, messages, strict=True):
                member.send(message, file)
                selector.register(member.socket, selectors.EVENT_READ, member)
            while len(answers) < self._size:
                if any("failed" in answer for answer in answers.values()):
                    end_s = min(end_s, time.monotonic() + SYMPTOM_S)
                left_s = min(end_s - time.monotonic(), self._leaves_s(asked_s), LOOK_S)
                ready = selector.select(max(0.0, left_s))
                answers |= _received([key.data for key, _ in ready])
                if not ready and time.monotonic() >= end_s:
                    raise Lost(_why_late(answers, self._size, messages[0]["do"], within_s))
                if not ready and self._leaves_s(asked_s) <= 0:
                    does = "are still starting" if self.is_starting else "do not answer"
                    raise _left(does, _silent(answers, self._size, messages[0]["do"]))
        for rank in sorted(answers):
            _raise_other(rank, answers[rank])
        return [answers[rank] for rank in sorted(answers)]

    def _leaves_s(self, asked_s: float) -> float:
        """Seconds until a leaving peer stops waiting for the answers to a question."""
        remaining_s = self._remaining_s()
        if self.is_starting or remaining_s == inf:
            return remaining_s
        return max(remaining_s, asked_s + OVERTIME_S - time.monotonic())


def _own(member: Member) -> Message:
    """The number of a member's ranks, its first rank, and its number on this machine."""
    first = member.ranks.start
    return {"rank": first, "local": first, "count": len(member.ranks)}


def _received(members: Sequence[Member]) -> dict[int, Message]:
    """The complete answers of these members."""
    answers: dict[int, Message] = {}
    for member in members:
        answers |= member.receive()
    for rank, answer in answers.items():
        _raise_memory(rank, answer)
    return answers


def _why_late(answers: Mapping[int, Message], size: int, what: str, within_s: float) -> str:
    """Names the silent workers, or the failed worker for which the others wait."""
    for rank, answer in answers.items():
        if "failed" in answer:
            return f"worker {rank} failed and the others wait: {answer['text']}"
    return f"{_silent(answers, size, what)} within {within_s:.0f} s"


def _silent(answers: Mapping[int, Message], size: int, what: str) -> str:
    named = " and ".join(str(rank) for rank in range(size) if rank not in answers)
    return f"no answer to {what!r} from worker {named}"


def _left(does: str, silent: str) -> WorkersFailed:
    return WorkersFailed(
        f"this peer must end, and its workers {does}: {silent}",
        hint="the state directory is good; a longer --leave-timeout waits for them",
    )


def _raise_memory(rank: int, answer: Message) -> None:
    """Raises Lost at once, because the other ranks wait for this rank."""
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
