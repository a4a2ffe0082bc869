#!/usr/bin/env python
"""SPES through a parameter server, with real bytes and times, but no crash, no join, no check.

`serve` waits for all peers, averages their shared tensors in fp32, and sends each peer the mean and
the others' experts. `train` waits for the duration of a cycle's local steps, sends shared tensors
and own experts, and receives the answer. Not for people: `bench_utilisation.py` starts both in
separate namespaces.
"""

import argparse
import json
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np

CONNECT_S = 60.0
READY = b"r"
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Sizes:
    """Elements of a model, in fp32.

    Attributes:
        shared: elements of the tensors that all peers train.
        own: elements of the experts of one peer.
        peers: number of peers.
    """

    shared: int
    own: int
    peers: int

    @property
    def sent(self) -> int:
        """Bytes that a peer sends in a cycle."""
        return ELEMENT_BYTES * (self.shared + self.own)

    @property
    def received(self) -> int:
        """Bytes that a peer receives in a cycle."""
        return ELEMENT_BYTES * (self.shared + self.own * (self.peers - 1))


@dataclass(frozen=True)
class Cycle:
    """A peer's seconds in a cycle. `exchange_s` includes the server's work."""

    wall_s: float
    computing_s: float
    exchange_s: float


def serve(listener: socket.socket, sizes: Sizes, cycles: int) -> None:
    """Averages for a number of cycles."""
    peers = [listener.accept()[0] for _ in range(sizes.peers)]
    for peer in peers:
        peer.sendall(READY)
    with ThreadPoolExecutor(sizes.peers) as pool:
        for _ in range(cycles):
            offers = list(pool.map(partial(_received, count=sizes.sent), peers))
            list(pool.map(_answer, peers, answers_to(offers, sizes)))
    for peer in peers:
        peer.close()


def answers_to(offers: Sequence[bytearray], sizes: Sizes) -> list[list[memoryview]]:
    """The answer to each peer: the mean of the shared tensors, then the experts of all others."""
    arrays = [np.frombuffer(offer, np.float32) for offer in offers]
    mean = np.mean([array[: sizes.shared] for array in arrays], axis=0, dtype=np.float32)
    experts = [array[sizes.shared :].data for array in arrays]
    return [[mean.data, *experts[:index], *experts[index + 1 :]] for index in range(len(experts))]


def _answer(peer: socket.socket, values: Sequence[memoryview]) -> None:
    for each in values:
        peer.sendall(each)


def train(address: tuple[str, int], sizes: Sizes, cycles: int, compute_s: float) -> list[Cycle]:
    """Takes part in a number of cycles. Returns the seconds of each."""
    offer = np.random.default_rng(0).standard_normal(sizes.sent // ELEMENT_BYTES, np.float32)
    done = []
    with _connected(address) as server:
        _received(server, len(READY))
        for _ in range(cycles):
            began_s = time.monotonic()
            time.sleep(compute_s)
            computed_s = time.monotonic()
            server.sendall(offer.data)
            _received(server, sizes.received)
            ended_s = time.monotonic()
            done.append(Cycle(ended_s - began_s, compute_s, ended_s - computed_s))
    return done


def _connected(address: tuple[str, int]) -> socket.socket:
    end_s = time.monotonic() + CONNECT_S
    while True:
        try:
            connection = socket.create_connection(address, timeout=CONNECT_S)
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)
            continue
        connection.settimeout(None)
        return connection


def _received(connection: socket.socket, count: int) -> bytearray:
    found = bytearray(count)
    rest = memoryview(found)
    while rest:
        taken = connection.recv_into(rest)
        if not taken:
            raise ConnectionError("the other side has closed the connection")
        rest = rest[taken:]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", choices=("serve", "train"))
    parser.add_argument("--host", required=True, help="of the server")
    parser.add_argument("--port", type=int, required=True, help="likewise; 0 takes a free one")
    parser.add_argument("--shared", type=int, required=True, help="elements")
    parser.add_argument("--own", type=int, required=True, help="elements of a peer's experts")
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--cycles", type=int, required=True)
    parser.add_argument("--compute-s", type=float, default=0.0)
    arguments = parser.parse_args()
    sizes = Sizes(arguments.shared, arguments.own, arguments.peers)
    if arguments.role == "serve":
        with socket.create_server((arguments.host, arguments.port)) as listener:
            print(listener.getsockname()[1], flush=True)
            serve(listener, sizes, arguments.cycles)
        return 0
    address = (arguments.host, arguments.port)
    for cycle in train(address, sizes, arguments.cycles, arguments.compute_s):
        print(json.dumps(asdict(cycle)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
