"""Several units at once: as if one after the other, but for the time."""

import threading

import pytest
import torch

from swarm.peer.unit_threads import WORTH_ELEMENTS, UnitThreads


def test_results_come_in_the_order_of_the_items_from_as_many_threads():
    together = threading.Barrier(3, timeout=30.0)

    def work(item: int) -> tuple[int, int]:
        together.wait()  # nobody goes on unless three are at work
        return 10 * item, torch.get_num_threads()

    usual = torch.get_num_threads()
    found = UnitThreads(3).each(work, [3, 1, 2], WORTH_ELEMENTS)
    assert found == [(30, 1), (10, 1), (20, 1)]
    assert torch.get_num_threads() == usual


@pytest.mark.parametrize(("threads", "elements"), [(1, WORTH_ELEMENTS), (4, WORTH_ELEMENTS - 1)])
def test_little_work_or_one_thread_is_the_callers(threads, elements):
    found = UnitThreads(threads).each(lambda _: threading.current_thread(), range(5), elements)
    assert set(found) == {threading.current_thread()}


def test_an_error_is_raised_when_all_have_ended_and_nothing_new_is_begun():
    begun, ended = [], []
    failed = threading.Event()

    def work(item: int) -> None:
        begun.append(item)
        if item == 0:
            failed.set()
            raise KeyError(item)
        failed.wait(30.0)
        ended.append(item)

    with pytest.raises(KeyError):
        UnitThreads(2).each(work, range(1000), WORTH_ELEMENTS)
    assert len(begun) < 1000
    assert sorted([0, *ended]) == sorted(begun)
    assert not [each for each in threading.enumerate() if each.name == "swarm-units"]


def test_threads_that_cannot_be_started_are_done_without(monkeypatch):
    def cannot(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", cannot)
    assert UnitThreads(4).each(str, range(3), WORTH_ELEMENTS) == ["0", "1", "2"]
