"""What a peer finds of its own work when it starts again."""

from __future__ import annotations

import logging
from pathlib import Path

from swarm.errors import CorruptState
from swarm.protocol.layout import Layout
from swarm.protocol.manifest import Kind, Manifest
from swarm.protocol.messages import Offer, OfferedUnit
from swarm.train.checkpoint import PrivateState, load_newest
from swarm.train.engine import Engine

logger = logging.getLogger(__name__)


def load_into(engine: Engine, path: Path, run_id: str, tip: Manifest) -> PrivateState | None:
    """The newest private state, with which the engine goes on; None if none is there, or is good.

    Masters are in the swarm: a peer that stayed away would lose more than its moments.
    """
    tips = [tip.digest, tip.parent] if tip.kind is Kind.REFORM else [tip.digest]
    try:
        loaded = load_newest(path)
        if loaded is None:
            return None
        loaded.state.require(run_id, tips=tips, tip_round=tip.round)
        engine.load_state_dict(loaded.state.engine)
    except CorruptState as error:
        logger.error("%s; goes on from the manifest, with moments of zero", error)
        return None
    logger.info("resume %s", loaded.reason)
    return loaded.state


def offer_of(private: PrivateState, layout: Layout) -> Offer:
    """What had been offered when the private state was written, without work of its own."""
    units = {
        unit: OfferedUnit(digest, layout.by_unit[unit].num_bytes, base="")
        for unit, digest in private.offered.items()
    }
    return Offer(private.base_tip, 0, 0, units)
