"""The page in a real browser: it shows the JSON's values and contacts no other host."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from swarm.monitor.history import with_history
from swarm.monitor.schema import as_json
from swarm.monitor.server import MAX_LISTENERS, Feed
from swarm.monitor.snapshot import PeerRow, Snapshot
from tests.monitor.crowds import STRANGER, crowd, sighting
from tests.monitor.pages import Page, page_of
from tests.monitor.small_swarm import project

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed")
CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

WAIT_MS = 60_000
ROWS = "#peers tbody tr"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


Open = Callable[..., Any]


@pytest.fixture
def visit(chromium: Any) -> Iterator[Open]:
    """Opens a page. Checks at the end that there was no console message and no foreign request."""
    contexts, said, asked = [], [], set()

    def open_page(served: Page, path: str = "", *, width: int = 1400, scheme: str = "dark") -> Any:
        size = {"width": width, "height": 900}
        contexts.append(chromium.new_context(viewport=size, color_scheme=scheme))
        shown = contexts[-1].new_page()
        shown.set_default_timeout(WAIT_MS)
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
        shown.goto(served.url + path)
        shown.wait_for_selector(ROWS)
        return shown

    yield open_page
    for context in contexts:
        context.close()
    assert not said
    assert {host.partition(":")[0] for host in asked} == {"127.0.0.1"} and len(asked) == 1


def feed_of(snapshot: Snapshot) -> Feed:
    feed = Feed(MAX_LISTENERS)
    feed.show(as_json(snapshot))
    return feed


FIVE = crowd(5, 8, 9)


@pytest.fixture
def served() -> Iterator[Page]:
    with page_of(feed_of(FIVE)) as found:
        yield found


def texts(shown: Any, selector: str) -> list[str]:
    found: list[str] = shown.locator(selector).all_text_contents()
    return found


def table(shown: Any, name: str) -> list[list[str]]:
    script = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    found: list[list[str]] = shown.locator(f"#{name} tbody tr").evaluate_all(script)
    return found


def json_of(served: Page) -> Any:
    return json.loads(served.get("/snapshot.json").body)


# ---------------------------------------------------------------- shown values


def check_panels(shown: Any, state: Any) -> None:
    """Checks that every panel shows the JSON's values."""
    assert shown.text_content("#health-word") == state["health"]["word"]
    assert shown.text_content("#health-reason") == state["health"]["reason"]
    assert shown.text_content("#figure-round") == f"{state['round']}/{state['rounds_total']}"
    assert shown.text_content("#figure-val-loss") == f"{state['losses'][-1][1]:.3f}"
    assert shown.text_content("#figure-utilisation") == percent(state["pace"]["utilisation"])
    names = {peer["peer_id"]: peer["name"] for peer in state["peers"]}
    peers = table(shown, "peers")
    assert [row[1] for row in peers] == list(names.values())
    for row, peer in zip(peers, state["peers"], strict=True):
        assert row[2] == peer["state"].replace("_", " ")
        assert row[3] == ("counted" if peer["contributed"] else "left out")
        assert row[13:15] == [str(peer["tokens_lost"]), f"{peer['link']['rtt_ms']:.0f} ms"]
        assert row[6] == peer["manifest_digest"][:8] and row[9] == f"{peer['loss']:.3f}"
    experts = table(shown, "experts")
    keys = "ABCDEFGHIJ"
    for row, expert in zip(experts, state["experts"], strict=True):
        owners = [f"{keys[list(names).index(p)]} {names[p]}" for p in expert["owners"]]
        assert row[:2] == [str(expert["expert"]), ", ".join(owners)]
        assert row[3] == str(expert["version"]) and row[7] == str(expert["nearest"])
    losses = {int(row[0]): row[1] for row in table(shown, "losses")}
    assert losses == {k: f"{loss:.3f}" for k, loss in state["losses"]}
    assert len(table(shown, "rounds")) == len(state["rounds"])
    merges = [(row[0], row[2]) for row in table(shown, "merges")]
    assert merges == [(str(m["merged"]), str(m["step"])) for m in reversed(state["merges"])]
    said = [
        (row[0], float(row[2]), row[4], "no member" in row[5]) for row in table(shown, "scores")
    ]
    assert said and said == [
        (score["task"], pytest.approx(score["value"], abs=1e-4), str(score["round"]), not member)
        for score in state["scores"]
        for member in (score["member"],)
    ]
    assert len(texts(shown, "#events li")) == len(state["events"])
    phases = {row[0][2:]: row for row in table(shown, "phases-table")}
    for peer in state["peers"]:
        last = peer["last_round"]
        assert phases[peer["name"]][2] == ("yes" if last["counted"] else f"no: {last['why_not']}")
    assert texts(shown, "#causes li b") == [cause["fault"] for cause in state["causes"]]
    assert texts(shown, "#causes li span") == [cause["text"] for cause in state["causes"]]
    assert shown.locator("#wrong").is_visible() == bool(state["causes"])
    assert f"of lap {state['coverage']['laps'] + 1}, of {state['coverage']['windows']}" in (
        shown.text_content("#text-said")
    )
    assert state["peers"][0]["addresses"][0] in shown.text_content("#join")


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def test_every_panel_says_what_the_json_says_also_after_changes(visit: Open) -> None:
    found, seen = [], None
    for round_ in range(5, 12):
        snapshot = project(sighting(4, 8, round_))
        seen = with_history(snapshot, seen)
        # An absent owner's name is unknown. Another test covers this.
        if not snapshot.absent:
            found.append(as_json(seen))
    feed = Feed(MAX_LISTENERS)
    feed.show(found[-3])
    with page_of(feed) as served:
        shown = visit(served)
        check_panels(shown, json_of(served))
        for snapshot_json in found[-2:]:
            feed.show(snapshot_json)
            round_now = str(snapshot_json["round"])
            shown.wait_for_selector(f"html[data-round='{round_now}']")
            state = json_of(served)
            assert json.loads(shown.evaluate("JSON.stringify(swarmState())")) == state
            check_panels(shown, state)


HOSTILE = {
    "<img src=x onerror=alert(1)>": "<img src=x onerror=alert(1)>",
    "\x1b[31mred\x07": "\\x1b[31mred\\x07",
    "\u202elive\u2066 \u200b": "\\u202elive\\u2066 \\u200b",
    "a\u00a0b\u2028c\td": "a\\xa0b\\u2028c\\td",
}


def test_what_peers_say_is_shown_as_text(visit: Open) -> None:
    snapshot = crowd(4, 8, 9)
    rows = []
    for row, text in zip(snapshot.peers, HOSTILE, strict=True):
        record = dataclasses.replace(row.record, name=text, reason=text, version=text)
        rows.append(dataclasses.replace(row, record=record))
    with page_of(feed_of(dataclasses.replace(snapshot, peers=tuple(rows), reasons=()))) as served:
        shown = visit(served)
        expected = list(HOSTILE.values())
        assert [row[1] for row in table(shown, "peers")] == expected
        assert [row[-1] for row in table(shown, "peers")] == expected
        assert texts(shown, "#why li span") == expected
        assert shown.locator("img").count() == 0


def test_an_absent_owner_is_named_and_its_experts_are_not_well(visit: Open) -> None:
    snapshot = crowd(4, 8, 9)
    gone = snapshot.peers[0].record.peer_id
    without = dataclasses.replace(snapshot, peers=snapshot.peers[1:], absent=(gone,))
    with page_of(feed_of(without)) as served:
        shown = visit(served)
        alone = [r for r in table(shown, "experts") if r[5] == "no owner present"]
        assert alone and all(gone[-6:] in row[1] for row in alone)
        assert shown.text_content("#peers-note") == "3 present, 1 of 4 members absent"


def test_a_stranger_has_a_row_and_changes_no_panel(visit: Open) -> None:
    snapshot = crowd(4, 8, 8)
    first = snapshot.peers[0].record
    assert first.routing and first.last_round
    forged = dataclasses.replace(
        first,
        peer_id=STRANGER,
        name="stranger",
        addresses=("/ip4/203.0.113.7/tcp/1",),
        routing=dataclasses.replace(first.routing, shares=(1000,) * 8, pairs=((0, 1, 1000),)),
        last_round=dataclasses.replace(first.last_round, phases={"forged": 9999.0}),
    )
    row = PeerRow(forged, snapshot.peers[0].agreement, contributed=False)
    undialled = [
        dataclasses.replace(known, record=dataclasses.replace(known.record, addresses=()))
        for known in snapshot.peers
    ]
    feed, said = Feed(MAX_LISTENERS), []
    feed.show(as_json(dataclasses.replace(snapshot, peers=tuple(undialled))))
    with page_of(feed) as served:
        shown = visit(served)
        for present, note in (((), "4 present"), ((row,), "5 present, 1 no member")):
            feed.show(as_json(dataclasses.replace(snapshot, peers=(*undialled, *present))))
            shown.wait_for_selector(f"{ROWS}:nth-child({4 + len(present)})")
            assert shown.text_content("#peers-note") == note
            panels = ("#phases-said", "#phases-legend", "#join", "#figures", "#map-said")
            tables = (table(shown, "experts"), table(shown, "phases-table"))
            said.append((tables, [shown.text_content(panel) for panel in panels]))
    assert said[0] == said[1]


# ---------------------------------------------------------------- accessibility


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("width", [1400, 390])
def test_axe_finds_nothing_serious(visit: Open, served: Page, scheme: str, width: int) -> None:
    shown = visit(served, scheme=scheme, width=width)
    for details in shown.locator("details").all():
        details.locator("summary").click()
    shown.wait_for_selector("#glossary dt")
    found = axe.Axe().run(shown).response["violations"]
    assert [(v["id"], [n["html"] for n in v["nodes"]]) for v in found if is_grave(v)] == []


def is_grave(violation: Any) -> bool:
    return violation["impact"] in ("serious", "critical")


def test_a_phone_need_not_scroll_sideways(visit: Open, served: Page) -> None:
    shown = visit(served, width=390)
    assert shown.evaluate("document.documentElement.scrollWidth") == 390


def test_the_map_answers_to_the_keyboard(visit: Open, served: Page) -> None:
    shown = visit(served)
    assert shown.text_content("#map-said").startswith("8 experts: ")
    shown.focus("#map")
    shown.keyboard.press("ArrowRight")
    first = json_of(served)["experts"][0]
    said = shown.text_content("#map-said")
    assert said.startswith("Expert 0, ") and f"like expert {first['nearest']} at" in said
    shown.keyboard.press("ArrowDown")
    assert "‰ of those of A " in shown.text_content("#map-said")
    shown.keyboard.press("Escape")
    assert shown.text_content("#map-said").startswith("8 experts: ")


def test_the_scheme_is_the_readers_choice_and_is_kept(visit: Open, served: Page) -> None:
    shown = visit(served, scheme="light")
    schemes = []
    for _ in range(3):
        schemes.append(shown.get_attribute("html", "data-scheme"))
        shown.click("#theme")
    assert schemes == ["light", "dark", "light"], "auto, dark, light"
    shown.click("#theme")
    shown.reload()
    shown.wait_for_selector(ROWS)
    assert shown.get_attribute("html", "data-scheme") == "dark"


# ---------------------------------------------------------------- addresses


def test_the_page_works_behind_a_prefix(visit: Open) -> None:
    with page_of(feed_of(FIVE), prefix="/some/where") as served:
        shown = visit(served, "some/where/")
        assert len(table(shown, "peers")) == 5
        assert shown.locator("#loss canvas").count() == 1


@pytest.mark.parametrize(("peers", "experts"), [(50, 128), (256, 256)])
def test_a_large_run_is_drawn_whole(visit: Open, peers: int, experts: int) -> None:
    with page_of(feed_of(crowd(peers, experts, 61, seen_rounds=1))) as served:
        shown = visit(served)
        assert len(table(shown, "peers")) == len(json_of(served)["peers"])
        assert len(table(shown, "experts")) == experts


def test_a_page_finds_the_monitor_again(chromium: Any) -> None:
    """A separate test, because the browser writes a console message for each attempt."""
    shown = chromium.new_page()
    shown.set_default_timeout(WAIT_MS)
    with page_of(feed_of(FIVE)) as served:
        shown.goto(served.url)
        shown.wait_for_selector(ROWS)
    shown.wait_for_selector("#health[data-word=unreachable]")
    assert shown.locator(ROWS).count() == 5, "known values stay"
    with page_of(feed_of(crowd(5, 8, 10)), port=served.port):
        shown.wait_for_selector("html[data-round='10']")
        assert shown.get_attribute("#health", "data-word") != "unreachable"
    shown.close()
