"""A peer's identity: one Ed25519 key, which is part of its libp2p peer id.

libp2p's daemon reads the key from the identity file. So the owner of a record, the signer of a vote
and the dialed peer are identified by the same key. The public key follows from the peer id, so no
signature has to carry it.

Sources: RFC 8032; libp2p specs, peer-ids: the identity multihash of the protobuf-wrapped key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2

from swarm import durable
from swarm.errors import CorruptState, StateError

KEY_BYTES = 32
"""Size of a public key, and of a private one."""
SIGNATURE_BYTES = 64
_ID_PREFIX = bytes.fromhex("002408011220")
"""Prefix of each peer id before its encoding: identity multihash, 36 bytes; kind Ed25519; 32 bytes
of key."""
_IS_ID = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
_DOMAIN = b"swarm/1\0"
"""Prefix of all that we sign, so that our signatures cannot be mistaken for libp2p's."""
_FIELD = 2**255 - 19
_LOW_ORDER = frozenset(
    {
        0,
        1,
        _FIELD - 1,
        2707385501144840649318225287225658788936804267575313519463743609750303402022,
        55188659117513257062467267217118295137698188065244968500265048394206261417927,
    }
)
"""The y coordinates of the eight points of low order. With such a key anybody can sign."""


@dataclass(frozen=True)
class Identity:
    """A peer's own key.

    Attributes:
        path: the identity file.
        peer_id: id in base58.
        public_key: 32 bytes.
        private_key: Ed25519.
        is_new: whether the key was made just now, so that no other process can have it.
    """

    path: Path
    peer_id: str
    public_key: bytes
    private_key: Ed25519PrivateKey = field(repr=False)
    is_new: bool = False

    def sign(self, data: bytes) -> bytes:
        """A signature of 64 bytes that `verify` accepts; about 0.1 ms."""
        return self.private_key.sign(_DOMAIN + data)


def load_or_create_identity(path: Path) -> Identity:
    """Reads the identity file, or makes a new key and writes it, readable by its owner only.

    Raises:
        CorruptState: the file has no Ed25519 key.
        StateError: the file cannot be read or written.
    """
    try:
        if is_new := not path.exists():
            _create(path)
        content = path.read_bytes()
    except OSError as error:
        raise StateError(f"identity file {path}: {error.strerror}") from error
    try:
        stored = crypto_pb2.PrivateKey.FromString(content)
    except Exception as error:  # protobuf raises many kinds
        raise CorruptState(f"identity file {path}: {error}", hint=_NEW_IDENTITY) from error
    if stored.key_type != crypto_pb2.Ed25519 or len(stored.data) != 2 * KEY_BYTES:
        raise CorruptState(f"identity file {path}: not an Ed25519 key", hint=_NEW_IDENTITY)
    key = Ed25519PrivateKey.from_private_bytes(stored.data[:KEY_BYTES])
    public_key = key.public_key().public_bytes_raw()
    peer_id = peer_id_of(public_key)
    if public_key != stored.data[KEY_BYTES:] or peer_id is None:
        raise CorruptState(f"identity file {path}: the key is damaged", hint=_NEW_IDENTITY)
    return Identity(path, peer_id, public_key, key, is_new)


def identity_of(secret: str) -> Identity:
    """The identity of a private key in hex digits that is in no file."""
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret))
    public_key = key.public_key().public_bytes_raw()
    peer_id = peer_id_of(public_key)
    assert peer_id is not None, "a private key has a sound public one"
    return Identity(Path(), peer_id, public_key, key)


_NEW_IDENTITY = "put a copy back, or move it away to start as a new peer with a new --state-dir"


def _create(path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    # The daemon needs both halves of the key; hivemind's own helpers would write an RSA key.
    data = key.private_bytes_raw() + key.public_key().public_bytes_raw()
    content = crypto_pb2.PrivateKey(key_type=crypto_pb2.Ed25519, data=data).SerializeToString()
    durable.make_folder(path.parent)
    durable.write_file(path, content, mode=0o600)


def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Whether this peer signed these bytes; about 0.3 ms."""
    key = public_key_of(peer_id)
    if key is None:
        return False
    try:
        key.verify(signature, _DOMAIN + data)
    except InvalidSignature:
        return False
    return True


@lru_cache(maxsize=4096)
def public_key_of(peer_id: str) -> Ed25519PublicKey | None:
    """The key contained in a peer id; None if it is no id of an Ed25519 key."""
    if not _IS_ID.fullmatch(peer_id):
        return None
    try:
        encoded = PeerID.from_base58(peer_id).to_bytes()
    except ValueError:
        return None
    key = encoded[len(_ID_PREFIX) :]
    if encoded[: len(_ID_PREFIX)] != _ID_PREFIX or not _is_sound(key):
        return None
    return Ed25519PublicKey.from_public_bytes(key)


@lru_cache(maxsize=4096)
def peer_id_of(public_key: bytes) -> str | None:
    """The libp2p peer id (base58) of a public key of 32 bytes; None if the key is invalid."""
    if not _is_sound(public_key):
        return None
    return str(PeerID(_ID_PREFIX + public_key).to_base58())


def _is_sound(public_key: bytes) -> bool:
    """Whether a key has the right size, a unique encoding, and is not of low order."""
    if len(public_key) != KEY_BYTES:
        return False
    y = int.from_bytes(public_key, "little") % 2**255
    return y < _FIELD and y not in _LOW_ORDER
