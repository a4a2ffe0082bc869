"""What a peer's process holds in host memory, phase by phase, in bytes. Pure arithmetic.

Every phase of a round works in chunks: values go from the engine to packs on the disk and back a
few MiB at a time, so a phase needs little beside the engine. Its peak is therefore that of the
engine at rest, and of what is listed here; only a step and an evaluation need more.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.config import RunConfig
from swarm.train.memory import evaluation_bytes, expert_matrix_bytes, largest_tensor_bytes, need_of
from swarm.train.options import EngineOptions

PROCESS_BYTES = 0.37e9
"""Interpreter, libraries and network of a peer; the libp2p daemon is a process of its own."""
CUDA_BYTES = 2.5e9
"""What CUDA's libraries and context take of host memory besides; not measured by this project."""
SLACK_BYTES = 0.08e9
"""What allocators keep of chunks that are gone."""
# What the codecs, the merge and the network hold; tests compare these with their constants.
CHUNK_BYTES = 4 * 2**20
MERGE_COLUMNS = 2**16
PIECE_BYTES = 4 * 2**20
SAVING_BYTES = 10 * 16 * 2**20
"""Chunks of the private state between the threads that copy, hash and write them."""
FLOWS_PER_PEER = 2
FLOWS = 64


@dataclass(frozen=True)
class HostPeaks:
    """Peaks of the process in host memory, in bytes.

    Attributes:
        training: local steps.
        offering: own values and the private state go to the disk.
        averaging: means of others' values, blobs that arrive.
        merging: the merge of similar experts, computed while nothing is trained.
        adopting: agreed values come into the engine.
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
    run: RunConfig, num_owned: int, options: EngineOptions, *, num_peers: int
) -> HostPeaks:
    """The peaks of a peer that owns so many experts, in a swarm of so many peers."""
    need = need_of(run, num_owned, options)
    on_host = options.device == "cpu"
    rest = PROCESS_BYTES + SLACK_BYTES + need.host
    rest += need.device_state if on_host else CUDA_BYTES
    arriving = min(FLOWS_PER_PEER * max(1, num_peers - 1), FLOWS) * PIECE_BYTES
    # A mean has a chunk of each source, their fp32 sum and the encoded result.
    mean = (num_peers + 2) * CHUNK_BYTES
    merge = run.model.num_experts * MERGE_COLUMNS * (8 + 8 + 4) + 6 * CHUNK_BYTES
    matrix = expert_matrix_bytes(run.model)
    evaluating = evaluation_bytes(run, options) if on_host else 0.0
    return HostPeaks(
        training=rest + (need.activations if on_host else 0) + arriving,
        offering=rest + arriving + SAVING_BYTES,
        averaging=rest + arriving + mean,
        merging=rest + arriving + merge,
        adopting=rest + arriving + 2 * matrix,
        validating=rest + arriving + evaluating,
        leaving=rest + arriving + 3 * matrix,
        exporting=PROCESS_BYTES + arriving + 2 * largest_tensor_bytes(run.model),
    )
