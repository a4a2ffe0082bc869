"""What the ranks of a peer reach each other by, and how long bytes take over it. Pure.

Ranks sit in machines one after the other (`mesh.py`, `roster.py`): the first `per_node` in the
first machine. Within one they share a bus, between two a network. Every rank sends and receives as
much, both at once, so that one direction is counted.

Latencies of operations are left out: a plan compares minutes of traffic, not single operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

BusName = Literal["nvlink", "pcie"]
NETWORK_SHARE = 0.96
"""Of a network's nominal rate: 48 of 50 GB/s, NVIDIA/nccl-tests issue 267."""


@dataclass(frozen=True)
class Bus:
    """What GPUs of one machine reach each other by.

    Attributes:
        name: of its kind.
        gpu_gb_s: each way, of one GPU.
        mixed_gb_s: of all GPUs of a machine together, where each of them sends to each.
    """

    name: BusName
    gpu_gb_s: float
    mixed_gb_s: float = inf


# NVLink 4 has 18 links of 25 GB/s each way, 450 GB/s (NVIDIA H100 data sheet), of which NCCL counts
# 20.6 a link (SM90_NVLINK_BW in its src/graph/topo.h). A switch carries what all GPUs send.
NVLINK = Bus("nvlink", 18 * 20.6)
# PCIe 4 x16 has 32 GB/s each way, of which NCCL counts 24, twice its PCI_BW of generation 3. It
# counts 24 each way between the sockets of an EPYC too (AMD_ZEN34_BW); a quarter of what all GPUs
# send to all goes from one socket to the other. Without peer access bytes pass through the host,
# and it is less.
PCIE = Bus("pcie", 24.0, 4 * 24.0)
BUSES: dict[BusName, Bus] = {bus.name: bus for bus in (NVLINK, PCIE)}


@dataclass(frozen=True)
class Fabric:
    """The ranks of a peer in their machines, which are alike.

    Attributes:
        size: number of ranks.
        per_node: in each machine, at most.
        bus: within a machine.
        between_gb_s: each way, of one machine to all others.
    """

    size: int = 1
    per_node: int = 1
    bus: Bus = PCIE
    between_gb_s: float = 1.25

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return -(-self.size // self.per_node)

    def exchange_s(self, parts: Sequence[Sequence[int]], leaving: float) -> float:
        """Seconds of an exchange in which each rank sends the others of its part as much.

        Args:
            parts: sets of ranks that exchange at the same time.
            leaving: bytes that leave each rank; nothing leaves a rank that is alone.
        """
        near, far = [0.0] * self.size, [0.0] * self.size
        for part in parts:
            neighbours = Counter(rank // self.per_node for rank in part)
            for rank in part if len(part) > 1 else ():
                share = (neighbours[rank // self.per_node] - 1) / (len(part) - 1)
                near[rank] += leaving * share
                far[rank] += leaving * (1 - share)
        mixed_s = max(self._sums(near)) / (self.bus.mixed_gb_s * 1e9)
        return max(mixed_s, self._seconds(near, far))

    def stream_s(self, pairs: Sequence[tuple[int, int]], num_bytes: float) -> float:
        """Seconds in which the first rank of each pair sends to the second, all at once."""
        near, far = [0.0] * self.size, [0.0] * self.size
        for sender, receiver in pairs:
            is_near = sender // self.per_node == receiver // self.per_node
            (near if is_near else far)[sender] += num_bytes
        return self._seconds(near, far)

    def _seconds(self, near: Sequence[float], far: Sequence[float]) -> float:
        """The slower of bus and network, since bytes pass over both at once."""
        bus_s = max(near) / (self.bus.gpu_gb_s * 1e9)
        return max(bus_s, max(self._sums(far)) / (self.between_gb_s * NETWORK_SHARE * 1e9))

    def _sums(self, of_ranks: Sequence[float]) -> list[float]:
        starts = range(0, self.size, self.per_node)
        return [sum(of_ranks[start : start + self.per_node]) for start in starts]

    def __str__(self) -> str:
        """In words."""
        here = min(self.size, self.per_node)
        words = f"{here} in a machine over {self.bus.name}" if here > 1 else "one in a machine"
        if self.nodes == 1:
            return words
        return f"{words}, {self.nodes} machines over {8 * self.between_gb_s:g} Gbit/s"


ALONE = Fabric()
"""One rank."""
