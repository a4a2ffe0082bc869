"""Checks a joiner's link against the run, before any download."""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from swarm.errors import LinkTooSlow, Unreachable
from swarm.model.cost import cost_of
from swarm.network.node.node import Node
from swarm.network.wire.link_health import MAX_FULL, LinkHealth
from swarm.network.wire.upload_rate import agreed_mbit
from swarm.peer.start import link_monitor
from swarm.peer.start.link_monitor import (
    ASKED,
    TRIES,
    measure_full_uplink,
    measured_rates,
    require_link,
    verdict_for,
)
from swarm.protocol.records.records import PeerRecord
from swarm.protocol.timing import fitness
from swarm.protocol.timing.fitness import HOME_MBIT, Fitness
from swarm.protocol.timing.pace import DAY_S
from tests.peer_records import peer_record
from tests.protocol.round_pump import found, make_rules
from tests.train.runs import tiny_run

RUN = tiny_run()
TIP = found(make_rules(), ["A", "B"])
PHASE = RUN.phase_at(0)
LOCAL_TOKENS = PHASE.local_steps * PHASE.batch_tokens
ROUND_S = 100.0
NEEDED_MBIT = cost_of(RUN, 3).bytes_sent_per_peer_per_round * 8 / 1e6 / ROUND_S


def record(*, listens: bool = True, tokens_per_s: float = LOCAL_TOKENS / ROUND_S) -> PeerRecord:
    address = ("/ip4/10.0.0.1/tcp/1/p2p/Qm",) if listens else ()
    return peer_record("QmA", addresses=address, tokens_per_s=tokens_per_s)


@pytest.mark.parametrize(
    ("times_needed", "fitness"),
    [(1.01, Fitness.ENOUGH), (0.99, Fitness.SLOW), (0.34, Fitness.SLOW), (0.33, Fitness.HOPELESS)],
)
def test_the_verdict_is_by_what_one_peer_more_moves_in_a_round(
    times_needed: float, fitness: Fitness
) -> None:
    rate_mbit = times_needed * NEEDED_MBIT
    verdict = verdict_for(RUN, TIP, {"A": record(), "B": record()}, (1e6, rate_mbit))
    assert verdict.fitness is fitness, verdict.text
    assert verdict.needed_mbit == pytest.approx(NEEDED_MBIT)


@pytest.mark.parametrize(
    ("times_needed", "share", "times"),
    [(1.0, "50%", "32.3"), (0.25, "20%", "129"), (32.0, "97%", "1.01"), (33.0, None, "")],
)
def test_how_far_a_run_does_not_fit_the_link_is_said_in_the_same_line(
    times_needed: float, share: str | None, times: str
) -> None:
    """With blocking rounds, 97 % needs 0.97 / 0.03 times a round's transfer time."""
    rate_mbit = times_needed * NEEDED_MBIT
    text = verdict_for(RUN, TIP, {"A": record(), "B": record()}, (None, rate_mbit)).text
    needed = NEEDED_MBIT * 0.97 / 0.03
    said = (
        f"; so the peer computes {share} of the time, and 97% needs {needed:.3g} Mbit/s each way, "
        f"{times} times as much, or other settings (swarm-plan --link)"
    )
    assert text.endswith(said) if share else "of the time" not in text


def test_before_anybody_has_trained_nothing_is_held_against_a_link() -> None:
    verdict = verdict_for(RUN, TIP, {"A": record(tokens_per_s=0.0)}, (1e-9, 1e-9))
    assert verdict.fitness is Fitness.UNKNOWN
    require_link(verdict)


def test_a_round_of_an_agreed_time_lasts_that_long_for_any_peer() -> None:
    """It is not the time of `local_steps`, and is known before anybody has trained."""
    run = tiny_run(round={"seconds": ROUND_S}, optimizer={"schedule_steps": 100})
    for peer in (record(), record(tokens_per_s=1e9), record(tokens_per_s=0.0)):
        verdict = verdict_for(run, TIP, {"A": peer}, (1e6, NEEDED_MBIT / 2))
        assert verdict.fitness is Fitness.SLOW, verdict.text
        assert f"trains for {ROUND_S:.3g} s" in verdict.text


def test_a_hopeless_link_is_refused_with_its_numbers_and_a_slow_one_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    present = {"A": record()}
    hopeless = verdict_for(RUN, TIP, present, (NEEDED_MBIT / 10, None))
    with pytest.raises(LinkTooSlow, match=r"Mbit/s down; a round moves .* Mbit/s are needed"):
        require_link(hopeless)
    with caplog.at_level(logging.WARNING):
        require_link(verdict_for(RUN, TIP, present, (NEEDED_MBIT / 2, None)))
    assert "link=slow" in caplog.text


def test_the_best_rate_to_a_few_peers_that_listen_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow or silent peer is no evidence about this machine's link."""
    rates = {("A", True): 5.0, ("B", True): 9.0, ("A", False): 3.0}
    asked = []

    async def measure(_: Node, peer: str, *, is_down: bool, **limits: object) -> float:
        asked.append(peer)
        if (peer, is_down) not in rates:
            raise Unreachable(peer)
        return rates[peer, is_down]

    async def uplink(node: Node, peer: str, **limits: object) -> tuple[float, None]:
        return await measure(node, peer, is_down=False), None

    monkeypatch.setattr(link_monitor, "measure_mbit", measure)
    monkeypatch.setattr(link_monitor, "measure_uplink", uplink)
    node = cast(Node, SimpleNamespace(peer_id="me", lines=LinkHealth()))
    present = {"0": record(listens=False), "A": record(), "B": record(), "me": record()}
    assert asyncio.run(measured_rates(node, present)) == (9.0, 3.0)
    assert set(asked) == {"A", "B"}
    assert asyncio.run(measured_rates(node, {"me": record()})) == (None, None)
    assert asyncio.run(measured_rates(node, present, (7.0, 4.0))) == (9.0, 4.0)


class Measured:
    """Stands for measurements with others. Some do not answer, and few have a full line."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        silent: int = 0,
        uplinks: Iterable[tuple[float, float | None]] = ((5.0, None), (9.0, None)) * 20,
    ) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.uplinks = iter(uplinks)
        self.silent = silent
        monkeypatch.setattr(link_monitor, "measure_mbit", self.down)
        monkeypatch.setattr(link_monitor, "measure_uplink", self.up)
        self.lines = LinkHealth()
        self.node = cast(Node, SimpleNamespace(peer_id="me", lines=self.lines))
        self.present = {str(number): record() for number in range(40)}

    async def down(self, _: Node, peer: str, **how: object) -> float:
        self.asked.append((peer, True))
        return 50.0

    async def up(self, _: Node, peer: str, **how: object) -> tuple[float, float | None]:
        self.asked.append((peer, False))
        if len(self.asked) <= self.silent:
            raise Unreachable(peer)
        return next(self.uplinks)


def test_a_line_is_measured_with_a_few_that_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all peers that start together would measure with the same peers."""
    sets = set()
    for _ in range(20):
        measured = Measured(monkeypatch)
        asyncio.run(measured_rates(measured.node, measured.present))
        sets.add(frozenset(peer for peer, _ in measured.asked))
    assert all(len(asked) == ASKED for asked in sets)
    assert len(sets) > 10


def test_an_uplink_is_measured_without_others_uplinks(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    asyncio.run(measure_full_uplink(measured.node, measured.present))
    assert [is_down for _, is_down in measured.asked] == [False] * ASKED
    assert (measured.lines.up_mbit, measured.lines.down_mbit) == (9.0, None)


def test_an_uplink_that_changed_counts_after_two_tests_and_none_for_longer_than_a_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After one measurement of 80 and 48 of 6 Mbit/s, a peer published 80 for weeks."""
    now_s = 0.0
    rates = [80.0] * 3 + [6.0] * 3 + [80.0] * 3
    measured = Measured(monkeypatch, uplinks=[(rate, None) for rate in rates for _ in range(2)])
    measured.lines = LinkHealth(lambda: now_s)
    measured.node = cast(Node, SimpleNamespace(peer_id="me", lines=measured.lines))
    monkeypatch.setattr(fitness, "HOME_MBIT", 1e9)
    found = []
    for _ in rates:
        now_s += 3600.0
        asyncio.run(measure_full_uplink(measured.node, measured.present))
        found.append((measured.lines.up_mbit, measured.lines.is_agreed))
    slower, faster = (80.0, False), (6.0, False)
    assert found == [
        *[(80.0, True)] * 3, slower, *[(6.0, True)] * 2, faster, *[(80.0, True)] * 2
    ]  # fmt: skip
    now_s += DAY_S + 1.0
    assert measured.lines.up_mbit is None


def test_a_test_that_is_broken_off_counts_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def uplinks() -> Iterator[tuple[float, None]]:
        yield 5.0, None
        raise TimeoutError

    measured = Measured(monkeypatch, uplinks=uplinks())
    with pytest.raises(TimeoutError):
        asyncio.run(measure_full_uplink(measured.node, measured.present))
    assert measured.lines.up_mbit == 5.0


def test_receivers_at_which_the_line_was_full_are_few_and_of_the_last_day() -> None:
    now_s = 0.0
    lines = LinkHealth(lambda: now_s)
    for number in range(3 * MAX_FULL):
        lines.full(str(number), 20.0)
    assert len(lines.full_mbit) == MAX_FULL
    now_s = DAY_S + 1.0
    lines.full("A", 6.0)
    assert lines.full_mbit == {"A": 6.0}


@pytest.mark.parametrize(("silent", "found"), [(1, 9.0), (TRIES - 1, 5.0), (TRIES, None)])
def test_others_are_asked_for_those_that_do_not_answer(
    monkeypatch: pytest.MonkeyPatch, silent: int, found: float | None
) -> None:
    measured = Measured(monkeypatch, silent)
    asyncio.run(measure_full_uplink(measured.node, measured.present))
    assert measured.lines.up_mbit == found
    assert len(measured.asked) <= TRIES


@pytest.mark.parametrize(
    ("uplinks", "full"),
    [
        pytest.param([(19.0, 20.0), (18.0, 19.0)], [20.0, 19.0], id="two agree"),
        pytest.param([(9.0, 9.0), (18.0, None), (19.0, 20.0), (18.0, 19.0)], [9.0, 20.0, 19.0]),
        pytest.param([(9.0, 9.0), (18.0, None), (19.0, 20.0), (8.0, None)], [9.0, 20.0]),
        pytest.param([(9.0, None), (18.0, None)], [], id="no queue"),
        pytest.param([(HOME_MBIT + 1, None)], [], id="fast"),
    ],
)
def test_a_thin_line_is_measured_until_two_peers_have_shown_the_same(
    monkeypatch: pytest.MonkeyPatch, uplinks: list[tuple[float, float | None]], full: list[float]
) -> None:
    """A line that is fast, or shows no queue with two peers, is not measured again."""
    measured = Measured(monkeypatch, uplinks=uplinks)
    asyncio.run(measure_full_uplink(measured.node, measured.present))
    assert list(measured.lines.full_mbit.values()) == full
    assert len(measured.asked) == len(uplinks)


def test_a_receiver_agrees_with_itself_only_where_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a receiver with a slow line would make all others look slow."""
    measured = Measured(monkeypatch, uplinks=[(5.0, 5.0)] * 9)
    measured.present = {"A": record()}
    asyncio.run(measure_full_uplink(measured.node, measured.present))
    assert agreed_mbit(measured.lines.full_mbit) is None
    asyncio.run(measure_full_uplink(measured.node, measured.present))
    assert agreed_mbit(measured.lines.full_mbit) == 5.0
    measured = Measured(monkeypatch, uplinks=[(5.0, 5.0), (18.0, None)] * 9)
    measured.present = {"A": record(), "B": record()}
    monkeypatch.setattr(link_monitor, "sample", lambda peers, count: peers[:count])
    for _ in range(3):
        asyncio.run(measure_full_uplink(measured.node, measured.present))
        assert measured.lines.full_mbit == {"A": 5.0}
