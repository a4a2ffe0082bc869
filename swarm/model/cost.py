"""The cost of a run: parameters, bytes of memory, disk and wire, operations. Pure arithmetic.

N peers, R owners per expert, E experts, K experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from swarm.codings import elements_bytes
from swarm.config import ModelConfig, RunConfig
from swarm.experts import ELEMENT_BYTES, expert_shapes, is_matrix, shared_shapes, travels_exactly

TRAINED_BYTES = 16
"""Bytes of an fp32 master, a gradient and AdamW's two moments, per trained parameter."""
FLOAT_BYTES = 4
"""Bytes of an fp32 master, gradient or moment."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    Attributes:
        shared: embedding, head, attention, norms and routers.
        attention: the part of `shared` that is matrices of attention.
        per_expert: parameters of one expert in all layers, all of them in matrices.
        num_experts: number of experts.
    """

    shared: int
    attention: int
    per_expert: int
    num_experts: int

    @property
    def experts(self) -> int:
        """Parameters of all experts."""
        return self.per_expert * self.num_experts

    @property
    def total(self) -> int:
        """Parameters of the model."""
        return self.shared + self.experts


@lru_cache(maxsize=64)
def parameters(model: ModelConfig) -> Parameters:
    """Counts a model's parameters from the shapes of its tensors."""
    shared = {name: math.prod(shape) for name, shape in shared_shapes(model).items()}
    attention = sum(size for name, size in shared.items() if is_matrix(name))
    per_expert = sum(math.prod(shape) for shape in expert_shapes(model, 0).values())
    return Parameters(sum(shared.values()), attention, per_expert, model.num_experts)


def owned_per_peer(run: RunConfig, num_peers: int) -> int:
    """Experts of the peer that owns most: E * R / N, rounded up, with equal capacities."""
    owners = min(run.ownership.owners_per_expert, num_peers)
    return -(-run.model.num_experts * owners // num_peers)


def trained_per_peer(run: RunConfig, num_peers: int) -> int:
    """Parameters that a peer trains: of the shared tensors and its experts."""
    counted = parameters(run.model)
    return counted.shared + owned_per_peer(run, num_peers) * counted.per_expert


def state_bytes_per_peer(run: RunConfig, num_peers: int) -> int:
    """Training state in memory: masters, gradients, moments and the frozen experts.

    16 bytes per trained parameter, 12 of a matrix under Muon. Activations, buffers of a running
    round and the process itself are not included.
    Source: fp32 AdamW; ZeRO (arXiv 1910.02054, section 3.1) counts in the same way.
    """
    trained = trained_per_peer(run, num_peers)
    frozen = parameters(run.model).total - trained
    private = private_bytes(run, owned_per_peer(run, num_peers))
    return private + FLOAT_BYTES * trained + ELEMENT_BYTES[run.train.frozen] * frozen


def private_bytes(run: RunConfig, num_owned: float) -> int:
    """Bytes of masters and moments in a private state, in fp32, for `num_owned` experts.

    12 bytes per trained parameter, 8 of a matrix under Muon, which has one moment.
    """
    counted = parameters(run.model)
    owned = num_owned * counted.per_expert
    single = counted.attention + owned if run.optimizer.kind == "muon" else 0
    return round(FLOAT_BYTES * (3 * (counted.shared + owned) - single))


def full_state_bytes(model: ModelConfig) -> int:
    """Training state of a machine that trains everything: 16 bytes per parameter."""
    return TRAINED_BYTES * parameters(model).total


@lru_cache(maxsize=64)
def exact_elements(model: ModelConfig) -> int:
    """Elements of the norms and routers, which always travel in fp32."""
    shapes = shared_shapes(model).items()
    return sum(math.prod(shape) for name, shape in shapes if travels_exactly(name))


def shared_wire_bytes(run: RunConfig) -> int:
    """Bytes of the shared tensors as blobs. Norms and routers are small, and always fp32."""
    exact = exact_elements(run.model)
    others = parameters(run.model).shared - exact
    return exact * ELEMENT_BYTES["fp32"] + others * ELEMENT_BYTES[run.wire.shared]


def expert_wire_bytes(run: RunConfig) -> int:
    """Bytes of all experts as blobs."""
    return parameters(run.model).experts * ELEMENT_BYTES[run.wire.experts]


def bytes_sent_per_peer_per_round(run: RunConfig, num_peers: int) -> float:
    """Blob bytes that a peer sends, mean over peers and rounds: (2 S (N-1) + X (N+R-2)) / N.

    S are the bytes of the shared tensors, or of their deltas. Every peer sends each part to the
    part's reducer, which sends the mean to all peers: 2 (N-1) times in all. X are the bytes of the
    experts. R-1 owners send their values to the owner that averages, which sends the result to the
    N-1 other peers. A peer receives as many bytes as it sends. X counts once in
    `round.experts_every` rounds, S once in `round.shared_every`. With `round.stagger` every round
    moves the same share. Otherwise rounds with experts move more than the mean. Control messages,
    joiners and repeats are not counted.
    """
    owners = min(run.ownership.owners_per_expert, num_peers)
    shared = 2 * _moved_shared_bytes(run) * (num_peers - 1) / run.round.shared_every
    experts = _moved_expert_bytes(run) * (num_peers + owners - 2) / run.round.experts_every
    return (shared + max(experts, 0)) / num_peers


def _moved_shared_bytes(run: RunConfig) -> int:
    """Bytes of the shared tensors of a round. With a coding, the bytes of their deltas.

    Counted as one part. Each further part fills up a block.
    """
    if run.wire.shared_coding == "none":
        return shared_wire_bytes(run)
    uncoded = exact_elements(run.model)
    coded = parameters(run.model).shared - uncoded
    return uncoded * ELEMENT_BYTES["fp32"] + elements_bytes(coded, run.wire.shared_coding)


def _moved_expert_bytes(run: RunConfig) -> int:
    """Bytes of all experts of a round. With a coding, the bytes of their deltas."""
    if run.wire.experts_coding == "none":
        return expert_wire_bytes(run)
    each = elements_bytes(parameters(run.model).per_expert, run.wire.experts_coding)
    return each * run.model.num_experts


def handover_bytes(run: RunConfig, num_peers: int) -> int:
    """Bytes that a leaving peer hands over: the moments of its experts, in fp32.

    If the wire rounds experts and has no deltas of them, masters are included: 4 bytes per
    parameter more than the moments' 8, or Muon's 4.
    """
    has_no_masters = run.wire.experts == "fp32" or run.wire.experts_coding != "none"
    moments = 1 if run.optimizer.kind == "muon" else 2
    each = FLOAT_BYTES * (moments if has_no_masters else moments + 1)
    return each * parameters(run.model).per_expert * owned_per_peer(run, num_peers)


def disk_bytes(run: RunConfig, num_peers: int) -> int:
    """Largest size of a state directory, without the corpus and the event log.

    It holds the blobs of the newest manifest, of the previous and of an accepted manifest, and
    offered blobs. It also holds three private states (masters and moments), because the newest and
    the previous state are kept while the next is written. While an engine steps down, it holds the
    engine's state with its frozen experts instead. If local progress of shared tensors outlives a
    round, it is stored in fp32 while the held-out loss is measured.
    """
    counted = parameters(run.model)
    shared, experts = shared_wire_bytes(run), expert_wire_bytes(run)
    offered = shared + experts * owned_per_peer(run, num_peers) // counted.num_experts
    trained = trained_per_peer(run, num_peers)
    private = 3 * private_bytes(run, owned_per_peer(run, num_peers))
    frozen = ELEMENT_BYTES[run.train.frozen] * (counted.total - trained)
    outlives = run.wire.shared_coding != "none" or run.round.shared_every > 1
    aside = ELEMENT_BYTES["fp32"] * counted.shared if outlives else 0
    return 3 * (shared + experts) + offered + private + frozen + aside


def forward_flops_per_token(run: RunConfig) -> int:
    """Operations of a forward pass per token. A multiplication and an addition count as two.

    Counts 2 per parameter of every matrix that a token passes (its K experts and the head, not the
    embedding), and 4 * heads * head size * half the sequence per layer for causal attention. Norms,
    rotation and softmax are not counted. Source: PaLM (arXiv 2204.02311, appendix B).
    """
    model = run.model
    attention = 2 * run.data.sequence_length * model.num_attention_heads * model.dim_per_head
    return 2 * _met_shared(model) + 2 * _met_experts(model) + attention * model.num_hidden_layers


def step_flops_per_token(run: RunConfig, num_peers: int) -> float:
    """Operations of forward and backward per token.

    Gradients of activations cost as much as the forward pass (attention twice, because its products
    have two operands each). Gradients of weights cost as much as the products of trained weights.
    Frozen experts have no such gradients. Tokens are assumed to spread evenly over the experts.
    """
    return step_flops_with(run, owned_per_peer(run, num_peers))


def step_flops_with(run: RunConfig, num_owned: int) -> float:
    """Like `step_flops_per_token`, for a peer with this number of owned experts."""
    model = run.model
    forward = forward_flops_per_token(run)
    attention = forward - 2 * _met_shared(model) - 2 * _met_experts(model)
    share = num_owned / model.num_experts
    weights = 2 * _met_shared(model) + 2 * share * _met_experts(model)
    return 2 * forward + attention + weights


def head_step_flops(model: ModelConfig) -> float:
    """The operations of the head in a step: three products of a matrix that is always trained."""
    return 3 * 2 * model.vocab_size * model.hidden_size


def layer_step_flops(run: RunConfig, num_owned: int) -> float:
    """The operations of one layer in a step. The embedding has none."""
    layers = step_flops_with(run, num_owned) - head_step_flops(run.model)
    return layers / run.model.num_hidden_layers


@lru_cache(maxsize=64)
def _met_shared(model: ModelConfig) -> int:
    embedding = model.vocab_size * model.hidden_size
    matrices = [shape for shape in shared_shapes(model).values() if len(shape) == 2]
    met = sum(math.prod(shape) for shape in matrices)
    return met if model.tie_word_embeddings else met - embedding


def _met_experts(model: ModelConfig) -> int:
    return model.num_experts_per_tok * parameters(model).per_expert


@dataclass(frozen=True)
class Cost:
    """A run's cost for a peer. Each figure is the result of the function with the figure's name."""

    parameters_total: int
    parameters_shared: int
    parameters_per_expert: int
    parameters_trained_per_peer: int
    state_bytes_per_peer: int
    full_state_bytes: int
    disk_bytes: int
    bytes_sent_per_peer_per_round: float
    handover_bytes: int
    step_flops_per_token: float


def cost_of(run: RunConfig, num_peers: int) -> Cost:
    """All figures for a run with this number of peers."""
    counted = parameters(run.model)
    return Cost(
        parameters_total=counted.total,
        parameters_shared=counted.shared,
        parameters_per_expert=counted.per_expert,
        parameters_trained_per_peer=trained_per_peer(run, num_peers),
        state_bytes_per_peer=state_bytes_per_peer(run, num_peers),
        full_state_bytes=full_state_bytes(run.model),
        disk_bytes=disk_bytes(run, num_peers),
        bytes_sent_per_peer_per_round=bytes_sent_per_peer_per_round(run, num_peers),
        handover_bytes=handover_bytes(run, num_peers),
        step_flops_per_token=step_flops_per_token(run, num_peers),
    )
