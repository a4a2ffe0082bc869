"""Direct first, then through relays, within the given time, with stand-ins for both."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from swarm.errors import NoRoute, Refused, Unreachable
from swarm.network.wire.control import Control
from swarm.network.wire.relay import Relay
from swarm.network.wire.transport import (
    DIRECT_AGAIN_S,
    LONGEST_REST_S,
    RELAYS_PER_TRY,
    Routes,
    Transport,
)

PEER = "12D3KooWEhqPMwUVi6Sr3ThFZAsoGfBTXdv6PxBByKg8ZdCrNgTf"


class Stage:
    """Answers of the peer and of each relay, and a record of the asked ones."""

    def __init__(self, straight: Exception | bytes, **relays: Exception | bytes | float) -> None:
        self.straight, self.relays = straight, relays
        self.asked: list[str] = []
        self.transport = Transport(
            cast(Control, self), cast(Relay, self), lambda: cast(Any, None), self.listening
        )

    def listening(self) -> frozenset[str]:
        return frozenset(self.relays)

    async def request(self, _: object, peer: str, payload: bytes, timeout_s: float) -> bytes:
        self.asked.append("straight")
        return outcome(self.straight)

    async def send(self, relay: str, *_: object, **__: object) -> bytes:
        self.asked.append(relay)
        answer = self.relays[relay]
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            return b"late"
        return outcome(answer)

    def ask(self, timeout_s: float = 5.0) -> bytes:
        self.asked.clear()
        return asyncio.run(self.transport.request(PEER, b"?", timeout_s))


def outcome(answer: Exception | bytes) -> bytes:
    if isinstance(answer, Exception):
        raise answer
    return answer


def test_a_peer_that_answers_is_asked_through_nobody() -> None:
    stage = Stage(b"yes", r=b"through r")
    assert stage.ask() == b"yes" and stage.asked == ["straight"]


@pytest.mark.parametrize("name", ["", "x" * 300, "né", "0OIl"])
def test_what_is_no_peer_id_is_asked_of_nobody(name: str) -> None:
    stage = Stage(b"yes", r=b"through r")
    with pytest.raises(Unreachable, match="is no peer id"):
        asyncio.run(stage.transport.request(name, b"?", 5.0))
    assert not stage.asked


def test_a_refusal_is_final() -> None:
    stage = Stage(Refused("no such message"), r=b"through r")
    with pytest.raises(Refused):
        stage.ask()
    assert stage.asked == ["straight"]


def test_relays_are_tried_until_one_reaches_it_which_is_asked_first_from_then_on() -> None:
    stage = Stage(NoRoute("not found"), a=NoRoute("a"), b=b"through b", c=NoRoute("c"))
    assert stage.ask() == b"through b"
    assert stage.asked[0] == "straight" and stage.asked[-1] == "b"
    assert stage.ask() == b"through b" and stage.asked == ["b"]
    assert stage.transport.is_far(PEER)


def test_when_nobody_reaches_it_the_first_reason_is_told() -> None:
    stage = Stage(NoRoute("not found"), a=NoRoute("a"))
    with pytest.raises(NoRoute, match="not found"):
        stage.ask()
    with pytest.raises(NoRoute):
        stage.ask()
    assert stage.asked == ["straight"], "the relay rests"


def test_a_peer_that_once_answered_and_is_now_silent_is_looked_for_through_others() -> None:
    """The line between the two may be cut."""
    stage = Stage(b"yes", a=b"through a")
    stage.ask()
    stage.straight = Unreachable("no answer within 5 s")
    assert stage.ask() == b"through a"
    assert stage.asked == ["straight", "a"]
    assert stage.ask() == b"through a"
    assert stage.asked == ["a"]


def test_a_peer_that_is_silent_everywhere_is_no_peer_that_refuses() -> None:
    stage = Stage(Unreachable("no answer within 5 s"), a=NoRoute("a"))
    with pytest.raises(Unreachable, match="no answer") as caught:
        stage.ask()
    assert not isinstance(caught.value, NoRoute)


def test_all_relays_together_get_the_time_of_one() -> None:
    stage = Stage(NoRoute("not found"), a=60.0, b=60.0, c=60.0)
    began_s = time.monotonic()
    with pytest.raises(NoRoute, match="not found"):
        stage.ask(timeout_s=0.2)
    assert time.monotonic() - began_s < 60
    assert len(stage.asked) == 2


class Direct:
    """Streams outside of libp2p, to a peer whose address is known."""

    def __init__(self) -> None:
        self.limits_s: list[float] = []
        self.knows = True

    def is_known(self, _: str) -> bool:
        return self.knows

    def doubt(self, _: str) -> None:
        self.knows = False

    async def open_stream(self, _: str, __: str, timeout_s: float) -> str:
        self.limits_s.append(timeout_s)
        if not self.knows:
            raise NoRoute("no answer in time")
        return "direct"


def test_a_line_that_may_be_cut_is_not_waited_for_when_a_stream_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dial of it takes seconds to fail, while relays have the wanted data."""
    straight = AsyncMock(return_value="straight")

    async def through(relay: str, *_: object) -> str:
        return relay

    stage, direct = Stage(b"yes", a=b"through a"), Direct()
    transport = stage.transport
    transport.direct = cast(Any, direct)
    monkeypatch.setattr(stage, "open_stream", through, raising=False)
    monkeypatch.setattr("swarm.network.wire.transport.open_stream", straight)
    transport._p2p = cast(Any, lambda: SimpleNamespace(daemon_listen_maddr={"unix": ""}))

    def opened() -> tuple[object, float]:
        return asyncio.run(transport.open_stream(PEER, "blobs", 5.0)), direct.limits_s[-1]

    assert opened() == ("direct", 5.0)
    direct.knows = False
    assert opened() == ("straight", 5.0), "one that was never silent has its time"
    direct.knows = True
    transport.unanswered(PEER)
    assert opened() == ("a", 0.0)
    direct.knows = True
    assert opened() == ("direct", 5.0), "it has answered meanwhile"
    transport._routes.dialled(PEER)
    stage.straight = Unreachable("no answer within 5 s")
    stage.ask()
    assert opened() == ("a", 0.0), "an unanswered message shows the same"


RELAYS = ["r1", "r2", "r3", "r4", "r5"]


def test_a_peer_is_dialled_first_and_others_are_asked_only_then() -> None:
    route = Routes().plan("p", RELAYS, 0.0)
    assert route.straight and len(route.relays) == RELAYS_PER_TRY


def test_a_peer_that_a_relay_reached_is_not_dialled_for_a_while() -> None:
    routes = Routes()
    routes.failed("p", 0.0, is_slow=False)
    assert not routes.needs_relay("p", 0.0), "no relay has reached it yet"
    routes.relayed("p", "r4", True, 0.0)
    route = routes.plan("p", RELAYS, 1.0)
    assert not route.straight and route.relays[0] == "r4"
    assert routes.plan("p", RELAYS, DIRECT_AGAIN_S).straight
    assert routes.plan("p", [], 1.0).straight, "without a relay it is dialed nevertheless"


def test_a_port_that_stays_closed_is_tried_ever_more_rarely_until_it_opens() -> None:
    routes, now_s, waits = Routes(), 0.0, []
    for _ in range(7):
        routes.failed("p", now_s, is_slow=True)
        routes.relayed("p", "r1", True, now_s)
        began_s = now_s
        while not routes.plan("p", RELAYS, now_s).straight:
            now_s += 10.0
        waits.append(now_s - began_s)
    assert waits == [30, 60, 120, 240, 480, 900, 900]
    routes.dialled("p")
    routes.failed("p", now_s, is_slow=False)
    assert routes.plan("p", RELAYS, now_s + DIRECT_AGAIN_S).straight


def test_a_peer_that_can_be_dialled_again_is() -> None:
    routes = Routes()
    routes.failed("p", 0.0, is_slow=False)
    routes.relayed("p", "r1", True, 0.0)
    routes.dialled("p")
    assert routes.plan("p", RELAYS, 0.0).straight


def test_failures_at_the_same_time_count_as_one() -> None:
    routes = Routes()
    for now_s in range(7):
        routes.failed("p", float(now_s), is_slow=True)
    routes.relayed("p", "r1", True, 7.0)
    assert routes.plan("p", RELAYS, DIRECT_AGAIN_S).straight


def test_a_stream_to_a_mute_peer_goes_through_others_until_it_answers_something() -> None:
    routes = Routes()
    routes.failed("p", 0.0, is_slow=True)
    assert routes.plan("p", RELAYS, 1.0).straight, "a message shows whether it answers again"
    assert not routes.plan("p", RELAYS, 1.0, is_stream=True).straight
    assert routes.plan("p", [], 1.0, is_stream=True).straight
    assert routes.plan("p", RELAYS, DIRECT_AGAIN_S, is_stream=True).straight
    routes.dialled("p")
    assert routes.plan("p", RELAYS, 1.0, is_stream=True).straight
    routes.failed("p", 2.0, is_slow=False)
    assert routes.plan("p", RELAYS, 3.0, is_stream=True).straight, "a refusal comes at once"


def test_a_relay_that_failed_rests_longer_each_time_for_this_peer_only() -> None:
    routes = Routes()
    rests = []
    now_s = 0.0
    for _ in range(6):
        routes.relayed("p", "r1", False, now_s)
        began_s = now_s
        while "r1" not in routes.plan("p", ["r1"], now_s).relays:
            now_s += 1.0
        rests.append(now_s - began_s)
    assert rests == [10, 20, 40, 80, LONGEST_REST_S, LONGEST_REST_S]
    assert routes.plan("q", ["r1"], 0.0).relays == ("r1",)


def test_a_peer_is_no_relay_to_itself_and_relays_share_the_load() -> None:
    routes = Routes()
    assert routes.plan("r1", ["r1"], 0.0).relays == ()
    assert {routes.plan(f"p{number}", RELAYS, 0.0).relays[0] for number in range(50)} == set(RELAYS)
