"""swarm-doctor: its exit code, its JSON, and the files that it leaves."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from peers.actions import examination
from peers.actions.examination import share_of
from peers.doctor import main
from peers.peer import main as peer_main
from swarm.config import NetworkSection, PeerConfig, RunConfig, parse_config
from swarm.network.node.node import Handlers, Node
from swarm.network.node.peer_probe import PROTOCOL, Prober
from swarm.peer.machine.state_directory import StateDirectory, keep

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


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a peer that answers questions and is in no run."""
    monkeypatch.setattr("peers.actions.examination.FIND_S", 0.1)
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
    yield nodes[0].addresses[0]
    nodes[0].stop(5.0)


@pytest.mark.parametrize("mode", [(), ("--client-mode",)])
def test_peers_say_what_they_see(tmp_path: Path, mode: tuple[str, ...], address: str) -> None:
    state = StateDirectory(tmp_path)  # a peer runs with it, and the doctor still checks
    arguments = ["--state-dir", tmp_path, *LISTEN, "--initial-peers", address, *mode]
    code, out = run_program(*arguments, "--json")
    state.close()
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
    monkeypatch.setattr("swarm.peer.machine.machine_survey._DEVICES", tmp_path)
    assert "device: good: no GPU, " in run_program("--state-dir", tmp_path)[1]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidia0").touch()
    assert "device: warning: " in run_program("--state-dir", tmp_path)[1]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (20 * 10**9, 24 * 10**9))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "X9000")
    said = run_program("--state-dir", tmp_path)[1]
    assert "device: good: GPU X9000, 20.0 of 24.0 GB free" in said


def two_free_ports() -> int:
    """The first of two consecutive free ports."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port


@pytest.mark.parametrize(("is_open", "is_kept"), [(True, False), (False, False), (True, True)])
def test_both_ports_are_dialled_and_a_closed_second_one_is_a_warning(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch, is_open: bool, is_kept: bool
) -> None:
    if not is_open:  # nothing answers there, as behind a firewall
        monkeypatch.setattr(examination, "greeting", lambda *_: nullcontext())
    port = two_free_ports()
    listen = ["--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}"]
    if is_kept:
        kept(tmp_path, f'network.host_maddrs=["{listen.pop()}"]')
        listen.clear()
    code, out = run_program("--state-dir", tmp_path, *listen, "--initial-peers", address, "--json")
    said = {finding["topic"]: finding for finding in json.loads(out)["findings"]}
    assert f"at /ip4/127.0.0.1/tcp/{port} (" in said["reachability"]["text"]
    door = said["port for blobs"]
    assert (code, door["level"]) == (0, "good" if is_open else "warning")
    assert (f"/ip4/127.0.0.1/tcp/{port + 1}" in door["text"]) == is_open
    assert (f"open TCP port {port + 1}" in door["remedy"]) != is_open


def kept(folder: Path, setting: str) -> None:
    """From an earlier start."""
    keep(parse_config(PeerConfig, "", source="x", overrides=[setting]), folder / "settings")


def test_a_peer_that_only_dialled_out_is_told_to_open_no_port(tmp_path: Path, address: str) -> None:
    kept(tmp_path, "network.client_mode=true")
    code, out = run_program("--state-dir", tmp_path, "--initial-peers", address)
    assert code == 0 and "reachability: good: client mode" in out


def test_the_ports_of_a_peer_that_runs_are_left_to_it(tmp_path: Path, address: str) -> None:
    port = two_free_ports()
    kept(tmp_path, f'network.host_maddrs=["/ip4/127.0.0.1/tcp/{port}"]')
    kept(tmp_path, f"network.direct_port={port + 1}")
    with (
        closing(StateDirectory(tmp_path)),
        socket.create_server(("127.0.0.1", port)),
        socket.create_server(("127.0.0.1", port + 1)),
    ):
        code, out = run_program("--state-dir", tmp_path, "--initial-peers", address)
    assert code == 0 and "a peer is running with it now" in out, out


@pytest.mark.parametrize("named", [True, False])
def test_a_second_port_that_is_taken_is_a_fault_where_a_peer_insists_on_it(
    tmp_path: Path, address: str, named: bool
) -> None:
    port = two_free_ports()
    listen = ["--host-maddrs", f"/ip4/127.0.0.1/tcp/{port}"]
    listen += ["--direct-port", str(port + 1)] if named else []
    with socket.create_server(("127.0.0.1", port + 1)):
        code, out = run_program("--state-dir", tmp_path, *listen, "--initial-peers", address)
    what = "options: fault: --direct-port: port" if named else "port for blobs: warning: port"
    assert code == named and f"{what} {port + 1}: Address already in use" in out


def test_it_takes_every_option_of_the_peer_s() -> None:
    def spelled(program: object) -> set[str]:
        return {flag for each in program.params for flag in (*each.opts, *each.secondary_opts)}

    assert spelled(peer_main) <= spelled(main)
    assert spelled(main) - spelled(peer_main) == {"--json"}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--corpus", "/no/where"], "/no/where: no such folder"),
        (["--tokenizer", "/no/where"], "/no/where"),
        (["--set", "run.initial=given"], "no checkpoint was named"),
        (["--invitation", "swarm-invitation-x"], "invitation"),
    ],
)
def test_what_the_peer_would_refuse_is_a_fault(
    tmp_path: Path, options: list[str], why: str
) -> None:
    code, out = run_program("--state-dir", tmp_path, "--run", RUN_FILE, *options)
    said = next(line for line in out.splitlines() if line.startswith("options: "))
    assert code == 1 and said.startswith("options: fault: ") and why in said


def test_settings_that_a_peer_would_print_are_printed() -> None:
    given = ["--run", str(RUN_FILE), "--capacity", "0.5", "--print-config", "machine"]
    printed = [CliRunner().invoke(program, given).stdout for program in (main, peer_main)]
    assert printed[0] == printed[1] and "capacity = 0.5" in printed[0]


def test_settings_that_are_kept_from_an_earlier_start_are_printed_too(tmp_path: Path) -> None:
    (tmp_path / "settings").write_text('{"network.data_quota_gb": 200.0}')
    given = ["--state-dir", str(tmp_path), "--print-config", "machine"]
    printed = [CliRunner().invoke(program, given).stdout for program in (main, peer_main)]
    assert printed[0] == printed[1] and "data_quota_gb = 200.0" in printed[0]
    now = CliRunner().invoke(peer_main, [*given, "--data-quota", "50GB"]).stdout
    assert "data_quota_gb = 50.0" in now and "200" in (tmp_path / "settings").read_text()


def test_a_capacity_changes_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight experts and four peers: a fair share of two."""

    def plan(_run: object, owned: int, *_: object) -> tuple[None, SimpleNamespace]:
        peaks = SimpleNamespace(crowded=1e9, highest=1e9)
        return None, SimpleNamespace(need=peaks, peaks=peaks, fits=owned < 2, reason="a plan")

    monkeypatch.setattr(examination, "plan_here", plan)
    given = ["--state-dir", tmp_path, "--run", RUN_FILE]
    code, out = run_program(*given)
    assert code == 1 and "memory: fault: a plan, with 2 of 8 experts" in out
    code, out = run_program(*given, "--capacity", "0.4")
    assert code == 3 and "memory: good: a plan, with 1 of 8 experts" in out


@pytest.mark.parametrize(
    ("capacity", "others", "owned"),
    [
        (1.0, (1.0, 1.0, 1.0), 2),
        (0.4, (1.0, 1.0, 1.0), 1),
        (2.0, (1.0, 1.0, 1.0), 4),
        (1.0, (3.0, 3.0, 3.0), 1),
        (100.0, (1.0, 1.0, 1.0), 4),  # nobody owns more than twice the fair share
        (1.0, (), 8),
    ],
)
def test_a_share_follows_the_capacities_of_all(
    capacity: float, others: tuple[float, ...], owned: int
) -> None:
    run = parse_config(RunConfig, RUN_FILE.read_text(), source="demo")
    assert share_of(run, capacity, others) == owned
