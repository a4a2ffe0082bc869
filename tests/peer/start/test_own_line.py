"""The times of a peer's line measurements, and their effects on its uploads."""

import asyncio
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.config import NetworkSection
from swarm.errors import NetworkDown
from swarm.network.wire.link_health import LinkHealth
from swarm.network.wire.traffic import Throttle
from swarm.network.wire.upload_rate import UploadRate
from swarm.peer.start import link_monitor
from swarm.peer.start.link_monitor import (
    AGAIN_S,
    DOUBT_AGAIN_S,
    QUIET_S,
    QUIET_TRIES,
    LinkMonitor,
    measure_line,
    read_line,
)
from swarm.peer.status.round_log import up_mbit
from swarm.protocol.timing.fitness import ALWAYS_LATE, CAP_SHARE, HOME_MBIT
from swarm.protocol.timing.pace import DAY_S


class Sent:
    """Rates that others received: one that counts, and a lower bound."""

    def __init__(self) -> None:
        self.mbit: float | None = None
        self.shown: float | None = None

    def mbit_since(self, _: float) -> float | None:
        return self.mbit

    def shown_since(self, _: float) -> float | None:
        return self.shown


class Measured:
    """A peer's measurements and partners. Its uplink is full at `full_mbit`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.calls: list[object] = []
        self.caps: list[float | None] = []
        """The cap during its measurements."""
        self.up_mbit, self.full_mbit = 1.0, list[float]()
        self.num_full = 0
        self.now, self.is_down = 0.0, False
        self.status = SimpleNamespace(missed=0, manifest=SimpleNamespace(members={"A": 1}))
        self.state = SimpleNamespace(line_path=folder / "line")
        self.begins_anew()
        monkeypatch.setattr(link_monitor, "present_peers", self.present)
        monkeypatch.setattr(link_monitor, "measure_full_uplink", self.measure)
        self.node: Any = self

    def begins_anew(self, cap_mbit: float | None = None) -> None:
        """As after a kill: only its state directory is left."""
        self.lines = LinkHealth(lambda: self.now)
        self.traffic = SimpleNamespace(sent=Sent(), up=Throttle(cap_mbit), bytes_sent=0)
        self.config = SimpleNamespace(network=NetworkSection(max_upload_mbit=cap_mbit))

    def watched(self) -> LinkMonitor:
        """Once the peer is in its run."""
        mine: Any = self.status
        return LinkMonitor(self.node, mine, "run", clock=lambda: self.now)

    async def present(self, *_: object) -> dict[str, str]:
        if self.is_down:
            raise NetworkDown("the daemon has ended")
        return {"A": "its record", "stranger": "another"}

    async def measure(self, _: object, peers: object) -> None:
        self.calls.append(peers)
        self.caps.append(self.cap)
        self.lines.tested(self.up_mbit)
        for rate in self.full_mbit:
            self.num_full += 1
            self.lines.full(f"receiver {self.num_full}", rate)

    def knows(self, mbit: float, *full_mbit: float) -> None:
        """As a joiner that has measured its line before."""
        self.lines.tested(mbit)
        for rate in full_mbit:
            self.num_full += 1
            self.lines.full(f"receiver {self.num_full}", rate)

    @property
    def published(self) -> float | None:
        """The uplink that it tells others."""
        traffic: Any = self.traffic
        return up_mbit(self.lines, traffic)

    def starts(self) -> float | None:
        """Measures as it does before its first round; returns the cap."""
        asyncio.run(measure_line(self.node, "run", ["A", "B"]))
        return self.cap

    @property
    def cap(self) -> float | None:
        up: Throttle = self.traffic.up
        return up.mbit

    def beats(self, line: LinkMonitor, count: int = 1, *, sent: int = 0) -> int:
        """Heartbeats, 8 s apart, with so much sent in between; returns how often it measured."""
        before = len(self.calls)
        for _ in range(count):
            self.now += 8.0
            self.traffic.bytes_sent += sent
            asyncio.run(line.measure_again())
        return len(self.calls) - before


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measured:
    return Measured(monkeypatch, tmp_path)


def test_who_is_left_out_repeatedly_measures_its_line_once_each_time(measured: Measured) -> None:
    measured.begins_anew(cap_mbit=1.0)
    line, counts = measured.watched(), []
    for measured.status.missed in (0, 1, 2, 3, 3, 4, 5, 6, 0, 0, 1, 2, 3):
        measured.beats(line)
        counts.append(len(measured.calls))
    assert ALWAYS_LATE == 3
    assert counts == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]
    assert measured.calls[0] == {"A": "its record"}


def test_a_line_is_measured_before_the_first_round_unless_it_is_known(measured: Measured) -> None:
    """That of a joiner is, and that of a peer that has sent blobs since it started."""
    measured.starts()
    assert measured.calls == [{"A": "its record"}]
    measured.starts()
    measured.begins_anew()
    measured.traffic.sent.mbit = 18.0
    measured.starts()
    assert len(measured.calls) == 1


def test_a_line_that_cannot_be_measured_keeps_nobody_from_starting(measured: Measured) -> None:
    measured.is_down = True
    assert measured.starts() is None
    assert not measured.calls


def test_uploads_take_nine_tenths_of_a_thin_line_that_two_measurements_agree_about(
    measured: Measured, caplog: pytest.LogCaptureFixture
) -> None:
    measured.full_mbit = [19.0, 20.0]
    with caplog.at_level(logging.INFO):
        assert measured.starts() == pytest.approx(CAP_SHARE * 19.0)
    assert "link: 19 Mbit/s up, uploads are capped at 16.7" in caplog.text
    assert "--max-upload" in caplog.text


@pytest.mark.parametrize("full", [[], [20.0], [20.0, 10.0]])
def test_without_two_that_agree_nothing_is_held_back(measured: Measured, full: list[float]) -> None:
    measured.full_mbit = full
    assert measured.starts() is None


def test_all_that_gather_are_asked_and_members_alone_in_a_run(measured: Measured) -> None:
    """Any key may say that it is in a run, and show as little as it likes."""
    asyncio.run(measure_line(measured.node, "run"))
    assert measured.calls == [{"A": "its record", "stranger": "another"}]
    measured.beats(measured.watched())
    assert measured.calls[1] == {"A": "its record"}


def test_a_cap_is_at_least_three_quarters_of_what_the_line_has_carried(measured: Measured) -> None:
    measured.knows(19.5, 3.0, 3.0)
    measured.traffic.sent.mbit = 16.0
    assert measured.starts() == pytest.approx(12.0)


def test_a_joiners_line_was_measured_before_and_counts(measured: Measured) -> None:
    measured.knows(19.5, 19.0, 20.0)
    assert measured.starts() == pytest.approx(CAP_SHARE * 19.0)
    assert not measured.calls


def test_the_cap_that_a_person_has_set_stays(measured: Measured) -> None:
    measured.begins_anew(cap_mbit=5.0)
    measured.full_mbit = [19.0, 20.0]
    assert measured.starts() == 5.0
    assert measured.beats(measured.watched(), 20) == 0


def test_what_was_not_agreed_at_first_is_measured_in_a_quiet_moment(measured: Measured) -> None:
    measured.full_mbit = [20.0]
    assert measured.starts() is None
    line = measured.watched()
    assert QUIET_S < 8.0
    assert measured.beats(line, 5, sent=1) == 0, "something is sent all the time"
    measured.full_mbit = [19.0]
    assert measured.beats(line, 5) == 1
    assert measured.cap == pytest.approx(CAP_SHARE * 19.0)


def test_a_line_that_never_agrees_is_left_in_peace_for_an_hour(measured: Measured) -> None:
    measured.starts()
    line = measured.watched()
    assert measured.beats(line, 100) == QUIET_TRIES
    measured.now += AGAIN_S
    assert measured.beats(line, 100) == QUIET_TRIES


def test_a_fast_line_is_left_alone(measured: Measured) -> None:
    measured.up_mbit, measured.full_mbit = HOME_MBIT + 1, [HOME_MBIT + 1] * 2
    assert measured.starts() is None
    assert measured.beats(measured.watched(), 100) <= 1


def test_a_cap_is_measured_anew_each_hour_without_it(measured: Measured) -> None:
    """A home line is slower in the evening. The earlier measurement stays until then."""
    measured.full_mbit = [20.0, 20.0]
    measured.starts()
    line = measured.watched()
    assert measured.beats(line, 100) == 0
    measured.now, measured.full_mbit = AGAIN_S, []
    assert measured.beats(line) == 1
    assert measured.caps[-1] is None
    assert measured.cap == pytest.approx(CAP_SHARE * 20.0)
    measured.full_mbit = [10.0, 10.0]
    assert measured.beats(line) == 1
    assert measured.cap == pytest.approx(CAP_SHARE * 10.0)


def test_the_cap_is_back_when_a_measurement_fails(measured: Measured) -> None:
    measured.full_mbit = [20.0, 20.0]
    measured.starts()
    line = measured.watched()
    measured.now, measured.is_down = AGAIN_S, True
    with pytest.raises(NetworkDown):
        measured.beats(line)
    assert measured.cap == pytest.approx(CAP_SHARE * 20.0)


def test_a_cap_is_lifted_when_the_line_turns_out_to_be_fast(measured: Measured) -> None:
    measured.full_mbit = [20.0, 20.0]
    measured.starts()
    line = measured.watched()
    measured.now, measured.up_mbit, measured.full_mbit = AGAIN_S, HOME_MBIT + 1, []
    assert measured.beats(line) == 1
    assert measured.cap is None


@pytest.mark.parametrize("hours", [1, 24, 24 * 21])
def test_uplink_and_cap_follow_a_line_that_got_slower_and_faster_again(
    measured: Measured, hours: int
) -> None:
    """After one measurement of 80 and 48 of 6 Mbit/s, a peer published 80 and had no cap."""
    measured.up_mbit, measured.full_mbit = 80.0, []
    measured.starts()
    line = measured.watched()
    for _ in range(min(hours, 30)):
        measured.now += AGAIN_S
        measured.beats(line)
    assert (measured.published, measured.cap) == (80.0, None)
    measured.now, measured.up_mbit, measured.full_mbit = measured.now + AGAIN_S, 6.0, [6.0, 6.0]
    assert measured.beats(line, 5) == 2, "a test that shows another line is repeated"
    assert measured.cap == pytest.approx(CAP_SHARE * 6.0)
    assert measured.published == pytest.approx(CAP_SHARE * 6.0)
    measured.now, measured.up_mbit, measured.full_mbit = measured.now + AGAIN_S, 80.0, []
    assert measured.beats(line, 5) == 2
    assert (measured.published, measured.cap) == (80.0, None)


def test_what_others_take_shows_a_slower_line_in_two_quiet_moments(measured: Measured) -> None:
    measured.up_mbit = 80.0
    measured.starts()
    line = measured.watched()
    assert measured.beats(line, 20) <= 1
    sent: Any = measured.traffic.sent
    measured.up_mbit, measured.full_mbit, sent.shown = 6.0, [6.0, 6.0], 6.0
    assert measured.beats(line, 3, sent=1) == 0, "during a round a test shows too low a rate"
    assert measured.beats(line, 2) == 2
    assert measured.published == pytest.approx(CAP_SHARE * 6.0)


def test_receivers_that_are_thin_themselves_cost_few_tests(measured: Measured) -> None:
    measured.up_mbit = 80.0
    measured.starts()
    line, sent = measured.watched(), measured.traffic.sent
    sent.shown = 1.0
    assert measured.beats(line, int(AGAIN_S / 8.0)) <= 1 + AGAIN_S / DOUBT_AGAIN_S
    assert measured.published == 80.0


def test_what_was_seen_long_ago_ends_with_two_tests_that_deny_it(measured: Measured) -> None:
    """By the real count of the others' rates, with windows of a day."""
    sent = measured.traffic.sent = UploadRate(lambda: measured.now)
    measured.now = 100.0
    sent._rates.add(80.0, measured.now)
    assert measured.published == 80.0
    measured.up_mbit = 6.0
    line = measured.watched()
    measured.now += 2 * AGAIN_S
    measured.beats(line, 2)
    assert measured.published == pytest.approx(6.0)


def test_under_a_persons_cap_the_line_is_tested_twice_a_day(measured: Measured) -> None:
    measured.begins_anew(cap_mbit=50.0)
    measured.up_mbit = 50.0
    measured.starts()
    line, counts = measured.watched(), []
    for _ in range(5):
        measured.now += DAY_S / 4
        counts.append(measured.beats(line, 3))
    assert counts == [0, 1, 0, 1, 0]
    measured.up_mbit, measured.now = 6.0, measured.now + DAY_S / 2
    assert measured.beats(line, 5) == 2
    assert (measured.published, measured.cap) == (6.0, 50.0)


# ------------------------------------------------ a peer that comes back


def test_a_peer_that_is_soon_back_uses_what_it_knew_and_measures_later(measured: Measured) -> None:
    measured.up_mbit, measured.full_mbit = 20.0, [20.0, 20.0]
    measured.starts()
    measured.begins_anew()
    assert measured.starts() == pytest.approx(CAP_SHARE * 20.0)
    assert len(measured.calls) == 1
    assert measured.published == pytest.approx(CAP_SHARE * 20.0)
    measured.up_mbit, measured.full_mbit = 8.0, [8.0, 8.0]
    assert measured.beats(measured.watched(), 3) == 1
    assert measured.cap == pytest.approx(CAP_SHARE * 8.0)
    measured.begins_anew()
    assert measured.starts() == pytest.approx(CAP_SHARE * 8.0)


def test_a_fast_line_is_not_measured_before_a_peer_comes_back(measured: Measured) -> None:
    measured.up_mbit = HOME_MBIT + 1
    measured.starts()
    measured.begins_anew()
    assert measured.starts() is None
    assert len(measured.calls) == 1
    assert (measured.lines.up_mbit, measured.published) == (None, HOME_MBIT + 1)
    measured.now += DAY_S + 1.0
    assert measured.published is None, "the line is unknown after a day"


def test_what_is_kept_is_as_old_as_the_test_that_found_it(measured: Measured) -> None:
    """A peer that wrote the file an hour after a test had trusted the test for two hours."""
    measured.up_mbit = HOME_MBIT + 1
    measured.starts()
    measured.now += AGAIN_S / 2
    asyncio.run(link_monitor._keep(measured.node))
    line = read_line(measured.state.line_path)
    assert line is not None and time.time() - line.at == pytest.approx(AGAIN_S / 2, abs=60.0)


def test_after_an_hour_the_line_is_measured_at_the_start(
    measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured.full_mbit = [20.0, 20.0]
    measured.starts()
    for seconds, calls in ((AGAIN_S + 1, 2), (-60.0, 3)):
        later = time.time() + seconds
        monkeypatch.setattr("swarm.peer.start.link_monitor.time.time", lambda later=later: later)
        measured.begins_anew()
        measured.starts()
        assert len(measured.calls) == calls


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"up_mbit": -1, "cap_mbit": null, "at": 1}', b'{"up_mbit": NaN}', b"\xff"],
)
def test_a_damaged_file_is_passed_over(
    measured: Measured, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    measured.state.line_path.write_bytes(content)
    measured.full_mbit = [20.0, 20.0]
    assert measured.starts() == pytest.approx(CAP_SHARE * 20.0)
    assert len(measured.calls) == 1
    assert "the link is measured" in caplog.text


def test_a_disk_that_refuses_keeps_nobody_from_starting(
    measured: Measured, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measured.state.line_path = tmp_path / "no such folder" / "line"
    measured.full_mbit = [20.0, 20.0]
    assert measured.starts() == pytest.approx(CAP_SHARE * 20.0)
    assert "cannot be written" in caplog.text


def test_a_persons_cap_is_not_taken_for_the_lines_when_it_is_left_out(measured: Measured) -> None:
    measured.begins_anew(cap_mbit=5.0)
    measured.starts()
    measured.begins_anew()
    measured.full_mbit = [20.0, 20.0]
    assert measured.starts() == pytest.approx(CAP_SHARE * 20.0)
    measured.begins_anew(cap_mbit=7.0)
    assert measured.starts() == 7.0
    assert len(measured.calls) == 2
