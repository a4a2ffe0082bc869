"""Long work is not silent: a line every 15 s, a bar on a terminal."""

from __future__ import annotations

import logging

import pytest

from swarm.progress import Progress, Reporter, duration, reading
from tests.fake_time import Time


@pytest.fixture
def clock() -> Time:
    return Time()


def test_a_line_comes_every_15_seconds_with_the_time_that_is_left(
    clock: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "swarm.progress")
    reporter = Reporter("round 3/8", "step", clock)
    for done in range(1, 51):
        clock.now_s += 1.0
        reporter.at(done, 50, "loss 2.4100, 512 tokens/s")
    assert [record.getMessage() for record in caplog.records] == [
        "round 3/8: step 15 of 50, loss 2.4100, 512 tokens/s, 35 s left",
        "round 3/8: step 30 of 50, loss 2.4100, 512 tokens/s, 20 s left",
        "round 3/8: step 45 of 50, loss 2.4100, 512 tokens/s, 5 s left",
    ]


def test_quick_work_says_nothing_to_people_and_everything_to_who_draws(
    clock: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "swarm.progress")
    assert list(Reporter("writing", "part", clock).each("abc", 3)) == list("abc")
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * 3
    drawn = [record.__dict__["progress"] for record in caplog.records]
    assert drawn[-1] == Progress("writing", "part", 3, 3, 0.0)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "0 s"), (89, "89 s"), (720, "12 min"), (12600, "3.5 h")]
)
def test_times_are_in_one_unit(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_a_text_is_counted_in_megabytes_as_its_documents_are_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "swarm.progress")
    documents = [b"x" * 600_000] * 5
    assert list(reading("books", 1_500_000, documents)) == documents
    drawn = [record.__dict__["progress"] for record in caplog.records]
    assert [(each.done, each.total) for each in drawn] == [(1, 2), (2, 3), (3, 4), (4, 4)]
    assert drawn[0].what == "reading books" and drawn[0].unit == "MB"
