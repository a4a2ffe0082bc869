"""The names of meshes that `scripts/bench_parallel.py` takes."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

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
