"""How a drill controls a peer process: through files in a folder that drill and peer know.

A *trap* stops the first peer that comes to the trap's phase in the trap's role. This peer renames
the trap's file, so that a trap catches only one peer, and then stops itself. The drill then decides
what happens to the peer at exactly this place. `Controls` are settings that a running peer looks up
regularly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FOLDER_VARIABLE = "SWARM_EMULATION_FOLDER"
"""Environment variable of a peer: the drill's folder."""
INDEX_VARIABLE = "SWARM_EMULATION_PEER"
"""Environment variable of a peer: its number in the swarm."""


@dataclass(frozen=True)
class Trap:
    """The place where a peer is to be caught.

    Attributes:
        name: name of the file. Traps are tried in the order of their names.
        phase: see `fault_plan.FaultPhase`.
        round: first round in which the trap catches a peer.
        peer: number of the peer. None for any peer.
        role: role of the peer when it comes to the phase. None for any role.
    """

    name: str
    phase: str
    round: int = 0
    peer: int | None = None
    role: str | None = None

    def catches(self, *, phase: str, number: int, peer: int, roles: Collection[str]) -> bool:
        """Whether the trap is meant for a peer that works on this round."""
        return (
            phase == self.phase
            and number >= self.round
            and self.peer in (None, peer)
            and (self.role is None or self.role in roles)
        )


@dataclass(frozen=True)
class Caught:
    """A peer that stands in a trap."""

    trap: str
    peer: int
    round: int
    at_s: float
    """Seconds since 1970."""


@dataclass(frozen=True)
class Controls:
    """Settings of a running peer.

    Attributes:
        step_s: least seconds of a local step, filled with a wait in place of computation.
        slow: factor by which a local step takes longer.
        skew_s: seconds by which the wall clock is ahead.
    """

    step_s: float = 0.0
    slow: float = 1.0
    skew_s: float = 0.0


@dataclass(frozen=True)
class ControlFolder:
    """The folder through which a drill and its peers communicate."""

    path: Path

    def create(self) -> None:
        """Makes the folder."""
        for name in ("armed", "caught", "controls"):
            (self.path / name).mkdir(parents=True, exist_ok=True)

    def arm(self, trap: Trap) -> None:
        """Sets a trap."""
        _write(self.path / "armed" / trap.name, asdict(trap))

    def disarm(self, name: str) -> None:
        """Removes a trap that caught no peer."""
        (self.path / "armed" / name).unlink(missing_ok=True)

    def armed(self) -> list[Trap]:
        """The traps that have caught no peer, by name."""
        names = sorted(path.name for path in (self.path / "armed").iterdir())
        found = (_read(self.path / "armed" / name) for name in names if "." not in name)
        return [Trap(**values) for values in found if values]

    def take(self, trap: Trap, caught: Caught) -> bool:
        """Notes that a peer stands in a trap. False if another peer was faster."""
        taken = self.path / "armed" / f"{trap.name}.taken"
        try:
            os.rename(self.path / "armed" / trap.name, taken)
        except FileNotFoundError:
            return False
        _write(self.path / "caught" / trap.name, asdict(caught))
        taken.unlink()
        return True

    def caught(self, name: str) -> Caught | None:
        """The peer that stands or stood in a trap."""
        values = _read(self.path / "caught" / name)
        return Caught(**values) if values else None

    def forget(self, name: str) -> None:
        """Forgets a peer that died in a trap, so that the trap may be set again."""
        (self.path / "caught" / name).unlink(missing_ok=True)

    def controls(self, peer: int) -> Controls:
        """The settings that a peer has now."""
        values = _read(self.path / "controls" / str(peer)) or _read(self.path / "controls" / "all")
        return Controls(**values) if values else Controls()

    def tell_all(self, controls: Controls) -> None:
        """Gives settings to all peers without settings of their own."""
        _write(self.path / "controls" / "all", asdict(controls))

    def tell(self, peer: int, **changed: float) -> None:
        """Changes some settings of a peer."""
        told = replace(self.controls(peer), **changed)
        _write(self.path / "controls" / str(peer), asdict(told))


def _write(path: Path, values: dict[str, Any]) -> None:
    beside = path.with_name(f"{path.name}.writing-{os.getpid()}")
    beside.write_text(json.dumps(values))
    os.replace(beside, path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    values = json.loads(text)
    assert isinstance(values, dict)
    return values
