"""What listeners are sent: the whole at first, then what turns it into the newest."""

import asyncio
import itertools
import json
from collections.abc import Mapping
from typing import Any, cast

import pytest

from swarm.monitor.feed import KEPT, ROWS, Feed, difference
from swarm.monitor.history import with_history
from swarm.monitor.schema import SnapshotJson, as_json
from swarm.monitor.snapshot import snapshot_of
from tests.monitor.crowds import sighting


def snapshots(rounds: range) -> list[dict[str, Any]]:
    seen, found = None, []
    for round_ in rounds:
        snapshot = snapshot_of(sighting(6, 16, round_))
        assert snapshot is not None
        seen = with_history(snapshot, seen)
        found.append(json.loads(json.dumps(as_json(seen))))
    return found


def changed(state: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """What the page does with a change, see `web/state.js`."""
    found = {**state, **change["set"]}
    for field, told in change["rows"].items():
        rows = {row[ROWS[field]]: row for row in (*state[field], *told["rows"])}
        order = told.get("order", [row[ROWS[field]] for row in state[field]])
        found[field] = [rows[name] for name in order]
    for field, tail in change["tails"].items():
        found[field] = [*state[field][tail["cut"] :], *tail["add"]]
    return found


def read(text: str) -> tuple[str, dict[str, Any]]:
    kind, _, data = text.removesuffix("\n\n").partition("\n")
    return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def show(feed: Feed, snapshot: Mapping[str, Any]) -> None:
    feed.show(cast(SnapshotJson, snapshot))


def test_a_change_turns_each_snapshot_into_the_next() -> None:
    found = snapshots(range(1, 12))
    for before, after in itertools.pairwise(found):
        assert changed(before, json.loads(json.dumps(difference(before, after)))) == after
        assert difference(after, after) == {"set": {}, "rows": {}, "tails": {}}


def test_only_what_changed_is_sent() -> None:
    before = snapshots(range(1, 8))[-1]
    peers = [dict(peer) for peer in before["peers"]]
    peers[2]["tokens_per_s"] = 1.0
    event = {"at": 1.0, "topic": "peer", "text": "x"}
    after = {**before, "peers": peers, "events": [*before["events"][2:], event]}
    assert difference(before, after) == {
        "set": {},
        "rows": {"peers": {"rows": [peers[2]]}},
        "tails": {"events": {"cut": 2, "add": [event]}},
    }


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_no_event_has_a_number_that_a_browser_would_not_read(number: float) -> None:
    feed, (first,) = Feed(2), snapshots(range(3, 4))
    show(feed, {**first, "at": number})
    with pytest.raises(ValueError, match="not JSON compliant"):
        feed.since(None)
    show(feed, first)
    assert read(feed.since(None)[1]) == ("snapshot", first)


@pytest.mark.parametrize("field", ["events", "rounds", "losses"])
def test_a_history_that_does_not_go_on_is_sent_anew(field: str) -> None:
    before = snapshots(range(1, 8))[-1]
    for other in ([], before[field][::-1], [before[field][0]]):
        after = {**before, field: other}
        assert changed(before, difference(before, after)) == after


def test_a_listener_is_told_the_whole_then_changes_and_the_whole_again_when_it_was_slow() -> None:
    feed, found = Feed(2), snapshots(range(1, 5 + KEPT))
    version, text = feed.since(None)
    assert read(text) == ("snapshot", dict(feed.state)) and list(feed.state) == ["health"]
    assert feed.since(version) == (version, "")
    show(feed, found[0])
    version, text = feed.since(version)
    assert read(text) == ("snapshot", found[0])
    show(feed, found[1])
    show(feed, found[2])
    slow = version
    version, text = feed.since(version)
    kind, change = read(text)
    assert kind == "change" and changed(found[0], change) == found[2]
    for snapshot in found[3 : 3 + KEPT]:
        show(feed, snapshot)
    assert read(feed.since(slow)[1])[0] == "snapshot"
    assert read(feed.since(version)[1])[0] == "change"


def test_a_look_that_failed_changes_only_the_health() -> None:
    feed, (first,) = Feed(2), snapshots(range(3, 4))
    feed.lose("nobody")
    assert feed.state == {"health": {"word": "unreachable", "reason": "nobody"}}
    show(feed, first)
    version, _ = feed.since(None)
    feed.lose("nobody")
    kind, change = read(feed.since(version)[1])
    health = {"word": "unreachable", "reason": "nobody"}
    assert (kind, change) == ("change", {"set": {"health": health}, "rows": {}, "tails": {}})
    assert feed.state == first | {"health": health}


def test_listeners_are_woken_from_another_thread_and_limited() -> None:
    (first,) = snapshots(range(3, 4))

    async def listen() -> None:
        feed = Feed(2)
        mine, other = feed.listen(), feed.listen()
        assert mine and other and feed.listen() is None
        await asyncio.to_thread(show, feed, first)
        async with asyncio.timeout(60):
            await mine[1].wait()
        feed.leave(other)
        assert feed.listeners == 1 and feed.listen() is not None
        mine[1].clear()
        feed.close()
        async with asyncio.timeout(60):
            await mine[1].wait()

    asyncio.run(listen())
