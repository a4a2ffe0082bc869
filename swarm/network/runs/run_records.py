"""Publishes and reads records in the DHT, and checks announcements and blobs of strangers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from pydantic import ValidationError

from swarm.config import RunConfig
from swarm.config.section import refusal
from swarm.errors import BadBlob, BadManifest, BadRecord, NetworkDown, NobodyReachable, RunMismatch
from swarm.network.node.node import Node
from swarm.protocol.records import records
from swarm.protocol.values.digests import Buffer
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.manifest import MAX_MANIFEST_BYTES, Manifest
from swarm.protocol.values.texts import TokenizerFile

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


async def heard(call: Awaitable[Answer], otherwise: Answer) -> Answer:
    """The DHT's answer, or a default if it does not answer or the daemon is dead.

    For callers that ask again, or do not need an answer. The nodes nearest to a key may lie or not
    answer, which must not stop the caller.

    Args:
        call: such as `publish` or `fetch_records`.
        otherwise: returned without an answer.
    """
    try:
        return await call
    except (NobodyReachable, NetworkDown) as error:
        logger.info("nothing was heard: %s", error)
        return otherwise


async def publish(node: Node, key: str, record: records.DhtRecord) -> bool:
    """Stores this peer's record under a key, in place of the previous one; see `Node.store`.

    Raises:
        BadRecord: every reader would refuse the record, without notice to its writer.
        NobodyReachable: the DHT did not answer.
        NetworkDown: the daemon is dead.
    """
    encoded = records.encode_record(record)
    records.read_record(type(record), encoded)
    once = isinstance(record, records.MergeRecord | records.ValidationRecord | records.ScoreRecord)
    return await node.store(key, encoded, records.EVENT_TTL_S if once else records.RECORD_TTL_S)


async def fetch_records(
    node: Node, kind: type[records.AnyRecord], keys: Sequence[str]
) -> dict[str, records.AnyRecord]:
    """All valid records under the keys, by the peer that signed them; see `fetch_dated`.

    Raises:
        NobodyReachable: the DHT did not answer.
        NetworkDown: the daemon is dead.
    """
    dated = await fetch_dated(node, kind, keys)
    return {peer: record for peer, (_, record) in dated.items()}


async def fetch_dated(
    node: Node, kind: type[records.AnyRecord], keys: Sequence[str]
) -> dict[str, tuple[float, records.AnyRecord]]:
    """Each valid record with its expiration, by the peer that signed both; counts invalid ones.

    Expirations are seconds since 1970 by the owner's clock. If a peer has records under several
    keys, the record that expires last counts.

    Raises:
        NobodyReachable: the DHT did not answer.
        NetworkDown: the daemon is dead.
    """
    newest: dict[str, tuple[float, records.AnyRecord]] = {}
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


def _decoded(kind: type[records.AnyRecord], value: bytes, peer: str) -> records.AnyRecord:
    record = records.decode_record(kind, value)
    if isinstance(record, records.PeerRecord) and record.peer_id != peer:
        raise BadRecord("record_owner", f"{peer} signed a record of {record.peer_id}")
    return record


MAX_CONFIG_BYTES = 256 * 1024
MAX_HELD_OUT_BYTES = 8 * 1_000_000
"""Largest held-out text, as tokens of 4 bytes; some normalizers make a text longer."""
MAX_TOKENIZER_BYTES = 64 * 2**20
"""Largest tokenizer file. The largest in wide use, that of Gemma 3, has 33 MB."""


def check_announcement(record: records.RunRecord) -> None:
    """Refuses sizes that would take too much memory before the digest can be checked.

    Raises:
        BadRecord: reason `record_size`.
    """
    for what, num_bytes, limit in (
        ("configuration", record.config_bytes, MAX_CONFIG_BYTES),
        ("manifest 0", record.founding_bytes, MAX_MANIFEST_BYTES),
    ):
        if num_bytes > limit:
            raise BadRecord(
                "record_size", f"{record.run}: a {what} of {num_bytes} bytes (limit {limit})"
            )


def decode_config(blob: Buffer, record: records.RunRecord) -> RunConfig:
    """The configuration of an announced run.

    Raises:
        BadBlob: the blob is no configuration, or outside the bounds of `swarm.config.run_settings`.
        RunMismatch: it is not the announced one.
    """
    try:
        run = RunConfig.model_validate_json(bytes(blob))
    except ValidationError as error:
        what = f"the configuration of {record.run}: {refusal(error)}"
        raise BadBlob("config_schema", what) from error
    if run.fingerprint() != record.fingerprint or run.run.name != record.name:
        raise RunMismatch(f"the configuration of {record.run} is not the announced one")
    return run


def check_state(manifest: Manifest, layout: Layout) -> None:
    """Refuses, before any fetch, a manifest whose blobs do not fit the run's layout.

    Raises:
        BadManifest: reason `manifest_units` or `manifest_size`.
    """
    sizes = {unit: entry.num_bytes for unit, entry in manifest.entries.items()}
    if sizes != {unit.unit: unit.num_bytes for unit in layout.units}:
        raise BadManifest("manifest_units", "the manifest's units are not those of the run")
    founding = manifest.founding
    if (
        founding.validation_bytes > MAX_HELD_OUT_BYTES
        or founding.config_bytes > MAX_CONFIG_BYTES
        or founding.validation_bytes % 4
    ):
        raise BadManifest("manifest_size", "the manifest's held-out text has an impossible size")
    check_tokenizer_size(founding.tokenizer)


def check_tokenizer_size(tokenizer: TokenizerFile | None) -> None:
    """Refuses a tokenizer that would take too much memory, before it is fetched.

    Raises:
        BadManifest: reason `manifest_size`.
    """
    if tokenizer and tokenizer.num_bytes > MAX_TOKENIZER_BYTES:
        raise BadManifest(
            "manifest_size",
            f"the run's tokenizer has {tokenizer.num_bytes} bytes (limit {MAX_TOKENIZER_BYTES})",
        )
