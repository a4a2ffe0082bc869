"""Packets that a router lets in for nobody."""

import struct

import pytest

from swarm.emulation.networks import ACK, SYN, TCP, _opens

FIN, UDP = 0x01, 17


def packet(protocol: int, flags: int, options: int = 0) -> bytes:
    """An IPv4 packet with a number of option words, and the beginning of a TCP header."""
    words = 5 + options
    header = struct.pack(">BB7xB10x", 0x40 | words, 0, protocol) + bytes(4 * options)
    return header + bytes(13) + bytes([flags]) + bytes(6)


@pytest.mark.parametrize("options", [0, 3])
def test_only_the_first_packet_of_a_connection_opens_it(options: int) -> None:
    assert _opens(packet(TCP, SYN, options))
    for flags in (SYN | ACK, ACK, ACK | FIN):
        assert not _opens(packet(TCP, flags, options))


def test_a_protocol_without_connections_never_gets_in() -> None:
    assert _opens(packet(UDP, ACK))
    assert _opens(packet(TCP, SYN)[:24]), "nor does a piece of a packet"
