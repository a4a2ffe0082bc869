"""What people get wrong when they start a program: one line, the remedy, an exit code, at once."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from peers import export, local, peer
from peers.actions.printed import say_how_to_join
from peers.command_line.options import Program
from swarm.network.wire.identity import load_or_create_identity
from swarm.peer.machine.state_directory import StateDirectory
from swarm.peer.start import bootstrap_search
from swarm.peer.start.entry import Started
from tests.peer.start.test_founding import Founder

DEMO = str(Path(__file__).parents[2] / "configs" / "runs" / "demo.toml")


def stumble(program: Program, *arguments: object) -> tuple[int, str]:
    """Exit code, and the only line that is said."""
    result = CliRunner().invoke(program, [str(argument) for argument in arguments])
    assert "Traceback" not in result.output
    return result.exit_code, result.output.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "address", "said"),
    [
        ("announce", "foo", "it is not a TCP address"),
        ("announce", "/ip4/203.0.113.7/udp/9", "it is not a TCP address"),
        ("announce", "/ip4/203.0.113.7/tcp/0", "not a number from 1 to 65535"),
        ("announce", "/ip4/203.0.113/tcp/9", "its host is not an ip4 address"),
        ("host", "/ip6/1.2.3.4/tcp/9", "its host is not an ip6 address"),
        ("host", "/dns4//tcp/9", "it names no host"),
        ("host", "/ip4/127.0.0.1/tcp/70000", "not a number from 0 to 65535"),
        ("host", "/ip4/127.0.0.1/tcp/²", "not a number from 0 to 65535"),
    ],
)
def test_an_address_that_is_none(tmp_path: Path, option: str, address: str, said: str) -> None:
    given = ("--run", DEMO, "--state-dir", tmp_path / "state", f"--{option}-maddrs", address)
    code, line = stumble(peer.main, *given)
    assert code == 2
    assert said in line
    assert "/tcp/31330" in line, "an example"
    assert not (tmp_path / "state").exists(), "before any work"


def test_a_gpu_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = ("--run", DEMO, "--state-dir", tmp_path / "state", "--device", "cuda")
    code, line = stumble(peer.main, *given)
    assert code == 2
    assert "--device cpu" in line
    assert not (tmp_path / "state").exists(), "before any work"


def test_a_port_that_is_in_use(tmp_path: Path) -> None:
    """As p2pd does: it shares the port with others that want to share it."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
        given = ("--run", DEMO, "--state-dir", tmp_path / "state", "--host-maddrs", address)
        code, line = stumble(peer.main, *given)
    assert code == 9
    assert address in line
    assert "another --host-maddrs" in line


def test_a_file_where_an_export_should_go(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("of somebody")
    code, line = stumble(export.main, "--state-dir", tmp_path / "no", "--out", tmp_path / "file")
    assert (code, "is a file" in line) == (2, True)
    given = ("--run", DEMO, "--state-dir", tmp_path / "swarm", "--export", tmp_path / "file")
    code, line = stumble(local.main, *given)
    assert (code, "is a file" in line) == (2, True)
    assert not (tmp_path / "swarm").exists(), "before any training"


def test_a_state_directory_that_cannot_be_made() -> None:
    code, line = stumble(peer.main, "--run", DEMO, "--state-dir", "/proc/x")
    assert code == 6
    assert "/proc/x" in line


@pytest.mark.parametrize("content", ["", "70000", "0", "²", "9" * 5000, "four"])
def test_a_damaged_port_file_gives_a_free_port(tmp_path: Path, content: str) -> None:
    with_port = StateDirectory(tmp_path)
    (tmp_path / "port").write_text(content)
    assert with_port.port is None
    with_port.close()


def test_a_peer_that_is_told_nothing_does_not_wait(tmp_path: Path) -> None:
    code, line = stumble(peer.main, "--state-dir", tmp_path)
    assert code == 2
    assert "nothing says which run is meant" in line
    assert "--initial-peers ADDRESS" in line


def test_a_run_id_that_is_not_on_disk_is_not_waited_for(tmp_path: Path) -> None:
    code, line = stumble(peer.main, "--state-dir", tmp_path, "--run-id", "nosuch-0123456789abcdef")
    assert code == 6
    assert "has no run nosuch-0123456789abcdef; it has none" in line
    code, line = stumble(peer.main, "--state-dir", tmp_path, "--run-id", "nosuch")
    assert (code, "'nosuch' is no run id" in line) == (6, True)


@pytest.fixture
def founds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that founds a run all the same does not go on to train in it."""
    monkeypatch.setattr("swarm.peer.session.found", lambda *_: pytest.fail("it founded a run"))


def with_old_run(folder: Path) -> tuple[Founder, Started]:
    """A state directory with a run that is not finished."""
    founder = Founder(folder)
    old = founder.found(load_or_create_identity(founder.state.identity_path).peer_id)
    founder.state.close()
    return founder, old


@pytest.mark.usefixtures("founds_nothing")
def test_a_run_file_that_was_changed_since(tmp_path: Path) -> None:
    founder, old = with_old_run(tmp_path)
    listen = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")
    code, line = stumble(peer.main, "--state-dir", tmp_path, "--run", DEMO, *listen)
    assert code == 7
    assert f"is in {old.run_id}, which is not finished" in line and "--new-run" in line
    assert founder.runs() == {old.run_id}


@pytest.mark.usefixtures("founds_nothing")
@pytest.mark.parametrize("given", [(), ("--run", DEMO), ("--run", DEMO, "--new-run")])
def test_an_address_at_which_nobody_is_beside_an_old_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    """As of a friend, whose port is closed, where the demo was tried before."""
    monkeypatch.setattr(bootstrap_search, "NEW_S", 0.2)
    monkeypatch.setattr(bootstrap_search, "FIND_BEFORE_FOUNDING_S", 0.2)
    friend = load_or_create_identity(tmp_path / "friend.key").peer_id
    founder, old = with_old_run(tmp_path / "state")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens there
        dead = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}/p2p/{friend}"
        where = ("--state-dir", founder.folder, "--host-maddrs", "/ip4/127.0.0.1/tcp/0")
        code, line = stumble(peer.main, *where, "--initial-peers", dead, *given)
    assert code == 3
    assert dead in line and "without --initial-peers" in line
    assert bool(given) or old.run_id in line
    assert founder.runs() == {old.run_id}


def test_the_line_for_joiners_names_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    say_how_to_join(["/ip4/203.0.113.7/tcp/1/p2p/x", "/ip4/10.0.0.1/tcp/1/p2p/x"], "demo-1")
    said = capsys.readouterr().out
    assert said == "swarm-peer --initial-peers /ip4/203.0.113.7/tcp/1/p2p/x --run-id demo-1\n"
    say_how_to_join([], "demo-1")
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["peer", "local", "plan", "monitor", "export", "invite", "doctor", "upcycle", "worker"]
)
def test_help_does_not_wait_for_torch_and_hivemind(name: str) -> None:
    """They take seconds to load, twenty on a busy machine."""
    script = f"""
import sys
from click.testing import CliRunner
from peers.{name} import main
assert "Usage" in CliRunner().invoke(main, ["--help"]).output
print([heavy for heavy in ("torch", "hivemind") if heavy in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert result.stdout.strip() == b"[]"
