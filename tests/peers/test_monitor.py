"""swarm-monitor: its requests and their times, its memory, and its end."""

import errno
import io
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from rich.console import Console

from peers.actions.monitor_files import HistoryFile
from peers.actions.monitor_page import bound_to, url_of
from peers.monitor import _line, _show, main
from swarm.errors import ConfigError, NobodyReachable
from swarm.monitor.health import Health, Word, health_of
from swarm.monitor.schema import as_json
from swarm.monitor.snapshot import Snapshot
from swarm.monitor.terminal import render
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.runs.observer import Observer, Seen
from swarm.network.runs.run_search import Announced
from swarm.peer.guest import Watch
from swarm.protocol.records.records import PeerRecord, RunRecord, RunState, ValidationRecord
from swarm.protocol.values.manifest import Entry, Founding, Kind, Manifest, Member
from tests.peer_records import peer_record

DEAD = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEhqPMwUVi6Sr3ThFZAsoGfBTXdv6PxBByKg8ZdCrNgTf"


def manifest(round_: int) -> Manifest:
    return Manifest(
        run="demo-1", generation="0", height=round_, round=round_, kind=Kind.QUORUM, parent=None,
        founding=Founding("QmA", "n", "0" * 64, 1, "0" * 64, 1), step=0, tokens=0, merged=0,
        members={"QmA": Member(0, 1.0)}, contributors=("QmA",), sources={}, owners={0: ("QmA",)},
        entries={"expert.0": Entry("0" * 64, 1, round_, "QmA", "bf16")},
    )  # fmt: skip


def record_at(tip: Manifest) -> PeerRecord:
    return peer_record("QmA", manifest_digest=tip.digest, round=tip.round)


def run_record(state: RunState) -> RunRecord:
    digest = "0" * 64
    return RunRecord(
        "demo-1", "demo", digest, "QmA", digest, 1, digest, 1, state=state, wait_for_peers=1
    )


class Guest:
    """Stands in for an Observer, and records its requests."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.state = RunState.RUNNING
        self.tip_now: Manifest | None = manifest(1)
        self.seen = Seen(
            {"QmA": peer_record("QmA", manifest_digest=manifest(1).digest, round=1)}, {}, {}
        )
        self.deadlines_s: list[float] = []
        self.announced_peers = 1
        self.run = "demo-1"

    def find(self, wanted: str | None, deadline_s: float) -> Announced:
        self.asked.append(f"find {wanted}")
        record = replace(run_record(self.state), run=self.run, wait_for_peers=self.announced_peers)
        return Announced(record, ("QmA",))

    def look(self, run: str, deadline_s: float) -> Seen:
        self.asked.append("look")
        self.deadlines_s.append(deadline_s)
        return self.seen

    def tip(self, announced: Announced, peers: object, deadline_s: float) -> Manifest:
        self.asked.append("tip")
        if self.tip_now is None:
            raise NobodyReachable("nobody")
        return self.tip_now

    def show(self, round_: int) -> None:
        self.tip_now = manifest(round_)
        losses = {"QmA": ValidationRecord(round_, self.tip_now.digest, 5.0 - round_, 64, 128)}
        self.seen = Seen({"QmA": record_at(manifest(round_))}, {}, losses)


@pytest.fixture
def guest() -> Guest:
    return Guest()


@pytest.fixture
def watch(guest: Guest) -> Watch:
    return Watch(cast(Observer, guest), BlobStore(), None)


def test_the_manifest_is_fetched_only_when_a_peer_shows_another(guest: Guest, watch: Watch) -> None:
    watch.look()
    watch.look()
    assert guest.asked == ["find None", "look", "tip", "look"]
    guest.show(2)
    assert watch.look().experts[0].version == 2
    assert guest.asked[-2:] == ["look", "tip"]


def test_who_watches_many_peers_looks_for_longer_and_less_often(guest: Guest, watch: Watch) -> None:
    """The records of 256 peers are 3 MB.

    The number is first the announced one, then the manifest's.
    """
    assert watch.refresh_s == 2.0
    guest.announced_peers = 256
    tip = manifest(2)
    members = {f"QmA{number}": Member(0, 1.0) for number in range(255)}
    watch.look()
    guest.tip_now = replace(tip, members={**tip.members, **members})
    guest.seen = Seen({"QmA": record_at(guest.tip_now)}, {}, {})
    few = watch.refresh_s
    watch.look()
    watch.look()
    num_members = len(guest.tip_now.members)
    assert guest.deadlines_s[0] == 4.0 + 256 / 32 and few == 2.0
    assert guest.deadlines_s[-1] == 4.0 + num_members / 32
    assert watch.refresh_s == num_members / 16
    guest.announced_peers, again = 2**62, Watch(cast(Observer, guest), BlobStore(), None)
    again.look()
    assert guest.deadlines_s[-1] == 4.0 + 1024 / 32


def test_who_sees_nobody_looks_once_more_before_it_says_so(guest: Guest, watch: Watch) -> None:
    there, gone = guest.seen, Seen({}, {}, {})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(guest, "look", Mock(side_effect=[gone, there]))
        assert len(watch.look().peers) == 1
    guest.seen = gone
    with pytest.raises(NobodyReachable, match="no peer of demo-1 is present"):
        watch.look()
    assert guest.asked[-2:] == ["look", "look"]


def test_without_an_answer_the_last_manifest_and_the_peers_own_rows_are_shown(
    guest: Guest, watch: Watch
) -> None:
    watch.look()
    guest.show(2)
    guest.tip_now = None
    shown = watch.look()
    assert shown.round == 1 and shown.peers[0].record.round == 2


def test_an_older_manifest_never_replaces_a_newer_one(guest: Guest, watch: Watch) -> None:
    guest.show(3)
    watch.look()
    guest.show(2)
    assert watch.look().round == 3


def test_losses_of_rounds_before_are_remembered(guest: Guest, watch: Watch) -> None:
    for round_ in (1, 2, 3):
        guest.show(round_)
        watch.look()
    assert watch.look().losses == ((1, 4.0), (2, 3.0), (3, 2.0))


class FullDisk(HistoryFile):
    """Stores nothing while it is full."""

    is_full = True

    def keep(self, snapshot: Snapshot) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "kept")
        super().keep(snapshot)


def test_a_run_is_seen_where_its_history_cannot_be_written_and_each_time_is_told_once(
    guest: Guest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = FullDisk(tmp_path / "kept")
    watch = Watch(cast(Observer, guest), BlobStore(), None, history)

    def told() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    with caplog.at_level(logging.ERROR):
        assert [watch.look().round, watch.look().round] == [1, 1]
        assert told() == ["the history is not kept now: kept: No space left on device"]
        history.is_full = False
        watch.look()
        assert not told() and (tmp_path / "kept").exists()
        history.is_full = True
        watch.look()
        assert len(told()) == 1, "it had worked in between"


def test_what_strangers_said_before_the_first_manifest_is_shown_and_not_remembered(
    guest: Guest, tmp_path: Path
) -> None:
    kept = tmp_path / "history"
    watch = Watch(cast(Observer, guest), BlobStore(), None, HistoryFile(kept))
    guest.show(2)
    forged = ValidationRecord(10**6, "0" * 64, 0.001, 64, 128, ((1, 9.0),))
    guest.seen = replace(guest.seen, validations={**guest.seen.validations, "QmX": forged})
    guest.tip_now = None
    for _ in range(2):
        assert watch.look().losses == ((1, 9.0), (2, 3.0), (10**6, 0.001))
    assert not kept.exists()
    guest.tip_now = manifest(2)
    for _ in range(2):
        assert watch.look().losses == ((2, 3.0),)
    guest.show(3)
    guest.tip_now = None
    assert watch.look().losses == ((2, 3.0),), "the previous manifest is one too"
    again = Watch(cast(Observer, guest), BlobStore(), None, HistoryFile(kept))
    assert again.look().losses == ((2, 3.0), (3, 2.0)), "a file is heard before the first manifest"


def test_a_gathering_run_is_looked_for_again_until_it_runs(guest: Guest, watch: Watch) -> None:
    guest.state = RunState.GATHERING
    shown = watch.look()
    assert "tip" not in guest.asked
    assert (shown.run_id, shown.name) == (None, "demo"), "it has no id before manifest 0"
    guest.state = RunState.RUNNING
    watch.look()
    assert guest.asked == ["find None", "look", "find None", "look", "tip"]


def test_a_run_that_begins_stays_a_gathering_one_until_its_first_peer_is_heard(
    guest: Guest, watch: Watch
) -> None:
    guest.state = RunState.GATHERING
    gathering, heard = watch.look(), guest.seen
    guest.state, guest.seen = RunState.RUNNING, Seen({}, {}, {})
    assert watch.look() == gathering
    guest.seen = heard
    assert watch.look().run_id == "demo-1"
    guest.seen = Seen({}, {}, {})
    with pytest.raises(NobodyReachable, match="no peer of demo-1 is present"):
        watch.look()


def test_a_gathering_run_that_nobody_announces_any_more_is_unreachable(
    guest: Guest, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest.state = RunState.GATHERING
    watch.look()
    monkeypatch.setattr(guest, "find", Mock(side_effect=NobodyReachable("no peer announces a run")))
    with pytest.raises(NobodyReachable, match="no peer announces a run"):
        watch.look()


def test_when_all_records_expired_the_run_is_looked_for_anew(guest: Guest, watch: Watch) -> None:
    watch.look()
    guest.seen = Seen({}, {}, {})
    with pytest.raises(NobodyReachable, match="no peer of demo-1 is present"):
        watch.look()
    guest.show(2)
    watch.look()
    assert guest.asked.count("find None") == 2


def test_a_run_that_was_seen_to_end_stays_finished_when_its_peers_have_left(
    guest: Guest, watch: Watch
) -> None:
    guest.show(8)
    assert health_of(watch.look()).word is Word.FINISHED
    guest.seen = Seen({}, {}, {})
    for _ in range(2):
        shown = watch.look()
        assert health_of(shown) == Health(
            Word.FINISHED, "8 of 8 rounds are done; no peer serves the model now"
        )
        assert (shown.round, shown.peers, shown.losses) == (8, (), ((8, -3.0),))
        assert _line(shown).endswith("health=finished") and " peers=0 " in _line(shown)
        assert as_json(shown)["health"]["word"] == "finished"
        for width, height in ((80, 24), (160, 60)):
            Console(width=width, file=io.StringIO()).print(
                render(shown, width=width, height=height)
            )
    assert "is no longer present" in shown.events[-1].text
    assert guest.asked.count("find None") == 2, "another run may begin at the same address"


def test_an_ended_runs_manifest_is_not_shown_for_the_next_one(guest: Guest, watch: Watch) -> None:
    guest.show(8)
    watch.look()
    guest.seen = Seen({}, {}, {})
    watch.look()
    guest.run = "demo-2"
    guest.show(1)
    guest.tip_now = replace(manifest(1), run="demo-2")
    guest.seen = Seen({"QmA": record_at(guest.tip_now)}, {}, {})
    assert (watch.look().run_id, watch.look().round) == ("demo-2", 1)


# ---------------------------------------------------------------- the program


def run_program(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, args)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_nobody_reachable_is_one_error_line_and_status_3(extra: tuple[str, ...]) -> None:
    code, out, err = run_program("--initial-peers", DEAD, "--once", *extra)
    assert code == 3 and out == ""
    assert err.startswith("swarm-monitor: error: ") and err.count("\n") == 1


def test_a_terminal_loads_nothing_of_the_page() -> None:
    code = "import sys, peers.monitor; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "rich" in loaded
    assert loaded.isdisjoint({"starlette", "uvicorn", "prometheus_client", "anyio"})


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:port", "127.0.0.1:70000", ":", ""])
def test_an_address_of_the_page_that_is_none_is_told(address: str) -> None:
    with pytest.raises(ConfigError, match=r"for example 127\.0\.0\.1:8080"):
        bound_to(address)


def test_a_port_alone_is_one_of_this_machine() -> None:
    for address in ("0", "127.0.0.1:0", ":0"):
        bound = bound_to(address)
        with bound:
            assert bound.getsockname()[0] == "127.0.0.1"
            assert url_of(bound) == f"http://127.0.0.1:{bound.getsockname()[1]}/"


def test_the_page_and_lines_exclude_each_other() -> None:
    for extra in ("--once", "--follow", "--json"):
        code, _, err = run_program("--initial-peers", DEAD, "--http", "0", extra)
        assert code == ConfigError.exit_code and "--http goes with none of" in err


def test_an_address_is_needed() -> None:
    code, _, err = run_program("--once")
    assert code == ConfigError.exit_code and "--initial-peers is missing" in err


def test_the_glossary_needs_no_network() -> None:
    code, out, _ = run_program("--glossary")
    assert code == 0 and "tokens/s (tokens per second): " in out


def test_a_line_has_no_bits_per_byte_where_their_size_is_not_known(watch: Watch) -> None:
    known = replace(watch.look(), losses=((1, 2.0),), bits_per_byte_of_nat=0.5)
    assert " val_loss=2.0000 bits_per_byte=1.0000 health=" in _line(known)
    unknown = replace(known, bits_per_byte_of_nat=None)
    assert " val_loss=2.0000 bits_per_byte=none health=" in _line(unknown)


def test_a_line_counts_no_strangers(guest: Guest, watch: Watch) -> None:
    before = _line(watch.look())
    assert " peers=1 equal=1 " in before
    stranger = peer_record("QmX", manifest_digest=manifest(1).digest)
    guest.seen = replace(guest.seen, peers={**guest.seen.peers, "QmX": stranger})
    assert _line(watch.look()) == before


def test_one_json_object_is_printed_last(monkeypatch: pytest.MonkeyPatch, guest: Guest) -> None:
    stopped: list[bool] = []
    guest.stop = lambda: stopped.append(True)  # type: ignore[attr-defined]
    monkeypatch.setattr("swarm.network.runs.observer.Observer.start", lambda *_, **__: guest)
    code, out, err = run_program("--initial-peers", DEAD, "--once", "--json")
    assert (code, err) == (0, "") and stopped == [True]
    assert out.count("\n") == 1 and out.startswith('{"run_id": "demo-1", "name": "demo"')
    code, out, _ = run_program("--initial-peers", DEAD, "--once")
    assert code == 0 and "round 1/8" in out


def test_what_goes_into_a_file_is_not_cut_at_80_columns(
    watch: Watch, guest: Guest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    reason = "round 8 decided by 4 of 4 members: " + "x" * 100
    guest.seen = Seen({"QmA": peer_record("QmA", reason=reason)}, {}, {})
    _show(watch, in_json=False)
    assert reason in capsys.readouterr().out
