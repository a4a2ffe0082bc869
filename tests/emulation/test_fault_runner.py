"""The times of a plan's faults, with peers that are no processes."""

import itertools
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from swarm.emulation.controls import Caught
from swarm.emulation.fault_plan import (
    At,
    Fault,
    FaultPlan,
    Heal,
    Join,
    Kill,
    Leave,
    Pause,
    Restart,
    Slow,
)
from swarm.emulation.fault_runner import Bounds, FaultRunner
from swarm.emulation.local_peer import LocalPeer
from swarm.emulation.local_swarm import LocalSwarm
from swarm.errors import ConfigError

NOW = At(after_s=0.0)


@dataclass
class Peer:
    """The methods of a process that a runner calls."""

    index: int
    alive: bool = True
    stands_still: bool = False
    exit_code: int | None = None
    _sent: set[int] = field(default_factory=set)
    last_address: str = "address"
    done: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)

    own_end = LocalPeer.own_end

    def events(self) -> list[dict[str, Any]]:
        return self.history

    def output(self) -> str:
        return "the last words"

    def kill(self) -> None:
        self.done.append("kill")
        self.send(signal.SIGKILL)
        self.dies_of(signal.SIGKILL)

    def dies_of(self, number: signal.Signals) -> None:
        self.alive, self.exit_code = False, -number

    def pause(self) -> None:
        self.done.append("pause")

    def resume(self) -> None:
        self.done.append("resume")

    def send(self, number: signal.Signals) -> None:
        self._sent.add(number)
        if number == signal.SIGINT:
            self.done.append("leave")

    def applied(self, number: int) -> None:
        event = {"event": "applied", "kind": "quorum", "height": number, "round": number}
        self.history.append(event | {"counted": True, "time": time.time() + 0.001})


class Swarm(LocalSwarm):
    """Peers that start at once."""

    def restart(self, peer: Any, arguments: Sequence[str]) -> None:
        peer.alive, peer.exit_code, peer._sent = True, None, set()
        peer.done.append("start")

    def add(self, arguments: Sequence[str]) -> Any:
        self.peers.append(Peer(len(self.peers)))  # type: ignore[arg-type]
        return self.peers[-1]


def runner_of(folder: Path, *faults: Fault, **settings: Any) -> tuple[FaultRunner, list[Peer]]:
    peers = [Peer(index) for index in range(4)]
    swarm = Swarm(folder, folder / "run.toml", 4, peers=peers)  # type: ignore[arg-type]
    plan = FaultPlan(fault=faults, **settings)
    runner = FaultRunner(swarm, plan, bounds=Bounds(manifest_s=1e9, return_s=1e9))
    runner.prepare()
    runner.begin()
    return runner, peers


def come_to(runner: FaultRunner, trap: str, peer: Peer) -> None:
    """Lets a peer reach a trap and stop itself."""
    (armed,) = (t for t in runner.folder.armed() if t.name == trap)
    peer.stands_still = True
    assert runner.folder.take(armed, Caught(trap, peer.index, 1, time.time()))


def test_a_plan_for_peers_or_links_that_do_not_exist_is_refused(tmp_path: Path) -> None:
    kill = Kill(kind="kill", peer=5, at=NOW)
    with pytest.raises(ConfigError, match=r"fault\[0\]: there is no peer 5; the swarm has 0 to 3"):
        runner_of(tmp_path, kill)
    with pytest.raises(ConfigError, match="needs --link"):
        runner_of(tmp_path, Heal(kind="heal", at=NOW))
    runner_of(tmp_path, kill, Join(kind="join", at=NOW), Join(kind="join", at=NOW))


def test_a_killed_peer_is_away_until_a_round_counts_it_again(tmp_path: Path) -> None:
    runner, peers = runner_of(tmp_path, Kill(kind="kill", peer=2, at=NOW, for_s=0.01))
    runner.poll()
    assert peers[2].done == ["kill"] and not runner.all_back()
    time.sleep(0.02)
    runner.poll()
    assert peers[2].done == ["kill", "start"] and not runner.all_back()
    peers[2].applied(1)
    runner.poll()
    assert runner.all_back()
    (kill,) = runner.happened
    assert kill.until_s is not None and kill.until_s >= kill.at_s + 0.01


def test_a_fault_of_a_round_waits_until_it_begins(tmp_path: Path) -> None:
    slow = Slow(kind="slow", peer=1, factor=3.0, at=At(round=2))
    runner, peers = runner_of(tmp_path, slow)
    runner.poll()
    assert not runner.happened
    peers[0].applied(1)
    runner.poll()
    assert [fault.kind for fault in runner.happened] == ["slow"]
    assert runner.folder.controls(1).slow == 3.0


def test_who_is_caught_in_a_role_is_paused_there_and_goes_on_later(tmp_path: Path) -> None:
    at = At(round=1, phase="propose")
    runner, peers = runner_of(tmp_path, Pause(kind="pause", peer="convener", at=at, for_s=0.01))
    runner.poll()
    come_to(runner, "fault-0000", peers[3])
    runner.poll()
    assert peers[3].done == ["pause"]
    time.sleep(0.02)
    runner.poll()
    assert peers[3].done == ["pause", "resume"]
    (pause,) = runner.happened
    assert (pause.peers, pause.role, pause.phase) == ((3,), "convener", "propose")


def test_who_is_only_asked_to_leave_at_its_place_goes_on_at_once(tmp_path: Path) -> None:
    leave = Leave(kind="leave", peer="any", at=At(round=1, phase="offer"))
    runner, peers = runner_of(tmp_path, leave)
    runner.poll()
    come_to(runner, "fault-0000", peers[1])
    runner.poll()
    assert peers[1].done == ["leave", "resume"]


def test_a_trap_whose_peer_was_killed_by_another_fault_is_set_again(tmp_path: Path) -> None:
    at = At(round=1, phase="merge")
    runner, peers = runner_of(tmp_path, Pause(kind="pause", peer="any", at=at, for_s=1.0))
    runner.poll()
    come_to(runner, "fault-0000", peers[1])
    peers[1].kill()
    runner.poll()
    assert not runner.happened
    come_to(runner, "fault-0000", peers[2])
    runner.poll()
    assert [fault.peers for fault in runner.happened] == [(2,)]


def test_random_faults_wait_while_a_minority_is_away(tmp_path: Path) -> None:
    kill = Kill(kind="kill", peer="random", at=NOW, for_s=1e6)
    runner, _ = runner_of(tmp_path, kill, kill)
    runner.poll()
    assert len(runner.happened) == 1, "of four one may be away"
    time.sleep(0.01)
    runner.poll()
    assert len(runner.happened) == 1


def test_faults_in_order_are_set_one_after_another(tmp_path: Path) -> None:
    faults = [
        Kill(kind="kill", peer="any", at=At(round=1, phase=phase), for_s=0.01)
        for phase in ("offer", "accept")
    ]
    runner, peers = runner_of(tmp_path, *faults, in_order=True, max_down=1)
    runner.poll()
    assert [trap.phase for trap in runner.folder.armed()] == ["offer"]
    come_to(runner, "fault-0000", peers[1])
    runner.poll()
    assert runner.folder.armed() == []
    time.sleep(0.02)
    runner.poll()
    peers[1].applied(1)
    runner.poll()
    assert [trap.phase for trap in runner.folder.armed()] == ["accept"]


def test_in_order_what_is_not_due_holds_back_what_follows(tmp_path: Path) -> None:
    trap = Kill(kind="kill", peer="joiner", at=At(round=3, phase="fetch"), for_s=1.0)
    join = Join(kind="join", at=At(round=3))
    runner, peers = runner_of(tmp_path, trap, join, trap, in_order=True, max_down=2)
    runner.poll()
    assert len(runner.folder.armed()) == 1
    peers[0].applied(2)
    runner.poll()
    assert [fault.kind for fault in runner.happened] == ["join"]


def test_a_peer_that_ends_on_its_own_is_reported_and_one_that_left_is_not(tmp_path: Path) -> None:
    runner, peers = runner_of(tmp_path, Leave(kind="leave", peer=1, at=NOW))
    runner.poll()
    peers[1].alive, peers[1].exit_code = False, 0
    assert runner.run(lambda: True, 1.0)
    peers[2].alive, peers[2].exit_code = False, 9
    assert not runner.run(lambda: False, 1.0)
    assert runner.ended == ["peer-2, status 9: the last words"]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_peer_that_dies_of_a_signal_is_reported_unless_a_fault_killed_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    killed = Kill(kind="kill", peer=1, at=NOW, for_s=1e6)
    slowed = Slow(kind="slow", peer=2, factor=2.0, at=NOW)
    runner, peers = runner_of(tmp_path, killed, slowed, max_down=2)
    runner.poll()
    assert [fault.kind for fault in runner.happened] == ["kill", "slow"]
    assert runner.run(turns(1), 1.0)
    runner.actions.away[1] = time.time()  # as when a cut of the killed peer ends meanwhile
    assert runner.run(turns(1), 1.0), "it is dead because the plan said so"
    peers[2].dies_of(number)
    assert not runner.run(lambda: False, 1.0)
    assert runner.ended == [f"peer-2, status {-number}: the last words"]


def test_a_peer_that_dies_of_a_signal_in_its_next_life_is_reported(tmp_path: Path) -> None:
    runner, peers = runner_of(tmp_path, Restart(kind="restart", peer=1, at=NOW))
    runner.poll()
    assert peers[1].done == ["kill", "start"]
    peers[1].dies_of(signal.SIGKILL)
    assert not runner.run(lambda: False, 1.0)
    assert runner.ended == ["peer-1, status -9: the last words"]


def turns(number: int) -> Callable[[], bool]:
    """A condition that holds after a number of calls."""
    asked = itertools.count(1)
    return lambda: next(asked) > number


def test_no_manifest_for_too_long_is_a_hang(tmp_path: Path) -> None:
    runner, _ = runner_of(tmp_path)
    runner.bounds = Bounds(manifest_s=0.0)
    assert not runner.run(lambda: False, 1.0)
    assert "no manifest" in runner.hangs[0]
