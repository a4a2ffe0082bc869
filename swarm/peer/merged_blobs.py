"""The experts that a due merge makes of the agreed ones."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from swarm.codecs import Content, encoded
from swarm.config import RunConfig
from swarm.experts import Slice, expert_of, expert_unit
from swarm.model.merge import Donors, donors_of, merged_part
from swarm.peer.agreed_model import Agreed
from swarm.protocol.manifest import Manifest, Unit
from swarm.protocol.merging import alpha_at


def merge_blobs(
    manifest: Manifest, run: RunConfig, agreed: Agreed
) -> tuple[dict[Unit, Content], Donors]:
    """The merged experts of a due manifest, and who the donors were.

    Donors are found first; the experts' contents are read and computed as they are asked for, a
    chunk at a time. See `swarm.model.merge` for what is held: chunks of all experts in fp64 while
    donors are looked for, 16 bytes for each of `CHUNK_ELEMENTS` and the chunk's encoded form after.

    Raises:
        BlobGone: the manifest is no longer the newest; so do the contents.
    """

    def read(part: Slice) -> Tensor:
        expert = expert_of(part.name)
        assert expert is not None
        unit = expert_unit(expert)
        return agreed.part(manifest.entries[unit].digest, unit, part)

    donors = donors_of(read, run.model, run.merging.top_k)
    alpha = alpha_at(manifest.step, run.merging)
    merged = partial(merged_part, read=read, donors=donors, alpha=alpha)
    units = [expert_unit(expert) for expert in range(run.model.num_experts)]
    return {unit: encoded(agreed.layout.by_unit[unit], merged) for unit in units}, donors
