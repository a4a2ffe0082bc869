"""The host memory of a peer's process, phase by phase, in bytes. Pure arithmetic.

Every phase of a round works in chunks: values go from the engine to packs on the disk and back a
few MiB at a time, so a phase needs little beside the engine. Its peak is therefore that of the
engine at rest, and of the parts listed here; only a step and an evaluation need more. Where rounds
overlap with local steps, offers and means are made beside a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.config import RunConfig
from swarm.model.cost import expert_wire_bytes, shared_wire_bytes
from swarm.train.memory import (
    evaluation_bytes,
    expert_matrix_bytes,
    largest_tensor_bytes,
    moving_bytes,
    need_of,
    owned_layer_bytes,
)
from swarm.train.options import EngineKind, EngineOptions
from swarm.train.sizes import Need

PROCESS_BYTES = 0.39e9
"""Interpreter, libraries and network of a peer; the libp2p daemon is a process of its own."""
CUDA_BYTES = 2.5e9
"""Host memory of CUDA's libraries and context besides; not measured by this project."""
SLACK_BYTES = 0.08e9
"""Bytes that allocators keep of chunks that are gone."""
KEPT_MATRICES = 10
"""Expert matrices in fp32 that a CPU's process holds once it has computed, whatever the number of
experts: measured by `scripts/bench_real_size.py`, with matrices of 0.4 and of 47 MB."""
# Held by codecs, merge, network, private state and export; tests compare with their constants.
CHUNK_ELEMENTS = 2**20
MERGE_COLUMNS = 2**16
PIECE_BYTES = 4 * 2**20
FLOWS_PER_PEER = 2
FLOWS = 64
SAVED_CHUNK_BYTES = 16 * 2**20
SAVED_CHUNKS = 8
"""Copied, hashed, waiting to be written."""
SHARD_BYTES = 0.8e9
"""Of an export: each of its files is in memory twice."""


@dataclass(frozen=True)
class HostPeaks:
    """Peaks of the process in host memory, in bytes.

    Attributes:
        training: local steps.
        offering: own values and the private state go to the disk.
        averaging: means of others' values, blobs that arrive.
        merging: the merge of similar experts, computed while nothing is trained.
        adopting: agreed values come into the engine, with moments of experts that are new; the
            most where all experts are exchanged for others.
        validating: the held-out loss of the agreed values.
        leaving: moments go to the disk for their next owners.
        exporting: swarm-export; no engine.
    """

    training: float
    offering: float
    averaging: float
    merging: float
    adopting: float
    validating: float
    leaving: float
    exporting: float

    @property
    def running_a_round(self) -> float:
        """The most of all phases between two trainings, a merge apart."""
        return max(self.offering, self.averaging, self.adopting, self.validating, self.leaving)

    @property
    def highest(self) -> float:
        """The most of all that a peer does."""
        return max(self.training, self.running_a_round, self.merging)


def host_peaks(
    run: RunConfig,
    num_owned: int,
    options: EngineOptions,
    *,
    num_peers: int,
    need: Need | None = None,
) -> HostPeaks:
    """The peaks of a peer that owns so many experts, in a swarm of so many peers.

    With several workers, of one of them; `need` is that of the engine, if it is known already.

    Letters: c bytes of an element on the wire, C elements of a chunk, n values behind a mean.
    """
    need = need or need_of(run, num_owned, options)
    on_host = options.device == "cpu"
    experts, chunk, matrix = run.model.num_experts, CHUNK_ELEMENTS, expert_matrix_bytes(run.model)
    rest = PROCESS_BYTES + SLACK_BYTES + need.host
    rest += need.device_state + KEPT_MATRICES * matrix if on_host else CUDA_BYTES
    rest += min(FLOWS_PER_PEER * max(1, num_peers - 1), FLOWS) * PIECE_BYTES
    donors = experts * MERGE_COLUMNS * (16 + 4) + 64 * experts**2
    # The mean of n: a chunk of each, their sum in fp32 twice where they are weighted, the result.
    mean = chunk * (4 * num_peers + 4 + 4 + 4)
    # The resident engine sets the owned masters of a layer aside while the agreed values stand in.
    is_resident = options.kind is EngineKind.RESIDENT
    aside = owned_layer_bytes(run.model, num_owned) if is_resident else 0
    moving = moving_bytes(run, num_owned, options) if is_resident and on_host else 0
    evaluating = (evaluation_bytes(run, num_owned, options) + aside if on_host else 0) + matrix
    largest = largest_tensor_bytes(run.model)
    shard = min(SHARD_BYTES, shared_wire_bytes(run) + expert_wire_bytes(run))
    offer = 12 * chunk + SAVED_CHUNKS * SAVED_CHUNK_BYTES
    step = need.activations + need.crowding if on_host else 0
    return HostPeaks(
        training=rest + step + (offer + mean if run.round.overlap == "round" else 0),
        offering=rest + offer,
        averaging=rest + mean,
        merging=rest + max(donors, (16 + 2 * 4) * chunk),
        adopting=rest + max(moving, max(matrix, 24 * chunk) + 6 * matrix),
        validating=rest + evaluating,
        leaving=rest + 3 * matrix,
        exporting=PROCESS_BYTES + SLACK_BYTES + largest + 2 * max(shard, largest),
    )
