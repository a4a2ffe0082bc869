import json
from pathlib import Path

import pytest

from peers.state_directory import RunDirectory, StateDirectory
from swarm.errors import StateLocked


def test_a_line_torn_by_a_kill_spoils_no_other_line(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.append_event("started", height=0)
    with run.events_path.open("ab") as file:
        file.write(b'{"event": "appl')
    run.append_event("started", height=3)
    lines = run.events_path.read_bytes().splitlines()
    assert len(lines) == 3
    assert [json.loads(line)["height"] for line in (lines[0], lines[2])] == [0, 3]


def test_a_directory_in_use_is_refused_until_it_is_closed(tmp_path: Path) -> None:
    first = StateDirectory(tmp_path)
    with pytest.raises(StateLocked):
        StateDirectory(tmp_path)
    first.close()
    StateDirectory(tmp_path).close()


def test_port_run_and_known_peers_are_there_after_a_restart(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    assert (state.port, state.current_run, state.known_peers) == (None, None, ())
    state.port, state.current_run, state.known_peers = 4001, "run-1", ("a", "b", "a")
    state.close()
    again = StateDirectory(tmp_path)
    assert (again.port, again.current_run, again.known_peers) == (4001, "run-1", ("a", "b"))
    again.close()
