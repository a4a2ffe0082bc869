"""Each kind of traffic counts once on the line, wherever the code uses its bytes."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

import swarm.network
from swarm.config import NetworkSection
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import PROTOCOL as BULK
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.node.node import Handlers, Node
from swarm.network.node.peer_probe import PROTOCOL as MEASURE
from swarm.network.node.peer_probe import Prober, measure_mbit
from swarm.network.wire import upload_rate
from swarm.network.wire.traffic import Traffic
from swarm.network.wire.upload_rate import LineBytes
from swarm.peer.start.quota import OVERHEAD, bytes_moved
from swarm.protocol.values.digests import digest_of
from tests.network.conftest import LOOPBACK, Peers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not say")

WAIT_S = 60.0
MIB = 2**20
MOVED = 4 * MIB
OTHERS = MIB // 4
"""Bytes that the DHT, handshakes and encryption may add meanwhile."""
CLIENT = NetworkSection(client_mode=True)


class Serving:
    """A node that serves blobs, answers requests and takes part in measurements."""

    def __init__(self, peers: Peers, network: NetworkSection = LOOPBACK) -> None:
        self.store, server = BlobStore(), BlobServer()
        server.attach(self.store)
        on_request = AsyncMock(return_value=bytes(900_000))
        streams = {BULK: server.serve, MEASURE: Prober().serve}
        self.node: Node = peers.node(Handlers(on_request=on_request, streams=streams),
                                     network=network)  # fmt: skip

    def fetch(self, other: Serving, seed: int) -> None:
        """Fetches a blob of `MOVED` bytes from another."""
        content = random.Random(seed).randbytes(MOVED)
        other.store.put(content)
        want = Want(digest_of(content), MOVED, (other.node.peer_id,))
        self.node.run(Downloads(self.node, self.store).fetch([want]), WAIT_S)

    def measure(self, other: Serving, *, is_down: bool) -> None:
        """Measures the line to another with `MOVED` bytes."""
        measuring = measure_mbit(
            self.node, other.node.peer_id, is_down=is_down, limit_s=WAIT_S, num_bytes=MOVED
        )
        self.node.run(measuring, WAIT_S)

    def ask(self, other: Serving) -> None:
        """Makes a request whose answer has almost `MOVED` bytes, in five messages."""
        for _ in range(5):
            self.node.run(self.node.request(other.node.peer_id, b"?", 20.0), WAIT_S)


@pytest.fixture(scope="module")
def swarm_of(lasting_peers: Peers) -> dict[str, Serving]:
    """Nodes by name: two with direct streams, one without, two that cannot be dialed."""
    without = LOOPBACK.model_copy(update={"direct": False})
    return {
        "A": Serving(lasting_peers),
        "B": Serving(lasting_peers),
        "libp2p": Serving(lasting_peers, without),
        "hidden": Serving(lasting_peers, CLIENT),
        "hidden too": Serving(lasting_peers, CLIENT),
    }


def moved(serving: Serving) -> int:
    """Bytes moved so far, by the kernel's count."""
    total = serving.node.traffic.line.total()
    assert total is not None
    return total


@pytest.mark.parametrize(
    ("act", "names"),
    [
        pytest.param(lambda a, b: a.measure(b, is_down=True), "A B", id="measured down"),
        pytest.param(lambda a, b: a.measure(b, is_down=False), "B A", id="measured up"),
        pytest.param(lambda a, b: a.measure(b, is_down=True), "A libp2p", id="over libp2p"),
        pytest.param(lambda a, b: a.fetch(b, 1), "A B", id="a blob on a direct stream"),
        pytest.param(lambda a, b: a.fetch(b, 2), "libp2p B", id="a blob over libp2p"),
        pytest.param(lambda a, b: a.ask(b), "A B", id="messages"),
    ],
)
def test_both_ends_of_any_traffic_count_it_once(
    swarm_of: dict[str, Serving], act: Callable[[Serving, Serving], None], names: str
) -> None:
    """Once only 27 bytes of a measurement of 24 MiB were counted."""
    ends = [swarm_of[name] for name in names.split()]
    before = [moved(end) for end in ends]
    act(*ends)
    for end, then in zip(ends, before, strict=True):
        assert MOVED <= moved(end) - then + OTHERS <= MOVED + 2 * OTHERS + MOVED // 16


def test_relayed_bytes_count_twice_there_and_once_elsewhere(
    swarm_of: dict[str, Serving],
) -> None:
    relays = [swarm_of["A"], swarm_of["B"], swarm_of["libp2p"]]
    ends = [swarm_of["hidden"], swarm_of["hidden too"]]
    before = {id(each): moved(each) for each in relays + ends}
    ends[0].fetch(ends[1], 3)
    for end in ends:
        assert moved(end) - before[id(end)] == pytest.approx(MOVED, abs=MOVED // 16 + OTHERS)
    passed_on = sum(moved(relay) - before[id(relay)] for relay in relays)
    assert passed_on == pytest.approx(2 * MOVED, abs=MOVED // 8 + 3 * OTHERS)


def test_the_quota_goes_by_the_line(swarm_of: dict[str, Serving]) -> None:
    traffic = swarm_of["A"].node.traffic
    total = traffic.line.total()
    assert total is not None
    assert bytes_moved(traffic) >= round(total * OVERHEAD)


def pair(line: LineBytes) -> tuple[socket.socket, socket.socket]:
    """A counted connection, and its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = line.connection(socket.create_connection(server.getsockname()))
        return mine, server.accept()[0]


def test_a_connection_counts_before_it_is_closed_and_once_after() -> None:
    line, counts = LineBytes(), []
    line.daemon_began(os.getpid())
    line.daemon_ends(os.getpid())
    before = line.total() or 0
    mine, other = pair(line)
    mine.sendall(bytes(1000))
    assert len(other.recv(1000, socket.MSG_WAITALL)) == 1000
    other.sendall(bytes(500))
    mine.recv(500, socket.MSG_WAITALL)
    counts.append((line.total() or 0) - before)
    for _ in range(2):
        mine.close()
        counts.append((line.total() or 0) - before)
    other.close()
    assert counts == pytest.approx([1500] * 3, abs=2), "the kernel counts SYN as a byte"


def test_daemons_count_until_they_end_and_nothing_is_known_without_one() -> None:
    line = LineBytes()
    assert line.total() is None
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                             stdin=subprocess.PIPE)  # fmt: skip
    line.daemon_began(child.pid)
    first = line.total()
    child.communicate(bytes(10))
    last = line.total()
    line.daemon_ends(child.pid)
    line.daemon_ends(child.pid)
    assert first is not None and last is not None and first <= last
    assert line.total() == last, "a process that is no more keeps its count, once"


def test_where_the_kernel_is_silent_the_nodes_counters_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_rate, "moved_by_process", lambda _: None)
    traffic = Traffic(blob_bytes_sent=300)
    traffic.line.daemon_began(os.getpid())
    assert traffic.line.total() is None
    assert bytes_moved(traffic) == round(300 * OVERHEAD)


OPENS = re.compile(r"socket\.socket\(|create_connection\(|create_server\(|open_connection\(|"
                   r"start_server\(|sock_accept\(|sock_connect\(")  # fmt: skip
KNOWN = {
    "daemon.py": 3,  # a greeting of 20 bytes, a try of a port, a UDP socket that sends nothing
    "tcp_dialer.py": 2,  # `connect`, which counts
    "tcp_listener.py": 3,  # listens, accepts and counts, reads accepted connections
    "peer_probe.py": 2,  # greetings of 20 bytes, both ways
    "streams.py": 2,  # the daemon's socket, within this machine
}


def test_no_other_file_opens_a_socket_on_the_line() -> None:
    """A new one must be counted by `LineBytes.connection`, or a comment says why not."""
    folder = Path(swarm.network.__path__[0])
    found = {path.name: len(OPENS.findall(path.read_text())) for path in folder.rglob("*.py")}
    assert {name: count for name, count in found.items() if count} == KNOWN
