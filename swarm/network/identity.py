"""Who a peer is: one RSA key, whose hash is the libp2p peer id.

The key lies in the identity file that libp2p's daemon reads, so "the owner of this record", "the
peer that signed this vote" and "the peer that I dial" are the same fact, and each can be checked.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import multihash
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2

from swarm.errors import CorruptState, StateError

KEY_BITS = 2048
_DOMAIN = b"swarm/1\0"
"""Put before whatever we sign, so that no signature of ours can pass for a DHT record's."""
_SALT_BYTES = 32


@dataclass(frozen=True)
class Identity:
    """A peer's own key.

    Attributes:
        path: the identity file.
        peer_id: base58.
        public_key: DER, SubjectPublicKeyInfo.
        private_key: RSA-2048.
        is_new: made just now, so that nobody else can have it.
    """

    path: Path
    peer_id: str
    public_key: bytes
    private_key: rsa.RSAPrivateKey = field(repr=False)
    is_new: bool = False

    def sign(self, data: bytes) -> bytes:
        """A signature of 256 bytes that `verify` accepts (RSA-PSS, SHA-256); about 1 ms."""
        return self.private_key.sign(_DOMAIN + data, _padding(), hashes.SHA256())


def load_or_create_identity(path: Path) -> Identity:
    """Reads the identity file, or makes a new key and writes it, readable by its owner only.

    Raises:
        CorruptState: the file holds no RSA-2048 key.
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
        key = serialization.load_der_private_key(stored.data, password=None)
    except Exception as error:  # protobuf and cryptography raise many kinds
        raise CorruptState(f"identity file {path}: {error}", hint=_NEW_IDENTITY) from error
    if not isinstance(key, rsa.RSAPrivateKey) or key.key_size != KEY_BITS:
        raise CorruptState(f"identity file {path}: not an RSA-{KEY_BITS} key", hint=_NEW_IDENTITY)
    public_key = _der(key.public_key())
    return Identity(path, peer_id_of(public_key), public_key, key, is_new)


_NEW_IDENTITY = "move it away to start as a new peer"


def _create(path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)
    der = key.private_bytes(
        serialization.Encoding.DER,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    content = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether the owner of this key (DER) signed these bytes; about 0.05 ms."""
    key = _load(public_key)
    if key is None:
        return False
    try:
        key.verify(signature, _DOMAIN + data, _padding(), hashes.SHA256())
    except InvalidSignature:
        return False
    return True


def peer_id_of(public_key: bytes) -> str:
    """The libp2p peer id (base58) of a public key in DER.

    Source: libp2p specs, peer-ids: sha2-256 multihash over the protobuf-wrapped key.
    """
    wrapped = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=public_key).SerializeToString()
    return str(PeerID(multihash.encode(hashlib.sha256(wrapped).digest(), "sha2-256")).to_base58())


@lru_cache(maxsize=1024)
def peer_id_of_ssh_key(public_key: bytes) -> str | None:
    """The peer id of a key in OpenSSH form, as it stands in DHT subkeys; None if it is no key."""
    try:
        key = serialization.load_ssh_public_key(public_key)
    except (ValueError, UnsupportedAlgorithm):
        return None
    if not isinstance(key, rsa.RSAPublicKey) or key.key_size != KEY_BITS:
        return None
    return peer_id_of(_der(key))


@lru_cache(maxsize=1024)
def _load(public_key: bytes) -> rsa.RSAPublicKey | None:
    try:
        key = serialization.load_der_public_key(public_key)
    except (ValueError, UnsupportedAlgorithm):
        return None
    return key if isinstance(key, rsa.RSAPublicKey) and key.key_size == KEY_BITS else None


def _der(key: rsa.RSAPublicKey) -> bytes:
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _padding() -> padding.PSS:
    return padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=_SALT_BYTES)
