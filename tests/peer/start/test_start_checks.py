"""A start that could only wait is refused at once, with the reason and the remedy."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.config import RunConfig
from swarm.errors import ConfigError, CorruptState, RunMismatch, StateError, SwarmError
from swarm.network.rounds.record_file import RecordFile
from swarm.network.wire.address_book import Remembered
from swarm.peer.machine.state_directory import StateDirectory, current_run_of
from swarm.peer.start.start_checks import require_finished, require_way_in, run_on_disk
from swarm.peer.text.run_request import Wanted
from tests.peer.start.test_founding import Founder
from tests.train.runs import tiny_run

ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/x"
ONE, OTHER = "demo-0123456789abcdef", "demo-fedcba9876543210"


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDirectory]:
    state = StateDirectory(tmp_path / "state")
    yield state
    state.close()


def with_runs(state: StateDirectory, *names: str) -> None:
    for name in names:
        state.run(name).path.mkdir(parents=True)
        state.run(name).record_path.write_bytes(b"a record")


def refused(state: StateDirectory, run_id: str | None = None) -> SwarmError:
    with pytest.raises((ConfigError, StateError)) as caught:
        require_way_in(Wanted(run_id=run_id), (), state)
    return caught.value


def test_nothing_says_which_run(state: StateDirectory) -> None:
    error = refused(state)
    assert isinstance(error, ConfigError)
    for way in ("--run FILE", "--initial-peers ADDRESS", "--state-dir DIR"):
        assert way in str(error)


def test_a_run_that_is_not_there_is_not_waited_for(state: StateDirectory) -> None:
    with_runs(state, ONE)
    assert f"no run {OTHER}; it has {ONE}" in str(refused(state, OTHER))
    assert "is no run id" in str(refused(state, "nosuch"))
    require_way_in(Wanted(run_id=ONE), (), state)
    require_way_in(Wanted(run_id=OTHER), (ADDRESS,), state)
    state.current_run = OTHER  # its model was being fetched
    require_way_in(Wanted(run_id=OTHER), (), state)


def test_the_only_run_is_meant_where_the_current_ones_name_is_lost(state: StateDirectory) -> None:
    with_runs(state, ONE)
    assert state.current_run == ONE
    assert current_run_of(state.path, None)[0] == ONE
    require_way_in(Wanted(), (), state)


def test_of_several_runs_one_has_to_be_named(state: StateDirectory) -> None:
    with_runs(state, ONE, OTHER)
    assert state.current_run is None
    assert f"{ONE}, {OTHER} (name one with --run-id)" in str(refused(state))
    with pytest.raises(StateError, match=f"{ONE}, {OTHER} .*--run-id"):
        current_run_of(state.path, None)


def test_a_file_an_address_or_a_remembered_peer_is_a_way_in(state: StateDirectory) -> None:
    require_way_in(Wanted(run=tiny_run()), (), state)
    require_way_in(Wanted(), (ADDRESS,), state)
    state.known_peers = [Remembered(ADDRESS, 1.0)]
    require_way_in(Wanted(), (), state)


# ---------------------------------------------------------------- changed run files


def founded(folder: Path, run: RunConfig, at_round: int = 0) -> tuple[StateDirectory, str]:
    """The state directory of a peer that has founded a run, at a given round."""
    founder = Founder(folder)
    started = founder.found(run=run)
    tip = replace(started.record.tip, round=at_round)
    RecordFile(started.directory.record_path).write(replace(started.record, tip=tip))
    return founder.state, started.run_id


def with_rounds(rounds: int) -> RunConfig:
    return tiny_run(run={"rounds": rounds})


def test_a_founder_whose_file_was_changed_does_not_found_a_second_run(tmp_path: Path) -> None:
    state, name = founded(tmp_path, with_rounds(8), at_round=7)
    changed = Wanted(run=with_rounds(12))
    for wanted in (changed, replace(changed, run_id=name)):
        with pytest.raises(RunMismatch, match=r"run\.rounds: asked 12, the run has 8") as refused:
            require_finished(wanted, state)
        assert f"--state-dir {tmp_path} --run-id {name} resumes it" in refused.value.hint
    require_finished(replace(changed, beside_others=True), state)
    require_finished(Wanted(run=with_rounds(8)), state)
    require_finished(Wanted(), state)
    state.close()


@pytest.mark.parametrize("left", ["finished", "no folder", "no run"])
def test_a_run_that_is_over_keeps_nobody_from_founding_another(tmp_path: Path, left: str) -> None:
    state, name = founded(tmp_path, with_rounds(8), at_round=8)
    if left != "finished":
        shutil.rmtree(state.run(name).path)
    if left == "no run":
        (tmp_path / "current_run").unlink()
    require_finished(Wanted(run=with_rounds(12)), state)
    state.close()


@pytest.mark.parametrize("missing", [True, False])
def test_a_run_that_may_go_on_is_no_reason_to_found_another(tmp_path: Path, missing: bool) -> None:
    """A killed join has no record yet. A damaged record proves nothing."""
    state, name = founded(tmp_path, with_rounds(8), at_round=8)
    record = state.run(name).record_path
    record.unlink() if missing else record.write_bytes(b"torn")
    record.with_suffix(".previous").unlink(missing_ok=True)
    with pytest.raises(RunMismatch if missing else CorruptState, match=name):
        require_finished(Wanted(run=with_rounds(12)), state)
    state.close()


# ---------------------------------------------------------------- several runs in one directory


def test_a_run_file_means_the_run_on_disk_that_it_has_founded_also_if_another_came_after_it(
    tmp_path: Path,
) -> None:
    founder = Founder(tmp_path)
    first, second, again = (founder.found(run=with_rounds(n)).run_id for n in (8, 9, 9))
    state, of_first = founder.state, Wanted(run=with_rounds(8))
    assert state.current_run == again != second
    assert run_on_disk(Wanted(), state) == run_on_disk(Wanted(run=with_rounds(9)), state) == again
    assert run_on_disk(of_first, state) == run_on_disk(Wanted(run_id=first), state) == first
    assert run_on_disk(replace(of_first, run_id=again), state) is None
    assert run_on_disk(Wanted(run=with_rounds(10)), state) is None
    state.run(again).config_path.write_bytes(b"damaged")
    assert run_on_disk(Wanted(run=with_rounds(10)), state) == again, "it is compared once mended"
    assert run_on_disk(of_first, state) == first
    shutil.rmtree(state.run(again).path)
    assert run_on_disk(Wanted(run=with_rounds(9)), state) == second
    state.close()
