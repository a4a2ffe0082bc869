"""While a founder prepares its run, others wait for this run, and found no second one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from swarm.config import NetworkSection, PeerConfig, RunConfig
from swarm.errors import NobodyReachable, RunMismatch
from swarm.network.runs import run_search
from swarm.network.runs.run_search import (
    RUN_QUESTION,
    Announced,
    Opened,
    answers_of,
    encode_preparing,
)
from swarm.peer.machine.state_directory import StateDirectory
from swarm.peer.start import bootstrap_search, founding
from swarm.peer.start.bootstrap_search import RunSearchDeadline, look_for_run, require_alone
from swarm.peer.start.entry import Starter
from swarm.peer.start.host import Reception
from swarm.peer.status.observing import UNOBSERVED
from swarm.peer.text.run_request import Wanted
from swarm.peer.text.run_text import FoundText
from swarm.peer.training.leaving import Stop
from swarm.protocol.records.records import RunRecord, RunState, encode_record
from tests.network.conftest import Peers
from tests.train.runs import tiny_run

RUN, ANOTHER = tiny_run(), tiny_run(run={"name": "another"})
DIGEST = "0" * 64
PREPARING = encode_preparing(RUN.fingerprint())


def record_of(run: RunConfig, founder: str = "M") -> RunRecord:
    """The record of a gathering run, whose id is not derived from a manifest yet."""
    return RunRecord(
        f"gathering-{'0' * 32}", run.run.name, run.fingerprint(), founder, DIGEST, 0, DIGEST, 1,
        state=RunState.GATHERING, wait_for_peers=2,
    )  # fmt: skip


class Entrance:
    """The node of a peer with one address of a scripted peer."""

    entrances: tuple[str, ...] = ("M",)
    neighbours = frozenset({"M"})
    traffic = SimpleNamespace(refuse=None)

    def __init__(self, me: str = "Z") -> None:
        self.peer_id = me
        self.answers: list[bytes] = []
        """Answers in order, the last one forever."""

    async def request(self, _: str, question: bytes, __: float) -> bytes:
        assert question == RUN_QUESTION
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def entrance(monkeypatch: pytest.MonkeyPatch) -> Entrance:
    async def opened(announced: Announced, *_: object, **__: object) -> Opened:
        fits = announced.record.fingerprint == RUN.fingerprint()
        return Opened(announced, RUN if fits else ANOTHER, None)

    monkeypatch.setattr(run_search, "announced_runs", AsyncMock(return_value=[]))
    monkeypatch.setattr(run_search, "open_run", opened)
    monkeypatch.setattr(run_search, "POLL_S", 0.001)
    for name in ("FIND_S", "FIND_BEFORE_FOUNDING_S", "ASK_EVERY_S"):
        monkeypatch.setattr(bootstrap_search, name, 0.01)
    return Entrance()


def host_of(node: Any, **more: Any) -> Any:
    config = PeerConfig(network=NetworkSection(initial_peers=("there",)))
    return SimpleNamespace(
        node=node,
        config=config,
        reception=Reception(),
        serve=lambda _: None,
        stop=Stop(1.0),
        **more,
    )


def looked(host: Any, wanted: Wanted) -> Opened | None:
    none: Any = None
    return asyncio.run(asyncio.wait_for(look_for_run(host, none, wanted, None, None), 30.0))


@pytest.mark.parametrize("wanted", [Wanted(), Wanted(run=RUN)])
def test_a_run_that_is_being_prepared_is_waited_for(
    entrance: Entrance, wanted: Wanted, caplog: pytest.LogCaptureFixture
) -> None:
    """Much longer than a peer searches for a run that no record announces."""
    entrance.answers = [*(200 * [PREPARING]), b"", encode_record(record_of(RUN))]
    with caplog.at_level("INFO"):
        opened = looked(host_of(entrance), wanted)
    assert opened and opened.run == RUN
    assert caplog.text.count("M prepares the run; waiting") == 1, "once a minute"


def test_a_founder_that_says_nothing_more_is_not_waited_for(
    entrance: Entrance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap_search, "SILENT_S", 0.05)
    entrance.answers = [*(5 * [PREPARING]), b""]
    assert looked(host_of(entrance), Wanted(run=RUN)) is None, "this peer founds it"
    entrance.answers = [*(5 * [PREPARING]), b""]
    with pytest.raises(NobodyReachable, match="no run was announced"):
        looked(host_of(entrance), Wanted())


def test_how_long_is_looked_depends_on_which_run_is_prepared(entrance: Entrance) -> None:
    entrance.answers = [encode_preparing(ANOTHER.fingerprint())]
    for fingerprint, waits in ((None, True), (ANOTHER.fingerprint(), True), ("c" * 64, False)):
        patience = RunSearchDeadline(host_of(entrance), fingerprint, 0.0)
        assert asyncio.run(patience.more_s()) == (bootstrap_search.ASK_EVERY_S if waits else 0.0)


def test_no_run_is_founded_beside_another_that_is_silently_prepared(entrance: Entrance) -> None:
    entrance.answers = [encode_preparing(ANOTHER.fingerprint())]
    host, none = host_of(entrance), Any
    with pytest.raises(RunMismatch, match=r"peer M founds a run there.*--new-run"):
        asyncio.run(require_alone(host, none, Wanted(run=RUN)))
    with pytest.raises(RunMismatch):
        looked(host, Wanted(run=RUN))
    assert looked(host, Wanted(run=RUN, beside_others=True)) is None


class Founding(Starter):
    """A peer that founds `RUN`, and joins only the run of its test."""

    def __init__(self, entrance: Entrance, state: StateDirectory, wanted: Wanted) -> None:
        super().__init__(host_of(entrance, state=state), wanted, UNOBSERVED)
        self.joins: list[Any] = []
        self.said_while_it_joined: list[bytes] = []

    def wait_for(self, coroutine: Any) -> Any:
        return asyncio.run(coroutine)

    def join(self, *_: object, **__: object) -> Any:
        self.said_while_it_joined.append(self.says())
        return self.joins.pop(0)

    def says(self) -> bytes:
        return asyncio.run(self.host.reception.handlers().on_request("X", RUN_QUESTION))


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    opened = StateDirectory(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize(("me", "goes_on"), [("A", True), ("Z", False)])
def test_of_two_machines_that_found_at_once_one_goes_on_and_the_other_waits(
    entrance: Entrance, state: StateDirectory, me: str, *, goes_on: bool
) -> None:
    entrance.peer_id, entrance.answers = me, [PREPARING]
    peer, joined = Founding(entrance, state, Wanted(run=RUN)), object()
    peer.joins = [joined]
    assert peer.says() == b""
    assert peer.instead(RUN) is (None if goes_on else joined)
    assert peer.said_while_it_joined == ([] if goes_on else [b""]), "so nobody waits for it"
    assert peer.says() == (PREPARING if goes_on else b"")


def test_a_founder_that_went_first_and_ended_leaves_the_run_to_this_peer(
    entrance: Entrance, state: StateDirectory
) -> None:
    entrance.answers = [PREPARING, b""]
    peer = Founding(entrance, state, Wanted(run=RUN))
    peer.joins = [None]
    assert peer.instead(RUN) is None and peer.says() == PREPARING


def test_what_is_announced_and_cannot_be_opened_is_tried_once(
    entrance: Entrance, state: StateDirectory
) -> None:
    entrance.answers = [encode_record(record_of(ANOTHER))]
    peer = Founding(entrance, state, Wanted(run=RUN))
    peer.joins = [None]
    assert peer.instead(RUN) is None and not peer.joins


def test_a_run_that_began_while_this_peer_read_its_text_is_joined(
    entrance: Entrance, state: StateDirectory
) -> None:
    entrance.answers = [b""]
    peer, joined, said = Founding(entrance, state, Wanted(run=RUN)), object(), []
    peer.joins = [joined]

    def read(*_: object) -> FoundText:
        said.append(peer.says())
        entrance.answers = [encode_record(record_of(RUN))]
        return FoundText(None, bytes(8), 2)

    text: Any = SimpleNamespace(found=read)
    peer.text = text
    assert founding.found(peer, RUN) is joined
    assert said == [PREPARING] and not list(state.path.glob("runs/*"))


def test_a_reception_answers_with_the_run_once_there_is_one() -> None:
    reception = Reception()
    ask = reception.handlers().on_request
    reception.prepare(RUN.fingerprint())
    assert asyncio.run(ask("X", RUN_QUESTION)) == PREPARING
    reception.announce(record_of(RUN))
    assert asyncio.run(ask("X", RUN_QUESTION)) == encode_record(record_of(RUN))


@pytest.mark.usefixtures("entrance")
def test_a_joiner_over_a_network_waits_for_a_founder_that_prepares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap_search, "FIND_S", 1.0)  # a busy machine answers in that
    reception, peers = Reception(), Peers(tmp_path)
    try:
        founder = peers.node(reception.handlers())
        joiner = peers.node()
        reception.prepare(RUN.fingerprint())
        said = joiner.run(answers_of(joiner, joiner.entrances), 30.0)
        assert (said.runs, said.preparing) == ([], {founder.peer_id: RUN.fingerprint()})
        none: Any = None
        looking = look_for_run(host_of(joiner), none, Wanted(), None, None)
        waiting = asyncio.run_coroutine_threadsafe(looking, joiner.loop)
        with pytest.raises(TimeoutError):
            waiting.result(3 * bootstrap_search.FIND_S)
        reception.announce(record_of(RUN, founder.peer_id))
        opened = waiting.result(30.0)
        assert opened and opened.run == RUN
        assert not joiner.traffic.refused
    finally:
        peers.stop()
