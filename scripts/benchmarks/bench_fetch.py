#!/usr/bin/env python3
"""Fetching one large blob from one peer, against a plain asyncio TCP socket, on loopback.

Client and server are separate processes. Both ways verify the BLAKE3 digest of each piece of 4 MiB
in a thread, as soon as the piece has come, while other pieces are received. The two ways alternate
in one run, and figures are medians. CPU seconds are those of the Python process and of its p2pd, if
it has one.

    scripts/benchmarks/bench_fetch.py [--mebibytes 256] [--flows 1 4] [--repeat 3] [--disk]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from blake3 import blake3

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from swarm.config import NetworkSection
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import PART_BYTES, PROTOCOL
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.node.node import Handlers, Node
from swarm.protocol.exchange.sourcing import Limits
from swarm.protocol.values.digests import PIECE_BYTES, digest_of_index, piece_index

LOOPBACK = NetworkSection(host_maddrs=("/ip4/127.0.0.1/tcp/0",))
MIB = 2**20
DEADLINE_S = 120.0


def content(num_bytes: int) -> bytes:
    piece = random.Random(0).randbytes(PIECE_BYTES)
    # Each piece begins differently, so that no two have the same digest.
    pieces = range(num_bytes // PIECE_BYTES)
    return b"".join(number.to_bytes(8) + piece[8:] for number in pieces)


def cpu_s(pid: int) -> float:
    """User and system seconds of one process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def daemon() -> int:
    """Process id of this process's p2pd."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids}
    return next(pid for pid, name in names.items() if name == "p2pd")


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def serve_swarm(num_bytes: int, folder: Path, disk: bool) -> None:
    store = BlobStore(folder / "server" if disk else None)
    digest = store.put(content(num_bytes))
    store.sync([digest])
    store.index(digest)
    server = BlobServer()
    server.attach(store)
    handlers = Handlers(streams={PROTOCOL: server.serve})
    node = Node.start(identity_path=folder / "server.key", network=LOOPBACK, handlers=handlers)
    say(address=node.addresses[0], digest=digest, pids=[os.getpid(), daemon()])
    sys.stdin.read()
    node.stop(5.0)


def fetch_swarm(options: argparse.Namespace, folder: Path, address: str, digest: str) -> None:
    num_bytes, flows, disk = options.mebibytes * MIB, options.flows[0], options.disk
    node = Node.start(identity_path=folder / "client.key", network=LOOPBACK, known_peers=[address])
    store = BlobStore(folder / "client" if disk else None)
    downloads = Downloads(
        node, store, flows_per_peer=flows, limits=Limits(bytes_per_peer=flows * 8 * MIB)
    )
    want = Want(digest, num_bytes, (address.rsplit("/", 1)[1],))
    pids = [os.getpid(), daemon()]
    fetch = downloads.fetch(
        [want], check=None, on_blob=lambda _: None, on_failure=lambda *failure: say(failure=failure)
    )
    before, begin_s = [cpu_s(pid) for pid in pids], time.perf_counter()
    node.run(fetch, DEADLINE_S)
    seconds = time.perf_counter() - begin_s
    used = [cpu_s(pid) - b for pid, b in zip(pids, before, strict=True)]
    assert store.size(digest) == num_bytes
    node.stop(5.0)
    say(seconds=seconds, cpu=used)


def serve_tcp(num_bytes: int) -> None:
    blob = content(num_bytes)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        start, end = (int(number) for number in (await reader.readline()).split())
        for offset in range(start, end, PART_BYTES):
            writer.write(blob[offset : min(offset + PART_BYTES, end)])
            await writer.drain()
        await reader.read()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        digest = digest_of_index(piece_index(blob))
        say(address=str(port), digest=digest, pids=[os.getpid()])
        await asyncio.to_thread(sys.stdin.read)
        server.close()

    asyncio.run(run())


def digest_of_piece(piece: memoryview) -> bytes:
    return blake3(piece).digest()


def fetch_tcp(num_bytes: int, flows: int, port: str, digest: str) -> None:
    buffer = bytearray(num_bytes)
    checked: dict[int, asyncio.Future[bytes]] = {}
    """The digest of each piece, from a thread, by the piece's start."""

    async def receive(start: int, end: int) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setblocking(False)
            await loop.sock_connect(connection, ("127.0.0.1", int(port)))
            await loop.sock_sendall(connection, f"{start} {end}\n".encode())
            view = memoryview(buffer)
            for begin in range(start, end, PIECE_BYTES):
                piece = view[begin : min(begin + PIECE_BYTES, end)]
                left = piece
                while left:
                    received = await loop.sock_recv_into(connection, left)
                    assert received, "the stream ended early"
                    left = left[received:]
                checked[begin] = loop.run_in_executor(None, digest_of_piece, piece)

    async def run() -> float:
        begin_s = time.perf_counter()
        step = -(-num_bytes // flows // PIECE_BYTES) * PIECE_BYTES
        starts = range(0, num_bytes, step)
        await asyncio.gather(*(receive(s, min(s + step, num_bytes)) for s in starts))
        index = b"".join([await checked[begin] for begin in sorted(checked)])
        assert digest_of_index(index) == digest
        return time.perf_counter() - begin_s

    before = cpu_s(os.getpid())
    seconds = asyncio.run(run())
    say(seconds=seconds, cpu=[cpu_s(os.getpid()) - before])


@contextlib.contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore", __file__, *(str(a) for a in arguments)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.communicate(timeout=20)


def facts_of(child: subprocess.Popen[str]) -> dict[str, Any]:
    assert child.stdout
    line = child.stdout.readline()
    if not line:
        raise SystemExit("a process of the benchmark failed; its message is above")
    facts: dict[str, Any] = json.loads(line)
    return facts


def measure(way: str, options: argparse.Namespace, folder: str, flows: int) -> dict[str, float]:
    """MB/s and CPU seconds per GB of one transfer."""
    common = ["--mebibytes", options.mebibytes, "--folder", folder]
    common += ["--disk"] if options.disk else []
    with process(*common, "--role", f"serve-{way}") as server:
        serving = facts_of(server)
        pids = serving["pids"]
        before = [cpu_s(pid) for pid in pids]
        target = ("--address", serving["address"], "--digest", serving["digest"])
        with process(*common, *target, "--flows", flows, "--role", f"fetch-{way}") as client:
            fetched = facts_of(client)
        server_cpu = [cpu_s(pid) - b for pid, b in zip(pids, before, strict=True)]
    num_bytes = options.mebibytes * MIB
    gigabytes = num_bytes / 1e9
    figures = {"MB/s": num_bytes / 1e6 / fetched["seconds"]}
    for side, used in (("server", server_cpu), ("client", fetched["cpu"])):
        for name, seconds in zip((f"{side} python", f"{side} p2pd"), used, strict=False):
            figures[name] = seconds / gigabytes
    figures["CPU s/GB"] = sum(server_cpu + fetched["cpu"]) / gigabytes
    return figures


def medians(options: argparse.Namespace, flows: int) -> dict[str, dict[str, float]]:
    runs: dict[str, list[dict[str, float]]] = {"tcp": [], "swarm": []}
    for way in list(runs) * options.repeat:
        with tempfile.TemporaryDirectory() as folder:
            runs[way].append(measure(way, options, folder, flows))
    return {
        way: {name: median(run[name] for run in got) for name in got[0]}
        for way, got in runs.items()
    }


def compare(options: argparse.Namespace) -> None:
    columns = ("MB/s", "server python", "server p2pd", "client p2pd", "client python", "CPU s/GB")
    print(f"{options.mebibytes} MiB, median of {options.repeat}, CPU in seconds per GB")
    print("flows  way    " + "".join(f"{column:>15}" for column in columns))
    for flows in options.flows:
        found = medians(options, flows)
        tcp, swarm = found["tcp"], found["swarm"]
        ratio = {name: swarm[name] / tcp[name] for name in tcp}
        for way, figures in {"tcp": tcp, "swarm": swarm, "ratio": ratio}.items():
            cells = (f"{figures[c]:15.2f}" if c in figures else f"{'-':>15}" for c in columns)
            print(f"{flows:5}  {way:6} " + "".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mebibytes", type=int, default=256, help="size of the blob, in 4 MiB steps"
    )
    parser.add_argument("--flows", type=int, nargs="+", default=[1, 4], help="streams per pair")
    parser.add_argument("--repeat", type=int, default=3, help="runs behind each median")
    parser.add_argument("--disk", action="store_true", help="stores on disk, not in memory")
    for internal in ("--role", "--folder", "--address", "--digest"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.mebibytes -= options.mebibytes % 4
    num_bytes, flows = options.mebibytes * MIB, options.flows[0]
    match options.role:
        case None:
            compare(options)
        case "serve-swarm":
            serve_swarm(num_bytes, Path(options.folder), options.disk)
        case "serve-tcp":
            serve_tcp(num_bytes)
        case "fetch-swarm":
            fetch_swarm(options, Path(options.folder), options.address, options.digest)
        case "fetch-tcp":
            fetch_tcp(num_bytes, flows, options.address, options.digest)


if __name__ == "__main__":
    main()
