"""What a machine has, as a person writes it and as it is found."""

import logging
from pathlib import Path

import pytest
import torch

from swarm.config import ComputeSection, RunConfig
from swarm.config.amounts import size_in_bytes
from swarm.errors import ConfigError
from swarm.peer.machine import machine_survey
from swarm.peer.machine.machine_survey import (
    Room,
    described_machine,
    engine_for,
    plan_here,
    processor,
    this_machine,
    wishes_of,
)
from swarm.protocol.values.manifest import ALL_EXPERTS
from swarm.train.engine.hardware import Machine
from swarm.train.fallback_engine import SteppingEngine
from swarm.train.planning.ladder import EnginePlan
from tests.train.runs import tiny_run


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("24GB", 24e9), ("1.5 TB", 1.5e12), ("512MiB", 2**29), ("0", 0), ("7g", 7e9), ("3KiB", 3072)],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: float) -> None:
    assert size_in_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "24 parsecs", "1.2.3GB", ".", "-1GB"])
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        size_in_bytes(text)


def test_this_machine_is_found_and_can_be_limited(tmp_path: Path) -> None:
    found = this_machine(ComputeSection(device="cpu", threads=3), tmp_path / "not" / "yet")
    assert found.device == "cpu"
    assert found.cores == 3
    assert found.host_bytes > 2**30
    assert found.disk_bytes > 0
    assert 0 < found.tflops < 100
    limited = ComputeSection(device="cpu", host_memory_gb=2.5)
    assert this_machine(limited, tmp_path).host_bytes == 2.5e9


def test_a_described_machine_overrides_what_was_found(tmp_path: Path) -> None:
    found = this_machine(ComputeSection(device="cpu"), tmp_path)
    assert described_machine(found, {"gpu": None, "host": None, "disk": None}) == found
    gpu = described_machine(found, {"gpu": "24GB", "host": "64GB", "disk": "1TB"})
    assert (gpu.device, gpu.device_bytes) == ("cuda", 24e9)
    assert (gpu.host_bytes, gpu.disk_bytes) == (64e9, 1e12)
    assert described_machine(gpu, {"gpu": "0"}).device == "cpu"


def test_a_plan_without_the_gpu_of_this_machine_goes_by_the_speed_of_its_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_survey, "_measured_tflops", {"cpu": 0.2, "cuda": 400.0}.__getitem__)
    with_gpu = Machine("cuda", 80e9, 128e9, 1e12, tflops=400.0)
    without = described_machine(with_gpu, {"gpu": "0"})
    assert (without.device, without.device_bytes, without.tflops) == ("cpu", 0, 0.2)


def test_frozen_experts_are_mapped_only_where_that_is_allowed(tmp_path: Path) -> None:
    assert wishes_of(ComputeSection(), tmp_path).folder == tmp_path
    assert wishes_of(ComputeSection(map_frozen=False), tmp_path).folder is None
    asked = wishes_of(ComputeSection(engine="streaming", moments="int8"), None)
    assert (asked.engine, asked.moments) == ("streaming", "int8")


def test_an_engine_is_planned_for_the_experts_that_are_owned_if_they_are_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it knows by its machine whether more of them fit."""
    planned: list[int] = []

    def watched(
        run: RunConfig, owned: int, compute: ComputeSection, folder: Path
    ) -> tuple[Machine, EnginePlan]:
        planned.append(owned)
        return plan_here(run, owned, compute, folder)

    monkeypatch.setattr(machine_survey, "plan_here", watched)
    run, enough = tiny_run(run={"peers": 2}), ComputeSection(device="cpu", threads=1)
    for owned in (0, 1, 3):
        engine = engine_for(run, enough, tmp_path, owned=owned)
    assert planned == [2, 2, 3]
    assert isinstance(engine, SteppingEngine) and engine._fits(engine.options, 4)
    engine.close()
    little = ComputeSection(device="cpu", threads=1, host_memory_gb=0.1)
    engine = engine_for(run, little, tmp_path)
    assert isinstance(engine, SteppingEngine) and not engine._fits(engine.options, 1)
    engine.close()


def test_the_room_of_a_machine_shrinks_as_its_engine_steps_down(tmp_path: Path) -> None:
    run, enough = tiny_run(), ComputeSection(device="cpu", threads=1)
    room = Room(run, enough, tmp_path)
    assert room() == ALL_EXPERTS
    engine = engine_for(run, enough, tmp_path)
    room.engine = engine
    assert room() == ALL_EXPERTS, "with this engine, or one of those below"
    assert isinstance(engine, SteppingEngine)
    engine._below.clear()
    fitting = [n for n in range(run.model.num_experts + 1) if engine._fits(engine.options, n)]
    assert room() == (ALL_EXPERTS if len(fitting) > run.model.num_experts else max(fitting))
    engine.close()
    little = ComputeSection(device="cpu", threads=1, host_memory_gb=0.1)
    assert Room(run, little, tmp_path)() == 0


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /dev of a machine whose PyTorch finds no GPU."""
    monkeypatch.setattr(machine_survey, "_DEVICES", tmp_path / "dev")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    return tmp_path / "dev"


def log_of_engine(compute: ComputeSection, folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Lines of the engine and warnings that are said as it is made."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        engine_for(tiny_run(), compute, folder).close()
    levels = {logging.INFO: "info", logging.WARNING: "warning"}  # hivemind renames them
    return "\n".join(
        f"{levels[record.levelno]}: {record.getMessage()}" for record in caplog.records
    )


def test_a_gpu_that_pytorch_cannot_use_is_warned_of_and_the_device_is_named(
    devices: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    auto, cpu = ComputeSection(threads=1), ComputeSection(device="cpu", threads=1)
    said = log_of_engine(auto, tmp_path, caplog)
    assert "info: engine: " in said and " (on cpu; predicted: " in said and "warning" not in said
    (devices / "nvidia0").touch()
    said = log_of_engine(auto, tmp_path, caplog)
    assert "warning: computing with " in said and "CPU cores, not the GPU of" in said
    assert "warning" not in log_of_engine(cpu, tmp_path, caplog), "as asked for"


@pytest.mark.parametrize(
    ("cuda", "why", "remedy"),
    [(None, "is built without CUDA", "PyTorch with CUDA"), ("13.0", "finds no GPU", "driver")],
)
def test_the_remedy_of_an_unused_gpu_goes_by_how_pytorch_is_built(
    devices: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, why: str, remedy: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert processor().text.startswith("no GPU, ") and not processor().remedy
    (devices / "nvidia0").touch()
    found = processor()
    assert found.text.endswith(why) and str(devices / "nvidia0") in found.text
    assert remedy in found.remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert processor().text.startswith("no GPU, ") and not processor().remedy
