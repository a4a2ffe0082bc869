from __future__ import annotations

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2

from swarm.errors import CorruptState, StateError
from swarm.network.identity import (
    load_or_create_identity,
    peer_id_of,
    peer_id_of_ssh_key,
    verify,
)


def test_a_key_is_made_once_and_only_its_owner_may_read_it(tmp_path):
    path = tmp_path / "state" / "identity.key"
    first = load_or_create_identity(path)
    again = load_or_create_identity(path)
    assert (again.peer_id, again.public_key) == (first.peer_id, first.public_key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["identity.key"]


def test_the_peer_id_is_the_one_that_libp2p_derives(tmp_path):
    identity = load_or_create_identity(tmp_path / "identity.key")
    assert PeerID.from_identity(identity.path.read_bytes()).to_base58() == identity.peer_id
    assert peer_id_of(identity.public_key) == identity.peer_id


def test_a_signature_holds_for_its_key_and_data_only(tmp_path):
    identity = load_or_create_identity(tmp_path / "a")
    other = load_or_create_identity(tmp_path / "b")
    signature = identity.sign(b"accept")
    assert len(signature) == 256
    assert verify(identity.public_key, b"accept", signature)
    assert not verify(identity.public_key, b"Accept", signature)
    assert not verify(other.public_key, b"accept", signature)
    assert not verify(identity.public_key, b"accept", signature[:-1])
    assert not verify(b"no key", b"accept", signature)


def test_a_dht_record_signature_is_none_of_ours(tmp_path):
    identity = load_or_create_identity(tmp_path / "a")
    # The same key signs both; only the prefix keeps one kind from passing for the other.
    assert not verify(identity.public_key, b"data", identity.sign(b"swarm/1\0data"))


@pytest.mark.parametrize("keep_bytes", [0, 100])
def test_a_torn_identity_file_is_an_error_that_says_what_to_do(tmp_path, keep_bytes):
    path = tmp_path / "identity.key"
    load_or_create_identity(path)
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(CorruptState, match="move it away"):
        load_or_create_identity(path)


def test_a_key_of_another_length_is_refused(tmp_path):
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    der = key.private_bytes(
        serialization.Encoding.DER,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    path = tmp_path / "identity.key"
    path.write_bytes(crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=der).SerializeToString())
    with pytest.raises(CorruptState, match="RSA-2048"):
        load_or_create_identity(path)
    ssh = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    assert peer_id_of_ssh_key(ssh) is None


def test_an_unusable_folder_is_a_state_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError):
        load_or_create_identity(tmp_path / "file" / "identity.key")
