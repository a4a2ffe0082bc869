"""The addresses that a machine announces, and what answers at the addresses that a start uses."""

import asyncio
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError

from swarm.config import NetworkSection
from swarm.errors import NetworkDown, NobodyReachable
from swarm.network.node import substrate
from swarm.network.wire import daemon
from swarm.network.wire.daemon import Address, dialable, probe
from swarm.network.wire.identity import load_or_create_identity
from swarm.network.wire.upload_rate import LineBytes
from swarm.protocol.records.records import MAX_ADDRESSES, PeerRecord, decode_record, encode_record
from tests.network.conftest import Peers
from tests.peer_records import peer_record

PUBLIC = ("/ip4/8.8.4.4/tcp/1", "/ip6/2606:4700::1111/tcp/1", "/dns4/home.example/tcp/1")


def test_a_machine_with_many_networks_tells_as_many_addresses_as_a_record_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Docker adds one for each of its networks.

    With one too many, no reader accepted the record.
    """
    private = [f"/ip4/172.{number}.0.1/tcp/31330" for number in range(16, 33)]
    with caplog.at_level("WARNING"):
        told = dialable([*private, "/ip4/127.0.0.1/tcp/31330", *PUBLIC])
    assert len(told) == MAX_ADDRESSES and set(PUBLIC) < set(told)
    assert "4 addresses are not announced to others" in caplog.text
    record = peer_record("QmA", addresses=told)
    assert decode_record(PeerRecord, encode_record(record)) == record


def test_few_addresses_are_told_as_they_are_and_loopback_only_alone() -> None:
    assert dialable(["/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.7/tcp/1"]) == ("/ip4/10.0.0.7/tcp/1",)
    assert dialable(["/ip4/127.0.0.1/tcp/1"]) == ("/ip4/127.0.0.1/tcp/1",)


def test_the_first_address_is_a_public_one_else_the_one_that_was_announced_first() -> None:
    """The line for joiners contains this address."""
    near, nearer = "/ip4/10.0.0.5/tcp/1", "/ip4/192.168.1.5/tcp/1"
    assert dialable([near, "/ip4/8.8.4.4/tcp/1"]) == ("/ip4/8.8.4.4/tcp/1", near)
    assert dialable([nearer, "/dns4/b.example/tcp/1", near, "/dns4/a.example/tcp/1", nearer]) == (
        "/dns4/b.example/tcp/1",
        "/dns4/a.example/tcp/1",
        nearer,
        near,
    )
    for_documents = "/ip4/203.0.113.7/tcp/1"
    assert dialable([for_documents, near]) == (for_documents, near)


def test_among_private_addresses_that_of_the_default_route_comes_first() -> None:
    """The system lists those of containers' networks first, which are unreachable from outside."""
    docker, lan = "/ip4/172.17.0.1/tcp/1", "/ip4/192.168.1.5/tcp/1"
    assert dialable([docker, lan], preferred="192.168.1.5") == (lan, docker)
    assert dialable([docker, lan], preferred=None) == (docker, lan)
    public = "/ip4/8.8.4.4/tcp/1"
    assert dialable([docker, lan, public], preferred="192.168.1.5") == (public, lan, docker)


@pytest.mark.parametrize("direct_port", [0, 31331])
def test_an_address_that_the_machine_lacks_names_the_remedy_that_works(direct_port: int) -> None:
    """The public address of a cloud machine belongs to the provider, which translates it."""
    network = NetworkSection(host_maddrs=("/ip4/198.51.100.7/tcp/31330",), direct_port=direct_port)
    with pytest.raises(NetworkDown, match=r"--port 31330 --public-ip 198\.51\.100\.7"):
        daemon.listen_addresses(network, None)


def silent_address(folder: Path, undo: ExitStack) -> str:
    """An address at which the kernel accepts connections, as of a paused process."""
    listener = undo.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = listener.getsockname()[1]
    peer = load_or_create_identity(folder / f"silent{port}.key").peer_id
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"


def test_a_start_goes_in_by_a_living_peer_beside_addresses_that_accept_and_say_nothing(
    peers: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libp2p's daemon waits for one after the other. Four take longer than its start may."""
    monkeypatch.setattr(daemon, "GREETING_S", 1.0)
    monkeypatch.setattr(daemon, "STARTUP_S", 8.0)
    first = peers.node()
    with ExitStack() as undo:
        silent = tuple(silent_address(tmp_path, undo) for _ in range(4))
        assert first.peer_id in peers.node(known_peers=(*silent, *first.addresses)).neighbours
        with pytest.raises(NobodyReachable, match=f"{silent[0]}: .*says nothing for 1 s"):
            peers.node(known_peers=silent)


def test_what_answers_is_a_peer_only_if_it_greets_like_one(peers: Peers, closed_port: int) -> None:
    address = Address.parse(peers.node().addresses[0])

    async def asked_of(words: bytes) -> str | None:
        async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(words)
            writer.close()

        async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await probe(Address("", "", "127.0.0.1", port, "QmA"), 3.0)

    assert asyncio.run(probe(address, 3.0)) is None
    assert asyncio.run(asked_of(b"SSH-2.0-OpenSSH_9.6 Debian")) == (
        "something answers that is no peer"
    )
    assert asyncio.run(asked_of(b"")) == "something accepts connections and ends them"
    closed = Address("", "", "127.0.0.1", closed_port, "QmA")
    assert asyncio.run(probe(closed, 3.0)) == "Connection refused"


def test_a_peer_that_may_start_alone_does_if_its_way_in_takes_too_long(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, create, asked = peers.node(), daemon._create, []

    async def late(line: LineBytes, **options: Any) -> Any:
        asked.append(options["initial_peers"])
        if options["initial_peers"]:
            raise P2PDaemonError("Daemon failed to start in 15.0 seconds")
        return await create(line, **options)

    monkeypatch.setattr(daemon, "_create", late)
    alone = peers.node(known_peers=first.addresses, must_reach=False)
    assert alone.addresses and asked == [list(first.addresses), None]
    asked.clear()
    with pytest.raises(NobodyReachable, match=first.addresses[0]):
        peers.node(known_peers=first.addresses)
    assert len(asked) == substrate.TRIES
    never = AsyncMock(side_effect=P2PDaemonError("Daemon failed to start in 15.0 seconds"))
    monkeypatch.setattr(daemon, "_create", never)
    with pytest.raises(NetworkDown, match=r"15\.0 seconds"):
        peers.node(known_peers=())
