"""The disk of the month: real files in a folder, whose system calls may fail or hang.

What modules of the peer call through `os` passes here. Syncing takes no time: a month without power
cuts has nothing to lose by it. A disk that is full refuses to write, make and sync; one that hangs
lets nobody past until its outage is over.
"""

from __future__ import annotations

import errno
import os as real_os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from swarm.emulation.longevity.kernel import Threads, running_world

WRITING = ("open", "fsync", "fdatasync", "pwrite", "link")


@dataclass
class Disk:
    """See the module.

    Attributes:
        full: when it is full, (from, to) in seconds of the month.
        hanging: when it does not answer, likewise.
        calls: of the system, by name.
        refused: of these, how many failed.
    """

    full: list[tuple[float, float]] = field(default_factory=list)
    hanging: list[tuple[float, float]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def passes(self, name: str, flags: int = real_os.O_WRONLY) -> None:
        """Before a call.

        Raises:
            OSError: the disk is full.
        """
        self.calls[name] += 1
        loop = running_world()
        for begin_s, end_s in self.hanging:
            if begin_s <= loop.now_s < end_s:
                Threads.of(loop).sleep(end_s - loop.now_s)
        reads_only = name == "open" and not flags & (real_os.O_WRONLY | real_os.O_RDWR)
        if not reads_only and any(b <= loop.now_s < e for b, e in self.full):
            self.refused[name] += 1
            raise OSError(errno.ENOSPC, real_os.strerror(errno.ENOSPC))

    def calls_of_os(self) -> dict[str, Callable[..., Any]]:
        """What stands in the place of functions of `os`."""

        def opened(path: Any, flags: int, mode: int = 0o777, **named: Any) -> int:
            self.passes("open", flags)
            return real_os.open(path, flags, mode, **named)

        def written(descriptor: int, data: Any, offset: int) -> int:
            self.passes("pwrite")
            return real_os.pwrite(descriptor, data, offset)

        def linked(*arguments: Any, **named: Any) -> None:
            self.passes("link")
            real_os.link(*arguments, **named)

        return {
            "open": opened,
            "pwrite": written,
            "link": linked,
            "fsync": lambda _: self.passes("fsync"),
            "fdatasync": lambda _: self.passes("fdatasync"),
        }
