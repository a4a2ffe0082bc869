"""Peers probe each other: identity, address as seen from outside, dial-back, and speed.

Every peer answers these questions, within limits. So a peer that wants to join can report faults of
its machine before it downloads anything.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.errors import BadMessage, HostileInput, Unreachable
from swarm.network.node.node import Node
from swarm.network.wire.daemon import connection_fault
from swarm.network.wire.ledger import Cost, Ledger
from swarm.network.wire.steady_clock import dht_clock
from swarm.network.wire.streams import receive_into
from swarm.network.wire.traffic import Traffic
from swarm.network.wire.upload_rate import Sample, fill, full_rate_mbit, sampled
from swarm.version import __version__

logger = logging.getLogger(__name__)

QUESTION = b"probe "
PROTOCOL = "swarm.measure/1"
MAX_BYTES = 8 * 2**20
_DIAL_S = _OPEN_S = 5.0
DIALLING = 3
"""How many neighbours a peer asks to dial it."""
DIALLING_S = _DIAL_S + 1.0
ANSWER_S = 10.0
_STREAM_S = 30.0
BESIDE = 0.02
"""A test counts as undisturbed if other bytes on the link are at most this share of its own."""
_PART_BYTES = 64 * 1024
_ASK = struct.Struct(">BI")
_BANNER = b"/multistream/1.0.0\n"
"""First bytes that a libp2p peer sends on a new connection."""


class Question(BaseModel):
    """A question."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: Literal["about", "dial"]
    port: int = Field(default=0, ge=0, le=65_535)
    """The port to dial, always at the sender's host, so that no third host is probed."""


class About(BaseModel):
    """A peer's answer about itself and about the sender of the question."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    version: str = Field(max_length=64)
    clock: float
    """Seconds since 1970, by the clock of its records."""
    seen_at: str = Field(max_length=256)
    """Transport address of the asking peer's connection; "" if it is not known."""


class Dialled(BaseModel):
    """The result of dialing the asking peer."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    fault: str | None = Field(max_length=300)


Answer = TypeVar("Answer", About, Dialled)


# ---------------------------------------------------------------- answering


class Prober:
    """The answering side: `answer` for questions, `serve` for the bulk protocol."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        """Answers within the limits of the ledger, which is the node's."""
        self._ledger = ledger or Ledger()

    async def answer(self, node: Node, source: str, payload: bytes) -> bytes:
        """Answers a question that begins with `QUESTION`.

        Raises:
            BadMessage: it does not fit the schema.
            TooCostly: too many dials.
        """
        try:
            question = Question.model_validate_json(payload[len(QUESTION) :])
        except ValidationError as error:
            raise BadMessage("probe_schema", "no such question") from error
        seen_at = await node.seen_at(source)
        if question.kind == "about":
            about = About(version=__version__, clock=dht_clock()(), seen_at=seen_at)
            return about.model_dump_json().encode()
        self._ledger.take(source, Cost.DIALS, 1, time.monotonic())
        fault = await _dial(seen_at, question.port)
        return Dialled(fault=fault).model_dump_json().encode()

    async def serve(
        self,
        traffic: Traffic,
        source: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Sends or receives the requested number of bytes; the asking side closes."""
        held = None
        try:
            held = self._ledger.take(source, Cost.STREAMS, 1, time.monotonic())
            async with asyncio.timeout(_STREAM_S):
                await self._measure(traffic, source, reader, writer)
        except HostileInput as error:
            traffic.refuse(error.reason)
        finally:
            if held:
                self._ledger.give_back(held, time.monotonic())

    async def _measure(
        self,
        traffic: Traffic,
        source: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        is_down, num_bytes = _ASK.unpack(await reader.readexactly(_ASK.size))
        if num_bytes > MAX_BYTES:
            raise BadMessage("probe_limit", "the measurement is too large")
        held = self._ledger.take(source, Cost.MEASURING, 1, time.monotonic())
        try:
            self._ledger.take(source, Cost.MEASURED, num_bytes, time.monotonic())
            await (_send if is_down else _take)(num_bytes, traffic, reader, writer)
        finally:
            self._ledger.give_back(held, time.monotonic())
        while await reader.read(_PART_BYTES):
            pass


async def _send(
    num_bytes: int, traffic: Traffic, _: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    part = bytes(_PART_BYTES)
    for start in range(0, num_bytes, _PART_BYTES):
        await traffic.up.wait(min(_PART_BYTES, num_bytes - start))
        writer.write(part[: num_bytes - start])
        await writer.drain()
        traffic.measuring_bytes_sent += min(_PART_BYTES, num_bytes - start)


async def _take(
    num_bytes: int, traffic: Traffic, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answers each part with a byte, so that the sender counts only bytes that arrived."""
    for _ in range(num_bytes // _PART_BYTES):
        await traffic.down.wait(_PART_BYTES)
        await reader.readexactly(_PART_BYTES)
        writer.write(b"\x01")
        await writer.drain()


async def _dial(seen_at: str, port: int) -> str | None:
    """Why the asking peer cannot be dialed at a port of its host; None if it can.

    Raises:
        BadMessage: the peer's host is not known, for example because others relayed the question.
    """
    if seen_at.count("/") < 4 or not seen_at.startswith("/ip"):
        raise BadMessage("probe_unknown", "your address is not known")
    host = seen_at.split("/")[2]
    try:
        async with asyncio.timeout(_DIAL_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                greeting = await reader.readexactly(1 + len(_BANNER))
            finally:
                writer.close()
    except TimeoutError:
        return f"no answer from {host} port {port} within {_DIAL_S:g} s"
    except (OSError, asyncio.IncompleteReadError) as error:
        why = (
            connection_fault(error)
            if isinstance(error, OSError)
            else "it closed the connection at once"
        )
        return f"{host} port {port}: {why}"
    return None if greeting[1:] == _BANNER else f"another program is at {host} port {port}"


@asynccontextmanager
async def greeting(hosts: Sequence[str], port: int) -> AsyncIterator[None]:
    """Greets dialing peers like libp2p, on a port where libp2p does not listen yet.

    Raises:
        OSError: the port cannot be listened on.
    """

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes([len(_BANNER)]) + _BANNER)
        writer.close()

    async with AsyncExitStack() as undo:
        for host in dict.fromkeys(hosts):
            await undo.enter_async_context(await asyncio.start_server(greet, host, port))
        yield


# ---------------------------------------------------------------- asking


@dataclass(frozen=True)
class Look:
    """The answer of one peer, and its timing.

    Attributes:
        about: answer of the peer.
        rtt_ms: shortest round trip of a few questions.
        clock_offset_s: the peer's clock minus this machine's.
    """

    about: About
    rtt_ms: float
    clock_offset_s: float


async def look_at(node: Node, peer: str, questions: int = 3) -> Look:
    """Asks a peer about itself, and measures the time.

    Raises:
        Unreachable: no answer, or an invalid one.
    """
    looks = []
    for _ in range(questions):
        sent, began_s = time.time(), time.monotonic()
        about = await _ask(node, peer, Question(kind="about"), About)
        rtt_s = time.monotonic() - began_s
        looks.append(Look(about, rtt_s * 1e3, about.clock - sent - rtt_s / 2))
    return min(looks, key=lambda look: look.rtt_ms)


async def dial_back(node: Node, peer: str, port: int) -> str | None:
    """Why a peer cannot dial this machine at a port; None if it can.

    Raises:
        Unreachable: the peer gave no answer.
    """
    return (await _ask(node, peer, Question(kind="dial", port=port), Dialled)).fault


async def dial_fault(node: Node) -> str | None:
    """Why no neighbour of a few can dial this peer; None if one can, or if none answers."""
    port = node.port
    if port is None:
        return None
    tries = (dial_back(node, peer, port) for peer in sorted(node.neighbours)[:DIALLING])
    try:
        async with asyncio.timeout(DIALLING_S):
            found = await asyncio.gather(*tries, return_exceptions=True)
    except TimeoutError:  # a neighbour's silence proves nothing about this machine
        return None
    faults = [fault for fault in found if not isinstance(fault, BaseException)]
    return faults[0] if faults and None not in faults else None


async def measure_mbit(
    node: Node, peer: str, *, is_down: bool, limit_s: float, num_bytes: int = MAX_BYTES
) -> float:
    """The rate towards (down) or away from this peer over one connection.

    Counts the second half of the time, when the connection has reached its speed.

    Args:
        node: this peer's.
        peer: the other end.
        is_down: direction.
        limit_s: longest time, once there is a connection.
        num_bytes: most bytes to move; a multiple of 64 KiB, at most 8 MiB.

    Raises:
        Unreachable: no connection, or too few bytes for a result.
    """
    move = _receive if is_down else _transmit
    return (await _measured(node, peer, move, limit_s=limit_s, num_bytes=num_bytes))[0]


async def measure_uplink(
    node: Node, peer: str, *, limit_s: float, num_bytes: int = MAX_BYTES
) -> tuple[float, float | None]:
    """The rate away from this peer, as `measure_mbit` has it, and the rate of a full uplink.

    The second rate is None if the uplink was not the limit, or if other data was sent at the same
    time. It is also None if the kernel has no figures: over libp2p, and on other systems than
    Linux.

    Raises:
        Unreachable: as `measure_mbit`.
    """
    before = node.traffic.bytes_sent
    rate, samples = await _measured(node, peer, _transmit, limit_s=limit_s, num_bytes=num_bytes)
    was_alone = node.traffic.bytes_sent - before <= BESIDE * num_bytes
    return rate, full_rate_mbit(samples) if was_alone else None


async def _measured(
    node: Node,
    peer: str,
    move: Callable[[socket.socket, int, _Moved, Traffic], Awaitable[None]],
    *,
    limit_s: float,
    num_bytes: int,
) -> tuple[float, list[Sample]]:
    connection = await node.open_stream(peer, PROTOCOL, _OPEN_S)
    moved = _Moved(time.monotonic())
    try:
        with sampled(connection) as samples, suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await move(connection, num_bytes, moved, node.traffic)
    except OSError as error:
        raise Unreachable(f"{peer}: {error}") from error
    finally:
        connection.close()
    if moved.num_bytes < _PART_BYTES:
        raise Unreachable(f"{peer}: only {moved.num_bytes} bytes within {limit_s:g} s")
    return rate_mbit(moved.samples), samples


class _Moved:
    """Bytes over time."""

    def __init__(self, began_s: float) -> None:
        self.num_bytes = 0
        self.samples = [(began_s, 0)]

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.samples.append((time.monotonic(), self.num_bytes))


def rate_mbit(samples: Sequence[tuple[float, int]]) -> float:
    """The rate in the second half of the time; samples are (time, bytes so far), from (t, 0) on."""
    (began_s, _), (ended_s, total) = samples[0], samples[-1]
    middle_s = (began_s + ended_s) / 2
    start_s, before = [sample for sample in samples if sample[0] <= middle_s][-1]
    return (total - before) * 8 / 1e6 / max(ended_s - start_s, 1e-6)


async def _receive(
    connection: socket.socket, num_bytes: int, moved: _Moved, traffic: Traffic
) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, _ASK.pack(True, num_bytes))
    part = memoryview(bytearray(_PART_BYTES))
    for start in range(0, num_bytes, _PART_BYTES):
        await traffic.down.wait(min(_PART_BYTES, num_bytes - start))
        await receive_into(connection, part[: num_bytes - start], moved.add)


async def _transmit(
    connection: socket.socket, num_bytes: int, moved: _Moved, traffic: Traffic
) -> None:
    """Counts acknowledged bytes, since many sent bytes may still be in this machine."""
    fill(connection)
    loop = asyncio.get_running_loop()

    async def send() -> None:
        await loop.sock_sendall(connection, _ASK.pack(False, num_bytes))
        part = bytes(_PART_BYTES)
        for start in range(0, num_bytes, _PART_BYTES):
            await traffic.up.wait(min(_PART_BYTES, num_bytes - start))
            await loop.sock_sendall(connection, part[: num_bytes - start])

    sending = loop.create_task(send())
    try:
        acknowledged = memoryview(bytearray(num_bytes // _PART_BYTES))
        await receive_into(connection, acknowledged, lambda parts: moved.add(parts * _PART_BYTES))
    finally:
        sending.cancel()


async def _ask(node: Node, peer: str, question: Question, kind: type[Answer]) -> Answer:
    payload = QUESTION + question.model_dump_json().encode()
    answer = await node.request(peer, payload, ANSWER_S)
    try:
        return kind.model_validate_json(answer)
    except ValidationError as error:
        raise Unreachable(f"{peer}: its answer makes no sense") from error
