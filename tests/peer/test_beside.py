"""Work beside the steps: nothing it reads changes, and what it has to change is done in turn."""

import threading

import pytest

from swarm.peer.beside import Beside
from tests.train.runs import all_names, batch, new_engine, same, tiny_run


def test_its_result_is_waited_for():
    may_end, making = threading.Event(), Beside[int]()
    making.begin(lambda: may_end.wait(30.0) and 7)
    assert making.is_running
    may_end.set()
    assert making.result() == 7
    assert not making.is_running
    assert making.result() == 7
    making.begin(lambda: 8)
    assert making.result() == 8


def test_its_error_is_raised_where_the_result_is_wanted():
    def work() -> int:
        raise KeyError("lost")

    making = Beside[int]()
    making.begin(work)
    making.wait()
    with pytest.raises(KeyError, match="lost"):
        making.result()


def test_what_it_has_to_change_is_done_by_the_thread_that_waits():
    done: list[threading.Thread] = []
    making = Beside[int]()
    making.in_turn(lambda: done.append(threading.current_thread()))  # nothing runs: at once

    def work() -> int:
        making.in_turn(lambda: done.append(threading.current_thread()))
        with pytest.raises(ZeroDivisionError):
            making.in_turn(lambda: 1 // 0)
        return len(done)

    making.begin(work)
    assert making.result() == 2
    assert done == [threading.current_thread()] * 2


def test_without_a_thread_it_is_done_at_once(monkeypatch):
    def cannot(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    making = Beside[threading.Thread]()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", cannot)
        making.begin(threading.current_thread)
    assert not making.is_running
    assert making.result() is threading.current_thread()
    making.begin(threading.current_thread)
    assert making.result() is not threading.current_thread()


def test_no_value_changes_before_a_step_was_let_through():
    run = tiny_run()
    engine, names, seen = new_engine(run, owned=[0, 1]), all_names(run), []
    before = engine.read(names)
    assert engine.before_update(lambda: seen.append(engine.read(names)))
    engine.step(batch(run, 0), lr=1e-2)
    assert len(seen) == 1
    assert same(seen[0], before)
    assert not same(engine.read(names), before)
