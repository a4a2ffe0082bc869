"""Peers forked from a process that has loaded torch and hivemind, which saves 3 s per peer.

Each is a separate process with its own threads, files and disk. The parent process only imports, so
one peer's state cannot reach another. One thing differs from `python -m PROGRAM`: all hashes have
the same seed, so sets have one order everywhere. A scenario that depends on it is marked `fresh`,
and starts interpreters.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from subprocess import TimeoutExpired
from typing import BinaryIO

from swarm.emulation import local_peer

launch_interpreter = local_peer.launch
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["peers.actions.participation"])


class Forked:
    """The process of a peer, with the methods of `subprocess.Popen` that `LocalPeer` uses."""

    def __init__(
        self, program: str, arguments: Sequence[str], log: str, environment: Mapping[str, str]
    ) -> None:
        of_peer = (program, arguments, log, environment, os.getcwd())
        self._process = _context.Process(target=_become, args=of_peer, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        self._process.join(timeout_s)
        code = self.poll()
        if code is None:
            raise TimeoutExpired(self._process.name, timeout_s or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            # It may have ended, though its parent has not reported its exit code yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def launch(
    command: list[str], log: BinaryIO, environment: dict[str, str]
) -> Forked | local_peer.Popen[bytes]:
    """As `local_peer.launch`, which still starts peers in namespaces and similar cases."""
    if command[:2] != [sys.executable, "-m"]:
        return launch_interpreter(command, log, environment)
    return Forked(command[2], command[3:], log.name, environment)


def _become(
    program: str, arguments: Sequence[str], log: str, environment: Mapping[str, str], folder: str
) -> None:
    os.setsid()
    written = os.open(log, os.O_WRONLY | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(written, descriptor)
    os.close(written)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
