"""The page of a running swarm answers soon, and outlives its source peers."""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from swarm.emulation.local_swarm import LocalSwarm
from tests.processes import running
from tests.scenarios.swarms import ROUND_S, peer_id, started_swarm

pytestmark = pytest.mark.scenario

REFORM_S = 20.0
"""One peer of two continues alone after this, while its record of the other expires."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    folder = tmp_path_factory.mktemp("page")
    settings = ["run.rounds=100000", "round.local_steps=12", f"round.reform_after_s={REFORM_S}"]
    with started_swarm(folder, 2, settings, after_rounds=2) as started:
        yield started
        started.kill()


@pytest.fixture(scope="module")
def url(swarm: LocalSwarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    errors = tmp_path_factory.mktemp("monitor") / "stderr"
    addresses = ["--initial-peers", swarm.peers[1].join_address()]
    with (
        errors.open("wb") as to,
        running(
            [sys.executable, "-m", "peers.monitor", *addresses, "--http", "127.0.0.1:0"],
            limit_s=20 * ROUND_S,  # shared by all tests of this file
            stdout=subprocess.PIPE,
            stderr=to,
            text=True,
        ) as process,
    ):
        assert process.stdout
        line = process.stdout.readline()
        assert "the page is at http://127.0.0.1:" in line, Path(errors).read_text()
        yield line.split()[-1]
        process.terminate()
        process.wait(ROUND_S)
    assert not errors.read_text()


def get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=ROUND_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def snapshot_when(url: str, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    deadline = time.monotonic() + 2 * ROUND_S
    while True:
        _, body = get(f"{url}snapshot.json")
        found: dict[str, Any] = json.loads(body)
        if "peers" in found and holds(found):
            return found
        assert time.monotonic() < deadline, (what, found.get("health"))
        time.sleep(0.2)


def test_the_page_shows_the_living_swarm(swarm: LocalSwarm, url: str) -> None:
    assert get(url)[0] == 200
    found = snapshot_when(url, lambda state: state["members"] == 2, "a manifest")
    assert {peer["peer_id"] for peer in found["peers"]} == {peer_id(p) for p in swarm.peers}
    assert [expert["expert"] for expert in found["experts"]] == list(range(8))
    told = snapshot_when(
        url, lambda state: all(peer["last_round"] for peer in state["peers"]), "a round's phases"
    )
    for peer in told["peers"]:
        assert peer["last_round"]["phases"]["training"] > 0
        assert len(peer["routing"]["shares"]) == 8 and sum(peer["routing"]["shares"]) > 900
        assert 0 <= told["at"] - peer["published"] < ROUND_S


def test_rounds_that_are_decided_reach_the_page_and_the_metrics(url: str) -> None:
    before = snapshot_when(url, lambda state: bool(state["rounds"]), "a round")
    found = snapshot_when(
        url, lambda state: state["pace"]["utilisation"] is not None, "a round seen whole"
    )
    assert found["round"] > before["rounds"][0]["round"]
    assert found["pace"]["utilisation"] > 0 and found["pace"]["eta_s"] > 0
    status, body = get(f"{url}metrics")
    families = {f.name: f for f in text_string_to_metric_families(body.decode())}
    assert status == 200
    assert families["swarm_round"].samples[0].value >= found["round"]
    assert len(families["swarm_peer_tokens_per_second"].samples) == 2


def test_the_page_outlives_the_peer_that_it_learned_from(swarm: LocalSwarm, url: str) -> None:
    dead, survivor = peer_id(swarm.peers[1]), peer_id(swarm.peers[0])
    swarm.peers[1].kill()

    def is_alone(state: dict[str, Any]) -> bool:
        return [peer["peer_id"] for peer in state["peers"]] == [survivor]

    before = snapshot_when(url, is_alone, "the absence")
    gone = [event["text"] for event in before["events"] if event["topic"] == "peer"]
    assert gone and re.search("is no longer (present|a member)", gone[-1])
    assert before["health"]["word"] != "unreachable"
    assert dead not in {owner["peer_id"] for owner in before["peers"]}
    snapshot_when(url, lambda state: state["round"] > before["round"], "a round after it")
    assert get(url)[0] == 200
