"""The bench of the resident engine: one variant that does not fit costs no other its figures."""

import json
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from swarm.config import RunConfig
from swarm.train.options import EngineOptions

Monkey = pytest.MonkeyPatch
ON_CPU = ["--device", "cpu", "--shape", "demo"]


@pytest.fixture
def bench(monkeypatch: Monkey) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    sys.modules.pop("bench_gpu_resident", None)
    import bench_gpu_resident  # the folder is on the path in this test alone

    return bench_gpu_resident


def printed(
    bench: ModuleType, monkeypatch: Monkey, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What it prints of each variant as it is done, and in the end."""
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    bench.main()
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("{") and line != "{"]
    return [json.loads(line) for line in lines], json.loads(out[out.index("{\n") :])


def test_a_variant_that_does_not_fit_leaves_the_figures_of_the_others(
    bench: ModuleType, monkeypatch: Monkey, capsys: pytest.CaptureFixture[str]
) -> None:
    make, made = bench.make_engine, []

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")

    def make_engine(run: RunConfig, options: EngineOptions) -> Any:
        assert not any(engine() for engine in made), "the one before has gone"
        engine = make(run, options)
        made.append(weakref.ref(engine))
        if options.recompute == "none":
            engine.step = full
        return engine

    monkeypatch.setattr(bench, "make_engine", make_engine)
    sizes = ["--tokens", "128", "--length", "32", "--micro", "2", "--steps", "1"]
    each, found = printed(bench, monkeypatch, capsys, "mfu", *ON_CPU, *sizes)
    assert each == [{"none": found["none"]}, {"routing": found["routing"]}]
    assert found["none"]["error"] == "CUDA out of memory. Tried to allocate 2 GiB."
    assert found["routing"]["step_s"] > 0 < found["none"]["predicted_gb"]
    assert len(made) == 2


def test_the_context_starts_where_it_is_told_and_ends_where_no_engine_can_be_made(
    bench: ModuleType, monkeypatch: Monkey, capsys: pytest.CaptureFixture[str]
) -> None:
    make = bench.make_engine

    def make_engine(run: RunConfig, options: EngineOptions) -> Any:
        if run.data.sequence_length == 256:
            raise MemoryError("4096 bytes of host memory cannot be pinned (2)")
        return make(run, options)

    monkeypatch.setattr(bench, "make_engine", make_engine)
    lengths = ["--shortest", "64", "--longest", "1024"]
    _, found = printed(bench, monkeypatch, capsys, "context", *ON_CPU, *lengths)
    assert list(found) == ["64", "128", "256"]
    assert found["128"]["step_s"] > 0 < found["128"]["predicted_host_gb"]
    assert "cannot be pinned" in found["256"]["error"] and "step_s" not in found["256"]


def test_an_error_of_another_kind_is_not_taken_for_one_of_memory(
    bench: ModuleType, monkeypatch: Monkey, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_engine(*_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(bench, "make_engine", make_engine)
    with pytest.raises(RuntimeError, match="a bug"):
        printed(bench, monkeypatch, capsys, "mfu", *ON_CPU, "--tokens", "128", "--length", "32")


@pytest.mark.parametrize(("sequences", "micro"), [(1, 1), (2, 2), (5, 1), (6, 3), (8, 4)])
def test_a_micro_batch_is_a_share_of_the_sequences_that_there_are(
    bench: ModuleType,
    monkeypatch: Monkey,
    capsys: pytest.CaptureFixture[str],
    sequences: int,
    micro: int,
) -> None:
    sizes = ["--tokens", str(32 * sequences), "--length", "32", "--steps", "1"]
    once = ["--recompute", "none"]
    _, found = printed(bench, monkeypatch, capsys, "mfu", *ON_CPU, *sizes, *once)
    assert found["none"]["micro_sequences"] == micro and found["none"]["step_s"] > 0


def test_a_peak_is_found_of_every_shape_that_is_offered(
    bench: ModuleType, monkeypatch: Monkey, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "figures_of", lambda run, owned, *_: {"owned": owned})
    offered = {
        "7b": {"7b": 8, "7b-all": 32},
        "7b-all": {"7b-all": 32},
        "2b": {"2b": 1, "2b-all": 16},
        "2b-all": {"2b-all": 16},
        "demo": {"demo": 2},
    }
    assert offered.keys() == bench.SHAPES.keys()
    for shape, variants in offered.items():
        _, found = printed(bench, monkeypatch, capsys, "peak", "--device", "cpu", "--shape", shape)
        assert found == {name: {"owned": owned} for name, owned in variants.items()}
