"""What a wheel holds, and that it works in an environment of its own, away from any clone."""

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy
import pytest

from swarm.version import __version__

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("swarm", "peers", "configs", "pyproject.toml", "README.md", "LICENSE")
ENDS_S = 300.0


def run(*command: object, folder: Path) -> str:
    """What a command prints on stdout; nothing of this clone or this session reaches it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=kept | {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=ENDS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since building leaves files in the folder."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        path = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(path, source / name)
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", out)
    run(sys.executable, "-m", "pip", "wheel", source, *options, folder=source)
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.scenario
def test_a_wheel_has_the_code_and_the_run_files_and_nothing_else(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    code = {*ROOT.glob("peers/*.py"), *ROOT.glob("swarm/**/*.py"), ROOT / "swarm" / "py.typed"}
    files = {f"swarm/{path.relative_to(ROOT)}" for path in ROOT.glob("configs/**/*.toml")}
    assert len(files) >= 9 and "swarm/configs/runs/demo.toml" in files
    page = {path for path in ROOT.glob("swarm/monitor/web/**/*") if path.is_file()}
    assert ROOT / "swarm/monitor/web/index.html" in page
    assert held == {str(path.relative_to(ROOT)) for path in code | page} | files
    assert wheel.name.startswith(f"moe_swarm-{__version__}-")


@pytest.mark.scenario
def test_the_demo_runs_by_name_from_a_wheel_away_from_the_clone(
    wheel: Path, tmp_path: Path
) -> None:
    """Its packages are those of this environment, which a line in a .pth file lends it."""
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", folder=tmp_path)
    programs = tmp_path / "env" / "bin"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install")
    run(*pip, "--no-deps", "--no-index", wheel, folder=tmp_path)
    (place,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (place / "lent.pth").write_text(f"{Path(numpy.__file__).parents[1]}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = run(programs / "python", "-c", "import swarm; print(swarm.__file__)", folder=elsewhere)
    assert found.startswith(str(place))
    small = ("--peers", 2, "--set", "round.local_steps=5")
    command = (programs / "swarm-local", "--run", "demo", "--rounds", 2, *small)
    printed = run(*command, folder=elsewhere)
    assert "round 2/2 averaged" in printed
    assert printed.splitlines()[-1].startswith("2 rounds, ")
    assert not list(elsewhere.iterdir())


def test_every_program_says_its_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert len(scripts) == 11
    for name, place in scripts.items():
        module, _, function = place.partition(":")
        monkeypatch.setattr(sys, "argv", [name, "--version"])
        with pytest.raises(SystemExit) as ended:
            getattr(importlib.import_module(module), function)()
        assert ended.value.code in (0, None)
        assert capsys.readouterr().out == f"{name} {__version__}\n"
