"""Who is which rank, and whether enough workers are there; pure.

Ranks of this machine come first, then those of the nodes, node by node, so that consecutive ranks,
which share experts, are neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.errors import BadMessage, ConfigError

MAX_WORKERS = 1024
"""Of one node, and so many that it is surely an error."""
MAX_NUMBER = 2**20
DEFAULT_PORT = 31340


@dataclass(frozen=True)
class Node:
    """What a node has to offer.

    Attributes:
        workers: processes that it would start.
        gpus: that PyTorch finds there.
        rank: where its launcher puts it among others; None without one.
        versions: of swarm and torch.
    """

    workers: int
    gpus: int
    rank: int | None
    versions: tuple[str, str]

    def message(self) -> dict[str, Any]:
        """For JSON; `node_of` reads it."""
        return {
            "workers": self.workers,
            "gpus": self.gpus,
            "rank": self.rank,
            "versions": list(self.versions),
        }


def node_of(message: Mapping[str, Any]) -> Node:
    """What a node says of itself.

    Raises:
        BadMessage: it does not say it.
    """
    rank, versions = message.get("rank"), message.get("versions")
    workers, gpus = (_whole(message.get(name)) for name in ("workers", "gpus"))
    if not 1 <= workers <= MAX_WORKERS:
        raise BadMessage("worker_hello", "a node without workers, or with too many")
    if not isinstance(versions, list) or [type(text) for text in versions] != [str, str]:
        raise BadMessage("worker_hello", "a node that does not say its versions")
    return Node(workers, gpus, None if rank is None else _whole(rank), (versions[0], versions[1]))


def _whole(value: object) -> int:
    """A number of things; raises BadMessage."""
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise BadMessage("worker_hello", "a node that does not say what it has")
    return value


def objection(node: Node, device: str, versions: tuple[str, str]) -> str | None:
    """Why a node cannot be part of this peer; None if it can.

    Args:
        node: its hardware and versions.
        device: on which this peer computes, "cpu" or "cuda".
        versions: of swarm and torch here.
    """
    if node.versions != versions:
        theirs, ours = (" with torch ".join(pair) for pair in (node.versions, versions))
        return f"the node runs swarm {theirs}, the peer swarm {ours}: both need the same"
    if device == "cuda" and node.gpus == 0:
        return "the peer computes on GPUs, and PyTorch finds none on the node"
    if device == "cuda" and node.workers > node.gpus:
        return f"the node offers {node.workers} workers and has {node.gpus} GPUs"
    return None


@dataclass(frozen=True)
class Wanted:
    """How many workers a peer computes with.

    Attributes:
        here: on its own machine, at least 1.
        elsewhere: of nodes.
        unit: any smaller number has to be a multiple of this.
    """

    here: int
    elsewhere: int
    unit: int = 1


def size_of(there: int, wanted: Wanted, *, is_late: bool) -> int:
    """With how many workers a peer begins; 0 if it waits, or cannot.

    Args:
        there: how many there are, its own among them.
        wanted: how many it asks for.
        is_late: whether nobody is waited for any more, so that fewer have to do.
    """
    most = wanted.here + wanted.elsewhere
    if there >= most:
        return most
    size = there // wanted.unit * wanted.unit
    return size if is_late and size >= wanted.here else 0


def seats(nodes: Sequence[Node], wanted: Wanted, *, is_late: bool) -> list[range] | None:
    """The ranks of each node.

    Args:
        nodes: those that are there, in the order in which they came.
        wanted: how many workers.
        is_late: whether nobody is waited for any more, so that fewer have to do.

    Returns:
        A range for each node, empty where it is not needed; None if there are too few workers.
    """
    there = wanted.here + sum(node.workers for node in nodes)
    size = size_of(there, wanted, is_late=is_late)
    if not size:
        return None
    found = [range(0)] * len(nodes)
    first = wanted.here
    for index in sorted(range(len(nodes)), key=lambda i: _order(nodes[i])):
        last = min(size, first + nodes[index].workers)
        found[index], first = range(first, last), last
    return found


def _order(node: Node) -> tuple[bool, int]:
    """By the launcher's ranks; those without one behind, as they came."""
    return (node.rank is None, node.rank or 0)


@dataclass(frozen=True)
class Launch:
    """What a launcher says to a process that it has started.

    Attributes:
        local: this process is one worker, the one of this number on its machine; None if it is to
            start all of its machine's.
        rank: among the processes that it has started; None without a launcher.
        controller: host that it names; None if it names none.
    """

    local: int | None = None
    rank: int | None = None
    controller: str | None = None


def launched_by(environment: Mapping[str, str]) -> Launch:
    """Reads the environment that torchrun or Slurm's srun gives to a process.

    torchrun starts a process a GPU. srun may start one a node, which then starts all workers, or
    several, which are a worker each.
    """
    controller = environment.get("MASTER_ADDR") or None
    local = _number(environment, "LOCAL_RANK")
    if local is not None:
        return Launch(local, _number(environment, "RANK"), controller)
    tasks, nodes = (_number(environment, f"SLURM_STEP_NUM_{of}") for of in ("TASKS", "NODES"))
    if tasks is None or nodes is None:
        return Launch(controller=controller)
    is_one = tasks > nodes
    local = _number(environment, "SLURM_LOCALID") if is_one else None
    return Launch(local, _number(environment, "SLURM_PROCID"), controller)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,6}", text) else None


def address_of(text: str, source: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    Args:
        text: with an IPv4 address or a name; the port may be left out.
        source: what a person would change.

    Raises:
        ConfigError: it is something else.
    """
    host, colon, port = text.partition(":")
    is_port = port.isascii() and port.isdigit() and int(port) < 2**16
    if not host or bool(colon) != is_port:
        raise ConfigError(f"{source} = {text!r} is no HOST:PORT", hint="for example 10.0.0.1:31340")
    return host, int(port) if colon else DEFAULT_PORT


def pause_s(failures: int) -> float:
    """Seconds before a node dials its controller again, after so many failed tries."""
    return min(15.0, 0.5 * 2.0 ** min(failures, 10))
