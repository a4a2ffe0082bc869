"""Options that swarm-local passes to its peers, and those that it refuses before it starts any."""

import contextlib
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner

from peers import local
from peers.command_line.command import ending_as_ctrl_c
from peers.peer import main as peer_main
from swarm.emulation.local_peer import LocalPeer
from swarm.emulation.local_swarm import LocalSwarm
from swarm.errors import SwarmError

DEMO = str(Path(__file__).parents[2] / "configs" / "runs" / "demo.toml")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[LocalSwarm]:
    """Records the swarms instead of starting them."""
    found: list[LocalSwarm] = []

    def start(swarm: LocalSwarm) -> None:
        found.append(swarm)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalSwarm, "start", start)
    return found


@pytest.fixture
def books(tmp_path: Path) -> Path:
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("a")
    return tmp_path / "books"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--set", "corpus.fodler=x"], 2, "unknown key corpus.fodler; did you mean corpus.folder?"),
        (["--set", "corpus.folder=/no/where"], 4, "/no/where: no such folder"),
        (["--corpus", "/no/where"], 4, "/no/where: no such folder"),
        (["--corpus", DEMO], 4, "demo.toml: is no folder"),
        (["--set", "peer.capacity=-1"], 2, "peer.capacity = -1"),
        (["--set", "peer.name=x"], 2, "gives every peer its own peer.name"),
        (["--set", "data.mode=own"], 4, "every peer trains on its own text"),
        (["--initialise-from", "/no/where"], 2, "/no/where/config.json: cannot be read"),
        (["--set", "run.initial=given"], 2, "no checkpoint was named"),
    ],
)
def test_a_wrong_setting_is_an_error_before_anything_starts(
    started: list[LocalSwarm], arguments: list[str], code: int, message: str
) -> None:
    result = CliRunner().invoke(local.main, ["--run", DEMO, *arguments])
    assert (result.exit_code, started) == (code, [])
    assert message in result.output


@pytest.mark.parametrize("how", ["--corpus", "--set", "SWARM_CORPUS"])
def test_the_folder_reaches_every_peer(
    started: list[LocalSwarm], books: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"--corpus": [how, str(books)], "--set": [how, f"corpus.folder={books}"]}
    environment = {how: str(books)} if how == "SWARM_CORPUS" else {}
    CliRunner().invoke(local.main, ["--run", DEMO, *arguments.get(how, [])], env=environment)
    (swarm,) = started
    monkeypatch.delenv("SWARM_CORPUS", raising=False)
    shown = CliRunner().invoke(peer_main, [*swarm.options, "--print-config", "machine"])
    assert f'folder = "{books}"' in shown.output


def test_settings_of_peers_reach_every_peer_and_those_of_the_run_the_founder(
    started: list[LocalSwarm],
) -> None:
    settings = ["--set", "compute.threads=3", "--set", "run.seed=5"]
    CliRunner().invoke(local.main, ["--run", DEMO, *settings])
    (swarm,) = started
    assert swarm.options == ["--linger", "86400", "--set", "compute.threads=3"]
    assert swarm.founder_options == ["--set", "run.seed=5"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_service_that_is_ended_or_a_terminal_that_is_closed_leaves_no_peers(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    stopped: list[Path] = []

    def start(_: LocalSwarm) -> None:
        signal.raise_signal(number)
        raise SwarmError("it was not heard")

    def stop(swarm: LocalSwarm) -> None:
        signal.raise_signal(number)  # a shell repeats it
        stopped.append(swarm.folder)

    monkeypatch.setattr(LocalSwarm, "start", start)
    monkeypatch.setattr(LocalSwarm, "stop", stop)
    before = signal.getsignal(number)
    with without_end_of(number):
        result = CliRunner().invoke(local.main, ["--run", DEMO])
        assert isinstance(result.exception, SystemExit) and result.exit_code == 130
    (folder,) = stopped
    assert not folder.exists() and signal.getsignal(number) is before


@contextlib.contextmanager
def without_end_of(number: signal.Signals) -> Iterator[None]:
    """Keeps these tests alive if the program misses a signal."""
    before = signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_what_nohup_ignores_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_as_ctrl_c():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_logs_that_an_error_names_are_there_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def start(swarm: LocalSwarm) -> None:
        folders.append(swarm.folder)
        raise SwarmError(f"no round; logs in {swarm.folder}")

    monkeypatch.setattr(LocalSwarm, "start", start)
    result = CliRunner().invoke(local.main, ["--run", DEMO])
    (folder,) = folders
    assert folder.is_dir()
    assert f"states and logs are in {folder}; no run was founded\n" in result.stderr
    assert "swarm-export" not in result.stderr, "there is nothing to write or to resume"
    folder.rmdir()


@pytest.mark.parametrize("ended_by", [KeyboardInterrupt(), SwarmError("no round")])
def test_what_was_trained_is_kept_unless_the_run_is_finished(
    monkeypatch: pytest.MonkeyPatch, ended_by: BaseException
) -> None:
    folders: list[Path] = []

    def start(swarm: LocalSwarm) -> None:
        folders.append(swarm.folder)
        directory = swarm.folder / "peer-0" / "runs" / "demo-0123456789abcdef"
        directory.mkdir(parents=True)
        (directory / "record").touch()
        raise ended_by

    monkeypatch.setattr(LocalSwarm, "start", start)
    result = CliRunner().invoke(local.main, ["--run", DEMO])
    (folder,) = folders
    kept = (folder / "peer-0" / "runs").is_dir()
    shutil.rmtree(folder, ignore_errors=True)
    assert kept and result.exit_code
    assert f"swarm-export --state-dir {folder}/peer-0" in result.stderr
    assert f"swarm-peer --state-dir {folder}/peer-0 resumes it" in result.stderr


def test_the_temporary_folder_of_a_finished_run_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    monkeypatch.setattr(local, "_train", lambda swarm, *_: folders.append(swarm.folder) or [])
    monkeypatch.setattr(local, "summary", lambda *_: {})
    assert CliRunner().invoke(local.main, ["--run", DEMO, "--json"]).exit_code == 0
    (folder,) = folders
    assert not folder.exists()


def test_a_state_directory_that_is_given_is_used_and_the_help_names_no_other(
    started: list[LocalSwarm], tmp_path: Path
) -> None:
    CliRunner().invoke(local.main, ["--run", DEMO, "--state-dir", str(tmp_path / "mine")])
    CliRunner().invoke(local.main, ["--run", DEMO], env={"SWARM_STATE_DIR": "~/.swarm/default"})
    given, default = started
    assert given.folder == tmp_path / "mine"
    assert default.folder == Path("~/.swarm/default").expanduser()
    said = " ".join(CliRunner().invoke(local.main, ["--help"]).output.split())
    assert "by default a temporary folder" in said and "~/.swarm/default" not in said


def test_between_two_rounds_it_is_said_how_far_the_peers_are() -> None:
    step = {
        "event": "progress",
        "text": "round 1/8: step 12 of 50, loss 4.1, 9 tokens/s, 2 min left",
    }
    wait = {"event": "progress", "text": "waiting: averaging"}
    begun = {"event": "started"}
    assert local.how_far([[begun], [begun, step], [begun, wait], []]) == (
        f"peer 1: {step['text']}; 3 more peers"
    )
    assert local.how_far([[], []]) == "2 peers start or end a round"


def test_a_swarm_that_trains_for_long_is_not_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "EVERY_S", 0.0)
    local.Progress(8, as_json=True)(LocalSwarm(tmp_path, Path(DEMO), 0))
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "0 peers start or end a round\n")


def test_a_swarm_is_given_up_when_no_peer_gets_on_however_long_a_round_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(local, "time", SimpleNamespace(monotonic=lambda: now_s))
    events = [{"event": "started"}]
    peer = SimpleNamespace(alive=True, events=lambda: events)
    swarm = LocalSwarm(tmp_path, Path(DEMO), 1, peers=[cast(LocalPeer, peer)])
    progress = local.Progress(8, as_json=True)
    progress.last_s = progress.heard_s = now_s
    for step in range(1, 5):  # a round of two hours
        now_s += local.STALL_S
        events.append({"event": "progress", "text": f"round 1/8: step {step} of 50"})
        progress(swarm)
    for _ in range(2):  # it reports repeatedly that it waits
        now_s += local.STALL_S / 2
        events.append({"event": "progress", "text": f"waiting: averaging {now_s}"})
        progress(swarm)
    now_s += 1.0
    with pytest.raises(SwarmError, match="no round or step within 1800 s"):
        progress(swarm)
