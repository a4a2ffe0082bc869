"""What `scripts/bench_parallel.py` compares: the names of its meshes, and their threads."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from swarm.train.options import EngineKind

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    sys.modules.pop("bench_parallel", None)
    import bench_parallel  # the folder is on the path in this test alone

    return bench_parallel


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("w1", (1, 1, 1)),
        ("dp4", (4, 1, 1)),
        ("ep2", (2, 2, 1)),
        ("dp2-pp4", (8, 1, 4)),
        ("dp2-tp2-pp2", (8, 2, 2, 2)),
    ],
)
def test_a_mesh_is_named_by_its_parts(bench: ModuleType, name: str, sizes: tuple[int, ...]) -> None:
    assert bench.Form.of(name) == bench.Form(*sizes)


def test_a_mesh_that_streams_is_one_by_itself(bench: ModuleType) -> None:
    assert bench.Form.of("s2") == bench.Form(2, 1, 1, kind=EngineKind.STREAMING)
    with pytest.raises(ValueError, match="such as"):
        bench.Form.of("s2-ep2")


@pytest.mark.parametrize("name", ["", "dp", "dp0", "sp2", "dp2ep2", "2", "tp2-ep2"])
def test_another_name_is_refused_with_examples(bench: ModuleType, name: str) -> None:
    with pytest.raises(ValueError, match="such as w1, dp2, ep2"):
        bench.Form.of(name)


def test_the_resident_engine_has_the_threads_of_a_worker(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen = torch.get_num_threads(), []

    def measured(name: str, *_: object) -> dict[str, Any]:
        seen.append((name, torch.get_num_threads()))
        times = dict.fromkeys(("step_s", "offer_s", "adopt_s", "state_s"), 1.0)
        return {**times, "losses": [2.0], "operations": {}, "bytes": {}}

    monkeypatch.setattr(bench, "measured", measured)
    words = ["--meshes", "w1", "--turns", "1", "--threads", str(before + 1)]
    monkeypatch.setattr(sys, "argv", ["bench_parallel", *words])
    try:
        bench.main()
    finally:
        torch.set_num_threads(before)
    assert seen == [("resident", before + 1), ("w1", before + 1)]
