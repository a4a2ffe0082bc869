"""The hardware of a machine that an engine can use. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.train.engine.mesh import ALONE, Fabric

GIGABYTE = 10**9


@dataclass(frozen=True)
class Processor:
    """The processor that computes on a machine.

    Attributes:
        text: the GPU with its memory, or a note that there is no GPU. "" if not examined.
        remedy: how to make an unused GPU of this machine usable. "" if there is no unused GPU.
    """

    text: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Machine:
    """The memory of a machine, and its assumed speed.

    With several workers, the figures are those of each worker.

    Attributes:
        device: "cuda"; or "cpu" for a machine without a GPU, where device memory is host memory.
        device_bytes: memory of the GPU.
        host_bytes: memory of the machine.
        disk_bytes: free where the state directory lies.
        cores: cores of the CPU.
        tflops: matrix products in the compute type.
        bus_gb_s: each way, between pinned memory and GPU.
        updates_g_s: 10^9 parameters that all cores together update in a second.
        fabric: the workers and the links between them.
    """

    device: str
    device_bytes: float
    host_bytes: float
    disk_bytes: float
    cores: int = 8
    tflops: float = 100.0
    bus_gb_s: float = 20.0
    updates_g_s: float = 1.0
    fabric: Fabric = ALONE

    @property
    def usable_device(self) -> float:
        """Device memory, minus CUDA's context and an allowance for fragmentation."""
        return 0.94 * self.device_bytes - 0.7 * GIGABYTE

    @property
    def usable_host(self) -> float:
        """Host memory, minus an allowance for the system and other programs."""
        return self.host_bytes - max(1.0 * GIGABYTE, 0.05 * self.host_bytes)
