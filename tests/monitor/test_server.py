"""The page's routes: their answers, access, sizes, and no foreign content."""

import asyncio
import contextlib
import hashlib
import http.client
import itertools
import json
import re
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from swarm.errors import ConfigError
from swarm.monitor.history import with_history
from swarm.monitor.schema import SnapshotJson, as_json
from swarm.monitor.server import (
    KEPT,
    MAX_LISTENERS,
    ROWS,
    WEB,
    Feed,
    difference,
    listening_socket,
    names_this_machine,
)
from tests.monitor.crowds import crowd, sighting
from tests.monitor.pages import WAIT_S, Page, page_of
from tests.monitor.small_swarm import project

FIRST_PAINT_BYTES = 1_000_000
BYTES_PER_S = 200_000
LOOK_S = 2.0
"""Between two looks. No page needs everything again after a shorter time."""
VENDORED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot-LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""SHA-256 of the files of uPlot 1.6.32, as in its package."""
ROUTES = ("/", "/snapshot.json", "/metrics", "/favicon.ico", "/glossary.json", "/static/app.js")


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    feed = Feed(MAX_LISTENERS)
    feed.show(as_json(crowd(4, 8, 9)))
    with page_of(feed) as served:
        yield served


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_answers_with_the_same_strict_headers(page: Page, path: str) -> None:
    answer = page.get(path)
    assert answer.status == 200 and answer.body
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';") and "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "server" not in answer.headers


def test_the_snapshot_is_what_json_prints(page: Page) -> None:
    assert json.loads(page.get("/snapshot.json").body) == json.loads(json.dumps(page.feed.state))


def test_before_the_first_look_the_page_is_there_and_says_so() -> None:
    with page_of() as served:
        assert served.get("/").status == 200
        answer = served.get("/snapshot.json")
        assert answer.status == 503
        assert json.loads(answer.body)["health"]["word"] == "unreachable"
        text = served.get("/metrics").body.decode()
        assert 'swarm_health{word="unreachable"} 1.0' in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/snapshot.json", "/events", "/static/app.js"])
def test_nothing_but_get_is_answered(page: Page, method: str, path: str) -> None:
    answer = page.get(path, method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("path", ["/static/../feed.py", "/static/%2e%2e/feed.py", "/nothing"])
def test_no_other_file_is_served(page: Page, path: str) -> None:
    assert page.get(path).status == 404


def line_of(answer: http.client.HTTPResponse, start: bytes) -> bytes:
    while not (line := answer.readline()).startswith(start):
        assert line, "the stream ended"
    return line.removeprefix(start)


def test_a_listener_gets_the_history_at_once_and_then_what_changes() -> None:
    feed = Feed(MAX_LISTENERS)
    first, second = (json.loads(json.dumps(as_json(crowd(4, 8, k)))) for k in (9, 10))
    feed.show(first)
    with page_of(feed) as served, served.open("/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert line_of(answer, b"event: ") == b"snapshot\n"
        assert json.loads(line_of(answer, b"data: ")) == first
        assert first["losses"] and first["rounds"] and first["events"]
        feed.show(second)
        assert line_of(answer, b"event: ") == b"change\n"
        assert json.loads(line_of(answer, b"data: "))["set"]["round"] == 10


def test_listeners_are_limited_and_one_that_goes_makes_room() -> None:
    feed = Feed(3)
    with page_of(feed) as served, contextlib.ExitStack() as others:
        for _ in range(2):
            line_of(others.enter_context(served.open("/events")), b"event: ")
        with served.open("/events") as answer:
            line_of(answer, b"event: ")
            refused = served.get("/events")
            assert refused.status == 503 and refused.headers["retry-after"]
        deadline = time.monotonic() + WAIT_S
        while feed.listeners == 3:
            assert time.monotonic() < deadline, "the listener that went is still counted"
            time.sleep(0.05)
        with served.open("/events") as answer:
            assert answer.status == 200


@pytest.mark.parametrize(("peers", "experts"), [(50, 128), (256, 256)])
def test_a_large_run_stays_within_what_the_page_may_load(peers: int, experts: int) -> None:
    files = sum(path.stat().st_size for path in WEB.rglob("*") if path.is_file())
    feed = Feed(MAX_LISTENERS)
    feed.show(as_json(crowd(peers, experts, 61, seen_rounds=1)))
    version, first = feed.since(None)
    assert files + len(first) < FIRST_PAINT_BYTES, (files, len(first))
    # A peer renews its record at least every 8 s. If all did so at each look, the rate would be:
    feed.show(as_json(crowd(peers, experts, 62, seen_rounds=1)))
    _, change = feed.since(version)
    assert len(change) / (8.0 if peers > 50 else LOOK_S) < BYTES_PER_S, len(change)


def test_vendored_files_are_those_of_their_package() -> None:
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (WEB / "vendor").iterdir()
    }
    assert found == VENDORED


def test_the_page_names_no_other_address_and_makes_no_markup_of_text() -> None:
    ours = [path for path in WEB.iterdir() if path.is_file()]
    assert {path.suffix for path in ours} == {".html", ".js", ".css", ".svg"}
    for path in ours:
        text = path.read_text()
        text = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|(src|href)=[\"']/", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        assert not re.search(r"style=[\"']|<style|onclick=[\"']", text), "refused by the policy"
        assert text.count("\n") < 260, path.name


def test_a_port_in_use_is_told_in_one_line() -> None:
    bound = listening_socket("127.0.0.1", 0)
    bound.listen()
    try:
        with pytest.raises(ConfigError, match="another port"):
            listening_socket("127.0.0.1", bound.getsockname()[1])
    finally:
        bound.close()


def test_the_pages_files_are_in_the_wheel() -> None:
    """Each kind of file below web/ is named in pyproject.toml."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for path in WEB.rglob("*"):
        if path.is_file():
            folder = path.parent.relative_to(WEB.parent).as_posix()
            pattern = f"{folder}/*{path.suffix}" if path.suffix else f"{folder}/*LICENSE"
            assert f'"{pattern}"' in text, path


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("localhost", 200),
        ("page.localhost:80", 200),
        (socket.gethostname().upper(), 200),
        ("evil.example:8080", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
        ("\xff", 421),
    ],
)
def test_a_page_of_others_whose_name_leads_here_reads_nothing(
    page: Page, host: str, status: int
) -> None:
    """DNS rebinding: for the browser it is one site, whose name now has this machine's address."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=WAIT_S)
    connection.putrequest("GET", "/snapshot.json", skip_host=True)
    connection.putheader("Host", host.encode("latin-1"))
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == status or (host == "\xff" and answer.status == 400), body
    assert status == 200 or b"peers" not in body


def test_the_name_that_was_given_to_listen_on_is_this_machines() -> None:
    assert names_this_machine("Monitor.Example:8080", "monitor.example")
    assert not names_this_machine("monitor.example", "localhost")


def snapshots(rounds: range) -> list[dict[str, Any]]:
    seen, found = None, []
    for round_ in rounds:
        seen = with_history(project(sighting(6, 16, round_)), seen)
        found.append(json.loads(json.dumps(as_json(seen))))
    return found


def changed(state: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """The state of the page after a change; see `web/state.js`."""
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
