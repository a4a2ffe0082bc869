"""Facts about an exported model: its origin, and its form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swarm import durable
from swarm.model.huggingface import MAX_SHARD_BYTES, Dtype
from swarm.peer.text.agreed_model import AgreedModel
from swarm.protocol.records.life_events import EventReader, Validation
from swarm.protocol.records.records import Losses
from swarm.protocol.values.manifest import Digest, PeerId, run_id


@dataclass(frozen=True)
class Form:
    """A person's choices for the form of an export.

    Attributes:
        dtype: type of the weights. "agreed" leaves each tensor in the type in which peers exchange
            it.
        max_shard_bytes: largest size of a file of weights. Writing a file holds it in memory twice.
        license: license that the model card names. None names no license.
    """

    dtype: Dtype = "agreed"
    max_shard_bytes: int = MAX_SHARD_BYTES
    license: str | None = None


@dataclass(frozen=True)
class ExportFacts:
    """One agreed model and the exporter's knowledge of its run.

    Attributes:
        model: configuration, manifest, and the store with its blobs, the held-out text among them.
        form: form of the export.
        told: the known held-out losses, also of later rounds.
        names: display names of the known peers.
        is_measured: whether the exporter itself has measured the loss of this state.
    """

    model: AgreedModel
    form: Form = Form()
    told: Losses = field(default_factory=Losses)
    names: Mapping[PeerId, str] = field(default_factory=dict)
    is_measured: bool = False

    def measured(self, nats_per_token: float, bits_per_byte: float) -> ExportFacts:
        """These facts with the exporter's own loss, which takes precedence over peers' figures."""
        nat = bits_per_byte / nats_per_token if nats_per_token else None
        own = Losses({}, {self.model.manifest.digest: nats_per_token}, nat)
        return replace(self, told=self.told.with_newer(own), is_measured=True)

    @property
    def run_id(self) -> str:
        """The run's id.

        Manifest 0 does not contain the id, because the id is derived from that manifest.
        """
        run, manifest = self.model.run, self.model.manifest
        return manifest.run or run_id(run.run.name, run.fingerprint(), manifest.blob)

    @property
    def losses(self) -> tuple[tuple[int, float], ...]:
        """(round, held-out loss in nats per token), ascending, up to this model's round."""
        return self.told.until(self.model.manifest)

    @property
    def val_loss(self) -> float | None:
        """Held-out loss of exactly this state in nats per token, if known."""
        return self.told.by_manifest.get(self.model.manifest.digest)

    def as_json(self) -> dict[str, Any]:
        """The export's origin in plain values, for programs."""
        manifest = self.model.manifest
        return {
            "run_id": self.run_id,
            "generation": manifest.generation,
            "round": manifest.round,
            "rounds": self.model.run.run.rounds,
            "height": manifest.height,
            "manifest": manifest.digest,
            "step": manifest.step,
            "tokens": manifest.tokens,
            "contributors": list(manifest.contributors),
            "dtype": self.form.dtype,
            "val_loss": self.val_loss,
        }


def kept_losses(events: Path) -> Losses:
    """Losses in the history of one peer, which has itself measured only some rounds.

    A missing file has no losses. A line that a kill has cut short is skipped.
    """
    found: dict[int, float] = {}
    exactly: dict[Digest, float] = {}
    nat: float | None = None
    reader = EventReader()
    for line in durable.read_lines(events):
        try:
            _, _, event = reader.parse(line)
        except ValueError:
            continue
        if isinstance(event, Validation):
            found[event.round] = exactly[event.digest] = event.val_loss
            nat = event.bits_per_byte / event.val_loss if event.val_loss else nat
    return Losses(found, exactly, nat)
