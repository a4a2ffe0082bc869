"""A network of namespaces: one per peer, each with a subnet of its own, joined by this process.

Every namespace has a TUN device whose other end is here: a thread reads packets, gives them to the
`Shaper`, and writes them when they arrive. So rate, delay, loss and cuts need no kernel
module (netem is missing on many machines); the price is about 40 µs of CPU a packet.
Needs root and /dev/net/tun.
"""

from __future__ import annotations

import fcntl
import functools
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from swarm.background import SupervisedThread
from swarm.emulation.links import Link, Shaper
from swarm.errors import SwarmError

TUN = Path("/dev/net/tun")
TUNSETIFF = 0x400454CA
IFF_TUN_NO_PI = 0x1001
SUBNET = "10.77.{peer}"
MAX_PEERS = 250
MTU_BYTES = 1500
FAST_MBIT = 200.0
FAST_MTU_BYTES = 9000
"""Above FAST_MBIT packets are larger, or this process would be the bottleneck."""
COMMAND_S = 10.0
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
ALLOWED = "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
TCP, SYN, ACK = 6, 0x02, 0x10
IDLE_S = 0.2


@functools.cache
def why_not_here() -> str | None:
    """Why this machine or user cannot have such a network; None if it can.

    Tried once a process: root in a container may lack the capabilities, which nothing else tells.
    """
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "network namespaces need the program ip (iproute2)"
    if not os.access(TUN, os.R_OK | os.W_OK):
        return f"network namespaces need {TUN}"
    try:
        _try_one()
    except (OSError, SwarmError, subprocess.SubprocessError) as error:
        return f"network namespaces cannot be made here ({error})"
    return None


class NamespaceLinks:
    """See `Links`; the network exists from the first `place` to `close`."""

    def __init__(
        self,
        link: Link | Sequence[Link],
        seed: int = 0,
        *,
        mtu_bytes: int | None = None,
        congestion: str | None = None,
    ) -> None:
        """There are no namespaces yet.

        Args:
            link: of all peers, or several that peers have in turn.
            seed: of lost packets.
            mtu_bytes: of the largest packets; None decides by the rates.
            congestion: TCP's congestion control, as cubic or bbr; None: this machine's.
        """
        self._shaper = Shaper(link, seed)
        each = (link,) if isinstance(link, Link) else link
        is_fast = max(max(one.up_mbit, one.down_mbit) for one in each) > FAST_MBIT
        self._mtu_bytes = mtu_bytes or (FAST_MTU_BYTES if is_fast else MTU_BYTES)
        self._congestion = congestion
        self._devices: dict[int, int] = {}
        """Peer -> file descriptor of its TUN device."""
        self._peers: dict[int, int] = {}
        """The other way round."""
        self._hidden: set[int] = set()
        self._lock = threading.Lock()
        self._poll = select.epoll()
        self._thread = SupervisedThread("shaper", self._forward)
        _remove_leftovers()
        self._thread.start()

    def place(self, peer: int) -> tuple[list[str], list[str]]:
        """See `Links`; makes the namespace at the first call."""
        if peer >= MAX_PEERS:
            raise SwarmError(f"peer {peer}: an emulated network has room for {MAX_PEERS}")
        if peer not in self._devices:
            self._make(peer)
        listen = ["--host-maddrs", f"/ip4/{address_of(peer)}/tcp/0"]
        return ["ip", "netns", "exec", _name(peer)], listen

    def _make(self, peer: int) -> None:
        name = _name(peer)
        handle = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        try:
            _furnish(handle, peer, self._mtu_bytes)
            if self._congestion:
                _set_congestion(name, self._congestion)
        except BaseException:
            os.close(handle)
            _remove(name)
            raise
        with self._lock:
            self._devices[peer], self._peers[handle] = handle, peer
            self._poll.register(handle, select.EPOLLIN)

    # ------------------------------------------------ faults

    def cut(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Links`."""
        with self._lock:
            self._shaper.cuts.pairs |= set(pairs)

    def mend(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Links`."""
        with self._lock:
            self._shaper.cuts.pairs -= set(pairs)

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        """See `Links`."""
        with self._lock:
            self._shaper.cuts.partition(groups)

    def heal(self) -> None:
        """See `Links`."""
        with self._lock:
            self._shaper.cuts.heal()

    def hide(self, peers: Sequence[int]) -> None:
        """From now on nobody can open a connection to these peers, as behind a router."""
        with self._lock:
            self._hidden |= set(peers)

    def close(self) -> None:
        """Ends the thread and removes the namespaces; the peers in them have ended by now."""
        self._thread.stop(5.0)
        for peer, handle in self._devices.items():
            os.close(handle)
            _remove(_name(peer))
        self._devices, self._peers = {}, {}
        self._poll.close()

    # ------------------------------------------------ packets

    @property
    def packets(self) -> dict[str, int]:
        """What became of packets -> how many."""
        return self._shaper.packets

    def _forward(self) -> None:
        while not self._thread.stopping.is_set():
            next_s = self._shaper.next_s
            until_s = IDLE_S if next_s is None else next_s - time.monotonic()
            for handle, _ in self._poll.poll(max(0.0, min(until_s, IDLE_S))):
                for packet in _read_all(handle, self._mtu_bytes):
                    self._send(packet, handle)
            for target, packet in self._shaper.arrived(time.monotonic()):
                _write(self._devices[target], packet)

    def _send(self, packet: bytes, handle: int) -> None:
        # IPv4 only: the destination is in bytes 16 to 19; the third says which peer.
        if packet[0] >> 4 != 4:
            return
        with self._lock:
            source, target = self._peers[handle], packet[18]
            is_hidden = target in self._hidden and _opens(packet)
            if target in self._devices and not is_hidden:
                self._shaper.send(time.monotonic(), source, target, packet)


def _name(peer: int, pid: int | None = None) -> str:
    return f"swarm-{pid or os.getpid()}-{peer}"


def address_of(peer: int) -> str:
    """The IPv4 address of a peer."""
    return f"{SUBNET.format(peer=peer)}.2"


def _try_one() -> None:
    """Makes a namespace as peers get them, and removes it.

    Raises:
        OSError: the device cannot be made.
        SwarmError: a command fails.
        subprocess.TimeoutExpired: one does not end.
    """
    nobody = MAX_PEERS
    handle = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    try:
        _furnish(handle, nobody, MTU_BYTES)
        _ip("netns", "exec", _name(nobody), "true")
    finally:
        os.close(handle)
        _remove(_name(nobody))


def _furnish(handle: int, peer: int, mtu_bytes: int) -> None:
    """Makes the namespace of a peer, with the device whose other end is an open TUN."""
    name, device = _name(peer), f"sw{os.getpid() % 10**7}p{peer}"
    fcntl.ioctl(handle, TUNSETIFF, struct.pack("16sH22s", device.encode(), IFF_TUN_NO_PI, b""))
    _ip("netns", "add", name)
    _ip("link", "set", device, "netns", name)
    inside = ("-n", name)
    _ip(*inside, "link", "set", "lo", "up")
    _ip(*inside, "addr", "add", f"{address_of(peer)}/24", "dev", device)
    _ip(*inside, "link", "set", device, "mtu", str(mtu_bytes), "up")
    _ip(*inside, "route", "add", "default", "dev", device)


def _read_all(handle: int, mtu_bytes: int) -> list[bytes]:
    found = []
    while True:
        try:
            found.append(os.read(handle, mtu_bytes + 64))
        except BlockingIOError:
            return found


def _opens(packet: bytes) -> bool:
    """Whether an IPv4 packet begins a TCP connection, or is of a protocol without any."""
    header_bytes = (packet[0] & 0x0F) * 4
    is_tcp = packet[9] == TCP and len(packet) > header_bytes + 13
    return not is_tcp or packet[header_bytes + 13] & (SYN | ACK) == SYN


def _write(handle: int, packet: bytes) -> None:
    try:
        os.write(handle, packet)
    except OSError:  # the device's queue is full, or it goes away: a lost packet
        return


def _ip(*arguments: str) -> None:
    result = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    if result.returncode:
        raise SwarmError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")


def _set_congestion(name: str, congestion: str) -> None:
    """Inside a namespace the kernel takes only those that the machine allows to everybody."""
    try:
        _ip("netns", "exec", name, "sh", "-c", f"echo {congestion} >{CONGESTION}")
    except SwarmError as error:
        raise SwarmError(
            f"TCP's congestion control {congestion} cannot be used in a namespace of its own",
            hint=f"echo 'reno cubic bbr' >{ALLOWED}, as root, allows it ({error})",
        ) from error


def _remove(name: str) -> None:
    subprocess.run(
        ["ip", "netns", "del", name], capture_output=True, timeout=COMMAND_S, check=False
    )


def _remove_leftovers() -> None:
    """Namespaces of programs that were killed before they could take theirs down."""
    for path in sorted(Path("/run/netns").glob("swarm-*-*")):
        pid = path.name.split("-")[1]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            _remove(path.name)
