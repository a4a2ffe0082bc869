"""What a peer offers is judged here first, by the rule of all who will fetch it [U1]."""

from __future__ import annotations

import logging

from swarm.codecs import Content
from swarm.errors import BadBlob
from swarm.network.contents import BlobGone
from swarm.peer.live_model import LiveModel
from swarm.peer.rounds import Rounds
from swarm.peer.status import PeerStatus
from swarm.protocol.manifest import Digest, Manifest, Unit
from swarm.protocol.rounds.plausible import update_bound

logger = logging.getLogger(__name__)


class Offering:
    """Stores offered values; one that nobody would take begins anew from the agreed one."""

    def __init__(self, model: LiveModel, rounds: Rounds, status: PeerStatus) -> None:
        self.model, self.rounds, self.status = model, rounds, status

    def store(self, tip: Manifest, unit: Unit, value: Content, tokens: int) -> tuple[Digest, int]:
        """Digest and size of a unit's value in the store, after local steps on `tip`.

        A value further from the agreed one than these steps can have moved it is not offered: this
        peer says why, in log and events, goes on from the agreed value and offers that.
        """
        me = self.model.me
        bound = update_bound(unit, [me], {me: tokens}, tip, self.rounds.rules)
        if bound is None:
            return self.rounds.store_value(value)
        try:
            with self.model.agreed.held([bound.base]):
                try:
                    return self.rounds.store_value(self.model.guarded(unit, value, bound))
                except BadBlob as error:
                    logger.error("not offered, begins anew from the agreed value: %s", error)
                    self.status.refused(unit, str(error))
                    self.model.begin_anew(tip, unit)
        except BlobGone as error:
            logger.info("%s is offered unjudged: %s", unit, error)
        return self.rounds.store_value(self.model.value_of(unit))
