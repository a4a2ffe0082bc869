"""Deeply nested msgpack in one store of the DHT ends the process.

hivemind's decoder recurses for each extension type. The attack sends 936 bytes to a node that does
not know the sender, in each place that hivemind decodes: a dictionary that is stored as a whole,
one that is found, the subkey, and a value signed by its owner.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import msgpack
import pytest
from google.protobuf.message import DecodeError
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from swarm.errors import BadRecord
from swarm.network.dht.bounded_msgpack import (
    MAX_DEPTH,
    MAX_ELEMENTS,
    BoundedSerializer,
    structure_problem,
)
from swarm.network.node.node import Node
from swarm.network.runs.run_records import fetch_records, publish
from swarm.protocol.records.records import ValidationRecord
from swarm.protocol.values.manifest import PeerId

WAIT_S = 60.0
KEY = "run.validation"
HONEST = ValidationRecord(round=1, manifest_digest="0" * 64, val_loss=2.5, tokens=64, text_bytes=64)


def nested(depth: int, code: int = 0x40) -> bytes:
    """Extension types inside each other."""
    encoded = msgpack.packb([])
    for _ in range(depth):
        encoded = msgpack.packb([msgpack.ExtType(code, encoded)])
    return msgpack.packb(msgpack.ExtType(code, encoded))


BOMB = nested(200)
DICTIONARIES = nested(200, 0x50)

DECODES = """
import sys
from hivemind.utils import MSGPackSerializer
from swarm.errors import BadRecord
from swarm.network.dht.bounded_msgpack import BoundedSerializer
refused = []
decoder = BoundedSerializer(refused.append) if sys.argv[1] == "bounded" else MSGPackSerializer
try:
    decoder.loads(bytes.fromhex(sys.argv[2]))
except BadRecord:
    print(*refused)
"""


def decoded_by(decoder: str, encoded: bytes) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", DECODES, decoder, encoded.hex()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_decoder_alone_kills_its_process_and_with_the_limit_it_refuses() -> None:
    assert len(BOMB) < 1000
    assert decoded_by("hivemind", BOMB).returncode == -signal.SIGSEGV
    bounded = decoded_by("bounded", BOMB)
    assert (bounded.returncode, bounded.stdout) == (0, "record_nesting\n")


@pytest.fixture(scope="module")
def nodes(lasting_peers) -> tuple[Node, Node]:
    return lasting_peers.node(), lasting_peers.node()


@pytest.fixture
def victim(nodes) -> Node:
    for node in nodes:
        node.traffic.refused.clear()
    return nodes[0]


@pytest.fixture
def stranger(nodes) -> Node:
    return nodes[1]


def store(stranger: Node, victim: PeerId, subkey: bytes, value: bytes) -> list[bool]:
    """One raw `rpc_store` under `KEY`, without the sender's own checks."""
    request = dht_pb2.StoreRequest(
        keys=[DHTID.generate(source=KEY).to_bytes()],
        subkeys=[subkey],
        values=[value],
        expiration_time=[get_dht_time() + 60],
        in_cache=[False],
    )

    async def call() -> list[bool]:
        p2p, to = stranger._substrate.p2p, PeerID.from_base58(victim)
        name = "DHTProtocol.rpc_store"
        answer = await p2p.call_protobuf_handler(to, name, request, dht_pb2.StoreResponse)
        return list(answer.store_ok)

    return stranger.run(call(), WAIT_S)


def assert_it_lives(victim: Node, stranger: Node) -> None:
    assert victim.run(publish(victim, KEY, HONEST), WAIT_S)
    found = stranger.run(fetch_records(stranger, ValidationRecord, [KEY]), WAIT_S)
    assert found[victim.peer_id] == HONEST


@pytest.mark.parametrize("bomb", [BOMB, DICTIONARIES, nested(3000)], ids=["936 B", "0x50", "15 kB"])
def test_a_nested_dictionary_is_refused_and_counted(victim, stranger, bomb: bytes) -> None:
    with pytest.raises(P2PHandlerError, match="nested more than 16 deep"):
        store(stranger, victim.peer_id, b"", bomb)
    assert victim.traffic.refused == {"record_nesting": 1}
    assert_it_lives(victim, stranger)


def test_a_nested_subkey_is_never_decoded(victim, stranger) -> None:
    assert store(stranger, victim.peer_id, BOMB, MSGPackSerializer.dumps(b"x")) == [False]
    assert victim.traffic.refused == {"record_owner": 1}
    assert_it_lives(victim, stranger)


@pytest.mark.parametrize("value", [BOMB, b"\xc1", msgpack.packb({"a": 1}), b"", b"\xa1\xff"])
def test_a_value_that_is_no_byte_string_is_refused_though_its_owner_signed_it(
    victim, stranger, value: bytes
) -> None:
    protocol = stranger._substrate.dht._node.protocol
    key_id, subkey = DHTID.generate(source=KEY), protocol.record_validator.subkey
    expiration = get_dht_time() + 60
    subkey_bytes = MSGPackSerializer.dumps(subkey)
    record = DHTRecord(key_id.to_bytes(), subkey_bytes, value, expiration)
    signed = protocol.record_validator.sign_value(record)
    to = victim._substrate.p2p.peer_id
    call = protocol.call_store(to, [key_id], [signed], [expiration], [subkey])
    assert stranger.run(call, WAIT_S) == [False]
    assert victim.traffic.refused == {"record_nesting": 1}
    assert_it_lives(victim, stranger)


def test_a_nested_answer_blinds_nobody(victim, stranger, monkeypatch) -> None:
    """The asked peer answers with the bomb. The asking peer refuses it and finds the rest."""
    assert stranger.run(publish(stranger, KEY, HONEST), WAIT_S)
    monkeypatch.setattr(DictionaryDHTValue, "packb", lambda self: BOMB)
    find = victim._substrate.dht._node.protocol.call_find
    key_id = DHTID.generate(source=KEY)
    assert victim.run(find(stranger._substrate.p2p.peer_id, [key_id]), WAIT_S) is None
    assert victim.traffic.refused == {"record_nesting": 1}
    monkeypatch.undo()
    assert_it_lives(victim, stranger)


@pytest.mark.parametrize(
    "content",
    [
        [None, 1.0, [[b"subkey", 7, 1e300]]],
        [None, 1.0, [[b"subkey", b"value", "soon"]]],
        [None, 1.0, [["a", b"", 1.0], [b"b", b"", "x"]]],
        [None, 1.0, [[[], b"", 1.0]]],
        [1],
        {},
    ],
)
def test_a_dictionary_of_anything_is_refused_and_counted(victim, stranger, content) -> None:
    hostile = msgpack.packb(msgpack.ExtType(0x50, msgpack.packb(content)))
    try:
        assert store(stranger, victim.peer_id, b"", hostile) == [False]
    except P2PHandlerError as error:
        assert "record" in str(error)
    assert victim.traffic.refused == {"record_schema": 1}
    assert_it_lives(victim, stranger)


def test_what_hivemind_writes_itself_passes() -> None:
    dictionary = DictionaryDHTValue()
    for number in range(1000):
        dictionary.store(b"[owner:%d]" % number, bytes(800), get_dht_time() + 60)
    for value in (dictionary, b"", bytes(70_000), None, (1, (2, 3)), [1.5, -7, 2**60, "x" * 300]):
        encoded = MSGPackSerializer.dumps(value)
        assert structure_problem(encoded) is None
    read = BoundedSerializer(pytest.fail).loads(MSGPackSerializer.dumps(dictionary))
    assert len(read.data) == 1000


@pytest.mark.parametrize(("num_records", "passes"), [(1024, True), (1100, False)])
def test_an_answer_has_no_more_records_than_a_holder_hands_out(num_records, passes) -> None:
    """Each record costs its reader a signature check, and the answering peer pays nothing."""
    dictionary = DictionaryDHTValue()
    for number in range(num_records):
        dictionary.store(number.to_bytes(32), b"", get_dht_time() + 60)
    problem = structure_problem(MSGPackSerializer.dumps(dictionary))
    assert (problem is None) == passes


def test_the_limits_are_where_they_are_said_to_be() -> None:
    def lists(depth: int) -> bytes:
        return b"\x91" * (depth - 1) + b"\x90"

    assert structure_problem(lists(MAX_DEPTH)) is None
    assert structure_problem(lists(MAX_DEPTH + 1)) == "nested more than 16 deep"
    many = msgpack.packb([None] * (MAX_ELEMENTS - 1))
    assert structure_problem(many) is None
    assert "more than" in str(structure_problem(msgpack.packb([None] * MAX_ELEMENTS)))
    for encoded in (b"\xdd\xff\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b""):
        assert structure_problem(encoded) is not None
    for unknown in (b"\xd4\x51\x00", b"\xd6\xff\x00\x00\x00\x00"):
        assert "extension type" in str(structure_problem(unknown))
    assert "follow" in str(structure_problem(b"\xc0\xc0"))
    assert "follow" in str(structure_problem(b"\xd5\x40\xc0\xc0"))


def test_four_mebibytes_of_structure_are_refused_at_once() -> None:
    began = time.process_time()
    for hostile in (b"\x91" * 2**22, b"\xdd\x00\x3f\xff\xff" + b"\x90" * 2**22):
        with pytest.raises(BadRecord):
            BoundedSerializer(lambda _: None).loads(hostile)
    assert time.process_time() - began < 60


def test_nested_protobuf_is_refused_by_its_own_parser() -> None:
    groups = b"\x9b\x06" * 500_000  # field 99 begins a group, and another in it, and so on
    with pytest.raises(DecodeError):
        dht_pb2.StoreRequest.FromString(groups)
