"""swarm-doctor: its exit code, its JSON, and what it leaves behind."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from peers.doctor import main
from swarm.config import NetworkSection
from swarm.network.node import Handlers, Node
from swarm.network.probing import PROTOCOL, Prober
from swarm.peer.state_directory import StateDirectory

DEAD = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEhqPMwUVi6Sr3ThFZAsoGfBTXdv6PxBByKg8ZdCrNgTf"
RUN_FILE = Path(__file__).parents[2] / "configs/runs/demo.toml"
LISTEN = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")


def run_program(*args: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    return result.exit_code, result.stdout


def test_without_peers_it_checks_this_machine_alone(tmp_path: Path) -> None:
    code, out = run_program("--state-dir", tmp_path / "new", "--run", RUN_FILE, "--json")
    said = json.loads(out)
    topics = {finding["topic"]: finding["level"] for finding in said["findings"]}
    assert topics["network"] == "warning" and topics["disk"] == topics["memory"] == "good"
    assert (code, said["can_take_part"], said["nat"]) == (3, None, "unknown")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["lock"]


def test_a_model_that_does_not_fit_is_a_fault_and_status_1(tmp_path: Path) -> None:
    sizes = ["--set", "model.hidden_size=32768", "--set", "model.moe_intermediate_size=32768"]
    sizes += ["--set", "wire.part_bytes=1073741824"]
    code, out = run_program("--state-dir", tmp_path, "--run", RUN_FILE, *sizes)
    assert code == 1
    assert "memory: fault: " in out and "  do: " in out
    assert out.endswith("This machine cannot take part.\n")


def test_nobody_at_the_address_is_a_fault_with_a_remedy(tmp_path: Path) -> None:
    code, out = run_program("--state-dir", tmp_path, *LISTEN, "--initial-peers", DEAD)
    assert code == 1
    assert "network: fault: no known address answers as a peer" in out


@pytest.mark.parametrize("mode", [(), ("--client-mode",)])
def test_peers_say_what_they_see(
    tmp_path: Path, mode: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peers.examining.FIND_S", 0.1)  # there is no run to be found
    prober, nodes = Prober(), []

    async def on_request(source: str, payload: bytes) -> bytes:
        return await prober.answer(nodes[0], source, payload)

    nodes.append(
        Node.start(
            identity_path=None,
            network=NetworkSection(host_maddrs=("/ip4/127.0.0.1/tcp/0",)),
            handlers=Handlers(on_request=on_request, streams={PROTOCOL: prober.serve}),
        )
    )
    try:
        state = StateDirectory(tmp_path)  # a peer runs with it: the doctor looks all the same
        address = nodes[0].addresses[0]
        arguments = ["--state-dir", tmp_path, *LISTEN, "--initial-peers", address, *mode]
        code, out = run_program(*arguments, "--json")
        state.close()
    finally:
        nodes[0].stop(5.0)
    said = json.loads(out)
    levels = {finding["topic"]: finding["level"] for finding in said["findings"]}
    assert code == 0, said
    assert levels["clock"] == levels["reachability"] == levels["version"] == "good", said
    assert [peer["dialled"] for peer in said["peers"]] == [not mode]
    assert said["nat"] == ("unknown" if mode else "none")


def test_with_nobody_asked_it_does_not_say_that_the_machine_can_take_part(tmp_path: Path) -> None:
    code, out = run_program("--state-dir", tmp_path)
    assert code == 3
    assert "can take part" not in out
    assert "no peer was asked whether it can: name one with --initial-peers" in out


def test_it_says_what_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "device: good: no GPU, " in run_program("--state-dir", tmp_path)[1]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (20 * 10**9, 24 * 10**9))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "X9000")
    said = run_program("--state-dir", tmp_path)[1]
    assert "device: good: GPU X9000, 20.0 of 24.0 GB free" in said
