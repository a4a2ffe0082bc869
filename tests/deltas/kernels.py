"""What Python prints where torch has other kernels than here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

KERNELS = ["default", "avx2"]
ROOT = Path(__file__).parents[2]


def found_under(kernels: str, *arguments: str) -> Any:
    """Runs Python with these arguments, which print as JSON: torch's capability and what was found.

    Returns:
        What was found; the capability is the one that was asked for.
    """
    result = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"ATEN_CPU_CAPABILITY": kernels},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    capability, found = json.loads(result.stdout)
    assert capability == kernels.upper() or kernels != "default"  # a processor may lack AVX2
    return found
