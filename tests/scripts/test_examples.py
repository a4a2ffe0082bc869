"""The examples, and the Python code in README, run unchanged."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

import swarm
from swarm.config import RunConfig
from swarm.emulation.local_swarm import LocalSwarm
from swarm.experts import all_shapes
from swarm.model.huggingface import save_model
from swarm.model.initial_weights import initial_tensors
from tests.scenarios.swarms import ROUND_S, has_rounds, write_run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "scripts" / "examples"
ENDS_S = 180.0
STEP = re.compile(r"^step (\d+): (\d+\.\d+) nats per token$", re.MULTILINE)
HELD_OUT = re.compile(r"^round (\d+): held-out loss (\d+\.\d+)(?:, |$)", re.MULTILINE)
GO_ON = """
import swarm

class Once(swarm.PeerObserver):
    def on_step(self, step, stats):
        print(f"step {step}: {stats.cross_entropy:.3f} nats per token")
        peer.stop()

with swarm.Peer.resume("out/alone", observer=Once()) as peer:
    peer.train()
"""


def page() -> str:
    """The Python in README."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    return str(block)


def run_python(folder: Path, *arguments: object) -> str:
    """The output of a script that is started in a folder."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=ENDS_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def export_of(run: RunConfig, folder: Path) -> dict[str, Tensor]:
    """Weights as after training: none equals the run's initial value."""
    weights = {
        name: value + 0.01 if value.ndim > 1 else value
        for name, value in initial_tensors(run, all_shapes(run.model)).items()
    }
    save_model(folder, run, weights.items())
    return weights


def assert_ten_steps(printed: str) -> None:
    """Ten steps of two rounds, and the held-out loss of the export and of both rounds."""
    assert [int(step) for step, _ in STEP.findall(printed)] == list(range(10))
    losses = [float(loss) for _, loss in HELD_OUT.findall(printed)]
    assert len(losses) == 3 and losses[2] < losses[0], "it learns"


@pytest.mark.scenario
def test_the_page_in_readme_continues_an_export(tmp_path: Path) -> None:
    run = swarm.load_run("demo")
    export_of(run, tmp_path / "out" / "demo-model")
    (tmp_path / "page.py").write_text(page())
    printed = run_python(tmp_path, "page.py")
    assert_ten_steps(printed)
    said = "round 2, step 10: swarm.Peer.resume('out/alone') continues from here"
    assert printed.splitlines()[-1] == said
    (tmp_path / "go_on.py").write_text(GO_ON)
    steps = STEP.findall(run_python(tmp_path, "go_on.py"))
    assert steps and int(steps[0][0]) == 10, "so it does"


@pytest.mark.scenario
def test_an_export_is_continued_from_its_own_weights(tmp_path: Path) -> None:
    run = swarm.load_run("demo", ["run.peers=1", "run.rounds=2", "round.local_steps=5"])
    weights = export_of(run, tmp_path / "export")
    printed = run_python(tmp_path, EXAMPLES / "continue_export.py", "export", "alone")
    assert_ten_steps(printed)
    state = swarm.load_state(tmp_path / "alone")
    assert (state.manifest.round, state.manifest.step) == (2, 10)
    moved = {n: (state.weights[n].float() - weights[n]).abs().max().item() for n in weights}
    assert 0 < max(moved.values()) < 0.2, "ten small steps from the export, not from the seed"


@pytest.mark.scenario
def test_a_script_looks_at_a_run_joins_it_and_leaves(tmp_path: Path) -> None:
    run_file = write_run(tmp_path, ["run.rounds=100000"])
    with LocalSwarm(tmp_path / "swarm", run_file, 2) as swarm_of_two:
        swarm_of_two.start()
        swarm_of_two.wait_until(has_rounds(1), what="a round", timeout_s=ROUND_S)
        address = swarm_of_two.peers[0].join_address()
        arguments = (address, "joiner", "network.host_maddrs=['/ip4/127.0.0.1/tcp/0']")
        printed = run_python(tmp_path, EXAMPLES / "join_run.py", *arguments)
    first, *_, last = printed.splitlines()
    assert re.fullmatch(r"exact is in round \d+ of 100000, peers: 2", first)
    assert "3 members, counted True" in printed
    assert re.fullmatch(r"left exact-[0-9a-f]{16} after [23] rounds", last)


def test_a_run_is_planned_and_its_model_built(capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / "plan_model.py"
    spec = importlib.util.spec_from_file_location("plan_model", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main("demo")
    printed = capsys.readouterr().out
    assert "0.95 M parameters" in printed and "fits: True" in printed
    loss = float(printed.rsplit(" ", 1)[1])
    assert 5.4 < loss < 5.8, "ln 260 = 5.56"


def test_the_examples_are_short() -> None:
    files = sorted(EXAMPLES.glob("*.py"))
    assert len(files) == 3
    for path in files:
        text = path.read_text()
        assert len(text.splitlines()) <= 50 and ast.get_docstring(ast.parse(text))
