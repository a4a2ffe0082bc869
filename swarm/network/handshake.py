"""Two peers on a TCP connection of their own prove to each other who they are.

The accepting side sends a nonce, the dialling side a signed letter with it, and the accepting side
a signed answer to that letter. So neither can be played by somebody who recorded another handshake,
or who listens at an address that was the peer's before. Nothing is encrypted, and what follows is
not signed: blobs are handed to whoever asks, and their digests say whether they are right.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass

from swarm.errors import BadMessage
from swarm.network.envelope import LENGTH, EnvelopeKind, open_sealed, seal, with_length
from swarm.network.identity import Identity
from swarm.network.streams import receive_into
from swarm.protocol.digests import digest_of

NONCE_BYTES = 16
MAX_LETTER_BYTES = 512


@dataclass(frozen=True)
class Introduced:
    """A dialling peer that has proved who it is; `confirm` tells it that it is at the right one.

    Attributes:
        peer_id: of the dialling peer.
        purpose: what it wants the connection for.
    """

    peer_id: str
    purpose: str
    letter: bytes

    async def confirm(self, connection: socket.socket, identity: Identity) -> None:
        """Proves who the accepting side is; what follows belongs to the stream."""
        await _send(connection, seal(identity, EnvelopeKind.ANSWER, digest_of(self.letter), b""))


async def introduce(
    connection: socket.socket, identity: Identity, peer_id: str, purpose: str
) -> None:
    """The dialling side's part; returns once the other side has proved to be `peer_id`.

    Raises:
        BadMessage: somebody else is there, or no peer at all.
        OSError: the connection ended, as when the other side does not want it.
    """
    nonce = await _receive(connection, NONCE_BYTES)
    letter = seal(identity, EnvelopeKind.DIRECT, peer_id, f"{purpose} {nonce.hex()}".encode())
    await _send(connection, letter)
    answer = open_sealed(await _receive_letter(connection), digest_of(letter))
    if answer.kind is not EnvelopeKind.ANSWER or answer.source != peer_id:
        raise BadMessage("direct_letter", "another peer answered")


async def admit(connection: socket.socket, identity: Identity) -> Introduced:
    """The accepting side's part, up to the decision whether to confirm.

    Raises:
        BadMessage: the letter is none, for another peer, or for another connection.
        OSError: the connection ended.
    """
    nonce = os.urandom(NONCE_BYTES)
    await asyncio.get_running_loop().sock_sendall(connection, nonce)
    letter = await _receive_letter(connection)
    envelope = open_sealed(letter, identity.peer_id)
    purpose, _, proof = envelope.payload.decode("ascii", "replace").rpartition(" ")
    if envelope.kind is not EnvelopeKind.DIRECT or proof != nonce.hex():
        raise BadMessage("direct_letter", "no letter for this connection")
    return Introduced(envelope.source, purpose, letter)


async def _send(connection: socket.socket, letter: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, with_length(letter))


async def _receive_letter(connection: socket.socket) -> bytes:
    (size,) = LENGTH.unpack(await _receive(connection, LENGTH.size))
    if size > MAX_LETTER_BYTES:
        raise BadMessage("direct_letter", f"a letter of {size} bytes")
    return await _receive(connection, size)


async def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    await receive_into(connection, memoryview(buffer))
    return bytes(buffer)
