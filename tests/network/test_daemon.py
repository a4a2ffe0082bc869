"""Which of a machine's addresses others are told."""

import pytest

from swarm.network.daemon import dialable
from swarm.protocol.records import MAX_ADDRESSES, PeerRecord, decode_record, encode_record
from tests.peer_records import peer_record

PUBLIC = ("/ip4/8.8.4.4/tcp/1", "/ip6/2606:4700::1111/tcp/1", "/dns4/home.example/tcp/1")


def test_a_machine_with_many_networks_tells_as_many_addresses_as_a_record_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Docker adds one for each of its networks; with one too many no reader took the record."""
    private = [f"/ip4/172.{number}.0.1/tcp/31330" for number in range(16, 33)]
    with caplog.at_level("WARNING"):
        told = dialable([*private, "/ip4/127.0.0.1/tcp/31330", *PUBLIC])
    assert len(told) == MAX_ADDRESSES and set(PUBLIC) < set(told)
    assert "4 addresses are not told to others" in caplog.text
    record = peer_record("QmA", addresses=told)
    assert decode_record(PeerRecord, encode_record(record)) == record


def test_few_addresses_are_told_as_they_are_and_loopback_only_alone() -> None:
    assert dialable(["/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.7/tcp/1"]) == ("/ip4/10.0.0.7/tcp/1",)
    assert dialable(["/ip4/127.0.0.1/tcp/1"]) == ("/ip4/127.0.0.1/tcp/1",)


def test_the_first_address_is_a_public_one_else_the_one_that_was_announced_first() -> None:
    """The line for joiners names it."""
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
