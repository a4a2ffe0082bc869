"""Blocks of freed tensors go back to the system."""

import subprocess
import sys

import pytest

FREED = """
import torch
from swarm.train.engine.host_memory import return_free_memory

def resident() -> int:
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) * 1024

torch.ones(7_000_000).sum()  # glibc keeps blocks of its size from now on
blocks = [torch.ones(1_500_000) for _ in range(40)]
full = resident()
del blocks[::2]
{between}
print((full - resident()) // 10**6)
"""
HALF = 120


@pytest.mark.parametrize("between", ["return_free_memory()", ""])
def test_every_second_block_of_many_goes_back(between: str) -> None:
    program = [sys.executable, "-c", FREED.format(between=between)]
    environment = {"PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        program, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    freed = int(done.stdout)
    assert freed > 0.9 * HALF if between else freed < 0.5 * HALF
