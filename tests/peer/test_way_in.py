"""A start that could only wait is refused at once, with what is there and what to do."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.errors import ConfigError, StateError, SwarmError
from swarm.network.address_book import Remembered
from swarm.peer.state_directory import StateDirectory, current_run_of
from swarm.peer.wanted import Wanted
from swarm.peer.way_in import require_way_in
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


def test_the_only_run_is_meant_where_the_name_of_the_current_one_is_lost(
    state: StateDirectory,
) -> None:
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
