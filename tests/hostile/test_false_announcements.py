"""False announcements cost a joiner a moment. It checks each, and joins the true run."""

from __future__ import annotations

import asyncio

import pytest

from swarm.errors import RunMismatch
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.fetcher import Downloads
from swarm.network.node.node import Node
from swarm.network.runs.run_founding import await_founding
from swarm.network.runs.run_records import publish
from swarm.network.runs.run_search import Opened, announced_runs, find_run
from swarm.protocol.records.records import RunRecord, RunState, encode_record, runs_key
from swarm.protocol.values.manifest import run_id
from tests.hostile.false_records import WAIT_S, Stranger, store, strangers
from tests.network.conftest import Peers
from tests.network.runs.test_observer import Lonely
from tests.peer_records import peer_record

FALSE = "f" * 64


@pytest.fixture(scope="module")
def crowd() -> list[Stranger]:
    return strangers(40)


@pytest.fixture(autouse=True)
def announced(lonely: Lonely, joiner: Node) -> None:
    """The true run is in the DHT, and no peer announces it directly."""
    for node in (lonely.node, joiner):
        node.traffic.refused.clear()
    lonely.told = b""
    lonely.announce()


def say(joiner: Node, lonely: Lonely, records: list[tuple[Stranger, RunRecord]]) -> None:
    """Strangers announce runs. The joiner's own storage accepts the records like any other."""
    for who, record in records:
        value = encode_record(record)
        assert store(joiner, lonely.node, runs_key(who.peer_id), [(who, value)], life_s=15.0)


def find(joiner: Node, **asked: str | None) -> Opened | None:
    downloads = Downloads(joiner, BlobStore())
    options = {"fingerprint": None, "wanted": None} | asked
    looking = find_run(joiner, downloads, deadline_s=WAIT_S, **options)
    return joiner.run(looking, 2 * WAIT_S)


def is_true(opened: Opened | None, lonely: Lonely) -> bool:
    assert opened is not None
    found, record = opened.announced, lonely.record()
    return (found.record, opened.run, opened.founding) == (record, lonely.run, lonely.manifest)


def elsewhere(lonely: Lonely, founding: str) -> RunRecord:
    """The right configuration with an invented manifest 0, under the id that follows from both."""
    invented = run_id("tiny", lonely.run.fingerprint(), founding)
    return lonely.record(run=invented, founding=founding)


def test_a_false_manifest_0_under_the_right_fingerprint_is_no_mismatch(
    joiner: Node, lonely: Lonely, crowd: list[Stranger]
) -> None:
    contradicts = lonely.record(founding=FALSE)
    said = [(who, contradicts) for who in crowd[:3]]
    said += [(who, elsewhere(lonely, FALSE)) for who in crowd[3:6]]
    say(joiner, lonely, said)
    assert is_true(find(joiner, fingerprint=lonely.run.fingerprint()), lonely)
    assert is_true(find(joiner, wanted=lonely.id), lonely)
    assert joiner.traffic.refused["record_run"] >= 3


def test_a_false_configuration_under_the_right_run_id_is_passed_over(
    joiner: Node, lonely: Lonely, crowd: list[Stranger]
) -> None:
    false = [lonely.record(config=FALSE), lonely.record(founder="QmStranger")]
    false += [lonely.record(founding_bytes=7), lonely.record(config_bytes=5)]
    say(joiner, lonely, [(who, false[n % 4]) for n, who in enumerate(crowd[:12])])
    assert is_true(find(joiner, wanted=lonely.id), lonely)


def test_without_a_name_what_cannot_be_opened_is_no_second_run(
    joiner: Node, lonely: Lonely, crowd: list[Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.network.runs.run_search.OPEN_S", 3.0)  # all are checked to the end
    say(joiner, lonely, [(who, elsewhere(lonely, FALSE)) for who in crowd[:3]])
    assert is_true(find(joiner), lonely)


def test_the_peer_at_the_address_is_believed_before_any_number_of_records(
    joiner: Node, lonely: Lonely, crowd: list[Stranger]
) -> None:
    lonely.told = encode_record(lonely.record())
    say(joiner, lonely, [(who, elsewhere(lonely, FALSE)) for who in crowd])
    assert is_true(find(joiner), lonely)
    assert not joiner.traffic.refused, "nothing of the DHT was read"


def test_two_true_runs_are_still_a_mismatch_until_one_is_named(
    lasting_peers: Peers, joiner: Node, lonely: Lonely, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "swarm.network.runs.run_search.OPEN_S", 3.0
    )  # strangers' records are still there
    second = Lonely()
    second.start(lasting_peers)
    second.announce()
    with pytest.raises(RunMismatch, match="several runs are announced here"):
        find(joiner)
    assert is_true(find(joiner, wanted=second.id), second)


def test_only_the_founder_says_that_its_run_has_begun(
    lasting_peers: Peers, joiner: Node, lonely: Lonely, crowd: list[Stranger]
) -> None:
    founder = lonely.node
    gathering = lonely.record(
        run="gathering-" + "1" * 32, state=RunState.GATHERING, founding="0" * 64, founding_bytes=0
    )
    say(joiner, lonely, [(who, lonely.record()) for who in crowd[:2]])
    say(joiner, lonely, [(crowd[2], gathering)])
    founder.run(publish(founder, runs_key(founder.peer_id), gathering), WAIT_S)
    mine = peer_record(joiner.peer_id)

    async def scene() -> tuple[RunRecord, tuple[str, ...]]:
        while not any(crowd[0].peer_id in a.publishers for a in await announced_runs(joiner)):
            await asyncio.sleep(0.1)
        waiting = asyncio.ensure_future(await_founding(joiner, gathering, lambda: mine))
        await asyncio.sleep(1.5)
        assert not waiting.done(), "a stranger's word ended the wait"
        lonely.told = encode_record(lonely.record())
        begun = await waiting
        return begun.record, begun.publishers

    assert joiner.run(scene(), WAIT_S) == (lonely.record(), (founder.peer_id,))
    assert joiner.traffic.refused["record_founder"] > 0, "the gathering founder signs it"
