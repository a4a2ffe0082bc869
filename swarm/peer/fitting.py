"""What a machine lacks for a plan, in words: the numbers, and what would help. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.train.hardware import Machine
from swarm.train.round_memory import HostPeaks
from swarm.train.sizes import Need


@dataclass(frozen=True)
class Shortfall:
    """One thing of which a machine has less than a plan needs.

    Attributes:
        what: in words.
        needed: bytes.
        there: bytes that may be used.
        remedy: what would help.
    """

    what: str
    needed: float
    there: float
    remedy: str

    def __str__(self) -> str:
        needs = f"{self.needed / 1e9:,.1f} GB of {self.what} needed, {self.there / 1e9:,.1f} GB"
        return f"{needs} usable: {self.remedy}"


def shortfalls(
    need: Need, peaks: HostPeaks, state_bytes: float, machine: Machine, most: int | None
) -> list[Shortfall]:
    """Of what a machine has too little.

    Args:
        need: of the engine.
        peaks: of the process in host memory.
        state_bytes: of the state directory.
        machine: what there is.
        most: experts that fit with some engine; None if not even the shared tensors do.
    """
    fewer = "rent a machine with more, or take smaller micro-batches or a smaller model"
    if most is not None:
        fewer = f"own at most {most} experts (more --peers, or a lower --capacity)"
    bounds = [
        ("disk", state_bytes + need.disk, machine.disk_bytes, "free some, or take a larger one"),
    ]
    if machine.device != "cpu":
        bounds.append(("GPU memory", need.crowded, machine.usable_device, fewer))
    bounds.append(("host memory", peaks.highest, machine.usable_host, fewer))
    return [Shortfall(*bound) for bound in bounds if bound[1] > max(bound[2], 0.0)]
