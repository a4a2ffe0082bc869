"""The program on a node: starts workers for its controller, and forwards messages both ways.

Workers work as on the peer's machine, because they use a socket and files of their own machine. The
agent keeps the controller's tensors once for all workers, in a file without a name. When either
side ends the connection, the agent kills the workers and dials again.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import BadMessage, ConfigError, StateError
from swarm.train.engine.tensor_file import TensorFile
from swarm.train.workers import controller_wire
from swarm.train.workers.exchange import Closed, Message, opened
from swarm.train.workers.members import Lost, WorkerProcess
from swarm.train.workers.roster import Node, pause_s

logger = logging.getLogger(__name__)

GONE_S = 10.0
"""After this long without a connection, a served controller counts as ended."""
SAY_EVERY_S = 60.0


@dataclass(frozen=True)
class Agent:
    """Serves a controller on a node.

    Attributes:
        controller: host and port.
        key: the key that both hold.
        node: the hardware and versions of this node.
        local: GPU of the agent's only worker. None: the workers get GPUs from 0 on.
        folder: for tensors of the controller. None for the system's folder for temporary files.
    """

    controller: tuple[str, int]
    key: bytes
    node: Node
    local: int | None = None
    folder: Path | None = None

    def serve(self, *, once: bool) -> None:
        """Serves the controller, one connection after another.

        Args:
            once: whether to return after a served controller has disconnected. Otherwise it never
                returns.

        Raises:
            ConfigError: the controller refuses this node, or the address is no controller.
        """
        failures, said_s = 0, float("-inf")
        served_s: float | None = None
        while True:
            try:
                wire = self._dial()
            except (OSError, Closed) as error:
                now_s = time.monotonic()
                if once and served_s is not None and now_s > served_s + GONE_S:
                    logger.info("the controller has ended")
                    return
                if now_s > said_s + SAY_EVERY_S:
                    said_s = now_s
                    logger.info("waiting for the controller at %s: %s", self._name, error)
                failures += 1
            else:
                self._serve_one(wire)
                served_s, failures = time.monotonic(), 0
            time.sleep(pause_s(failures))

    @property
    def _name(self) -> str:
        return f"{self.controller[0]}:{self.controller[1]}"

    def _dial(self) -> controller_wire.Wire:
        """Raises OSError or Closed if nobody answers, and ConfigError as `serve`."""
        wire = controller_wire.Wire(
            socket.create_connection(self.controller, timeout=controller_wire.HANDSHAKE_S)
        )
        try:
            controller_wire.introduce(wire, self.key, self.node.message())
            answer = wire.wait(controller_wire.HANDSHAKE_S)
            if "refused" in answer:
                raise controller_wire.Refused(str(answer["refused"])[:500])
        except (controller_wire.Refused, BadMessage) as error:
            wire.close()
            hint = "both need the same key file, swarm and torch, and the port of --workers-from"
            raise ConfigError(
                f"no controller for this node at {self._name}: {error}", hint=hint
            ) from error
        except BaseException:
            wire.close()
            raise
        return wire

    def _serve_one(self, wire: controller_wire.Wire) -> None:
        """Serves until the connection or a worker ends."""
        logger.info("a node of the peer at %s; its workers begin when all are there", self._name)
        session = _Session(self, wire)
        try:
            session.run()
        except Closed as error:
            logger.info("the controller has closed the connection: %s", error)
        except (Lost, StateError, BadMessage, OSError) as error:
            logger.warning("%s", error)
            with contextlib.suppress(Closed):
                wire.send({"lost": str(error)[:2000]})
        finally:
            session.end()
            wire.close()


class _Session:
    """One connection and the workers that serve it."""

    def __init__(self, agent: Agent, wire: controller_wire.Wire) -> None:
        self._agent, self._wire = agent, wire
        self._workers: list[WorkerProcess] = []
        self._answer: TensorFile | None = None
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Forwards messages. Ends with Closed, Lost, StateError, BadMessage or OSError."""
        self._selector.register(self._wire.socket, selectors.EVENT_READ, None)
        self._obey_all()  # the first command may have come with the greeting
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._pass_back(key.data)
                else:
                    self._wire.receive()
                    self._obey_all()

    def end(self) -> None:
        """Kills the workers and waits until they have ended."""
        self._selector.close()
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.end()

    def _obey_all(self) -> None:
        while (found := self._wire.take()) is not None:
            self._obey(*found)

    def _obey(self, message: Message, segments: controller_wire.Segments) -> None:
        if message["do"] == "begin":
            self._begin(message)
            return
        file = None
        self._answer = None
        if "tensors" in message:
            file = TensorFile.temporary(self._agent.folder)
            self._wire.fetch(file.file.descriptor, segments)
        elif message.pop("answers", False):
            file = self._answer = TensorFile.temporary(self._agent.folder)
        for worker in self._workers:
            worker.send(message, file)

    def _begin(self, message: Message) -> None:
        count, first = message["count"], message["rank"]
        if not 1 <= count <= self._agent.node.workers or self._workers:
            raise BadMessage("worker_wire", f"{count} workers are asked for")
        interface = controller_wire.interface_of(self._wire.socket.getsockname()[0])
        meeting = {"host": self._wire.socket.getpeername()[0], "port": message["meeting"]["port"]}
        for index in range(count):
            worker = WorkerProcess(first + index, message["threads"], interface)
            self._workers.append(worker)
            self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        for index, worker in enumerate(self._workers):
            local = index if self._agent.local is None else self._agent.local
            own = {"rank": first + index, "local": local, "meeting": meeting}
            worker.send({**message, **own}, None)
        logger.info("workers %d to %d begin", first, first + count - 1)

    def _pass_back(self, worker: WorkerProcess) -> None:
        """Forwards a worker's answer with the tensors that the worker has put into the file."""
        for rank, answer in worker.receive().items():
            file, segments = None, []
            if self._answer is not None and "mine" in answer:
                tensors, mine = answer.pop("tensors"), answer.pop("mine")
                own = opened(self._answer.file, {name: tensors[name] for name in mine})
                file, segments = own.file.descriptor, controller_wire.segments_of(own)
            self._wire.send({"rank": rank, "answer": answer}, file, segments)
