"""The newest tip: waiting for peers, and verification of their answers."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from swarm.errors import BadManifest, NobodyReachable
from swarm.network.runs import tips
from swarm.network.runs.tips import Shown, Trust, first_and_soon, newest_tip
from swarm.protocol.messages.messages import Ballot, Certificate, Commit, Header, Link
from swarm.protocol.rounds import Rules
from tests.protocol.exchange.test_handover import next_round
from tests.protocol.round_pump import found, make_rules

ANY: Any = SimpleNamespace(peer_id="me", run="run")
FOREVER_S = 1e6


class Asked:
    """Peers that show a tip of some code, name a reason why not, or never answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: int | str | None) -> None:
        self.answers, self.given_up = answers, list[str]()
        monkeypatch.setattr(tips, "_ask_tip", self.ask)

    async def ask(self, _n: Any, _d: Any, _r: Any, _t: Any, peer: str) -> Shown | str:
        answer = self.answers[peer]
        if answer is None:
            try:
                await asyncio.sleep(FOREVER_S)
            finally:
                self.given_up.append(peer)
        if isinstance(answer, int):
            record: Any = SimpleNamespace(tip=SimpleNamespace(code=answer))
            return Shown(record)
        return str(answer)

    def newest(self, grace_s: float) -> int:
        asking = newest_tip(ANY, ANY, ANY, self.answers, Trust("f" * 64), grace_s=grace_s)
        return int(asyncio.run(asking).record.tip.code)


def test_who_names_a_blob_that_nobody_serves_does_not_keep_the_tips_of_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked(monkeypatch, A=None, B=3, C=5, D="no answer", E=None)
    assert asked.newest(0.01) == 5, "the best of those that came"
    assert sorted(asked.given_up) == ["A", "E"]


def test_nobody_is_given_up_before_a_tip_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Asked(monkeypatch, A="no proof", B="no answer")
    with pytest.raises(NobodyReachable, match="no answer; no proof"):
        refused.newest(FOREVER_S)

    async def slow() -> int:
        for _ in range(10):
            await asyncio.sleep(0)
        return 1

    async def bad() -> int:
        return 0

    assert asyncio.run(first_and_soon([bad(), slow()], bool, 0.0)) == [0, 1]


RULES: Rules = make_rules()
FIRST = found(RULES, ("A", "B"))
SECOND = next_round(FIRST, RULES, ("A", "B"))
BALLOT = Ballot(0, "A")
RUN: Any = SimpleNamespace(run=RULES.run, config=FIRST.founding.config)


def proved_tip(trusted: str, *signers: str) -> Shown:
    certificate = Certificate(BALLOT, dict.fromkeys(signers, bytes(64)))
    path = (Link(FIRST.head), Link(SECOND.head, certificate))
    header = Header(SECOND.code, SECOND.digest, SECOND.generation)
    message = Commit(SECOND, certificate, FIRST, path)
    return tips._proved_tip(header, message, "A", RUN, Trust(trusted))


def test_signatures_that_prove_no_tip_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = list[str]()
    monkeypatch.setattr(
        tips, "verified", lambda _h, message, peer, _r: verified.append(peer) or message
    )
    for trusted, signers in (("0" * 64, ("A", "B")), (FIRST.digest, ())):
        with pytest.raises(BadManifest):
            proved_tip(trusted, *signers)
    assert not verified
    assert proved_tip(FIRST.digest, "A", "B").record.tip == SECOND
    assert verified == ["A"]
    monkeypatch.undo()
    with pytest.raises(BadManifest, match="0 of the 2"):
        proved_tip(FIRST.digest, "A", "B")


def test_the_proof_is_looked_at_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = list[int]()

    def prove(*_: Any) -> str:
        threads.append(threading.get_ident())
        return "why not"

    monkeypatch.setattr(tips, "open_message", AsyncMock(return_value=(ANY, ANY)))
    monkeypatch.setattr(tips, "_proved_tip", prove)
    node: Any = SimpleNamespace(request=AsyncMock(return_value=b"shown"))
    downloads: Any = SimpleNamespace(store=None)
    assert asyncio.run(tips._ask_tip(node, downloads, ANY, Trust("0" * 64), "A")) == "why not"
    assert threads and threads[0] != threading.get_ident()
