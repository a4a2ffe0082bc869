"""Checks of what a stranger announces and serves, before anything is made of it."""

from __future__ import annotations

from pydantic import ValidationError

from swarm.config import RunConfig
from swarm.config.explaining import refusal
from swarm.errors import BadBlob, BadManifest, BadRecord, RunMismatch
from swarm.protocol.digests import Buffer
from swarm.protocol.layout import Layout
from swarm.protocol.manifest import MAX_MANIFEST_BYTES, Manifest
from swarm.protocol.records import RunRecord
from swarm.protocol.texts import TokenizerFile

MAX_CONFIG_BYTES = 256 * 1024
MAX_HELD_OUT_BYTES = 8 * 1_000_000
"""A text of the largest size as tokens of 4 bytes; some normalisers make more of it."""
MAX_TOKENIZER_BYTES = 64 * 2**20
"""The largest in wide use, that of Gemma 3, has 33 MB."""


def check_announcement(record: RunRecord) -> None:
    """Refuses sizes that would take memory before a digest could tell that they are a lie.

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


def decode_config(blob: Buffer, record: RunRecord) -> RunConfig:
    """The configuration of an announced run.

    Raises:
        BadBlob: it is none, or one beyond the bounds of `swarm.config.bounds`.
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
    """Refuses a manifest whose blobs are not those of the run, before any is fetched.

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
