"""Whether a machine can have an emulated network is found out without a traceback."""

import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.emulation import namespaces
from swarm.emulation.namespaces import why_not_here
from swarm.emulation.networks import open_links
from swarm.emulation.proxies import ProxyLinks

IP = """#!/bin/sh
echo "$*" >>{log}
case "$*" in {bad}) echo "{bad}: Operation not permitted" >&2; exit 1 ;; esac
"""


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    why_not_here.cache_clear()
    yield
    why_not_here.cache_clear()


class Machine:
    """Where this user is root, TUN a file, and `ip` does nothing, or fails at one command."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.log = folder / "commands"
        self.requests: list[int] = []
        tun = folder / "tun"
        tun.touch()
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(namespaces, "TUN", tun)
        monkeypatch.setattr(fcntl, "ioctl", self.ioctl)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        self.fails_at("nothing")

    def ioctl(self, _: int, request: int, __: Any) -> bytes:
        self.requests.append(request)
        return b""

    def fails_at(self, command: str) -> None:
        program = self.folder / "ip"
        program.write_text(IP.format(log=self.log, bad=command.replace(" ", "\\ ")))
        program.chmod(0o755)

    @property
    def commands(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


NOBODYS = f"swarm-{os.getpid()}-{namespaces.MAX_PEERS}"


def test_a_machine_is_tried_once_and_left_as_it_was(machine: Machine) -> None:
    assert why_not_here() is None
    commands = machine.commands
    assert commands[0] == f"netns add {NOBODYS}"
    assert commands[-2:] == [f"netns exec {NOBODYS} true", f"netns del {NOBODYS}"]
    assert machine.requests == [namespaces.TUNSETIFF]
    assert why_not_here() is None
    assert machine.commands == commands


def test_a_user_who_is_not_root_is_told_so(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not_here() == "network namespaces need root"


def test_without_the_program_ip_peers_get_proxies_and_it_is_said_why(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    said: list[str] = []
    links = open_links(["lan"], said.append)
    links.close()
    assert isinstance(links, ProxyLinks)
    (line,) = said
    assert "the program ip (iproute2)" in line


def test_without_the_device_that_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "TUN", machine.folder / "nowhere")
    assert "nowhere" in str(why_not_here())


def test_root_without_the_capability_is_told_what_was_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    assert "cannot be made here ([Errno 1] Operation not permitted)" in str(why_not_here())
    assert f"netns add {NOBODYS}" not in machine.commands


@pytest.mark.parametrize("command", ["netns add", "link set", "netns exec"])
def test_a_command_that_fails_is_named_and_nothing_stays(machine: Machine, command: str) -> None:
    at = f"{command} {NOBODYS} true" if command == "netns exec" else f"{command} {NOBODYS}"
    if command == "link set":
        at = f"link set sw{os.getpid() % 10**7}p{namespaces.MAX_PEERS} netns {NOBODYS}"
    machine.fails_at(at)
    assert f"cannot be made here (ip {at}: " in str(why_not_here())
    assert machine.commands[-1] == f"netns del {NOBODYS}"


def test_a_command_that_does_not_end_is_a_reason_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 10.0)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "timed out after 10.0 seconds" in str(why_not_here())


@pytest.mark.skipif(why_not_here() is not None, reason=str(why_not_here()))
def test_a_real_machine_that_can_is_left_as_it_was() -> None:
    assert why_not_here() is None
    assert not Path("/run/netns", NOBODYS).exists()
    assert f"p{namespaces.MAX_PEERS}:" not in Path("/proc/net/dev").read_text()
