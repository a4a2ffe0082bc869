"""The measurement of fetching: the plain socket verifies what it receives as ours does."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from swarm.protocol.digests import PIECE_BYTES, digest_of

NUM_BYTES = 3 * PIECE_BYTES
HEARD_S = 30.0


@contextlib.contextmanager
def served(blob: bytes, flows: int, after_a_piece: threading.Event) -> Iterator[str]:
    """Sends what is asked for, but after its first piece only when it is told to go on."""

    def answer(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as asked:
            start, end = map(int, asked.readline().split())
            for begin in range(start, end, PIECE_BYTES):
                if begin > start and not after_a_piece.wait(HEARD_S):
                    return  # the stream ends early
                connection.sendall(blob[begin : min(begin + PIECE_BYTES, end)])

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            for _ in range(flows):
                answering.append(threading.Thread(target=answer, args=(listener.accept()[0],)))
                answering[-1].start()

        answering = [threading.Thread(target=accept)]
        answering[0].start()
        yield str(listener.getsockname()[1])
        for thread in answering:
            thread.join(HEARD_S)


@pytest.mark.parametrize("flows", [1, 2])
def test_a_piece_of_the_socket_is_verified_while_the_next_ones_are_received(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flows: int
) -> None:
    blob, heard, threads = script.content(NUM_BYTES), threading.Event(), set[int]()
    digest_of_piece = script.digest_of_piece

    def seen(piece: memoryview) -> bytes:
        threads.add(threading.get_ident())
        heard.set()
        return bytes(digest_of_piece(piece))

    monkeypatch.setattr(script, "digest_of_piece", seen)
    with served(blob, flows, heard) as port:
        script.fetch_tcp(NUM_BYTES, flows, port, digest_of(blob))
    assert threads and threading.get_ident() not in threads
    assert json.loads(capsys.readouterr().out)["seconds"] > 0


def test_bytes_that_are_not_those_asked_for_are_no_figure(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    blob, told = script.content(NUM_BYTES), threading.Event()
    told.set()
    with served(blob[:-1] + bytes([blob[-1] ^ 1]), 2, told) as port, pytest.raises(AssertionError):
        script.fetch_tcp(NUM_BYTES, 2, port, digest_of(blob))
    assert capsys.readouterr().out == ""
