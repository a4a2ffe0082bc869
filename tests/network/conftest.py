"""Real nodes on 127.0.0.1, each with its own daemon, all stopped at the end of a test."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm.config import NetworkSection
from swarm.errors import NobodyReachable
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.dht.dht import StoredValue
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import PROTOCOL
from swarm.network.fetch.fetcher import Downloads
from swarm.network.node.node import Handlers, Node

LOOPBACK = NetworkSection(host_maddrs=("/ip4/127.0.0.1/tcp/0",))
START_S = 30.0


def records_of(node: Node, key: str) -> dict[str, StoredValue]:
    """All records of a key, by the peer id of the owner who signed them."""
    return node.run(node.get_many([key]), 2 * START_S)[key]


class Peers:
    """Starts nodes that know the first one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: list[Node] = []

    def node(self, handlers: Handlers | None = None, **options) -> Node:
        number = len(self.nodes)
        defaults = {
            "identity_path": self.folder / f"identity{number}.key",
            "network": LOOPBACK,
            "known_peers": self.nodes[0].addresses if self.nodes else (),
            "deadline_s": START_S,
        }
        settings = defaults | options
        try:
            node = Node.start(handlers=handlers, **settings)
        except NobodyReachable:
            if "known_peers" in options:
                raise
            # On a busy machine a single ping may come too late.
            node = Node.start(handlers=handlers, **settings)
        self.nodes.append(node)
        return node

    def serving(self, *stores: BlobStore) -> Node:
        """A node that serves these stores."""
        server = BlobServer()
        for store in stores:
            server.attach(store)
        return self.node(Handlers(streams={PROTOCOL: server.serve}))

    def downloading(self, store: BlobStore, **options) -> tuple[Node, Downloads]:
        node = self.node()
        return node, Downloads(node, store, **options)

    def stop(self) -> None:
        pids = [node._substrate.p2p._child.pid for node in self.nodes]
        for node in reversed(self.nodes):
            node.stop(5.0)
        assert not set(pids) & set(daemons()), "a daemon outlived its node"


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    started = Peers(tmp_path)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def lasting_peers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peers]:
    """For tests of one file that do not change nodes."""
    started = Peers(tmp_path_factory.mktemp("peers"))
    yield started
    started.stop()


def daemons() -> list[int]:
    """Process ids of the living p2pd processes of this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, rest = (folder / "stat").read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue  # it ended while we looked
        state, parent = rest.split()[:2]
        if name == "p2pd" and int(parent) == os.getpid() and state != "Z":
            found.append(int(folder.name))
    return found


@pytest.fixture
def living_daemons() -> Callable[[], list[int]]:
    return daemons


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port at which nobody listens or can listen."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
