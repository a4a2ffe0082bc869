"""A month's bytes: counted over restarts, with a warning, a timely leave, and later refusal."""

from __future__ import annotations

import errno
import json
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from swarm import durable
from swarm.config import NetworkSection
from swarm.errors import DataQuotaSpent
from swarm.model.cost import bytes_sent_per_peer_per_round, handover_bytes
from swarm.network.node.node import Node
from swarm.network.wire.traffic import Traffic
from swarm.peer.machine.state_directory import StateDirectory
from swarm.peer.start import quota
from swarm.peer.start.quota import (
    OVERHEAD,
    DataQuota,
    MonthlyCount,
    QuotaWatch,
    bytes_moved,
    bytes_to_leave,
    count_of,
    month_after,
    month_of,
    require_quota,
)
from swarm.peer.training.leaving import Stop
from tests.train.runs import tiny_run

NOVEMBER_S = 1_795_392_000.0
"""2026-11-23, 00:00 UTC."""
DAY_S = 86_400.0
GB = 10**9


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data_used"


def test_a_month_is_counted_over_restarts_and_the_next_begins_at_zero(file: Path) -> None:
    assert month_of(NOVEMBER_S) == "2026-11"
    count = MonthlyCount(file, NOVEMBER_S)
    count.add(5, NOVEMBER_S)
    count.write()
    again = MonthlyCount(file, NOVEMBER_S + DAY_S)
    assert again.num_bytes == 5
    again.add(7, NOVEMBER_S + 2 * DAY_S)
    assert again.num_bytes == 12
    again.add(3, NOVEMBER_S + 9 * DAY_S)
    assert (again.month, again.num_bytes) == ("2026-12", 3)
    assert MonthlyCount(file, NOVEMBER_S + 9 * DAY_S).num_bytes == 0


def test_a_clock_that_goes_back_begins_no_month(file: Path) -> None:
    count = MonthlyCount(file, NOVEMBER_S)
    count.add(5, NOVEMBER_S - 30 * DAY_S)
    count.write()
    assert MonthlyCount(file, NOVEMBER_S - 30 * DAY_S).num_bytes == 5


@pytest.mark.parametrize("jump_s", [40 * DAY_S, 3650 * DAY_S])
def test_a_clock_that_jumps_ahead_begins_no_month(
    file: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    now_s = NOVEMBER_S
    monkeypatch.setattr(time, "time", lambda: now_s)
    data = DataQuota(MonthlyCount(file, now_s), 100.0 * GB, 4.0 * GB)
    data.look(60 * GB)
    now_s += jump_s
    data.look(61 * GB)
    assert (data.count.month, data.count.num_bytes) == ("2026-11", 61 * GB)


@pytest.mark.parametrize(("kept", "num_bytes"), [("2026-12", 5), ("2027-01", 0), ("2036-11", 0)])
def test_a_month_that_only_a_wrong_clock_can_have_begun_is_not_kept(
    file: Path, kept: str, num_bytes: int
) -> None:
    file.write_text(json.dumps({"month": kept, "bytes": 5, "left_gb": 0.0}))
    assert MonthlyCount(file, NOVEMBER_S).num_bytes == num_bytes


def test_the_month_after_december_is_january() -> None:
    assert month_after("2026-12") == "2027-01"
    assert month_after("2026-09") == "2026-10"


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"month": "2026-11"}', "\x00"])
def test_a_torn_file_is_no_reason_not_to_start(file: Path, torn: str) -> None:
    file.write_text(torn)
    assert MonthlyCount(file, NOVEMBER_S).num_bytes == 0


def test_all_kinds_of_bytes_count_once_and_those_passed_on_twice() -> None:
    traffic = Traffic(
        control_bytes_sent=1,
        control_bytes_received=20,
        blob_bytes_sent=300,
        blob_bytes_received=4000,
        moments_bytes_sent=50_000,
        moments_bytes_received=600,  # these are blobs too
        relayed_bytes=1_000_000,
    )
    assert bytes_moved(traffic) == round(2_054_321 * OVERHEAD)
    traffic.dht_bytes = 7_000_000
    assert bytes_moved(traffic) == round(9_054_321 * OVERHEAD)


def test_a_peer_is_warned_once_at_each_mark_and_leaves_while_it_still_can(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = NOVEMBER_S
    data = DataQuota(MonthlyCount(file, now_s), 100.0 * GB, 4.0 * GB, clock=lambda: now_s)
    warned = {}
    with caplog.at_level(logging.WARNING):
        for gb in range(97):
            now_s = NOVEMBER_S + 3600.0 * gb
            caplog.clear()
            why = data.look(gb * GB)
            if caplog.text:
                warned[gb] = caplog.text
            assert (why is not None) == (gb >= 96), gb
    assert sorted(warned) == [50, 80, 90]
    assert "80 of 100 GB of 2026-11 are used; at this rate the peer leaves in 16.0 h" in warned[80]
    assert why == "96 of 100 GB of 2026-11 are used, and leaving takes up to 4 GB"


def test_the_rate_that_a_warning_names_is_that_of_the_last_day(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After two quiet weeks the warning once named months."""
    now_s, moved = NOVEMBER_S - 20 * DAY_S, 0
    data = DataQuota(MonthlyCount(file, now_s), 100.0 * GB, 4.0 * GB, clock=lambda: now_s)
    with caplog.at_level(logging.WARNING):
        for hour in range(14 * 24 + 60):
            now_s += 3600.0
            moved += GB if hour >= 14 * 24 else 0
            data.look(moved)
    assert "50 of 100 GB of 2026-11 are used; at this rate the peer leaves in 46.0 h" in caplog.text


def test_what_leaving_takes_is_a_round_both_ways_and_the_moments() -> None:
    run = tiny_run()
    needed = 2 * bytes_sent_per_peer_per_round(run, 4) + handover_bytes(run, 4)
    assert bytes_to_leave(run, 4) == pytest.approx(OVERHEAD * needed)


def test_the_peer_is_asked_to_leave_with_a_typed_reason_and_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "LOOK_S", 0.01)
    run, state, stop = tiny_run(), StateDirectory(tmp_path), Stop(60.0)
    network = NetworkSection(data_quota_gb=1.0)
    traffic = Traffic(blob_bytes_sent=1)
    node = cast(Node, SimpleNamespace(traffic=traffic))
    require_quota(network, state)
    watch = QuotaWatch(network, state, node, stop)
    watch.keep_back(run)
    assert not stop.wait(0.1)
    stop.raise_why()
    traffic.blob_bytes_sent = GB
    assert stop.wait(30.0)
    watch.end()
    with pytest.raises(DataQuotaSpent, match=r"of 1 GB of .* are used, and leaving takes up to"):
        stop.raise_why()
    assert json.loads((tmp_path / "data_used").read_text())["bytes"] >= GB
    with pytest.raises(DataQuotaSpent, match="raise --data-quota, or start again when"):
        require_quota(network, state)
    require_quota(NetworkSection(data_quota_gb=2.0), state)
    require_quota(NetworkSection(), state)
    state.close()


def test_a_disk_that_takes_nothing_for_a_while_does_not_end_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quota, "LOOK_S", 0.01)
    tried = threading.Event()

    def full(*_: object) -> None:
        tried.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    state, stop = StateDirectory(tmp_path), Stop(60.0)
    traffic = Traffic(blob_bytes_sent=1)
    node = cast(Node, SimpleNamespace(traffic=traffic))
    with monkeypatch.context() as disk:
        disk.setattr(durable, "write_file", full)
        watch = QuotaWatch(NetworkSection(data_quota_gb=1.0), state, node, stop)
        assert tried.wait(10.0) and not stop()
        traffic.blob_bytes_sent = GB
        assert stop.wait(10.0)
    watch.end()
    assert "the count of this month is not on disk" in caplog.text
    assert count_of(state).num_bytes >= GB
    state.close()


def test_without_a_quota_nothing_is_written(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    node = cast(Node, SimpleNamespace(traffic=Traffic()))
    watch = QuotaWatch(NetworkSection(), state, node, Stop(1.0))
    watch.require_room(tiny_run(), 10**15)
    watch.end()
    assert not (tmp_path / "data_used").exists()
    assert count_of(state).month == month_of(time.time())
    state.close()


def test_what_is_moved_before_a_run_is_entered_counts_too(tmp_path: Path) -> None:
    state, node = StateDirectory(tmp_path), cast(Node, SimpleNamespace(traffic=Traffic()))
    watch = QuotaWatch(NetworkSection(data_quota_gb=9.0), state, node, Stop(1.0))
    node.traffic.blob_bytes_received = GB  # a model that never arrived whole
    watch.end()
    assert count_of(state).num_bytes == round(GB * OVERHEAD)
    state.close()


def test_a_state_that_is_more_than_what_is_left_is_not_fetched(tmp_path: Path) -> None:
    state, node, run = StateDirectory(tmp_path), cast(Node, SimpleNamespace()), tiny_run()
    node.traffic = Traffic()
    watch = QuotaWatch(NetworkSection(data_quota_gb=2.0), state, node, Stop(1.0))
    most = int((2 * GB - bytes_to_leave(run, run.run.peers)) / OVERHEAD)
    watch.require_room(run, most)
    with pytest.raises(DataQuotaSpent, match=r"joining takes 2 GB .* but 2 of 2 GB of .* are left"):
        watch.require_room(run, most + 2)
    watch.end()
    state.close()


def test_a_person_who_asks_gets_no_error() -> None:
    stop = Stop(1.0)
    stop.ask()
    stop.ask(DataQuotaSpent("too late"))
    stop.raise_why()
