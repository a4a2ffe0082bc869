"""A new dead address neither starts an old run nor founds a second one."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from swarm.config import NetworkSection, PeerConfig
from swarm.errors import NobodyReachable, RunMismatch, Unreachable
from swarm.network.rounds.record_file import RecordFile
from swarm.network.runs import run_search
from swarm.network.runs.run_search import encode_preparing
from swarm.network.wire.address_book import Remembered
from swarm.peer.machine.state_directory import current_run_of
from swarm.peer.start import bootstrap_search
from swarm.peer.start.bootstrap_search import met_in, require_reached, runs_there
from swarm.peer.start.entry import Started, Starter
from swarm.peer.status.observing import UNOBSERVED
from swarm.peer.status.publisher import announcement
from swarm.peer.text.run_request import Wanted
from swarm.protocol.records.records import encode_record
from swarm.protocol.values.manifest import Member
from tests.peer.start.test_founding import RUN, Founder
from tests.train.runs import tiny_run

ANOTHER = tiny_run(run={"name": "another"})
DEAD = "/ip4/127.0.0.1/tcp/9/p2p/stranger"


def address_of(peer: str) -> str:
    return f"/ip4/127.0.0.1/tcp/9/p2p/{peer}"


class Network:
    """A node with an address of a scripted peer."""

    peer_id = "me"

    def __init__(self) -> None:
        self.entrances: tuple[str, ...] = ("stranger",)
        self.neighbours: frozenset[str] = frozenset()
        self.asked = 0
        self.answers: list[bytes] = []
        """Answers in order, the last one forever. Without answers nobody is there."""

    async def request(self, peer: str, *_: object) -> bytes:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else next(iter(self.answers), b"")
        if not answer:
            raise Unreachable(f"{peer} does not answer")
        return answer


class Machine:
    """A peer with a run on its disk."""

    def __init__(self, founder: Founder) -> None:
        self.founder, self.state, self.node = founder, founder.state, Network()
        self.started = founder.found()
        config = PeerConfig(network=NetworkSection(initial_peers=(DEAD,)))
        self.host: Any = SimpleNamespace(
            state=self.state, node=self.node, config=config, stop=None, serve=lambda _: None
        )

    def is_there(self) -> bool:
        return asyncio.run(runs_there(self.host, self.started.run_id))

    def has_members(self, *peers: str) -> None:
        file = RecordFile(self.started.directory.record_path)
        record = file.read()
        assert record is not None
        members = {peer: Member(0, 1.0) for peer in peers}
        file.write(replace(record, tip=replace(record.tip, members=members)))

    def starter(self, wanted: Wanted) -> Starter:
        starter = Starter(self.host, wanted, UNOBSERVED)
        starter.wait_for = asyncio.run  # type: ignore[method-assign, assignment]
        return starter


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_search, "NEW_S", 0.5)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    founder = Founder(tmp_path)
    yield Machine(founder)
    founder.state.close()


def says(started: Started) -> bytes:
    return encode_record(announcement(started.run_id, RUN, started.directory.read_founding()))


def test_nobody_at_a_new_address_starts_no_old_run(machine: Machine) -> None:
    with pytest.raises(NobodyReachable, match=f"{DEAD}.*{machine.started.run_id}") as refused:
        machine.is_there()
    assert f"without --initial-peers this peer resumes {machine.started.run_id}" in str(
        refused.value.hint
    )
    assert machine.node.asked > 1, "a line may lose the first connection"


@pytest.mark.parametrize("peer", ["stranger", "me"])
def test_the_addresses_of_a_runs_own_peers_may_be_dead(machine: Machine, peer: str) -> None:
    """As after all were killed, or with the same addresses for all machines."""
    machine.has_members("stranger", "another")
    machine.node.entrances = (peer,)
    assert machine.is_there() and machine.node.asked == (peer == "stranger")


def test_who_has_answered_in_a_run_may_be_gone_for_good(machine: Machine) -> None:
    machine.state.known_peers = [Remembered(DEAD, 0.0)]
    with pytest.raises(NobodyReachable):
        machine.is_there()
    machine.state.known_peers = [Remembered(DEAD, 7.0)]
    assert machine.is_there()


def test_who_has_answered_in_another_run_on_disk_was_not_met_in_this_one(machine: Machine) -> None:
    machine.has_members("me", "stranger")
    machine.state.known_peers = [Remembered(DEAD, 7.0), Remembered(address_of("third"), 7.0)]
    first, second = machine.started.run_id, machine.founder.found().run_id
    assert met_in(first, machine.state) == {"me", "stranger", "third"}
    assert met_in(second, machine.state) == {"me", "third"}


def test_whom_a_run_was_entered_by_may_be_gone_when_it_is_long_forgotten(machine: Machine) -> None:
    """A peer of a large run hears of more peers in minutes than it remembers."""
    machine.has_members("me")
    machine.node.answers = [says(machine.started)]
    assert machine.is_there()
    machine.node.answers = []
    fresher = [Remembered(address_of(f"peer{number}"), 9.0) for number in range(70)]
    machine.state.known_peers = [Remembered(DEAD, 7.0), *fresher]
    assert DEAD not in {text for text, _ in machine.state.known_peers}
    assert machine.is_there()
    machine.node.entrances = ("third",)
    with pytest.raises(NobodyReachable):
        machine.is_there()


def test_whom_two_runs_were_entered_by_was_met_in_both(machine: Machine) -> None:
    machine.has_members("me", "stranger")
    first = machine.started
    machine.started = machine.founder.found()
    machine.state.known_peers = [Remembered(DEAD, 7.0)]
    with pytest.raises(NobodyReachable):
        machine.is_there()
    machine.node.answers = [says(machine.started)]
    assert machine.is_there()
    machine.node.answers = []
    assert machine.is_there(), f"{DEAD} was also in {first.run_id}"


def test_what_is_said_there_counts_also_late(machine: Machine) -> None:
    same = says(machine.started)
    other = says(machine.founder.found())
    for answers, is_same in (([same], True), ([b"", same], True), ([b"", other], False)):
        (machine.started.directory.path / "entered_by").unlink(missing_ok=True)  # a new address
        machine.node.answers = answers
        assert machine.is_there() == is_same


def test_a_peer_that_founds_another_run_is_not_in_the_one_on_disk(machine: Machine) -> None:
    machine.node.answers = [encode_preparing("f" * 64)]
    assert not machine.is_there()


def test_a_peer_with_an_old_run_neither_resumes_it_nor_founds_a_new_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_search, "find_run", AsyncMock(return_value=None))
    monkeypatch.setattr(run_search, "runs_here", AsyncMock(return_value=[]))
    for wanted in (Wanted(), Wanted(run=ANOTHER), Wanted(run=ANOTHER, beside_others=True)):
        with pytest.raises(NobodyReachable, match=DEAD):
            machine.starter(wanted).resume_or_join()
    machine.node.neighbours = frozenset({"stranger"})
    assert machine.starter(Wanted(run=ANOTHER, beside_others=True)).resume_or_join() is None


def test_who_is_reached_may_have_a_run_founded_beside_it(machine: Machine) -> None:
    with pytest.raises(NobodyReachable, match="so no run is founded"):
        require_reached(machine.host)
    machine.node.neighbours = frozenset({"stranger"})
    require_reached(machine.host)
    machine.node.neighbours, machine.node.entrances = frozenset(), ("me",)
    require_reached(machine.host)
    machine.node.entrances = ()
    require_reached(machine.host)


def test_a_damaged_record_of_another_run_is_passed_over(machine: Machine) -> None:
    folder = machine.state.run("another-0123456789abcdef").path
    folder.mkdir()
    (folder / "record").write_bytes(b"torn")
    assert met_in(machine.started.run_id, machine.state) == {"me"}


def test_a_join_that_was_killed_goes_on_although_the_file_of_its_run_could_found_one(
    machine: Machine,
) -> None:
    machine.started.directory.record_path.unlink()
    machine.host.config, machine.node.entrances = PeerConfig(), ()
    starter, asked, joined = machine.starter(Wanted(run=RUN)), [], machine.started
    starter.join = lambda *runs, begun: asked.append((*runs, begun)) or joined  # type: ignore[method-assign, func-returns-value]
    assert starter.resume_or_join() is joined
    assert asked == [(None, machine.started.run_id)], "it may have been founded again meanwhile"
    starter.join = lambda *_, **__: None  # type: ignore[method-assign]
    with pytest.raises(RunMismatch, match=f"was joining {machine.started.run_id}.*--new-run"):
        starter.resume_or_join()


def test_a_join_that_was_given_up_leaves_a_way_back_to_the_run_before(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.host.config, machine.node.entrances = PeerConfig(), ()
    first, state = machine.started.run_id, machine.state
    begun = machine.founder.found()
    begun.directory.record_path.unlink()
    assert (state.current_run, state.last_run) == (begun.run_id, first)
    monkeypatch.setattr(run_search, "find_run", AsyncMock(return_value=None))
    with pytest.raises(
        NobodyReachable, match=f"this peer was joining {begun.run_id}.*--run-id {first}"
    ):
        machine.starter(Wanted()).resume_or_join()
    assert current_run_of(state.path, None)[0] == first, "for an export or an invitation"
