"""scripts/demo, with stand-ins for its programs: the old model stays until there is a new one.

And the check of its export, with stand-ins for the two losses.
"""

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.processes import running

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60
SWARM_LOCAL = """#!/usr/bin/env bash
echo "$*" >>calls
while (($#)); do
    case $1 in
        --help | -h) echo "usage of swarm-local"; exit 0 ;;
        --state-dir) mkdir -p "$2" ;;
        --export) mkdir "$2" && echo new >"$2/weights" ;;
    esac
    shift
done
exit "${TRAINING_ENDS:-0}"
"""
CHECK = """#!/usr/bin/env bash
echo "$*" >>calls
[[ $(<"$2/weights") == new && -d $(dirname "$4") ]] || exit 3
exit "${CHECK_ENDS:-0}"
"""

WAITING = f"""#!{sys.executable}
import os, signal, sys
signal.alarm({TIMEOUT_S})
os.mkdir(sys.argv[sys.argv.index("--state-dir") + 1])
try:
    print(os.getpid(), flush=True)
    signal.pause()
except KeyboardInterrupt:
    sys.exit(130)
"""
"""A swarm-local that trains until it is ended."""


class Checkout:
    """The files that scripts/demo needs, and an earlier model."""

    def __init__(self, folder: Path) -> None:
        self.root, self.temporary = folder / "a checkout", folder / "temporary"
        self.temporary.mkdir()
        self._program("scripts/setup", "#!/bin/sh\n")
        self._program(".venv/bin/swarm-local", SWARM_LOCAL)
        self._program(".venv/bin/python", CHECK)
        shutil.copy(ROOT / "scripts" / "demo", self.root / "scripts")
        self.model = self.root / "out" / "demo-model"
        self.model.mkdir(parents=True)
        (self.model / "weights").write_text("old\n")

    def _program(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def demo(self, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "scripts" / "demo"), *options],
            cwd="/",
            env={**os.environ, "TMPDIR": str(self.temporary), **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    @property
    def weights(self) -> str:
        return (self.model / "weights").read_text().strip()

    @property
    def calls(self) -> list[str]:
        log = self.root / "calls"
        return log.read_text().splitlines() if log.exists() else []

    @property
    def left(self) -> list[Path]:
        return list(self.temporary.iterdir())


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_checked_model_takes_the_place_of_the_one_before(checkout: Checkout) -> None:
    done = checkout.demo("--rounds", "12")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith('from_pretrained("out/demo-model") loads it.\n')
    trained, checked = checkout.calls
    assert trained.startswith("--run configs/runs/demo.toml ") and trained.endswith("--rounds 12")
    assert checked.startswith("scripts/check_export.py ")
    assert (checkout.weights, checkout.left) == ("new", [])
    assert list(checkout.model.iterdir()) == [checkout.model / "weights"]


def test_the_first_model_needs_no_folder(checkout: Checkout) -> None:
    shutil.rmtree(checkout.root / "out")
    assert checkout.demo().returncode == 0
    assert checkout.weights == "new"


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_that_of_swarm_local(checkout: Checkout, option: str) -> None:
    done = checkout.demo(option)
    assert (done.returncode, done.stdout) == (0, "usage of swarm-local\n")
    assert checkout.calls == [option]
    assert (checkout.weights, checkout.left) == ("old", [])


def test_a_mistyped_option_costs_nothing(checkout: Checkout) -> None:
    checkout._program(".venv/bin/swarm-local", "#!/bin/sh\necho no such option >&2; exit 2\n")
    done = checkout.demo("--round", "12")
    assert (done.returncode, done.stderr) == (2, "no such option\n")
    assert (checkout.weights, checkout.left) == ("old", [])


@pytest.mark.parametrize(
    "options", [["--export", "there"], ["--export=there"], ["--state-dir", "there"]]
)
def test_where_things_go_is_not_for_the_caller(checkout: Checkout, options: list[str]) -> None:
    done = checkout.demo(*options)
    assert done.returncode == 2
    assert done.stderr.startswith(f"demo: {options[0].partition('=')[0]} cannot be set")
    assert (checkout.calls, checkout.weights, checkout.left) == ([], "old", [])


@pytest.mark.parametrize("fails", ["TRAINING_ENDS", "CHECK_ENDS"])
def test_what_failed_leaves_the_model_of_before_and_its_own_logs(
    checkout: Checkout, fails: str
) -> None:
    done = checkout.demo(**{fails: "1"})
    (state,) = checkout.left
    assert done.returncode == 1
    assert done.stderr == f"demo: states and logs are in {state}\n"
    assert (checkout.weights, (state / "swarm").is_dir()) == ("old", True)


def test_ctrl_c_leaves_nothing(checkout: Checkout) -> None:
    assert checkout.demo(TRAINING_ENDS="130").returncode == 130
    assert (checkout.weights, checkout.left) == ("old", [])


def hears_signals() -> None:
    """Needed where nohup or a background shell makes the tests ignore some signals."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_who_ends_it_ends_the_swarm_and_leaves_nothing(
    checkout: Checkout, number: signal.Signals
) -> None:
    """SIGINT as from a terminal: to all processes of the foreground."""
    checkout._program(".venv/bin/swarm-local", WAITING)
    with running(
        [str(checkout.root / "scripts" / "demo")],
        limit_s=TIMEOUT_S,
        env={**os.environ, "TMPDIR": str(checkout.temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hears_signals,
    ) as demo:
        lines = iter(demo.stdout.readline, "")
        child = next(int(line) for line in lines if line.strip().isdecimal())
        try:
            (os.killpg if number == signal.SIGINT else os.kill)(demo.pid, number)
            status = demo.wait()
            assert status == (130 if number == signal.SIGINT else 128 + signal.SIGTERM)
            with pytest.raises(ProcessLookupError):
                os.kill(child, 0)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    assert (checkout.weights, checkout.left) == ("old", [])


def test_a_folder_of_the_environment_is_not_removed(checkout: Checkout, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    assert checkout.demo(SWARM_DEMO_MODEL=str(mine)).returncode == 0
    assert mine.is_dir()
    assert checkout.weights == "new"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    sys.modules.pop("check_export", None)
    import check_export  # the folder is on the path only in these tests

    record = SimpleNamespace(tip=SimpleNamespace(digest="ab"))
    held_out = SimpleNamespace(bits_per_byte=lambda loss: loss / math.log(2))
    monkeypatch.setattr(check_export, "RecordFile", lambda _: SimpleNamespace(read=lambda: record))
    monkeypatch.setattr(
        check_export, "RunDirectory", lambda _: SimpleNamespace(read_config=lambda: None)
    )
    monkeypatch.setattr(check_export, "BlobStore", lambda _: None)
    monkeypatch.setattr(check_export, "held_out_of", lambda *_: held_out)
    monkeypatch.setattr(check_export, "AutoTokenizer", SimpleNamespace(from_pretrained=str))
    (tmp_path / "current_run").write_text("ab12\n")
    monkeypatch.setattr(sys, "argv", ["check_export", "model", "--state-dir", str(tmp_path)])
    return check_export


@pytest.mark.parametrize(
    ("theirs", "status", "said"),
    [
        (2.1005, 0, ""),
        (2.3, 1, "check_export: model is not the model of the swarm: its loss is +0.20000"),
        (math.nan, 1, "check_export: model is not the model of the swarm: its loss is +nan"),
    ],
)
def test_an_export_whose_loss_differs_is_said_to_be_another_model(
    check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    theirs: float,
    status: int,
    said: str,
) -> None:
    monkeypatch.setattr(check, "validation_loss", lambda *_: 2.1)
    monkeypatch.setattr(check, "transformers_loss", lambda *_: theirs)
    assert check.main() == status
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert len(err.splitlines()) == status
