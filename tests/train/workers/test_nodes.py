"""Workers of other machines: agents on this one that share no memory with their controller."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from math import inf
from pathlib import Path

import pytest

from swarm.errors import ConfigError, WorkersFailed
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.workers.agent import Agent
from swarm.train.workers.controller_wire import Wire, admit, encoded, key_at
from swarm.train.workers.crew import Crew, Place
from swarm.train.workers.members import Lost
from swarm.train.workers.nodes import Nodes, is_public, versions
from swarm.train.workers.parallel_engine import ParallelEngine
from swarm.train.workers.roster import Node, Wanted
from tests.processes import running
from tests.train.crews import Crews, SharedCrew, lent_engines
from tests.train.runs import all_names, new_engine, same
from tests.train.saving.test_expert_parallel import LR, five_steps
from tests.train.workers.test_parallel import (
    GONE_S,
    OWNED,
    RUN,
    assert_equal,
    is_gone,
    is_same,
    soon,
    stopped,
    train,
)

LIMIT_S = 300.0
LEAVES_S = 25.0
"""Less than torchrun's wait before it kills."""
MINE = Node(1, 0, None, versions())


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("key") / "workers.key"
    key_at(path, may_make=True)
    return path


@pytest.fixture(scope="module")
def key(key_file):
    return key_at(key_file, may_make=False)


@contextmanager
def listening(key, wanted, wait_s=LIMIT_S, **more):
    nodes = Nodes(("127.0.0.1", 0), key, wanted, device="cpu", wait_s=wait_s, **more)
    try:
        yield nodes
    finally:
        nodes.close()


def agent_command(port, key_file, *options):
    command = [sys.executable, "-m", "peers.worker", "--controller", f"127.0.0.1:{port}"]
    return [*command, "--key", str(key_file), "--workers", "1", *options]


def wait_until(is_so, within_s=LIMIT_S):
    end_s = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def children(pid):
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Agents:
    """Two nodes of a worker each, which are restarted after a kill."""

    def __init__(self, port, key_file):
        self.command = agent_command(port, key_file)
        self.processes = [self.start(), self.start()]

    def start(self):
        return subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True)

    def kill(self, pid):
        """Kills the agent with this worker, and starts another one."""
        (index,) = (i for i, each in enumerate(self.processes) if pid in children(each.pid))
        self.end(self.processes[index])
        self.processes[index] = self.start()

    def end(self, process):
        with process:
            process.kill()


class CrewsWithNodes(Crews):
    """Crews of one worker here and the nodes' workers."""

    def __init__(self, nodes):
        super().__init__()
        self._nodes = nodes

    def new(self, size):
        return self._to_be_kept(SharedCrew(Place(size), self._nodes))


@pytest.fixture(scope="module")
def nodes(key):
    with listening(key, Wanted(1, 2)) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def agents(nodes, key_file):
    agents = Agents(nodes.port, key_file)
    yield agents
    for process in agents.processes:
        agents.end(process)


@pytest.fixture(scope="module")
def crews(nodes, agents):
    crews = CrewsWithNodes(nodes)
    yield crews
    crews.end()


@pytest.fixture
def parallel(crews):
    with lent_engines(crews, workers=1) as make:
        yield make


# ------------------------------------------------ the same bits


def test_workers_of_three_machines_equal_one_process_in_every_bit(parallel, agents):
    engine = parallel(RUN, OWNED)
    assert_equal(RUN, engine, new_engine(RUN, OWNED))
    assert [pid in children(os.getpid()) for pid in engine.pids] == [True, False, False]
    assert sorted(engine.pids[1:]) == sorted(
        n for each in agents.processes for n in children(each.pid)
    )


def test_workers_of_other_machines_are_read_beside_the_products_of_a_step(parallel):
    engine, straight, seen = parallel(RUN, OWNED), new_engine(RUN, OWNED), []
    before = engine.read(all_names(RUN))
    assert engine.before_update(lambda: seen.append(engine.read(all_names(RUN))))
    assert train(engine, RUN, range(2)) == train(straight, RUN, range(2))
    assert len(seen) == 1 and same(seen[0], before)
    assert is_same(RUN, engine, straight)


@pytest.mark.exhaustive
def test_experts_dealt_out_over_machines_learn_as_in_one_process(parallel):
    """Within 2 % of the learning rate, as over the workers of one machine."""
    engine, straight = parallel(RUN, OWNED, ep=3), new_engine(RUN, OWNED)
    for each in (engine, straight):
        five_steps(each, RUN)
    ours, theirs = (each.read(all_names(RUN)) for each in (engine, straight))
    assert max((ours[name] - theirs[name]).abs().max() for name in ours) <= 0.02 * LR


# ------------------------------------------------ faults


def test_a_node_that_is_killed_in_a_step_costs_no_bit(parallel, agents, caplog):
    engine, straight = parallel(RUN, OWNED), new_engine(RUN, OWNED)
    assert train(engine, RUN, range(2)) == train(straight, RUN, range(2))
    before = engine.pids
    stopped(engine, 2)
    timer = soon(lambda: agents.kill(before[2]))
    with caplog.at_level(logging.INFO):
        assert train(engine, RUN, range(2, 4)) == train(straight, RUN, range(2, 4))
    timer.join()
    assert "(workers 2 to 2) has disconnected" in caplog.text
    assert "waiting for workers of other machines" in caplog.text
    assert not set(before) & set(engine.pids)
    wait_until(lambda: all(map(is_gone, before)))
    assert is_same(RUN, engine, straight)


@pytest.mark.exhaustive
def test_a_worker_of_a_node_that_is_killed_is_named(parallel, caplog):
    engine, straight = parallel(RUN, OWNED), new_engine(RUN, OWNED)
    stopped(engine, 1)
    timer = soon(lambda: os.kill(engine.pids[1], signal.SIGKILL))
    with caplog.at_level(logging.INFO):
        assert train(engine, RUN, range(2)) == train(straight, RUN, range(2))
    timer.join()
    assert "(workers 1 to 1): worker 1 was killed" in caplog.text
    assert is_same(RUN, engine, straight)


@pytest.mark.exhaustive
def test_the_workers_that_are_left_go_on_when_a_node_stays_away(parallel, nodes, agents, caplog):
    engine, straight = parallel(RUN, OWNED), new_engine(RUN, OWNED)
    assert train(engine, RUN, range(2)) == train(straight, RUN, range(2))
    nodes._wait_s = 20.0
    agents.end(agents.processes[0])
    try:
        with caplog.at_level(logging.INFO):
            # Two micro-batches: with two workers, too, the sums are those of one process.
            assert train(engine, RUN, range(2, 4)) == train(straight, RUN, range(2, 4))
    finally:
        nodes._wait_s = LIMIT_S
        agents.processes[0] = agents.start()
    assert "after 20 s only 1 of 2 workers of other machines are used" in caplog.text
    assert len(engine.pids) == 2 and engine.describe().startswith("2 workers")
    assert is_same(RUN, engine, straight)
    wait_until(lambda: nodes.has_more(2, LIMIT_S))
    assert train(engine, RUN, [4]) == train(straight, RUN, [4])
    assert len(engine.pids) == 2  # not at once
    engine._force._crew._began_s -= LIMIT_S
    engine._force._crew.is_broken = True  # so that no other test gets it
    assert train(engine, RUN, [5]) == train(straight, RUN, [5])
    assert len(engine.pids) == 3
    assert is_same(RUN, engine, straight)


CONTROLLER = """
import sys
from pathlib import Path
import torch
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.workers.crew import Crew, Place
from swarm.train.workers.parallel_engine import ParallelEngine
from swarm.train.workers.controller_wire import key_at
from swarm.train.workers.nodes import Nodes
from swarm.train.workers.roster import Wanted
from swarm.model.initial_weights import initial_tensors
from tests.train.runs import all_names, batch, tiny_run
torch.set_num_threads(1)
run, key = tiny_run(), key_at(Path(sys.argv[1]), may_make=False)
nodes = Nodes(("127.0.0.1", 0), key, Wanted(1, 1), device="cpu", wait_s=300)
print(nodes.port, flush=True)
engine = ParallelEngine(run, [EngineOptions.of(run)], lambda: Crew(Place(1), nodes))
engine.write(initial_tensors(run, all_names(run)))
print(*engine.pids, flush=True)
while True:
    engine.step(batch(run, 0), lr=1e-3)
"""


@pytest.mark.exhaustive
def test_workers_of_a_node_end_with_a_controller_that_is_killed(key_file):
    command = [sys.executable, "-c", CONTROLLER, str(key_file)]
    with running(command, stdout=subprocess.PIPE) as controller:
        command = agent_command(int(controller.stdout.readline()), key_file, "--once")
        with running(command, stderr=subprocess.PIPE, text=True) as agent:
            pids = [int(word) for word in controller.stdout.readline().split()]
            assert len(pids) == 2 and pids[1] in children(agent.pid)
            controller.kill()
            wait_until(lambda: all(map(is_gone, pids)), within_s=GONE_S)
            assert agent.wait(LIMIT_S) == 0
            assert "the controller has ended" in agent.stderr.read()


PROGRAMS = Path(sys.executable).parent


@pytest.mark.exhaustive
def test_sigterm_to_torchrun_ends_its_workers_and_the_peer_leaves_in_its_time(key, key_file):
    """Each prints one line. The peer, which would wait for them, has a second left."""
    goes_s = [inf]
    leaving = {"remaining_s": lambda: goes_s[0] - time.monotonic()}
    with listening(key, Wanted(1, 2), **leaving) as nodes:
        command = [PROGRAMS / "torchrun", "--no-python", "--standalone", "--nproc-per-node", "2"]
        command += [PROGRAMS / "swarm-worker", "--controller", f"127.0.0.1:{nodes.port}"]
        command += ["--key", key_file, "--log-format", "plain"]
        with running(command, stderr=subprocess.PIPE, text=True) as launcher:
            options = [EngineOptions.of(RUN)]
            engine = ParallelEngine(RUN, options, lambda: Crew(Place(1), nodes, **leaving))
            train(engine, RUN, [0])
            pids = engine.pids
            assert len(pids) == 3
            began_s = time.monotonic()
            goes_s[0] = began_s + 1.0
            stopped(engine, 0)  # so that a step is in progress
            soon(launcher.terminate)
            with pytest.raises(WorkersFailed, match=r"this peer must end|of 2 workers"):
                train(engine, RUN, range(1, 100))
            assert time.monotonic() - began_s < LEAVES_S
            said = launcher.communicate(timeout=LEAVES_S)[1].splitlines()
        engine.close()
    assert all(map(is_gone, pids))
    said = [line for line in said if line.startswith("swarm-worker: ")]
    assert said == ["swarm-worker: error: interrupted"] * 2


# ------------------------------------------------ admission, without processes


def dialled(nodes, key, node=MINE):
    return Agent(("127.0.0.1", nodes.port), key, node)._dial()


def called_ranks(nodes):
    """Ranks of the called nodes, whose connections are closed again."""
    members = nodes.called().members
    for member in members:
        member.kill()
    return [list(member.ranks) for member in members]


def test_a_node_with_another_key_is_refused_with_one_line(key, tmp_path, caplog):
    other = key_at(tmp_path / "other.key", may_make=True)
    with listening(key, Wanted(1, 1)) as nodes:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"for this node .*: it has another key"):
                dialled(nodes, other)
        wait_until(lambda: "does not hold the key" in caplog.text)
        found = dialled(nodes, key)
        assert called_ranks(nodes) == [[1]]
        found.close()
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1


def test_garbage_on_the_port_changes_nothing(key, caplog):
    with listening(key, Wanted(1, 1)) as nodes:
        silent = [socket.create_connection(("127.0.0.1", nodes.port)) for _ in range(3)]
        for content in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 10_000, b""):
            with socket.create_connection(("127.0.0.1", nodes.port)) as stranger:
                stranger.sendall(content)
        found = dialled(nodes, key)
        (member,) = nodes.called().members
        member.send({"do": "state"}, None)
        assert found.wait(5) == {"do": "state"}
        member.kill()
        for each in (*silent, found):
            each.close()


def test_a_node_that_holds_the_key_is_let_in_beside_any_number_that_say_nothing(key):
    with listening(key, Wanted(1, 1)) as nodes:
        silent = [
            socket.create_connection(
                ("127.0.0.1", nodes.port), source_address=(f"127.0.{k % 4 + 1}.1", 0)
            )
            for k in range(40)
        ]
        found = dialled(nodes, key)
        assert called_ranks(nodes) == [[1]]
        for each in (*silent, found):
            each.close()


def test_only_who_names_a_public_address_lets_public_ones_in():
    assert [is_public(host) for host in ("8.8.8.8", "2600::1")] == [True, True]
    private = ("0.0.0.0", "127.0.0.1", "10.0.0.1", "192.168.1.1", "100.64.0.1", "fd00::1", "head")
    assert not any(map(is_public, private))


def test_a_public_address_is_not_asked_for_the_key(key, monkeypatch, caplog):
    monkeypatch.setattr("swarm.train.workers.nodes.is_public", lambda host: host == "127.0.0.2")
    with listening(key, Wanted(1, 1)) as nodes:
        where = ("127.0.0.1", nodes.port)
        with socket.create_connection(where, source_address=("127.0.0.2", 0)) as stranger:
            assert stranger.recv(1) == b""
        wait_until(lambda: "it dials from a public address" in caplog.text)


def test_a_node_that_cannot_be_part_of_the_peer_is_told_why(key):
    why = r"the node runs swarm 0\.0 with torch 1\.0, the peer"
    with listening(key, Wanted(1, 1)) as nodes, pytest.raises(ConfigError, match=why):
        dialled(nodes, key, Node(1, 0, None, ("0.0", "1.0")))


def test_nodes_that_left_before_they_were_called_are_not_counted(key):
    with listening(key, Wanted(1, 1), wait_s=0.4) as nodes:
        dialled(nodes, key).close()
        with pytest.raises(WorkersFailed, match=r"within 0 s 0 of 1 workers .* a multiple of 2"):
            nodes._wanted = Wanted(1, 1, unit=2)
            nodes.called()


def test_when_a_node_stays_away_the_others_go_on_and_a_spare_takes_its_place(key, caplog):
    with listening(key, Wanted(1, 2), wait_s=0.4) as nodes:
        assert called_ranks(nodes) == []
        first = dialled(nodes, key)
        assert called_ranks(nodes) == [[1]]
        assert "only 1 of 2 workers of other machines are used" in caplog.text
        nodes._wait_s = LIMIT_S
        more = [dialled(nodes, key) for _ in range(3)]
        assert called_ranks(nodes) == [[1], [2]]
        more.append(dialled(nodes, key))
        assert called_ranks(nodes) == [[1], [2]]
        for each in (first, *more):
            each.close()


def test_nodes_that_come_back_are_worth_a_new_start_if_they_make_a_larger_crew(key):
    with listening(key, Wanted(2, 4, unit=2), wait_s=50) as nodes:
        assert not nodes.has_more(4, 50)
        wires = [dialled(nodes, key)]
        wait_until(lambda: nodes.has_more(5, 50))  # six are wanted
        assert not nodes.has_more(4, 50)  # five are no multiple of two
        assert not nodes.has_more(5, 49) and not nodes.has_more(6, 50)
        wires[0].close()
        wait_until(lambda: not nodes.has_more(5, 50))


def test_an_agent_reports_its_workers_fate_and_dials_again(key, monkeypatch):
    """With a controller that asks for more workers than there are."""
    with listening(key, Wanted(1, 1)) as nodes:
        agent = Agent(("127.0.0.1", nodes.port), key, MINE)
        threading.Thread(target=agent.serve, kwargs={"once": True}, daemon=True).start()
        (member,) = nodes.called().members
        member.send({"do": "begin", "count": 2, "rank": 1}, None)
        with pytest.raises(Lost, match="2 workers are asked for"):
            while not member.receive():
                pass
        member.kill()
        (member,) = nodes.called().members
        member.kill()


def test_a_first_command_that_comes_with_the_welcome_is_heard(key):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        agent = Agent(listener.getsockname(), key, MINE)
        threading.Thread(target=agent.serve, kwargs={"once": True}, daemon=True).start()
        end, _ = listener.accept()
        wire = Wire(end)
        assert admit(wire, key) == MINE.message()
        end.sendall(encoded({"welcome": True}) + encoded({"do": "begin", "count": 2, "rank": 1}))
        assert "2 workers are asked for" in wire.wait(5)["lost"]
        wire.close()


@pytest.mark.parametrize(
    "answer",
    [
        {"rank": 2, "answer": {}},
        {"rank": True, "answer": {}},
        {"rank": 1, "answer": None},
        {"rank": 1, "answer": {}, "segments": [[0, 1]]},
        {},
    ],
)
def test_a_node_that_answers_for_others_or_without_being_asked_is_lost(key, answer):
    with listening(key, Wanted(1, 1)) as nodes:
        wire = dialled(nodes, key)
        (member,) = nodes.called().members
        segments = answer.pop("segments", [])
        wire.socket.sendall(encoded(answer, segments))
        with pytest.raises(Lost, match=r"127\.0\.0\.1:.* \(workers 1 to 1\): "):
            member.receive()
        member.kill()
        wire.close()


def test_a_peer_that_has_to_go_waits_for_nobody_any_more(key):
    goes_s = time.monotonic() + 0.5
    remaining = {"remaining_s": lambda: goes_s - time.monotonic()}
    with (
        listening(key, Wanted(1, 1, unit=2), **remaining) as nodes,
        pytest.raises(WorkersFailed, match=r"within [01] s 0 of 1 workers .* came"),
    ):
        nodes.called()
    with listening(key, Wanted(1, 1), **remaining) as nodes:
        assert nodes.called().members == []  # the local workers suffice


def test_a_port_that_is_taken_is_a_wrong_setting(key):
    why = r"compute\.workers_from: cannot listen on 127\.0\.0\.1:"
    with listening(key, Wanted(1, 1)) as nodes, pytest.raises(ConfigError, match=why):
        Nodes(("127.0.0.1", nodes.port), b"", Wanted(1, 1), device="cpu", wait_s=1)
