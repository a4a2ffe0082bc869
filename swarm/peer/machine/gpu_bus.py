"""The bus between the GPUs of this machine, measured in a separate process.

`python -m swarm.peer.machine.gpu_bus` prints the rate. A process that has used a GPU keeps some of
its memory, so the peer measures in a short-lived process.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from typing import Literal

import torch

from swarm.train.engine.mesh import BUSES, NVLINK, PCIE, Bus, BusName

logger = logging.getLogger(__name__)

NVLINK_FROM_GB_S = 75.0
"""More than the 64 GB/s each way of PCIe 5 x16, and less than every NVLink of a GPU with a
switch."""
COPIED_BYTES = 64 * 2**20
MEASURE_S = 120.0
"""Limit for loading PyTorch, starting all GPUs and some copies."""


def bus_here(asked: Literal["auto"] | BusName, gpus: int) -> Bus:
    """The bus between the GPUs of this machine.

    Args:
        asked: the configured bus; auto measures it.
        gpus: how many GPUs are in use, counted from the first.
    """
    if asked != "auto":
        return BUSES[asked]
    if gpus < 2 or not torch.cuda.is_available():
        return PCIE
    if not all(torch.cuda.can_device_access_peer(0, other) for other in range(1, gpus)):
        logger.info("bus: pcie, since GPUs have no access to each other")
        return PCIE
    command = [sys.executable, "-m", "swarm.peer.machine.gpu_bus", str(gpus)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=MEASURE_S
        )
        gb_s = float(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        logger.warning("bus: taken to be pcie, since it could not be measured: %s", error)
        return PCIE
    bus = bus_of(gb_s)
    logger.info("bus: %s, since the slowest copy between two GPUs had %.0f GB/s", bus.name, gb_s)
    return bus


def bus_of(gb_s: float) -> Bus:
    """The bus with such a rate."""
    return NVLINK if gb_s > NVLINK_FROM_GB_S else PCIE


def slowest_copy(devices: list[torch.device], num_bytes: int = COPIED_BYTES) -> float:
    """GB/s of copies from the first device to each other device, the best of five copies each."""
    rates = []
    source = torch.ones(num_bytes, dtype=torch.uint8, device=devices[0])
    for device in devices[1:]:
        target = torch.empty_like(source, device=device)
        best_s = float("inf")
        for _ in range(5):
            began_s = time.perf_counter()
            target.copy_(source)
            target[-1].item()
            best_s = min(best_s, time.perf_counter() - began_s)
        rates.append(num_bytes / best_s / 1e9)
    return min(rates)


def main() -> None:
    """Prints the rate of the slowest copy between the first N GPUs; N is the argument."""
    devices = [torch.device("cuda", gpu) for gpu in range(int(sys.argv[1]))]
    sys.stdout.write(f"{slowest_copy(devices)}\n")


if __name__ == "__main__":
    main()
