"""What a machine has for an engine. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.train.engine.mesh import ALONE, Fabric

GIGABYTE = 10**9


@dataclass(frozen=True)
class Processor:
    """What computes on a machine.

    Attributes:
        text: the GPU with its memory, or that there is none; "" where nobody looked.
        remedy: what lets the GPU be used that is here and is not; "" where nothing is amiss.
    """

    text: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Machine:
    """The memory of a machine, and how fast it is taken to be.

    For several workers it is what each of them has.

    Attributes:
        device: "cuda", or "cpu" for a machine without GPU, whose device memory is its host memory.
        device_bytes: memory of the GPU.
        host_bytes: memory of the machine.
        disk_bytes: free where the state directory lies.
        cores: of the CPU.
        tflops: matrix products in the compute type.
        bus_gb_s: each way, between pinned memory and GPU.
        updates_g_s: 10^9 parameters that all cores together update in a second.
        fabric: how many workers there are, and what they reach each other by.
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
        """Without the context of CUDA and the gaps that an allocator leaves between pieces."""
        return 0.94 * self.device_bytes - 0.7 * GIGABYTE

    @property
    def usable_host(self) -> float:
        """Without the system and other programs on the machine."""
        return self.host_bytes - max(1.0 * GIGABYTE, 0.05 * self.host_bytes)
