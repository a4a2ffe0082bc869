"""A founder is heard of until manifest 0 is there, however long that takes to make."""

import asyncio

import pytest

from swarm.errors import NetworkDown
from swarm.network import founding
from tests.peer_records import peer_record


def test_a_founder_announces_until_it_is_done_and_through_a_restart_of_its_daemon(monkeypatch):
    said = []

    async def publish(node, key, record):
        said.append("run")
        if len(said) == 1:
            raise NetworkDown("the daemon is being started again")

    async def publish_peer(node, run, record):
        said.append(f"peer in {run}")

    monkeypatch.setattr(founding, "publish", publish)
    monkeypatch.setattr(founding, "publish_peer", publish_peer)
    monkeypatch.setattr(founding, "POLL_S", 0.0)

    async def scene():
        node = type("Node", (), {"peer_id": "QmA"})()
        announcement = type("Announcement", (), {"run": "gathering-1"})()
        task = asyncio.ensure_future(
            founding.keep_gathering(node, announcement, lambda: peer_record("QmA"))
        )
        while len(said) < 5:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scene())
    assert said[:5] == ["run", "run", "peer in gathering-1", "run", "peer in gathering-1"]
