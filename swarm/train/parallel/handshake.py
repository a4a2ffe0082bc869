"""How a controller and a node show each other that they hold the same key.

    controller -> node    {"swarm-workers": 1, "nonce"}
    node -> controller    {"nonce", "proof"}
    controller -> node    {"proof"}
    node -> controller    what the node has

A proof is HMAC-SHA256 (RFC 2104) over the side that makes it and both nonces, so that neither side
can give the other's back to it. Until both are checked a message has 4 KiB at most, and each side
waits 10 s in all. Afterwards nothing is signed or encrypted: the line belongs into a network of
one's own.
"""

from __future__ import annotations

import hmac
import re
import secrets
import stat
import time
from pathlib import Path

from swarm import durable
from swarm.errors import BadMessage, ConfigError, CorruptState, StateError
from swarm.train.parallel.exchange import Message
from swarm.train.parallel.wire import Wire

PROTOCOL = 1
KEY_BYTES = 32
NONCE_BYTES = 32
HANDSHAKE_S = 10.0
MAX_STRANGER_BYTES = 4096
_HEX = re.compile(r"[0-9a-f]{64}")


class Refused(Exception):
    """The other side does not want this one; the message says why."""


def key_at(path: Path, *, may_make: bool) -> bytes:
    """The key of a file, made if it is missing and may be.

    Args:
        path: of one line of 64 hexadecimal digits.
        may_make: the controller makes it; nodes get a copy.

    Raises:
        ConfigError: it is missing.
        CorruptState: it holds something else.
        StateError: others may read it, or it cannot be read or written.
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
    """Finds out whether a stranger holds the key.

    Returns:
        What the node has.

    Raises:
        Refused: it does not.
        Closed: it says nothing.
        BadMessage: it says something else.
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
    """Shows a controller that this node holds the key, and sees that it does; then says `hello`.

    Raises:
        Refused: one of them does not, or its version is another.
        Closed: it says nothing.
        BadMessage: it says something else.
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
    """What only a holder of the key can say.

    Args:
        key: 32 bytes.
        side: "controller" or "node", that which proves.
        nonces: the controller's and the node's, 64 hexadecimal digits each.
    """
    text = " ".join(("swarm-workers", str(PROTOCOL), side, *nonces))
    return hmac.digest(key, text.encode(), "sha256").hex()


def _digits(message: Message, name: str) -> str:
    """Raises BadMessage if there are none."""
    value = message.get(name)
    if not (isinstance(value, str) and _HEX.fullmatch(value)):
        raise BadMessage("worker_handshake", f"a message without its {name}")
    return value
