"""The bus between GPUs."""

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm.peer.machine.gpu_bus import bus_here, bus_of, slowest_copy
from swarm.train.engine.mesh import NVLINK, PCIE


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Eight GPUs with a rate of the slowest copy."""
    found = SimpleNamespace(rate="180.5\n", commands=[], access=True)

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        found.commands.append(command)
        if isinstance(found.rate, Exception):
            raise found.rate
        return SimpleNamespace(stdout=found.rate)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: found.access)
    monkeypatch.setattr(subprocess, "run", run)
    return found


def test_the_bus_is_measured_in_a_process_of_its_own(gpus: SimpleNamespace) -> None:
    assert bus_here("auto", 8) is NVLINK
    assert gpus.commands == [[sys.executable, "-m", "swarm.peer.machine.gpu_bus", "8"]]
    gpus.rate = "24.9\n"
    assert bus_here("auto", 8) is PCIE
    assert (bus_of(55.0), bus_of(250.0)) == (PCIE, NVLINK)


def test_nothing_is_measured_where_it_is_known(gpus: SimpleNamespace) -> None:
    assert bus_here("nvlink", 8) is NVLINK
    assert bus_here("pcie", 8) is PCIE
    assert bus_here("auto", 1) is PCIE
    gpus.access = False
    assert bus_here("auto", 8) is PCIE
    assert gpus.commands == []


@pytest.mark.parametrize(
    "rate", ["nan?", subprocess.TimeoutExpired("x", 1), subprocess.CalledProcessError(1, "x")]
)
def test_what_cannot_be_measured_is_taken_to_be_slow(
    gpus: SimpleNamespace, rate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gpus.rate = rate
    with caplog.at_level(logging.WARNING):
        assert bus_here("auto", 8) is PCIE
    assert "taken to be pcie, since it could not be measured" in caplog.text


def test_a_cpu_has_no_fast_bus_and_copies_have_a_rate() -> None:
    assert bus_here("auto", 8) is PCIE
    assert 0 < slowest_copy([torch.device("cpu")] * 3, 2**16) < 1e6
