"""Lost heads between real nodes: requested, checked, kept."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from swarm.config import RoundConfig
from swarm.errors import Refused
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.node.node import Handlers
from swarm.network.rounds import chain_gaps as module
from swarm.network.rounds.chain_gaps import HEADS_QUESTION, ChainGaps
from swarm.network.rounds.outbound import Outbound
from swarm.network.rounds.record_file import RecordFile
from swarm.network.rounds.round_driver import RoundDriver
from swarm.network.wire.identity import load_or_create_identity
from swarm.network.wire.ledger import Cost
from swarm.network.wire.steady_clock import passed_s
from swarm.protocol.chain.gaps import decode_page, encode_question, gaps
from swarm.protocol.chain.trust import Chain, proof_problem
from swarm.protocol.messages.events import Record
from swarm.protocol.messages.messages import Ballot, Certificate, Link, accept_statement
from swarm.protocol.rounds import LocalPeer, RoundMachine
from swarm.protocol.timing.deadlines import Timers
from tests.network.conftest import Peers
from tests.network.rounds.test_round_driver import LAYOUT
from tests.protocol.exchange.test_handover import next_round
from tests.protocol.round_pump import found, make_rules
from tests.waiting import wait_until

WAIT_S = 60.0
RULES = make_rules()


class Duo:
    """One member that has all heads and one whose chain file was damaged, each with its node."""

    def __init__(self, peers: Peers) -> None:
        folder = peers.folder
        keys = [load_or_create_identity(folder / f"identity{number}.key") for number in range(2)]
        names = sorted(key.peer_id for key in keys)
        manifests = [found(RULES, names)]
        for _ in range(7):
            manifests.append(next_round(manifests[-1], RULES, names))
        self.ballot = Ballot(0, manifests[0].order[0])
        links = [Link(manifests[0].head)]
        for manifest in manifests[1:]:
            statement = accept_statement(RULES.run, self.ballot, manifest.digest)
            signatures = {key.peer_id: key.sign(statement) for key in keys}
            links.append(Link(manifest.head, Certificate(self.ballot, signatures)))
        self.whole = Chain(tuple(links))
        self.record = Record(manifests[-1], links[-1].certificate, manifests[-2])
        self.shown = self.whole
        """The heads of the complete member, from which it answers."""
        self.knowing = peers.node(Handlers(on_request=self.on_request))
        self.lacking = peers.node()
        self.knowing.ledger.admit([self.lacking.peer_id])
        self.file = RecordFile(folder / "record")
        self.file.write(self.record, links)
        lines = self.file.chain.path.read_bytes().splitlines(keepends=True)
        flipped = lines[6][:99] + bytes([lines[6][99] ^ 1]) + lines[6][100:]
        torn = [*lines[:2], lines[2][:200], *lines[4:6], flipped, *lines[7:]]
        self.file.chain.path.write_bytes(b"".join(torn))
        self.driver = RoundDriver(
            self.lacking,
            BlobStore(),
            self.machine(self.lacking.peer_id, self.file.read_chain(self.record)),
            record_file=self.file,
            layout=LAYOUT,
            settings=RoundConfig(local_steps=1),
            merger=lambda _: {},
        )

    def machine(self, me: str, chain: Chain) -> RoundMachine:
        stored = [entry.digest for entry in self.record.tip.entries.values()]
        peer = LocalPeer(me, 1.0, RULES, Timers(), now=passed_s(), random=random.Random(1))
        return RoundMachine(peer, self.record, stored=stored, chain=chain)

    async def on_request(self, source: str, payload: bytes) -> bytes:
        machine = self.machine(self.knowing.peer_id, self.shown)
        heads = ChainGaps(self.knowing, machine, Outbound(BlobStore()), _ignore)
        return await heads.answer(source, payload)


def _ignore(_: object) -> None:
    """Ignores found heads on this side."""


@pytest.fixture
def duo(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Duo]:
    for name in ("FIRST_S", "NEXT_S", "AGAIN_S"):
        monkeypatch.setattr(module, name, 0.05)
    duo = Duo(peers)
    yield duo
    duo.lacking.run(duo.driver.stop(), 10)


def test_links_of_a_damaged_file_come_from_a_member_and_the_file_is_whole_again(duo: Duo) -> None:
    machine = duo.driver.machine
    away = Chain((Link(duo.whole.links[2].head),))
    assert [link.head.height for link in machine.chain.links] == [0, 1, 5, 7]
    assert len(gaps(machine.chain)) == 2
    assert away.rooted(machine.chain.proof(away.tip.code))[0].head != away.tip
    duo.driver.start()
    assert wait_until(lambda: machine.chain == duo.whole)
    path = away.rooted(machine.chain.proof(away.tip.code))
    assert proof_problem(path, duo.record.tip.head, away.trusted) is None
    assert wait_until(lambda: duo.file.chain.read() == duo.whole.links)
    assert duo.file.read_chain(duo.record) == duo.whole


def test_heads_that_nobody_has_signed_are_refused_and_asked_for_again(duo: Duo) -> None:
    unsigned = Certificate(duo.ballot, dict.fromkeys(duo.record.tip.members, bytes(64)))
    links = (duo.whole.links[0], *(Link(link.head, unsigned) for link in duo.whole.links[1:]))
    duo.shown = Chain(links)
    machine = duo.driver.machine
    before = machine.chain
    duo.driver.start()
    assert wait_until(lambda: duo.lacking.traffic.refused["false_heads"] >= 2)
    assert machine.chain is before
    duo.shown = duo.whole
    assert wait_until(lambda: machine.chain == duo.whole)


def test_a_member_s_question_for_heads_is_charged_and_one_of_another_run_is_not_answered(
    duo: Duo, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, (gap, *_) = duo.knowing.ledger, gaps(duo.driver.machine.chain)
    asker, question = duo.lacking, encode_question(gap.question)
    charged: list[tuple[str, Cost]] = []
    charge = ledger.charge

    def note(peer: str, cost: Cost, *rest: Any) -> None:
        charged.append((peer, cost))
        charge(peer, cost, *rest)

    monkeypatch.setattr(ledger, "charge", note)

    def ask(run: str, asked: bytes = question) -> bytes:
        payload = HEADS_QUESTION + run.encode() + b" " + asked
        return asker.run(asker.request(duo.knowing.peer_id, payload, 10.0), 15)

    assert ask("run-2") == b""
    ledger.admit(())
    assert ask(RULES.run) == b"", "a stranger needs none"
    ledger.admit([asker.peer_id])
    assert not charged
    assert [link.head.height for link in decode_page(ask(RULES.run))] == [2, 3, 4, 5]
    assert charged == [(asker.peer_id, Cost.SECONDS)]
    with pytest.raises(Refused):
        ask(RULES.run, b"{}")
    assert duo.knowing.traffic.refused["heads_question_schema"] == 1
    ledger.charge(asker.peer_id, Cost.SECONDS, 1e3, time.monotonic())
    with pytest.raises(Refused):
        ask(RULES.run)
    assert duo.knowing.traffic.refused["seconds_of_member"] == 1
