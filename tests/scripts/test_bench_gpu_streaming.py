"""The comparison with FSDP, whose own model code only a GPU would try otherwise."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_gpu_streaming.py"


def test_the_variant_of_fsdp_trains_our_model() -> None:
    """In a process of its own, as `main` starts it: torch has one process group of a process."""
    sizes = ["--device", "cpu", "--shape", "demo", "--tokens", "512", "--length", "64"]
    done = subprocess.run(
        [sys.executable, SCRIPT, "--variant", "tuned", "--steps", "1", *sizes],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["variant"], found["tokens"]) == ("tuned", 512)
    assert found["step_s"] > 0
