"""Fetches missing heads of this peer's chain from members, and sends heads that members lack.

A peer whose chain file was damaged lacks links. In the background it asks one random member at a
time, until it has all links. No other work waits for them. See `swarm.protocol.chain.gaps`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from functools import partial

from swarm.errors import HostileInput, NetworkDown, Unreachable
from swarm.network.node.node import Node
from swarm.network.rounds.outbound import Outbound
from swarm.network.wire.identity import verify
from swarm.network.wire.ledger import Cost, Costs
from swarm.protocol.chain.gaps import (
    Filling,
    between,
    decode_page,
    decode_question,
    encode_page,
    encode_question,
    filled,
    gaps,
)
from swarm.protocol.chain.trust import Chain
from swarm.protocol.messages import signatures
from swarm.protocol.messages.events import Event, HeadsFound
from swarm.protocol.messages.messages import Commit, Header
from swarm.protocol.rounds import RoundMachine
from swarm.protocol.values.manifest import Code, Digest, PeerId

logger = logging.getLogger(__name__)

HEADS_QUESTION = b"heads "
FIRST_S = 5.0
"""Pause after the start, in which the peer finds the others."""
NEXT_S = 1.0
"""Pause between two pages of heads."""
AGAIN_S = 60.0
"""Pause after a search without result."""
ASK_DEADLINE_S = 30.0
"""Time limit for one page, which has up to 1 MB."""


class ChainGaps:
    """Finds one peer's gaps, asks members for heads and answers members, in the node's loop."""

    def __init__(
        self,
        node: Node,
        machine: RoundMachine,
        outbound: Outbound,
        deliver: Callable[[Event], None],
    ) -> None:
        """Asks nothing before `complete`.

        Args:
            node: sends the questions; its ledger limits what other peers may cost this one.
            machine: owns the chain, and alone changes it.
            outbound: encodes the tip.
            deliver: takes found links, for the machine.
        """
        self._node, self._machine = node, machine
        self._outbound, self._deliver = outbound, deliver
        self._begun: dict[tuple[Digest, Digest], Filling] = {}
        """Partly filled gaps, by the heads before and after them."""

    # ------------------------------------------------ for others

    def commit_of_tip(self, trusted: Code | Digest) -> bytes:
        """The tip as a COMMIT, if possible with a proof from the head that a stranger trusts."""
        record = self._machine.record
        tip, path = record.tip, self._machine.chain.proof(trusted)
        header = Header(tip.code, tip.digest, tip.generation)
        return self._outbound.encode(header, Commit(tip, record.certificate, record.parent, path))

    async def answer(self, source: PeerId, payload: bytes) -> bytes:
        """The requested heads, as far as they are here; empty unless a member asked for heads.

        Strangers get none: a page has up to 1 MB, and a COMMIT proves the tip to them.

        Raises:
            BadMessage: the question does not fit the schema.
            TooCostly: the sender of the question has cost too much already.
        """
        ledger, now_s = self._node.ledger, time.monotonic()
        if not (payload.startswith(self._prefix) and ledger.is_member(source)):
            return b""
        ledger.take(source, Cost.SECONDS, 0, now_s)
        held = ledger.take(source, Cost.PENDING, 1, now_s)
        try:
            work = partial(_answer, self._machine.chain, payload.removeprefix(self._prefix))
            return await Costs(source, ledger).parsing(work, off_loop=True)
        finally:
            ledger.give_back(held, time.monotonic())

    @property
    def _prefix(self) -> bytes:
        return HEADS_QUESTION + self._machine.rules.run.encode() + b" "

    # ------------------------------------------------ from others

    async def complete(self) -> None:
        """Asks for missing heads of the chain while this peer runs."""
        await asyncio.sleep(FIRST_S)
        while True:
            filling, peer = self._next_gap(), self._somebody()
            has_come = filling is not None and peer is not None and await self._ask(peer, filling)
            await asyncio.sleep(NEXT_S if has_come else AGAIN_S)

    def _next_gap(self) -> Filling | None:
        """A random gap of the chain, with the links found so far; drops closed gaps."""
        found = gaps(self._machine.chain)
        begun = {gap.ends: self._begun.get(gap.ends, gap) for gap in found}
        self._begun = begun
        return random.choice(list(begun.values())) if begun else None

    def _somebody(self) -> PeerId | None:
        """A random member."""
        others = sorted(set(self._machine.tip.members) - {self._node.peer_id})
        return random.choice(others) if others else None

    async def _ask(self, peer: PeerId, filling: Filling) -> bool:
        """Asks a member for a page of a gap. Returns whether it sent a page that fits."""
        question = self._prefix + encode_question(filling.question)
        try:
            payload = await self._node.request(peer, question, ASK_DEADLINE_S)
            if not payload:
                return False
            loop = asyncio.get_running_loop()
            checking = partial(_extended, filling, payload, self._machine.rules.run)
            filling = await loop.run_in_executor(None, checking)
        except (Unreachable, NetworkDown) as error:
            logger.info("peer=%s showed no heads: %s", peer[-6:], error)
            return False
        except HostileInput as error:
            self._node.traffic.refuse(error.reason)
            logger.warning("peer=%s heads refused: %s", peer[-6:], error)
            return False
        chain = self._machine.chain
        _, problem = filled(chain, filling.path)
        if problem is None:
            self._deliver(HeadsFound(filling.path))
        if problem is None or filling.links[-1].head.code >= chain.tip.code:
            self._begun.pop(filling.ends, None)
        else:
            self._begun[filling.ends] = filling
        return True


def _answer(chain: Chain, question: bytes) -> bytes:
    return encode_page(between(chain, decode_question(question)))


def _extended(filling: Filling, payload: bytes, run: str) -> Filling:
    sound = partial(signatures.sound, run=run, holds=verify)
    return filling.extended(decode_page(payload), sound)
