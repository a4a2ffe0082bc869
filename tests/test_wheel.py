"""The contents of a wheel, and its use in a separate environment, outside of any clone."""

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner

from swarm.run_files import named_pages
from swarm.version import __version__

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("swarm", "peers", "configs", "pyproject.toml", "README.md", "LICENSE")
ENDS_S = 300.0


def run(*command: object, folder: Path) -> str:
    """The stdout of a command without this clone's and this session's environment."""
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
    """Built from a copy, because building leaves files in the folder."""
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
    names = zipfile.ZipFile(wheel).namelist()
    held = {name for name in names if ".dist-info/" not in name}
    code = {*ROOT.glob("peers/**/*.py"), *ROOT.glob("swarm/**/*.py"), ROOT / "swarm" / "py.typed"}
    page = {path for path in ROOT.glob("swarm/monitor/web/**/*") if path.is_file()}
    assert ROOT / "swarm/monitor/web/index.html" in page
    assert held == {str(path.relative_to(ROOT)) for path in code | page} | packaged()
    assert wheel.name.startswith(f"moe_swarm-{__version__}-")
    (metadata,) = (name for name in names if name.endswith("/METADATA"))
    described = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "Description-Content-Type: text/markdown" in described
    assert described.endswith((ROOT / "peers" / "from_a_wheel.md").read_text())


def packaged() -> set[str]:
    """Pages, run files and service files, with paths relative to the folder of packages."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found: set[str] = set()
    for package, patterns in data["package-data"].items():
        if package == "swarm.monitor":
            continue
        folder = package.replace(".", "/")
        for pattern in patterns:
            every = [f"{top}/**/{pattern}" for top in ("peers", "swarm", "swarm/configs")]
            for place in every if package == "*" else [f"{folder}/{pattern}"]:
                found |= {str(path.relative_to(ROOT)) for path in ROOT.glob(place)}
    return found - {"swarm/py.typed"}


NAMED = re.compile(
    r"\b(?:swarm|peers|configs|scripts|tests)/[\w./-]*\w\.(?:py|toml|md|env|service|json|css|sh)\b"
)


def spoken(source: str) -> str:
    """A program's possible output: the strings of its source, without docstrings."""
    tree = ast.parse(source)
    silent = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in silent)
    return "\n".join(node.value for node in nodes if isinstance(node.value, str))


def help_texts() -> str:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    places = (place.partition(":")[0] for place in scripts.values())
    commands = [importlib.import_module(place).main for place in places]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
    return "\n".join(command.help or "" for command in commands)


def test_the_search_for_named_files_finds_one_that_is_not_packaged() -> None:
    source = 'class A:\n    """As in swarm/no.md."""\n    a = "see scripts/there.py"\n'
    assert NAMED.findall(spoken(source)) == ["scripts/there.py"]
    assert "scripts/README.md" not in packaged()


def test_each_file_that_a_text_of_the_programs_names_is_in_a_wheel() -> None:
    there = packaged()
    assert {"peers/README.md", "swarm/README.md", "swarm/train/README.md"} <= there
    assert {"swarm/configs/runs/demo.toml", "swarm/configs/README.md"} <= there
    assert "swarm/configs/service/swarm-peer.service" in there
    sources = [*ROOT.glob("peers/**/*.py"), *ROOT.glob("swarm/**/*.py")]
    texts = [help_texts(), *(spoken(path.read_text()) for path in sources)]
    named = {name for text in texts for name in NAMED.findall(text)}
    assert {"peers/README.md", "peers/what_can_go_wrong.md"} <= named
    assert named - there == set()
    for page in named_pages(help_texts()):
        assert page.is_file()


def test_help_that_names_a_page_says_where_pages_are() -> None:
    for place in ("peers.peer", "peers.local"):
        text = CliRunner().invoke(importlib.import_module(place).main, ["--help"]).output
        assert f"\nPages are in {ROOT}\n" in text
    text = CliRunner().invoke(importlib.import_module("peers.plan").main, ["--help"]).output
    assert "Pages are in" not in text


def test_the_page_of_a_wheel_names_files_of_a_wheel_and_options_that_there_are() -> None:
    page = (ROOT / "peers" / "from_a_wheel.md").read_text()
    assert "](" not in page, "links of a package's description lead nowhere"
    assert set(re.findall(r"`((?:swarm|peers)/[\w./-]+\.[a-z]+)`", page)) <= packaged()
    for line in re.findall(r"^swarm-.*$", page, re.MULTILINE):
        name, *words = shlex.split(line.replace(">", " "))
        command = importlib.import_module(f"peers.{name.removeprefix('swarm-')}").main
        if below := getattr(command, "commands", {}).get(words[0] if words else ""):
            command = below
        known = {flag for parameter in command.params for flag in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


@pytest.mark.scenario
def test_the_demo_runs_by_name_from_a_wheel_without_the_clone(wheel: Path, tmp_path: Path) -> None:
    """A line in a .pth file makes this environment's packages available to it."""
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
