"""A stream on a cut line is detected before its answer times out."""

import subprocess
import sys

import pytest

from swarm.emulation.links import Link
from swarm.emulation.networks import NamespaceLinks, address_of, why_not_here
from swarm.network.fetch.flow import FIRST_ANSWER_S
from swarm.network.wire.tcp_dialer import UNACKED_S
from tests.processes import running

LISTEN = """
import socket
with socket.create_server(("{host}", 4000)) as listening:
    print("ready", flush=True)
    connection, _ = listening.accept()
    while connection.recv(100):
        pass
"""
ASK = """
import asyncio, sys, time
from swarm.network.wire.tcp_dialer import connect, impatient
from swarm.network.wire.upload_rate import LineBytes

async def ask():
    connection = impatient(await connect(LineBytes(), "{host}", 4000))
    loop = asyncio.get_running_loop()
    connection.send(b"what is acknowledged")
    try:
        async with asyncio.timeout({silence_s}):
            await loop.sock_recv(connection, 1)
    except TimeoutError:
        print("silent", flush=True)
    sys.stdin.readline()
    began_s = time.monotonic()
    connection.send(b"what is lost")
    try:
        await loop.sock_recv(connection, 1)
    except TimeoutError as error:
        print(type(error).__name__, time.monotonic() - began_s, flush=True)

asyncio.run(ask())
"""


@pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))
def test_an_ask_that_is_never_acknowledged_fails_and_one_that_is_waits_for_its_answer() -> None:
    links = NamespaceLinks([Link(20, 20, 50)] * 2)
    try:
        (ask, _), (listen, _), host = links.place(0), links.place(1), address_of(1)
        command = [*listen, sys.executable, "-c", LISTEN.format(host=host)]
        with running(command, stdout=subprocess.PIPE) as listening:
            assert listening.stdout and listening.stdout.readline() == b"ready\n"
            command = [*ask, sys.executable, "-c", ASK.format(host=host, silence_s=UNACKED_S + 1)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            with running(command, **pipes) as asking:
                assert asking.stdout and asking.stdout.readline() == "silent\n"
                links.cut([(0, 1), (1, 0)])
                found, _ = asking.communicate("go on\n", timeout=60)
        kind, seconds = found.split()
        assert kind == "TimeoutError"
        assert UNACKED_S <= float(seconds) < FIRST_ANSWER_S
    finally:
        links.close()
