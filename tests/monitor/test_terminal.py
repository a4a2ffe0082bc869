"""The live view shows the facts in the available space, and parses no foreign markup."""

import dataclasses
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from swarm.monitor import terminal
from swarm.monitor.snapshot import Coverage, Snapshot
from swarm.monitor.terminal import EMPTY, braille, render
from swarm.protocol.records.records import PeerState, RoutingFigures, WorkersFigures
from tests.monitor.small_swarm import manifest, snapshot_with
from tests.peer_records import peer_record

SIZES = [(80, 24), (140, 40), (200, 60)]


def shown(snapshot: Snapshot, width: int = 80, height: int = 24, *, styled: bool = False) -> str:
    console = Console(
        width=width,
        height=height,
        force_terminal=True,
        color_system="standard",
        record=True,
        file=io.StringIO(),
        legacy_windows=False,
    )
    console.print(render(snapshot, width=width, height=height))
    return console.export_text(styles=styled)


SMALL = snapshot_with(tip=manifest())
CROWD = snapshot_with(
    peers={
        f"Qm{k:03}": peer_record(f"Qm{k:03}", owned_experts=(3 * k, 3 * k + 1, 3 * k + 2))
        for k in range(60)
    }
)


def test_an_expert_without_an_owner_is_shown_to_wait() -> None:
    found = snapshot_with(tip=manifest(owners={0: ("QmA",), 1: (), 2: ()}))
    assert terminal.NO_OWNER in shown(found)
    (line,) = terminal.experts_map(found, terminal.keys_of(found.peers), 80, 1)
    assert "wait 1-2" in line.plain


def test_the_small_screen_shows_every_kind_of_fact() -> None:
    screen = shown(SMALL)
    for fact in (
        "demo-1",
        "generation 0",
        "round 6/8",
        f"tip {SMALL.manifest_digest[:8]}",
        "0 of 3 equal",
        "name…f-QmA",
        "catching up",
        "99999999",
        "2.345",
        "4.1k",
        "12.3M",
        "23.5M",
        "held-out loss  2.310, rounds 1-5",
        "held out  1.666 bits per byte",
        "a round  2.2MB out, 2.3MB in, mean",
        "merge 2  step 200, alpha 0.0333",
        "layer 0: 0<1,2 1<0,2 2<1,0",
        "2 steps skipped",
        "refused: non_finite 1, size 3",
        "why expert 1: QmB joined",
        "round 5 decided by 4 of 4 members",
    ):
        assert fact in screen, fact


def test_the_map_says_who_owns_which_expert_in_which_version() -> None:
    lines = shown(SMALL).splitlines()
    row = next(k for k, line in enumerate(lines) if line.startswith("experts  "))
    assert [line.rstrip() for line in lines[row : row + 3]] == [
        "experts  0  1  2",
        "owner    A  AB ?",
        "version  4  5  6",
    ]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_view_fits_the_screen(width: int, height: int) -> None:
    for some in (SMALL, CROWD):
        lines = shown(some, width, height).splitlines()
        assert len(lines) <= height
        assert max(len(line) for line in lines) <= width


def test_peers_that_do_not_fit_are_counted() -> None:
    screen = shown(CROWD)
    visible = sum("training" in line for line in screen.splitlines())
    assert 3 <= visible < 60
    assert f"and {60 - visible} more peers" in screen
    assert "why 60 peers: round 5 decided" in screen


def test_too_many_experts_for_a_map_are_ranges() -> None:
    assert "experts  A 0-2  B 3-5  C 6-8" in shown(CROWD)


def test_a_different_digest_is_alarming_and_an_equal_one_is_not() -> None:
    peers = {peer: peer_record(peer) for peer in ("QmA", "QmB", "QmC")}
    found = snapshot_with(peers=peers)
    assert "DIFFERENT" not in shown(found)
    assert "\x1b[1;37;41m" not in shown(found, styled=True)
    peers["QmC"] = peer_record("QmC", manifest_digest="cd" * 32)
    found = snapshot_with(peers=peers)
    assert "2 of 3 equal, 1 DIFFERENT" in shown(found)
    assert "\x1b[1;37;41mcdcdcdcd" in shown(found, styled=True)


def test_markup_in_a_name_or_reason_is_shown_and_not_obeyed() -> None:
    hostile = peer_record("QmA", name="[red]x[/]", reason="[link=http://x]click[/link] me")
    found = snapshot_with(peers={"QmA": hostile})
    screen = shown(found)
    assert "[red]x[/]" in screen and "[link=http://x]click[/link] me" in screen


def test_long_peer_ids_in_reasons_become_keys() -> None:
    known, gone = "12D3KooW" + "a" * 44, "12D3KooW" + "b" * 38 + "cdefgh"
    reason = f"expert 7: {gone} left, adopted by {known}, load 3/4"
    found = snapshot_with(peers={known: peer_record(known, reason=reason)})
    assert "why A expert 7: …cdefgh left, adopted by A, load 3/4" in shown(found)


def test_a_run_that_has_not_begun_is_shown_too() -> None:
    fresh = peer_record(
        "QmA", height=0, round=0, owned_experts=(), loss=None, val_loss=None,
        state=PeerState.STARTING, tokens_per_s=0.0, reason="",
    )  # fmt: skip
    found = snapshot_with(peers={"QmA": fresh}, merges={}, validations={})
    screen = shown(found)
    assert "round 0/8" in screen and "held-out loss: none yet" in screen
    assert "no experts are known yet" in screen


def test_one_loss_is_a_curve_of_one_point() -> None:
    lines = terminal.loss_plot(((1, 2.5),), 40, 5)
    assert len(lines) == 5 and "2.500" in lines[0].plain


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (812, "812"),
        (999, "999"),
        (999.6, "1.0k"),
        (1000, "1.0k"),
        (16_240, "16.2k"),
        (99_949, "99.9k"),
        (99_960, "100k"),
        (999_600, "1.0M"),
        (3.1e6, "3.1M"),
        (2.5e9, "2.5G"),
        (7e12, "7.0T"),
        (7e15, "7P"),
    ],
)
def test_amounts_have_at_most_five_characters(value: float, text: str) -> None:
    assert terminal.amount(value) == text and len(text) <= 5


def test_ranges_are_short() -> None:
    assert terminal.ranges([]) == ""
    assert terminal.ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_keys_stay_distinct_beyond_the_alphabet() -> None:
    keys = terminal.keys_of(CROWD.peers)
    assert len({key.plain for key in keys.values()}) == 60
    assert isinstance(keys["Qm000"], Text) and keys["Qm000"].plain == "A"


def test_how_tokens_were_spread_is_summed_up_over_the_peers() -> None:
    peers = {
        "QmA": peer_record("QmA", routing=RoutingFigures(1.25, 0, 0.01, None), grad_spikes=2),
        "QmB": peer_record("QmB", routing=RoutingFigures(2.5, 3, 0.05, 0.5)),
        "QmC": peer_record("QmC"),
    }
    found = snapshot_with(peers=peers)
    screen = shown(found, 140, 40)
    assert "busiest expert  2.50x, 3 idle, 3.0% dropped, similarity 0.50" in screen
    assert "2 spikes" in screen
    without = snapshot_with(peers={"QmC": peer_record("QmC")})
    assert "busiest" not in shown(without, 140, 40)


def test_what_the_workers_of_a_peer_wait_for_is_a_line() -> None:
    workers = WorkersFigures(4, 3.9, {"sums": 0.06}, 0.21, 0.16, (3,), 2, "worker 2\n is slow")
    peers = {"QmA": peer_record("QmA", name="node", workers=workers), "QmB": peer_record("QmB")}
    found = snapshot_with(peers=peers)
    lines = [line.plain for line in terminal.fact_lines(found, 200) if "workers" in line.plain]
    told = "workers  node: 4, 3.9 s a step, 6% between workers, bubble 21% (16% with even stages)"
    assert lines == [f"{told}, fewer micro-batches: 3; worker 2\\n is slow"]
    assert "workers  node: 4, 3.9 s a step" in shown(found, 140, 40)


def test_a_line_says_how_much_of_the_text_was_read() -> None:
    assert "of lap" not in shown(SMALL, 140, 40)
    read = dataclasses.replace(SMALL, coverage=Coverage(1000, 2372, 100, 0))
    assert "text  37.2% of lap 3, 10.0% being read" in shown(read, 140, 40)
    assert "% open" not in shown(read, 140, 40)
    read = dataclasses.replace(SMALL, coverage=Coverage(1000, 2372, 100, 4))
    assert "text  37.2% of lap 3, 10.0% being read, 0.4% open" in shown(read, 140, 40)


def test_the_first_rounds_do_not_flatten_the_curve_of_a_long_run() -> None:
    losses = [(k, 5.5 if k < 20 else 2.0 - k / 100) for k in range(100)]
    lines = [line.plain for line in terminal.loss_plot(losses, 80, 8)]
    assert "rounds 50-99" in lines[0]
    assert float(lines[1].split()[0]) == 1.5, "the top of the axis"
    assert len({line.index(max(line[7:])) for line in lines[1:]}) > 3, "the curve goes down"


def test_a_decision_that_is_too_long_for_a_line_goes_on_below() -> None:
    reason = "round 8 decided by 4 of 4 members: " + " ".join(f"word{k}" for k in range(15))
    found = snapshot_with(peers={"QmA": peer_record("QmA", reason=reason)})
    lines = shown(found).splitlines()
    assert lines[-1].startswith("    ") and lines[-1].rstrip().endswith("word14")
    assert max(map(len, lines)) <= 80 and len(lines) <= 24


points = st.lists(
    st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=30
).map(sorted)


def dots(lines: list[str]) -> int:
    return sum((ord(cell) - EMPTY).bit_count() for line in lines for cell in line)


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    lines = braille([(0, 1), (1, 0)], 4, 2)
    assert lines == ["⠑⢄⠀⠀", "⠀⠀⠑⢄"]


def test_a_flat_line_is_at_the_top_and_as_wide_as_the_plot() -> None:
    assert braille([(0, 3), (9, 3)], 3, 1) == ["⠉⠉⠉"]


def test_one_point_is_one_dot_and_none_is_none() -> None:
    assert dots(braille([(5, 5)], 4, 3)) == 1
    assert dots(braille([], 4, 3)) == 0


@given(points, st.integers(1, 40), st.integers(1, 10))
def test_the_plot_has_the_asked_size_and_touches_its_edges(
    values: list[tuple[float, float]], width: int, height: int
) -> None:
    lines = braille(values, width, height)
    assert len(lines) == height and {len(line) for line in lines} == {width}
    assert all(EMPTY <= ord(cell) < EMPTY + 256 for line in lines for cell in line)
    assert dots(lines) >= 1
    assert any(ord(cell) != EMPTY for cell in lines[0])
