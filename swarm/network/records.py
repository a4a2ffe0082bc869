"""Publishes and reads the DHT's records; their schemas and keys are in `swarm.protocol.records`."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from swarm.errors import BadRecord, NetworkDown, NobodyReachable
from swarm.network.node import Node
from swarm.protocol.records import (
    EVENT_TTL_S,
    RECORD_TTL_S,
    AnyRecord,
    DhtRecord,
    MergeRecord,
    PeerRecord,
    ScoreRecord,
    ValidationRecord,
    decode_record,
    encode_record,
    read_record,
)

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


async def heard(call: Awaitable[Answer], otherwise: Answer) -> Answer:
    """What the DHT answers, or something else if it does not, or while the daemon is dead.

    It is for those who look again, or can do without: nothing may end because liars, or nodes that
    do not answer, are nearest to a key.

    Args:
        call: such as `publish` or `fetch_records`.
        otherwise: what is returned where nothing was heard.
    """
    try:
        return await call
    except (NobodyReachable, NetworkDown) as error:
        logger.info("nothing was heard: %s", error)
        return otherwise


async def publish(node: Node, key: str, record: DhtRecord) -> bool:
    """Stores this peer's record under a key, in place of the one before; see `Node.store`.

    Raises:
        BadRecord: every reader would refuse it, and say so where nobody looks.
        NobodyReachable: the DHT did not answer.
        NetworkDown: the daemon is dead.
    """
    encoded = encode_record(record)
    read_record(type(record), encoded)
    once = isinstance(record, MergeRecord | ValidationRecord | ScoreRecord)
    return await node.store(key, encoded, EVENT_TTL_S if once else RECORD_TTL_S)


async def fetch_records(
    node: Node, kind: type[AnyRecord], keys: Sequence[str]
) -> dict[str, AnyRecord]:
    """All valid records under the keys, by the peer that signed them; see `fetch_dated`.

    Raises:
        NobodyReachable: the DHT did not answer.
        NetworkDown: the daemon is dead.
    """
    dated = await fetch_dated(node, kind, keys)
    return {peer: record for peer, (_, record) in dated.items()}


async def fetch_dated(
    node: Node, kind: type[AnyRecord], keys: Sequence[str]
) -> dict[str, tuple[float, AnyRecord]]:
    """Each valid record with its expiration, by the peer that signed both; bad ones are counted.

    Expirations are seconds since 1970 by the owner's clock. If a peer has records under several
    keys, the one that expires last counts.

    Raises:
        NobodyReachable: the DHT did not answer.
        NetworkDown: the daemon is dead.
    """
    newest: dict[str, tuple[float, AnyRecord]] = {}
    for signed in (await node.get_many(keys)).values():
        for peer, (value, expiration) in sorted(signed.items()):
            try:
                record = _decoded(kind, value, peer)
            except BadRecord as error:
                node.traffic.refuse(error.reason)
                logger.debug("record of %s refused: %s", peer, error)
                continue
            if peer not in newest or newest[peer][0] < expiration:
                newest[peer] = (expiration, record)
    return dict(sorted(newest.items()))


def _decoded(kind: type[AnyRecord], value: bytes, peer: str) -> AnyRecord:
    record = decode_record(kind, value)
    if isinstance(record, PeerRecord) and record.peer_id != peer:
        raise BadRecord("record_owner", f"{peer} signed a record of {record.peer_id}")
    return record
