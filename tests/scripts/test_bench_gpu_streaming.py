"""The comparison with FSDP, whose own model code only a GPU would try otherwise."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_comparison_is_ended_as_by_ctrl_c_which_ends_the_variant_that_runs(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def run(*_: object, **__: object) -> None:
        """Is a call that kills its process where it is left by an exception."""
        signal.raise_signal(number)
        raise AssertionError("it was not heard")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cpu"])
    # These tests stay alive where it is not heard.
    before = signal.signal(number, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            script.main()
    finally:
        signal.signal(number, before)
