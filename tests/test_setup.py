"""scripts/setup, with a stand-in for Python that records its command lines."""

import os
import re
import shutil
import subprocess
import tomllib
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.processes import running

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
TIMEOUT_S = 60
# `-m venv` copies itself into place; `-m pip` fails on request.
STAND_IN = """#!/usr/bin/env bash
echo "$* under ${PIP_CONSTRAINT:-no pins}" >>calls
case "$*" in
    "-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    "-m pip"*) sleep "${PIP_TAKES_S:-0}"; exit "${PIP_FAILS:-0}" ;;
esac
"""


class Checkout:
    """A copy of the files that scripts/setup reads, in a folder whose name is difficult for pip."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a checkout"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("pyproject.toml", "scripts/setup", "scripts/constraints.txt"):
            shutil.copy(ROOT / name, self.root / name)
        self.python = folder / "python"
        self.python.write_text(STAND_IN)
        self.python.chmod(0o755)

    def start(
        self, *options: str, **environment: str
    ) -> AbstractContextManager[subprocess.Popen[str]]:
        return running(
            [str(self.root / "scripts" / "setup"), *options],
            limit_s=TIMEOUT_S,
            cwd="/",
            env=os.environ | {"PYTHON": str(self.python)} | environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def setup(self, *options: str, **environment: str) -> tuple[int, str]:
        with self.start(*options, **environment) as process:
            _, errors = process.communicate()
        return process.returncode, errors

    def calls(self) -> list[str]:
        """The venv and pip calls since the last time, oldest first."""
        log = self.root / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return [line for line in lines if line.startswith("-m")]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def kinds(calls: list[str]) -> list[str]:
    return [call.split()[1] for call in calls]


def test_the_first_setup_installs_the_pins_and_the_second_does_nothing(checkout: Checkout) -> None:
    assert checkout.setup()[0] == 0
    calls = checkout.calls()
    assert kinds(calls) == ["venv", "pip", "compileall"]
    assert calls[1].endswith(".[data,hf,monitor] under scripts/constraints.txt")
    assert checkout.setup()[0] == 0
    assert checkout.calls() == []


def test_dev_is_added_in_place_and_then_serves_both(checkout: Checkout) -> None:
    checkout.setup()
    checkout.calls()
    checkout.setup("--dev")
    assert kinds(checkout.calls()) == ["pip", "compileall"]
    checkout.setup()
    checkout.setup("--dev")
    assert checkout.calls() == []


def test_new_pins_update_in_place_and_keep_dev(checkout: Checkout) -> None:
    checkout.setup("--dev")
    checkout.calls()
    with (checkout.root / "scripts" / "constraints.txt").open("a") as constraints:
        constraints.write("another==1.0\n")
    checkout.setup()
    call, _ = checkout.calls()
    assert ".[data,hf,monitor,dev]" in call


def test_after_a_failed_installation_everything_is_made_anew(checkout: Checkout) -> None:
    status, errors = checkout.setup(PIP_FAILS="1")
    assert status == 1
    assert "pip failed" in errors
    leftover = checkout.root / ".venv" / "half-written"
    leftover.touch()
    checkout.calls()
    assert checkout.setup()[0] == 0
    assert kinds(checkout.calls()) == ["venv", "pip", "compileall"]
    assert not leftover.exists()


def test_a_moved_checkout_is_installed_again(checkout: Checkout) -> None:
    checkout.setup()
    checkout.root = checkout.root.rename(checkout.root.with_name("elsewhere"))
    checkout.calls()
    checkout.setup()
    assert kinds(checkout.calls()) == ["venv", "pip", "compileall"]


def test_an_environment_that_somebody_else_made_is_left_alone(checkout: Checkout) -> None:
    theirs = checkout.root / ".venv" / "bin" / "python"
    theirs.parent.mkdir(parents=True)
    theirs.touch(mode=0o755)
    status, errors = checkout.setup()
    assert status == 1
    assert "move it away" in errors
    assert theirs.exists()


def test_of_two_setups_at_once_one_installs(checkout: Checkout) -> None:
    takes_time = {"PIP_TAKES_S": "0.5"}
    with checkout.start("--dev", **takes_time) as one, checkout.start("--dev", **takes_time) as two:
        for process in (one, two):
            process.communicate()
    assert (one.returncode, two.returncode) == (0, 0)
    assert kinds(checkout.calls()) == ["venv", "pip", "compileall"]


def test_a_missing_python_is_named_with_the_remedy(checkout: Checkout) -> None:
    status, errors = checkout.setup(PYTHON="/nowhere/python3.11")
    assert status == 1
    assert "/nowhere/python3.11" in errors
    assert "python3.11-venv" in errors
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize("machine", ["Darwin arm64", "Linux aarch64"])
def test_a_machine_for_which_there_are_no_packages_is_refused_at_once(
    checkout: Checkout, tmp_path: Path, machine: str
) -> None:
    (tmp_path / "bin").mkdir()
    uname = tmp_path / "bin" / "uname"
    uname.write_text(f"#!/bin/sh\necho {machine}\n")
    uname.chmod(0o755)
    status, errors = checkout.setup(PATH=f"{uname.parent}:{os.environ['PATH']}")
    said = f"setup: swarm needs Linux on x86-64, as its libp2p does; this is {machine}\n"
    assert (status, errors) == (1, said)
    assert checkout.calls() == [] and not (checkout.root / ".venv.lock").exists()


def test_an_unknown_option_is_refused(checkout: Checkout) -> None:
    status, errors = checkout.setup("--develop")
    assert status == 1
    assert "usage" in errors


def pins() -> dict[str, str]:
    lines = CONSTRAINTS.read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def declared() -> list[Requirement]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = table["project"]
    lists = [table["build-system"]["requires"], project["dependencies"]]
    lists += project["optional-dependencies"].values()
    return [Requirement(line) for lines in lists for line in lines]


@pytest.mark.parametrize("requirement", declared(), ids=lambda r: r.name)
def test_every_declared_requirement_is_pinned_within_its_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_the_pins_name_versions_and_nothing_else() -> None:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    odd = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line)]
    assert odd == []
    assert lines == sorted(lines, key=str.lower)
