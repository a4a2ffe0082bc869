from __future__ import annotations

import pytest
from hivemind.p2p import P2P, PeerID
from hivemind.proto import crypto_pb2

from swarm.errors import CorruptState, StateError
from swarm.network.wire.identity import load_or_create_identity, peer_id_of, public_key_of, verify

ORDER = 2**252 + 27742317777372353535851937790883648493
"""Order of the curve's group: RFC 8032, section 5.1."""
LOW_ORDER = [
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000080",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
]
NOT_CANONICAL = [
    "0100000000000000000000000000000000000000000000000000000000000080",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


def test_a_key_is_made_once_and_only_its_owner_may_read_it(tmp_path):
    path = tmp_path / "state" / "identity.key"
    first = load_or_create_identity(path)
    again = load_or_create_identity(path)
    assert (again.peer_id, again.public_key) == (first.peer_id, first.public_key)
    assert first.is_new and not again.is_new
    assert path.stat().st_mode & 0o777 == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["identity.key"]


def test_the_peer_id_is_the_one_that_libp2p_derives(peers):
    node = peers.node()
    assert node._substrate.p2p.peer_id.to_base58() == node.identity.peer_id


def test_peer_id_and_public_key_follow_from_each_other(tmp_path):
    identity = load_or_create_identity(tmp_path / "identity.key")
    assert peer_id_of(identity.public_key) == identity.peer_id
    assert public_key_of(identity.peer_id).public_bytes_raw() == identity.public_key


def test_the_file_is_as_libp2p_writes_it(tmp_path):
    """Source: libp2p specs, peer-ids, test vectors: an Ed25519 private key and its public key."""
    public = "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
    private = "7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    path = tmp_path / "identity.key"
    path.write_bytes(bytes.fromhex("08011240" + private + public))
    assert load_or_create_identity(path).public_key.hex() == public


@pytest.mark.parametrize(
    ("secret", "public", "message", "signature"),
    [
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            (
                "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
                "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
            ),
        ),
        (
            "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "af82",
            (
                "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
                "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a"
            ),
        ),
    ],
)
def test_keys_sign_and_verify_as_the_standard_says(
    monkeypatch, tmp_path, secret, public, message, signature
):
    """Source: RFC 8032, section 7.1, tests 1 and 3; ours signs the same with its domain before."""
    monkeypatch.setattr("swarm.network.wire.identity._DOMAIN", b"")
    path = tmp_path / "identity.key"
    path.write_bytes(_stored(crypto_pb2.Ed25519, bytes.fromhex(secret) + bytes.fromhex(public)))
    identity = load_or_create_identity(path)
    assert identity.public_key.hex() == public
    assert identity.sign(bytes.fromhex(message)).hex() == signature
    assert verify(identity.peer_id, bytes.fromhex(message), bytes.fromhex(signature))


def test_a_signature_holds_for_its_key_and_data_only(tmp_path):
    identity = load_or_create_identity(tmp_path / "a")
    other = load_or_create_identity(tmp_path / "b")
    signature = identity.sign(b"accept")
    assert len(signature) == 64
    assert verify(identity.peer_id, b"accept", signature)
    assert not verify(identity.peer_id, b"Accept", signature)
    assert not verify(other.peer_id, b"accept", signature)
    for wrong in (b"", signature[:-1], signature + b"\0", bytes(64), bytes(256)):
        assert not verify(identity.peer_id, b"accept", wrong)


def test_nobody_makes_a_second_signature_of_a_first(tmp_path):
    """The equation alone allows S and S + L. RFC 8032, section 5.1.7, requires S < L."""
    identity = load_or_create_identity(tmp_path / "a")
    signature = identity.sign(b"accept")
    scalar = int.from_bytes(signature[32:], "little") + ORDER
    assert not verify(identity.peer_id, b"accept", signature[:32] + scalar.to_bytes(32, "little"))


@pytest.mark.parametrize("key", [*LOW_ORDER, *NOT_CANONICAL])
def test_a_key_in_whose_name_anybody_can_sign_is_nobody_s(key):
    """With the neutral point as key and R, and S = 0, the library accepts any message."""
    encoded = bytes.fromhex(key)
    assert peer_id_of(encoded) is None
    peer_id = PeerID(bytes.fromhex("002408011220") + encoded).to_base58()
    assert public_key_of(peer_id) is None
    forged = bytes.fromhex(LOW_ORDER[0]) + bytes(32)
    assert not verify(peer_id, b"whatever", forged)


@pytest.mark.parametrize(
    "peer_id",
    [
        "",
        "A",
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "12D3KooW" + "1" * 43,
        "12D3KooW" + "1" * 45,
        "12D3KooW" + "0" * 44,
        "12D3KooW" + "z" * 44,
        "12D3KooW" + "1" * 43 + "\n",
        "1" * 10_000,
    ],
)
def test_what_is_no_id_of_such_a_key_has_none(peer_id):
    assert public_key_of(peer_id) is None
    assert not verify(peer_id, b"data", bytes(64))


def test_a_signature_of_libp2p_or_a_record_is_none_of_ours(tmp_path):
    identity = load_or_create_identity(tmp_path / "a")
    # One key signs all kinds, and only the prefix distinguishes them.
    assert not verify(identity.peer_id, b"data", identity.private_key.sign(b"data"))
    assert not verify(identity.peer_id, b"data", identity.sign(b"swarm/1\0data"))


@pytest.mark.parametrize("keep_bytes", [0, 3, 60])
def test_a_torn_identity_file_is_an_error_that_says_what_to_do(tmp_path, keep_bytes):
    path = tmp_path / "identity.key"
    load_or_create_identity(path)
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(CorruptState) as caught:
        load_or_create_identity(path)
    assert "move it away" in caught.value.hint


def test_a_key_whose_halves_differ_is_refused(tmp_path):
    path = tmp_path / "identity.key"
    path.write_bytes(_stored(crypto_pb2.Ed25519, bytes(32) + b"\1" * 32))
    with pytest.raises(CorruptState, match="damaged"):
        load_or_create_identity(path)


def test_a_key_of_another_kind_is_refused(tmp_path):
    """hivemind itself makes RSA keys, as this project did before."""
    path = tmp_path / "identity.key"
    P2P.generate_identity(str(path))
    with pytest.raises(CorruptState, match="not an Ed25519 key") as caught:
        load_or_create_identity(path)
    assert "move it away" in caught.value.hint


def _stored(kind: int, data: bytes) -> bytes:
    return crypto_pb2.PrivateKey(key_type=kind, data=data).SerializeToString()


def test_an_unusable_folder_is_a_state_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError):
        load_or_create_identity(tmp_path / "file" / "identity.key")
