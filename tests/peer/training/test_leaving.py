"""Leaving: the waits and their limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.network.rounds.round_driver import RoundDriver
from swarm.peer.training import leaving
from swarm.peer.training.expert_moments import ExpertMoments
from swarm.peer.training.leaving import COURTESY_S, MAX_SERVING_S, Stop, leave, serving
from swarm.protocol.values.manifest import Manifest
from tests.protocol.round_pump import found, make_rules

TIP = found(make_rules(), ["me", "other"])
WITHOUT_ME = replace(TIP, height=1, members={"other": TIP.members["other"]})


class Scene:
    """A driver, moments and a clock, driven by a script."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, timeout_s: float = 120.0) -> None:
        self.now_s = 0.0
        self.tip = TIP
        self.left: str | None = None
        self.handed_over = False
        self.told: list[Manifest] = []
        self.asked = 0
        self.script: dict[int, Any] = {}
        """Second -> the event at that time."""
        self.after_tip: dict[str, Any] = {}
        """The event right after a look at the tip."""
        fake = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.pass_time)
        monkeypatch.setattr(leaving, "time", fake)
        self.stop = FakeStop(self, timeout_s)

    def pass_time(self, seconds: float) -> None:
        for second in range(int(self.now_s) + 1, int(self.now_s + seconds) + 1):
            for name, value in self.script.get(second, {}).items():
                setattr(self, name, value)
        self.now_s += seconds

    def run(self) -> str:
        moments = SimpleNamespace(
            model=SimpleNamespace(me="me"),
            leave=lambda adopted, tip: self.told.append(tip),
            hand_over=lambda: None,
            all_handed_over=lambda: self.handed_over,
            summary=lambda: "moments of 2 of 2 experts handed over",
        )
        return leave(
            cast(RoundDriver, FakeDriver(self)),
            cast(ExpertMoments, moments),
            TIP,
            cast(Stop, self.stop),
        )


@dataclass
class FakeStop:
    """A person who asked to leave at second 0."""

    scene: Scene
    leave_timeout_s: float

    @property
    def remaining_s(self) -> float:
        return max(self.leave_timeout_s - self.scene.now_s, 0.0)


@dataclass
class FakeDriver:
    """The others' decisions, by the script."""

    scene: Scene

    @property
    def tip(self) -> Manifest:
        tip = self.scene.tip
        for name, value in self.scene.after_tip.items():
            setattr(self.scene, name, value)
        return tip

    @property
    def left(self) -> str | None:
        return self.scene.left

    def leave(self) -> None:
        self.scene.asked += 1

    def wait_for_tip(self, *_: object) -> None:
        self.scene.pass_time(1.0)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_a_peer_goes_when_the_others_know_and_have_its_moments(scene: Scene) -> None:
    scene.script = {3: {"tip": WITHOUT_ME, "left": "listed no longer"}, 5: {"handed_over": True}}
    assert scene.run() == "listed no longer; moments of 2 of 2 experts handed over"
    assert scene.asked == 1
    assert 5 <= scene.now_s < 7
    assert scene.told == [WITHOUT_ME]


def test_a_peer_that_hears_at_once_that_it_has_left_hands_over_first(scene: Scene) -> None:
    """The manifest without it comes between two looks at the driver."""
    scene.handed_over = True  # there is nothing to hand over yet
    scene.after_tip = {"tip": WITHOUT_ME, "left": "listed no longer"}
    scene.run()
    assert scene.told == [WITHOUT_ME]


def test_without_a_manifest_it_goes_once_its_moments_are_there(scene: Scene) -> None:
    scene.script = {2: {"handed_over": True}}
    assert scene.run().startswith("the others did not answer in time")
    assert COURTESY_S <= scene.now_s <= COURTESY_S + 2


def test_a_hand_over_is_bounded_by_the_leave_timeout(scene: Scene) -> None:
    scene.script = {3: {"tip": WITHOUT_ME, "left": "listed no longer"}}
    scene.run()
    assert 120 <= scene.now_s <= 122


def test_a_stop_is_asked_once_and_has_a_time_out() -> None:
    stop = Stop(7.0)
    assert not stop() and stop.remaining_s == float("inf")
    stop.ask()
    assert stop() and stop.wait(0) and 6.0 < stop.remaining_s <= 7.0
    remaining_s = stop.remaining_s
    stop.ask()
    assert stop.remaining_s <= remaining_s


class Served:
    """Others fetch a byte at each look until one time.

    The person stops the peer at another time.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, until_s: float, stop_s: float = inf
    ) -> None:
        self.now_s, self.until_s, self.stop_s, self.looks = 0.0, until_s, stop_s, 0
        monkeypatch.setattr(leaving, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        for _ in serving(cast(Stop, self), self.sent, 60.0):
            self.looks += 1

    def wait(self, timeout_s: float) -> bool:
        self.now_s += timeout_s
        return self.now_s >= self.stop_s

    def sent(self) -> int:
        return int(min(self.now_s, self.until_s) / leaving.SERVE_LOOK_S)


def test_a_finished_peer_serves_as_long_as_somebody_fetches_what_only_it_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quorum has the last round. The other members fetch it over slow lines for hours."""
    assert Served(monkeypatch, 0.0).now_s == 60.0
    served = Served(monkeypatch, 7200.0)
    assert served.now_s == 7260.0 and served.looks == 2 * served.now_s
    assert Served(monkeypatch, 1e9).now_s == MAX_SERVING_S
    assert Served(monkeypatch, 1e9, stop_s=100.0).now_s == 100.0
