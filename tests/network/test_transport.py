"""Straight first, then through others, within the time that was given: with stand-ins for both."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.errors import NoRoute, Refused, Unreachable
from swarm.network.control import Control
from swarm.network.relay import Relay
from swarm.network.transport import Transport

PEER = "12D3KooWEhqPMwUVi6Sr3ThFZAsoGfBTXdv6PxBByKg8ZdCrNgTf"


class Stage:
    """What the peer itself, and each relay, answers; and who was asked."""

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
    """Streams beside libp2p's, to a peer whose way is known."""

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
    """A dial of it takes seconds to fail, and what is wanted is there through others."""

    async def straight(*_: object) -> str:
        return "straight"

    async def through(relay: str, *_: object) -> str:
        return relay

    stage, direct = Stage(b"yes", a=b"through a"), Direct()
    transport = stage.transport
    transport.direct = cast(Any, direct)
    monkeypatch.setattr(stage, "open_stream", through, raising=False)
    monkeypatch.setattr("swarm.network.transport.open_stream", straight)
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
    assert opened() == ("a", 0.0), "a message that was not answered says the same"
