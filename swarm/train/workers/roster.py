"""Assigns ranks, and decides whether enough workers are there. Pure.

Ranks of this machine come first, then those of the nodes, node by node, so that consecutive ranks,
which share experts, are neighbors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.errors import BadMessage, ConfigError

MAX_WORKERS = 1024
"""Most workers of one node; a larger number must be an error."""
MAX_NUMBER = 2**20
DEFAULT_PORT = 31340


@dataclass(frozen=True)
class Node:
    """The workers that a node offers, its hardware and its versions.

    Attributes:
        workers: processes that the node would start.
        gpus: GPUs that PyTorch finds on the node.
        rank: the rank that a launcher gave the node's process; None without a launcher.
        versions: the node's versions of swarm and torch.
    """

    workers: int
    gpus: int
    rank: int | None
    versions: tuple[str, str]

    def message(self) -> dict[str, Any]:
        """The node for JSON. `node_of` reads it."""
        return {
            "workers": self.workers,
            "gpus": self.gpus,
            "rank": self.rank,
            "versions": list(self.versions),
        }


def node_of(message: Mapping[str, Any]) -> Node:
    """The node that a hello message describes.

    Raises:
        BadMessage: a field is missing or wrong.
    """
    rank, versions = message.get("rank"), message.get("versions")
    workers, gpus = (_whole(message.get(name)) for name in ("workers", "gpus"))
    if not 1 <= workers <= MAX_WORKERS:
        raise BadMessage("worker_hello", "a node without workers, or with too many")
    if not isinstance(versions, list) or [type(text) for text in versions] != [str, str]:
        raise BadMessage("worker_hello", "a node that does not say its versions")
    return Node(workers, gpus, None if rank is None else _whole(rank), (versions[0], versions[1]))


def _whole(value: object) -> int:
    """A number in a hello message. Raises BadMessage."""
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise BadMessage("worker_hello", "a node whose workers, GPUs or rank are no number")
    return value


def objection(node: Node, device: str, versions: tuple[str, str]) -> str | None:
    """Why a node cannot be part of this peer. None if it can.

    Args:
        node: hardware and versions of the node.
        device: device on which this peer computes, "cpu" or "cuda".
        versions: versions of swarm and torch here.
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
    """The numbers of workers that a peer wants.

    Attributes:
        here: workers on the peer's own machine, at least 1.
        elsewhere: workers on nodes.
        unit: a smaller number of workers must be a multiple of this.
    """

    here: int
    elsewhere: int
    unit: int = 1


def size_of(there: int, wanted: Wanted, *, is_late: bool) -> int:
    """The number of workers with which a peer begins; 0 if it must wait or cannot begin.

    Args:
        there: number of workers that are there, including the peer's own.
        wanted: numbers of workers that the peer accepts.
        is_late: whether the waiting time is over, so that fewer workers must suffice.
    """
    most = wanted.here + wanted.elsewhere
    if there >= most:
        return most
    size = there // wanted.unit * wanted.unit
    return size if is_late and size >= wanted.here else 0


def seats(nodes: Sequence[Node], wanted: Wanted, *, is_late: bool) -> list[range] | None:
    """The ranks of each node.

    Args:
        nodes: the nodes that are there, in order of arrival.
        wanted: numbers of workers that the peer accepts.
        is_late: whether the waiting time is over, so that fewer workers must suffice.

    Returns:
        A range for each node, empty for an unneeded node. None if there are too few workers.
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
    """Sort key: nodes by their launcher's ranks, then nodes without a rank, by arrival."""
    return (node.rank is None, node.rank or 0)


@dataclass(frozen=True)
class Launch:
    """The settings that a launcher gives to a process.

    Attributes:
        local: the number of this worker on its machine, if the process becomes one worker. None if
            it starts all workers of its machine.
        rank: rank of this process among those that the launcher has started. None without a
            launcher.
        controller: host that the launcher names. None if it names no host.
    """

    local: int | None = None
    rank: int | None = None
    controller: str | None = None


def launched_by(environment: Mapping[str, str]) -> Launch:
    """Reads the environment that torchrun or Slurm's srun gives to a process.

    torchrun starts one process for each GPU. srun starts either one process for each node, which
    then starts all workers, or several processes, each of which becomes one worker.
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
        text: HOST:PORT. The host is an IPv4 address or a name. The port may be left out.
        source: the option that a person would change.

    Raises:
        ConfigError: the text has another form.
    """
    host, colon, port = text.partition(":")
    is_port = port.isascii() and port.isdigit() and int(port) < 2**16
    if not host or bool(colon) != is_port:
        raise ConfigError(f"{source} = {text!r} is no HOST:PORT", hint="for example 10.0.0.1:31340")
    return host, int(port) if colon else DEFAULT_PORT


def pause_s(failures: int) -> float:
    """Seconds before a node dials its controller again, by the number of failed tries."""
    return min(15.0, 0.5 * 2.0 ** min(failures, 10))
