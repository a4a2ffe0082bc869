"""Messages between a controller and its nodes.

Messages are JSON and raw bytes of announced length. First both sides prove that they hold the same
key.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import json
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm import durable
from swarm.errors import BadMessage, ConfigError, CorruptState, StateError
from swarm.train.engine.tensor_file import TensorFile
from swarm.train.workers.exchange import Closed, Message

MAGIC = b"SWK1"
MAX_MESSAGE_BYTES = 64 * 2**20
"""Most bytes of a message's JSON. Raw bytes that follow the JSON do not count. A private state's
message lists the type and shape of every tensor: 30 MB for 100 layers with 512 experts."""
MAX_OFFSET = 2**53
"""Whole numbers below it are exact in every JSON decoder."""
STALL_S = 60.0
"""The other side counts as lost when nothing moves for this long within a message."""
CHUNK_BYTES = 2**20
_HEAD = struct.Struct(">4sIQ")
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR, linux/sockios.h

Segments = Sequence[tuple[int, int]]
"""Segments of a file: offset and number of bytes of each."""


class Wire:
    """One end of a connection, used by one sending and one receiving thread.

    Attributes:
        socket: readable when there is something to `receive`.
        limit: most bytes of a message's JSON.
    """

    def __init__(self, end: socket.socket, limit: int = MAX_MESSAGE_BYTES) -> None:
        """Takes ownership of the socket. A side that vanishes silently is noticed within 10 s."""
        self.socket, self.limit = end, limit
        self._received = bytearray()
        end.settimeout(STALL_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: Message, file: int | None = None, segments: Segments = ()) -> None:
        """Sends a message and, if a file is given, these places of the file.

        Raises:
            Closed: the other side has ended or does not read, or the file is too short.
        """
        try:
            self.socket.sendall(encoded(message, segments))
            if file is not None:
                for offset, count in segments:
                    self._send_part(file, offset, count)
        except OSError as error:
            raise Closed(str(error)) from error

    def _send_part(self, file: int, offset: int, count: int) -> None:
        # sendfile moves the position of its descriptor, which no other reader uses.
        with open(file, "rb", buffering=0, closefd=False) as content:
            if count and self.socket.sendfile(content, offset, count) < count:
                raise OSError(errno.EIO, "a file of tensors is too short")

    def receive(self) -> None:
        """Waits for bytes of the other side. `take` returns the messages that they complete.

        Raises:
            Closed: no more bytes will come.
        """
        try:
            content = self.socket.recv(2**16)
        except OSError as error:
            raise Closed(str(error)) from error
        if not content:
            raise Closed("the connection is closed")
        self._received += content

    def take(self) -> tuple[Message, Segments] | None:
        """The next message, and the file places of its bytes, which must be fetched first.

        Returns:
            None if no message is complete yet.

        Raises:
            BadMessage: the bytes are no message, or it is too large.
        """
        found = first_message(self._received, self.limit)
        if found is None:
            return None
        message, segments, length = found
        del self._received[:length]
        return message, segments

    def wait(self, within_s: float) -> Message:
        """Waits for the next message, which must come without raw bytes.

        Raises:
            Closed: no message within the deadline.
            BadMessage: see `take`.
        """
        end_s = time.monotonic() + within_s
        while (found := self.take()) is None:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise Closed("timed out")
            self.socket.settimeout(left_s)
            try:
                self.receive()
            finally:
                self.socket.settimeout(STALL_S)
        message, segments = found
        if segments:
            raise BadMessage("worker_wire", "bytes come with a message that has none")
        return message

    def fetch(self, file: int, segments: Segments) -> None:
        """Writes the bytes of the last taken message to their places in a file.

        Raises:
            Closed: the bytes do not arrive.
            OSError: the file cannot be written.
        """
        buffer = memoryview(bytearray(min(CHUNK_BYTES, max(1, _total(segments)))))
        for offset, count in segments:
            end = offset + count
            while offset < end:
                piece = buffer[: self._read_into(buffer[: end - offset])]
                while piece:
                    written = os.pwrite(file, piece, offset)
                    piece, offset = piece[written:], offset + written

    def _read_into(self, buffer: memoryview) -> int:
        """Reads bytes; first those that came with the message."""
        early = min(len(buffer), len(self._received))
        if early:
            buffer[:early] = self._received[:early]
            del self._received[:early]
            return early
        try:
            count = self.socket.recv_into(buffer)
        except OSError as error:
            raise Closed(str(error)) from error
        if not count:
            raise Closed("the connection is closed")
        return count

    def is_open(self) -> bool:
        """Whether the other side is connected. Call it only when no message is expected."""
        self.socket.settimeout(0)
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self.socket.settimeout(STALL_S)

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()


def encoded(message: Message, segments: Segments = ()) -> bytes:
    """The bytes before the raw bytes of these places. `first_message` reads them."""
    line = json.dumps(message | {"segments": segments}).encode()
    return _HEAD.pack(MAGIC, len(line), _total(segments)) + line


def first_message(
    received: bytes | bytearray, limit: int
) -> tuple[Message, list[tuple[int, int]], int] | None:
    """The message at the start of some bytes.

    Args:
        received: the received bytes.
        limit: most bytes of its JSON.

    Returns:
        The message, the places of the raw bytes after it, and the offset of these bytes. None if
        the message is incomplete.

    Raises:
        BadMessage: the bytes are no message, or it is too large.
    """
    if not MAGIC.startswith(bytes(received[: len(MAGIC)])):
        raise BadMessage("worker_wire", "this is no message of a worker or its controller")
    if len(received) < _HEAD.size:
        return None
    _, length, num_bytes = _HEAD.unpack_from(received)
    if length > limit:
        raise BadMessage("worker_wire", f"a message of {length} bytes, {limit} are allowed")
    end = _HEAD.size + length
    if len(received) < end:
        return None
    message = _parsed(bytes(received[_HEAD.size : end]))
    segments = _segments(message.pop("segments", None))
    if _total(segments) != num_bytes:
        raise BadMessage("worker_wire", "a message announces other bytes than it lists")
    return message, segments, end


def segments_of(file: TensorFile) -> list[tuple[int, int]]:
    """The places of the bytes of all tensors of a file."""
    return merged([(place.offset, place.num_bytes) for place in file.places.values()])


def merged(segments: Segments) -> list[tuple[int, int]]:
    """The same segments in order, with adjacent ones joined."""
    found: list[tuple[int, int]] = []
    for offset, count in sorted(segments):
        if found and sum(found[-1]) == offset:
            found[-1] = (found[-1][0], found[-1][1] + count)
        elif count:
            found.append((offset, count))
    return found


def interface_of(address: str) -> str | None:
    """The network interface with an IPv4 address, for torch's connections. None if none has it.

    Args:
        address: an address of this machine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, asked)
            except OSError:  # an interface without such an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _total(segments: Segments) -> int:
    return sum(count for _, count in segments)


def _parsed(line: bytes) -> Message:
    try:
        message: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadMessage("worker_wire", "a message is no JSON") from error
    if not isinstance(message, dict):
        raise BadMessage("worker_wire", "a message is no object")
    return message


def _segments(listed: object) -> list[tuple[int, int]]:
    """The segments that a message lists. Raises BadMessage."""
    if not isinstance(listed, list):
        raise BadMessage("worker_wire", "a message does not list its bytes")
    found = []
    for each in listed:
        if not (isinstance(each, list) and len(each) == 2 and all(type(n) is int for n in each)):
            raise BadMessage("worker_wire", "a message does not list its bytes")
        offset, count = each
        if min(offset, count) < 0 or offset + count > MAX_OFFSET:
            raise BadMessage("worker_wire", "a message lists bytes at no place of a file")
        found.append((offset, count))
    return found


PROTOCOL = 1
KEY_BYTES = 32
NONCE_BYTES = 32
HANDSHAKE_S = 10.0
MAX_STRANGER_BYTES = 4096
_HEX = re.compile(r"[0-9a-f]{64}")


class Refused(Exception):
    """The other side refuses this side. The message names the reason."""


def key_at(path: Path, *, may_make: bool) -> bytes:
    """Reads the key in a file. Makes a missing file if allowed.

    Args:
        path: path of a file with one line of 64 hexadecimal digits.
        may_make: whether to make a missing file. The controller does, and nodes get a copy.

    Raises:
        ConfigError: it is missing.
        CorruptState: it holds no key.
        StateError: other users may read it, or it cannot be read or written.
    """
    try:
        if may_make and not path.exists():
            durable.make_folder(path.parent)
            content = f"{secrets.token_hex(KEY_BYTES)}\n".encode()
            durable.write_file(path, content, mode=0o600)
        mode, text = path.stat().st_mode, path.read_text(encoding="ascii", errors="replace")
    except FileNotFoundError as error:
        hint = "the peer of --workers-from makes it and says where; copy it here, with scp -p"
        raise ConfigError(f"the key {path} is missing", hint=hint) from error
    except OSError as error:
        raise StateError(f"the key {path}: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise StateError(f"others may read the key {path}", hint=f"chmod 600 {path}")
    if not _HEX.fullmatch(text.strip()):
        raise CorruptState(f"{path} is no key: 64 hexadecimal digits", hint="copy it once more")
    return bytes.fromhex(text)


def admit(wire: Wire, key: bytes) -> Message:
    """Checks that a stranger holds the key.

    Returns:
        The hardware and versions of the node.

    Raises:
        Refused: the node does not hold the key.
        Closed: the node does not answer.
        BadMessage: the answer of the node is no proof.
    """
    end_s = time.monotonic() + HANDSHAKE_S
    ours, limit, wire.limit = secrets.token_hex(NONCE_BYTES), wire.limit, MAX_STRANGER_BYTES
    wire.send({"swarm-workers": PROTOCOL, "nonce": ours})
    answer = wire.wait(end_s - time.monotonic())
    nonces = (ours, _digits(answer, "nonce"))
    if not hmac.compare_digest(_digits(answer, "proof"), proof(key, "node", nonces)):
        wire.send({"refused": "key"})
        raise Refused("it does not hold the key")
    wire.send({"proof": proof(key, "controller", nonces)})
    hello = wire.wait(end_s - time.monotonic())
    wire.limit = limit
    return hello


def introduce(wire: Wire, key: bytes, hello: Message) -> None:
    """Exchanges proofs of the key with a controller, and sends it `hello`.

    Raises:
        Refused: one side does not hold the key, or has another version.
        Closed: the controller does not answer.
        BadMessage: the answer of the controller is no proof.
    """
    end_s = time.monotonic() + HANDSHAKE_S
    limit, wire.limit = wire.limit, MAX_STRANGER_BYTES
    first = wire.wait(HANDSHAKE_S)
    if first.get("swarm-workers") != PROTOCOL:
        raise Refused("it is of another version")
    nonces = (_digits(first, "nonce"), secrets.token_hex(NONCE_BYTES))
    wire.send({"nonce": nonces[1], "proof": proof(key, "node", nonces)})
    answer = wire.wait(end_s - time.monotonic())
    if answer.get("refused") == "key":
        raise Refused("it has another key")
    if not hmac.compare_digest(_digits(answer, "proof"), proof(key, "controller", nonces)):
        raise Refused("it does not hold the key")
    wire.limit = limit
    wire.send(hello)


def proof(key: bytes, side: str, nonces: tuple[str, str]) -> str:
    """A proof that only a holder of the key can compute.

    Args:
        key: 32 bytes.
        side: the proving side, "controller" or "node".
        nonces: the controller's and the node's, 64 hexadecimal digits each.
    """
    text = " ".join(("swarm-workers", str(PROTOCOL), side, *nonces))
    return hmac.digest(key, text.encode(), "sha256").hex()


def _digits(message: Message, name: str) -> str:
    """Returns the digits under a name. Raises BadMessage if there are none."""
    value = message.get(name)
    if not (isinstance(value, str) and _HEX.fullmatch(value)):
        raise BadMessage("worker_handshake", f"a message without its {name}")
    return value
