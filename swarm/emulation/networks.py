"""Emulated networks: namespaces if this user may make them, or else TCP proxies of this process."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from swarm.background import SupervisedThread
from swarm.emulation.controls import INDEX_VARIABLE
from swarm.emulation.links import LINKS, Cuts, Link, Links, Shaper, one_way_s
from swarm.errors import SwarmError

TUN = Path("/dev/net/tun")
TUNSETIFF = 0x400454CA
IFF_TUN_NO_PI = 0x1001
SUBNET = "10.77.{peer}"
MAX_PEERS = 250
MTU_BYTES = 1500
FAST_MBIT = 200.0
FAST_MTU_BYTES = 9000
"""Packet size above FAST_MBIT. With smaller packets this process would be the bottleneck."""
COMMAND_S = 10.0
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
ALLOWED = "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
TCP, SYN, ACK = 6, 0x02, 0x10
IDLE_S = 0.2


@functools.cache
def why_not_here() -> str | None:
    """Why this machine or user cannot have network namespaces. None if they can.

    Makes one namespace as a test, once a process: root in a container may lack the capabilities.
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
    """See `Links`. The network exists from the first `place` to `close`."""

    def __init__(
        self,
        link: Link | Sequence[Link],
        seed: int = 0,
        *,
        mtu_bytes: int | None = None,
        congestion: str | None = None,
    ) -> None:
        """Begins without namespaces.

        Args:
            link: the link of all peers, or several that peers get in turn.
            seed: seed that decides lost packets.
            mtu_bytes: size of the largest packets. None: chosen by the rates.
            congestion: TCP's congestion control, such as cubic or bbr. None: this machine's.
        """
        self._shaper = Shaper(link, seed)
        each = (link,) if isinstance(link, Link) else link
        is_fast = max(max(one.up_mbit, one.down_mbit) for one in each) > FAST_MBIT
        self._mtu_bytes = mtu_bytes or (FAST_MTU_BYTES if is_fast else MTU_BYTES)
        self._congestion = congestion
        self._devices: dict[int, int] = {}
        """File descriptor of each peer's TUN device."""
        self._peers: dict[int, int] = {}
        """The peer of each TUN device, by file descriptor."""
        self._hidden: set[int] = set()
        self._lock = threading.Lock()
        self._poll = select.epoll()
        self._thread = SupervisedThread("shaper", self._forward)
        _remove_leftovers()
        self._thread.start()

    def place(self, peer: int) -> tuple[list[str], list[str]]:
        """See `Links`. Makes the namespace at the first call."""
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
        """From now on, nobody can open a connection to these peers, as if behind a router."""
        with self._lock:
            self._hidden |= set(peers)

    def close(self) -> None:
        """Ends the thread and removes the namespaces. The peers in them must have ended before."""
        self._thread.stop(5.0)
        for peer, handle in self._devices.items():
            os.close(handle)
            _remove(_name(peer))
        self._devices, self._peers = {}, {}
        self._poll.close()

    # ------------------------------------------------ packets

    @property
    def packets(self) -> dict[str, int]:
        """Number of packets by their fate."""
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
        # IPv4 only: the destination is in bytes 16 to 19; the third of them is the peer.
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
    """Makes a namespace like those of peers, and removes it.

    Raises:
        OSError: the device cannot be made.
        SwarmError: a command fails. subprocess.TimeoutExpired: a command does not end.
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
    """Makes the namespace of a peer, with a device whose other end is an open TUN."""
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
    """Whether an IPv4 packet opens a TCP connection, or is of a protocol without connections."""
    header_bytes = (packet[0] & 0x0F) * 4
    is_tcp = packet[9] == TCP and len(packet) > header_bytes + 13
    return not is_tcp or packet[header_bytes + 13] & (SYN | ACK) == SYN


def _write(handle: int, packet: bytes) -> None:
    try:
        os.write(handle, packet)
    except OSError:  # the device is full or is being removed: the packet is lost
        return


def _ip(*arguments: str) -> None:
    result = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, timeout=COMMAND_S, check=False
    )
    if result.returncode:
        raise SwarmError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")


def _set_congestion(name: str, congestion: str) -> None:
    """Sets a namespace's congestion control, which the machine must allow to everybody."""
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
    """Removes namespaces of programs that were killed before they removed them."""
    for path in sorted(Path("/run/netns").glob("swarm-*-*")):
        pid = path.name.split("-")[1]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            _remove(path.name)


CHUNK_BYTES = 16 * 1024
MOST_CHUNKS = 256
"""Most chunks per direction of a connection that queue on a line, and that are in flight."""
CUT_POLL_S = 0.1
STOP_S = 5.0
HOST = "127.0.0.1"
Chunks = asyncio.Queue[tuple[float, bytes]]
"""Chunks, each with the moment when it leaves, by the monotonic clock. An empty chunk ends."""


class ProxyLinks:
    """See `Links`."""

    def __init__(self, link: Link | Sequence[Link]) -> None:
        self._shape, self._cuts = Shaper(link), Cuts()
        self._ports: dict[int, tuple[int, int]] = {}
        """Ports of each peer: (its own, its proxy's)."""
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = SupervisedThread("proxies", self._loop.run_forever)
        self._thread.start()

    def place(self, peer: int) -> tuple[list[str], list[str]]:
        """See `Links`. Opens the proxy at the first call."""
        if peer not in self._ports:
            listening = socket.create_server((HOST, 0))
            self._ports[peer] = (_free_port(), listening.getsockname()[1])
            asyncio.run_coroutine_threadsafe(self._serve(peer, listening), self._loop).result(
                STOP_S
            )
        own, announced = self._ports[peer]
        return [], [
            "--host-maddrs", f"/ip4/{HOST}/tcp/{own}",
            "--announce-maddrs", f"/ip4/{HOST}/tcp/{announced}",
            "--no-direct",  # direct streams would go past the proxy
        ]  # fmt: skip

    def cut(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Links`."""
        self._cuts.pairs = self._cuts.pairs | set(pairs)

    def mend(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Links`."""
        self._cuts.pairs = self._cuts.pairs - set(pairs)

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        """See `Links`."""
        self._cuts.partition(groups)

    def heal(self) -> None:
        """See `Links`."""
        self._cuts.heal()

    def close(self) -> None:
        """See `Links`."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread.stop(STOP_S):
            self._loop.close()

    # ------------------------------------------------ streams, in the loop

    async def _serve(self, peer: int, listening: socket.socket) -> None:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await self._join(peer, reader, writer)
            finally:
                self._tasks.discard(task)

        self._servers.append(await asyncio.start_server(accepted, sock=listening))

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _join(
        self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carries one connection, both ways, until either end closes."""
        port = writer.get_extra_info("peername")[1]
        source = await asyncio.to_thread(self._dialler, port)
        try:
            inner_reader, inner_writer = await asyncio.open_connection(HOST, self._ports[target][0])
        except OSError:
            writer.close()
            return
        both = [
            asyncio.ensure_future(self._carry(source, target, reader, inner_writer)),
            asyncio.ensure_future(self._carry(target, source, inner_reader, writer)),
        ]
        try:
            # The end of one direction is passed on. An error, such as a reset, ends both
            # directions.
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            writer.close()
            inner_writer.close()

    async def _carry(
        self, source: int, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carries one direction: each chunk takes the line up, the line down and the delay.

        A chunk takes the line down only after it left the line up, so other peers' chunks may pass.
        """
        climbing, flying = Chunks(MOST_CHUNKS), Chunks(MOST_CHUNKS)
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._send_up(source, target, reader, climbing))
            parts.create_task(self._send_down(source, target, climbing, flying))
            parts.create_task(self._deliver(source, target, flying, writer))

    async def _send_up(
        self, source: int, target: int, reader: asyncio.StreamReader, climbing: Chunks
    ) -> None:
        up, down = self._shape.access_of(source).up, self._shape.access_of(target).down
        while chunk := await reader.read(CHUNK_BYTES):
            while down.is_full(time.monotonic()):  # like TCP, send no more now
                await asyncio.sleep(CUT_POLL_S)
            while (left_s := up.leaves_at(time.monotonic(), len(chunk))) is None:
                await asyncio.sleep(CUT_POLL_S)
            await climbing.put((left_s, chunk))
        await climbing.put((time.monotonic(), b""))

    async def _send_down(self, source: int, target: int, climbing: Chunks, flying: Chunks) -> None:
        delay_s = one_way_s(self._shape.link_of(source), self._shape.link_of(target))
        down, chunk = self._shape.access_of(target).down, b"-"
        while chunk:
            left_s, chunk = await climbing.get()
            await _sleep_until(left_s)
            await self._while_cut(source, target)
            # A delay by a busy machine does not count. A delay by a cut or a slow reader counts.
            left_s = max(left_s, time.monotonic() - CUT_POLL_S)
            while (through_s := down.leaves_at(left_s, len(chunk))) is None:
                await asyncio.sleep(CUT_POLL_S)
                left_s = max(left_s, time.monotonic())
            await flying.put((through_s + delay_s, chunk))

    async def _deliver(
        self, source: int, target: int, flying: Chunks, writer: asyncio.StreamWriter
    ) -> None:
        chunk = b"-"
        while chunk:
            at_s, chunk = await flying.get()
            await _sleep_until(at_s)
            await self._while_cut(source, target)
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()

    async def _while_cut(self, source: int, target: int) -> None:
        while self._cuts.loses(source, target):
            await asyncio.sleep(CUT_POLL_S)

    def _dialler(self, port: int) -> int:
        """The peer that dials from a port. -1 for others, such as a monitor."""
        for peer, (own, _) in self._ports.items():
            if port == own:  # libp2p dials from its listening port where it can
                return peer
        return _peer_of_socket(port)


async def _sleep_until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def _peer_of_socket(port: int) -> int:
    """Number of the peer whose process has a socket with this local port. -1 if none has."""
    wanted = f"0100007F:{port:04X}"
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    inode = next((row[9] for row in rows if row[1] == wanted and row[9] != "0"), None)
    if inode is None:
        return -1
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = (os.readlink(path) for path in (process / "fd").iterdir())
            if f"socket:[{inode}]" not in links:
                continue
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended, or belongs to somebody else
            continue
        name = f"{INDEX_VARIABLE}=".encode()
        return next((int(v[len(name) :]) for v in variables if v.startswith(name)), -1)
    return -1


def open_links(names: Sequence[str], say: Callable[[str], None], seed: int = 0) -> Links:
    """Opens a network with these links: with namespaces where possible, or else with proxies.

    Args:
        names: names of links, see `LINKS`. The peers get the links in turn.
        say: called with the reason if the network is made of proxies.
        seed: seed that decides lost packets.
    """
    links = [LINKS[name] for name in names]
    why_not = why_not_here()
    if why_not is None:
        return NamespaceLinks(links, seed)
    lossless = " without packet loss" if any(link.mean_loss_pct for link in links) else ""
    shown = ",".join(names)
    say(f"--link {shown}: {why_not}; peers are joined by TCP proxies{lossless} instead")
    return ProxyLinks(links)
