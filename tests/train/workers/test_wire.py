"""Traffic between machines: bytes at their places, and a key that both sides must hold."""

import json
import os
import socket
import struct
import threading

import pytest
import torch

from swarm.errors import BadMessage, ConfigError, CorruptState, StateError
from swarm.train.engine.tensor_file import TensorFile
from swarm.train.workers import controller_wire
from swarm.train.workers.controller_wire import (
    MAGIC,
    Refused,
    Wire,
    admit,
    interface_of,
    introduce,
    key_at,
    merged,
    proof,
    segments_of,
)
from swarm.train.workers.exchange import Closed, listed, opened

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    wires = Wire(near), Wire(far)
    yield wires
    for wire in wires:
        wire.close()


def beside(work):
    """Calls a function in a thread. Its result or error becomes the only element of the list."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


# ------------------------------------------------ messages


def test_tensors_lie_at_the_same_places_on_the_other_side(ends):
    near, far = ends
    sent = TensorFile.in_memory()
    sent.append("before", torch.arange(5))
    large = torch.randn(700_000)  # more than a chunk
    ours = sent.behind()
    ours.take({"large": large, "bf16": torch.ones(3, dtype=torch.bfloat16), "none": large[:0]})
    message = {"do": "write", "tensors": listed(ours)}
    thread, _ = beside(lambda: near.send(message, ours.file.descriptor, segments_of(ours)))
    while (found := far.take()) is None:
        far.receive()
    message, segments = found
    assert segments == [(40, 4 * 700_000 + 6)]
    received = TensorFile.in_memory()
    far.fetch(received.file.descriptor, segments)
    thread.join()
    near.send({"do": "next"})
    assert far.wait(5) == {"do": "next"}
    tensors = opened(received.file, message["tensors"])
    assert torch.equal(tensors["large"], large) and len(tensors["none"]) == 0
    assert tensors["bf16"].dtype == torch.bfloat16


def test_a_file_that_is_too_short_ends_the_connection(ends):
    near, _ = ends
    empty = TensorFile.in_memory()
    with pytest.raises(Closed, match="too short"):
        near.send({"do": "load"}, empty.file.descriptor, [(0, 10)])


def head(length, num_bytes, magic=MAGIC):
    return struct.pack(">4sIQ", magic, length, num_bytes)


def framed(message, num_bytes=0):
    line = message if isinstance(message, bytes) else json.dumps(message).encode()
    return head(len(line), num_bytes) + line


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03",
        head(2, 0, b"SWK0") + b"{}",
        head(5000, 0),
        framed(b"{"),
        framed(b"[" * 4000),
        framed([]),
        framed({"segments": None}),
        framed({"segments": [[0, 8]]}, 9),
        framed({"segments": [[0, True]]}, 1),
        framed({"segments": [[-1, 1]]}, 1),
        framed({"segments": [[2**53, 1]]}, 1),
        framed({"segments": [[0]]}),
    ],
)
def test_what_is_no_message_is_refused(ends, content):
    near, far = ends
    far.limit = 4096
    near.socket.sendall(content)
    with pytest.raises(BadMessage):
        far.wait(5)


def test_who_says_nothing_is_not_waited_for(ends):
    near, far = ends
    near.socket.sendall(MAGIC)
    with pytest.raises(Closed, match="timed out"):
        far.wait(0.2)
    assert near.is_open()
    far.close()
    assert not near.is_open()


def test_places_that_touch_are_one():
    assert merged([(8, 4), (0, 8), (20, 0), (16, 4)]) == [(0, 12), (16, 4)]


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None


# ------------------------------------------------ the key


def test_both_sides_show_that_they_hold_the_key(ends):
    near, far = ends
    thread, found = beside(lambda: introduce(near, KEY, {"workers": 1}))
    assert admit(far, KEY) == {"workers": 1}
    thread.join()
    assert found == [None]


def test_a_node_with_another_key_is_refused_and_told_so(ends):
    near, far = ends
    thread, found = beside(lambda: introduce(near, OTHER, {"workers": 1}))
    with pytest.raises(Refused, match="does not hold the key"):
        admit(far, KEY)
    thread.join()
    assert isinstance(found[0], Refused) and "another key" in str(found[0])


def test_a_node_tells_nothing_to_a_controller_that_only_gives_its_proof_back(ends):
    """Nor to one that admits any node."""
    near, far = ends
    thread, found = beside(lambda: introduce(near, KEY, {"secret": 1}))
    far.send({"swarm-workers": controller_wire.PROTOCOL, "nonce": "0" * 64})
    answer = far.wait(5)
    assert answer["proof"] == proof(KEY, "node", ("0" * 64, answer["nonce"]))
    far.send({"proof": answer["proof"]})
    thread.join()
    assert isinstance(found[0], Refused)
    near.close()
    with pytest.raises(Closed):
        far.wait(5)


@pytest.mark.parametrize("answer", [{}, {"nonce": 1}, {"nonce": "0" * 64, "proof": "x"}, "large"])
def test_a_stranger_gets_no_further_than_the_first_message(ends, answer):
    near, far = ends
    thread, found = beside(lambda: admit(far, KEY))
    assert len(near.wait(5)["nonce"]) == 64
    near.send({"nonce": "0" * 5000} if answer == "large" else answer)
    thread.join()
    assert isinstance(found[0], BadMessage)
    far.close()
    with pytest.raises(Closed):
        near.wait(5)


def test_no_two_handshakes_are_alike(ends, monkeypatch):
    near, far = ends
    nonces = set()
    for _ in range(2):
        thread, _ = beside(lambda: admit(far, KEY))
        nonces.add(near.wait(5)["nonce"])
        near.send({})
        thread.join()
    assert len(nonces) == 2


def test_the_key_is_made_for_its_owner_alone_and_read_again(tmp_path):
    path = tmp_path / "state" / "workers.key"
    with pytest.raises(ConfigError, match=r"workers\.key is missing"):
        key_at(path, may_make=False)
    key = key_at(path, may_make=True)
    assert len(key) == 32 and path.stat().st_mode & 0o777 == 0o600
    assert key == key_at(path, may_make=True) == key_at(path, may_make=False)
    path.chmod(0o640)
    with pytest.raises(StateError, match=r"others may read the key .*chmod 600"):
        key_at(path, may_make=False)
    for text in ("", "ab", "g" * 64, "0" * 65):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(CorruptState, match="is no key"):
            key_at(path, may_make=False)
    assert os.listdir(path.parent) == ["workers.key"]
