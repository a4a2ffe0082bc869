"""libp2p's daemon (p2pd): starts it, and chooses where it listens and dials."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from uuid import UUID

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError

from swarm.config import NetworkSection
from swarm.config.peer_settings import HOST_KINDS
from swarm.errors import ConfigError, NetworkDown
from swarm.network.wire.identity import public_key_of
from swarm.network.wire.upload_rate import LineBytes
from swarm.protocol.records.records import MAX_ADDRESSES

logger = logging.getLogger(__name__)

_FORM = "/ip4/A.B.C.D/tcp/PORT/p2p/ID"
_PR_SET_PDEATHSIG = 1
STARTUP_S = 15.0
_ASK_AFTER_S = (0.0, 0.5, 0.5)
GREETING_S = 3.0
"""Limit for libp2p's greeting, the first bytes on an accepted connection."""
CONNECT_S = 5.0
CLOSE_S = 2.0
P2PD = "p2pd"
_GREETING = b"\x13/multistream/1.0.0\n"
_IS_LATE = "failed to start in"
"""hivemind's words for a daemon that was not ready within `STARTUP_S`."""
_SECURITY = ("-noise=false",)
"""Option for TLS 1.3 alone, which every p2pd speaks. With AES in hardware, as nearly everywhere,
TLS costs p2pd a fifth less user CPU time than Noise's ChaCha20 (measured,
scripts/benchmarks/bench_averaging.py)."""


@dataclass(frozen=True, order=True)
class Address:
    """A multiaddress that can be dialed.

    Attributes:
        text: the whole address.
        transport: without /p2p/ID, the only part that p2pd's `connect` understands (measured).
        host: name or number.
        port: the TCP port.
        peer_id: id of the peer that should answer there.
    """

    text: str
    transport: str
    host: str
    port: int
    peer_id: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads `/ip4/A.B.C.D/tcp/PORT/p2p/ID`.

        Raises:
            ConfigError: the text is not of this form.
        """
        try:
            parts = dict(Multiaddr(text).items())
            named = {protocol.name: value for protocol, value in parts.items()}
            host_kind = next(kind for kind in HOST_KINDS if kind in named)
            host, port, peer_id = named[host_kind], int(named["tcp"]), named["p2p"]
        except (MultiaddrError, StopIteration, KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"peer address {text[:200]!r}: expected the form {_FORM}") from error
        if len(named) != 3 or not 0 < port < 65536 or public_key_of(peer_id) is None:
            raise ConfigError(f"peer address {text[:200]!r}: expected the form {_FORM}")
        return cls(text, f"/{host_kind}/{host}/tcp/{port}", host, port, peer_id)


async def probe(address: Address, timeout_s: float) -> str | None:
    """Why no libp2p host answers at this address; None if one does.

    An open port is not enough: the kernel accepts connections for a stopped process, and some
    firewalls accept connections without any process. p2pd would wait for such an address until its
    start is given up.

    Args:
        address: address to connect to.
        timeout_s: time limit of the connection. The greeting has another `GREETING_S`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address.host, address.port)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return connection_fault(error)
    try:
        async with asyncio.timeout(GREETING_S):
            said = await reader.readexactly(len(_GREETING))
    except TimeoutError:
        return f"something accepts connections and says nothing for {GREETING_S:g} s"
    except (asyncio.IncompleteReadError, OSError):
        return "something accepts connections and ends them"
    finally:
        writer.close()
    return None if said == _GREETING else "something answers that is no peer"


def is_unanswered(error: P2PDaemonError) -> bool:
    """Whether a daemon did not start because none of its entrances answered."""
    return "bootstrap peers" in str(error) or _IS_LATE in str(error)


def connection_fault(error: OSError) -> str:
    """Why a connection could not be opened, in the system's words."""
    if isinstance(error, socket.gaierror):  # its error numbers are not those of the system
        return f"the name cannot be resolved: {error.strerror}"
    return os.strerror(error.errno) if error.errno else str(error) or type(error).__name__


def listen_addresses(network: NetworkSection, port: int | None) -> tuple[str, ...]:
    """The addresses to listen on: those of the configuration, with `port` in place of port 0.

    If the remembered port is in use now, a free port is used, with a warning.

    Raises:
        NetworkDown: a configured port is in use, or cannot be listened on.
    """
    return tuple(_with_port(text, port) for text in network.host_maddrs)


def hosts_of(network: NetworkSection) -> tuple[str, ...]:
    """The hosts in the listening addresses, without those given by name."""
    parts = [text.split("/") for text in network.host_maddrs]
    return tuple(host for _, protocol, host, *_ in parts if protocol in ("ip4", "ip6"))


def _with_port(text: str, port: int | None) -> str:
    _, protocol, host, _, number = text.split("/")
    if number != "0":
        if fault := _listening_fault(protocol, host, int(number)):
            hint = "end what listens there, or choose another --host-maddrs"
            raise NetworkDown(
                f"cannot listen on {text}: {fault.strerror or fault}",
                hint=foreign_address_hint(fault, host, int(number)) or hint,
            )
        return text
    if port is None:
        return text
    fault = _listening_fault(protocol, host, port)
    if fault:
        why = fault.strerror or fault
        logger.warning("port %d on %s: %s; taking a free one", port, host, why)
        return text
    return f"/{protocol}/{host}/tcp/{port}"


def foreign_address_hint(fault: OSError, host: str, port: int) -> str | None:
    """Advice for a configured listening address that the machine does not have.

    Cloud providers and routers translate a public address to a private one.
    """
    if fault.errno != errno.EADDRNOTAVAIL:
        return None
    return (
        f"this machine does not have the address {host}: listen on all that it has and announce "
        f"this one, with --port {port} --public-ip {host} in place of --host-maddrs"
    )


def _listening_fault(protocol: str, host: str, port: int) -> OSError | None:
    """Why the port cannot be used; p2pd would silently share it with another p2pd.

    Both set SO_REUSEPORT, so either may get a connection. Names are left to p2pd.
    """
    if protocol not in ("ip4", "ip6"):
        return None
    family = socket.AF_INET6 if protocol == "ip6" else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        return error
    return None


def host_of_default_route() -> str | None:
    """This machine's address on the network that leads to the internet; None if there is none.

    Asks the system for the route to an address reserved for documentation; nothing is sent.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.connect(("192.0.2.1", 9))
            return str(asking.getsockname()[0])
    except OSError:
        return None


def dialable(
    visible: Sequence[str], preferred: str | None = None, *, says: bool = True
) -> tuple[str, ...]:
    """The addresses to announce, in the order in which joiners should try them.

    Public addresses come first, then the preferred host, then the others in the given order. On a
    machine with containers, peers elsewhere cannot dial some of these addresses.

    Loopback addresses are used only if there are no others. If there are more addresses than a
    record may have, for example with many container networks, the last private addresses are left
    out. `says` logs this.
    """
    known = dict.fromkeys(visible)
    outside = [text for text in known if not is_loopback(text)]
    ordered = sorted(
        outside or known, key=lambda text: (_is_private(text), text.split("/")[2] != preferred)
    )
    if says and (left_out := len(ordered[MAX_ADDRESSES:])):
        logger.warning("%d addresses are not announced to others; --host-maddrs chooses", left_out)
    return tuple(ordered[:MAX_ADDRESSES])


def _is_private(text: str) -> bool:
    """Whether the address is a number that is not routable on the internet."""
    _, protocol, host, *_ = text.split("/")
    return protocol in ("ip4", "ip6") and not ip_address(host).is_global


def is_loopback(text: str) -> bool:
    """Whether only this machine reaches the address."""
    return text.startswith(("/ip4/127.", "/ip6/::1/"))


async def start_daemon(
    network: NetworkSection,
    *,
    identity_path: Path,
    listen: Sequence[str],
    initial_peers: Sequence[str],
    line: LineBytes,
) -> P2P:
    """Starts p2pd, which ends with the calling thread and ignores this terminal's Ctrl+C.

    Its bytes count on `line` until `end_daemon`.

    Raises:
        P2PDaemonError: it did not start.
    """
    local = all(is_loopback(text) for text in listen)
    p2p = await _create(
        line,
        initial_peers=list(initial_peers) or None,
        announce_maddrs=list(network.announce_maddrs) or None,
        host_maddrs=None if network.client_mode else list(listen),
        no_listen=network.client_mode,
        dht_mode="client" if network.client_mode else "server",
        identity_path=str(identity_path),
        check_if_identity_free=False,
        nat_port_map=not local,
    )
    control = p2p._client.control
    control._pending_calls = _LivingCalls(control._pending_calls)
    return p2p


async def is_identity_taken(peer_id: str, initial_peers: Sequence[str], line: LineBytes) -> bool:
    """Whether a peer of this identity answers; a second peer would take its connections.

    Asks several times. hivemind's own check asks once, just after its daemon has started, and
    overlooked a peer that had started just before.

    Raises:
        P2PDaemonError: the asking daemon did not start, or reached none of the peers.
    """
    wanted = PeerID.from_base58(peer_id)
    asking = await _create(
        line, initial_peers=list(initial_peers), no_listen=True, dht_mode="client"
    )
    try:
        for pause_s in _ASK_AFTER_S:
            await asyncio.sleep(pause_s)
            with suppress(ControlFailure, TimeoutError):
                await asyncio.wait_for(asking._client.connect(wanted, []), CONNECT_S)
                return True
        return False
    finally:
        await end_daemon(asking, line)


async def end_daemon(p2p: P2P, line: LineBytes) -> None:
    """Ends p2pd, by force if it does not stop, and counts the bytes that it moved."""
    line.daemon_ends(p2p._child.pid)
    try:
        async with asyncio.timeout(CLOSE_S):
            await p2p.shutdown()
    except TimeoutError:
        p2p._child.kill()


async def _create(line: LineBytes, **options: Any) -> P2P:
    _tie_daemons_to_their_thread()
    children: list[asyncio.subprocess.Process] = []
    _children.set(children)
    try:
        p2p = await P2P.create(**options, startup_timeout=STARTUP_S)
    except BaseException:
        for child in children:
            line.daemon_began(child.pid)
            line.daemon_ends(child.pid)
        await _end(children)
        raise
    line.daemon_began(p2p._child.pid)
    return p2p


class _LivingCalls(dict[UUID, "asyncio.Future[bytes]"]):
    """hivemind's unanswered calls, without calls that have ended.

    Otherwise an answer that arrives in the same turn of the loop as its call's timeout would raise
    in the task that reads all answers. Then this node would never receive an answer again
    (measured, after a pause of the process).
    """

    def __contains__(self, call_id: object) -> bool:
        call = self.get(call_id)  # type: ignore[call-overload]
        return call is not None and not call.done()


async def _end(children: Sequence[asyncio.subprocess.Process]) -> None:
    """Ends the daemon of a failed start, which hivemind does not do."""
    for child in children:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()


_children: ContextVar[list[asyncio.subprocess.Process]] = ContextVar("children")
_tie_lock = threading.Lock()


def _tie_daemons_to_their_thread() -> None:
    """Wraps asyncio's process start once, for p2pd only; hivemind offers no hook for this."""
    with _tie_lock:
        real = asyncio.subprocess.create_subprocess_exec
        if getattr(real, "ties_p2pd", False):
            return
        # Looked up before the fork, since the child of a threaded process must not load libraries.
        prctl = ctypes.CDLL(None).prctl

        def die_with_parent() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        async def spawn(program: str, *args: str, **options: Any) -> asyncio.subprocess.Process:
            if os.path.basename(program) != P2PD:
                return await real(program, *args, **options)
            args = (*args, *_SECURITY)
            options |= {"preexec_fn": die_with_parent, "start_new_session": True}
            child = await real(program, *args, **options)
            _children.get().append(child)
            return child

        spawn.ties_p2pd = True  # type: ignore[attr-defined]
        asyncio.subprocess.create_subprocess_exec = spawn  # type: ignore[assignment]
