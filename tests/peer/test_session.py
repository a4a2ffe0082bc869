"""A peer in a script: two in one process, callbacks, an end that can be resumed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import swarm
from swarm.data.tokenizer_file import train_tokenizer
from swarm.errors import ConfigError, NobodyReachable, StateError
from swarm.experts import all_shapes
from swarm.model.initial_weights import initial_tensors
from swarm.peer.machine.state_directory import StateDirectory
from swarm.peer.text.agreed_model import open_state
from swarm.peer.training.leaving import Stop, Stopped
from swarm.protocol.records.records import PeerState
from tests.scenarios.swarms import EXACT

ALONE_S = 120.0
SMALL = ["run.rounds=2", "round.local_steps=2", "merging.interval_steps=1000"]
LOOPBACK = "network.host_maddrs=['/ip4/127.0.0.1/tcp/0']"


def tiny(tmp_path: Path, *overrides: str) -> swarm.RunConfig:
    (tmp_path / "run.toml").write_text(EXACT)
    return swarm.load_run(tmp_path / "run.toml", [*SMALL, *overrides])


def machine(*overrides: str) -> swarm.PeerConfig:
    return swarm.load_peer(overrides=[LOOPBACK, *overrides])


def is_unlocked(folder: Path) -> bool:
    StateDirectory(folder).close()
    return True


class Heard(swarm.PeerObserver):
    """Records all calls of an observer."""

    def __init__(self) -> None:
        self.address = self.invitation = ""
        self.is_up = threading.Event()
        self.steps: list[int] = []
        self.rounds: list[int] = []
        self.validated: list[int] = []
        self.states: list[PeerState] = []
        self.notices: list[str] = []
        self.peer: swarm.Peer | None = None

    def on_address(self, address: str) -> None:
        self.address = address
        self.is_up.set()

    def on_invitation(self, text: str) -> None:
        self.invitation = text

    def on_notice(self, line: str) -> None:
        self.notices.append(line)

    def on_state(self, state: PeerState) -> None:
        self.states.append(state)

    def on_step(self, step: int, stats: swarm.StepStats) -> None:
        assert stats.cross_entropy > 0
        self.steps.append(step)

    def on_round(self, report: swarm.RoundReport) -> None:
        self.rounds.append(report.manifest.round)
        if self.peer:
            self.peer.stop()

    def on_validation(self, round_number: int, val_loss: float, bits_per_byte: float) -> None:
        assert val_loss > 0 and bits_per_byte > 0
        self.validated.append(round_number)


@pytest.mark.scenario
def test_a_peer_is_stopped_by_a_callback_and_resumed(tmp_path: Path) -> None:
    run, folder, heard = tiny(tmp_path), tmp_path / "alone", Heard()
    with swarm.Peer.found(run, folder, config=machine(), observer=heard) as peer:
        heard.peer = peer
        assert peer.addresses == (heard.address,)
        stopped = peer.train()
    assert (stopped.round, heard.steps, heard.rounds) == (1, [0, 1], [1])
    assert heard.validated == [0, 1] and len(heard.notices) == 2
    assert heard.states[0] is PeerState.TRAINING and heard.states[-1] is PeerState.LEAVING
    peer.close()
    (folder / "current_run").unlink()  # as if another run had been the last
    again = Heard()
    run_id, *_ = (path.name for path in folder.glob("runs/*"))
    with swarm.Peer.resume(folder, config=machine(), run_id=run_id, observer=again) as peer:
        assert peer.tip.digest == stopped.digest
        assert peer.train().round == 2
        weights = peer.weights()
    assert (again.steps, again.rounds, again.states[-1]) == ([2, 3], [2], PeerState.FINISHED)
    assert (folder / "current_run").read_text().split() == [run_id]
    state = swarm.load_state(folder)
    assert all(torch.equal(state.weights[name], value) for name, value in weights.items())


@pytest.mark.scenario
def test_a_joiner_fetches_weights_and_tokenizer_that_a_founder_was_given(tmp_path: Path) -> None:
    """They do not follow from the seed, so computed ones would differ from the run's."""
    made, tokenizer = train_tokenizer([b"some words, and some more words"] * 9, 270), tmp_path / "t"
    tokenizer.mkdir()
    made.save(tokenizer, model_max_length=32)
    of_the_file = ["data.tokenizer=file", f"model.vocab_size={made.num_ids}", "run.initial=given"]
    run, heard = tiny(tmp_path, "run.rounds=1", *of_the_file), Heard()
    seeded = initial_tensors(run, all_shapes(run.model))
    given = {name: value + 0.01 for name, value in seeded.items()}
    found: list[swarm.Manifest] = []

    def founding() -> None:
        config = machine("peer.wait_for_peers=2")
        folder = tmp_path / "founder"
        with swarm.Peer.found(
            run, folder, config=config, weights=given, tokenizer=tokenizer, observer=heard
        ) as peer:
            found.append(peer.train())
            peer.serve(5)

    founder = threading.Thread(target=founding, daemon=True)  # a failed test has no joiner
    founder.start()
    assert heard.is_up.wait(ALONE_S)
    wanted = swarm.Wanted(invitation=swarm.read_invitation(heard.invitation))
    folder = tmp_path / "joiner"
    with swarm.Peer.join([heard.address], folder, config=machine(), wanted=wanted) as joiner:
        first = joiner.weights()
        tip = joiner.train()
    founder.join(ALONE_S)
    assert [tip.digest] == [manifest.digest for manifest in found]
    assert len(tip.contributors) == 2
    directory, model = open_state(tmp_path / "joiner")
    assert model.tokenizer() == made
    directory.close()
    assert all(torch.equal(first[name], value) for name, value in given.items())


def test_what_cannot_start_leaves_the_state_directory_free(tmp_path: Path) -> None:
    with pytest.raises(NobodyReachable):
        dead = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWGEJ9QEV6mHwTudf9RbNiy6PLBp1w5bhM3NtpqyHGVc3o"
        swarm.Peer.join([dead], tmp_path / "joiner", config=machine())
    assert is_unlocked(tmp_path / "joiner")
    with pytest.raises(StateError, match="has no state of any run"):
        swarm.Peer.resume(tmp_path / "new", config=machine())
    assert is_unlocked(tmp_path / "new")
    stop = Stop(1.0)
    stop.ask()
    with pytest.raises(Stopped):
        wanted, config = swarm.Wanted(run=tiny(tmp_path)), machine("peer.wait_for_peers=2")
        swarm.Peer.start(tmp_path / "never", wanted, config=config, stop=stop)
    assert is_unlocked(tmp_path / "never")


def test_a_run_for_peers_that_are_invited_is_not_founded_with_whoever_comes(tmp_path: Path) -> None:
    run = tiny(tmp_path, "run.admission=invited")
    config = machine("peer.wait_for_peers=2", "peer.open_gathering=true")
    with pytest.raises(ConfigError, match="strangers would be let in and vote"):
        swarm.Peer.found(run, tmp_path / "x", config=config)
    assert is_unlocked(tmp_path / "x")


def test_a_gpu_that_is_not_there_is_an_error_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cpu"):
        swarm.Peer.found(tiny(tmp_path), tmp_path / "x", config=machine("compute.device=cuda"))
    with pytest.raises(ConfigError, match="--gpus"):
        swarm.Peer.found(tiny(tmp_path), tmp_path / "x", config=machine("compute.parallel='all'"))
    assert not (tmp_path / "x").exists()
