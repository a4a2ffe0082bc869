"""A founder stays announced until manifest 0 is there, even with a slow DHT."""

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from swarm.errors import NetworkDown, NobodyReachable
from swarm.network.runs import run_founding
from swarm.network.runs.signed_invitations import credential_for, invite
from swarm.network.wire.identity import load_or_create_identity
from swarm.protocol.records.records import RunState
from tests.peer_records import peer_record


async def test_a_founder_announces_until_done_even_if_its_daemon_restarts(monkeypatch):
    said = []

    async def publish(node, key, record):
        said.append("run")
        if len(said) == 1:
            raise NetworkDown("the daemon is being started again")

    async def publish_peer(node, run, record):
        said.append(f"peer in {run}")

    monkeypatch.setattr(run_founding, "publish", publish)
    monkeypatch.setattr(run_founding, "publish_peer", publish_peer)
    monkeypatch.setattr(run_founding, "POLL_S", 0.0)
    node = type("Node", (), {"peer_id": "QmA"})()
    announcement = type("Announcement", (), {"run": "gathering-1"})()
    task = asyncio.ensure_future(
        run_founding.keep_gathering(node, announcement, lambda: peer_record("QmA"))
    )
    while len(said) < 5:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert said[:5] == ["run", "run", "peer in gathering-1", "run", "peer in gathering-1"]


class SlowDht:
    """Each kind of call fails the first time: the DHT does not answer, or the daemon is dead."""

    def __init__(self, monkeypatch, answers, error):
        self.answers, self.error, self.asked = answers, error, []
        for name in answers:
            monkeypatch.setattr(run_founding, name, self.call(name))
        monkeypatch.setattr(run_founding, "POLL_S", 0.0)

    def call(self, name):
        async def answer(*_):
            is_first = name not in self.asked
            self.asked.append(name)
            if is_first:
                raise self.error
            return self.answers[name]

        return answer


FAULTS = [NobodyReachable("the DHT did not answer"), NetworkDown("it is being started again")]
NODE = SimpleNamespace(peer_id="QmA")


@pytest.mark.parametrize("error", FAULTS, ids=["silent", "down"])
def test_a_founder_gathers_its_peers_though_the_dht_did_not_answer_at_once(monkeypatch, error):
    answers = {"publish": True, "publish_peer": None, "present_peers": {"QmB": peer_record("QmB")}}
    dht = SlowDht(monkeypatch, answers, error)
    announcement = SimpleNamespace(run="gathering-1", wait_for_peers=2, key="")
    gathered = asyncio.run(run_founding.gather(NODE, announcement, lambda: peer_record("QmA")))
    assert sorted(gathered) == ["QmA", "QmB"]
    assert {"publish", "publish_peer"} <= set(dht.asked)


def test_strangers_that_are_there_first_are_not_gathered(monkeypatch, tmp_path):
    founder, friend, thief = (load_or_create_identity(tmp_path / name) for name in "fgt")
    private = invite(founder, "gathering-1", uses=1, last_round=0)
    other = invite(founder, "gathering-2", uses=1, last_round=0, secret=private.secret)
    shown = credential_for(private, friend)
    records = {
        "QmA": None,  # a stranger with nothing
        thief.peer_id: shown,  # the friend's record
        friend.peer_id: credential_for(other, friend),  # of another founding
    }
    looks = [records, {**records, friend.peer_id: shown}]

    async def present(*_):
        found = looks.pop(0)
        return {
            peer: replace(peer_record(peer), possession=each.possession if each else "")
            for peer, each in found.items()
        }

    monkeypatch.setattr(run_founding, "present_peers", present)
    for name in ("publish", "publish_peer"):
        monkeypatch.setattr(run_founding, name, AsyncMock(return_value=True))
    monkeypatch.setattr(run_founding, "POLL_S", 0.0)
    announcement = SimpleNamespace(run="gathering-1", wait_for_peers=2, key=private.invitation.key)
    node = SimpleNamespace(peer_id=founder.peer_id)
    gathered = asyncio.run(
        run_founding.gather(node, announcement, lambda: peer_record(founder.peer_id))
    )
    assert gathered.keys() == {founder.peer_id, friend.peer_id} and not looks


def lines_of_a_joiner(monkeypatch, caplog, joiner, key, possession, looks, *, then_key=None):
    """A joiner's log, and the reasons in its records, while the run gathers.

    Args:
        joiner: its identity.
        key: of the valid invitation.
        possession: shown by the joiner.
        looks: times at which it looks for the founder's announcement.
        then_key: key with which the founder gathers, under another name, at the last look but one.
    """
    said = SimpleNamespace(
        founder="QmB", name="mine", fingerprint="f", config="c", run="gathering-1",
        state=RunState.GATHERING, wait_for_peers=3, key=key,
    )  # fmt: skip
    again = SimpleNamespace(**{**vars(said), "run": "gathering-2", "key": then_key or key})
    begun = SimpleNamespace(**{**vars(said), "state": RunState.RUNNING, "run": "mine-1"})
    left, published = list(looks), []

    async def runs_of(*_):
        record = begun if len(left) == 1 else again if then_key and len(left) == 2 else said
        left.pop(0)
        return [SimpleNamespace(record=record, publishers=("QmB",))]

    async def publish_peer(node, run, record):
        published.append((run, record.reason))

    monkeypatch.setattr(run_founding, "runs_of", runs_of)
    monkeypatch.setattr(run_founding, "publish_peer", publish_peer)
    monkeypatch.setattr(run_founding, "POLL_S", 0.0)
    monkeypatch.setattr(run_founding, "time", SimpleNamespace(monotonic=lambda: left[0]))
    caplog.clear()
    mine = replace(peer_record(joiner.peer_id), possession=possession, reason="")
    node = SimpleNamespace(peer_id=joiner.peer_id)
    asyncio.run(run_founding.await_founding(node, said, lambda: mine))
    return caplog.messages, published


def test_a_joiner_that_the_founder_does_not_count_says_why_now_and_then(
    monkeypatch, caplog, tmp_path
):
    founder, friend = (load_or_create_identity(tmp_path / name) for name in "fg")
    private = invite(founder, "gathering-1", uses=2, last_round=0)
    key, shown = private.invitation.key, credential_for(private, friend).possession
    told = partial(lines_of_a_joiner, monkeypatch, caplog, friend)

    lines, published = told(key, "", looks=[0.0, 1.0, 2.0, 59.0, 61.0, 62.0, 63.0])
    assert len(lines) == 2 and len(set(lines)) == 1, "once a minute"
    assert "gathers 3 peers" in lines[0] and "--invitation" in lines[0]
    assert {reason for _, reason in published} == {lines[0]}, "the monitor shows it"

    assert told(key, shown, looks=[0.0, 1.0, 2.0]) == ([], [("gathering-1", "")] * 3)
    assert told("", "", looks=[0.0, 1.0, 2.0])[0] == [], "it counts everybody"
    lines, _ = told(key, shown, looks=[0.0, 1.0, 2.0, 3.0], then_key="QmOther")
    assert len(lines) == 1, "its founder has forgotten the invitation"


@pytest.mark.parametrize("error", FAULTS, ids=["silent", "down"])
def test_a_run_begins_for_a_peer_whose_dht_did_not_answer_at_once(monkeypatch, error):
    record = SimpleNamespace(
        founder="QmB", name="mine", fingerprint="f", config="c", run="mine-1",
        state=RunState.RUNNING, key="",
    )  # fmt: skip
    announced = SimpleNamespace(record=record, publishers=("QmB",))
    answers = {"publish_peer": None, "runs_of": [], "announced_runs": [announced]}
    dht = SlowDht(monkeypatch, answers, error)
    found = asyncio.run(run_founding.await_founding(NODE, record, lambda: peer_record("QmA")))
    assert found is announced
    assert dht.asked.count("announced_runs") == 2, "it has looked again"
