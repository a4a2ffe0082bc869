"""Seconds and peaks of a peer's phases."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from swarm.peer.phases import PhaseMeter, take_peak_rss


class Scripted:
    """A clock and a peak that the test sets."""

    def __init__(self) -> None:
        self.now, self.peak = 0.0, 0

    def meter(self) -> PhaseMeter:
        return PhaseMeter(lambda: self.now, lambda: self.peak)

    def passes(self, seconds: float, peak: int) -> None:
        self.now += seconds
        self.peak = peak


def test_each_phase_has_its_own_seconds_and_peak() -> None:
    script = Scripted()
    meter = script.meter()
    meter.begin("training")
    script.passes(5, 700)
    meter.begin("averaging")
    script.passes(2, 300)
    found = meter.take()
    assert found["training"] == {"seconds": 5, "peak_rss_bytes": 700}
    assert found["averaging"] == {"seconds": 2, "peak_rss_bytes": 300}
    assert "starting" not in found  # it took no time


def test_a_phase_within_another_pauses_it_and_the_same_phase_adds_up() -> None:
    script = Scripted()
    meter = script.meter()
    meter.begin("averaging")
    script.passes(1, 10)
    with meter.within("adopting"):
        script.passes(3, 90)
    script.passes(1, 20)
    found = meter.take()
    assert found["averaging"] == {"seconds": 2, "peak_rss_bytes": 20}
    assert found["adopting"] == {"seconds": 3, "peak_rss_bytes": 90}


def test_what_was_taken_is_not_told_again_and_the_phase_goes_on() -> None:
    script = Scripted()
    meter = script.meter()
    meter.begin("training")
    script.passes(4, 5)
    meter.take()
    script.passes(6, 7)
    assert meter.take() == {"training": {"seconds": 6, "peak_rss_bytes": 7}}


def held(num_bytes: int) -> Iterator[None]:
    tensor = torch.ones(num_bytes // 4)
    yield
    del tensor


def test_the_peak_of_the_process_is_forgotten_once_it_was_told() -> None:
    size = 256 * 2**20
    take_peak_rss()
    before = take_peak_rss()
    for _ in held(size):
        pass
    assert before + 0.9 * size < take_peak_rss() < before + 1.2 * size
    assert take_peak_rss() < before + 0.1 * size
