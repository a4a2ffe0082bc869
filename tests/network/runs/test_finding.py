"""The choice among announced runs, and the time to report that there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast

import pytest

from swarm.config import RunConfig, parse_config
from swarm.errors import NetworkDown, NobodyReachable, RunMismatch, SwarmError
from swarm.network.fetch.fetcher import Downloads
from swarm.network.node.node import Node
from swarm.network.runs import run_search
from swarm.network.runs.run_search import Announced, Answers, Opened, find_run, runs_here
from swarm.peer.text.run_request import require_no_other
from swarm.protocol.records.records import RunRecord, RunState
from tests.scenarios.swarms import EXACT

RUN = parse_config(RunConfig, EXACT, source="x")
DIGEST = "0" * 64
ENTRANCE = Announced(
    RunRecord(
        "mine-1", "mine", RUN.fingerprint(), "QmA", DIGEST, 1, DIGEST, 1,
        state=RunState.RUNNING, wait_for_peers=1,
    ),
    ("QmA",),
)  # fmt: skip
OTHER = Announced(replace(ENTRANCE.record, run="other-2", name="other"), ("QmB",))


class Swarms:
    """Announced runs: by the peer at the given address, and in the DHT."""

    told: tuple[Announced, ...] = (ENTRANCE,)
    rumours: tuple[Announced, ...] = (ENTRANCE, OTHER)
    preparing: Mapping[str, str] = MappingProxyType({})
    answers_after_s = 0.0
    looks = 0
    silent: SwarmError | None = None
    """The error that the DHT raises the first time."""

    async def answers_of(self, *_: object) -> Answers:
        await asyncio.sleep(self.answers_after_s)
        return Answers(list(self.told), dict(self.preparing))

    async def announced_runs(self, _: object) -> list[Announced]:
        self.looks += 1
        if self.silent and self.looks == 1:
            raise self.silent
        return list(self.rumours)

    async def open_run(self, announced: Announced, *_: object, **__: object) -> Opened:
        return Opened(announced, RUN, None)


@pytest.fixture
def swarms(monkeypatch: pytest.MonkeyPatch) -> Swarms:
    swarms = Swarms()
    for name in ("answers_of", "announced_runs", "open_run"):
        monkeypatch.setattr(run_search, name, getattr(swarms, name))
    monkeypatch.setattr(run_search, "ALONE_S", 0.01)
    monkeypatch.setattr(run_search, "POLL_S", 0.01)
    return swarms


NODE = cast(Node, type("Alone", (), {"entrances": ("QmA",), "neighbours": (), "peer_id": "me"})())


def find(**options: Any) -> Opened | None:
    whole = {"fingerprint": None, "wanted": None, "deadline_s": 0.1, **options}
    return asyncio.run(find_run(NODE, cast(Downloads, None), **whole))


def test_the_run_of_the_given_address_is_meant_even_if_that_peer_is_slow(swarms: Swarms) -> None:
    """A founder prints its line, a second peer founds another run there, and a third peer comes."""
    swarms.answers_after_s = 0.1
    opened = find()
    assert opened and opened.announced.record.run == "mine-1"


@pytest.mark.parametrize("error", [NobodyReachable("no answer"), NetworkDown("it is dead")])
def test_a_silent_dht_keeps_nobody_from_a_run(swarms: Swarms, error: SwarmError) -> None:
    """The directly asked peer answers a little after the DHT is given up."""
    swarms.silent, swarms.answers_after_s = error, 0.1
    opened = find()
    assert opened and opened.announced.record.run == "mine-1" and swarms.looks == 1
    swarms.looks, swarms.told = 0, ()
    assert [name for name, _ in asyncio.run(runs_here(NODE, cast(Downloads, None)))] == []
    opened = find(wanted="other-2")
    assert opened and opened.announced.record.run == "other-2"


def test_of_two_runs_that_others_announce_one_has_to_be_named(swarms: Swarms) -> None:
    swarms.told = ()
    with pytest.raises(RunMismatch, match=r"mine-1, other-2 .*--run-id"):
        find()
    opened = find(wanted="other-2")
    assert opened and opened.announced.record.run == "other-2"


def test_what_the_given_address_prepares_is_meant_not_what_others_announce(swarms: Swarms) -> None:
    swarms.told, swarms.rumours, swarms.preparing = (), (OTHER,), {"QmA": "f" * 64}
    assert find() is None
    opened = find(wanted="other-2")
    assert opened and opened.announced.record.run == "other-2"


def test_a_run_is_looked_for_as_long_as_there_is_a_reason_to(swarms: Swarms) -> None:
    swarms.told = swarms.rumours = ()
    more_s = [0.01, 0.01, 0.01]

    async def look_on() -> float:
        if len(more_s) == 1:
            swarms.told = (ENTRANCE,)
        return more_s.pop(0) if more_s else 0.0

    opened = find(deadline_s=0.0, look_on=look_on)
    assert opened and opened.announced.record.run == "mine-1" and not more_s
    swarms.told = ()
    assert find(deadline_s=0.0, look_on=look_on) is None


def test_of_two_runs_of_one_file_the_one_a_peer_had_begun_to_join_is_meant(swarms: Swarms) -> None:
    swarms.told = ()
    for preferred in ("mine-1", "other-2"):
        opened = find(fingerprint=RUN.fingerprint(), preferred=preferred)
        assert opened and opened.announced.record.run == preferred
    assert find(fingerprint=RUN.fingerprint(), preferred="nosuch-3"), "it was founded again"


def test_a_run_that_nobody_announces_is_not_waited_for_where_others_are(
    swarms: Swarms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_search, "OTHERS_S", 0.05)
    with pytest.raises(RunMismatch, match="no peer announces nosuch-3; announced are mine-1, oth"):
        find(wanted="nosuch-3", deadline_s=3600.0)
    assert swarms.looks > 1, "it may have come a little later"


def test_a_run_is_not_founded_beside_another_without_a_word(swarms: Swarms) -> None:
    there = asyncio.run(runs_here(NODE, cast(Downloads, None)))
    assert [name for name, _ in there] == ["mine-1", "other-2"]
    changed = RUN.model_copy(update={"run": RUN.run.model_copy(update={"rounds": 9})})
    with pytest.raises(RunMismatch, match=r"mine-1 runs there.*rounds: asked 9.*--new-run"):
        require_no_other(changed, there)
    require_no_other(changed, [])
