"""The fault matrix: roles, phases of a round and faults, as data and as fault plans.

A cell is missing if a role cannot be in a phase. Only a convener proposes and commits. A reducer
exists only between roster and manifest. A joiner has nothing to merge or to leave yet, and no vote
until rounds have counted it [R7].
"""

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.emulation.fault_plan import At, Fault, FaultPlan, Join, Kill, Leave, Pause

PHASES_OF = {
    "convener": (
        "local_steps", "save", "offer", "roster", "propose", "fetch",
        "accept", "commit", "apply", "merge", "leave",
    ),
    "reducer": ("roster", "reduce", "fetch", "accept", "apply"),
    "contributor": ("save", "offer", "fetch", "accept", "apply", "merge", "leave"),
    "owner": ("local_steps", "save", "offer", "fetch", "leave"),
    "joiner": ("fetch", "apply", "local_steps", "save", "offer"),
    "bootstrap": ("local_steps", "offer", "accept", "apply", "leave"),
}  # fmt: skip
ACTIONS = ("kill", "pause")
KILLED_S = 4.0
"""Seconds until a killed peer is restarted. A forked peer is there about 1 s later."""
PAUSED_S = 9.0
"""A long pause, which exceeds the wait for an offer and the allowed silence of a convener."""
LEFT_S = 12.0
"""Seconds until a peer that was asked to leave is restarted."""
FIRST_ROUND = 3


@dataclass(frozen=True)
class Cell:
    """One combination. Its name identifies it in tests and reports."""

    action: str
    role: str
    phase: str

    def __str__(self) -> str:
        return f"{self.action}-{self.role}-{self.phase}"


CELLS = tuple(
    Cell(action, role, phase)
    for role, phases in PHASES_OF.items()
    for phase in phases
    for action in ACTIONS
)

IN_CI = tuple(
    Cell(*name.split("-"))
    for name in (
        "kill-convener-propose",
        "pause-contributor-fetch",
        "kill-reducer-reduce",
        "kill-convener-commit",
        "pause-owner-offer",
        "kill-contributor-accept",
        "pause-convener-roster",
        "kill-owner-save",
        "kill-bootstrap-apply",
        "pause-reducer-accept",
        "kill-convener-merge",
        "kill-contributor-offer",
    )
)
"""The named cells of the default tests."""


def faults_of(cell: Cell) -> list[Fault]:
    """The faults of a plan with `in_order` that produce a cell.

    The phase "leave" has a trap for any role: the peer was asked to leave in its role while it
    trained.
    """
    if cell.phase != "leave":
        return [_met(cell, At(round=FIRST_ROUND, phase=cell.phase))]
    asked = At(round=FIRST_ROUND, phase="local_steps")
    caught = _met(Cell(cell.action, "any", "leave"), At(round=FIRST_ROUND, phase="leave"))
    return [caught, Leave(kind="leave", peer=cell.role, at=asked, for_s=LEFT_S)]


def _met(cell: Cell, at: At) -> Fault:
    if cell.action == "kill":
        return Kill(kind="kill", peer=cell.role, at=at, for_s=KILLED_S)
    return Pause(kind="pause", peer=cell.role, at=at, for_s=PAUSED_S)


def plan_of(cells: Sequence[Cell], *, max_down: int, step_s: float, num_peers: int) -> FaultPlan:
    """A plan that goes through cells in order, some at a time.

    Every joiner cell has its own newcomer, which leaves when its cell is over.
    """
    faults: list[Fault] = []
    newcomer = num_peers
    for cell in cells:
        faults += faults_of(cell)
        if cell.role == "joiner":
            faults.append(Join(kind="join", at=At(round=FIRST_ROUND)))
            faults.append(Leave(kind="leave", peer=newcomer, at=At(round=FIRST_ROUND)))
            newcomer += 1
    return FaultPlan(seed=1, max_down=max_down, in_order=True, step_s=step_s, fault=tuple(faults))
