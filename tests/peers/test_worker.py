"""swarm-worker names an obstacle in one line, and ends on request."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from peers.worker import main
from swarm.train.workers.agent import Agent
from swarm.train.workers.controller_wire import key_at
from tests.processes import LIMIT_S, running


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for name in ("LOCAL_RANK", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR", "SWARM_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def key(tmp_path: Path) -> str:
    path = tmp_path / "workers.key"
    key_at(path, may_make=True)
    return str(path)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Agent]:
    """Records the agents instead of serving."""
    agents: list[Agent] = []
    monkeypatch.setattr(Agent, "serve", lambda agent, *, once: agents.append(agent))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return agents


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0 or len(result.output.splitlines()) == 1, result.output
    return result.exit_code, result.output


def test_a_node_brings_all_its_gpus_or_so_many(served: list[Agent], key: str) -> None:
    for args in ((), ("--workers", "3")):
        assert invoke("--controller", "10.0.0.1:1234", "--key", key, *args) == (0, "")
    assert [agent.node.workers for agent in served] == [8, 3]
    assert served[0].controller == ("10.0.0.1", 1234)
    assert served[0].local is None


def test_under_torchrun_a_process_is_one_worker(
    served: list[Agent], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOCAL_RANK", "5"), ("RANK", "13"), ("MASTER_ADDR", "10.0.0.9")):
        monkeypatch.setenv(name, value)
    assert invoke("--key", key) == (0, "")
    (agent,) = served
    assert (agent.node.workers, agent.node.rank, agent.local) == (1, 13, 5)
    assert agent.controller == ("10.0.0.9", 31340)


def test_what_is_missing_is_said_in_one_line(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for args, why in (
        (("--key", key), "--controller is missing"),
        (("--controller", "10.0.0.1"), "--key is missing"),
        (("--controller", "10.0.0.1", "--key", "/nowhere/key"), "the key /nowhere/key is missing"),
        (("--controller", "a:b", "--key", key), "is no HOST:PORT"),
    ):
        code, line = invoke(*args)
        assert (code, why in line) == (2, True), line
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    code, line = invoke("--controller", "10.0.0.1", "--key", key)
    assert (code, "give --workers N" in line) == (2, True)


def test_the_help_says_that_the_key_must_be_given() -> None:
    page = CliRunner().invoke(main, ["--help"]).output.partition("Options:")[2]
    of_key = page.partition("--key ")[2].partition("--controller")[0]
    assert "must be given" in of_key and "by default" not in of_key


def test_sigterm_ends_a_waiting_node_with_one_line(key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    command = [sys.executable, "-m", "peers.worker", "--controller", address, "--key", key]
    command += ["--workers", "1", "--log-format", "plain"]
    with running(command, stderr=subprocess.PIPE, text=True) as agent:
        assert agent.stderr is not None
        assert "waiting for the controller at " in agent.stderr.readline()
        agent.terminate()
        assert agent.stderr.read().strip() == "swarm-worker: error: interrupted"
        assert agent.wait(LIMIT_S) == 130
