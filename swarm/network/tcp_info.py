"""What Linux knows of a TCP connection (`struct tcp_info` of linux/tcp.h, from version 4.18 on)."""

from __future__ import annotations

import socket
import struct
import sys
from typing import NamedTuple

_LAYOUT = struct.Struct("=16xI48xI48xQQ8xII16xQQQI")


class TcpInfo(NamedTuple):
    """Of one connection, from its beginning; in the order of the kernel's fields.

    Attributes:
        packet_bytes: of a full packet.
        rtt_us: the smoothed round trip, in microseconds.
        acked: bytes up to the first that the other side has not acknowledged.
        received: bytes that came in order.
        unsent: bytes that wait in this machine.
        least_rtt_us: the shortest round trip of late.
        busy_us: for how long something was under way, or waited to be.
        by_receiver_us: for how long of that the other side had no room.
        by_buffer_us: for how long of that this machine's buffer had none.
        delivered: packets that the other side has; beyond one that is missing, too.
    """

    packet_bytes: int
    rtt_us: int
    acked: int
    received: int
    unsent: int
    least_rtt_us: int
    busy_us: int
    by_receiver_us: int
    by_buffer_us: int
    delivered: int


def tcp_info(connection: socket.socket) -> TcpInfo | None:
    """What the kernel says now; None where it says nothing, or the connection is closed."""
    if sys.platform != "linux":
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAYOUT.size)
        return TcpInfo(*_LAYOUT.unpack(info))
    except (OSError, struct.error):
        return None
